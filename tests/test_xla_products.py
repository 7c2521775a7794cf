"""Which products are left to XLA on a GPU, and that they are the same products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_routes import spec_of, specs_in

import jaxfp8
import oracle
import specs
from jaxfp8._call.gpu import xla_products
from jaxfp8._call.gpu.canonical import is_empty
from jaxfp8._call.library import ffi
from jaxfp8._call.ops import routes

HOPPER = 90


@pytest.fixture
def hopper(monkeypatch):
    """Lowering for a machine with an H100 and its library, of which lowering needs nothing."""
    monkeypatch.setattr(ffi, "compute_capability", lambda: HOPPER)
    monkeypatch.setattr(ffi, "why_unavailable", lambda platform: None)
    jax.clear_caches()
    yield
    jax.clear_caches()


def weight(n, k, dtype=jnp.float8_e4m3fn):
    scale = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    return jaxfp8.QArray(jax.ShapeDtypeStruct((n, k), dtype), scale)


def values(rows, k, dtype=jnp.bfloat16):
    wide = jax.ShapeDtypeStruct((rows, k), dtype)
    if jnp.dtype(dtype).itemsize != 1:
        return wide
    return jaxfp8.QArray(wide, jax.ShapeDtypeStruct((rows, 1), jnp.float32))


product = functools.partial(jaxfp8.einsum, "mk,nk->mn")


def problem(rows, n, k, lhs=jnp.bfloat16, rhs=jnp.float8_e4m3fn):
    traced = jax.make_jaxpr(product)(values(rows, k, lhs), weight(n, k, rhs))
    return next(iter(specs_in(traced.jaxpr)))


E4M3, INT8 = jnp.float8_e4m3fn, jnp.int8


@pytest.mark.parametrize(
    ("sizes", "types", "taken"),
    [
        ((1, 256, 256), (jnp.bfloat16, E4M3), True),
        ((4096, 2048, 4096), (jnp.float16, INT8), True),
        ((1, 4096, 4096), (jnp.bfloat16, E4M3), False),
        ((64, 256, 256), (jnp.float32, E4M3), True),
        ((64, 1024, 1024), (E4M3, E4M3), True),
        ((512, 1024, 1024), (E4M3, E4M3), False),
        ((64, 2048, 2048), (E4M3, E4M3), False),
        ((8, 256, 1024), (INT8, INT8), True),
        ((8, 256, 1040), (INT8, INT8), False),  # sums would not be exact
        ((8, 256, 512), (jnp.uint8, INT8), True),
        ((8, 256, 528), (jnp.uint8, INT8), False),
        ((8, 256, 256), (jnp.uint8, jnp.uint8), True),
        ((8, 256, 264), (jnp.uint8, jnp.uint8), False),
    ],
)
def test_small_products_are_left_to_xla(sizes, types, taken):
    assert xla_products.takes(problem(*sizes, *types), "", HOPPER) == taken


def test_one_row_of_weights_by_columns_is_left_up_to_a_megabyte():
    def specs_of(k, n):
        traced = jax.make_jaxpr(jaxfp8.matmul)(values(1, k), weight(k, n))
        return next(iter(specs_in(traced.jaxpr)))

    assert xla_products.takes(specs_of(1024, 1024), "", HOPPER)
    assert not xla_products.takes(specs_of(4096, 1024), "", HOPPER)


def test_batches_keep_the_call():
    spec = problem(1, 256, 256)
    traced = jax.make_jaxpr(jax.vmap(product))(
        jax.ShapeDtypeStruct((3, 1, 256), jnp.bfloat16),
        jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), weight(256, 256)),
    )
    (batched,) = specs_in(traced.jaxpr)
    assert batched.lhs.batch and not xla_products.takes(batched, "", HOPPER)
    assert xla_products.takes(spec, "", HOPPER)


def test_a_named_kernel_another_gpu_and_an_unknown_one_keep_the_call():
    spec = problem(1, 256, 256)
    assert not xla_products.takes(spec, "sm80_w8a16", HOPPER)
    assert not xla_products.takes(spec, "", 80)
    assert not xla_products.takes(spec, "", None)


def test_scales_along_the_sum_and_zero_points_keep_the_call():
    x = jnp.ones((4, 256), jnp.bfloat16)
    blocks = jaxfp8.quantize(jnp.ones((256, 8)), tiled_axes={0: 128})
    shifted = jaxfp8.quantize(jnp.ones((256, 8)), jnp.int8, channelwise_axes=(1,), zero_point=True)
    assert not any(xla_products.takes(spec_of(x, w), "", HOPPER) for w in (blocks, shifted))


def lowered(function, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_a_small_product_lowers_to_a_dot_of_16_bits(hopper):
    text = lowered(product, values(4, 256), weight(64, 256))
    assert "custom_call @jaxfp8_scaled_dot" not in text
    assert "(tensor<4x256xbf16>, tensor<64x256xbf16>) -> tensor<4x64xf32>" in text


def test_a_small_product_is_no_fallback(hopper):
    with jaxfp8.strict():
        assert "dot_general" in lowered(product, values(4, 256), weight(64, 256))


def test_a_large_product_lowers_to_the_call(hopper):
    text = lowered(product, values(4, 4096), weight(4096, 4096))
    assert "custom_call @jaxfp8_scaled_dot" in text and "dot_general" not in text


def test_an_exported_program_keeps_the_call(hopper):
    checks = jaxfp8.ffi.export_checks()
    export = jax.export.export(jax.jit(product), platforms=("cuda",), disabled_checks=checks)
    text = export(values(4, 256), weight(64, 256)).mlir_module()
    assert "custom_call @jaxfp8_scaled_dot" in text


def test_reports_name_xla(hopper):
    assert routes.kernel_for(problem(1, 256, 256), "cuda") == "xla"


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.same_bits
def test_the_product_is_the_scaled_dot(seed):
    """Against float64, within the bound of float32 sums; whatever the spec is."""
    rng = np.random.default_rng(seed)
    spec = specs.draw_spec(rng)
    while xla_products.multiplied_in(spec) is None or is_empty(spec):
        spec = specs.draw_spec(rng)
    operands = specs.draw_operands(rng, spec)
    run = jax.jit(functools.partial(xla_products.scaled_dot, spec=spec, kernel=""))
    try:
        out, *amax = jax.block_until_ready(run(*(operands[n] for n in spec.operand_names())))
    except jax.errors.JaxRuntimeError as error:
        assert "Unsupported element type for DotThunk" in str(error)
        pytest.skip("XLA on a CPU does not multiply such an array of 16-bit floats")
    found = np.asarray(amax[0]) if amax else None
    oracle.assert_within_bound(spec, operands, np.asarray(out), found)


@pytest.mark.parametrize("dtype", specs.EIGHT_BIT)
@pytest.mark.parametrize("wide", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_floats_hold_every_code(dtype, wide):
    codes = np.arange(256, dtype=np.uint8).view(np.dtype(dtype))
    np.testing.assert_array_equal(codes.astype(wide).astype(np.float64), codes.astype(np.float64))
