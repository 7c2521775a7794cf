"""Products of rows that an RMSNorm makes, as one launch: against float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.products import ACCUMULATION, draw, matrices
from gpu.test_joint import arrays, clusters, heads, operands_of

import jaxfp8
import oracle
from jaxfp8._call.library import ffi
from jaxfp8._call.ops import joint
from jaxfp8._call.reference.produce_reference import Norm

clusters = clusters  # the fixture
PATH = "sm80_w8a16"
WEIGHTS = ("float8_e4m3fn", "float8_e5m2", "int8", "uint8")
# Rows and K: multiples of tiles and not, with one block for an output and with many.
SIZES = [(1, 384), (1, 517), (3, 1030), (8, 128), (7, 260), (8, 1160), (1, 8192), (8, 8192)]
EPSILON = 1e-5
# x times the gain is rounded to bfloat16 in front of the product.
ROUNDED = 2.0**-8


def norm(epsilon=EPSILON):
    return Norm(epsilon=epsilon, has_gain=True)


def gain_of(depth, seed=0):
    drawn = np.random.default_rng(seed).normal(1, 0.5, depth)
    return np.asarray(jnp.asarray(drawn, jnp.bfloat16))


def run(specs, operands, gain, multiplied="", offset=0.0):
    """The outputs; one call computes them."""
    ffi.reset_kernel_calls("cuda")
    fused = joint.Fused(multiplied, norm(), offset)
    outs = joint.joint_dots(specs, arrays(operands), fused, jnp.asarray(gain))
    outs = [np.asarray(out) for out in outs]
    assert ffi.kernel_calls("cuda")[PATH] == 1
    return outs


def normalised(operands, gain):
    """The operands of the products in float64, after the norm."""
    x = operands[0]["lhs"].astype(np.float64)
    inverse = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
    rows = x * inverse * gain.astype(np.float64)
    return [{**named, "lhs": rows} for named in operands]


def exact(specs, operands, gain):
    """For each product its value, and how far it may be off before it is rounded."""
    for spec, named in zip(specs, normalised(operands, gain), strict=True):
        one = oracle.scaled_dot(spec, named, ACCUMULATION[PATH] + ROUNDED)
        yield (
            one.y,
            one.error
            + oracle.half_ulp(np.abs(one.y) + one.error, np.dtype(spec.epilogue.out_dtype)),
        )


def assert_close(outs, values):
    for out, (y, error) in zip(outs, values, strict=True):
        off = np.abs(out.astype(np.float64) - y)
        assert (off <= error).all(), f"{(off > error).sum()} of {off.size} are off"
        # The bound is for the worst signs; on average roundings cancel.
        assert np.linalg.norm(off) <= 0.5 * np.linalg.norm(error)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_each_output_is_within_the_bound_of_float64(weights, rhs_first, size):
    specs = [s for s in heads("bfloat16", weights, *size, (256, 130, 68), rhs_first=rhs_first)]
    specs = [s for s in specs if not s.rhs.zero_point]
    operands, gain = operands_of(1, specs), gain_of(size[1])
    outs = run(specs, operands, gain)
    assert_close(outs, exact(specs, operands, gain))
    for out, again in zip(outs, run(specs, operands, gain), strict=True):
        np.testing.assert_array_equal(out, again)


@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
def test_scales_that_change_along_k(rhs_first):
    sizes = "bfloat16", "float8_e4m3fn", 5, 1024
    more = {"rhs_tiles": (128, 128), "rhs_first": rhs_first}
    specs = [matrices(*sizes, n, **more) for n in (256, 384)]
    operands, gain = operands_of(3, specs), gain_of(1024)
    assert_close(run(specs, operands, gain), exact(specs, operands, gain))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [(1, 517), (5, 1030), (8, 4096)], ids=str)
def test_gains_of_other_dtypes_and_one_plus_a_gain(size, dtype, offset):
    specs = heads("bfloat16", "float8_e4m3fn", *size, (256, 130), rhs_first=size[0] == 5)
    operands = operands_of(9, specs)
    gain = np.random.default_rng(3).normal(0.5, 1, size[1]).astype(jnp.dtype(dtype))
    outs = run(specs, operands, gain, offset=offset)
    assert_close(outs, exact(specs, operands, gain.astype(np.float64) + offset))


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e15])
def test_rows_of_any_size(scale):
    """Squares of small rows vanish beside epsilon."""
    specs = [matrices("bfloat16", "int8", 2, 512, 64, rhs_tiles=(1, 512))]
    operands, gain = operands_of(4, specs), gain_of(512)
    operands[0]["lhs"] = np.asarray(jnp.asarray(operands[0]["lhs"] * scale, jnp.bfloat16))
    assert_close(run(specs, operands, gain), exact(specs, operands, gain))


def test_epsilon_is_that_of_the_call():
    """A call is known by it, too."""
    specs = [matrices("bfloat16", "int8", 2, 256, 64, rhs_tiles=(1, 256))]
    operands, gain = operands_of(8, specs), gain_of(256)
    mean = (operands[0]["lhs"].astype(np.float64) ** 2).mean(-1, keepdims=True)
    outs = []
    for epsilon in (0.0, 3.0):
        fused = joint.Fused("", norm(epsilon))
        (out,) = joint.joint_dots(specs, arrays(operands), fused, jnp.asarray(gain))
        outs.append(np.asarray(out, np.float64))
    np.testing.assert_allclose(outs[1], outs[0] * np.sqrt(mean / (mean + 3)), rtol=1e-5)


def test_nan_and_inf_stay_in_their_row():
    specs = [matrices("bfloat16", "float8_e4m3fn", 4, 256, 96, rhs_tiles=(1, 256))]
    operands, gain = operands_of(5, specs), gain_of(256)
    operands[0]["lhs"] = operands[0]["lhs"].copy()
    operands[0]["lhs"][1, 7], operands[0]["lhs"][2, 9] = np.nan, np.inf
    (out,) = run(specs, operands, gain)
    assert np.isnan(out[1:3]).all()
    assert np.isfinite(out[[0, 3]]).all()


def test_a_residual_and_a_bias_are_not_divided():
    more = {"bias": (1, 72), "residual": (3, 72), "residual_dtype": "bfloat16"}
    specs = [matrices("bfloat16", "int8", 3, 256, 72, rhs_tiles=(1, 256), **more)]
    operands, gain = operands_of(6, specs), gain_of(256)
    assert_close(run(specs, operands, gain), exact(specs, operands, gain))


def rms_norm(x, gain):
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + EPSILON)
    return (wide * inverse).astype(x.dtype) * gain


def layer(x, gains, ws):
    def dot(x, w):
        return x @ (w.qvalue.astype(x.dtype) * w.scale.astype(x.dtype))

    y = rms_norm(x, gains[0])
    q, k, v = (dot(y, w) for w in ws[:3])
    x = x + dot(jnp.tanh(q) * jnp.tanh(k) + jnp.tanh(v), ws[3])
    y = rms_norm(x, gains[1])
    return x + dot(jax.nn.silu(dot(y, ws[4])) * dot(y, ws[5]), ws[6])


def weights_of():
    shapes = [(512, 512)] * 4 + [(512, 1024)] * 2 + [(1024, 512)]
    normals = [jax.random.normal(jax.random.key(i), s) / 24 for i, s in enumerate(shapes)]
    gains = [jnp.asarray(gain_of(512, seed)) for seed in (1, 2)]
    return gains, [jaxfp8.quantize(w, jnp.float8_e4m3fn, channelwise_axes=(1,)) for w in normals]


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("mode", ["jit", "eager", "vmap", "grad", "scan"])
def test_an_unmodified_layer_is_four_launches(mode, rows):
    gains, ws = weights_of()
    x = jax.random.normal(jax.random.key(9), (rows, 512), jnp.bfloat16)
    total = lambda f, x: jnp.sum(f(x, gains, ws).astype(jnp.float32))  # noqa: E731
    modes = {
        "jit": lambda f: jax.jit(f)(x, gains, ws),
        "eager": lambda f: f(x, gains, ws),
        "vmap": lambda f: jax.jit(jax.vmap(f, (0, None, None)))(jnp.stack([x, 2 * x]), gains, ws),
        "grad": lambda f: jax.jit(jax.grad(lambda x: total(f, x)))(x),
        "scan": lambda f: jax.jit(
            lambda x: jax.lax.scan(lambda c, _: (f(c, gains, ws), None), x, None, 3)[0]
        )(x),
    }
    rewritten = jaxfp8.rewrite(layer)
    found = np.asarray(modes[mode](rewritten), np.float64)
    as_written = np.asarray(modes[mode](layer), np.float64)
    assert np.linalg.norm(found - as_written) <= 3e-2 * np.linalg.norm(as_written)
    if mode == "jit":
        ffi.reset_kernel_calls("cuda")
        again = modes[mode](rewritten)
        assert ffi.kernel_calls("cuda")[PATH] in (0, 4)  # 0: from a captured graph
        np.testing.assert_array_equal(found, np.asarray(again, np.float64))
        notes = [site.note for site in jaxfp8.explain(layer)(x, gains, ws).sites]
        assert sum("RMSNorm of its input is inside" in note for note in notes) == 3


def refused(specs, message, dtype=jnp.bfloat16, depth=256, multiplied=""):
    operands = [draw(7, spec) for spec in specs]
    operands = [{**named, "lhs": operands[0]["lhs"]} for named in operands]
    gain = jnp.ones(depth, dtype)
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(
            joint.joint_dots(specs, arrays(operands), joint.Fused(multiplied, norm()), gain)
        )


def test_what_a_launch_cannot_normalise_is_an_error():
    one = matrices("bfloat16", "int8", 4, 256, 64)
    for wide, rows in itertools.product(("float16", "bfloat16"), (9, 4)):
        if (wide, rows) != ("bfloat16", 4):
            refused([matrices(wide, "int8", rows, 256, 64)], "a norm is inside products of up to")
    refused([one, one], "a norm or a gate", multiplied="bfloat16")
    refused([one], "the gain of the norm is", jnp.float16)
    refused([one], "the gain of the norm is", depth=128)
