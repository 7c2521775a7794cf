"""What a scaled dot compiles to, and what happens where no kernel takes it."""

from __future__ import annotations

import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8 import _ffi, _lowering

QW = jaxfp8.quantize(jnp.ones((32, 16)), channelwise_axes=(1,))
X = jnp.ones((4, 32), jnp.bfloat16)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No lowering is remembered, and no warning that it gave."""
    monkeypatch.setattr(_lowering, "_WARNED", set())
    jax.clear_caches()


def lowered(*platforms: str) -> str:
    return jax.jit(jaxfp8.matmul).trace(X, QW).lower(lowering_platforms=platforms).as_text()


def test_cpu_lowers_to_the_custom_call_alone() -> None:
    text = lowered("cpu")
    assert "custom_call @jaxfp8_scaled_dot" in text
    assert "dot_general" not in text


@pytest.mark.parametrize("platform", ["tpu", "rocm", "cuda"])
def test_platforms_without_kernels_compute_the_reference_and_say_so(platform) -> None:
    with pytest.warns(jaxfp8.FallbackWarning, match=platform):
        text = lowered(platform)
    assert "jaxfp8_scaled_dot" not in text
    assert "dot_general" in text


def test_the_warning_comes_once_per_reason() -> None:
    with pytest.warns(jaxfp8.FallbackWarning):
        lowered("tpu")
    jax.clear_caches()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered("tpu")


def test_strict_makes_it_an_error() -> None:
    with jaxfp8.strict(), pytest.raises(jaxfp8.UnsupportedError, match="no TPU kernels"):
        lowered("tpu")


def test_strict_ends_with_its_context() -> None:
    with jaxfp8.strict():
        assert _lowering.is_strict()
    assert not _lowering.is_strict()


class TestWithoutTheLibrary:
    @pytest.fixture(autouse=True)
    def no_library(self, monkeypatch):
        monkeypatch.setattr(_ffi, "why_unavailable", lambda platform: "the library is not there")
        yield
        jax.clear_caches()

    def test_strict_says_why(self) -> None:
        with (
            jaxfp8.strict(),
            pytest.raises(jaxfp8.UnsupportedError, match="the library is not there"),
        ):
            jaxfp8.matmul(X, QW)

    def test_otherwise_the_reference_is_right_and_warns(self) -> None:
        with pytest.warns(jaxfp8.FallbackWarning, match="the library is not there"):
            y = jaxfp8.matmul(X, QW)
        np.testing.assert_array_equal(np.asarray(y, np.float32), 32)


# One weight of 64 MB in FP8; the process prints how much larger its peak memory became, and how
# much XLA plans to allocate for intermediates.
_MEMORY = """
import resource
import sys

import jax, jax.numpy as jnp, numpy as np
import jaxfp8

n = 8192
w = jax.device_put(np.full((n, n), 0x38, np.uint8).view(jnp.float8_e4m3fn))
small = jaxfp8.QArray(w[:256, :256], jnp.ones((1, 256)))
x = jnp.ones((int(sys.argv[1]), n), jnp.bfloat16)
jaxfp8.matmul(x[:, :256], small).block_until_ready()
compiled = jax.jit({function}).lower(x, w, jnp.ones((1, n))).compile()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
y = compiled(x, w, jnp.ones((1, n))).block_until_ready()
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert np.all(np.asarray(y, np.float32) == n), y
print(grown * 1024 - y.nbytes, compiled.memory_analysis().temp_size_in_bytes)
"""
FUNCTIONS = {
    "product": "lambda x, w, s: jaxfp8.matmul(x, jaxfp8.QArray(w, s))",
    "transposed": "lambda x, w, s: jaxfp8.einsum('mk,nk->mn', x, jaxfp8.QArray(w, s))",
    "rewritten": "jaxfp8.rewrite(lambda x, w, s: x @ (w.astype(x.dtype) * s.astype(x.dtype)))",
    "rewritten, transposed": (
        "jaxfp8.rewrite(lambda x, w, s: x @ (w.astype(jnp.float32) * s).T.astype(x.dtype))"
    ),
}


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_large_weight_is_never_widened(function, rows) -> None:
    code = _MEMORY.replace("{function}", function)
    out = subprocess.run(
        [sys.executable, "-c", code, str(rows)], capture_output=True, text=True, check=True
    )
    grown, temp = map(int, out.stdout.split())
    assert grown < 0.1 * 2**26
    assert temp < 0.1 * 2**26
