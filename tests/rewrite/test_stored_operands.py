"""Scales and zero points that were cast and moved: they go into the call as they are stored."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from rewrite.support import F32, Data, count

import jaxfp8

MOVES = {
    "as it is": lambda z: z,
    "of a row": lambda z: z,
    "row": lambda z: z[None],
    "reshaped": lambda z: z.reshape(1, -1),
    "turned": lambda z: z.T,
    "spread": lambda z: jnp.broadcast_to(z, (32, 24)),
    "reversed": lambda z: z[::-1],
}
FORMS = {"of a row": (1, 24), "turned": (24, 1)}


def _args() -> tuple[Any, ...]:
    data = Data()
    return data.normal(5, 32), data.bits8(32, 24, dtype=jnp.int8), data.scale(24)


def _args_of_two_scales() -> tuple[Any, ...]:
    data = Data()
    a, q = data.bits8(5, 32, dtype=jnp.int8), data.bits8(32, 24, dtype=jnp.int8)
    return a, q, jnp.full((5, 1), 1.2421875, jnp.bfloat16), jnp.asarray(1.0078125, jnp.bfloat16)


def _close(got: Any, want: Any, rounding: float = 2e-5) -> None:
    most = float(np.max(np.abs(want)))
    np.testing.assert_allclose(got, want, rtol=rounding, atol=rounding * most)


@pytest.mark.parametrize("zero", ["int8", "uint8", "int16", "int32"])
@pytest.mark.parametrize(
    "through", ["bool", "int8", "uint8", "int16", "uint16", "int32", "float32", "bfloat16"]
)
@pytest.mark.parametrize("move", MOVES)
def test_zero_points_that_were_cast_and_moved(zero: str, through: str, move: str) -> None:
    """The bytes that casts made wider go into the call; all mean what they meant."""

    def model(x: Any, q: Any, z: Any, s: Any) -> Any:
        return x @ ((q.astype(F32) - MOVES[move](z.astype(through).astype(F32))) * s)

    x, q, s = _args()
    codes = np.arange(24) * 11 % 256
    z = codes.astype(np.uint8).view(np.int8).astype(zero)
    assert np.unique(z).size == 24
    args = x, q, z.reshape(FORMS.get(move, (24,))), s
    assert count(jaxfp8.rewrite(model), *args) == 1
    _close(jaxfp8.rewrite(model)(*args), jax.jit(model)(*args))


@pytest.mark.parametrize("move", MOVES)
def test_bytes_that_were_moved_are_not_converted(move: str) -> None:
    def model(x: Any, q: Any, z: Any, s: Any) -> Any:
        return x @ ((q.astype(F32) - MOVES[move](z.astype(F32))) * s)

    x, q, s = _args()
    z = jnp.arange(24, dtype=jnp.int8)
    args = x, q, z.reshape(FORMS.get(move, (24,))), s
    text = jax.jit(jaxfp8.rewrite(model)).trace(*args).lower().as_text()
    assert "custom_call @jaxfp8_scaled_dot" in text
    assert "stablehlo.convert" not in text


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("through", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("move", MOVES)
def test_scales_that_were_cast_and_moved(stored: str, through: str, move: str) -> None:
    """Those of 16 bits go into the call; and a cast that rounds does so, or is not undone."""

    def model(x: Any, q: Any, s: Any) -> Any:
        return x @ (q.astype(F32) * MOVES[move](s.astype(through)).astype(F32))

    x, q, s = _args()
    args = x, q, s.astype(stored).reshape(FORMS.get(move, (24,)))
    assert count(jaxfp8.rewrite(model), *args) == 1
    rounding = 2e-5 if through in ("float32", stored) else 2**-8
    _close(jaxfp8.rewrite(model)(*args), jax.jit(model)(*args), rounding)


def _exact(x: Any, q: Any, scale: Any) -> np.ndarray:
    """The product of dequantised values, in float64."""
    x, q, scale = (np.asarray(array, np.float64) for array in (x, q, scale))
    return x @ (q * scale)


@pytest.mark.parametrize("is_computed", [False, True])
@pytest.mark.parametrize("move", MOVES)
def test_a_scale_that_the_function_rounds_is_rounded_by_the_call(
    move: str, is_computed: bool
) -> None:
    def scale_of(s: Any) -> Any:
        return MOVES[move]((s * 3 if is_computed else s).astype(jnp.bfloat16))

    def model(x: Any, q: Any, s: Any) -> Any:
        wide = q.astype(jnp.bfloat16) * scale_of(s)
        return jax.lax.dot(x, wide, preferred_element_type=F32)

    x, q, s = _args()
    args = x.astype(jnp.bfloat16), q, s.reshape(FORMS.get(move, (24,)))
    text = jax.jit(jaxfp8.rewrite(model)).trace(*args).lower().as_text()
    assert "rhs_scale_rounded = true" in text
    assert "stablehlo.convert" not in text
    _close(jaxfp8.rewrite(model)(*args), _exact(*args[:2], scale_of(args[2])))


# Scales of rows of codes, as functions write them, in bfloat16.
SCALES = {
    "cast of a view": lambda s: s[:, None].astype(jnp.bfloat16),
    "view of a cast": lambda s: s.astype(jnp.bfloat16)[:, None],
    "stretched": lambda s: jnp.broadcast_to(s[:, None], (6, 32)).astype(jnp.bfloat16),
    "repeated": lambda s: jnp.repeat(s[::2, None], 2, axis=0).astype(jnp.bfloat16),
    "times a number": lambda s: s[:, None].astype(jnp.bfloat16) * jnp.bfloat16(1.6),
    "by a number": lambda s: s[:, None].astype(jnp.bfloat16) / 7,
    "a number by it": lambda s: 7 / s[:, None].astype(jnp.bfloat16),
    "times another": lambda s: (
        s[:, None].astype(jnp.bfloat16) * s[::-1].astype(jnp.bfloat16)[:, None]
    ),
    "float16": lambda s: s[:, None].astype(jnp.float16).astype(jnp.bfloat16),
    "and back": lambda s: s[:, None].astype(jnp.bfloat16).astype(F32),
}


@pytest.mark.parametrize("form", SCALES)
def test_codes_suit_the_scale_as_it_was_rounded(form: str) -> None:
    """Whatever view is between the rounding and the product, and whichever comes first."""

    def model(a: Any, q: Any, s: Any) -> Any:
        scale = SCALES[form](s)
        return jax.lax.dot(
            a.astype(scale.dtype) * scale, q.astype(scale.dtype), preferred_element_type=F32
        )

    data = Data()
    a, q = data.bits8(6, 32, dtype=jnp.int8), data.bits8(32, 24, dtype=jnp.int8)
    s = jnp.asarray([1.0039, 1.0117, 1.0195, 1.0273, 1.0352, 1.043], F32)
    assert count(jaxfp8.rewrite(model), a, q, s) == 1
    scale = np.asarray(jnp.broadcast_to(SCALES[form](s), (6, 32)), np.float64)
    want = (np.asarray(a, np.float64) * scale) @ np.asarray(q, np.float64)
    _close(jaxfp8.rewrite(model)(a, q, s), want)


# Scales of the rows of x that are computed in bfloat16, for codes in it, or in float32.
def _largest(x: Any) -> Any:
    return jnp.max(jnp.abs(x.astype(jnp.bfloat16)), -1, keepdims=True) / 127


def test_codes_that_suit_the_largest_value_of_their_row() -> None:
    """Dynamic quantisation, all of it in bfloat16."""

    def model(x: Any, q: Any) -> Any:
        scale = _largest(x)
        return _product(_codes_of(x, scale), scale, q)

    x, q, _ = _args()
    x = x.astype(jnp.bfloat16)
    scale = _largest(x)
    want = _exact(_codes_of(x, scale), q, 1.0) * np.asarray(scale, np.float64)
    assert count(jaxfp8.rewrite(model), x, q) == 1
    _close(jaxfp8.rewrite(model)(x, q), want)


@pytest.mark.parametrize(
    "scale_of", [_largest, lambda x: _largest(x) * 3, lambda x: _largest(x[:1])]
)
def test_a_scale_that_is_widened_is_one_for_codes_and_product(scale_of: Any) -> None:
    """XLA may leave out its rounding: for both, or the codes would not suit the product."""

    def model(x: Any, q: Any) -> Any:
        scale = scale_of(x).astype(F32)
        codes = _codes_of(x, scale)
        return jax.lax.dot(codes, q, preferred_element_type=jnp.int32).astype(F32) * scale

    x, q, _ = _args()
    biases = []
    for i in range(16):
        largest = x.at[:, 0].set(jnp.arange(3.0, 8.0) + i / 17)
        got, want = (f(largest, q) for f in (jaxfp8.rewrite(model), jax.jit(model)))
        biases.append(np.vdot(got, want) / np.vdot(want, want) - 1)
    assert count(jaxfp8.rewrite(model), x, q) == 1
    assert np.abs(biases).max() < 2**-14


@pytest.mark.parametrize(
    "ones", [lambda s: jnp.ones((1, 24), s.dtype) * s, lambda s: jnp.ones((1, 24), s.dtype) / s]
)
def test_a_scale_times_a_constant_inside_shard_map(ones: Any) -> None:
    """The constant is the same on all devices, the scale is not."""

    def model(x: Any, q: Any, s: Any) -> Any:
        return x @ (q.astype(jnp.bfloat16) * ones(s[None].astype(jnp.bfloat16)))

    x, q, s = _args()
    mesh = jax.make_mesh((1,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    columns = P(None, "b")
    mapped = jax.shard_map(model, mesh=mesh, in_specs=(P(), columns, P("b")), out_specs=columns)
    args = x.astype(jnp.bfloat16), q, s
    assert count(jaxfp8.rewrite(mapped), *args) == 1
    _close(jaxfp8.rewrite(mapped)(*args), jax.jit(mapped)(*args), 2**-7)


@pytest.mark.parametrize(
    "scale_of",
    [
        lambda: jnp.ones((32, 1), jnp.bfloat16) * jnp.bfloat16(1.6),
        lambda: jnp.full((32, 1), 1.6, jnp.bfloat16) / 3,
        lambda: 3 / jnp.full((32, 1), 1.6, jnp.bfloat16),
        lambda: (jnp.full((32, 1), 1.6) * 3).astype(jnp.bfloat16),
    ],
)
def test_scales_that_are_numbers_are_known_as_rounded(scale_of: Any) -> None:
    """Zeros put beside values need such scales."""

    def model(x: Any, q: Any) -> Any:
        wide = jnp.pad(q.astype(jnp.bfloat16) * scale_of(), ((0, 0), (0, 8)))
        return jax.lax.dot(x, wide, preferred_element_type=F32)

    x, q, _ = _args()
    x = x.astype(jnp.bfloat16)
    assert count(jaxfp8.rewrite(model), x, q) == 1
    want = _exact(x, np.pad(np.asarray(q), ((0, 0), (0, 8))), scale_of())
    _close(jaxfp8.rewrite(model)(x, q), want)


@pytest.mark.parametrize(
    "more",
    [
        lambda wide, scale: -(wide * scale),
        lambda wide, scale: wide * scale * jnp.bfloat16(0.5),
        lambda wide, scale: wide * scale * jnp.arange(1, 6, dtype=jnp.bfloat16)[:, None],
        lambda wide, scale: wide / scale,
    ],
)
def test_a_scale_of_several_is_rounded_as_the_function_says(more: Any) -> None:
    """XLA would leave out the rounding of arithmetic if the rewrite widened its result."""

    def model(a: Any, q: Any, s: Any, u: Any) -> Any:
        wide = more(a.astype(jnp.bfloat16), s * u)
        return jax.lax.dot(wide, q.astype(jnp.bfloat16), preferred_element_type=F32)

    a, q, s, u = _args_of_two_scales()
    assert count(jaxfp8.rewrite(model), a, q, s, u) == 1
    ones = np.asarray(more(jnp.ones((5, 1), F32), (s * u).astype(F32)), np.float64)
    want = (np.asarray(a, np.float64) * ones) @ np.asarray(q, np.float64)
    _close(jaxfp8.rewrite(model)(a, q, s, u), want)


def _repeated(s: Any, u: Any, times: int) -> Any:
    return jnp.broadcast_to(s, (5, times)) * u


@pytest.mark.parametrize(
    "spread",
    [
        lambda s, u: jnp.broadcast_to(s * u, (5, 32)),
        lambda s, u: jnp.repeat(s * u, 32, axis=1),
        lambda s, u: jnp.repeat(s * u, np.full(1, 32), axis=1, total_repeat_length=32),
        lambda s, u: jax.lax.stop_gradient(jnp.broadcast_to(s * u, (5, 32))),
        lambda s, u: jax.lax.optimization_barrier(_repeated(s, u, 32)),
        lambda s, u: _repeated(s, u, 64)[:, 32:],
        lambda s, u: _repeated(s, u, 32)[:, ::-1],
        lambda s, u: jnp.split(_repeated(s, u, 64), 2, axis=1)[1],
        lambda s, u: jnp.take(_repeated(s, u, 3), jnp.arange(32) // 11, axis=1),
        lambda s, u: jax.lax.dynamic_slice(_repeated(s, u, 64), (0, jnp.asarray(3)), (5, 32)),
        lambda s, u: jnp.concatenate([_repeated(s, u, 12), _repeated(s, u, 20)], axis=1),
    ],
)
@pytest.mark.parametrize("region", [False, True])
def test_a_scale_that_is_widened_where_it_is_spread_is_rounded_before(
    spread: Any, region: bool
) -> None:
    """XLA does not look through it, so it leaves the rounding in the function as written."""

    def product(a: Any, q: Any, scale: Any) -> Any:
        return (a.astype(F32) * scale.astype(F32)) @ q.astype(F32)

    def model(a: Any, q: Any, s: Any, u: Any) -> Any:
        return (jax.checkpoint(product) if region else product)(a, q, spread(s, u))

    args = _args_of_two_scales()
    a, q, s, u = args
    assert count(jaxfp8.rewrite(model), *args) == 1
    want = np.asarray(a, np.float64) * np.asarray(spread(s, u), np.float64)
    _close(jax.jit(jaxfp8.rewrite(model))(*args), want @ np.asarray(q, np.float64))


@pytest.mark.parametrize(
    "scale_of",
    [
        lambda amax: jnp.repeat(amax / 127, 8, axis=-1),
        lambda amax: jnp.repeat(amax, 8, axis=-1) / 127,
        lambda amax: jnp.repeat(amax, 8, axis=-1) * jnp.bfloat16(1 / 127),
    ],
)
def test_codes_that_suit_a_scale_of_the_largest_value_of_a_block(scale_of: Any) -> None:
    """The scale of codes and that of the product are rounded alike."""

    def model(x: Any, q: Any) -> Any:
        amax = jnp.max(jnp.abs(x.astype(jnp.bfloat16).reshape(5, 4, 8)), axis=-1)
        scale = scale_of(amax).astype(F32)
        codes = jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8)
        return (codes.astype(F32) * scale) @ q.astype(F32)

    _, q, _ = _args()
    x = 0.75 + Data().normal(5, 32) / 100
    x = x.at[:, ::8].set(jnp.asarray([[1.7], [1.9], [2.1], [2.6], [3.1]]))
    assert count(jaxfp8.rewrite(model), x, q) == 1
    _close(jax.jit(jaxfp8.rewrite(model))(x, q), jax.jit(model)(x, q))


def test_a_stored_scale_is_read_without_a_rounding() -> None:
    """However it was picked: nothing rounded it since."""

    def model(x: Any, q: Any, s: Any, at: Any) -> Any:
        own = jax.lax.dynamic_index_in_dim(s, at, keepdims=False)
        own = jnp.maximum(jnp.concatenate([own[:9], own[9:]]), -own)
        return x @ (q.astype(F32) * jnp.broadcast_to(own, q.shape).astype(F32))

    x, q, s = _args()
    args = x, q, jnp.stack([s, s]).astype(jnp.bfloat16), jnp.asarray(1)
    assert count(jaxfp8.rewrite(model), *args) == 1
    assert "reduce_precision" not in str(jax.make_jaxpr(jaxfp8.rewrite(model))(*args))


@pytest.mark.parametrize("region", ["checkpoint", "cond", "donate", "scan", "carry", "shard_map"])
def test_a_scale_that_is_computed_before_a_region_is_rounded_as_written(region: str) -> None:
    """The region is a program of its own, to which the result of arithmetic looks like an input."""

    def product(a: Any, q: Any, scale: Any) -> Any:
        wide = -(a.astype(jnp.bfloat16) * scale)
        return jax.lax.dot(wide, q.astype(jnp.bfloat16), preferred_element_type=F32)

    def model(a: Any, q: Any, s: Any, u: Any) -> Any:
        match region:
            case "checkpoint":
                return jax.checkpoint(product)(a, q, s * u)
            case "donate":
                return jax.jit(product, donate_argnums=(0,))(a * 1, q, s * u)
            case "scan":
                stack = jnp.stack([s * u, s * u])
                return jax.lax.scan(lambda c, t: (c, product(a, q, t)), 0, stack, unroll=2)[1][0]
            case "carry":
                double = jnp.bfloat16(2)
                step = lambda c, _: (c * double, product(a, q, c))  # noqa: E731
                return jax.lax.scan(step, s * u, length=2, unroll=2)[1][0]
            case "shard_map":
                mesh = jax.make_mesh((1,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
                specs = (P("b"), P(), P("b"))
                sharded = jax.shard_map(product, mesh=mesh, in_specs=specs, out_specs=P("b"))
                return sharded(a, q, s * u)
        zeros = jnp.zeros((a.shape[0], q.shape[1]))
        return jax.lax.cond(jnp.asarray(True), product, lambda *_: zeros, a, q, s * u)

    args = _args_of_two_scales()
    a, q, s, u = args
    assert count(jaxfp8.rewrite(model), *args) == 1
    want = -np.asarray(a, np.float64) * np.asarray(s * u, np.float64)
    _close(jax.jit(jaxfp8.rewrite(model))(*args), want @ np.asarray(q, np.float64))


@pytest.mark.parametrize("how", ["jit", "directly"])
@pytest.mark.parametrize("number", [2, np.full((32, 1), 2, np.float32)])
def test_an_index_that_is_known_is_computed_whatever_guards_the_function(
    how: str, number: Any
) -> None:
    def model(x: Any, q: Any, s: Any) -> Any:
        nans = jnp.isnan(jnp.zeros(32) / jnp.zeros(32))
        return x @ (q.astype(F32) * number * s[jnp.where(nans, jnp.arange(32) // 8, 0)])

    x, q, _ = _args()
    s = Data().scale(4 * 24).reshape(4, 24)
    want = jax.jit(model)(x, q, s)
    rewritten = jaxfp8.rewrite(model)
    with jax.transfer_guard("disallow"), jax.debug_nans(True):
        got = (jax.jit(rewritten) if how == "jit" else rewritten)(x, q, s)
    _close(got, want)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "scaled",
    [
        lambda wide: wide / jnp.zeros((32, 1)),
        lambda wide: wide * jnp.float32(np.inf) * 0.0,
        lambda wide: wide / 1e-39,
        lambda wide: wide * jnp.full((32, 1), 1e6).astype(jnp.float16).astype(F32),
    ],
)
def test_known_scales_warn_of_nothing(scaled: Any) -> None:
    def model(x: Any, q: Any) -> Any:
        return x @ scaled(q.astype(F32))

    x, q, _ = _args()
    want = jax.jit(model)(x, q)
    np.testing.assert_array_equal(np.isfinite(jaxfp8.rewrite(model)(x, q)), np.isfinite(want))


def test_known_scales_ask_no_device_and_raise_nothing() -> None:
    def model(a: Any, q: Any, s: Any) -> Any:
        unused = jnp.zeros((5, 1), F32).astype(jnp.bfloat16) / jnp.bfloat16(0)
        wide = a.astype(jnp.bfloat16) * jnp.full((5, 1), 1.0039).astype(jnp.bfloat16)
        y = jax.lax.dot(wide, q.astype(jnp.bfloat16), preferred_element_type=F32)
        return y + jnp.where(s > 0, 0, unused.astype(F32))

    data = Data()
    args = data.bits8(5, 32, dtype=jnp.int8), data.bits8(32, 24, dtype=jnp.int8), jnp.ones((5, 1))
    want = np.asarray(args[0], np.float64) @ np.asarray(args[1], np.float64)
    with jax.transfer_guard("disallow"), jax.debug_nans(True):
        got = jax.jit(jaxfp8.rewrite(model))(*args)
    _close(got, want)


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_constants_of_no_size_are_left(shape: tuple[int, ...]) -> None:
    def model(x: Any, q: Any, s: Any) -> Any:
        return x @ (q.astype(F32) * s), (jnp.full(shape, 1.3) * 2).astype(jnp.bfloat16)

    args = _args()
    assert count(jaxfp8.rewrite(model), *args) == 1
    assert jaxfp8.rewrite(model)(*args)[1].shape == shape


def test_what_the_function_computes_of_a_rounded_scale_suits_the_product() -> None:
    """Squared distances to the entries of a codebook: sums of terms that nearly cancel."""

    def model(x: Any, codes: Any, s: Any) -> Any:
        wide = codes.astype(jnp.bfloat16) * s.astype(jnp.bfloat16)
        products = jax.lax.dot(x, wide, preferred_element_type=F32)
        return (x.astype(F32) ** 2).sum(1)[:, None] - 2 * products + (wide.astype(F32) ** 2).sum(0)

    _, codes, s = _args()
    s = jnp.exp2(jnp.round(s)) * 1.0039  # a power of two in bfloat16, which holds wide exactly
    wide = codes.astype(jnp.bfloat16) * s.astype(jnp.bfloat16)
    got = np.asarray(jaxfp8.rewrite(model)(wide.T, codes, s), np.float64)
    terms = (np.asarray(wide, np.float64) ** 2).sum(0)
    assert np.abs(np.diag(got)).max() < 1e-5 * terms.max()


def _codes_of(x: Any, scale: Any) -> Any:
    return jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8)


def _product(codes: Any, scale: Any, q: Any, where: str = "codes") -> Any:
    lhs, rhs = codes.astype(jnp.bfloat16), q.astype(jnp.bfloat16)
    lhs = lhs * scale if where == "codes" else lhs
    rhs = rhs * scale if where == "weight" else rhs
    y = jax.lax.dot(lhs, rhs, preferred_element_type=F32)
    return y * scale if where == "product" else y


def _static_args() -> tuple[Any, Any, Any]:
    x, q, _ = _args()
    return x.astype(jnp.bfloat16) * 20, jnp.float32(1.0039), q  # 1.0 in bfloat16


@pytest.mark.parametrize("where", ["codes", "weight", "product"])
def test_a_given_scale_is_rounded_where_codes_were_made_with_it(where: str) -> None:
    """Static quantisation: the codes suit the rounded scale, and another would be a bias."""

    def model(x: Any, given: Any, q: Any) -> Any:
        scale = given.astype(jnp.bfloat16)
        return _product(_codes_of(x, scale), scale, q, where)

    args = _static_args()
    assert count(jaxfp8.rewrite(model), *args) == 1
    _close(jaxfp8.rewrite(model)(*args), jax.jit(model)(*args))


def _in_scan(codes: Any, given: Any, q: Any) -> Any:
    def turn(carry: Any, _: Any) -> Any:
        return carry, _product(codes, given.astype(jnp.bfloat16), q)

    return jax.lax.scan(turn, 0, length=2)[1]


def _in_carry(codes: Any, given: Any, q: Any) -> Any:
    def turn(codes: Any, _: Any) -> Any:
        scale = given.astype(jnp.bfloat16)
        return _codes_of(codes.astype(F32) + 1, scale), _product(codes, scale, q)

    return jax.lax.scan(turn, codes, length=2)[1]


REGIONS = {
    "checkpoint": lambda codes, given, q: jax.checkpoint(
        lambda s: _product(codes, s.astype(jnp.bfloat16), q)
    )(given),
    "cond": lambda codes, given, q: jax.lax.cond(
        codes[0, 0] < 100,
        lambda: _product(codes, given.astype(jnp.bfloat16), q),
        lambda: jnp.zeros((codes.shape[0], q.shape[1]), F32),
    ),
    "scan": _in_scan,
    "carry": _in_carry,
}


@pytest.mark.parametrize("region", REGIONS)
def test_codes_that_were_made_outside_a_region_are_known_as_such(region: str) -> None:
    def model(x: Any, given: Any, q: Any) -> Any:
        codes = _codes_of(x, given.astype(jnp.bfloat16))
        return REGIONS[region](codes, given, q)

    args = _static_args()
    assert count(jaxfp8.rewrite(model), *args) == 1
    _close(jaxfp8.rewrite(model)(*args), jax.jit(model)(*args))


def test_a_scale_goes_into_a_scan_without_a_cast() -> None:
    def model(x: Any, q: Any, s: Any) -> Any:
        def turn(x: Any, layer: Any) -> Any:
            q, s = layer
            return x, x @ (q.astype(jnp.bfloat16) * s.astype(jnp.bfloat16))

        return jax.lax.scan(turn, x, (q, s))[1]

    x, q, s = _args()
    args = x.astype(jnp.bfloat16), jnp.stack([q, q]), jnp.stack([s, s])
    text = jax.jit(jaxfp8.rewrite(model)).trace(*args).lower().as_text()
    assert "custom_call @jaxfp8_scaled_dot" in text
    assert "stablehlo.convert" not in text


def test_codes_that_the_forward_pass_made_are_known_in_the_backward_pass() -> None:
    @jax.custom_vjp
    def layer(x: Any, given: Any, w: Any) -> Any:
        return forward(x, given, w)[0]

    def forward(x: Any, given: Any, w: Any) -> Any:
        codes = _codes_of(x, given.astype(jnp.bfloat16))
        return codes.astype(jnp.bfloat16) @ w, (codes, given)

    def backward(residuals: Any, dy: Any) -> Any:
        codes, given = residuals
        wide = codes.astype(jnp.bfloat16) * given.astype(jnp.bfloat16)
        return None, None, jax.lax.dot(wide.T, dy)

    layer.defvjp(forward, backward)
    x, given, q = _static_args()
    w = q.astype(jnp.bfloat16)
    gradient = jax.grad(lambda w, f: (f(x, given, w).astype(F32) ** 2).sum())
    got, want = (np.asarray(gradient(w, f), np.float64) for f in (jaxfp8.rewrite(layer), layer))
    assert abs(np.vdot(got, want) / np.vdot(want, want) - 1) < 2**-10
    # As a value, too: the second half of a derivative has a first half then.
    again = jax.vjp(lambda w: gradient(w, jaxfp8.rewrite(layer)), w)[0]
    np.testing.assert_array_equal(np.asarray(again, np.float64), got)


@pytest.mark.parametrize("of", ["rows", "columns"])
def test_derivatives_and_batches_see_the_scale_as_it_was_rounded(of: str) -> None:
    def model(x: Any, q: Any, s: Any) -> Any:
        y = x @ q.astype(F32)
        return y * (s[:, None] if of == "rows" else s).astype(jnp.bfloat16).astype(F32)

    x, q, s = _args()
    s = (s + 1.0039)[: x.shape[0] if of == "rows" else q.shape[1]]
    rewritten = jaxfp8.rewrite(model)
    text = jax.jit(rewritten).trace(x, q, s).lower().as_text()
    assert f"{'lhs' if of == 'rows' else 'rhs'}_scale_rounded = true" in text
    dy = Data().normal(5, 24)
    for way in (
        lambda f: jax.vjp(lambda x: f(x, q, s), x)[1](dy)[0],
        lambda f: jax.jvp(lambda x: f(x, q, s), (x,), (x,))[1],
        lambda f: jax.vmap(f, (0, None, None))(jnp.stack([x, 2 * x]), q, s),
        lambda f: jax.vmap(f, (None, None, 0))(x, q, jnp.stack([s, 2 * s])),
    ):
        _close(way(rewritten), way(jax.jit(model)))


@pytest.mark.parametrize("scaled", ["behind the product", "in front of it"])
def test_the_gradient_of_a_scale_that_the_function_rounds(scaled: str) -> None:
    def loss(s: Any, x: Any, q: Any) -> Any:
        scale = s.astype(jnp.bfloat16)
        wide = q.astype(jnp.bfloat16)
        y = x @ (wide * scale) if scaled == "in front of it" else (x @ wide) * scale
        return (y.astype(F32) ** 2).sum()

    x, q, s = _args()
    x = x.astype(jnp.bfloat16)
    got = jax.grad(jaxfp8.rewrite(loss))(s, x, q)
    assert got.dtype == F32
    sums = np.asarray(x, np.float64) @ np.asarray(q, np.float64)
    _close(got, 2 * (sums**2).sum(0) * np.asarray(s, np.float64), 2**-6)


def test_scales_of_a_stack_in_a_scan_go_in_without_a_cast() -> None:
    def model(x: Any, q: Any, s: Any) -> Any:
        def step(carry: Any, layer: Any) -> Any:
            codes, scale = layer
            wide = codes.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)
            return carry @ wide, None

        return jax.lax.scan(step, x, (q, s))[0]

    data = Data()
    q, s = data.bits8(3, 24, 24, dtype=jnp.int8), data.scale(3 * 24).reshape(3, 1, 24)
    args = data.normal(5, 24).astype(jnp.bfloat16), q, s
    text = jax.jit(jaxfp8.rewrite(model)).trace(*args).lower().as_text()
    assert "custom_call @jaxfp8_scaled_dot" in text
    assert "stablehlo.convert" not in text


def test_very_many_moves_are_followed() -> None:
    def model(x: Any, q: Any, s: Any) -> Any:
        s = s.astype(F32)
        for _ in range(1500):
            s = s[::-1]
        return x @ (q.astype(F32) * s)

    x, q, s = _args()
    args = x, q, s.astype(jnp.bfloat16)
    _close(jaxfp8.rewrite(model)(*args), jax.jit(model)(*args))
