"""Where `compute="int8"` is one call on a GPU, and where it is two roundings and a product."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8._call.library import ffi
from jaxfp8._call.ops import int8_form
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec

E4M3 = jnp.float8_e4m3fn
NT = (((1,), (1,)), ((), ()))

pytestmark = pytest.mark.cuda_library


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(ffi, "compute_capability", lambda: 90)


def weight(n=96, k=64, **axes):
    w = jax.random.normal(jax.random.key(1), (n, k))
    return jaxfp8.quantize(w, **(axes or {"channelwise_axes": (0,)}))


def rows(m, k=64, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(0), (m, k)).astype(dtype)


def product(x, w):
    return jaxfp8.dot_general(x, w, NT, compute="int8", preferred_element_type=jnp.float32)


def calls(function, *arguments) -> list[str]:
    """What a program for a GPU calls: a product by its path, "quantize", in order."""
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    names = []
    for line in text.splitlines():
        if "custom_call @jaxfp8_scaled_dot" in line:
            names.append(line.partition('kernel = "')[2].partition('"')[0])
        elif "custom_call @jaxfp8_quantize" in line:
            names.append("quantize")
    return names


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=np.dtype)
@pytest.mark.parametrize("m", [1, 32])
def test_few_rows_are_one_call(m, dtype):
    assert calls(product, rows(m, dtype=dtype), weight()) == ["int8"]


def test_rows_of_int8_are_one_call():
    x = jaxfp8.quantize(rows(4), jnp.int8, channelwise_axes=(0,))
    assert calls(product, x, weight()) == ["int8"]


@pytest.mark.parametrize("dtype", [jnp.float32, E4M3], ids=np.dtype)
def test_rows_that_the_call_does_not_round_are_rounded_before_it(dtype):
    assert calls(product, rows(4, dtype=dtype), weight()) == ["quantize", "int8"]


def test_weights_on_the_left_are_one_call():
    assert calls(lambda w, x: product(w, x), weight(), rows(4)) == ["int8"]


@pytest.mark.parametrize(
    ("m", "axes"),
    [(65, {}), (4, {"tiled_axes": {0: 128, 1: 128}})],
    ids=["many rows", "scales that change along the sum"],
)
def test_others_are_two_roundings_and_a_product(m, axes):
    x = rows(m, k=4096)
    assert calls(product, x, weight(4096, 4096, **axes)) == ["quantize", "quantize", ""]


def test_rows_that_vmap_makes_many_are_two_roundings_and_a_product():
    w = weight()
    mapped = jax.vmap(lambda x: product(x, w))
    assert calls(mapped, rows(4)[None]) == ["int8"]
    assert calls(mapped, jnp.stack([rows(4)] * 32)) == ["quantize", "quantize", ""]


def test_a_batch_of_weights_is_one_call():
    w = jaxfp8.QArray(jnp.stack([weight().qvalue] * 3), jnp.stack([weight().scale] * 3))
    assert calls(jax.vmap(product), jnp.stack([rows(4)] * 3), w) == ["int8"]


def test_an_exported_program_makes_no_choice_for_other_machines():
    w = weight()
    function = jax.jit(lambda x, q: product(x, jaxfp8.QArray(q, w.scale)))
    names = (f"jaxfp8_{name}" for name in ("scaled_dot", "quantize"))
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
    export = jax.export.export(function, platforms=["cuda"], disabled_checks=checks)
    assert 'kernel = "int8"' not in export(rows(4), w.qvalue).mlir_module()


def test_cpu_computes_the_same_number_whatever_was_traced():
    x, w = rows(4), weight()
    traced = jax.jit(product)
    got = traced(x, w)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ffi, "compute_capability", lambda: None)
        want = jax.jit(lambda x, w: product(x, w))(x, w)
    np.testing.assert_array_equal(got, want)


def test_derivatives_are_those_of_the_product_without_it():
    w = weight()
    gradient = jax.grad(lambda x: product(x, w).sum())(rows(4, dtype=jnp.float32))
    want = jnp.ones((4, 96)) @ jaxfp8.dequantize(w)
    np.testing.assert_allclose(gradient, want, rtol=1e-5, atol=1e-5)


def test_explain_names_the_call():
    def f(x, q, s):
        return jax.lax.dot_general(x, q.astype(x.dtype) * s.astype(x.dtype), NT)

    w = weight()
    (few,) = jaxfp8.explain(f, compute="int8")(rows(4), w.qvalue, w.scale).matched
    (many,) = jaxfp8.explain(f, compute="int8")(rows(128), w.qvalue, w.scale).matched
    assert few.kernels["cuda"] == "sm80_imma" != many.kernels["cuda"]
    (call,) = jaxfp8.explain(product)(rows(4), w).calls
    assert call.kernels["cuda"] == "sm80_imma" and "rounded once more, to int8" in call.note
    assert call.kernels["cpu"] == few.kernels["cpu"]


def test_why_not_one_call_is_the_sentence_of_the_library():
    def side(dtype, lines):
        return OperandSpec(
            dtype=dtype,
            shape=(lines, 64),
            contracting=(1,),
            batch=(),
            tiles=(lines, 64),
            scale=False,
            zero_point=False,
        )

    spec = ScaledDotSpec(
        lhs=side("bfloat16", 65),
        rhs=side("float8_e4m3fn", 96),
        epilogue=EpilogueSpec(out_dtype="float32"),
    )
    reason = int8_form.why_not_one_call(spec, 90)
    assert reason is not None and "up to 32 rows" in reason
