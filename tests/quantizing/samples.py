"""Types, arrays and float64 references of the tests of quantizing."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxfp8._ops.quantize import dequantize, quantize

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
BF16 = np.dtype(ml_dtypes.bfloat16)
INT8, UINT8 = np.dtype(np.int8), np.dtype(np.uint8)
LARGEST = {E4M3: 448.0, E5M2: 57344.0, INT8: 127.0, UINT8: 255.0}
# Half a step: a part of the magnitude, and at least so many units of the scale.
HALF_STEP = {
    E4M3: (2.0**-4, 2.0**-10),
    E5M2: (2.0**-3, 2.0**-17),
    INT8: (0.0, 0.5),
    UINT8: (0.0, 0.5),
}
# How far a stored scale may lie from the chosen one, relatively.
SCALE_ROUNDING = {np.dtype(np.float32): 2.0**-22, BF16: 2.0**-8, np.dtype(np.float16): 2.0**-11}
ALL = pytest.mark.parametrize("dtype", [E4M3, E5M2, INT8, UINT8], ids=lambda d: d.name)
SIGNED = pytest.mark.parametrize("dtype", [E4M3, E5M2, INT8], ids=lambda d: d.name)
FLOAT8 = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=lambda d: d.name)
INTEGER = pytest.mark.parametrize("dtype", [INT8, UINT8], ids=lambda d: d.name)
SCALES = pytest.mark.parametrize(
    "scale_dtype", [np.float32, BF16, np.float16, E8M0], ids=lambda d: np.dtype(d).name
)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def numbers(x):
    return np.asarray(x).astype(np.float64)


def spread(values, shape, tiles):
    """A scale with one entry per tile as one with an entry per value."""
    values = np.broadcast_to(values, [-(-n // t) for n, t in zip(shape, tiles, strict=True)])
    return values[np.ix_(*(np.arange(n) // t for n, t in zip(shape, tiles, strict=True)))]


def oracle(q):
    """The definition in float64: what `q` stands for, and its scale by value."""
    scale = numbers(q.scale if q.scale.ndim else jnp.reshape(q.scale, (1,) * q.ndim))
    zero = 0 if q.zero_point is None else numbers(q.zero_point)
    tiles = q.tile_sizes
    entries = [-(-n // t) for n, t in zip(q.shape, tiles, strict=True)]
    scale, zero = (spread(np.broadcast_to(v, entries), q.shape, tiles) for v in (scale, zero))
    return (numbers(q.qvalue) - zero) * scale, scale


def largest_by_tile(x, tiles):
    """The largest magnitude in the tile of each value, by looking at each tile."""
    out = np.zeros(x.shape)
    for index in np.ndindex(*(-(-n // t) for n, t in zip(x.shape, tiles, strict=True))):
        tile = tuple(slice(i * t, (i + 1) * t) for i, t in zip(index, tiles, strict=True))
        out[tile] = np.abs(x[tile]).max(initial=0)
    return out


@st.composite
def cases(draw):
    """Arrays of rank 0 to 4 with any mixture of whole, channelwise and tiled axes."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 17]), max_size=4)))
    kinds = [draw(st.sampled_from(["whole", "channel", "tile"])) for _ in shape]
    side = [draw(st.sampled_from([0, -len(shape)])) for _ in shape]
    tiles = {a + side[a]: draw(st.integers(1, 20)) for a, k in enumerate(kinds) if k == "tile"}
    channels = [a + side[a] for a, k in enumerate(kinds) if k == "channel"]
    magnitude = 10.0 ** draw(st.integers(-30, 30))
    x = normal(*shape, seed=draw(st.integers(0, 2**31))) * magnitude
    return np.float32(x), {"channelwise_axes": channels, "tiled_axes": tiles}


def round_trip(x, dtype, **options):
    """The QArray of `x` and the values it stands for, compiled as one function."""

    def both(x):
        q = quantize(x, dtype, **options)
        return q, dequantize(q, np.float32)

    return jax.jit(both)(x)


def outline(shape, **options):
    """The shapes of the QArray of an array of `shape`."""
    return jax.eval_shape(lambda x: quantize(x, **options), jax.ShapeDtypeStruct(shape, np.float32))


def gradient_of(loss, x):
    """The gradient of a loss, compiled as one function."""
    return jax.jit(jax.grad(loss))(x)


def refused(error, text, call, *args, **kwargs):
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    assert text in str(caught.value)
