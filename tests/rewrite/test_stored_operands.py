"""Scales and zero points that were cast and moved: they go into the call as they are stored."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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


def _rounded(move: str, computed: bool) -> Any:
    def model(x: Any, q: Any, s: Any) -> Any:
        s = s * 3 if computed else s
        scale = MOVES[move](s.astype(jnp.bfloat16))
        return x.astype(jnp.bfloat16) @ (q.astype(jnp.bfloat16) * scale)

    return model


@pytest.mark.parametrize("move", MOVES)
def test_a_given_scale_that_the_function_rounds_goes_in_unrounded(move: str) -> None:
    x, q, s = _args()
    args = x.astype(jnp.bfloat16), q, s.reshape(FORMS.get(move, (24,)))
    model = _rounded(move, computed=False)
    text = jax.jit(jaxfp8.rewrite(model)).trace(*args).lower().as_text()
    assert "custom_call @jaxfp8_scaled_dot" in text
    assert "stablehlo.convert" not in text
    wide = [np.asarray(array, np.float64) for array in args]
    exact = wide[0] @ (wide[1] * MOVES[move](wide[2]))
    got = np.asarray(jaxfp8.rewrite(model)(*args), np.float64)
    _close(got, exact, 2**-8)
    assert np.linalg.norm(got - exact) <= np.linalg.norm(
        np.asarray(model(*args), np.float64) - exact
    )


def test_a_computed_scale_is_rounded_as_the_function_says() -> None:
    x, q, s = _args()
    args = x.astype(jnp.bfloat16), q, s
    lowered = jax.jit(jaxfp8.rewrite(_rounded("row", computed=True))).trace(*args).lower()
    assert "tensor<24xf32>) -> tensor<24xbf16>" in lowered.as_text()


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


def test_a_given_scale_goes_into_a_scan_unrounded() -> None:
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


def test_a_scale_that_was_computed_is_known_behind_a_barrier_of_several() -> None:
    def model(x: Any, q: Any, s: Any) -> Any:
        _, root = jax.lax.optimization_barrier((s, jnp.sqrt(s)))
        return x @ (q.astype(jnp.bfloat16) * root.astype(jnp.bfloat16))

    x, q, s = _args()
    text = jax.jit(jaxfp8.rewrite(model)).trace(x.astype(jnp.bfloat16), q, s).lower().as_text()
    assert "tensor<24xf32>) -> tensor<24xbf16>" in text


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


def test_scales_of_a_stack_in_a_scan_go_in_unrounded() -> None:
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
