"""Two products of one input, multiplied by one launch: against float64 and two launches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.products import ACCUMULATION, draw, matrices
from gpu.test_joint import arrays, clusters, operands_of

import jaxfp8
import oracle
from jaxfp8._call.library import ffi
from jaxfp8._call.ops import joint
from jaxfp8._call.ops.dot import scaled_dot

clusters = clusters  # the fixture
PATH = "sm80_w8a16"
WEIGHTS = ("float8_e4m3fn", "float8_e5m2", "int8", "uint8")
ACTIVATIONS = ("silu", "gelu_tanh", "gelu_erf", "relu", "none")
# Rows, K and columns: multiples of tiles and not.
SIZES = [
    *[(1, 384, 256), (1, 517, 130), (3, 1030, 1), (8, 256, 64), (16, 260, 72)],
    *[(17, 256, 65), (33, 512, 130), (64, 1160, 200), (64, 4096, 1024)],
]


def pair(wide, weights, rows, depth, columns, *, act="silu", out="bfloat16", **more):
    """Gate and up, with a scale for each column and one for all."""
    gate = {"rhs_tiles": (1, depth), "activation": act, "out_dtype": out}
    up = {"rhs_tiles": (columns, depth), "out_dtype": out}
    sizes = wide, weights, rows, depth, columns
    return [matrices(*sizes, **{**own, **more}) for own in (gate, up)]


def run(specs, operands, multiplied="bfloat16"):
    """The product of both outputs; one call computes it."""
    ffi.reset_kernel_calls("cuda")
    (out,) = joint.joint_dots(specs, arrays(operands), multiplied)
    out = np.asarray(out)
    assert ffi.kernel_calls("cuda")[PATH] == 1
    return out


def apart(specs, operands, multiplied="bfloat16"):
    named = zip(specs, arrays(operands), strict=True)
    one, other = (scaled_dot(spec, **x)[0].astype(jnp.float32) for spec, x in named)
    return np.asarray((one * other).astype(multiplied))


def assert_within_bound(specs, operands, out):
    """Both outputs may be off as the project promises. They are rounded, then multiplied."""
    slack = ACCUMULATION[PATH]
    y, error = [], []
    for spec, named in zip(specs, operands, strict=True):
        exact, dtype = oracle.scaled_dot(spec, named, slack), np.dtype(spec.epilogue.out_dtype)
        y.append(exact.y)
        error.append(exact.error + oracle.half_ulp(np.abs(exact.y) + exact.error, dtype))
    bound = np.abs(y[0]) * error[1] + np.abs(y[1]) * error[0] + error[0] * error[1]
    expected, dtype = y[0] * y[1], out.dtype
    bound = bound + oracle.half_ulp(np.abs(expected) + bound, dtype)
    off = np.abs(out.astype(np.float64) - expected)
    assert (off <= bound).all(), f"{(off > bound).sum()} of {off.size} are off"


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_each_output_is_within_the_bound_of_float64(weights, rhs_first, size):
    wide = "float16" if size[0] % 2 else "bfloat16"
    act = ACTIVATIONS[(sum(size) + WEIGHTS.index(weights)) % len(ACTIVATIONS)]
    specs = pair(wide, weights, *size, act=act, rhs_first=rhs_first)
    operands = operands_of(1, specs)
    out = run(specs, operands)
    assert_within_bound(specs, operands, out)
    np.testing.assert_array_equal(out, run(specs, operands))


@pytest.mark.parametrize("rows", [1, 9, 64])
@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_where_blocks_split_k_alike_the_bits_are_those_of_two_launches(weights, rhs_first, rows):
    """One tile of K is one block's."""
    specs = pair("bfloat16", weights, rows, 128, 192, rhs_first=rhs_first)
    operands = operands_of(2, specs)
    np.testing.assert_array_equal(run(specs, operands), apart(specs, operands))


@pytest.mark.parametrize("rows", [1, 11, 16])
@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
def test_fp8_rows(rhs_first, rows):
    more = {"lhs_tiles": (1, 1160), "rhs_first": rhs_first}
    specs = pair("float8_e4m3fn", "float8_e4m3fn", rows, 1160, 130, **more)
    operands = operands_of(3, specs)
    assert_within_bound(specs, operands, run(specs, operands))


@pytest.mark.parametrize("rows", [1, 16, 32])
@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
def test_scales_that_change_along_k(rhs_first, rows):
    more = {"rhs_tiles": (128, 128), "rhs_first": rhs_first}
    specs = pair("bfloat16", "float8_e4m3fn", rows, 1024, 384, **more)
    operands = operands_of(4, specs)
    assert_within_bound(specs, operands, run(specs, operands))


