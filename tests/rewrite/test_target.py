"""`Target`: `explain` and `rewrite` decide for a machine that is not here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewrite.support import BF16, E4M3, F32, count, left_alone

import jaxfp8
from jaxfp8._call.library import targets

H100, OLD = jaxfp8.Target("cuda", 90), jaxfp8.Target("cuda", 75)


def product(x: Any, q: Any) -> Any:
    return x @ (q.astype(x.dtype) * jnp.asarray(0.5, x.dtype))


def args(rows: int = 16, k: int = 1024, n: int = 512) -> tuple[Any, Any]:
    return jnp.ones((rows, k), BF16), jnp.ones((k, n), E4M3)


@left_alone
def test_a_gpu_without_kernels_is_told_by_its_capability() -> None:
    (site,) = jaxfp8.explain(product, target=OLD)(*args()).missed
    assert "compute capability 7.5, and the kernels need 8.0" in site.reason
    assert count(jaxfp8.rewrite(product, target=OLD), *args()) == 0
    assert count(jaxfp8.rewrite(product), *args()) == 1


def test_the_row_names_what_a_hopper_gpu_leaves_to_xla() -> None:
    (site,) = jaxfp8.explain(product, target=H100)(*args()).matched
    assert site.kernels["cuda"] == "xla" and site.platforms["cuda"] is None


@left_alone
@pytest.mark.parametrize("transform", [jax.grad, jax.value_and_grad], ids=lambda f: f.__name__)
def test_derivatives_are_decided_for_the_target(transform: Any) -> None:
    def loss(x: Any, q: Any) -> Any:
        return product(x, q).astype(F32).sum()

    tpu = jaxfp8.rewrite(loss, target=jaxfp8.Target("tpu"))
    assert count(transform(jaxfp8.rewrite(loss)), *args()) > 0
    assert count(transform(tpu), *args()) == 0


def test_a_program_for_another_machine_is_right_here() -> None:
    x, q = args(3, 32, 8)
    y = jaxfp8.rewrite(product, target=H100)(x, q)
    np.testing.assert_array_equal(np.asarray(y, np.float32), 16)


def test_gpu_is_another_name_of_cuda() -> None:
    assert jaxfp8.Target("gpu", 90) == H100


@pytest.mark.parametrize("chosen", [None, "cpu"], ids=["a device", "a name"])
def test_a_default_device_is_the_machine_at_hand(chosen: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert targets.platform() == "cuda"
    with jax.default_device(chosen or jax.devices("cpu")[0]):
        assert targets.platform() == "cpu"


def test_a_target_ends_with_its_decision() -> None:
    with pytest.raises(ZeroDivisionError), targets.deciding_for(H100):
        assert targets.platform() == "cuda" and targets.compute_capability() == 90
        raise ZeroDivisionError
    assert targets.given() is None


@pytest.mark.parametrize(
    ("platform", "capability", "expected"),
    [
        ("abacus", None, "`platform` is 'abacus', but needs to be one of cpu, cuda"),
        ("cpu", 90, "`capability` is 90, but needs to be a positive int, of a CUDA GPU"),
        ("cuda", -1, "`capability` is -1"),
        ("cuda", "9.0", "`capability` is '9.0'.*such as 90 for 9.0"),
    ],
    ids=["platform", "cpu", "negative", "text"],
)
def test_a_wrong_target_is_refused(platform: str, capability: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        jaxfp8.Target(platform, capability)


@pytest.mark.parametrize("operation", [jaxfp8.rewrite, jaxfp8.explain])
def test_what_is_no_target_is_refused_at_once(operation: Any) -> None:
    with pytest.raises(TypeError, match=r"`target` is .cuda., but needs to be a `jaxfp8\.Target`"):
        operation(product, target="cuda")
