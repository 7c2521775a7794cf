"""Groups of rows, or along the contracted axis: one launch of `sm90_gemm` on Hopper."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged_case import FP8_LOSS, Ragged, with_nan

import jaxfp8
from jaxfp8._call.library import ffi

CALL = "custom_call @jaxfp8_ragged_dot"
E5M2 = "float8_e5m2"
LINES = {"lhs_tile": (1, 10**6), "rhs_tile": (1, 10**6)}
TENSOR = {"lhs_tile": (10**6, 10**6), "rhs_tile": (10**6, 10**6)}
BLOCKS_OF_LINES = {"lhs_tile": (1, 128), "rhs_tile": (1, 128)}
masked = functools.partial(Ragged, grouping="masked")
along_k = functools.partial(Ragged, grouping="contracted")
UNEVEN = (3, 0, 129, 65, 0, 1, 200)
CASES = {
    "blocks": Ragged(sizes=UNEVEN, rows=430, columns=264, depth=400),
    "odd": Ragged(sizes=UNEVEN, rows=398, columns=131, depth=401, rhs=E5M2, **LINES),
    "tensor": Ragged(sizes=(0, 0, 7), rows=40, columns=33, depth=17, lhs=E5M2, **TENSOR),
    "wide tiles": Ragged(
        sizes=(70, 2), rows=80, columns=140, depth=600, lhs_tile=(3, 256), rhs_tile=(5, 384)
    ),
    "no rows in groups": Ragged(sizes=(0, 0), rows=70, columns=40, depth=128),
    "too many rows": Ragged(sizes=(-3, 60, 2**31 - 1, 2**31 - 1), rows=90, columns=72, depth=256),
    "many groups": Ragged(
        sizes=tuple(i * 37 % 11 for i in range(600)), rows=3100, columns=24, depth=48, **LINES
    ),
    "int8": Ragged(sizes=UNEVEN, rows=400, columns=136, depth=272, lhs="int8", rhs="int8", **LINES),
    "uint8": Ragged(sizes=(5, 64), rows=70, columns=40, depth=33, lhs="uint8", rhs="int8", **LINES),
    "masked": masked(sizes=(3, 0, 150, 200), rows=150, columns=136, depth=300),
    "masked rows": masked(sizes=(65, -1, 9), rows=67, columns=33, depth=40, lhs_tile=(3, 10**6)),
    "masked int8": masked(
        sizes=(1, 0), rows=3, columns=8, depth=16, lhs="int8", rhs="int8", **TENSOR
    ),
    "along K, tensor": along_k(sizes=UNEVEN, rows=131, columns=261, depth=400, **TENSOR),
    "along K, lines": along_k(sizes=UNEVEN, rows=67, columns=33, depth=401, lhs=E5M2, **LINES),
    "along K, blocks of lines": along_k(
        sizes=(*UNEVEN, 128, 256), rows=131, columns=261, depth=801, **BLOCKS_OF_LINES
    ),
    "along K, blocks": along_k(sizes=UNEVEN, rows=301, columns=391, depth=430, rhs=E5M2),
    "along K, square blocks": along_k(
        sizes=UNEVEN, rows=140, columns=131, depth=430, lhs_tile=(128, 128)
    ),
    "along K, wide tiles": along_k(
        sizes=(70, 200), rows=80, columns=140, depth=600, lhs_tile=(3, 256), rhs_tile=(5, 384)
    ),
    "along K, short": along_k(sizes=(1, 2, 0, 5), rows=3, columns=5, depth=9, **TENSOR),
    "along K, whole steps": along_k(sizes=(128, 384, 0, 256), rows=256, columns=192, depth=768),
    "along K, no positions": along_k(sizes=(0, 0, 0), rows=70, columns=40, depth=128),
    "along K, too many": along_k(
        sizes=(-3, 60, 2**31 - 1, 2**31 - 1), rows=90, columns=72, depth=260, **LINES
    ),
    "along K, many groups": along_k(
        sizes=tuple(i * 37 % 11 for i in range(600)), rows=17, columns=24, depth=3100, **LINES
    ),
    "along K, int8": along_k(
        sizes=UNEVEN, rows=131, columns=261, depth=410, lhs="int8", rhs="int8", **LINES
    ),
    "along K, uint8": along_k(
        sizes=(5, 64), rows=71, columns=41, depth=90, lhs="uint8", rhs="int8", **LINES
    ),
}
GROUPINGS = ("rows", "masked", "contracted")


def is_hopper():
    return ffi.compute_capability() == 90


needs_hopper = pytest.mark.skipif("not is_hopper()", reason="needs compute capability 9.0")


def compiled(case, lhs, rhs, **more):
    """The output, the same twice, of one call."""
    call = jax.jit(functools.partial(jaxfp8.ragged_dot, **more))
    operands = (lhs, rhs.mT, jnp.asarray(case.sizes, jnp.int32))
    assert call.lower(*operands).as_text().count(CALL) == 1
    before = ffi.kernel_calls("cuda")["sm90_gemm"]
    first, again = np.asarray(call(*operands)), np.asarray(call(*operands))
    assert ffi.kernel_calls("cuda")["sm90_gemm"] > before
    np.testing.assert_array_equal(first.view(np.uint8), again.view(np.uint8))
    return first


def loss(case):
    return FP8_LOSS if case.lhs.startswith("float8") else 0


@needs_hopper
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_are_those_of_float64(name, dtype):
    case = CASES[name]
    lhs, rhs, wide = case.draw()
    case.assert_right(compiled(case, lhs, rhs, preferred_element_type=dtype), wide, loss(case))


@needs_hopper
@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("seed", range(12))
def test_random_problems(seed, grouping):
    rng = np.random.default_rng([seed, GROUPINGS.index(grouping)])
    groups, rows, depth = rng.integers(1, 20), *map(int, rng.integers(1, (400, 700)))
    most = rows if grouping == "masked" else max(1, 2 * rows // groups)
    most = max(1, 2 * depth // groups) if grouping == "contracted" else most
    tiles = [{}, LINES, TENSOR, BLOCKS_OF_LINES][rng.integers(4)]
    case = Ragged(
        sizes=tuple(int(size) for size in rng.integers(-1, most + 1, groups)),
        rows=rows,
        columns=int(rng.integers(1, 500)),
        depth=depth,
        grouping=grouping,
        **tiles,
    )
    dtype = "bfloat16" if seed % 2 else "float32"
    if seed % 2:  # lines of 16 bytes, for stores by boxes
        case = dataclasses.replace(case, columns=case.columns + -case.columns % 8)
    lhs, rhs, wide = case.draw(seed)
    case.assert_right(compiled(case, lhs, rhs, preferred_element_type=dtype), wide, loss(case))


@needs_hopper
def test_weights_that_are_no_lines_of_k_are_transposed():
    case = CASES["blocks"]
    lhs, rhs, wide = case.draw()
    turned = jaxfp8.QArray(rhs.qvalue.mT, rhs.scale.mT, tiles=(1, 128, 128))
    call = jax.jit(functools.partial(jaxfp8.ragged_dot, preferred_element_type=jnp.float32))
    y = call(lhs, turned, jnp.asarray(case.sizes, jnp.int32))
    case.assert_right(np.asarray(y), wide, FP8_LOSS)


@needs_hopper
def test_tokens_that_are_no_lines_of_k_are_transposed():
    case = CASES["along K, blocks of lines"]
    lhs, rhs, wide = case.draw()
    x, dy = (jaxfp8.QArray(q.qvalue.T, q.scale.T, tiles=(128, 1)) for q in (lhs, rhs))
    call = jax.jit(lambda x, dy, sizes: jaxfp8.ragged_dot(x.T, dy, sizes))
    y = call(x, dy, jnp.asarray(case.sizes, jnp.int32))
    case.assert_right(np.asarray(y), wide, FP8_LOSS)


@needs_hopper
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", E5M2])
def test_every_code_counts_and_nan_stays_in_its_group(dtype):
    case = Ragged(sizes=(140, 116), rows=300, columns=16, depth=128, lhs=dtype, rhs=dtype)
    one = jnp.asarray(1, dtype)
    # Row r has code r in one place; a column of the second group has one NaN.
    codes = jnp.arange(256, dtype=jnp.uint8).view(dtype)
    left = jnp.zeros((300, 128), dtype).at[jnp.arange(256), 5].set(codes)
    right = jnp.full((2, 16, 128), one).at[1, 3, 77].set(jnp.asarray(np.nan, dtype))
    unit = jnp.ones((1, 1), jnp.float32)
    y = compiled(
        case,
        jaxfp8.QArray(left, unit),
        jaxfp8.QArray(right, unit[None]),
        preferred_element_type=jnp.float32,
    )
    wanted = np.zeros((300, 16), np.float32)
    wanted[:256] = np.asarray(codes).astype(np.float32)[:, None]
    wanted[140:256, 3] = np.nan
    np.testing.assert_array_equal(y, wanted)


@needs_hopper
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", E5M2])
def test_every_code_counts_in_its_group_along_k(dtype):
    """Row r has code r in the second group, and nothing else; NaN stays in its row."""
    case = along_k(sizes=(130, 3, 60), rows=256, columns=17, depth=200, lhs=dtype, rhs=dtype)
    codes = jnp.arange(256, dtype=jnp.uint8).view(dtype)
    left = jnp.zeros((256, 200), dtype).at[:, 131].set(codes)
    right, unit = jnp.ones((17, 200), dtype), jnp.ones((1, 1), jnp.float32)
    y = compiled(
        case,
        jaxfp8.QArray(left, unit),
        jaxfp8.QArray(right, unit),
        preferred_element_type=jnp.float32,
    )
    np.testing.assert_array_equal(y[1], np.asarray(codes, np.float32)[:, None].repeat(17, 1))
    assert not np.any(y[[0, 2]])


@needs_hopper
@pytest.mark.parametrize("name", ["along K, tensor", "along K, blocks of lines", "along K, blocks"])
@pytest.mark.parametrize("at", [0, 2, 131, 132, 196, 197])
def test_nan_stays_in_its_group_along_k(name, at):
    """At the first and the last position of groups; positions of no group hold NaN, too."""
    case = dataclasses.replace(CASES[name], sizes=(3, 0, 129, 65, 0, 1, 100))
    lhs, rhs, wide = case.draw()
    rest = (slice(None), slice(298, None))
    lhs, left = with_nan(lhs, wide[0], (2, at), rest)
    rhs, right = with_nan(rhs, wide[1], (5, at), rest)
    y = compiled(case, lhs, rhs, preferred_element_type=jnp.float32)
    case.assert_right(y, (left, right), FP8_LOSS)
    assert np.any(np.isnan(y))


@needs_hopper
def test_scales_of_other_positions_do_not_count_along_k():
    case = dataclasses.replace(CASES["along K, blocks of lines"], sizes=(130, 126))
    lhs, rhs, wide = case.draw()
    lhs, rhs = (dataclasses.replace(q, scale=q.scale.at[:, 2:].set(jnp.nan)) for q in (lhs, rhs))
    case.assert_right(compiled(case, lhs, rhs, preferred_element_type=jnp.float32), wide, FP8_LOSS)


@needs_hopper
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize(("sizes", "k"), [((0, 30, 0), 32), ((0, 30, 4), 30)], ids=["", "padded"])
def test_an_empty_group_along_k_is_zeros_whatever_the_scales(dtype, sizes, k):
    case = along_k(sizes=sizes, rows=2, columns=8, depth=k)
    lhs, rhs = (jaxfp8.QArray(jnp.ones((n, k), dtype), jnp.full((1, 1), np.nan)) for n in (2, 8))
    y = compiled(case, lhs, rhs)
    np.testing.assert_array_equal(y, np.array([0, np.nan, 0]).repeat(16).reshape(3, 2, 8))


@needs_hopper
def test_rows_of_no_group_are_zeros_whatever_they_hold():
    case = dataclasses.replace(CASES["blocks"], sizes=(100,))
    lhs, rhs, _ = case.draw()
    nan = jnp.asarray(np.nan, lhs.qvalue.dtype)
    lhs = jaxfp8.QArray(lhs.qvalue.at[100:].set(nan), lhs.scale.at[101:].set(jnp.inf))
    lhs = dataclasses.replace(lhs, tiles=(1, 128))
    y = compiled(case, lhs, rhs, preferred_element_type=jnp.float32)
    assert np.all(np.isfinite(y))
    assert not np.any(y[100:])


@needs_hopper
@pytest.mark.parametrize("name", ["blocks", "along K, blocks"])
def test_sizes_may_change_from_call_to_call(name):
    case = CASES[name]
    lhs, rhs, wide = case.draw()
    call = jax.jit(functools.partial(jaxfp8.ragged_dot, preferred_element_type=jnp.float32))
    for sizes in ((1, 2, 3, 4, 5, 6, 7), (0, 0, 0, 400, 0, 0, 0), (61,) * 7):
        other = dataclasses.replace(case, sizes=sizes)
        y = call(lhs, rhs.mT, jnp.asarray(sizes, jnp.int32))
        other.assert_right(np.asarray(y), wide, FP8_LOSS)


def test_what_the_kernel_does_not_take_is_scaled_dots():
    case = CASES["int8"]
    _, rhs, wide = case.draw()
    wide_rows = jnp.asarray(wide[0], jnp.float32)
    call = jax.jit(functools.partial(jaxfp8.ragged_dot, preferred_element_type=jnp.float32))
    with pytest.warns(jaxfp8.FallbackWarning, match="is computed group by group"):
        y = call(wide_rows, rhs.mT, jnp.asarray(case.sizes, jnp.int32))
    case.assert_right(np.asarray(y), wide, 2.0**-9)


@needs_hopper
@pytest.mark.parametrize("grouping", ["rows", "contracted"])
def test_the_highest_precision_loses_nothing_of_a_long_sum(grouping):
    ones = jaxfp8.QArray(jnp.ones((3, 2**16), jnp.float8_e4m3fn), jnp.ones((1, 1)))
    rhs = ones.mT if grouping == "contracted" else jaxfp8.QArray(ones.qvalue.mT[None], 1.0)
    sizes = jnp.array([2**16 if grouping == "contracted" else 3])
    y = jax.jit(functools.partial(jaxfp8.ragged_dot, precision="highest"))(ones, rhs, sizes)
    np.testing.assert_array_equal(np.asarray(y), np.full(y.shape, 2.0**16))


@needs_hopper
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, a: (x[:2], a), "it needs lhs, rhs and group_sizes"),
        (lambda x, a: ([x[0][None], x[1][0], *x[2:]], a), "need two axes or three"),
        (lambda x, a: ([x[0][:, :10], *x[1:]], a), "`lhs` is"),
        (lambda x, a: ([x[0], x[1][..., :10], *x[2:]], a), "has 10 values"),
        (lambda x, a: ([*x[:2], x[2][:1], *x[3:]], a), "`group_sizes` is int32"),
        (lambda x, a: (x, {**a, "lhs_tiles": np.zeros(2, np.int64)}), "need two sizes"),
        (lambda x, a: (x, {k: v for k, v in a.items() if k != "rhs_scale"}), "is missing"),
        (lambda x, a: (x, {**a, "precision": "high"}), "`precision` is `high`"),
        (lambda x, a: ([*x, x[0]], a), "the call has 5 operands"),
    ],
    ids=["operands", "ranks", "lhs", "K", "sizes", "tiles", "attribute", "precision", "more"],
)
def test_a_wrong_call_is_an_error(change, message):
    attributes = {
        "lhs_scale": True,
        "rhs_scale": False,
        "rhs_zero_point": False,
        "rhs_mn_major": False,
        "lhs_tiles": np.array([1, 32], np.int64),
        "rhs_tiles": np.array([1, 32], np.int64),
        **dict.fromkeys(("residual", "bias", "out_scale", "amax"), False),
        "activation": "none",
        "out_dtype": "float32",
        "precision": "default",
        "kernel": "",
    }
    fp8 = jnp.float8_e4m3fn
    operands = [jnp.ones((4, 32), fp8), jnp.ones((2, 8, 32), fp8), jnp.array([1, 2])]
    operands, attributes = change([*operands, jnp.ones((4, 1))], attributes)
    out = jax.ShapeDtypeStruct((4, 8), np.float32)
    ffi.ensure_registered("cuda")
    with pytest.raises(Exception, match="jaxfp8_ragged_dot.*" + message):
        jax.block_until_ready(jax.ffi.ffi_call(ffi.RAGGED_TARGET, out)(*operands, **attributes))