@pytest.mark.parametrize("multiplied", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_dtypes_of_outputs_and_of_their_product(out, multiplied):
    specs = pair("bfloat16", "int8", 5, 128, 72, out=out)
    operands = operands_of(5, specs)
    found = run(specs, operands, multiplied)
    np.testing.assert_array_equal(found, apart(specs, operands, multiplied))


def test_bias_and_residual_belong_to_their_product():
    more = {"bias": (1, 130), "residual": (6, 130), "residual_dtype": "bfloat16"}
    specs = pair("bfloat16", "float8_e4m3fn", 6, 128, 130, **more)
    operands = operands_of(6, specs)
    np.testing.assert_array_equal(run(specs, operands), apart(specs, operands))


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
def test_nan_and_inf_stay_in_their_columns(rhs_first, rows):
    specs = pair("bfloat16", "float8_e5m2", rows, 128, 96, act="none", rhs_first=rhs_first)
    operands = operands_of(7, specs)
    for part, column, code in ((0, 3, 0x7F), (1, 70, 0x7C)):  # NaN, and an infinity
        codes = operands[part]["rhs"].copy()
        (codes if rhs_first else codes.T)[5, column] = code
        operands[part]["rhs"] = codes
    out = run(specs, operands).astype(np.float32)
    assert np.isnan(out[:, 3]).all()
    assert not np.isfinite(out[:, 70]).any()
    assert np.isfinite(np.delete(out, [3, 70], 1)).all()


@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
def test_weights_of_other_alignment(rhs_first):
    """Columns and K that no vector load takes."""
    specs = pair("bfloat16", "int8", 2, 131, 67, rhs_first=rhs_first)
    operands = operands_of(8, specs)
    assert_within_bound(specs, operands, run(specs, operands))


def mlp(x, ws):
    gate, up, down = (w.qvalue.astype(x.dtype) * w.scale.astype(x.dtype) for w in ws)
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_an_unmodified_perceptron_is_two_launches(rows):
    shapes = ((512, 1024), (512, 1024), (1024, 512))
    normals = [jax.random.normal(jax.random.key(i), s) / 32 for i, s in enumerate(shapes)]
    ws = [jaxfp8.quantize(w, jnp.float8_e4m3fn, channelwise_axes=(1,)) for w in normals]
    x = jax.random.normal(jax.random.key(9), (rows, 512), jnp.bfloat16)
    fun = jax.jit(jaxfp8.rewrite(mlp))
    with jaxfp8.strict():
        found = jax.block_until_ready(fun(x, ws))
    ffi.reset_kernel_calls("cuda")
    again = jax.block_until_ready(fun(x, ws))
    assert ffi.kernel_calls("cuda")[PATH] == 2
    np.testing.assert_array_equal(np.asarray(found), np.asarray(again))
    expected = np.asarray(jax.jit(mlp)(x.astype(jnp.float32), ws), np.float64)
    off = np.linalg.norm(np.asarray(found, np.float64) - expected)
    assert off <= 1e-2 * np.linalg.norm(expected)
    notes = [site.note for site in jaxfp8.explain(mlp)(x, ws).sites]
    assert sum("product of both outputs" in note for note in notes) == 2


@pytest.mark.parametrize("transform", ["vmap", "grad", "scan"])
def test_transformed(transform):
    shapes = ((256, 384), (256, 384), (384, 256))
    normals = [jax.random.normal(jax.random.key(i), s) / 16 for i, s in enumerate(shapes)]
    ws = [jaxfp8.quantize(w, jnp.float8_e4m3fn, channelwise_axes=(1,)) for w in normals]
    x = jax.random.normal(jax.random.key(9), (3, 256), jnp.bfloat16)
    fun = jaxfp8.rewrite(mlp)
    both = {
        "vmap": lambda f, x: jax.vmap(f, (0, None))(jnp.stack([x, 2 * x]), ws),
        "grad": lambda f, x: jax.grad(lambda x: jnp.sum(f(x, ws).astype(jnp.float32)))(x),
        "scan": lambda f, x: jax.lax.scan(lambda c, _: (f(c, ws), None), x, None, 3)[0],
    }[transform]
    found = np.asarray(jax.jit(lambda x: both(fun, x))(x), np.float64)
    expected = np.asarray(jax.jit(lambda x: both(mlp, x))(x.astype(jnp.float32)), np.float64)
    assert np.linalg.norm(found - expected) <= 3e-2 * np.linalg.norm(expected)


def refused(specs):
    drawn = [draw(9, spec) for spec in specs]
    drawn[1] |= {"lhs": drawn[0]["lhs"]}
    with pytest.raises(Exception, match="gated launch") as error:
        jax.block_until_ready(joint.joint_dots(specs, arrays(drawn), "bfloat16"))
    return str(error.value)


def test_products_that_one_launch_cannot_multiply_are_an_error():
    gate, _ = pair("bfloat16", "int8", 4, 256, 64)
    narrow = matrices("bfloat16", "int8", 4, 256, 32, out_dtype="bfloat16")
    zeros = matrices("bfloat16", "int8", 4, 256, 64, rhs_tiles=(1, 256), zero_points=True)
    blocks = matrices("bfloat16", "int8", 4, 256, 64, rhs_tiles=(1, 128))
    for other in (zeros, blocks):
        assert joint.why_not_multiplied([gate, other])
        refused([gate, other])
    assert joint.why_not_multiplied([gate, narrow])
