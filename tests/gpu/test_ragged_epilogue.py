"""Epilogues inside the call of groups: bias, residual, activation, 8-bit output, amax."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged_case import FP8_LOSS, Ragged

import jaxfp8
from jaxfp8._call.library import ffi

CALL = "custom_call @jaxfp8_ragged_dot"
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
ALL = 10**6
UNEVEN = (3, 0, 129, 65, 0, 1, 200)
LINES = {"lhs_tile": (1, ALL), "rhs_tile": (1, ALL)}
weights = functools.partial(Ragged, lhs="bfloat16", rhs=E4M3, rhs_tile=(1, ALL))
masked = functools.partial(weights, grouping="masked")
# Rows of 16 bits: few take `sm80_w8a16`, many take the tiles of Hopper.
WEIGHTS = {
    "few": weights(sizes=(1, 8, 0, 3, 9, 0, 2), rows=25, columns=264, depth=400),
    "few, odd": weights(sizes=(5, 0, 1), rows=9, columns=131, depth=401, rhs=E5M2),
    "few, int8": weights(sizes=(2, 17, 4), rows=30, columns=136, depth=272, rhs="int8"),
    "few, zeros": weights(
        sizes=(2, 0, 4), rows=8, columns=72, depth=256, rhs="uint8", zero_points=True
    ),
    "few, masked": masked(sizes=(3, 0, 1, 9), rows=9, columns=136, depth=300),
    "many": weights(sizes=(300, 0, 129, 65, 0, 1, 1), rows=520, columns=528, depth=1040),
    "many, float16": weights(
        sizes=(200, 3, 70), rows=600, columns=528, depth=1088, lhs="float16", rhs=E5M2
    ),
    "many, blocks": weights(sizes=UNEVEN, rows=500, columns=528, depth=1024, rhs_tile=(128, 128)),
    "many, odd columns": weights(sizes=(70, 190), rows=280, columns=531, depth=1040),
    "many, masked": masked(sizes=(3, 0, 150, 300), rows=300, columns=144, depth=1040),
    "one group": weights(sizes=(700,), rows=700, columns=400, depth=1024),
    "no rows in groups": weights(sizes=(0, 0), rows=170, columns=400, depth=1024),
}
# Two 8-bit operands: sums scaled once, or every 128 of K.
EIGHT_BIT = {
    "once": Ragged(sizes=UNEVEN, rows=430, columns=264, depth=400, **LINES),
    "blocks": Ragged(sizes=UNEVEN, rows=430, columns=264, depth=400),
    "odd": Ragged(sizes=UNEVEN, rows=430, columns=131, depth=401, rhs=E5M2, **LINES),
    "int8": Ragged(sizes=UNEVEN, rows=430, columns=136, depth=272, lhs="int8", rhs="int8", **LINES),
    "masked, blocks": Ragged(
        sizes=(3, 0, 150, 90), rows=150, columns=136, depth=300, grouping="masked"
    ),
    "one of all rows": Ragged(sizes=(0, 300, 0), rows=300, columns=264, depth=256, **LINES),
}
HOPPER = pytest.mark.skipif("ffi.compute_capability() != 90", reason="needs Hopper")
CASES = {f"weights, {name}": case for name, case in WEIGHTS.items()}
CASES |= {f"8 bits, {name}": pytest.param(case, marks=HOPPER) for name, case in EIGHT_BIT.items()}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
CURVES = {
    "relu": lambda y: np.maximum(y, 0),
    "silu": lambda y: y / (1 + np.exp(np.minimum(-y, 700))),
}


def compiled(case, lhs, rhs, operands, **settings):
    """The results, the same twice, of one call that has the epilogue."""
    call = jax.jit(functools.partial(jaxfp8.ragged_dot, **settings))
    given = (lhs, rhs.mT, jnp.asarray(case.sizes, jnp.int32))
    text = call.lower(*given, **operands).as_text()
    (line,) = [line for line in text.splitlines() if CALL in line]
    for name in operands:
        assert f"{name} = true" in line
    assert f'activation = "{settings.get("activation") or "none"}"' in line
    before = ffi.kernel_calls("cuda")
    first, again = (jax.tree.map(np.asarray, call(*given, **operands)) for _ in range(2))
    called = {name for name, count in ffi.kernel_calls("cuda").items() if count > before[name]}
    assert called and called <= {"sm80_w8a16", "sm90_gemm"}
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        assert one.tobytes() == other.tobytes()
    return first


def bias_of_rows(case, bias):
    """The bias of each row's group; zeros for rows of none."""
    if case.grouping == "masked":
        return np.where(case.outside()[..., None], 0, bias[:, None])
    own = case.groups_along(case.rows)
    return np.where(own[:, None] < 0, 0, bias[own])


