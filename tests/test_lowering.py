"""What a scaled dot compiles to, and what happens where no kernel takes it."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8._call.library import ffi, strictness
from jaxfp8._call.ops.dot import scaled_dot
from jaxfp8._call.reference import dot_reference
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec

QW = jaxfp8.quantize(jnp.ones((32, 16)), channelwise_axes=(1,))
QW16 = jaxfp8.QArray(QW.qvalue, QW.scale.astype(jnp.bfloat16))
AFFINE = jaxfp8.quantize(jnp.ones((32, 16)), jnp.int8, channelwise_axes=(1,), zero_point=True)
BIAS = jnp.ones(16, jnp.bfloat16)
X = jnp.ones((4, 32), jnp.bfloat16)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No lowering is remembered, and no warning that it gave."""
    monkeypatch.setattr(strictness, "_WARNED", set())
    jax.clear_caches()


def lowered(*platforms: str) -> str:
    return jax.jit(jaxfp8.matmul).trace(X, QW).lower(lowering_platforms=platforms).as_text()


def test_cpu_lowers_to_the_custom_call_alone() -> None:
    text = lowered("cpu")
    assert "custom_call @jaxfp8_scaled_dot" in text
    assert "dot_general" not in text


def affine(x: jax.Array, w: jaxfp8.QArray) -> jax.Array:
    return x @ ((w.qvalue.astype(jnp.float32) - w.zero_point) * w.scale)


def scaled(x: jax.Array, w: jaxfp8.QArray) -> jax.Array:
    return x @ (w.qvalue.astype(x.dtype) * w.scale)


def with_bias(x: jax.Array, w: jaxfp8.QArray, bias: jax.Array) -> jax.Array:
    return jaxfp8.matmul(x, w, bias=bias)


@pytest.mark.parametrize(
    ("function", "operands"),
    [
        (jaxfp8.matmul, (X, AFFINE)),
        (jaxfp8.rewrite(affine), (X.astype(jnp.float32), AFFINE)),
        (with_bias, (X, QW, BIAS)),
        (jaxfp8.matmul, (X, QW16)),
        (jaxfp8.rewrite(scaled), (X, QW16)),
    ],
)
def test_small_operands_go_into_the_call_as_they_are_stored(function, operands) -> None:
    text = jax.jit(function).trace(*operands).lower().as_text()
    assert "custom_call @jaxfp8_scaled_dot" in text
    assert "stablehlo.convert" not in text


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_platforms_without_kernels_compute_the_reference_and_say_so(platform) -> None:
    with pytest.warns(jaxfp8.FallbackWarning, match=platform):
        text = lowered(platform)
    assert "jaxfp8_scaled_dot" not in text
    assert "dot_general" in text


def test_the_warning_comes_once_per_reason() -> None:
    with pytest.warns(jaxfp8.FallbackWarning):
        lowered("tpu")
    jax.clear_caches()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered("tpu")


def test_strict_makes_it_an_error() -> None:
    with jaxfp8.strict(), pytest.raises(jaxfp8.UnsupportedError, match="no TPU kernels"):
        lowered("tpu")


@pytest.mark.parametrize(
    "how",
    [
        "matmul",
        "blocks",
        "prepared",
        "INT8_DYNAMIC",
        "INT8_ASYMMETRIC",
        "FP8_DYNAMIC",
        "FP8_W8A16",
        "tensor",
    ],
)
@pytest.mark.same_bits
def test_an_export_for_any_number_of_rows_computes_the_reference(how) -> None:
    w = jnp.asarray(np.random.default_rng(0).normal(size=(128, 64)), jnp.float32)
    dtype = jnp.int8 if how.startswith("INT8_DYNAMIC") else jnp.float8_e4m3fn
    q = jaxfp8.quantize(w, dtype, channelwise_axes=(1,))
    if how == "blocks":
        q = jaxfp8.quantize(w, tiled_axes={0: 32, 1: 32})
    q = jaxfp8.prepare(q) if how == "prepared" else q
    recipe = getattr(jaxfp8, how, None) if how.isupper() else None

    def multiply(x: jax.Array) -> jax.Array:
        if recipe is None:
            lhs = jaxfp8.quantize(x, jnp.int8, zero_point=True) if how == "tensor" else x
            return jaxfp8.matmul(lhs, q)
        return jaxfp8.recipe_dot_general(x, q, (((1,), (0,)), ((), ())), recipe)

    (rows,) = jax.export.symbolic_shape("rows")
    with pytest.warns(jaxfp8.FallbackWarning, match="sizes are not known when"):
        exported = jax.export.export(jax.jit(multiply))(
            jax.ShapeDtypeStruct((rows, 128), jnp.float32)
        )
    for count in (1, 5):
        x = jnp.asarray(np.random.default_rng(count).normal(size=(count, 128)), jnp.float32)
        np.testing.assert_allclose(exported.call(x), multiply(x), rtol=1e-5, atol=1e-4)


