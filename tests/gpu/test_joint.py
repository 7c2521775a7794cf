"""Products of one input as one launch: against float64, and against launches of their own."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.products import ACCUMULATION, draw, matrices

import jaxfp8
import oracle
from jaxfp8._call.library import ffi
from jaxfp8._call.ops import joint
from jaxfp8._call.ops.dot import scaled_dot

PATH = "sm80_w8a16"
WEIGHTS = ("float8_e4m3fn", "float8_e5m2", "int8", "uint8")
# Rows and K: multiples of tiles and not.
SIZES = [(1, 384), (1, 517), (3, 1030), (16, 260), (33, 512), (64, 1160)]
COLUMNS = (256, 1, 130)


@pytest.fixture(autouse=True)
def clusters(gpu):
    if not joint.runs_here():
        pytest.skip("needs compute capability 9.0")


def heads(wide, weights, rows, depth, columns, *, rhs_first):
    """A product for each weight: a scale for each column, one for all, none; zero points."""
    made = []
    for i, n in enumerate(columns):
        tiles = ((1, depth), (n, depth), None)[i % 3]
        epilogue = [{"activation": "silu", "out_dtype": "bfloat16"}, {"bias": (1, n)}, {}][i % 3]
        n = max(n, 2) if rhs_first else n
        made.append(
            matrices(
                wide,
                weights,
                rows,
                depth,
                n,
                rhs_first=rhs_first,
                rhs_tiles=tiles,
                zero_points=i == 1,
                **{k: (1, n) if k == "bias" else v for k, v in epilogue.items()},
            )
        )
    return made


def operands_of(seed, specs):
    """Operands of products that have one input."""
    drawn = [draw(seed + i, spec) for i, spec in enumerate(specs)]
    return [{**named, "lhs": drawn[0]["lhs"]} for named in drawn]


def arrays(operands):
    return [{name: jnp.asarray(x) for name, x in named.items()} for named in operands]


def run(specs, operands):
    """The outputs, and how many calls the path counted."""
    ffi.reset_kernel_calls("cuda")
    outs = [np.asarray(out) for out in joint.joint_dots(specs, arrays(operands))]
    return outs, ffi.kernel_calls("cuda")[PATH]


def apart(specs, operands):
    named = arrays(operands)
    return [np.asarray(scaled_dot(s, **x)[0]) for s, x in zip(specs, named, strict=True)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_each_output_is_within_the_bound_of_float64(weights, rhs_first, size):
    wide = "float16" if size[0] % 2 else "bfloat16"
    specs = heads(wide, weights, *size, COLUMNS, rhs_first=rhs_first)
    operands = operands_of(1, specs)
    outs, calls = run(specs, operands)
    assert calls == 1
    for spec, named, out in zip(specs, operands, outs, strict=True):
        oracle.assert_within_bound(spec, named, out, slack=ACCUMULATION[PATH])
    again, _ = run(specs, operands)
    for out, other in zip(outs, again, strict=True):
        np.testing.assert_array_equal(out, other)


@pytest.mark.parametrize("rows", [1, 11, 16])
@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
def test_fp8_rows_share_a_launch(rhs_first, rows):
    tiles = {"lhs_tiles": (1, 1160), "rhs_tiles": (1, 1160), "rhs_first": rhs_first}
    specs = [matrices(*["float8_e4m3fn"] * 2, rows, 1160, n, **tiles) for n in (256, 130)]
    operands = operands_of(6, specs)
    outs, calls = run(specs, operands)
    assert calls == 1
    for spec, named, out in zip(specs, operands, outs, strict=True):
        oracle.assert_within_bound(spec, named, out, slack=ACCUMULATION[PATH])


@pytest.mark.parametrize("weights", WEIGHTS)
def test_where_blocks_split_k_alike_the_bits_are_those_of_separate_launches(weights):
    """Few tiles of K: each is a block's, in a launch alone as in a joint one."""
    specs = heads("bfloat16", weights, 5, 300, (256, 128, 64), rhs_first=True)
    operands = operands_of(2, specs)
    for out, other in zip(run(specs, operands)[0], apart(specs, operands), strict=True):
        np.testing.assert_array_equal(out, other)


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_large_weights_that_blocks_split_otherwise_are_within_the_bound(rows):
    specs = heads("bfloat16", "float8_e4m3fn", rows, 4096, (2048, 512, 520), rhs_first=False)
    operands = operands_of(3, specs)
    outs, calls = run(specs, operands)
    assert calls == 1
    for spec, named, out in zip(specs, operands, outs, strict=True):
        oracle.assert_within_bound(spec, named, out, slack=ACCUMULATION[PATH])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scales_are_read_as_they_are_stored(dtype):
    specs = [matrices("bfloat16", "int8", 4, 256, n, rhs_tiles=(1, 256)) for n in (64, 72)]
    operands = operands_of(4, specs)
    for named in operands:
        named["rhs_scale"] = named["rhs_scale"].astype(jnp.dtype(dtype))
    outs, calls = run(specs, operands)
    assert calls == 1
    for spec, named, out in zip(specs, operands, outs, strict=True):
        wide = {**named, "rhs_scale": named["rhs_scale"].astype(np.float32)}
        oracle.assert_within_bound(spec, wide, out, slack=ACCUMULATION[PATH])


def test_nan_and_inf_stay_in_their_product():
    specs = [matrices("bfloat16", "float8_e5m2", 2, 128, n, rhs_tiles=(1, 128)) for n in (8, 16)]
    operands = operands_of(5, specs)
    codes = operands[0]["rhs"].copy()
    codes[:, 3], codes[5, 4] = 0x7F, 0x7C  # NaN, and an infinity
    operands[0]["rhs"] = codes
    outs, _ = run(specs, operands)
    assert np.isnan(outs[0][:, 3]).all()
    assert np.isinf(outs[0][:, 4]).all()
    assert np.isfinite(np.delete(outs[0], [3, 4], 1)).all()
    assert np.isfinite(outs[1]).all()


