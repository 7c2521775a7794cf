"""What messages and tables say: arrays by dtype and shape, and no line that is cut in a pipe."""

import jax
import jax.numpy as jnp
import pytest

import jaxfp8
from jaxfp8._call.library import strictness
from jaxfp8._call.reference import produce_reference, quantize_reference
from jaxfp8._value import tables
from jaxfp8._value.errors import shown

HEAD, ROW = ("name", "size"), ("a/very/long/path" * 20, "4.0 KiB")


@pytest.mark.parametrize(("columns", "lines"), [(None, 1), ("60", 2)], ids=["pipe", "terminal"])
def test_a_table_fits_a_terminal_and_is_whole_elsewhere(monkeypatch, columns, lines):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    text = tables.text("title", HEAD, [ROW])
    assert (ROW[0] in text) == (columns is None)
    of_row = [line for line in text.splitlines() if "very" in line]
    assert (len(of_row) == 1) == (lines == 1)
    assert columns is None or max(map(len, text.splitlines())) <= int(columns)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (jnp.ones((64, 32), jnp.bfloat16), "an array bfloat16[64,32]"),
        ("W8A16", "'W8A16'"),
        (list(range(1000)), "of type list"),
    ],
    ids=["array", "short", "long"],
)
def test_a_message_shows_a_value_in_few_words(value, words):
    assert shown(value) == words


def test_a_layer_in_place_of_a_recipe_is_told_by_its_type():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    import jaxfp8.nnx

    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="`recipe` is of type Linear, but a recipe") as error:
        jaxfp8.nnx.quantize(nnx.Sequential(layer), layer)
    assert "\n" not in str(error.value)


def test_a_product_without_a_kernel_is_told_by_its_arrays(monkeypatch):
    monkeypatch.setattr(strictness, "_WARNED", set())
    x, w = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((8, 16), jnp.int8)
    traced = jax.jit(lambda x: jaxfp8.dot_general(x, w, (((1,), (0,)), ((), ())))).trace(x)
    with pytest.warns(jaxfp8.FallbackWarning) as told:
        traced.lower(lowering_platforms=("tpu",))
    (text,) = [str(one.message) for one in told]
    assert "the product of bfloat16[4,8] and int8[8,16] has no kernel on 'tpu'" in text
    assert text.endswith("`python -m jaxfp8 doctor` says more.")


@pytest.mark.parametrize(
    "spec",
    [
        quantize_reference.QuantizeSpec(dtype=jnp.dtype(jnp.int8), tiles=(1, 8)),
        produce_reference.ProduceSpec(dtype=jnp.dtype(jnp.int8), rule=produce_reference.RowScale()),
    ],
    ids=["tiles", "rows"],
)
def test_a_quantization_is_told_by_its_array(spec):
    words = spec.told(jax.ShapeDtypeStruct((4, 8), jnp.float32))
    assert words.startswith("the quantization of ") and words.endswith("float32[4,8]")