def test_strict_ends_with_its_context() -> None:
    with jaxfp8.strict():
        assert strictness.is_strict()
    assert not strictness.is_strict()


class TestCudaWithoutGpu:
    """A program for GPUs can be lowered anywhere; what the machine it runs on has is its matter."""

    def test_a_product_is_one_call(self) -> None:
        text = lowered("cuda")
        assert text.count("custom_call @jaxfp8_scaled_dot") == 1
        assert "dot_general" not in text

    def test_a_weight_is_neither_widened_nor_turned(self) -> None:
        text = lowered("cuda")
        assert "convert" not in text
        assert "transpose" not in text

    def test_8_bit_times_8_bit_reaches_tensor_cores_with_contiguous_depths(self) -> None:
        quantized = jaxfp8.quantize(X)
        trace = jax.jit(jaxfp8.matmul).trace(quantized, QW)
        text = trace.lower(lowering_platforms=("cuda",)).as_text()
        assert "transpose %arg2, dims = [1, 0] : (tensor<32x16xf8E4M3FN>)" in text

    def test_a_weight_kept_with_its_contracted_axis_last_is_not_turned(self) -> None:
        weight = jaxfp8.quantize(jnp.ones((16, 32)), channelwise_axes=(0,))
        product = jax.jit(lambda x, w: jaxfp8.einsum("mk,nk->mn", x, w))
        trace = product.trace(jaxfp8.quantize(X), weight)
        assert "transpose" not in trace.lower(lowering_platforms=("cuda",)).as_text()

    @pytest.mark.cuda_library
    @pytest.mark.parametrize("batch", [1, 3])
    def test_a_cache_by_token_is_not_turned(self, batch) -> None:
        def attend(query, k, of_k, v, of_v):
            keys, values = (
                codes.astype(query.dtype) * scale.astype(query.dtype)
                for codes, scale in ((k, of_k), (v, of_v))
            )
            return jax.nn.dot_product_attention(query, keys, values)

        stored = jaxfp8.quantize(jnp.ones((batch, 50, 2, 64)), channelwise_axes=(0, 1, 2))
        cache = (stored.qvalue, stored.scale) * 2
        query = jnp.ones((batch, 1, 8, 64), jnp.bfloat16)
        trace = jax.jit(jaxfp8.rewrite(attend)).trace(query, *cache)
        text = trace.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @jaxfp8_scaled_dot") == 2
        turned = [line for line in text.splitlines() if "stablehlo.transpose" in line]
        assert not [line for line in turned if "xf8E4M3FN>" in line]

    @pytest.mark.parametrize("zeros", [True, None], ids=["zero points", "symmetric"])
    @pytest.mark.parametrize("last", [True, False], ids=["MK", "KM"])
    def test_sums_of_activations_are_made_with_their_codes(self, last, zeros) -> None:
        weight = jaxfp8.quantize(jnp.ones((32, 16)), jnp.int8, zero_point=zeros)

        def product(x, w):
            q = jaxfp8.quantize(x, jnp.int8, channelwise_axes=(0,), zero_point=True)
            return jaxfp8.matmul(q if last else q.T, w)

        x = jnp.ones((8, 32) if last else (32, 8))
        text = jax.jit(product).trace(x, weight).lower(lowering_platforms=("cuda",)).as_text()
        assert ("lhs_sums = true" in text) is (last and zeros is True)
        assert "rhs_sums = false" in text

    @pytest.mark.cuda_library
    def test_scales_of_weights_go_in_as_they_are_stored(self) -> None:
        text = jax.jit(jaxfp8.matmul).trace(X, QW16).lower(lowering_platforms=("cuda",)).as_text()
        assert "stablehlo.convert" not in text
        assert "tensor<1x1x16xbf16>) -> (" in text

    @pytest.mark.cuda_library
    def test_a_scale_that_a_function_rounds_is_rounded_by_the_call(self) -> None:
        def model(x, codes, scale):
            return x @ (codes.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16))

        trace = jax.jit(jaxfp8.rewrite(model)).trace(X, QW.qvalue, QW.scale)
        text = trace.lower(lowering_platforms=("cuda",)).as_text()
        assert "rhs_scale_rounded = true" in text
        assert "stablehlo.convert" not in text

    @pytest.mark.parametrize("function", [jaxfp8.matmul, lambda x, w: jaxfp8.matmul(w.T, x.T)])
    def test_scales_that_go_to_other_paths_are_widened(self, function) -> None:
        many = jnp.ones((300, 32), jnp.bfloat16)
        text = jax.jit(function).trace(many, QW16).lower(lowering_platforms=("cuda",)).as_text()
        (converted,) = [line for line in text.splitlines() if "stablehlo.convert" in line]
        assert "xbf16>) -> tensor<" in converted

    def test_zero_points_and_bias_are_widened(self) -> None:
        trace = jax.jit(with_bias).trace(X, AFFINE, BIAS)
        text = trace.lower(lowering_platforms=("cuda",)).as_text()
        converted = [line for line in text.splitlines() if "stablehlo.convert" in line]
        assert len(converted) == 2
        assert any("xi8>) -> tensor<1x16xi32>" in line for line in converted)
        assert any("xbf16>) -> tensor<1x16xf32>" in line for line in converted)

    def test_the_last_result_is_scratch_memory(self) -> None:
        assert "-> (tensor<1x4x16xbf16>, tensor<" in lowered("cuda")

    @pytest.mark.cuda_library
    @pytest.mark.parametrize("rows", [1, 4])
    def test_scratch_for_few_rows_is_a_tenth_of_the_weight_at_most(self, rows) -> None:
        weight = jaxfp8.quantize(jnp.ones((4096, 1024)), channelwise_axes=(1,))
        trace = jax.jit(jaxfp8.matmul).trace(jnp.ones((rows, 4096), jnp.bfloat16), weight)
        text = trace.lower(lowering_platforms=("cuda",)).as_text()
        (scratch,) = re.findall(rf"-> \(tensor<1x{rows}x1024xbf16>, tensor<(\d+)xui8>\)", text)
        assert int(scratch) <= 0.1 * weight.qvalue.nbytes

    def test_inside_shard_map(self) -> None:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("rows",))
        rows = jax.sharding.PartitionSpec("rows")
        local = jax.shard_map(
            jaxfp8.matmul, mesh=mesh, in_specs=(rows, jax.sharding.PartitionSpec()), out_specs=rows
        )
        text = jax.jit(local).trace(X, QW).lower(lowering_platforms=("cuda",)).as_text()
        assert "tensor<1x2x32xbf16>" in text
        assert "jaxfp8_scaled_dot" in text

    def test_a_program_is_exported_for_both_platforms(self) -> None:
        consent = jaxfp8.ffi.export_checks()
        exported = jax.export.export(
            jax.jit(jaxfp8.matmul), platforms=("cpu", "cuda"), disabled_checks=consent
        )(X, QW)
        assert exported.mlir_module().count("custom_call @jaxfp8_scaled_dot") == 2
        np.testing.assert_array_equal(exported.call(X, QW), 32)

    def test_a_rewritten_program(self) -> None:
        def pattern(x, codes, scale):
            return x @ (codes.astype(x.dtype) * scale.astype(x.dtype))

        trace = jax.jit(jaxfp8.rewrite(pattern)).trace(X, QW.qvalue, QW.scale)
        assert "jaxfp8_scaled_dot" in trace.lower(lowering_platforms=("cuda",)).as_text()

    def test_an_empty_product_needs_no_call(self) -> None:
        trace = jax.jit(jaxfp8.matmul).trace(X[:0], QW)
        assert "custom_call" not in trace.lower(lowering_platforms=("cuda",)).as_text()

    @pytest.mark.parametrize(
        ("axes", "call"),
        [
            ({"channelwise_axes": (0,)}, True),
            ({}, True),
            ({"tiled_axes": {1: 128}, "channelwise_axes": (0,)}, True),
            ({"channelwise_axes": (1,)}, False),
        ],
        ids=["row", "tensor", "1x128", "column"],
    )
    def test_scales_are_chosen_by_a_kernel_where_there_is_one(self, axes, call) -> None:
        trace = jax.jit(lambda x: jaxfp8.quantize(x, **axes)).trace(jnp.ones((64, 256)))
        text = trace.lower(lowering_platforms=("cuda",)).as_text()
        assert ("custom_call @jaxfp8_quantize" in text) == call


