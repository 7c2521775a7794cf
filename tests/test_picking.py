"""A part of a stack that a loop picks, `q[i]`: the same codes, and no copy of the stack."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxfp8 import QArray
from jaxfp8._value.picking import bytes_to_pick

LAYERS, SIZE = 8, 64
E8M0 = jnp.float8_e8m0fnu
DTYPES = [jnp.float8_e4m3fn, jnp.float8_e5m2]


def stack(dtype: Any, scale: Any = jnp.float32) -> QArray:
    """Every code of both dtypes, NaNs too."""
    codes = jnp.arange(LAYERS * SIZE * SIZE, dtype=jnp.uint32).astype(jnp.uint8)
    ones = jnp.ones((LAYERS, 1, SIZE), jnp.float32).astype(scale)
    q = lax.bitcast_convert_type(codes.reshape(LAYERS, SIZE, SIZE), dtype)
    return QArray(q, ones)


def bits(x: Any) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


def each(q: QArray) -> QArray:
    """The stack again, picked layer by layer."""
    return lax.scan(lambda _, i: (None, _as_bytes(q[i])), None, jnp.arange(LAYERS))[1]


def _as_bytes(q: QArray) -> Any:
    return jax.tree.map(lambda x: lax.bitcast_convert_type(x, jnp.uint8), (q.qvalue, q.scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: jnp.dtype(d).name)
def test_picked_codes_are_those_of_the_stack(dtype: Any) -> None:
    q = stack(dtype, E8M0)
    codes, scales = jax.jit(each)(q)
    assert np.array_equal(bits(codes), bits(q.qvalue))
    assert np.array_equal(bits(scales), bits(q.scale))


def test_loop_that_picks_holds_one_layer() -> None:
    def total(q: QArray) -> Any:
        def add(i: Any, y: Any) -> Any:
            return y + q[i].qvalue.astype(jnp.float32)

        return lax.fori_loop(0, LAYERS, add, jnp.zeros((SIZE, SIZE)))

    q = stack(jnp.float8_e4m3fn)
    compiled = jax.jit(total).lower(q).compile()
    if jax.default_backend() == "cpu":
        assert compiled.memory_analysis().temp_size_in_bytes < 2 * 4 * SIZE * SIZE


def test_pick_of_a_vmapped_stack_or_place() -> None:
    q, places = stack(jnp.float8_e5m2), jnp.asarray([3, 0])
    picked = jax.jit(jax.vmap(lambda q, i: q[i].qvalue, in_axes=(None, 0)))(q, places)
    assert np.array_equal(bits(picked), bits(q.qvalue)[[3, 0]])
    both = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), stack(jnp.int8))
    both = QArray(lax.bitcast_convert_type(both.qvalue, jnp.float8_e5m2), both.scale)
    picked = jax.jit(jax.vmap(lambda q, i: q[i].qvalue))(both, places)
    assert np.array_equal(bits(picked), bits(both.qvalue)[[0, 1], [3, 0]])


def test_bytes_have_no_derivative() -> None:
    def loss(x: Any) -> Any:
        return jnp.sum(bytes_to_pick(x.astype(jnp.float8_e4m3fn), ()).astype(jnp.float32) * x)

    assert jax.grad(loss)(jnp.ones(3)).tolist() == [0x38] * 3


def test_pick_inside_shard_map() -> None:
    mesh, q = Mesh(jax.devices(), ("d",)), stack(jnp.float8_e4m3fn)
    places = np.arange(jax.device_count()) % LAYERS

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    def picked(q: QArray, i: Any) -> Any:
        return q[i[0]].qvalue[None]

    assert np.array_equal(bits(picked(q, places)), bits(q.qvalue)[places])
