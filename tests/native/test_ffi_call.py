"""The call of docs/custom_call.md, made directly: what it takes, and how it refuses the rest."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native import calls

import oracle
import specs
from jaxfp8._call.library import ffi
from jaxfp8._value.spec import EpilogueSpec, ScaledDotSpec

SPEC = ScaledDotSpec(
    lhs=calls.side("bfloat16", (5, 24), (1,)),
    rhs=calls.side("float8_e4m3fn", (24, 9), (0,), tiles=(24, 1), scale=True),
    epilogue=EpilogueSpec(out_dtype="float32"),
)
INT_SPEC = calls.matrices("int8", "int8", 2, 3, 4, out="int32")


def operands_of(spec: ScaledDotSpec, seed: int = 0) -> dict[str, np.ndarray]:
    return specs.draw_operands(np.random.default_rng(seed), spec)


def change(spec: ScaledDotSpec, where: str, **changes) -> ScaledDotSpec:
    return dataclasses.replace(
        spec, **{where: dataclasses.replace(getattr(spec, where), **changes)}
    )


def refusal(spec: ScaledDotSpec, operands=None, **attributes) -> str:
    """The message with which a call is refused; JAX must go on working after it."""
    operands = operands_of(SPEC).values() if operands is None else operands
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        calls.call(spec, *operands, **attributes)
    assert float(jnp.ones(3).sum()) == 3.0
    return str(caught.value)


def test_a_call_without_a_kernel_name_picks_the_best():
    before = ffi.kernel_calls()
    operands = operands_of(SPEC)
    (out,) = calls.call_named(SPEC, operands)
    oracle.assert_within_bound(SPEC, operands, out)
    ran = [name for name, count in ffi.kernel_calls().items() if count > before[name]]
    suitable = [name for name in ffi.available_kernels() if calls.takes(name, SPEC)]
    assert ran == suitable[:1]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, jnp.float8_e4m3fn])
def test_fp8_may_travel_as_any_type_of_a_byte_that_fits(dtype):
    operands = operands_of(SPEC)
    (expected,) = calls.call_named(SPEC, operands)
    operands["rhs"] = operands["rhs"].view(dtype)
    (out,) = calls.call_named(SPEC, operands)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)])
def test_any_order_of_axes_gives_the_same_sums(order):
    """A batched weight [B, K, N], transposed in memory."""
    rng = np.random.default_rng(2)
    weight = specs.draw_values(rng, "int8", (3, 40, 70))
    x = specs.draw_values(rng, "int8", (3, 5, 40))
    batch, k = order.index(0), order.index(1)
    spec = ScaledDotSpec(
        lhs=calls.side("int8", x.shape, (2,), batch=(0,)),
        rhs=calls.side("int8", weight.transpose(order).shape, (k,), batch=(batch,)),
        epilogue=EpilogueSpec(out_dtype="int32"),
    )
    (out,) = calls.call(spec, x, np.ascontiguousarray(weight.transpose(order)))
    np.testing.assert_array_equal(out, x.astype(np.int64) @ weight.astype(np.int64))


def test_a_weight_of_batch_1_is_shared_by_the_batch():
    rng = np.random.default_rng(2)
    x, weight = (
        specs.draw_values(rng, "int8", (6, 5, 40)),
        specs.draw_values(rng, "int8", (1, 40, 7)),
    )
    spec = ScaledDotSpec(
        lhs=calls.side("int8", x.shape, (2,), batch=(0,)),
        rhs=calls.side("int8", weight.shape, (1,), batch=(0,)),
        epilogue=EpilogueSpec(out_dtype="int32"),
    )
    (out,) = calls.call(spec, x, weight)
    np.testing.assert_array_equal(out, x.astype(np.int64) @ weight.astype(np.int64))


@pytest.mark.parametrize("empty", ["m", "n", "k"])
def test_empty_sizes(empty):
    size = {"m": 3, "n": 4, "k": 5, empty: 0}
    spec = calls.matrices(
        "float32", "int8", size["m"], size["k"], size["n"], bias=(1, size["n"]), activation="silu"
    )
    operands = operands_of(spec)
    (out,) = calls.call_named(spec, operands)
    oracle.assert_within_bound(spec, operands, out)


def test_it_runs_inside_jit_and_is_compiled_once():
    operands = operands_of(SPEC)
    ffi.ensure_registered("cpu")
    function = jax.ffi.ffi_call(calls.TARGET, calls.results_of(SPEC))
    jitted = jax.jit(lambda *given: function(*given, **SPEC.attributes(), kernel=""))
    (expected,) = calls.call_named(SPEC, operands)
    for _ in range(2):
        np.testing.assert_array_equal(jitted(*operands.values())[0], expected)
    assert jitted._cache_size() == 1


REFUSED_SPECS = {
    "unknown dtype": (change(SPEC, "rhs", dtype="float4"), "attribute `rhs_dtype` is `float4`"),
    "no 8-bit side": (change(SPEC, "rhs", dtype="float32"), "at least one of them in 8 bits"),
    "zero point of fp8": (
        change(SPEC, "rhs", zero_point=True),
        "`rhs_zero_point` is given for float8",
    ),
    "axis twice": (change(SPEC, "lhs", batch=(1,)), "different axes of shape (5, 24)"),
    "axis out of range": (change(SPEC, "lhs", contracting=(2,)), "different axes of shape (5, 24)"),
    "unequal depth": (change(SPEC, "lhs", contracting=(0,)), "needs equal sizes in pairs"),
    "unequal batch": (
        change(change(SPEC, "lhs", batch=(0,)), "rhs", batch=(1,)),
        "equal sizes in pairs, or 1 on one side",
    ),
    "tiles of 0": (change(SPEC, "rhs", tiles=(0, 1)), "attribute `rhs_tiles` is (0, 1)"),
    "too few tiles": (change(SPEC, "rhs", tiles=(1,)), "attribute `rhs_tiles` is (1,)"),
    "activation": (
        change(SPEC, "epilogue", activation="mish"),
        "`activation` is `mish`, but needs",
    ),
    "output dtype": (change(SPEC, "epilogue", out_dtype="int16"), "`out_dtype` is `int16`"),
    "int32 of floats": (
        change(SPEC, "epilogue", out_dtype="int32"),
        "int8 or uint8 operands without",
    ),
    "out_scale of a float": (
        change(SPEC, "epilogue", out_scale=(1, 1)),
        "is set for float32, but needs an output of 8 bits",
    ),
    "bias shape": (change(SPEC, "epilogue", bias=(9,)), "the rank of the output (5, 9), each axis"),
    "amax shape": (change(SPEC, "epilogue", amax=(5, 3)), "attribute `amax` is (5, 3)"),
    "residual dtype": (
        change(SPEC, "epilogue", residual=(5, 9), residual_dtype="int8"),
        "attribute `residual_dtype` is `int8`",
    ),
    "precision": (dataclasses.replace(SPEC, precision="high"), "attribute `precision` is `high`"),
}


@pytest.mark.parametrize("case", REFUSED_SPECS)
def test_a_wrong_spec_is_refused_with_what_it_got_and_needs(case):
    spec, needle = REFUSED_SPECS[case]
    function = jax.ffi.ffi_call(calls.TARGET, [jax.ShapeDtypeStruct((5, 9), np.float32)])
    ffi.ensure_registered("cpu")
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT: `jaxfp8_scaled_dot`"
    ) as e:
        function(*operands_of(SPEC).values(), **spec.attributes(), kernel="")
    assert needle in str(e.value)


def test_a_missing_operand_is_named():
    operands = list(operands_of(SPEC).values())[:2]
    assert "has 2 operands, but needs 3: lhs, rhs, rhs_scale" in refusal(SPEC, operands)


def test_an_operand_of_another_dtype_is_named():
    operands = operands_of(SPEC) | {"rhs_scale": np.ones((1, 9), np.int32)}
    assert "`rhs_scale` is a buffer of int32, but needs float32, bfloat16 or float16" in refusal(
        SPEC, operands.values()
    )


def test_operands_that_may_have_several_dtypes_are_named_with_all_of_them():
    spec = change(INT_SPEC, "lhs", zero_point=True)
    operands = operands_of(spec) | {"lhs_zero_point": np.ones((1, 1), np.float32)}
    assert "`lhs_zero_point` is a buffer of float32, but needs int32, int8 or uint8" in refusal(
        spec, operands.values()
    )
    spec = change(SPEC, "epilogue", bias=(1, 9))
    operands = operands_of(spec) | {"bias": np.ones((1, 9), np.int8)}
    assert "`bias` is a buffer of int8, but needs float32, bfloat16 or float16" in refusal(
        spec, operands.values()
    )


def test_only_a_scale_of_float32_is_rounded():
    operands = operands_of(SPEC) | {"rhs_scale": np.ones((1, 9), np.float16)}
    text = refusal(SPEC, operands.values(), rhs_scale_rounded=True)
    assert "`rhs_scale` is a buffer of float16, but needs float32" in text
    text = refusal(SPEC, lhs_scale_rounded=True)
    assert "attribute `lhs_scale_rounded` is set, but needs attribute `lhs_scale` to be set" in text
    text = refusal(SPEC, rhs_scale_rounded="yes")
    assert "`rhs_scale_rounded` has another type, but needs to be a bool" in text


def test_sums_are_those_of_integers():
    text = refusal(change(SPEC, "rhs", sums=True))
    assert f"attribute `rhs_sums` is set for {SPEC.rhs.dtype}, but needs values of int8" in text
    spec = change(INT_SPEC, "rhs", sums=True)
    operands = operands_of(spec)
    assert "`rhs_sums` is a buffer of float32, but needs int32" in refusal(
        spec, (operands | {"rhs_sums": operands["rhs_sums"].astype(np.float32)}).values()
    )
    assert "`rhs_sums` has shape (4,), but needs (1, 4)" in refusal(
        spec, (operands | {"rhs_sums": operands["rhs_sums"].reshape(-1)}).values()
    )


def test_an_operand_of_another_shape_is_named():
    operands = operands_of(SPEC) | {"rhs_scale": np.ones((9,), np.float32)}
    assert "`rhs_scale` has shape (9,), but needs (1, 9)" in refusal(SPEC, operands.values())


def test_a_missing_attribute_is_named():
    function = jax.ffi.ffi_call(calls.TARGET, calls.results_of(SPEC))
    ffi.ensure_registered("cpu")
    attributes = {k: v for k, v in SPEC.attributes().items() if k != "rhs_tiles"}
    with pytest.raises(jax.errors.JaxRuntimeError, match="`rhs_tiles` is missing"):
        function(*operands_of(SPEC).values(), **attributes, kernel="")


def test_an_attribute_of_another_type_is_named():
    assert "`lhs_scale` has another type, but needs to be a bool" in refusal(SPEC, lhs_scale="yes")


def test_an_unknown_kernel_is_answered_with_those_there_are():
    text = refusal(SPEC, kernel="magic")
    assert "attribute `kernel` is `magic`, but needs one of: " in text
    assert "scalar_f32" in text


def test_a_kernel_that_cannot_says_why():
    text = refusal(SPEC, kernel="scalar_int8")
    assert "it sums integers, and the operands are bfloat16 and float8_e4m3fn" in text
    operands = np.ones((2, 3), np.int8), np.ones((3, 4), np.int8)
    assert "its sums are rounded" in refusal(INT_SPEC, operands, kernel="scalar_f32")


# What any attribute may be given in place of its own value.
WILD_SIZES = (-(2**63), -1, 0, 1, 2, 5, 24, 2**31, 2**32, 2**40, 2**50, 2**61, 2**62, 2**63 - 1)
WILD_VALUES = ("", "int8", "float4", "x" * 300, True, False, 1.5, np.int64(2**62), np.int32(-1))


def wild(rng: np.random.Generator, attributes: dict) -> dict:
    """The attributes with one to three of them changed to what nobody means."""
    changed = dict(attributes)
    for name in rng.choice(list(attributes), rng.integers(1, 4)):
        own = attributes[name]
        kind = rng.random()
        if kind < 0.6 and isinstance(own, np.ndarray):
            sizes = np.array(rng.choice(WILD_SIZES, rng.integers(0, 5)), np.int64)
            if own.size and rng.random() < 0.6:
                sizes = own.copy()
                sizes[rng.integers(own.size)] = rng.choice(WILD_SIZES)
            changed[name] = sizes
        elif kind < 0.7:
            changed.pop(name, None)
        else:
            changed[name] = WILD_VALUES[rng.integers(len(WILD_VALUES))]
    return changed


@pytest.mark.parametrize("block", range(4))
def test_attributes_that_nobody_means_are_refused_with_a_sentence(block):
    rng = np.random.default_rng(80_000 + block)
    ffi.ensure_registered("cpu")
    refused = 0
    for _ in range(40):
        spec = specs.draw_spec(rng)
        operands = specs.draw_operands(rng, spec)
        call = jax.ffi.ffi_call(calls.TARGET, calls.results_of(spec))
        given = {**spec.attributes(), "kernel": ""}
        try:
            jax.block_until_ready(call(*operands.values(), **wild(rng, given)))
        except jax.errors.JaxRuntimeError as error:
            refused += 1
            text = str(error)
            assert text.startswith("INVALID_ARGUMENT: "), text
            assert "`jaxfp8_scaled_dot`: " in text
            assert "needs" in text or "cannot" in text, text
    assert refused > 20
    assert float(jnp.ones(3).sum()) == 3.0


def test_groups_of_vectors_are_refused():
    """A vector has no row of bias to read."""
    vector = calls.side("float8_e4m3fn", (8,), (0,))
    epilogue = EpilogueSpec(out_dtype="float32", bias=())
    spec = ScaledDotSpec(lhs=vector, rhs=vector, epilogue=epilogue)
    values, bias = np.zeros(8, jnp.float8_e4m3fn), np.zeros(1, np.float32)
    ffi.ensure_registered("cpu")
    call = jax.ffi.ffi_call("jaxfp8_ragged_dot", [jax.ShapeDtypeStruct((1,), jnp.float32)])
    with pytest.raises(jax.errors.JaxRuntimeError, match="`lhs` needs two axes in each group"):
        call(values, values, bias, np.int32([8]), **spec.attributes(), grouping="rows", kernel="")
