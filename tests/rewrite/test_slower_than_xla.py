"""On a GPU a product stays as written where XLA's program is faster than the only kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rewrite.support import BF16, E4M3, F16, F32, count, left_alone

import jaxfp8
from jaxfp8._call.library import ffi

pytestmark = left_alone
E8M0 = jnp.float8_e8m0fnu
INT8, UINT8 = jnp.int8, jnp.uint8


def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


GPU = jaxfp8.Target("cuda", 89)  # leaves no small product to XLA


def with_path(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Decide with a library that takes all problems to one path."""
    monkeypatch.setattr(ffi, "cuda_paths", lambda *_: {"other": "it cannot", path: ""})


def mx(x: Any, w: Any, of_x: Any, of_w: Any) -> Any:
    return jax.nn.scaled_matmul(x, w, of_x, of_w, preferred_element_type=BF16)


def written_out(x: Any, w: Any, scale: Any) -> Any:
    """Rows times a weight [N, K] with a scale for each group of K."""
    groups = w.astype(x.dtype).reshape(*scale.shape, -1) * scale.astype(x.dtype)[..., None]
    return x @ groups.reshape(w.shape).T


def shifted(x: Any, w: Any, scale: Any, zero: Any) -> Any:
    return x @ ((w.astype(jnp.int16) - zero.astype(jnp.int16)).astype(x.dtype) * scale).T


def of_both(x: Any, w: Any, of_x: Any, of_w: Any) -> Any:
    sides = (q.reshape(*s.shape, -1).astype(F32) * s[..., None] for q, s in ((x, of_x), (w, of_w)))
    left, right = sides
    return (left.reshape(x.shape).astype(BF16) @ right.reshape(w.shape).astype(BF16).T).astype(BF16)


Case = tuple[Callable[..., Any], tuple[Any, ...]]


