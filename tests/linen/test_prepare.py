"""`jaxfp8.linen.prepare`: the weights of a model as kernels read them."""

import compiling
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
import jaxfp8.linen
from jaxfp8 import PreparedArray, QArray
from jaxfp8._value import prepared as _prepared


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


class Model(nn.Module):
    """Layers that can be prepared, and one of each reason why one cannot."""

    recipe: jaxfp8.Recipe = jaxfp8.INT8_DYNAMIC

    @nn.compact
    def __call__(self, tokens):
        layers = jaxfp8.linen
        embed = layers.Embed(16, 64, recipe=self.recipe)
        x = layers.Dense(128, recipe=self.recipe)(embed(tokens))
        x = layers.DenseGeneral((2, 64), recipe=self.recipe)(x)
        x = layers.DenseGeneral(64, axis=(-2, -1), recipe=self.recipe)(x)
        x = layers.Dense(10, recipe=self.recipe, name="head")(x)
        return x, layers.Einsum((64, 128), "...a,ab->...b", recipe=self.recipe)(embed(tokens))


LEFT = {("DenseGeneral_1", "kernel"), ("head", "kernel"), ("Embed_0", "embedding")}


def kinds(params):
    leaves = jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda leaf: isinstance(leaf, QArray | PreparedArray)
    )
    return {
        tuple(entry.key for entry in path): type(leaf)
        for path, leaf in leaves
        if isinstance(leaf, QArray | PreparedArray)
    }


@pytest.mark.parametrize(
    "recipe", ["INT8_DYNAMIC", "INT8_ASYMMETRIC", "FP8_W8A16", "FP8_DYNAMIC", "FP8_STATIC"]
)
def test_a_model_computes_what_it_did(recipe):
    model, tokens = Model(getattr(jaxfp8, recipe)), jnp.arange(6).reshape(2, 3)
    variables = model.init(jax.random.key(0), tokens)
    prepared, changes = jaxfp8.linen.prepare(model, variables, tokens)
    found = kinds(prepared["params"])
    assert {path for path, kind in found.items() if kind is QArray} == LEFT
    left = {row.path: row.reason for row in changes.left}
    assert set(left) == {path for path, _ in LEFT} and "2 axes" in left["DenseGeneral_1"]
    assert {row.after for row in changes.changed} == {"prepared"}
    apply = compiling.jit(model.apply)
    for got, want in zip(apply(prepared, tokens), apply(variables, tokens), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


class Stack(nn.Module):
    """Layers whose parameters are stacked along an axis, and scanned."""

    axis: int

    @nn.compact
    def __call__(self, x):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return jaxfp8.linen.Dense(64, recipe=jaxfp8.INT8_DYNAMIC)(x), None

        axes, rngs = {"params": self.axis}, {"params": True}
        stacked = nn.scan(Block, variable_axes=axes, split_rngs=rngs, length=3)
        return stacked(name="blocks")(x, None)[0]


def test_stacked_layers_are_scanned():
    model, x = Stack(0), normal(2, 64)
    variables = model.init(jax.random.key(0), x)
    prepared, _ = jaxfp8.linen.prepare(model, variables, x)
    kernel = prepared["params"]["blocks"]["Dense_0"]["kernel"]
    assert isinstance(kernel, PreparedArray) and kernel.shape == (3, 64, 64)
    np.testing.assert_allclose(model.apply(prepared, x), model.apply(variables, x), rtol=1e-5)


def test_stacks_along_another_axis_are_left():
    model, x = Stack(1), normal(2, 64)
    variables = model.init(jax.random.key(0), x)
    prepared, changes = jaxfp8.linen.prepare(model, variables, x)
    assert "another axis than the first" in changes.left[0].reason
    np.testing.assert_array_equal(model.apply(prepared, x), model.apply(variables, x))


def test_reports_partitions_and_checkpoints():
    dense, x = jaxfp8.linen.Dense(64, recipe=jaxfp8.INT8_DYNAMIC), normal(2, 8)
    variables = dense.init(jax.random.key(0), x)
    prepared, _ = jaxfp8.linen.prepare(dense, variables, x)
    with pytest.warns(UserWarning, match="rounding of weights is not in this report"):
        of_plain, of_prepared = (
            jaxfp8.linen.report(dense, held, x).total.sqnr for held in (variables, prepared)
        )
    assert of_prepared == pytest.approx(of_plain, rel=1e-3)
    floats, held = jaxfp8.linen.partition(prepared["params"])
    assert floats["kernel"] is None and isinstance(held["kernel"], PreparedArray)
    assert jax.tree.structure(jaxfp8.linen.combine(floats, held)) == jax.tree.structure(
        prepared["params"]
    )
    with pytest.raises(TypeError, match="checkpoints hold weights as they were"):
        flax.serialization.to_bytes(prepared)


def test_sharded_weights_keep_their_metadata():
    dense = jaxfp8.linen.Dense(
        64, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    )
    x = normal(2, 8)
    variables = dense.init(jax.random.key(0), x)
    prepared, changes = jaxfp8.linen.prepare(dense, variables, x)
    assert kinds(prepared["params"]) == {("kernel",): QArray}
    assert "metadata of sharding" in changes.left[0].reason


def test_another_recipe_or_size_is_refused():
    dense, x = jaxfp8.linen.Dense(64, recipe=jaxfp8.INT8_DYNAMIC), normal(2, 8)
    variables, _ = jaxfp8.linen.prepare(dense, dense.init(jax.random.key(0), x), x)
    with pytest.raises(TypeError, match="FP8_W8A16 holds it as"):
        jaxfp8.linen.Dense(64, recipe=jaxfp8.FP8_W8A16).apply(variables, x)
    with pytest.raises(ValueError, match=r"has shape \(8, 64\)"):
        dense.apply(variables, normal(2, 12))


def test_preparing_twice_changes_nothing():
    dense, x = jaxfp8.linen.Dense(64, recipe=jaxfp8.INT8_DYNAMIC), normal(2, 8)
    once, _ = jaxfp8.linen.prepare(dense, dense.init(jax.random.key(0), x), x)
    again, changes = jaxfp8.linen.prepare(dense, once, x)
    assert [row.reason for row in changes.rows] == ["it is prepared already"]
    assert jax.tree.structure(again) == jax.tree.structure(once)


@pytest.mark.slow
def test_weights_beside_8_bits_lie_with_the_sum_last_on_a_gpu(monkeypatch):
    monkeypatch.setattr(_prepared, "_platform", lambda q: "gpu")
    tokens = jnp.arange(6).reshape(2, 3)
    model = Model(jaxfp8.FP8_W8A16)
    variables = model.init(jax.random.key(0), tokens)
    found = kinds(jaxfp8.linen.prepare(model, variables, tokens)[0]["params"])
    assert set(found.values()) == {QArray}
    for recipe in (jaxfp8.INT8_ASYMMETRIC, jaxfp8.FP8_DYNAMIC):
        model = Model(recipe)
        variables = model.init(jax.random.key(0), tokens)
        prepared, changes = jaxfp8.linen.prepare(model, variables, tokens)
        assert any("summed over 2 axes" in row.reason for row in changes.left)
        found = kinds(prepared["params"])
        left = LEFT - {("head", "kernel")}
        assert {path for path, kind in found.items() if kind is QArray} == left
        got, want = (compiling.jit(model.apply)(held, tokens) for held in (prepared, variables))
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * np.abs(other).max())
