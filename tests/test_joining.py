"""8-bit arrays joined: their values are those of the joined arrays, and their codes stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8._value.qarray import QArray

KINDS = {
    "tensor": ((None, None), {}),
    "channel": ((1, None), {}),
    "other channel": ((None, 1), {}),
    "blocks": ((16, 32), {}),
    "groups": ((1, 32), {}),
    "exponents": ((1, 32), {"scale": jnp.float8_e8m0fnu}),
    "zero points": ((1, None), {"codes": np.int8, "zero": True}),
}


def made(shape, kind, seed=0):
    """A QArray of a kind, made without a compiled program."""
    tiles, dtypes = KINDS[kind]
    draw = np.random.default_rng((seed, *shape))
    sizes = [min(tile or n, n) for tile, n in zip(tiles, shape, strict=True)]
    counts = [-(-n // t) for n, t in zip(shape, sizes, strict=True)]
    codes = draw.integers(-9, 9, shape).astype(dtypes.get("codes", jnp.float8_e4m3fn))
    scale = 2.0 ** draw.integers(-9, 9, counts)
    zero = jnp.asarray(draw.integers(1, 9, counts), jnp.int8) if "zero" in dtypes else None
    scale = jnp.asarray(scale.astype(dtypes.get("scale", np.float32)))
    return QArray(jnp.asarray(codes), scale, zero, tiles=tuple(sizes))


def values(q):
    """What a QArray or a view of one stands for, in float64."""
    if isinstance(q, jaxfp8.TransposedArray):
        return values(q.stored).transpose(q.axes)
    wide = np.asarray(q.qvalue).astype(np.float64)
    return (wide - spread(q, q.zero_point)) * spread(q, q.scale)


def spread(q, leaf):
    leaf = np.asarray(0 if leaf is None else leaf).astype(np.float64)
    for axis, (size, tile) in enumerate(zip(q.shape, q.tile_sizes, strict=True)):
        if leaf.ndim and leaf.shape[axis] > 1:
            leaf = np.repeat(leaf, tile, axis)[(slice(None),) * axis + (slice(size),)]
    return leaf


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("kind", KINDS)
def test_joined_values_are_those_of_the_parts(kind, axis):
    parts = [made((n, 40) if axis == 0 else (40, n), kind) for n in (32, 24, 5)]
    whole = jaxfp8.concatenate(parts, axis)
    np.testing.assert_array_equal(values(whole), np.concatenate([*map(values, parts)], axis))
    assert whole.scale.dtype == parts[0].scale.dtype
    assert (whole.zero_point is None) == (parts[0].zero_point is None)


GRAINS = [
    ([("tensor", 64), ("tensor", 16)], 0, (80, 1)),  # a scale per channel, as servers have it
    ([("tensor", 64), ("tensor", 16)], 1, (1, 80)),
    ([("channel", 64), ("tensor", 16)], 0, (80, 1)),
    ([("channel", 64), ("channel", 64)], 1, (40, 2)),
    ([("blocks", 32), ("blocks", 40)], 0, (5, 2)),
    ([("blocks", 24), ("blocks", 16)], 0, (5, 2)),  # tiles of 8
    ([("blocks", 32), ("tensor", 16)], 0, (3, 2)),
]


@pytest.mark.parametrize(("parts", "axis", "entries"), GRAINS)
def test_scales_have_the_entries_that_are_needed(parts, axis, entries):
    qs = [made((n, 40) if axis == 0 else (40, n), kind) for kind, n in parts]
    whole = jaxfp8.concatenate(qs, axis)
    assert whole.scale.shape == entries
    np.testing.assert_array_equal(values(whole), np.concatenate([*map(values, qs)], axis))


def test_scales_of_several_dtypes_are_those_of_the_joined_arrays():
    codes = jnp.ones((8, 32), jnp.float8_e4m3fn)
    wide, narrow = (QArray(codes, jnp.ones((), t)) for t in (jnp.float16, jnp.bfloat16))
    assert jaxfp8.concatenate([wide, narrow]).scale.dtype == jnp.float32


def test_a_part_without_zero_points_has_0():
    with_zero = made((4, 8), "zero points")
    parts = [with_zero, QArray(with_zero.qvalue, with_zero.scale)]
    whole = jaxfp8.concatenate(parts)
    np.testing.assert_array_equal(whole.zero_point[4:], 0)
    np.testing.assert_array_equal(values(whole), np.concatenate([*map(values, parts)]))


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("kind", ["tensor", "blocks", "zero points"])
def test_a_stack_has_the_values_of_its_layers(kind, axis):
    layers = [made((40, 72), kind, seed=i) for i in range(3)]
    whole = jaxfp8.stack(layers, axis)
    np.testing.assert_array_equal(values(whole), np.stack([*map(values, layers)], axis))


@pytest.mark.parametrize(("join", "plain"), [("concatenate", np.concatenate), ("stack", np.stack)])
@pytest.mark.parametrize("axis", [0, 1])
def test_views_of_one_order_are_joined_as_they_lie(join, plain, axis):
    parts = [made((16, 8), "channel", seed=i).T for i in range(2)]
    whole = getattr(jaxfp8, join)(parts, axis)
    np.testing.assert_array_equal(values(whole), plain([*map(values, parts)], axis))
    assert isinstance(whole, jaxfp8.TransposedArray)


def test_a_view_beside_an_array_is_copied():
    q, r = (made((8, 8), "channel", seed=i) for i in range(2))
    whole = jaxfp8.concatenate([q.T, r])
    np.testing.assert_array_equal(values(whole), np.concatenate([values(q).T, values(r)]))


def test_joined_codes_keep_every_bit():
    codes = np.arange(256, dtype=np.uint8).view(jnp.float8_e5m2)
    exponents = np.arange(256, dtype=np.uint8).view(jnp.float8_e8m0fnu)
    q = QArray(jnp.asarray(codes), jnp.asarray(exponents))
    whole = jax.jit(lambda q: jaxfp8.concatenate([q, q]))(q)
    for leaf in (whole.qvalue, whole.scale):
        np.testing.assert_array_equal(np.asarray(leaf).view(np.uint8), [*range(256)] * 2)


def test_a_scale_gets_its_gradient_through_a_join():
    q = made((4, 8), "channel")

    def total(scale):
        part = QArray(q.qvalue, scale)
        return jaxfp8.concatenate([part, part]).scale.sum()

    np.testing.assert_array_equal(jax.grad(total)(q.scale), np.full((4, 1), 2.0))


A = made((32, 64), "tensor")
REFUSED = {
    "floats": ([A, jnp.ones((4, 64))], 0, TypeError, r"`arrays\[1\]` is of type .*quantize it"),
    "one array": (A, 0, TypeError, "is of type QArray, but a list"),
    "nothing": ([], 0, ValueError, "is empty"),
    "codes": (
        [A, made((4, 64), "zero points")],
        0,
        ValueError,
        "hold codes of float8_e4m3fn and int8",
    ),
    "shapes": ([A, A[:, :5]], 0, ValueError, r"\(32, 64\), \(32, 5\), .* along axis 0 alone"),
    "tiles": (
        [made((4, 64), "groups"), made((4, 64), "other channel")],
        0,
        ValueError,
        "tiles of 1 and 32 along axis 1, .*quantize all of them alike",
    ),
    "axis": ([A, A], 2, ValueError, "`axis` is 2, but an int from -2 to 1"),
    "scalar": ([A[0, 0], A[0, 0]], 0, ValueError, "use `jaxfp8.stack`"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_joined_is_refused(case):
    arrays, axis, error, text = case
    with pytest.raises(error, match=text):
        jaxfp8.concatenate(arrays, axis)


FUNCTIONS = {
    "jnp.concatenate": lambda q: jnp.concatenate([q, q]),
    "jnp.stack": lambda q: jnp.stack([q, q]),
    "jnp.einsum": lambda q: jnp.einsum("mk,nk->mn", jnp.ones((2, 64)), q),
    "jnp.asarray": jnp.asarray,
    "np.concatenate": lambda q: np.concatenate([q, q]),
    "np.asarray": np.asarray,
}


@pytest.mark.parametrize("call", FUNCTIONS.values(), ids=FUNCTIONS.keys())
@pytest.mark.parametrize("held", [A, A.T], ids=["array", "view"])
def test_functions_of_arrays_say_the_way(call, held):
    with pytest.raises(TypeError, match=r"Array\(.*join with `jaxfp8.concatenate`.*multiply"):
        call(held)


def test_iteration_gives_the_parts():
    np.testing.assert_array_equal([values(part) for part in A[:3]], values(A)[:3])


@pytest.mark.parametrize(
    "call",
    [
        lambda p: jaxfp8.concatenate([p, p]),
        lambda p: jaxfp8.stack([p, p]),
        lambda p: jnp.concatenate([p, p]),
        lambda p: jaxfp8.checkpoint.save("unused", {"weight": p}),
    ],
    ids=["concatenate", "stack", "jnp.concatenate", "save"],
)
def test_what_takes_no_prepared_array_names_the_way_back(call):
    prepared = jaxfp8.prepare(jaxfp8.quantize(jnp.ones((64, 64)), channelwise_axes=(1,)))
    with pytest.raises(TypeError, match=r"unprepare\(\)"):
        call(prepared)
