"""Programs made to mislead the rewrite: each keeps its meaning, or says why it is left alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewrite.programs import weight
from rewrite.support import BF16, E4M3, E5M2, F16, F32, Data, count, left_alone

import jaxfp8


@dataclasses.dataclass(frozen=True)
class Attack:
    """A function whose rewrite must compute what it computes.

    Attributes:
      calls: how many scaled dots it may become.
      steps: which steps the calls must not hold, by the words of the report.
    """

    name: str
    fun: Callable[..., Any]
    make: Callable[[Data], tuple[Any, ...]]
    calls: int
    without: tuple[str, ...]

    def args(self) -> tuple[Any, ...]:
        return self.make(Data())


ATTACKS: list[Attack] = []


def attack(
    make: Callable[[Data], tuple[Any, ...]], calls: int = 1, without: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """Register a function under its own name."""

    def register(fun: Callable[..., Any]) -> Callable[..., Any]:
        ATTACKS.append(Attack(fun.__name__, fun, make, calls, without))
        return fun

    return register


wide = weight(x=F32, scale="")
_ALL = ("relu", "silu", "gelu_tanh", "gelu_erf")


def product(x: Any, q: Any) -> Any:
    return x @ (q.astype(F32) * 0.25)


# Steps that a kernel would take in another order


@attack(wide, without=("-> float8_e4m3fn",))
def relu6_before_an_fp8_output(x, q, s):
    return jnp.clip(jnp.clip(100 * product(x, q), 0, 6), -448, 448).astype(E4M3)


@attack(wide, without=("-> int8",))
def clip_before_round_and_clip(x, q, s):
    return jnp.clip(jnp.round(jnp.clip(product(x, q), -3, 3)), -128, 127).astype(jnp.int8)


@attack(wide, without=("-> int8",))
def minimum_before_an_int8_output(x, q, s):
    return jnp.clip(jnp.round(jnp.minimum(9 * product(x, q), 6)), -128, 127).astype(jnp.int8)


@attack(wide, without=("-> uint8",))
def relu6_before_a_uint8_output(x, q, s):
    y = jax.nn.relu6(9 * product(x, q))
    return jnp.clip(jnp.round(y), 0, 255).astype(jnp.uint8)


@attack(wide, without=("-> uint8",))
def relu_scaled_by_a_negative_number_before_a_uint8_output(x, q, s):
    y = jax.nn.relu(product(x, q)) * -s
    return jnp.maximum(jnp.minimum(jnp.round(y), 255), -7).astype(jnp.int32)


@attack(wide, without=("silu",))
def activation_after_round(x, q, s):
    return jax.nn.silu(jnp.round(product(x, q))).astype(jnp.int8)


@attack(wide, without=("silu",))
def activation_after_clip(x, q, s):
    return jax.nn.silu(jnp.clip(product(x, q), -1, 1))


@attack(wide, without=("bias", "-> int8"))
def number_added_after_round(x, q, s):
    return (jnp.round(product(x, q)) + 0.5).astype(jnp.int8)


@attack(lambda d: (*wide(d), d.normal(24)), without=("bias", "-> int8"))
def bias_added_after_round(x, q, s, b):
    return (jnp.round(product(x, q)) + b).astype(jnp.int8)


@attack(lambda d: (*wide(d), d.normal(5, 24)), without=("residual", "-> int8"))
def residual_added_after_round(x, q, s, r):
    return (jnp.round(product(x, q)) + r).astype(jnp.int8)


@attack(lambda d: (*wide(d), d.normal(24)), without=("bias",))
def bias_after_the_activation(x, q, s, b):
    return jax.nn.relu(product(x, q)) + b


@attack(lambda d: (d.bits8(5, 32, dtype=jnp.int8), d.bits8(32, 24, dtype=jnp.int8)))
def integers_added_to_an_int32_product(a, b):
    acc = jnp.dot(a, b, preferred_element_type=jnp.int32)
    return acc * 1000 - 100 * jnp.sum(b.astype(jnp.int32), 0)


@attack(lambda d: (d.bits8(5, 32, dtype=jnp.int8), d.bits8(32, 24, dtype=jnp.int8)))
def int32_bias_beyond_the_exactness_of_float32(a, b):
    acc = jnp.dot(a, b, preferred_element_type=jnp.int32)
    big = jnp.full((24,), 2**30 + 1, jnp.int32)
    return (acc + big - big).astype(F32) * 0.5


# What looks like an activation


@attack(wide, without=_ALL)
def activation_of_an_fp8_round_trip(x, q, s):
    return jax.nn.silu(product(x, q).astype(E5M2).astype(F32))


@attack(wide, without=_ALL)
def activation_of_an_fp4_round_trip(x, q, s):
    return jax.nn.relu(product(x, q).astype(jnp.float4_e2m1fn).astype(F32))


@attack(wide, without=_ALL)
def activation_of_values_that_overflow_float16(x, q, s):
    return jax.nn.relu((1e4 * product(x, q)).astype(F16).astype(F32))


@attack(wide, without=_ALL)
def float16_round_trip_alone(x, q, s):
    return (1e4 * product(x, q)).astype(F16).astype(F32)


@attack(wide, without=_ALL)
def maximum_in_fp8(x, q, s):
    return jnp.maximum(product(x, q).astype(E4M3), 0).astype(F32)


@attack(wide, without=_ALL)
def maximum_with_a_small_number(x, q, s):
    return jnp.maximum(product(x, q) * 1e-14, 1e-13) * 1e13


@attack(wide, without=_ALL)
def relu_with_a_small_offset_inside(x, q, s):
    y = jnp.tanh(product(x * 1e-14, q))
    return jnp.maximum(y + 1e-13, 0)


@attack(wide, without=_ALL)
def steep_swish(x, q, s):
    y = product(x * 1e-8, q)
    return y * jax.nn.sigmoid(1e8 * y)


@attack(wide, without=_ALL)
def relu_with_a_second_kink_far_out(x, q, s):
    y = 1e7 * product(x, q)
    return jnp.maximum(jnp.maximum(y, 0), 3 * y - 1e7)


@attack(wide, without=_ALL)
def silu_that_is_nan_for_large_values(x, q, s):
    y = 100 * product(x, q)
    return y * jnp.exp(y) / (1 + jnp.exp(y))


# Zeros over scales that are not finite


def _one_scale(bad: float) -> Callable[[Data], tuple[Any, ...]]:
    return lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(24).at[3].set(bad))


@attack(_one_scale(0.0))
def zero_scale_selected_away(x, q, s):
    return x @ jnp.where(s == 0, 0, q.astype(F32) / s)


@attack(_one_scale(np.inf))
def infinite_scale_selected_away_by_column(x, q, s):
    return x @ jnp.where(jnp.isinf(s)[None], 0.0, q.astype(F32) * s)


@attack(lambda d: (*_one_scale(np.inf)(d), jnp.ones((32, 24), bool).at[:, 3].set(False)))
def infinite_scale_under_a_mask_of_elements(x, q, s, keep):
    return x @ jnp.where(keep, q.astype(F32) * s, 0)


@attack(_one_scale(np.inf))
def rows_masked_to_the_last(x, q, s):
    return x @ jnp.where((jnp.arange(32) > 40)[:, None], q.astype(F32) * s, 0)


@attack(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(24).at[-1].set(np.nan)))
def columns_padded_beside_a_nan_scale(x, q, s):
    return x @ jnp.pad(q.astype(F32) * s, ((0, 0), (0, 4)))


@attack(lambda d: (d.normal(5, 36), d.bits8(32, 24), d.scale(24).at[-1].set(np.nan)))
def both_axes_padded_and_transposed(x, q, s):
    return x @ jnp.pad((q.astype(F32) * s).T, ((2, 4), (0, 4))).T


@attack(lambda d: (d.normal(5, 32), d.bits8(32, 24), jnp.asarray(np.nan)))
def columns_masked_under_one_nan_scale(x, q, s):
    return x @ jnp.where(jnp.arange(24) > 3, q.astype(F32) * s, 0)


@attack(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(4, 3).at[0, 2].set(np.inf)))
def columns_padded_within_an_infinite_block(x, q, s):
    scale = jnp.repeat(jnp.repeat(s, 8, 0), 8, 1)[:, :22]
    return x @ jnp.pad(q[:, :22].astype(F32) * scale, ((0, 0), (0, 2)))


_KEEP = (np.arange(32)[:, None] + np.arange(24) < 40) & (np.arange(24) > 3)


def _under_elements(*shape: int, bad: float, at: tuple[int, ...] = ()) -> Any:
    """Arguments x, q, a scale of a shape with one entry that is not finite, and a mask."""
    return lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(*shape).at[at].set(bad), _KEEP)


@attack(_under_elements(bad=np.nan))
def elements_masked_under_one_nan_scale(x, q, s, keep):
    return x @ jnp.where(keep, q.astype(F32) * s, 0)


@attack(_under_elements(32, 1, bad=np.inf, at=(30, 0)))
def elements_masked_in_a_row_of_infinite_scale(x, q, s, keep):
    return x @ jnp.where(keep, q.astype(F32) * s, 0)


@attack(_under_elements(4, 3, bad=-np.inf, at=(3, 2)))
def elements_masked_in_an_infinite_block(x, q, s, keep):
    scale = jnp.repeat(jnp.repeat(s, 8, 0), 8, 1)
    return x @ jnp.where(keep, q.astype(F32) * scale, 0)


@attack(_under_elements(bad=np.inf))
def batch_elements_masked_under_one_infinite_scale(x, q, s, keep):
    w = jnp.where(keep.reshape(4, 8, 24), q.astype(F32).reshape(4, 8, 24) * s, 0)
    return jnp.einsum("mbk,bkn->bmn", x.reshape(5, 4, 8), w)


@attack(_under_elements(4, 1, bad=np.inf, at=(2, 0)))
def rows_of_zeros_in_turn_with_masked_elements(x, q, s, keep):
    w = jnp.where(keep, q.astype(F32) * jnp.repeat(s, 8, 0), 0)
    return x @ jnp.pad(jnp.where((jnp.arange(32) < 30)[:, None], w, 0), ((0, 0), (2, 1)))


@attack(wide)
def columns_masked_under_a_number(x, q, s):
    return x @ jnp.where(jnp.arange(24) > 3, q.astype(F32) * 0.1, 0)


# Zero points that do not fit


def _zero(z: Any) -> Callable[[Data], tuple[Any, ...]]:
    return lambda d: (d.normal(5, 32), d.bits8(32, 24, dtype=jnp.int8), z)


@attack(_zero(0), calls=0)
def zero_point_beyond_int32(x, q, z):
    return (x @ (q.astype(F32) - 3e9)) * 1e-9


@attack(_zero(jnp.full(24, 3e9)), calls=0)
def whole_float_zero_point_beyond_int32(x, q, z):
    return (x @ (q.astype(F32) - jnp.floor(z))) * 1e-9


@attack(_zero(jnp.full(24, np.nan)), calls=0)
def rounded_zero_point_that_is_nan(x, q, z):
    return x @ (q.astype(F32) - jnp.round(z))


@attack(_zero(jnp.full(24, 2**32 - 1, jnp.uint32)))
def unsigned_zero_point_beyond_int32(x, q, z):
    return (x @ (q.astype(F32) - z.astype(F32))) * 1e-9


@attack(_zero(jnp.int32(2**31 - 1)))
def int32_zero_point_that_wraps(x, q, z):
    return (x @ (q.astype(jnp.int32) - z).astype(F32)) * 1e-9


# Views that stretch or join


@attack(wide)
def stretched_8_bit_output_beside_a_dot(x, q, s):
    return product(x, q), jnp.broadcast_to(q[0], (5, 24)).astype(F32)


@attack(wide)
def rows_repeated_after_dequantising(x, q, s):
    return x @ jnp.repeat(q[:16].astype(F32) * 0.1, 2, axis=0)


@attack(wide)
def pieces_joined_whose_scales_have_two_dtypes(x, q, s):
    def scale(dtype):
        return jnp.broadcast_to(jnp.arange(24.0).astype(dtype)[None], (16, 24)).astype(F32)

    top, bottom = q[:16].astype(F32) * scale(BF16), q[16:].astype(F32) * scale(F16)
    return x @ jnp.concatenate([top, bottom], 0)


# An amax that what follows needs


@attack(lambda d: (d.normal(5, 32), d.bits8(32, 24), d.scale(24), d.bits8(24, 7)), calls=2)
def requantised_by_its_own_amax(x, q, s, q2):
    y = x @ (q.astype(F32) * s)
    scale = jnp.max(jnp.abs(y), axis=1, keepdims=True) / 448
    y8 = jnp.clip(y / scale, -448, 448).astype(E4M3)
    return (y8.astype(F32) @ q2.astype(F32)) * scale


cases = pytest.mark.parametrize("case", ATTACKS, ids=lambda a: a.name)


@left_alone
@cases
def test_attack_computes_what_the_function_computes(case: Attack) -> None:
    args = case.args()
    plain = jax.tree.leaves(jax.jit(case.fun)(*args))
    rewritten = jax.tree.leaves(jaxfp8.rewrite(case.fun)(*args))
    for got, want in zip(rewritten, plain, strict=True):
        assert got.dtype == want.dtype
        near = np.asarray(want, np.float64)
        if want.dtype.kind in "iu":
            np.testing.assert_allclose(np.asarray(got, np.float64), near, atol=1)
        else:
            np.testing.assert_allclose(np.asarray(got, np.float64), near, rtol=2e-2, atol=1e-4)


@cases
def test_attack_is_captured_no_further_than_it_means(case: Attack) -> None:
    report = jaxfp8.explain(case.fun)(*case.args())
    assert len(report.matched) == case.calls
    told = " ".join(site.epilogue for site in report.matched)
    assert not [word for word in case.without if word in told]


def test_second_dot_of_a_dynamic_requantisation_reads_fp8() -> None:
    case = next(a for a in ATTACKS if a.name == "requantised_by_its_own_amax")
    second = jaxfp8.explain(case.fun)(*case.args()).matched[1]
    assert (second.lhs.dtype, second.rhs.dtype) == ("float8_e4m3fn", "float8_e4m3fn")


# The rewritten function as a function


def _args() -> tuple[jax.Array, jax.Array]:
    data = Data()
    return data.normal(5, 32), data.bits8(32, 24)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_weak_type_of_an_output_is_kept(dtype: Any) -> None:
    def f(x: Any, q: Any, a: Any) -> Any:
        return product(x, q), a * 2, x.astype(dtype) * 2

    weak = jnp.asarray(1.0)
    assert weak.weak_type
    outs = jaxfp8.rewrite(f)(*_args(), weak)
    assert [out.weak_type for out in outs] == [o.weak_type for o in f(*_args(), weak)]


def test_zero_and_minus_zero_are_traced_apart() -> None:
    rewritten = jaxfp8.rewrite(lambda x, q, a: product(x, q) * np.copysign(1.0, a))
    plus, minus = (rewritten(*_args(), a) for a in (0.0, -0.0))
    np.testing.assert_array_equal(plus, -minus)


def test_nan_as_an_argument_is_traced_once() -> None:
    traces: list[float] = []

    def f(x: Any, q: Any, a: float) -> Any:
        traces.append(a)
        return product(x, q)

    rewritten = jaxfp8.rewrite(f)
    for _ in range(3):
        rewritten(*_args(), float("nan"))
    assert len(traces) == 1


def test_traces_kept_for_values_of_a_number_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxfp8._rewrite.engine._MOST_TRACES", 2)
    traces: list[int] = []

    def f(x: Any, q: Any, n: int) -> Any:
        traces.append(n)
        return product(x, q) * n

    rewritten = jaxfp8.rewrite(f)
    for n in (1, 2, 1, 3, 4, 1):
        rewritten(*_args(), n)
    assert traces == [1, 2, 3, 4, 1]


def test_strings_and_enums_in_the_output_are_kept() -> None:
    def f(x: Any, q: Any) -> Any:
        return {"a": "name", "b": product(x, q), "c": [F32, 3]}

    out = jaxfp8.rewrite(f)(*_args())
    assert (out["a"], out["c"][0], int(out["c"][1])) == ("name", F32, 3)
    np.testing.assert_allclose(out["b"], product(*_args()), rtol=1e-5, atol=1e-5)


def test_output_of_another_class_is_named_in_the_error() -> None:
    class Box:
        pass

    def boxed(x: Any, q: Any) -> Any:
        return product(x, q), Box()

    with pytest.raises(TypeError, match=r"`boxed` returns a Box.*register the class"):
        jaxfp8.rewrite(boxed)(*_args())


@pytest.mark.parametrize(
    "fun",
    [lambda x, q: (product(x, q), x)[1], lambda x, q: product(x[:0], q)],
    ids=["unused", "empty"],
)
def test_strict_accepts_a_dot_that_computes_nothing(fun: Callable[..., Any]) -> None:
    jaxfp8.rewrite(fun, strict=True)(*_args())


@jax.custom_vjp
def _seven(x: Any) -> Any:
    return x


_seven.defvjp(lambda x: (x, None), lambda _, ct: (7.0 * ct,))


def test_jvp_beside_a_custom_vjp_equals_that_of_the_function() -> None:
    x, q = _args()

    def along(rewrite: Callable[..., Any]) -> Any:
        f = rewrite(lambda x, q, s: _seven(x) @ (q.astype(F32) * s))
        return jax.jvp(lambda s: f(x, q, s), (jnp.ones(24),), (jnp.arange(24.0),))

    for got, want in zip(along(jaxfp8.rewrite), along(lambda f: f), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_jvp_through_a_custom_vjp_is_refused_as_in_the_function() -> None:
    x, q = _args()
    f = jaxfp8.rewrite(lambda x: product(_seven(x), q))
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(f, (x,), (x,))


# What a miss says


def _sorted(x: Any, q: Any) -> Any:
    return x @ jnp.sort(q.astype(F32), axis=0)


def _cumulated(x: Any, q: Any) -> Any:
    return x @ jnp.cumsum(q.astype(F32), axis=0)


@pytest.mark.parametrize("fun", [_sorted, _cumulated], ids=lambda f: f.__name__)
def test_miss_inside_a_jitted_function_of_jax_names_the_line_of_the_user(
    fun: Callable[..., Any],
) -> None:
    site = jaxfp8.explain(fun)(*_args()).missed[0]
    assert site.ended_at == f"{__file__}:{fun.__code__.co_firstlineno + 1}"


MISSES = [
    ("to int32", E4M3, lambda w: w.astype(jnp.int32).astype(F32), "changes", "keep them in float"),
    ("minus the mean", E4M3, lambda w: w - jnp.mean(w), "no zero point", "x @ w - x @ m"),
    ("round", jnp.int8, lambda w: w - jnp.round(jnp.exp(w[0])), "16 bits", "keep zero points in"),
]


@pytest.mark.parametrize(
    ("dtype", "change", "reason", "remedy"), [m[1:] for m in MISSES], ids=[m[0] for m in MISSES]
)
def test_miss_gives_its_own_reason_and_remedy(
    dtype: Any, change: Callable[..., Any], reason: str, remedy: str
) -> None:
    data = Data()
    x, q = data.normal(5, 32), data.bits8(32, 24, dtype=dtype)
    site = jaxfp8.explain(lambda x, q: x @ change(q.astype(F32)))(x, q).missed[0]
    assert reason in site.reason
    assert remedy in site.remedy


@left_alone
def test_without_the_library_code_is_left_alone_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "jaxfp8._call.ffi.why_unavailable", lambda platform: "the library is missing"
    )
    assert count(jaxfp8.rewrite(product), *_args()) == 0
    with pytest.raises(ValueError, match="the library is missing"):
        jaxfp8.rewrite(product, strict=True)(*_args())


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
    report = jaxfp8.explain(fun)(*_args(), jnp.arange(24.0))
    assert report.matched[0].rhs.scale == scale
