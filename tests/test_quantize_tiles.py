"""Where quantizing is one call on the CPU, and what JAX does with that call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantized
from jax.sharding import NamedSharding, PartitionSpec

import jaxfp8
from jaxfp8._call.library import ffi
from jaxfp8._call.ops.quantize_call import encode, quantize_tiles
from jaxfp8._call.reference.quantize_reference import QuantizeSpec
from jaxfp8._call.reference.quantize_reference import quantized as quantized_by_definition

X = jax.random.normal(jax.random.key(0), (4, 6, 256), jnp.bfloat16)
CALL = "custom_call @jaxfp8_quantize"
E8M0 = np.dtype(jnp.float8_e8m0fnu)


def per_token(x: jax.Array, dtype="int8") -> tuple[jax.Array, jax.Array]:
    q = jaxfp8.quantize(x, dtype, channelwise_axes=range(x.ndim - 1))
    return q.qvalue, q.scale


def check(codes, scale, x, tile) -> None:
    """The bits of float32 arithmetic, all leading axes as rows."""
    matrix = np.asarray(x).reshape(-1, x.shape[-1])
    power = scale.dtype == E8M0
    exact_codes, exact_scale, _ = quantized.expected(matrix, codes.dtype.name, tile, None, power)
    quantized.assert_same_codes(np.asarray(codes).reshape(matrix.shape), exact_codes)
    np.testing.assert_array_equal(np.asarray(scale).reshape(exact_scale.shape), exact_scale)


@pytest.mark.parametrize(
    ("shape", "axes", "tile"),
    [
        ((6, 256), {"channelwise_axes": (0,)}, (1, 256)),
        ((6, 256), {}, (6, 256)),
        ((2, 3, 256), {"channelwise_axes": (0, 1)}, (1, 256)),
        ((6, 200), {"channelwise_axes": (0,), "tiled_axes": {1: 128}}, (1, 128)),
        ((6, 64), {"channelwise_axes": (0,), "tiled_axes": {1: 32}}, (1, 32)),
        ((256, 200), {"tiled_axes": {0: 128, 1: 128}}, (128, 128)),
        ((8, 100), {"tiled_axes": {0: 2}}, (2, 100)),
        ((200, 100), {"tiled_axes": {0: 128, 1: 128}}, (128, 100)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("scale_dtype", ["float32", "float8_e8m0fnu"])
def test_tiles_that_reach_along_rows_are_one_call(shape, axes, tile, dtype, scale_dtype):
    x = jax.random.normal(jax.random.key(1), shape)
    run = jax.jit(lambda x: jaxfp8.quantize(x, dtype, scale_dtype=scale_dtype, **axes))
    assert run.lower(x).as_text().count(CALL) == 1
    q = run(x)
    check(q.qvalue, q.scale, x, tile)


@pytest.mark.parametrize(
    "spec",
    [
        QuantizeSpec(dtype=np.dtype(dtype), tiles=tiles, power_of_two=True)
        for dtype in ("float8_e4m3fn", "float8_e5m2", "int8")
        for tiles in ((1, 300), (1, 128), (128, 128), (200, 300))
    ],
    ids=lambda spec: f"{spec.dtype} {spec.tiles}",
)
@pytest.mark.same_bits
def test_powers_of_two_have_the_bits_of_their_definition(spec):
    x = jax.random.normal(jax.random.key(2), (200, 300)) * 2.0 ** jnp.arange(-50, 50, 0.5)[:, None]
    x = x.at[0, 0].set(jnp.nan).at[1, 1].set(jnp.inf).at[2, 2].set(-jnp.inf).at[3].set(0)
    ours = quantize_tiles(x, spec.dtype, spec.tiles, spec.power_of_two)
    codes, scale = jax.jit(functools.partial(quantized_by_definition, spec=spec))(x)
    quantized.assert_same_codes(ours[0], codes)
    np.testing.assert_array_equal(ours[1], scale)


@pytest.mark.parametrize(
    ("axes", "dtype"),
    [({"channelwise_axes": (1,)}, "int8"), ({"channelwise_axes": (0,)}, "uint8")],
    ids=["columns", "uint8"],
)
@pytest.mark.parametrize("scale_dtype", ["float32", "float8_e8m0fnu"])
def test_what_no_kernel_takes_is_left_to_xla(axes, dtype, scale_dtype):
    run = jax.jit(lambda x: jaxfp8.quantize(x, dtype, scale_dtype=scale_dtype, **axes))
    lowered = run.lower(jnp.ones((64, 256)))
    assert CALL not in lowered.as_text()


def test_a_vector_and_its_tiles():
    x = jnp.arange(96.0)
    for axes, tile in (({}, (1, 96)), ({"tiled_axes": {0: 32}}, (1, 32))):
        q = jax.jit(lambda x, axes=axes: jaxfp8.quantize(x, "int8", **axes))(x)
        check(q.qvalue, q.scale, x, tile)


def test_a_function_of_unknown_sizes_is_exported_without_the_call():
    (rows,) = jax.export.symbolic_shape("rows")
    exported = jax.export.export(jax.jit(lambda x: jaxfp8.quantize(x, "int8").qvalue))(
        jax.ShapeDtypeStruct((rows, 64), jnp.float32)
    )
    np.testing.assert_array_equal(exported.call(jnp.ones((3, 64))), 127)


def test_without_a_library_xla_computes_it(monkeypatch):
    monkeypatch.setattr(ffi, "why_unavailable", lambda platform: "the library is not there")
    try:
        run = jax.jit(lambda x: per_token(x + 0))
        assert CALL not in run.lower(X).as_text()
        np.testing.assert_allclose(run(X)[1], per_token(X)[1])
    finally:
        jax.clear_caches()


def in_int8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return quantize_tiles(x, np.dtype(np.int8), (1, x.shape[1]))


@pytest.mark.parametrize("columns", [1, 17, 4096, 14336])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_rows_of_float8_become_int8(dtype, columns):
    x = quantized.float8_rows(dtype, columns)
    quantized.assert_rows_of_int8(*in_int8(jnp.asarray(x)), x)


@pytest.mark.parametrize(("columns", "read"), [(131_072, "f8E5M2"), (131_073, "bf16")])
def test_a_gpu_reads_float8_where_it_holds_a_row(columns, read):
    x = jax.ShapeDtypeStruct((3, columns), jnp.float8_e5m2)
    text = jax.jit(in_int8).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if CALL in line)
    assert f"(tensor<3x{columns}x{read}>) ->" in call


def test_columns_of_float8_are_rows_to_a_gpu():
    x = jax.ShapeDtypeStruct((2, 4096, 3), jnp.float8_e4m3fn)
    columns = jax.jit(lambda x: quantize_tiles(x, np.dtype(np.int8), (1, 4096, 1)))
    text = columns.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if CALL in line)
    assert "(tensor<6x4096xf8E4M3FN>) ->" in call
    codes, scale = jax.eval_shape(columns, x)
    assert codes.shape == (2, 4096, 3) and scale.shape == (2, 1, 3)


def test_vmap_is_one_call_and_gives_the_same_bits():
    run = jax.jit(jax.vmap(jax.vmap(per_token, in_axes=1, out_axes=1)))
    assert run.lower(X[:, :, None]).as_text().count(CALL) == 1
    check(*run(X[:, :, None]), X, (1, 256))


def test_a_scale_for_each_of_a_batch():
    q = jax.jit(jax.vmap(lambda x: jaxfp8.quantize(x, "float8_e4m3fn")))(X)
    check(q.qvalue, q.scale, X, (6, 256))


def test_scan_while_and_cond():
    _, (codes, scale) = jax.lax.scan(lambda c, x: (c, per_token(x)), 0, X)
    check(codes, scale, X, (1, 256))
    codes, scale = jax.lax.cond(X.sum() < jnp.inf, per_token, lambda x: per_token(2 * x), X)
    check(codes, scale, X, (1, 256))


def test_the_gradient_of_the_scale_is_that_of_the_largest_value():
    x = jnp.zeros((2, 64)).at[0, 3].set(-5.0).at[1, 7].set(2.0)
    slope = jax.jit(jax.grad(lambda x: per_token(x)[1].sum()))(x)
    wanted = jnp.zeros((2, 64)).at[0, 3].set(-1 / 127).at[1, 7].set(1 / 127)
    np.testing.assert_allclose(slope, wanted, rtol=1e-6)


def test_under_shard_map_each_device_quantizes_its_own_rows():
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = PartitionSpec("rows")
    run = jax.jit(jax.shard_map(per_token, mesh=mesh, in_specs=rows, out_specs=(rows, rows)))
    assert "tensor<6x256xbf16>" in run.lower(X).as_text()
    check(*run(X), X, (1, 256))


def test_a_sharded_array_gives_the_same_bits():
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("rows")))
    check(*jax.jit(per_token)(x), X, (1, 256))
    q = jax.jit(functools.partial(jaxfp8.quantize, dtype="int8"))(x)
    check(q.qvalue, q.scale, X, (24, 256))


ROWS = jax.random.normal(jax.random.key(3), (512, 512))
TWO = {"blocks": ((1, 128), (128, 1)), "rows": ((1, 512), (512, 1))}
both_kinds = pytest.mark.parametrize("tiles", TWO.values(), ids=TWO)


def in_both_layouts(x, tiles):
    """Codes with scales of their own for each layout."""
    got = encode(x, "float8_e5m2", None, 1, tiles[0], True, tiles[1])
    return got.codes, got.scale, got.transposed, got.transposed_scale


def check_both(results, x, tiles) -> None:
    for codes, scale, matrix in ((*results[:2], x), (*results[2:], x.T)):
        exact = quantized.expected(np.asarray(matrix), "float8_e5m2", tiles[0], None, True)
        quantized.assert_same_codes(codes, exact[0])
        np.testing.assert_array_equal(scale, exact[1])


@both_kinds
def test_both_layouts_have_scales_of_their_own(tiles):
    run = jax.jit(in_both_layouts, static_argnums=1)
    assert run.lower(ROWS, tiles).as_text().count(CALL) == 2
    check_both(run(ROWS, tiles), ROWS, tiles)


@both_kinds
def test_both_layouts_under_vmap(tiles):
    run = jax.jit(jax.vmap(functools.partial(in_both_layouts, tiles=tiles), in_axes=1))
    results = run(jnp.stack([ROWS, 3 - ROWS], axis=1))
    check_both([y[0] for y in results], ROWS, tiles)
    check_both([y[1] for y in results], 3 - ROWS, tiles)


@pytest.mark.same_bits
@both_kinds
@pytest.mark.parametrize("axes", [("rows",), (None, "rows")], ids=["rows", "columns"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_both_layouts_of_a_sharded_array(axes, tiles, kind):
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    with jax.set_mesh(mesh):
        x = jax.device_put(ROWS, NamedSharding(mesh, PartitionSpec(*axes)))
        results = jax.jit(in_both_layouts, static_argnums=1)(x, tiles)
    assert not any(y.is_fully_replicated for y in (results[0], results[2]))
    check_both(results, ROWS, tiles)


def test_a_gpu_reads_an_array_once_for_blocks_of_both_layouts():
    run = jax.jit(in_both_layouts, static_argnums=1).trace(ROWS, TWO["blocks"])
    text = run.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(CALL) == 1 and "stablehlo.transpose" not in text


@pytest.mark.parametrize(
    ("shape", "tiles", "first", "calls"),
    [
        ((4, 96, 64), (1, 96, 64), 2, 0),
        ((4, 128, 128), (1, 128, 128), 2, 1),
        ((4, 256, 384), (1, 128, 128), 2, 1),
        ((256, 2, 128), (1, 1, 128), 1, 0),
    ],
    ids=str,
)
def test_a_gpu_transposes_squares_of_stacks(shape, tiles, first, calls):
    """The call has no other form for tiles that a transposed copy would cut."""
    run = jax.jit(lambda x: encode(x, "float8_e5m2", None, first, tiles, True).transposed)
    text = run.trace(jnp.ones(shape)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(CALL) == calls
    square = f"tile_columns = {tiles[2]} : i64, tile_rows = {tiles[1]} : i64"
    assert text.count(square) == calls


def test_subnormal_numbers_count():
    """XLA's own threads flush them to zero."""
    x = jnp.full((1, 64), 1e-40).at[0, 0].set(-1e-39)
    codes, scale = jax.jit(per_token)(x)
    check(codes, scale, x, (1, 64))


def test_products_take_the_codes_as_they_are():
    x, w = X[0], jax.random.normal(jax.random.key(2), (256, 32))
    w_q = jaxfp8.quantize(w, channelwise_axes=(1,))

    def product(x):
        return jaxfp8.matmul(jaxfp8.quantize(x, channelwise_axes=(0,)), w_q)

    compiled = jax.jit(product).lower(x).compile().as_text()
    assert "jaxfp8_quantize" in compiled
    assert "f16" not in compiled.replace("bf16", "")
    x_q = jaxfp8.quantize(x, channelwise_axes=(0,))
    np.testing.assert_array_equal(product(x), jaxfp8.matmul(x_q, w_q))
