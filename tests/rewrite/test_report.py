"""The report accounts for every dot: where it is, what it is, what became of it and why."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import pytest
from rewrite.reported import args as _args
from rewrite.reported import mixed
from rewrite.support import BF16, F32, Data

import jaxfp8
from jaxfp8._call.library import ffi
from jaxfp8.testing import assert_rewritten, kernel_calls


def _line(fun: Any, text: str) -> int:
    lines, start = inspect.getsourcelines(fun)
    return start + next(i for i, line in enumerate(lines) if text in line)


def test_rows_totals_and_the_uncounted() -> None:
    report = jaxfp8.explain(mixed)(*_args())
    assert (len(report.sites), len(report.matched), len(report.missed)) == (2, 1, 1)
    assert report.others == 1
    assert report.widened_bytes == 32 * 24 * 4


def test_row_names_the_line_and_function_of_the_user() -> None:
    report = jaxfp8.explain(mixed)(*_args())
    site = report.matched[0]
    assert (site.file, site.function) == (inspect.getfile(mixed), "mixed")
    assert site.line == _line(mixed, "relu")


def test_row_describes_the_dot() -> None:
    site = jaxfp8.explain(mixed)(*_args()).matched[0]
    assert site.dims == (1, 5, 24, 32)
    assert str(site.lhs) == "float32[5,32]"
    assert str(site.rhs) == "float8_e4m3fn[32,24] (per axis 1)"
    assert site.epilogue == "scale, relu -> float32"


def _along_k(x: Any, q: Any, s: Any) -> Any:
    return x @ (q.astype(F32) * s)


def _by_blocks(x: Any, q: Any, s: Any) -> Any:
    return x @ (q.astype(F32) * jnp.repeat(s, 32 // s.shape[0], axis=0))


@pytest.mark.parametrize(
    ("fun", "scale", "words", "note"),
    [
        (
            _along_k,
            (32, 1),
            "per contracted axis 0",
            "the contracted axis 0 of the right operand, so it cannot be taken out of the sum: "
            "each value is scaled as it is decoded and summed in float32, .* if it is meant for "
            r"axis 1, its shape is \[1, 24\]$",
        ),
        (_along_k, (1, 24), "per axis 1", "^$"),
        (_by_blocks, (4, 24), "blocks 8x1", "each value is scaled .*have faster sums$"),
        (
            _by_blocks,
            (2, 24),
            "blocks 16x1",
            "tiles of 16 along the contracted axis 0 .* into pieces of 16$",
        ),
        (
            lambda x, q, s: x @ (q.astype(F32) * s * jnp.exp(s[:24, 0])),
            (32, 1),
            "per axis 1",
            "^a scale that changes along the contracted axis 1 of the left operand is multiplied",
        ),
    ],
    ids=["along k", "by column", "short blocks", "blocks", "handed over"],
)
def test_row_says_what_a_scale_along_the_contracted_axis_costs(
    fun: Any, scale: tuple[int, ...], words: str, note: str
) -> None:
    data = Data()
    args = data.normal(5, 32), data.bits8(32, 24), data.scale(*scale)
    report = jaxfp8.explain(fun)(*args)
    (site,) = report.matched
    assert site.rhs.scale == words
    assert re.search(note, site.note)
    assert json.loads(report.to_json())["sites"][0]["note"] == site.note
    for shown in (str(report), report.to_html()):
        assert " ".join(site.note.split()[:3]) in " ".join(shown.split())


def test_call_as_it_stands_says_what_its_scale_costs() -> None:
    data = Data()
    args = data.normal(5, 32), data.bits8(32, 24), data.scale(32, 1)
    (call,) = jaxfp8.explain(jaxfp8.rewrite(_along_k))(*args).calls
    assert (call.rhs.scale, "contracted axis 0" in call.note) == ("per contracted axis 0", True)


def test_miss_names_the_operation_that_ended_the_fact_and_its_line() -> None:
    site = jaxfp8.explain(mixed)(*_args()).missed[0]
    assert "`sin`" in site.reason
    assert "stays wide" in site.remedy
    assert site.ended_at == f"{inspect.getfile(mixed)}:{_line(mixed, 'jnp.sin')}"


def test_row_says_where_there_are_kernels() -> None:
    platforms = jaxfp8.explain(mixed)(*_args()).matched[0].platforms
    assert platforms["cpu"] is None
    assert "cuda" in platforms


def test_report_needs_no_arrays() -> None:
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in _args()]
    assert len(jaxfp8.explain(mixed)(*shapes).matched) == 1


def test_row_names_the_kernel_that_the_library_routes_the_product_to() -> None:
    kernels = jaxfp8.explain(mixed)(*_args()).matched[0].kernels
    assert kernels["cpu"] in ffi.available_kernels()
    before = kernel_calls()[kernels["cpu"]]
    jax.block_until_ready(jaxfp8.rewrite(mixed)(*_args()))
    assert kernel_calls()[kernels["cpu"]] == before + 1


def test_row_of_a_library_holds_the_line_of_the_user_and_that_of_the_library() -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any, q: Any) -> Any:
            kernel = jnp.sin(q.astype(F32))
            return nn.Dense(24, use_bias=False, kernel_init=lambda *_: kernel)(x)

    site = jaxfp8.explain(Model().init_with_output)(jax.random.key(0), *_args()[:2]).missed[0]
    assert (site.file, site.line) == (__file__, _line(Model.__call__, "nn.Dense"))
    assert re.search(r"flax/linen/linear\.py:\d+ Dense\.__call__$", site.library)
    assert site.path.endswith("Model/Dense_0")


def test_report_follows_facts_into_loops() -> None:
    def f(x: Any, q: Any) -> Any:
        w = jnp.exp(q.astype(F32))
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=2)[0]

    data = Data()
    site = jaxfp8.explain(f)(data.normal(5, 32), data.bits8(32, 32)).missed[0]
    assert "`exp`" in site.reason


def test_path_is_the_named_scope() -> None:
    def f(x: Any, q: Any) -> Any:
        with jax.named_scope("layer_3"):
            return x @ q.astype(F32)

    assert jaxfp8.explain(f)(*_args()[:2]).matched[0].path.endswith("layer_3")


def test_assert_rewritten_returns_the_report() -> None:
    assert len(assert_rewritten(mixed, *_args()).matched) == 1


def test_assert_rewritten_fails_with_the_report_as_its_message() -> None:
    with pytest.raises(AssertionError, match=r"1 dots of `mixed` are rewritten[\s\S]*`sin`"):
        assert_rewritten(mixed, *_args(), at_least=2)


def test_strict_names_the_place_the_reason_and_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"1 of 2 8-bit dots of `mixed`.*reported\.py:\d+: `sin`"):
        jaxfp8.rewrite(mixed, strict=True)(*_args())


def test_bf16_scales_on_both_sides_are_told_apart() -> None:
    def f(a: Any, b: Any, s: Any) -> Any:
        return (a.astype(BF16) * s[:, None].astype(BF16)) @ (b.astype(BF16) * 0.5)

    data = Data()
    site = jaxfp8.explain(f)(data.bits8(5, 32), data.bits8(32, 24), data.scale(5)).matched[0]
    assert (site.lhs.scale, site.rhs.scale) == ("per axis 0", "per tensor")


def test_dot_that_nobody_uses_is_neither_a_row_nor_a_miss() -> None:
    def f(x: Any, q: Any) -> Any:
        w = q.astype(F32)
        del_me = x @ w, x @ jnp.sin(w)
        return (x @ w * 2.0, del_me)[0]

    report = jaxfp8.explain(f)(*_args()[:2])
    assert (len(report.matched), len(report.missed)) == (1, 0)


def _missed(fun: Any, *args: Any) -> Any:
    """The one row of a function, a missed one, which strict refuses."""
    report = jaxfp8.explain(fun)(*args)
    assert (len(report.sites), len(report.missed)) == (1, 1)
    with pytest.raises(ValueError, match="strict, but 1 of 1"):
        jaxfp8.rewrite(fun, strict=True)(*args)
    return report.missed[0]


@pytest.mark.parametrize(
    ("scale", "words"),
    [((2, 1, 24), "per axis 0, 2"), ((2, 32, 1), "per axis 0 and contracted axis 1")],
)
def test_row_of_a_ragged_dot_names_the_axes_that_its_weight_sums_over(
    scale: tuple[int, ...], words: str
) -> None:
    def f(x: Any, q: Any, scale: Any, sizes: Any) -> Any:
        return jax.lax.ragged_dot(x, q.astype(F32) * scale, sizes)

    data = Data()
    args = data.normal(5, 32), data.bits8(2, 32, 24), data.scale(*scale), jnp.array([2, 3])
    (site,) = jaxfp8.explain(f)(*args).sites
    assert (site.lhs.contracted, site.rhs.contracted, site.rhs.scale) == ((1,), (1,), words)


def test_row_of_a_convolution_names_the_axes_that_its_weight_sums_over() -> None:
    def f(x: Any, q: Any, scale: Any) -> Any:
        return jax.lax.conv_general_dilated(x, q.astype(F32) * scale, (1, 1), "SAME")

    data = Data()
    args = data.normal(1, 8, 6, 6), data.bits8(3, 8, 3, 3), data.scale(1, 8, 1, 1)
    (site,) = jaxfp8.explain(f)(*args).sites
    assert (site.lhs.contracted, site.rhs.contracted) == ((1,), (1, 2, 3))
    assert site.rhs.scale == "per contracted axis 1"


def test_convolution_on_dequantized_values_is_missed() -> None:
    def f(x: Any, q: Any) -> Any:
        return jax.lax.conv_general_dilated(x, q.astype(F32) * 0.5, (1, 1), "SAME")

    data = Data()
    site = _missed(f, data.normal(1, 8, 6, 6), data.bits8(3, 8, 3, 3))
    assert "no kernel for convolutions" in site.reason
    assert site.dims == (1, 36, 3, 72)


def test_convolution_of_int8_as_it_is_widens_nothing_and_is_no_miss() -> None:
    def f(x: Any, q: Any) -> Any:
        return jax.lax.conv(x, q, (1, 1), "SAME", preferred_element_type=jnp.int32)

    data = Data()
    args = data.bits8(1, 8, 6, 6, dtype=jnp.int8), data.bits8(3, 8, 3, 3, dtype=jnp.int8)
    assert jaxfp8.explain(f)(*args).sites == ()


def test_scaled_dots_are_listed_as_such() -> None:
    def f(x: Any, q: Any) -> Any:
        return x @ (q.astype(F32) * 0.5)

    args = _args()[:2]
    report = jaxfp8.explain(jaxfp8.rewrite(f))(*args)
    assert (report.scaled, report.others, len(report.sites)) == (1, 0, 0)
    assert "1 already scaled dots" in " ".join(str(report).split())
    (call,), (site,) = report.calls, jaxfp8.explain(f)(*args).sites
    same = ("where", "function", "dims", "epilogue", "platforms", "kernels", "lhs", "rhs")
    assert all(getattr(call, name) == getattr(site, name) for name in same)
    assert call.status == "already" and not call.reason
    assert json.loads(report.to_json())["calls"][0]["kernels"] == call.kernels
    for shown in (str(report), report.to_html()):
        assert "already a kernel call" in shown and call.kernels["cpu"] in shown


def test_remedy_for_a_bound_is_to_drop_it_only_where_it_never_binds() -> None:
    def f(x: Any, q: Any) -> Any:
        return x @ jnp.maximum(q.astype(F32), 0.1)

    assert "never binds; else" in _missed(f, *_args()[:2]).remedy


def test_roll_through_a_tile_blames_the_slice() -> None:
    def f(x: Any, q: Any, s: Any) -> Any:
        w = (q.astype(F32).reshape(2, 16, 24) * s[:, None]).reshape(32, 24)
        return x @ jnp.roll(w, 3, axis=0)

    data = Data()
    site = _missed(f, data.normal(5, 32), data.bits8(32, 24), data.scale(2, 24))
    assert "`slice`" in site.reason
    assert "cuts through the tiles" in site.reason


def test_sharding_of_a_dequantized_weight_goes_with_it_and_that_of_a_product_stays() -> None:
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P(None, "a"))

    @jax.jit
    def f(x: Any, q: Any) -> Any:
        w = jax.lax.with_sharding_constraint(q.astype(F32) * 0.5, sharding)
        return jax.lax.with_sharding_constraint(x @ w, sharding)

    args = _args()[:2]
    assert len(jaxfp8.explain(f)(*args).matched) == 1
    assert str(jax.make_jaxpr(jaxfp8.rewrite(f))(*args)).count("sharding_constraint[") == 1


def test_symbolic_shapes_are_a_reason() -> None:
    (b,) = jax.export.symbolic_shape("b")
    q = _args()[1]
    report = jaxfp8.explain(lambda x: x @ q.astype(F32))(jax.ShapeDtypeStruct((b, 32), F32))
    assert report.missed[0].reason == "shapes are symbolic"
    assert "symbolic" in str(report)
    assert json.loads(report.to_json())["sites"][0]["dims"] == [1, -1, 24, 32]


@pytest.mark.parametrize("operation", [jaxfp8.rewrite, jaxfp8.explain])
@pytest.mark.parametrize("fun", [None, 3])
def test_what_is_no_function_is_refused_at_once(operation: Any, fun: Any) -> None:
    with pytest.raises(TypeError, match=f"`jaxfp8.{operation.__name__}`: `fun` is {fun}"):
        operation(fun)


@pytest.mark.parametrize(
    ("fun", "scale"),
    [
        (lambda x, q, s: (x @ q.astype(F32)) * s, "per axis 1"),
        (lambda x, q, s: (x @ q.T.astype(F32).T) * s, "per axis 1"),
        (lambda x, q, s: (x @ q.astype(F32)) * 0.5, "per tensor"),
        (lambda x, q, s: x @ q.astype(F32), "no scale"),
    ],
    ids=["by column", "transposed", "number", "none"],
)
def test_report_shows_the_scale_that_the_call_gets(fun: Callable[..., Any], scale: str) -> None:
    x, q, *_ = _args()
    report = jaxfp8.explain(fun)(x, q, jnp.arange(24.0))
    assert report.matched[0].rhs.scale == scale