def drawn(case, seed=0, residual=jnp.bfloat16):
    """Operands, the sums before the activation, and what they may be off by."""
    rng = np.random.default_rng(seed)
    lhs, rhs, wide = case.draw(seed)
    sums, size = case.expected(wide)
    spread = float(np.std(sums)) or 1.0
    bias = (spread * rng.standard_normal((len(case.sizes), case.columns))).astype(np.float32)
    added = jnp.asarray(spread * rng.standard_normal(sums.shape), residual)
    z = sums + bias_of_rows(case, bias) + np.asarray(added, np.float64)
    size = size + abs(bias_of_rows(case, bias)) + abs(np.asarray(added, np.float64))
    loss = FP8_LOSS if case.lhs.startswith("float8") else 0
    bound = 1.2 * ((case.depth + 12) * 2.0**-24 + loss) * size
    return lhs, rhs, {"bias": bias, "residual": added}, z, bound


def near(y, wanted, bound):
    last = {2: 2.0**-8, 4: 2.0**-22}[y.dtype.itemsize]
    off = abs(y.astype(np.float64) - wanted)
    right = off <= 1.1 * (bound + last * abs(wanted))
    assert y.shape == wanted.shape
    assert np.all(right), f"{np.sum(~right)} of {right.size} outputs, off by up to {off.max()}"


@each_case
@pytest.mark.parametrize(("activation", "dtype"), [("silu", "bfloat16"), ("relu", "float32")])
def test_the_equation(case, activation, dtype):
    lhs, rhs, operands, z, bound = drawn(case)
    y, amax = compiled(
        case,
        lhs,
        rhs,
        operands,
        activation=activation,
        return_amax=True,
        preferred_element_type=dtype,
    )
    wanted = CURVES[activation](z)
    near(y, wanted, bound)
    near(amax[None], abs(wanted).max()[None], bound.max())


@each_case
def test_a_bias_alone(case):
    """Where sums are scaled once and the output lies in aligned boxes, it is stored by copies."""
    dtype = "float32" if case.rows == 300 else "bfloat16"
    lhs, rhs, operands, z, bound = drawn(case)
    z = z - np.asarray(operands.pop("residual"), np.float64)
    y = compiled(case, lhs, rhs, operands, preferred_element_type=dtype)
    near(y, z, bound)
    assert not np.any(y[case.outside()])


@each_case
def test_an_output_of_8_bits(case):
    """Codes are those of a wide output of the same sums, or their neighbours."""
    lhs, rhs, operands, z, _ = drawn(case)
    amax, per_row = max(abs(z).max(), 1.0), case.columns % 16 == 0
    scale = np.full((*z.shape[:-1], 1) if per_row else (1,) * z.ndim, amax / 100, np.float32)
    settings = {"activation": "relu", "preferred_element_type": "int8"}
    q = compiled(case, lhs, rhs, {**operands, "out_scale": scale}, **settings)
    wide = compiled(case, lhs, rhs, operands, activation="relu", preferred_element_type="float32")
    off = abs(np.asarray(q.qvalue, np.int32) - np.clip(np.round(wide / scale), -128, 127))
    assert off.max() <= 1 and np.mean(off > 0) < 0.01


@pytest.mark.parametrize("name", ["few", "many"])
def test_a_nan_stays_in_its_group(name):
    """One in the bias of a group, and one in a row."""
    case = WEIGHTS[name]
    lhs, rhs, operands, z, bound = drawn(case)
    own = case.groups_along(case.rows)
    group, row = own.max(), 0
    operands["bias"][group, 5] = np.nan
    y = compiled(
        case, lhs.at[row, 3].set(np.nan), rhs, operands, preferred_element_type=jnp.float32
    )
    lost = np.zeros(y.shape, bool)
    lost[own == group, 5] = True
    lost[row] = True
    np.testing.assert_array_equal(np.isnan(y), lost)
    near(np.where(lost, 0, y).astype(np.float32), np.where(lost, 0, z), bound)


EMPTY_FIRST = functools.partial(Ragged, sizes=(0, 5), rows=300, depth=256)


