"""Every miss says which operation ended the fact, on which line, and what to change."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from rewrite.support import E4M3, F32, Data

import jaxfp8

_DATA = Data()
X = _DATA.normal(5, 32)
FP8, OTHER, SQUARE = _DATA.bits8(32, 24), _DATA.bits8(32, 24), _DATA.bits8(32, 32)
INT8, PLAIN = _DATA.bits8(32, 24, dtype=jnp.int8), _DATA.normal(32, 24)
UNSERVED = PLAIN.astype(jnp.float8_e4m3fnuz)
BLOCKS = _DATA.scale(2, 1, 24)

Function = Callable[[Any], Any]
MISSES: dict[str, tuple[Function, str, str, str]] = {}


def miss(ended_by: str, reason: str, remedy: str) -> Callable[[Function], Function]:
    """Register a function with one miss: the operation, and parts of its reason and remedy.

    The operation stands on the line that ends in "# here".
    """

    def register(fun: Function) -> Function:
        MISSES[fun.__name__] = (fun, ended_by, reason, remedy)
        return fun

    return register


def _wide(q: Any) -> Any:
    return q.astype(F32) * 0.5


@miss("sin", "`sin` is applied to the dequantized values, float32[32,24]", "quantize that")
def curve(x: Any) -> Any:
    w = jnp.sin(_wide(FP8))  # here
    return x @ w


@miss("max", "`max` is applied", "drop it if it never binds")
def bound(x: Any) -> Any:
    w = jnp.maximum(_wide(FP8), -1.0)  # here
    return x @ w


@miss("add", "float8_e4m3fn values, which have no zero point", "`x @ w + x @ m`")
def adapter(x: Any) -> Any:
    w = _wide(FP8) + PLAIN  # here
    return x @ w


@miss("add", "already scaled or shifted", "`x @ w + x @ m`")
def adapter_of_int8(x: Any) -> Any:
    w = _wide(INT8) + PLAIN  # here
    return x @ w


@miss("add", "already scaled or shifted", "subtract the zero point first")
def added_zero_point(x: Any) -> Any:
    w = _wide(INT8) + PLAIN[:1]  # here
    return x @ w


@miss(
    "convert_element_type", "from a dtype that no kernel has", "store the values in float8_e4m3fn"
)
def fnuz(x: Any) -> Any:
    w = UNSERVED.astype(F32)  # here
    return x @ w


@miss("select_n", "mixes dequantized values with others than zero", "select zero")
def select(x: Any) -> Any:
    w = jnp.where(PLAIN > 0, _wide(FP8), 1.0)  # here
    return x @ w


@miss("convert_element_type", "from float32 to int32 changes the values", "keep them in float32")
def truncated(x: Any) -> Any:
    w = _wide(FP8).astype(jnp.int32)  # here
    return x.astype(jnp.int32) @ w


@miss("mul", "broadcasts [1, 24] to [32, 24]", "before dequantizing")
def stretched(x: Any) -> Any:
    w = _wide(FP8[:1]) * PLAIN  # here
    return x @ w


@miss("sub", "not known to be whole numbers", "keep zero points in an integer dtype")
def float_zero_point(x: Any) -> Any:
    w = INT8.astype(F32) - PLAIN[0]  # here
    return x @ w


@miss("sub", "float8_e4m3fn values, which have no zero point", "`x @ w - x @ m`")
def shifted_fp8(x: Any) -> Any:
    w = _wide(FP8) - 0.5  # here
    return x @ w


@miss("sub", "already scaled or shifted", "`(q - z) * scale`")
def late_zero_point(x: Any) -> Any:
    w = _wide(INT8) - 3.0  # here
    return x @ w


@miss("sub", "subtracts dequantized values from others", "`x @ c - x @ w`")
def taken_away(x: Any) -> Any:
    w = 1.0 - _wide(FP8)  # here
    return x @ w


@miss(
    "dot_general", "the right operand, float8_e4m3fn[32, 24], varies", "by rows, columns or blocks"
)
def elementwise_scale(x: Any) -> Any:
    w = FP8.astype(F32) * PLAIN
    return x @ w  # here


@miss("gather", "fills rows out of bounds", 'mode="clip"')
def filled_rows(x: Any) -> Any:
    w = _wide(FP8).at[jnp.array([1, 2, 3])].get(mode="fill", fill_value=0.5)  # here
    return x[:, :3] @ w


@miss("gather", "looks 8-bit codes up in a table, float32[256]", "hold indices that are no codes")
def table_of_floats(x: Any) -> Any:
    w = PLAIN.ravel()[:256][INT8.view(jnp.uint8)]  # here
    return x @ w


@miss("gather", "looks 8-bit codes up in a table, float32[16]", "no kernel decodes by a table")
def table_taken_from(x: Any) -> Any:
    w = jnp.take(PLAIN.ravel()[:16], INT8.view(jnp.uint8) >> 4)  # here
    return x @ w


@miss("pad", "adds values other than zero", "pad with zero")
def padded_with_one(x: Any) -> Any:
    w = jnp.pad(_wide(FP8[1:]), ((1, 0), (0, 0)), constant_values=1.0)  # here
    return x @ w


@miss("concatenate", "joins 8-bit data with other data", "one 8-bit dtype")
def joined_with_others(x: Any) -> Any:
    w = jnp.concatenate([_wide(FP8[:16]), PLAIN[:16]])  # here
    return x @ w


@miss("slice", "[32, 24] to [16, 24] cuts through the tiles of a scale of shape [2, 24]", "whole")
def cut_tile(x: Any) -> Any:
    w = (FP8.astype(F32).reshape(2, 16, 24) * BLOCKS).reshape(32, 24)
    w = w[8:24]  # here
    return x[:, :16] @ w


@miss("dynamic_update_slice", "is applied", "stays wide")
def updated(x: Any) -> Any:
    w = lax.dynamic_update_slice(_wide(FP8), PLAIN[:2], (3, 0))  # here
    return x @ w


@miss("top_k", "is applied", "quantize that")
def several_outputs(x: Any) -> Any:
    w, _ = lax.top_k(_wide(FP8), 8)  # here
    return x @ w


@miss("scan", "carries dequantized values from one iteration to the next", "carry the 8-bit array")
def changed_in_a_loop(x: Any) -> Any:
    w = _wide(SQUARE)
    body = lambda i, c: (c[0] @ c[1], c[1] * 0.9)  # noqa: E731
    return lax.fori_loop(0, 3, body, (x, w))[0]  # here


@miss("cond", "`cond` returns dequantized values", "return the 8-bit array")
def chosen(x: Any) -> Any:
    w = lax.cond(x[0, 0] > 0, lambda: _wide(FP8), lambda: PLAIN)  # here
    return x @ w


@miss("exp", "is applied", "quantize that")
def inside_a_rematerialised_function(x: Any) -> Any:
    w = jax.checkpoint(lambda q: jnp.exp(_wide(q)))(FP8)  # here
    return x @ w


@miss("while", "is in the condition of a `while`", "compute it in the body")
def in_a_condition(x: Any) -> Any:
    w = _wide(SQUARE)
    return lax.while_loop(lambda c: (c @ w).sum() < 3, lambda c: c + 1, x)  # here


@miss("dot_general", "the output dtype is int8", "set preferred_element_type")
def eight_bit_sums(x: Any) -> Any:
    numbers = (((0,), (0,)), ((), ()))
    return lax.dot_general(INT8, INT8, numbers, preferred_element_type=jnp.int8)  # here


@miss("dot_general", "precision F64_F64_F64 sums in float64", "that sums in float32, DEFAULT")
def algorithm(x: Any) -> Any:
    return lax.dot(x, _wide(FP8), precision=lax.DotAlgorithmPreset.F64_F64_F64)  # here


@miss("dot_general", "the other operand is int32", "convert it to float32 or bfloat16")
def wide_integers(x: Any) -> Any:
    numbers = (((1,), (0,)), ((), ()))
    y = x.astype(jnp.int32)
    return lax.dot_general(y, _wide(FP8), numbers, preferred_element_type=F32)  # here


@miss("dot_general", "output is int32, but an operand is not 8-bit integers", "use int8 or uint8")
def scaled_integers(x: Any) -> Any:
    numbers = (((0,), (0,)), ((), ()))
    codes, scaled = INT8.astype(F32), _wide(INT8)
    return lax.dot_general(codes, scaled, numbers, preferred_element_type=jnp.int32)  # here


@miss("ragged_dot_general", "the other operand is int32", "float32 or bfloat16")
def ragged(x: Any) -> Any:
    w = jnp.stack([_wide(FP8)] * 2)
    return lax.ragged_dot(x.astype(jnp.int32), w, jnp.array([2, 3]))  # here


@miss("sin", "`sin` is applied to the dequantized values", "quantize that")
def ragged_of_a_curve(x: Any) -> Any:
    w = jnp.sin(jnp.stack([_wide(FP8)] * 2))  # here
    return lax.ragged_dot(x, w, jnp.array([2, 3]))


@pytest.mark.parametrize("name", MISSES)
def test_miss_names_the_operation_its_line_and_what_to_change(name: str) -> None:
    fun, ended_by, reason, remedy = MISSES[name]
    report = jaxfp8.explain(fun)(X)
    (site,) = [s for s in report.missed if s.ended_by == ended_by]
    lines, start = inspect.getsourcelines(fun)
    line = start + next(i for i, text in enumerate(lines) if text.rstrip().endswith("# here"))
    assert site.ended_at == f"{__file__}:{line}"
    assert reason in site.reason
    assert remedy in site.remedy
    assert not report.matched


def test_dequantized_values_that_are_only_summed_up_leave_no_miss() -> None:
    report = jaxfp8.explain(lambda x: (x * _wide(FP8).mean()) @ PLAIN)(X)
    assert (report.sites, report.others) == ((), 1)


def test_tokens_of_8_bits_leave_no_miss() -> None:
    tokens = jnp.arange(20, dtype=jnp.uint8)
    report = jaxfp8.explain(lambda tokens: PLAIN[tokens] @ PLAIN.T)(tokens)
    assert (report.sites, report.others) == ((), 1)


def test_strict_says_where_the_trail_ended_and_how_to_see_all() -> None:
    with pytest.raises(ValueError, match=r"`sin` is applied .* \(at .*:\d+\); .*explain\(curve\)"):
        jaxfp8.rewrite(curve, strict=True)(np.asarray(X))


def _sorted(x: Any, q: Any) -> Any:
    return x @ jnp.sort(q.astype(F32), axis=0)


def _cumulated(x: Any, q: Any) -> Any:
    return x @ jnp.cumsum(q.astype(F32), axis=0)


@pytest.mark.parametrize("fun", [_sorted, _cumulated], ids=lambda f: f.__name__)
def test_miss_inside_a_jitted_function_of_jax_names_the_line_of_the_user(
    fun: Callable[..., Any],
) -> None:
    site = jaxfp8.explain(fun)(X, FP8).missed[0]
    assert site.ended_at == f"{__file__}:{fun.__code__.co_firstlineno + 1}"


OF_A_DTYPE = [
    ("to int32", E4M3, lambda w: w.astype(jnp.int32).astype(F32), "changes", "keep them in float"),
    ("minus the mean", E4M3, lambda w: w - jnp.mean(w), "no zero point", "x @ w - x @ m"),
    ("round", jnp.int8, lambda w: w - jnp.round(jnp.exp(w[0])), "16 bits", "keep zero points in"),
]


@pytest.mark.parametrize(
    ("dtype", "change", "reason", "remedy"),
    [m[1:] for m in OF_A_DTYPE],
    ids=[m[0] for m in OF_A_DTYPE],
)
def test_miss_gives_its_own_reason_and_remedy(
    dtype: Any, change: Callable[..., Any], reason: str, remedy: str
) -> None:
    data = Data()
    x, q = data.normal(5, 32), data.bits8(32, 24, dtype=dtype)
    site = jaxfp8.explain(lambda x, q: x @ change(q.astype(F32)))(x, q).missed[0]
    assert reason in site.reason
    assert remedy in site.remedy


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.complex64], ids=["float64", "complex64"])
def test_a_dtype_without_kernels_is_called_that(dtype: Any) -> None:
    with jax.enable_x64(True):
        report = jaxfp8.explain(lambda x: x.astype(dtype) @ INT8.astype(dtype))(X)
    assert "is to a dtype that no kernel has" in report.missed[0].reason
    assert "use float32" in report.missed[0].remedy


def test_a_conversion_that_cuts_fractions_off_is_called_that() -> None:
    with jax.enable_x64(True):
        report = jaxfp8.explain(lambda x: x @ _wide(INT8).astype(jnp.int64).astype(F32))(X)
    assert "from float32 to int64 changes the values" in report.missed[0].reason
