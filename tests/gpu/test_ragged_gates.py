"""A gate of groups inside their launch: against float64, and against two passes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gpu.test_ragged_epilogue import CALL, CURVES, bias_of_rows, compiled, drawn, near
from ragged_case import Ragged

import jaxfp8
import jaxfp8.nnx
from jaxfp8._call.library import ffi

pytestmark = pytest.mark.skipif("ffi.compute_capability() < 90", reason="needs clusters")

ALL = 10**6
TENSOR, CHANNEL, STEPS, BLOCKS = (ALL, ALL), (1, ALL), (1, 128), (128, 128)
weights = functools.partial(Ragged, lhs="bfloat16", rhs="float8_e4m3fn", rhs_tile=CHANNEL)
CASES = {
    "decode": weights(sizes=(1, 8, 0, 3, 9, 0, 2), rows=25, columns=544, depth=400),
    "one row": weights(sizes=(0, 1), rows=1, columns=32, depth=64, lhs="float16"),
    "all rows in one": weights(sizes=(0, 12, 0), rows=12, columns=256, depth=1030, rhs_tile=TENSOR),
    "no rows in groups": weights(sizes=(0, 0, 0), rows=9, columns=96, depth=128),
    "a large group": weights(sizes=(50, 0, 1, 2, 0, 3), rows=60, columns=320, depth=384),
    "int8": weights(sizes=(2, 7, 4), rows=15, columns=288, depth=272, rhs="int8"),
    "uint8": weights(sizes=(2, 0, 4), rows=6, columns=64, depth=256, rhs="uint8"),
    "blocks": weights(
        sizes=(3, 0, 9, 1), rows=16, columns=512, depth=512, lhs="float16", rhs_tile=BLOCKS
    ),
    "steps": weights(sizes=(4, 3, 9), rows=18, columns=288, depth=384, rhs_tile=STEPS),
    "split K": weights(sizes=(1, 2), rows=3, columns=64, depth=8192, rhs="float8_e5m2"),
    "many groups": weights(
        sizes=tuple(i * 37 % 11 for i in range(600)), rows=3100, columns=64, depth=48
    ),
    "too many rows": weights(sizes=(-3, 6, 2**31 - 1, 2**31 - 1), rows=20, columns=160, depth=256),
    "masked": weights(
        sizes=(3, 0, 1, 9), rows=9, columns=288, depth=300, rhs="int8", grouping="masked"
    ),
}


def halves(z):
    return np.split(z, 2, -1)


def assert_gated(y, activation, z, bound):
    """Either half may be off by its bound; the curves have slopes of at most 1.13."""
    (gate, up), (off_gate, off_up) = halves(z), halves(1.13 * bound)
    curve = CURVES[activation](gate)
    off = abs(curve) * off_up + off_gate * abs(up) + off_gate * off_up
    near(y, curve * up, off)


@pytest.mark.parametrize("k_first", [False, True], ids=["NK", "KN"])
@pytest.mark.parametrize(("activation", "dtype"), [("silu", "bfloat16"), ("relu", "float32")])
@pytest.mark.parametrize("name", CASES)
def test_the_equation(name, activation, dtype, k_first):
    case = dataclasses.replace(CASES[name], k_first=k_first)
    lhs, rhs, operands, z, bound = drawn(case)
    z = z - np.asarray(operands.pop("residual"), np.float64)
    settings = {"activation": activation, "gated": True, "preferred_element_type": dtype}
    before = ffi.kernel_calls("cuda")
    y = compiled(case, lhs, rhs, operands, **settings)
    assert ffi.kernel_calls("cuda")["sm80_w8a16"] == before["sm80_w8a16"] + 2
    assert_gated(y, activation, z, bound)
    assert not np.any(y[case.outside()])


@pytest.mark.parametrize("k_first", [False, True], ids=["NK", "KN"])
@pytest.mark.parametrize("rhs", ["float8_e4m3fn", "float8_e5m2", "int8", "uint8"])
def test_with_one_tile_of_k_the_bits_are_those_of_a_pass_behind_the_call(rhs, k_first):
    case = weights(sizes=(2, 0, 5, 9), rows=19, columns=544, depth=128, rhs=rhs, k_first=k_first)
    lhs, rhs, operands, _, _ = drawn(case)
    operands.pop("residual")
    sums = compiled(case, lhs, rhs, operands, preferred_element_type="float32")
    y = compiled(case, lhs, rhs, operands, gated=True, preferred_element_type="float32")
    gate, up = halves(sums)
    np.testing.assert_array_equal(y, gate * up)


@pytest.mark.parametrize("half", [0, 1], ids=["gate", "up"])
def test_a_nan_stays_in_its_group(half):
    """One in the scale of a column, and one in a row."""
    case = weights(sizes=(0, 3, 2), rows=8, columns=96, depth=256)
    lhs, rhs, operands, z, bound = drawn(case)
    z = z - np.asarray(operands.pop("residual"), np.float64)
    scale = rhs.scale.at[0].set(np.nan).at[2, 48 * half + 5].set(np.nan)
    rhs, own = dataclasses.replace(rhs, scale=scale), case.groups_along(case.rows)
    settings = {"gated": True, "activation": "silu", "preferred_element_type": "float32"}
    y = compiled(case, lhs.at[1, 3].set(np.nan), rhs, operands, **settings)
    lost = np.zeros(y.shape, bool)
    lost[own == 2, 5] = True
    lost[1] = True
    np.testing.assert_array_equal(np.isnan(y), lost)
    both = np.concatenate([lost, lost], -1)
    assert_gated(np.where(lost, 0, y).astype(np.float32), "silu", np.where(both, 0, z), bound)


def test_sizes_may_change_from_call_to_call():
    case = CASES["decode"]
    settings = {"gated": True, "activation": "silu", "preferred_element_type": jnp.float32}
    call = jax.jit(functools.partial(jaxfp8.ragged_dot, **settings))
    for sizes in ((1, 2, 3, 4, 5, 6, 4), (0, 0, 0, case.rows, 0, 0, 0), (0,) * 7):
        other = dataclasses.replace(case, sizes=sizes)
        lhs, rhs, operands, z, bound = drawn(other)
        z = z - np.asarray(operands.pop("residual"), np.float64)
        y = np.asarray(call(lhs, rhs.mT, jnp.asarray(sizes), **operands))
        assert_gated(y, "silu", z, bound)


@pytest.mark.parametrize("seed", range(12))
def test_random_problems(seed):
    rng = np.random.default_rng(seed)
    groups = int(rng.integers(2, 40))
    rows = int(rng.integers(1, 10 * groups))
    case = weights(
        sizes=tuple(int(size) for size in rng.integers(-1, 2 * rows // groups + 2, groups)),
        rows=rows,
        columns=32 * int(rng.integers(1, 12)),
        depth=int(rng.integers(1, 1500)),
        lhs=("bfloat16", "float16")[rng.integers(2)],
        rhs=("float8_e4m3fn", "float8_e5m2", "int8")[rng.integers(3)],
        k_first=bool(rng.integers(2)),
    )
    lhs, rhs, operands, z, bound = drawn(case, seed)
    z = z - np.asarray(operands.pop("residual"), np.float64)
    if seed % 2:
        z, operands = z - bias_of_rows(case, operands["bias"]), {}
    settings = {"activation": "silu", "gated": True, "preferred_element_type": "float32"}
    assert_gated(compiled(case, lhs, rhs, operands, **settings), "silu", z, bound)


def silu_and_factor(y):
    """The gate of a layer, as a function that no call has."""
    gate, up = jnp.split(y, 2, -1)
    return jax.nn.silu(gate) * up


def one_gate(f, x):
    """The output of a program with one gate in its calls."""
    text = jax.jit(f).lower(x).as_text()
    assert sum("gated = true" in line for line in text.splitlines() if CALL in line) == 1
    return np.asarray(jax.jit(f)(x), np.float64)


@pytest.mark.skipif("jax.device_count() > 1", reason="a program may be split over devices")
@pytest.mark.parametrize("count", [1, 8])
def test_a_layer_of_experts_has_its_gate_in_the_call(count):
    def layer(**settings):
        sizes = {"num_experts": 8, "top_k": 2, "dtype": jnp.bfloat16}
        model = nnx.Dict(moe=jaxfp8.nnx.MoE(256, 384, **sizes, **settings, rngs=nnx.Rngs(0)))
        jaxfp8.nnx.quantize(model, jaxfp8.FP8_W8A16)
        return model.moe

    x = jax.random.normal(jax.random.key(1), (count, 256), jnp.bfloat16)
    y = one_gate(lambda x: layer()(x), x)
    apart = np.asarray(jax.jit(lambda x: layer(glu=silu_and_factor)(x))(x), np.float64)
    assert np.linalg.norm(y - apart) < 2**-7 * np.linalg.norm(apart)


def test_an_unmodified_program_has_its_gate_in_the_call():
    w = jax.random.normal(jax.random.key(0), (5, 256, 768)) / 16
    q, sizes = jaxfp8.quantize(w, channelwise_axes=(0, 2)), jnp.array([3, 0, 2, 9, 1])
    x = jax.random.normal(jax.random.key(1), (17, 256), jnp.bfloat16)

    def program(x):
        w = q.qvalue.astype(x.dtype) * q.scale.astype(x.dtype)
        return silu_and_factor(jax.lax.ragged_dot(x, w, sizes))

    y = one_gate(jaxfp8.rewrite(program, strict=True), x)
    scale = np.asarray(q.scale.astype(x.dtype), np.float64)
    wide = np.asarray(q.qvalue, np.float64) * scale
    own = np.repeat(np.arange(5), np.asarray(sizes))
    gate, up = halves(np.einsum("mk,mkn->mn", np.asarray(x[:15], np.float64), wide[own]))
    want = CURVES["silu"](gate) * up
    assert np.linalg.norm(y[:15] - want) < 2**-8 * np.linalg.norm(want)
    assert not y[15:].any()


def test_weights_of_rows_are_scales_in_every_kernel():
    """Rows and masked groups, by all paths of groups, against float64."""
    wide = functools.partial(Ragged, rhs_tile=CHANNEL)
    cases = [CASES["decode"], CASES["masked"], CASES["blocks"]]
    cases += [weights(sizes=(90, 0, 75), rows=170, columns=528, depth=1024)]
    if ffi.compute_capability() == 90:
        once = wide(sizes=(70, 0, 9), rows=90, columns=264, depth=400, lhs_tile=CHANNEL)
        cases += [once, dataclasses.replace(once, rhs_tile=BLOCKS, lhs_tile=STEPS)]
        cases += [dataclasses.replace(once, lhs="int8", rhs="int8")]
    for case in cases:
        lhs, rhs, _, z, bound = drawn(case)
        z = case.expected(case.draw()[2])[0]
        factor = np.random.default_rng(1).uniform(0.1, 2, z.shape[:-1]).astype(np.float32)
        call = jax.jit(functools.partial(jaxfp8.ragged_dot, preferred_element_type=jnp.float32))
        given = lhs, rhs.mT, jnp.asarray(case.sizes, jnp.int32)
        text = call.lower(*given, row_weights=factor).as_text()
        (line,) = [line for line in text.splitlines() if CALL in line]
        assert "lhs_scale = true" in line
        y = np.asarray(call(*given, row_weights=factor))
        near(y, z * factor[..., None], bound * factor[..., None])
        assert not np.any(y[case.outside()])