def blocks_of_mx(rows: int = 64, n: int = 256, k: int = 1024) -> Case:
    codes = array((1, rows, k), E4M3), array((1, n, k), E4M3)
    return mx, (*codes, array((1, rows, k // 32), E8M0), array((1, n, k // 32), E8M0))


def weight(rows: int, x: Any = BF16, w: Any = E4M3, group: int = 4096, n: int = 4096) -> Case:
    k = 4096
    return written_out, (array((rows, k), x), array((n, k), w), array((n, k // group), F32))


def zero_points(rows: int, k: int = 4096) -> Case:
    small = array((4096, 1), BF16), array((4096, 1), UINT8)
    return shifted, (array((rows, k), BF16), array((4096, k), UINT8), *small)


def both(dtype: Any, group: int, rows: int = 4096) -> Case:
    k, n = 4096, 4096
    codes = array((rows, k), dtype), array((n, k), dtype)
    return of_both, (*codes, array((rows, k // group), F32), array((n, k // group), F32))


SLOW = {
    "FP8 by pieces": (
        "cublaslt_fp8",
        both(E4M3, 32, 32),
        "each tile of 32 along",
        "constant along",
    ),
    "weights by pieces": (
        "cublaslt_wide",
        weight(8, group=64),
        "each tile of 64 along",
        "constant along",
    ),
    "int8 by pieces": (
        "cublaslt_int8",
        both(INT8, 128, 32),
        "each tile of 128 along",
        "constant along",
    ),
    "float32": ("general", weight(8, x=F32), "no tensor cores", "to bfloat16"),
    "fine groups": ("general", weight(8, group=16), "no tensor cores", "constant along"),
    "many rows": ("sm80_w8a16", zero_points(257), "these are 257", "leave it"),
}


_NEEDS_LIBRARY = pytest.param("many rows", marks=pytest.mark.cuda_library)


@pytest.mark.parametrize("case", [*list(SLOW)[:-1], _NEEDS_LIBRARY])
def test_a_product_of_a_slow_path_stays_as_written(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, (fun, args), reason, remedy = SLOW[case]
    assert len(jaxfp8.explain(fun)(*args).matched) == 1  # on a CPU
    with_path(monkeypatch, path)
    (site,) = jaxfp8.explain(fun, target=GPU)(*args).missed
    assert f"`{path}`" in site.reason and reason in site.reason
    assert remedy in site.remedy
    assert count(jaxfp8.rewrite(fun, target=GPU), *args) == 0


FAST = {
    "MX, decoded": ("cublaslt_wide", blocks_of_mx()),
    "scales constant along K": ("cublaslt_fp8", both(E4M3, 4096)),
    "a decoded weight": ("cublaslt_wide", weight(512)),
    "few rows": ("sm80_w8a16", zero_points(256)),
}


_DECODED = pytest.param("MX, decoded", marks=pytest.mark.cuda_library)


@pytest.mark.parametrize("case", [_DECODED, *list(FAST)[1:]])
def test_a_product_of_another_path_is_a_call(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, (fun, args) = FAST[case]
    with_path(monkeypatch, path)
    assert len(jaxfp8.explain(fun, target=GPU)(*args).matched) == 1


def test_an_operation_is_computed_by_its_slow_path(monkeypatch: pytest.MonkeyPatch) -> None:
    with_path(monkeypatch, "general")
    w = jaxfp8.quantize(jnp.ones((64, 32)), channelwise_axes=(1,))
    with jaxfp8.strict():
        trace = jax.jit(jaxfp8.matmul).trace(jnp.ones((4, 64)), w)
        text = trace.lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @jaxfp8_scaled_dot" in text


def test_products_of_the_backward_pass_are_asked_for_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scale of a column lies along the sum of the gradient."""
    slow = lambda spec, *_: {"general" if spec.rhs.scale_varies else "sm80_w8a16": ""}  # noqa: E731
    monkeypatch.setattr(ffi, "cuda_paths", slow)

    def loss(x: Any, q: Any, s: Any) -> Any:
        return (x @ (q.astype(F16) * s)).astype(F32).sum()

    args = jnp.ones((4, 64), F16), jnp.ones((64, 32), E4M3), jnp.ones((1, 32), F16)
    rewritten = jaxfp8.rewrite(loss, target=GPU)
    assert count(rewritten, *args) == 1
    assert count(jax.grad(rewritten), *args) == 1


ON_CARDS = [
    ("MX", blocks_of_mx(4096, 4096, 4096), {80: True, 90: True, 120: False}),
    ("MX, a row", blocks_of_mx(1, 4096, 4096), {80: True, 90: True}),
    ("MX, float scales", both(E4M3, 32), {90: False}),
    ("groups of 32, a row", weight(1, group=32), {80: True, 90: True}),
    ("groups of 32", weight(512, group=32), {80: False, 90: True}),
    ("groups of 32, many rows", weight(4096, group=32), {80: False, 90: False}),
    ("groups of 64", weight(512, group=64), {80: False, 90: True}),
    ("groups of 16, a row", weight(1, group=16), {90: False}),
    ("groups of 128, few rows", weight(16, group=128), {80: True, 90: True}),
    ("float32", weight(16, x=F32), {80: False, 90: False}),
    ("float32, small", weight(16, x=F32, n=1024), {80: False, 90: True}),
    ("int8 in groups", both(INT8, 128), {90: False}),
    ("FP8 in groups", both(E4M3, 128), {89: False, 90: True}),
    ("FP8 by row", both(E4M3, 4096), {80: True, 89: True, 90: True, 120: True}),
    ("int8 by row", both(INT8, 4096), {80: True, 90: True}),
    ("weights", weight(4096), {80: True, 90: True}),
    ("zero points", zero_points(4096), {80: False, 90: True}),
    ("zero points, lines of no 16 bytes", zero_points(4096, 4100), {90: False}),
]


@pytest.mark.cuda_library
@pytest.mark.parametrize(
    ("case", "capability", "captured"),
    [
        pytest.param(case, capability, captured, id=f"{name}-sm_{capability}")
        for name, case, by_card in ON_CARDS
        for capability, captured in by_card.items()
    ],
)
def test_the_library_says_which_path_it_is(case: Case, capability: int, captured: bool) -> None:
    fun, args = case
    target = jaxfp8.Target("cuda", capability)
    assert bool(jaxfp8.explain(fun, target=target)(*args).matched) == captured


HOPPER = jaxfp8.Target("cuda", 90)


@pytest.mark.parametrize(
    ("made", "left"),
    [
        (weight(8, group=128, n=256), True),
        (weight(8, group=128, n=1024), False),
        (zero_points(8, k=512), True),
        (zero_points(8), False),
    ],
    ids=["groups, small", "groups, large", "zero points, small", "zero points, large"],
)
def test_a_small_product_is_no_call_on_hopper(
    made: Case, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_path(monkeypatch, "sm80_w8a16")
    fun, args = made
    assert len(jaxfp8.explain(fun, target=GPU)(*args).matched) == 1
    report = jaxfp8.explain(fun, target=HOPPER)(*args)
    assert len(report.missed) == left
    assert all("a call of its own" in site.reason for site in report.missed)


@pytest.mark.parametrize(("rows", "left"), [(16, False), (17, True)])
def test_many_rows_in_float32_are_left_to_tf32(rows: int, left: bool) -> None:
    def fun(x: Any, w: Any, scale: Any) -> Any:
        return x @ (w.astype(F32) * scale).T

    args = array((rows, 384), F32), array((1536, 384), E4M3), array((1536, 1), F32)
    report = jaxfp8.explain(fun, target=HOPPER)(*args)
    assert len(report.missed) == left
    assert all("TF32" in site.reason for site in report.missed)


@pytest.mark.parametrize(("rows", "left"), [(512, False), (513, True)])
def test_many_rows_beside_fine_scales_are_decoded_first(
    rows: int, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_path(monkeypatch, "sm90_gemm")
    fun, args = weight(rows, group=128)
    assert len(jaxfp8.explain(fun, target=HOPPER)(*args).missed) == left
