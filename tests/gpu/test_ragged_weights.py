"""Groups of 16-bit rows times 8-bit weights: `sm80_w8a16`, or on Hopper `sm90_gemm`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged_case import Ragged, with_nan

import jaxfp8
from jaxfp8._call.library import ffi

CALL = "custom_call @jaxfp8_ragged_dot"
STREAMS, TILES = "sm80_w8a16", "sm90_gemm"
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
ALL = 10**6
PLAIN, CHANNEL, STEPS, BLOCKS = (ALL, ALL), (1, ALL), (1, 128), (128, 128)
UNEVEN = (3, 0, 129, 65, 0, 1, 200)
weights = functools.partial(Ragged, lhs="bfloat16", rhs=E4M3, rhs_tile=CHANNEL)
masked = functools.partial(weights, grouping="masked")
FEW = {
    "decode": weights(sizes=(1, 8, 0, 3, 9, 0, 2), rows=25, columns=264, depth=400),
    "odd": weights(sizes=(5, 0, 1), rows=7, columns=131, depth=401, rhs=E5M2, rhs_tile=PLAIN),
    "one code": weights(sizes=(0, 1), rows=1, columns=1, depth=1, lhs="float16"),
    "int8": weights(sizes=(2, 17, 4), rows=30, columns=136, depth=272, rhs="int8"),
    "uint8, zeros": weights(
        sizes=(2, 0, 4), rows=6, columns=72, depth=256, rhs="uint8", zero_points=True
    ),
    "blocks, float16": weights(
        sizes=UNEVEN, rows=400, columns=264, depth=512, lhs="float16", rhs_tile=BLOCKS
    ),
    "steps": weights(sizes=(40, 3, 90), rows=140, columns=136, depth=384, rhs_tile=STEPS),
    "many groups": weights(
        sizes=tuple(i * 37 % 11 for i in range(600)), rows=3100, columns=24, depth=48
    ),
    "no rows in groups": weights(sizes=(0, 0), rows=70, columns=40, depth=128),
    "too many rows": weights(sizes=(-3, 60, 2**31 - 1, 2**31 - 1), rows=90, columns=72, depth=256),
    "masked": masked(sizes=(3, 0, 1, 9), rows=9, columns=136, depth=300, rhs="int8"),
    "masked, many": masked(
        sizes=tuple(i * 37 % 5 - 1 for i in range(70)), rows=3, columns=40, depth=96
    ),
}
MANY = {
    "rows": weights(sizes=(300, 0, 129, 65, 0, 1, 1), rows=500, columns=528, depth=1040),
    "tensor": weights(sizes=(500, 600), rows=1100, columns=400, depth=1024, rhs_tile=PLAIN),
    "rest": weights(sizes=(200, 3, 70), rows=600, columns=528, depth=1088, lhs="float16"),
    "int8": weights(sizes=UNEVEN, rows=500, columns=528, depth=1024, rhs="int8"),
    "uint8, zeros": weights(
        sizes=UNEVEN, rows=500, columns=528, depth=1040, rhs="uint8", zero_points=True
    ),
    "steps, zeros": weights(
        sizes=UNEVEN,
        rows=500,
        columns=528,
        depth=1152,
        rhs="int8",
        rhs_tile=STEPS,
        zero_points=True,
    ),
    "blocks": weights(sizes=UNEVEN, rows=500, columns=528, depth=1024, rhs_tile=BLOCKS),
    "e5m2": weights(sizes=(70, 190), rows=260, columns=1040, depth=1024, rhs=E5M2),
    "masked": masked(sizes=(3, 0, 150, 300), rows=300, columns=144, depth=1040),
    "one group": weights(sizes=(700,), rows=700, columns=2064, depth=1024),
    "too many rows": weights(sizes=(-3, 400, 2**31 - 1, 5), rows=900, columns=304, depth=1024),
}
CASES = {f"few, {name}": case for name, case in FEW.items()}
CASES |= {f"many, {name}": case for name, case in MANY.items()}

needs_hopper = pytest.mark.skipif(
    "ffi.compute_capability() != 90", reason="needs compute capability 9.0"
)


def compiled(case, lhs, rhs, kernel=None, **more):
    """The output, the same twice, of one call of a kernel."""
    call = jax.jit(functools.partial(jaxfp8.ragged_dot, **more))
    operands = (lhs, rhs if case.k_first else rhs.mT, jnp.asarray(case.sizes, jnp.int32))
    text = call.lower(*operands).as_text()
    assert text.count(CALL) == 1
    before = ffi.kernel_calls("cuda")
    first, again = np.asarray(call(*operands)), np.asarray(call(*operands))
    called = {name for name, count in ffi.kernel_calls("cuda").items() if count > before[name]}
    assert called == {kernel} if kernel else called <= {STREAMS, TILES}
    np.testing.assert_array_equal(first.view(np.uint8), again.view(np.uint8))
    return first


def kernel_of(case):
    """The tiles of Hopper need many rows, lines of 16 bytes, and no scales along K in float16."""
    mean = case.rows if case.grouping == "masked" else -(-case.rows // len(case.sizes))
    line = case.columns if case.k_first else case.depth
    steps = case.lhs == "float16" and case.rhs_tile[1] < case.depth
    tiles = line % 16 == 0 and case.depth % 8 == 0 and not steps
    many = mean > 32 and case.depth >= 256
    return TILES if tiles and many and ffi.compute_capability() == 90 else STREAMS


@pytest.mark.parametrize("k_first", [False, True], ids=["NK", "KN"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_float64(name, dtype, k_first):
    case = dataclasses.replace(CASES[name], k_first=k_first)
    lhs, rhs, wide = case.draw()
    y = compiled(case, lhs, rhs, kernel_of(case), preferred_element_type=dtype)
    case.assert_right(y, wide, 0)


@pytest.mark.parametrize("seed", range(24))
def test_random_problems(seed):
    rng = np.random.default_rng(seed)
    groups, rows = int(rng.integers(1, 40)), int(rng.integers(1, (60, 900)[seed % 2]))
    grouping = ("rows", "masked")[seed % 3 == 0]
    rows = max(1, rows // groups) if grouping == "masked" else rows
    most = rows if grouping == "masked" else max(1, 2 * rows // groups)
    code = [E4M3, E5M2, "int8", "uint8"][rng.integers(4)]
    case = weights(
        sizes=tuple(int(size) for size in rng.integers(-1, most + 1, groups)),
        rows=rows,
        columns=int(rng.integers(1, 500)),
        depth=int(rng.integers(1, 1500)),
        lhs=("bfloat16", "float16")[rng.integers(2)],
        rhs=code,
        rhs_tile=(PLAIN, CHANNEL, STEPS, BLOCKS)[rng.integers(4)],
        zero_points=bool("int" in code and rng.integers(2)),
        k_first=bool(rng.integers(2)),
        grouping=grouping,
    )
    if seed % 4:  # lines of 16 bytes, as most kernels need them
        case = dataclasses.replace(
            case, columns=case.columns + -case.columns % 16, depth=case.depth + -case.depth % 16
        )
    lhs, rhs, wide = case.draw(seed)
    case.assert_right(compiled(case, lhs, rhs, preferred_element_type=jnp.float32), wide, 0)


@pytest.mark.parametrize("name", ["few, decode", "many, rows"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_special_rows_stay_in_their_group(name, value):
    case = CASES[name]
    lhs, rhs, wide = case.draw()
    special = wide[0].copy()
    special[0, 3] = value
    y = compiled(case, lhs.at[0, 3].set(value), rhs, preferred_element_type=jnp.float32)
    own = np.arange(case.rows) == 0
    assert not np.any(np.isfinite(y[own]))
    case.assert_right(
        np.where(own[:, None], 0, y).astype(y.dtype), (wide[0] * ~own[:, None], wide[1]), 0
    )


@pytest.mark.parametrize("name", ["few, decode", "many, rows"])
def test_nan_weights_stay_in_their_group(name):
    case = CASES[name]
    lhs, rhs, wide = case.draw()
    rhs, right = with_nan(rhs, wide[1], (2, 5, 7), (4, slice(None), 0))
    y = compiled(case, lhs, rhs, preferred_element_type=jnp.float32)
    case.assert_right(y, (wide[0], right), 0)
    assert np.any(np.isnan(y))


@pytest.mark.parametrize("dtype", [E4M3, E5M2, "int8", "uint8"])
@pytest.mark.parametrize("rows", [4, 600])
def test_every_code_counts(dtype, rows):
    """Column c of the second group has code c, and nothing else."""
    case = weights(sizes=(rows - 1, rows), rows=2 * rows, columns=256, depth=1024, rhs=dtype)
    codes = jnp.arange(256, dtype=jnp.uint8).view(dtype)
    values = jnp.zeros((2, 256, 1024), jnp.uint8).view(dtype).at[1, :, 131].set(codes)
    lhs = jnp.ones((2 * rows, 1024), jnp.bfloat16)
    y = compiled(
        case, lhs, jaxfp8.QArray(values, jnp.ones((1, 1, 1))), preferred_element_type=jnp.float32
    )
    assert not np.any(y[: rows - 1]) and not np.any(y[2 * rows - 1 :])
    wanted = np.asarray(codes).astype(np.float32)[None].repeat(rows, 0)
    np.testing.assert_array_equal(y[rows - 1 : 2 * rows - 1], wanted)


@pytest.mark.parametrize("name", ["few, no rows in groups", "many, rest"])
def test_rows_of_no_group_are_zeros_whatever_they_hold(name):
    case = CASES[name]
    lhs, rhs, _ = case.draw()
    end = sum(case.sizes)
    y = compiled(case, lhs.at[end:].set(jnp.nan), rhs)
    assert np.all(np.isfinite(y))
    assert not np.any(y[end:])


@pytest.mark.parametrize("name", ["few, decode", "many, rows"])
def test_sizes_may_change_from_call_to_call(name):
    case = CASES[name]
    lhs, rhs, wide = case.draw()
    call = jax.jit(functools.partial(jaxfp8.ragged_dot, preferred_element_type=jnp.float32))
    whole = (0, 0, 0, case.rows, 0, 0, 0)
    for sizes in ((1, 2, 3, 4, 5, 6, 7), whole, (case.rows // 7,) * 7):
        other = dataclasses.replace(case, sizes=sizes)
        other.assert_right(np.asarray(call(lhs, rhs.mT, jnp.asarray(sizes))), wide, 0)


@pytest.mark.parametrize(
    ("lhs", "tile", "message"),
    [("float32", CHANNEL, "16 bits"), ("bfloat16", (1, 64), "multiples of 128")],
)
def test_what_no_kernel_takes_is_scaled_dots(lhs, tile, message):
    case = dataclasses.replace(FEW["steps"], rhs_tile=tile)
    x, rhs, wide = case.draw()
    call = jax.jit(functools.partial(jaxfp8.ragged_dot, preferred_element_type=jnp.float32))
    with pytest.warns(jaxfp8.FallbackWarning, match=message):
        y = call(x.astype(lhs), rhs.mT, jnp.asarray(case.sizes, jnp.int32))
    case.assert_right(np.asarray(y), wide, 2.0**-9)


@needs_hopper
@pytest.mark.parametrize("name", CASES)
def test_a_call_may_name_the_kernel_of_other_gpus(name):
    case = CASES[name]
    lhs, rhs, wide = case.draw()
    masked_rows = (len(case.sizes),) if case.grouping == "masked" else ()
    out = jax.ShapeDtypeStruct((*masked_rows, case.rows, case.columns), np.float32)
    ffi.ensure_registered("cuda")
    zero = [] if rhs.zero_point is None else [rhs.zero_point.astype(jnp.int32)]
    y = jax.ffi.ffi_call(ffi.RAGGED_TARGET, out)(
        lhs,
        rhs.qvalue,
        jnp.asarray(case.sizes, jnp.int32),
        rhs.scale,
        *zero,
        lhs_scale=False,
        rhs_scale=True,
        rhs_zero_point=bool(zero),
        rhs_mn_major=False,
        lhs_tiles=np.array([1, case.depth]),
        rhs_tiles=np.asarray(case.rhs_tile),
        residual=False,
        bias=False,
        out_scale=False,
        amax=False,
        activation="none",
        out_dtype="float32",
        precision="default",
        kernel=STREAMS,
    )
    case.assert_right(np.asarray(y), wide, 0)
