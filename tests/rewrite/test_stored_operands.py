"""Scales and zero points that were cast and moved go into the call as they are stored."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewrite.scales import (
    FORMS,
    MOVES,
    arguments,
    close,
)
from rewrite.support import F32, Data, count

import jaxfp8


@pytest.mark.parametrize("zero", ["int8", "uint8", "int16", "int32"])
@pytest.mark.parametrize(
    "through", ["bool", "int8", "uint8", "int16", "uint16", "int32", "float32", "bfloat16"]
)
@pytest.mark.parametrize("move", MOVES)
def test_zero_points_that_were_cast_and_moved(zero: str, through: str, move: str) -> None:
    """The bytes that casts made wider go into the call; all mean what they meant."""

    def model(x: Any, q: Any, z: Any, s: Any) -> Any:
        return x @ ((q.astype(F32) - MOVES[move](z.astype(through).astype(F32))) * s)

    x, q, s = arguments()
    codes = np.arange(24) * 11 % 256
    z = codes.astype(np.uint8).view(np.int8).astype(zero)
    assert np.unique(z).size == 24
    args = x, q, z.reshape(FORMS.get(move, (24,))), s
    assert count(jaxfp8.rewrite(model), *args) == 1
    close(jaxfp8.rewrite(model)(*args), jax.jit(model)(*args))


@pytest.mark.parametrize("move", MOVES)
def test_bytes_that_were_moved_are_not_converted(move: str) -> None:
    def model(x: Any, q: Any, z: Any, s: Any) -> Any:
        return x @ ((q.astype(F32) - MOVES[move](z.astype(F32))) * s)

    x, q, s = arguments()
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

    x, q, s = arguments()
    args = x, q, s.astype(stored).reshape(FORMS.get(move, (24,)))
    assert count(jaxfp8.rewrite(model), *args) == 1
    rounding = 2e-5 if through in ("float32", stored) else 2**-8
    close(jaxfp8.rewrite(model)(*args), jax.jit(model)(*args), rounding)


def test_a_stored_scale_is_read_without_a_rounding() -> None:
    """However it was picked: nothing rounded it since."""

    def model(x: Any, q: Any, s: Any, at: Any) -> Any:
        own = jax.lax.dynamic_index_in_dim(s, at, keepdims=False)
        own = jnp.maximum(jnp.concatenate([own[:9], own[9:]]), -own)
        return x @ (q.astype(F32) * jnp.broadcast_to(own, q.shape).astype(F32))

    x, q, s = arguments()
    args = x, q, jnp.stack([s, s]).astype(jnp.bfloat16), jnp.asarray(1)
    assert count(jaxfp8.rewrite(model), *args) == 1
    assert "reduce_precision" not in str(jax.make_jaxpr(jaxfp8.rewrite(model))(*args))


def test_a_scale_goes_into_a_scan_without_a_cast() -> None:
    def model(x: Any, q: Any, s: Any) -> Any:
        def turn(x: Any, layer: Any) -> Any:
            q, s = layer
            return x, x @ (q.astype(jnp.bfloat16) * s.astype(jnp.bfloat16))

        return jax.lax.scan(turn, x, (q, s))[1]

    x, q, s = arguments()
    args = x.astype(jnp.bfloat16), jnp.stack([q, q]), jnp.stack([s, s])
    text = jax.jit(jaxfp8.rewrite(model)).trace(*args).lower().as_text()
    assert "custom_call @jaxfp8_scaled_dot" in text
    assert "stablehlo.convert" not in text


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

    x, q, s = arguments()
    args = x, q, s.astype(jnp.bfloat16)
    close(jaxfp8.rewrite(model)(*args), jax.jit(model)(*args))
