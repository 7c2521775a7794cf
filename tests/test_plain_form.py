"""Programs for GPUs from a machine without the CUDA library: a form that every path takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8._call.gpu import asked, canonical
from jaxfp8._call.library import ffi
from jaxfp8._call.ops import joint
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_library(monkeypatch):
    found = ffi.library_or_none
    monkeypatch.setattr(ffi, "library_or_none", lambda p: None if p == "cuda" else found(p))
    jax.clear_caches()


def side(shape, depth, batch=(), dtype="float8_e4m3fn"):
    tiles = tuple(shape[axis] if axis == depth else 1 for axis in range(len(shape)))
    return OperandSpec(
        dtype=dtype,
        shape=shape,
        contracting=(depth,),
        batch=batch,
        tiles=tiles,
        scale=dtype.startswith("float8"),
        zero_point=False,
    )


def product(lhs, rhs):
    return ScaledDotSpec(lhs=lhs, rhs=rhs, epilogue=EpilogueSpec(out_dtype="bfloat16"))


def test_a_cache_by_token_is_transposed():
    queries = side((3, 4, 2, 64), 3, (0, 1), "bfloat16")
    form = canonical.canonical(product(queries, side((3, 50, 4, 64), 3, (0, 2)))).spec
    assert (form.rhs.shape, form.rhs.batch) == ((12, 50, 64), (0,))


def test_scales_are_float32():
    x, q = jnp.ones((3, 256), jnp.bfloat16), jnp.ones((256, 128), jnp.float8_e4m3fn)
    rewritten = jaxfp8.rewrite(lambda x, q: x @ (q.astype(x.dtype) * jnp.bfloat16(0.5)))
    text = jax.jit(rewritten).trace(x, q).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = [line for line in text.splitlines() if "@jaxfp8_scaled_dot" in line]
    operands = call.rpartition(" : ")[2].partition("->")[0]
    assert "xf32>" in operands and operands.count("bf16") == 1, "the scale, and the rows"


def test_no_products_join():
    flat = product(side((3, 256), 1, dtype="bfloat16"), side((128, 256), 1))
    assert joint.what_is_shared(flat) is None


@pytest.mark.parametrize(("rows", "least"), [(1, 33 * MIB), (4096, 33 * MIB + 2 * 4096 * 4096)])
def test_scratch_has_one_bound(rows, least):
    form = canonical.canonical(product(side((rows, 4096), 1), side((4096, 4096), 1))).spec
    scratch = asked.workspace_bytes(form, compute_capability=90)
    assert least < scratch <= 289 * MIB
    assert scratch == asked.workspace_bytes(form, "general")


def test_scratch_stays_below_the_bound():
    huge = side((1 << 16, 1 << 16), 1)
    form = canonical.canonical(product(huge, huge)).spec
    assert asked.workspace_bytes(form) == 289 * MIB


def test_the_cpu_computes_as_before():
    x = np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32)
    weight = jaxfp8.quantize(jnp.asarray(x.T @ x), channelwise_axes=(1,))
    assert jaxfp8.matmul(jnp.asarray(x), weight).shape == (3, 256)