class TestWithoutTheLibrary:
    @pytest.fixture(autouse=True)
    def no_library(self, monkeypatch):
        monkeypatch.setattr(ffi, "why_unavailable", lambda platform: "the library is not there")
        yield
        jax.clear_caches()

    def test_strict_says_why(self) -> None:
        with (
            jaxfp8.strict(),
            pytest.raises(jaxfp8.UnsupportedError, match="the library is not there"),
        ):
            jaxfp8.matmul(X, QW)

    def test_otherwise_the_reference_is_right_and_warns(self) -> None:
        with pytest.warns(jaxfp8.FallbackWarning, match="the library is not there"):
            y = jaxfp8.matmul(X, QW)
        np.testing.assert_array_equal(np.asarray(y, np.float32), 32)


# One weight of 64 MB in FP8; for one row and for 64 the process prints how much larger its peak
# memory became, and how much XLA plans to allocate for intermediates.
_MEMORY = """
import resource

import jax, jax.numpy as jnp, numpy as np
import jaxfp8

n = 8192
w = jax.device_put(np.full((n, n), 0x38, np.uint8).view(jnp.float8_e4m3fn))
small = jaxfp8.QArray(w[:256, :256], jnp.ones((1, 256)))
for rows in (1, 64):
    x = jnp.ones((rows, n), jnp.bfloat16)
    jaxfp8.matmul(x[:, :256], small).block_until_ready()
    compiled = jax.jit({function}).lower(x, w, jnp.ones((1, n))).compile()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    y = compiled(x, w, jnp.ones((1, n))).block_until_ready()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert np.all(np.asarray(y, np.float32) == n), y
    print(grown * 1024 - y.nbytes, compiled.memory_analysis().temp_size_in_bytes)
"""
FUNCTIONS = {
    "product": "lambda x, w, s: jaxfp8.matmul(x, jaxfp8.QArray(w, s))",
    "transposed": "lambda x, w, s: jaxfp8.einsum('mk,nk->mn', x, jaxfp8.QArray(w, s))",
    "rewritten": "jaxfp8.rewrite(lambda x, w, s: x @ (w.astype(x.dtype) * s.astype(x.dtype)))",
    "rewritten, transposed": (
        "jaxfp8.rewrite(lambda x, w, s: x @ (w.astype(jnp.float32) * s).T.astype(x.dtype))"
    ),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_large_weight_is_never_widened(function) -> None:
    code = _MEMORY.replace("{function}", function)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    figures = [int(figure) for figure in out.stdout.split()]
    assert len(figures) == 4 and max(figures) < 0.1 * 2**26


def _rounded_product() -> tuple[ScaledDotSpec, dict[str, jax.Array], np.ndarray, np.ndarray]:
    """A product with scales that count as rounded, its operands, and both sides in float64."""
    lhs = OperandSpec(
        dtype="float32",
        shape=(3, 32),
        contracting=(1,),
        batch=(),
        tiles=(1, 32),
        scale=True,
        zero_point=False,
        scale_rounded=True,
    )
    rhs = dataclasses.replace(lhs, dtype="int8", shape=(32, 8), contracting=(0,), tiles=(32, 1))
    spec = ScaledDotSpec(lhs=lhs, rhs=rhs, epilogue=EpilogueSpec(out_dtype="float32"))
    rng = np.random.default_rng(0)
    operands = {
        "lhs": jnp.asarray(rng.normal(size=(3, 32)), np.float32),
        "rhs": jnp.asarray(rng.integers(-127, 128, (32, 8)), np.int8),
        "lhs_scale": jnp.full((3, 1), 1.0039, np.float32),
        "rhs_scale": jnp.asarray(rng.uniform(1, 2, (1, 8)), np.float32),
    }
    sides = [
        np.asarray(operands[name], np.float64)
        * np.asarray(operands[f"{name}_scale"].astype(jnp.bfloat16), np.float64)
        for name in ("lhs", "rhs")
    ]
    return spec, operands, *sides


def test_scales_that_count_as_rounded_are_rounded_by_the_kernel_and_its_reference() -> None:
    spec, operands, lhs, rhs = _rounded_product()
    named = [operands[name] for name in spec.operand_names()]
    for out in (scaled_dot(spec, **operands)[0], dot_reference.scaled_dot(spec, *named)[0]):
        np.testing.assert_allclose(out, lhs @ rhs, rtol=1e-5, atol=1e-3)


def test_the_cotangent_of_a_side_sees_scales_as_rounded() -> None:
    spec, operands, lhs, rhs = _rounded_product()
    got = jax.grad(lambda x: scaled_dot(spec, **(operands | {"lhs": x}))[0].sum())(operands["lhs"])
    want = rhs.sum(1) * (lhs / np.asarray(operands["lhs"], np.float64))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)


def test_only_scales_of_float32_count_as_rounded() -> None:
    spec, operands, *_ = _rounded_product()
    narrow = operands["rhs_scale"].astype(jnp.bfloat16)
    with pytest.raises(
        TypeError, match=r"rhs_scale is bfloat16\[1, 8\], but its spec says float32"
    ):
        scaled_dot(spec, **(operands | {"rhs_scale": narrow}))
