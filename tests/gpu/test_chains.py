"""Kernels of one call that begin early: a gate and the product of it, and other pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.products import ACCUMULATION, check, draw, in_form, matrices
from gpu.test_gates import WEIGHTS, pair
from gpu.test_joint import arrays, clusters

import jaxfp8
import oracle
from jaxfp8._call.library import ffi
from jaxfp8._call.ops import joint
from jaxfp8._call.ops.dot import scaled_dot

clusters = clusters  # the fixture
PATH = "sm80_w8a16"
# Rows, K, columns between, and columns: multiples of tiles and not.
SIZES = [(1, 384, 256, 384), (3, 517, 130, 67), (8, 256, 64, 1), (16, 260, 72, 136)]
SIZES += [(17, 256, 1030, 65), (64, 1160, 264, 200), (1, 4096, 2048, 1024), (64, 1024, 4096, 512)]


def chain(weights, rows, depth, between, columns, *, wide="bfloat16", rhs_first=True, **more):
    """Gate, up and down; down has a scale for each column, and what is given."""
    first = pair(wide, weights, rows, depth, between, out=wide, rhs_first=rhs_first)
    more = {"rhs_tiles": (1, between), "out_dtype": wide} | more
    last = matrices(wide, weights, rows, between, columns, rhs_first=rhs_first, **more)
    return [*first, last]


def operands_of(seed, specs):
    """The operands of each product: two have one input, the last has none of its own."""
    one, two, last = (draw(seed + i, spec) for i, spec in enumerate(specs))
    del last["lhs"]
    return [one, {**two, "lhs": one["lhs"]}, last]


def run(specs, operands):
    ffi.reset_kernel_calls("cuda")
    wide = specs[-1].lhs.dtype
    (out,) = joint.joint_dots(specs, arrays(operands), wide, chained=True)
    out = np.asarray(out)
    assert ffi.kernel_calls("cuda")[PATH] == 2
    return out


def in_two_calls(specs, operands):
    """The product between, and the output."""
    *first, last = arrays(operands)
    (between,) = joint.joint_dots(specs[:2], first, specs[-1].lhs.dtype)
    out, _ = scaled_dot(specs[-1], lhs=between, **last, kernel=PATH)
    return np.asarray(between), np.asarray(out)


def assert_alike(specs, operands):
    """The bits of two calls, within the bound of float64."""
    out, (between, expected) = run(specs, operands), in_two_calls(specs, operands)
    np.testing.assert_array_equal(out, expected)
    named = {**operands[-1], "lhs": between}
    oracle.assert_within_bound(specs[-1], named, out, slack=ACCUMULATION[PATH])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_chain_has_the_bits_of_two_calls(weights, rhs_first, size):
    wide = "float16" if size[0] % 2 else "bfloat16"
    specs = chain(weights, *size, wide=wide, rhs_first=rhs_first)
    assert_alike(specs, operands_of(1, specs))


@pytest.mark.parametrize("rows", [1, 9, 33])
def test_the_last_product_has_an_epilogue(rows):
    more = {"bias": (1, 264), "residual": (rows, 264), "residual_dtype": "bfloat16"}
    specs = chain("float8_e4m3fn", rows, 512, 640, 264, activation="gelu_tanh", **more)
    assert_alike(specs, operands_of(2, specs))


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("rows", [1, 16])
def test_scales_of_the_last_weight_may_change_along_k(rows, block):
    specs = chain("int8", rows, 512, 1024, 384, rhs_tiles=(1, block))
    assert_alike(specs, operands_of(3, specs))


def model(x, ws):
    """Layers of a norm, a gate and a product with a residual."""
    for gate, up, down in ws:
        wide = x.astype(jnp.float32)
        y = (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(x.dtype)
        dot = lambda y, w: y @ (w.qvalue.astype(y.dtype) * w.scale.astype(y.dtype))  # noqa: E731
        x = x + dot(jax.nn.silu(dot(y, gate)) * dot(y, up), down)
    return x


def weights_of(width, hidden):
    shapes = [(width, hidden), (width, hidden), (hidden, width)]
    drawn = [
        jax.random.normal(jax.random.key(i), shapes[i % 3]) * shapes[i % 3][0] ** -0.5
        for i in range(9)
    ]
    e4m3 = [jaxfp8.quantize(w, jnp.float8_e4m3fn, channelwise_axes=(1,)) for w in drawn]
    return [e4m3[i : i + 3] for i in (0, 3, 6)]


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_layers_in_one_graph_have_the_bits_of_separate_calls(monkeypatch, rows):
    """New buffers in each run: XLA updates the graph, and with it both launches of each call."""
    ws = weights_of(1024, 4096)
    xs = [jax.random.normal(jax.random.key(i), (rows, 1024), jnp.bfloat16) for i in range(20)]
    chained = jax.jit(jaxfp8.rewrite(model))
    found = [chained(x, ws) for x in xs]
    text = chained.lower(xs[0], ws).as_text()
    assert text.count("then_lhs_dtype") == text.count("@jaxfp8_joint_dots") > 0
    jax.clear_caches()
    monkeypatch.setattr(joint, "why_not_chained", lambda *_: "not here")
    apart = jax.jit(jaxfp8.rewrite(model))
    assert "then_lhs_dtype" not in apart.lower(xs[0], ws).as_text()
    for x, out in zip(xs, found, strict=True):
        np.testing.assert_array_equal(np.asarray(out), np.asarray(apart(x, ws)))


def test_each_of_many_tensors_is_divided_by_its_own_amax():
    """Two kernels find the amax and divide, in the same scratch memory again and again."""
    xs = [jax.random.normal(jax.random.key(i), (512, 4096)) * 2.0**-i for i in range(16)]
    quantise = lambda x: jaxfp8.quantize(x, jnp.float8_e4m3fn)  # noqa: E731
    quantised = jax.jit(lambda xs: list(map(quantise, xs)))(xs)
    for x, q in zip(xs, quantised, strict=True):
        amax = np.abs(np.asarray(x)).max()
        np.testing.assert_allclose(np.asarray(q.scale).ravel(), amax / 448, rtol=1e-6)
        scale = np.asarray(q.scale)
        off = np.abs(np.asarray(q.qvalue).astype(np.float32) * scale - np.asarray(x))
        assert (off <= np.abs(np.asarray(x)) / 15 + scale * 2.0**-10).all()


@pytest.mark.parametrize("rows", [1, 16, 200])
def test_rows_that_are_decoded_in_front_of_their_product(rows):
    """Exponents of 32 on both sides: the second kernel reads what the first has just decoded."""
    tiles = {"lhs_tiles": (1, 32), "rhs_tiles": (1, 32), "rhs_first": False}
    spec = matrices("float8_e4m3fn", "float8_e4m3fn", rows, 1024, 520, **tiles)
    for seed in range(6):
        formed, named = spec, draw(seed, spec)
        for side in ("lhs", "rhs"):
            formed, named = in_form(formed, named, "exponents", side)
        assert check(formed, named, "decoded_w8a16") == "decoded_w8a16"


def test_a_product_behind_outputs_that_are_not_multiplied_is_an_error():
    specs = chain("int8", 4, 256, 64, 72)
    forms = [joint.canonical.canonical(spec) for spec in specs]
    names = ("dot0", "dot1", "then")
    attributes = {
        f"{name}_{field}": value
        for name, form in zip(names, forms, strict=True)
        for field, value in form.spec.attributes().items()
    }
    operands = arrays(operands_of(5, specs))
    operands[-1]["lhs"] = jnp.zeros((4, 64), jnp.bfloat16)
    given = [form.operands(named) for form, named in zip(forms, operands, strict=True)]
    del given[-1]["lhs"]
    flat = [
        named[name]
        for form, named in zip(forms, given, strict=True)
        for name in form.spec.operand_names()
        if name in named
    ]
    results = [jax.ShapeDtypeStruct(form.spec.out_shape, jnp.bfloat16) for form in forms]
    target = jax.ffi.ffi_call(ffi.JOINT_TARGET, results)
    with pytest.raises(Exception, match=r"jaxfp8_joint_dots.*no product of two"):
        jax.block_until_ready(target(*flat, **attributes))