@pytest.mark.parametrize("columns", [264, 131])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(LINES, marks=HOPPER, id="once"),
        pytest.param({}, marks=HOPPER, id="blocks"),
        pytest.param({**LINES, "lhs": "int8", "rhs": "int8"}, marks=HOPPER, id="int8"),
        pytest.param({"lhs": "bfloat16", "rhs_tile": (1, ALL)}, id="weights"),
    ],
)
def test_a_nan_scale_of_an_empty_group_stays_there(settings, columns):
    """Rows of no group have no scale; kernels must not take that of the first group."""
    case = EMPTY_FIRST(columns=columns, **settings)
    lhs, rhs, wide = case.draw()
    rhs = dataclasses.replace(rhs, scale=rhs.scale.at[0].set(np.nan))
    call = functools.partial(jaxfp8.ragged_dot, preferred_element_type=jnp.float32)
    for activation in (None, "relu"):
        y = call(lhs, rhs.mT, jnp.array([0, 5]), activation=activation)
        assert not np.any(np.asarray(y)[5:])
    loss = 0 if case.lhs in ("bfloat16", "int8") else FP8_LOSS
    case.assert_right(np.asarray(call(lhs, rhs.mT, jnp.array([0, 5]))), wide, loss)


@pytest.mark.parametrize("seed", range(10))
def test_random_problems(seed):
    rng = np.random.default_rng(seed)
    groups, rows = int(rng.integers(1, 12)), int(rng.integers(1, (60, 700)[seed % 2]))
    case = weights(
        sizes=tuple(int(size) for size in rng.integers(-1, 2 * rows // groups + 1, groups)),
        rows=rows,
        columns=int(rng.integers(1, 40)) * (1, 16)[seed // 2 % 2],
        depth=int(rng.integers(1, 80)) * 16,
        lhs=("bfloat16", "float16")[rng.integers(2)],
        rhs=(E4M3, "int8")[rng.integers(2)],
    )
    lhs, rhs, operands, z, bound = drawn(case, seed, (jnp.bfloat16, jnp.float32)[seed % 2])
    y = compiled(case, lhs, rhs, operands, activation="silu", preferred_element_type="float32")
    near(y, CURVES["silu"](z), bound)


def test_sizes_may_change_from_call_to_call():
    case = WEIGHTS["many"]
    call = jax.jit(functools.partial(jaxfp8.ragged_dot, preferred_element_type=jnp.float32))
    for sizes in ((1, 2, 3, 4, 5, 6, 7), (0, 0, 0, case.rows, 0, 0, 0), (74,) * 7):
        other = dataclasses.replace(case, sizes=sizes)
        lhs, rhs, operands, z, bound = drawn(other)
        near(np.asarray(call(lhs, rhs.mT, jnp.asarray(sizes), **operands)), z, bound)


@pytest.mark.parametrize(
    ("operands", "attributes", "message"),
    [
        ({"bias": (3, 8)}, {}, r"`bias` is float32 of \(3, 8\), but needs to be float32 of \(2, 8"),
        ({"bias": (8,)}, {}, "`bias` is float32"),
        ({"residual": (3, 8)}, {}, "`residual` is float32"),
        ({"out_scale": (1, 1)}, {}, "`out_dtype` is `float32`"),
        ({}, {"out_dtype": "int8"}, "8 bits beside `out_scale`"),
        ({}, {"activation": "tanh"}, "`activation` is `tanh`"),
        ({}, {"bias": True}, "`bias` is missing"),
        ({}, {"amax": True}, "`amax` is missing"),
    ],
    ids=["groups", "rank", "rows", "scale", "8 bits", "activation", "bias", "amax"],
)
def test_a_wrong_call_is_an_error(operands, attributes, message):
    given = {name: True for name in operands}
    none = dict.fromkeys(("residual", "bias", "out_scale", "amax"), False)
    settings = {**none, "activation": "none", "out_dtype": "float32", **given, **attributes}
    arrays = [jnp.ones((4, 32), jnp.bfloat16), jnp.ones((2, 8, 32), E4M3), jnp.array([1, 2])]
    arrays += [jnp.ones(shape, jnp.float32) for shape in operands.values()]
    ffi.ensure_registered("cuda")
    with pytest.raises(Exception, match="jaxfp8_ragged_dot.*" + message):
        jax.block_until_ready(
            jax.ffi.ffi_call(ffi.RAGGED_TARGET, [jax.ShapeDtypeStruct((4, 8), np.float32)])(
                *arrays,
                lhs_scale=False,
                rhs_scale=False,
                rhs_zero_point=False,
                rhs_mn_major=False,
                lhs_tiles=np.array([1, 32]),
                rhs_tiles=np.array([1, 32]),
                precision="default",
                kernel="",
                **settings,
            )
        )
