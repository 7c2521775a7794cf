"""Layers and arrays of the tests of 8-bit layers."""

import flax.linen as nn
import jax
import numpy as np

import jaxfp8
import jaxfp8.linen

# Relative error of a layer's output, by recipe.
BOUND = {
    "FP8_W8A16": 0.04,
    "INT8_W8A16": 0.015,
    "FP8_DYNAMIC": 0.05,
    "FP8_STATIC": 0.06,
    "FP8_BLOCK": 0.05,
}
BOUND |= {"INT8_DYNAMIC": 0.02, "INT8_ASYMMETRIC": 0.02}
RECIPES = [getattr(jaxfp8, name) for name in BOUND]


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def off(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def both(theirs, ours, x, *args):
    """Outputs of Flax's layer and of ours with the same variables, and the variables of ours."""
    variables = jax.jit(theirs.init)(jax.random.key(0), x, *args)
    bias = lambda p: jax.tree.map(lambda b: b + normal(*b.shape, seed=3) if b.ndim else b, p)  # noqa: E731
    variables = {"params": bias(variables["params"])}
    narrow, _ = jaxfp8.linen.quantize(ours, variables, x, *args)
    return jax.jit(theirs.apply)(variables, x, *args), jax.jit(ours.apply)(narrow, x, *args), narrow


class Net(nn.Module):
    """Layers under a scan, named as Flax names them, from one module or the other."""

    dense: object
    embed: object

    @nn.compact
    def __call__(self, tokens):
        x = self.embed(50, 32, name="tokens")(tokens)

        class Body(nn.Module):
            dense: object

            @nn.compact
            def __call__(self, x, _):
                return x + nn.tanh(self.dense(32)(x)), None

        scan = nn.scan(Body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return scan(self.dense, name="layers")(x, None)[0]


class Classifier(nn.Module):
    """8-bit layers of every kind, some in a scan and rematerialised."""

    recipe: jaxfp8.Recipe

    @nn.compact
    def __call__(self, tokens):
        x = jaxfp8.linen.Embed(16, 32, recipe=self.recipe)(tokens)

        class Body(nn.Module):
            recipe: jaxfp8.Recipe

            @nn.compact
            def __call__(self, x, _):
                x = nn.LayerNorm()(x)
                return x + jaxfp8.linen.Dense(32, recipe=self.recipe)(x), None

        body = nn.remat(Body)
        scan = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return jaxfp8.linen.DenseGeneral(8, recipe=self.recipe)(scan(self.recipe)(x, None)[0])