def layer(x, ws):
    def dot(w):
        return x @ (w.qvalue.astype(x.dtype) * w.scale.astype(x.dtype))

    q, k, v, gate, up = map(dot, ws)
    return q, k + v, jax.nn.silu(gate), up


def weights_of():
    w = [
        jax.random.normal(jax.random.key(i), (256, n))
        for i, n in enumerate((256, 64, 64, 500, 500))
    ]
    return [jaxfp8.quantize(x, jnp.float8_e4m3fn, channelwise_axes=(1,)) for x in w]


@pytest.mark.parametrize("mode", ["eager", "jit", "scan", "shard_map"])
def test_an_unmodified_layer_runs_in_two_launches(mode):
    """Five products of one input: a launch computes four."""
    ws, x = weights_of(), jax.random.normal(jax.random.key(9), (3, 256), jnp.bfloat16)
    rewritten = jaxfp8.rewrite(layer)
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("i")
    modes = {
        "eager": rewritten,
        "jit": jax.jit(rewritten),
        "scan": jax.jit(
            lambda x, ws: jax.tree.map(
                lambda y: y[0], jax.lax.scan(lambda c, _: (c, rewritten(c, ws)), x, None, 2)[1]
            )
        ),
        "shard_map": jax.jit(
            jax.shard_map(rewritten, mesh=mesh, in_specs=(rows, None), out_specs=rows)
        ),
    }
    with jaxfp8.strict():
        found = modes[mode](x, ws)
        ffi.reset_kernel_calls("cuda")
        again = jax.block_until_ready(modes[mode](x, ws))
    expected = jax.jit(layer)(x.astype(jnp.float32), ws)
    for a, b, c in zip(*map(jax.tree.leaves, (found, again, expected)), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
        a, c = np.asarray(a, np.float64), np.asarray(c, np.float64)
        assert np.linalg.norm(a - c) <= 1e-2 * np.linalg.norm(c)


def test_a_rewritten_layer_counts_one_call_a_launch():
    ws, x = weights_of(), jnp.ones((2, 256), jnp.bfloat16)
    rewritten = jaxfp8.rewrite(layer)
    jax.block_until_ready(rewritten(x, ws))
    ffi.reset_kernel_calls("cuda")
    jax.block_until_ready(rewritten(x, ws))
    assert ffi.kernel_calls("cuda")[PATH] == 2
    notes = [site.note for site in jaxfp8.explain(layer)(x, ws).sites]
    assert notes.count("one launch with 3 more of its input") == 4


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_transformed_the_products_are_separate(transform):
    ws, x = weights_of(), jax.random.normal(jax.random.key(9), (3, 256), jnp.bfloat16)
    total = lambda x, ws: sum(jnp.sum(y.astype(jnp.float32)) for y in jaxfp8.rewrite(layer)(x, ws))  # noqa: E731
    if transform == "vmap":
        found = jax.jit(jax.vmap(jaxfp8.rewrite(layer), (0, None)))(x[None], ws)
        expected = jax.jit(layer)(x.astype(jnp.float32), ws)
        found = jax.tree.map(lambda y: y[0], found)
    else:
        found = jax.jit(jax.grad(total))(x, ws)
        plain = lambda x, ws: sum(jnp.sum(y) for y in layer(x, ws))  # noqa: E731
        expected = jax.jit(jax.grad(plain))(x.astype(jnp.float32), ws)
    for a, c in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, c = np.asarray(a, np.float64), np.asarray(c, np.float64)
        assert np.linalg.norm(a - c) <= 2e-2 * np.linalg.norm(c)


def call(specs, operands, change):
    """The custom call with other attributes."""
    forms = [joint.canonical.canonical(spec) for spec in specs]
    attributes = {
        f"dot{i}_{name}": value
        for i, form in enumerate(forms)
        for name, value in form.spec.attributes().items()
    }
    results = [jax.ShapeDtypeStruct(f.spec.out_shape, np.float32) for f in forms]
    given = [
        list(form.operands(named).values()) for form, named in zip(forms, operands, strict=True)
    ]
    flat, results, attributes = change(list(itertools.chain(*given)), results, attributes)
    return jax.ffi.ffi_call(ffi.JOINT_TARGET, results)(*flat, **attributes)


WRONG = {
    "fewer operands": lambda x, r, a: (x[:-1], r, a),
    "more operands": lambda x, r, a: ([*x, x[0]], r, a),
    "attribute `dot1_lhs_shape` is missing": lambda x, r, a: (
        x,
        r,
        {name: value for name, value in a.items() if name != "dot1_lhs_shape"},
    ),
    "attribute `dot0_lhs_dtype` is missing": lambda x, r, a: (x, r, {}),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_call_is_an_error(message):
    specs = [matrices("bfloat16", "int8", 4, 256, n) for n in (64, 72)]
    with pytest.raises(Exception, match=r"jaxfp8_joint_dots.*" + message):
        jax.block_until_ready(call(specs, arrays(operands_of(6, specs)), WRONG[message]))


def test_products_that_one_launch_cannot_compute_are_an_error():
    specs = [matrices("bfloat16", "int8", 4, 256, 64), matrices("bfloat16", "int8", 4, 128, 64)]
    drawn = [draw(7, spec) for spec in specs]
    with pytest.raises(Exception, match="need one batch, rows, depth"):
        jax.block_until_ready(call(specs, arrays(drawn), lambda *given: given))
