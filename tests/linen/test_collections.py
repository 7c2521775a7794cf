"""Models whose forward pass changes variables or draws numbers: caches, statistics, dropout."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
import jaxfp8.linen


class Model(nn.Module):
    kind: object = nn.Dense

    @nn.compact
    def __call__(self, x):
        x = nn.MultiHeadDotProductAttention(2, decode=True)(x)
        x = nn.BatchNorm(use_running_average=False)(x)
        x = nn.Dropout(0.5, deterministic=False)(x)
        return self.kind(64, name="dense")(x)


TOKENS = jax.random.normal(jax.random.key(0), (2, 5, 16))
ONE = TOKENS[:, :1]
RNGS = {"dropout": jax.random.key(1)}
EIGHT_BIT = Model(functools.partial(jaxfp8.linen.Dense, recipe=jaxfp8.INT8_DYNAMIC))
FLOATS = jax.jit(Model().init)({"params": jax.random.key(2), **RNGS}, TOKENS)
# What is given beside the parameters; the model makes the rest on its first call.
GIVEN = {"all": ("cache", "batch_stats"), "no cache": ("batch_stats",), "parameters": ()}

each_given = pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)


def variables(given):
    return {kind: FLOATS[kind] for kind in ("params", *given)}


def alike(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@each_given
def test_quantize_gives_back_what_it_was_given_and_weights_in_8_bits(given):
    held, _ = jaxfp8.linen.quantize(EIGHT_BIT, variables(given), ONE, rngs=RNGS)
    others = {kind: held[kind] for kind in held if kind != "params"}
    alike(others, {kind: FLOATS[kind] for kind in given})
    dense = jaxfp8.linen.Dense(64, recipe=jaxfp8.INT8_DYNAMIC)
    alone, _ = jaxfp8.linen.quantize(dense, {"params": FLOATS["params"]["dense"]}, ONE)
    alike(held["params"]["dense"], alone["params"])
    y, _ = EIGHT_BIT.apply(held, ONE, rngs=RNGS, mutable=True)
    exact, _ = Model().apply(variables(given), ONE, rngs=RNGS, mutable=True)
    assert jnp.linalg.norm(y - exact) <= 0.02 * jnp.linalg.norm(exact)


@each_given
def test_report_compares_one_call_and_changes_nothing(given):
    before = jax.tree.map(jnp.copy, variables(given))
    rule = jaxfp8.Rule(where="dense", recipe=jaxfp8.INT8_DYNAMIC)
    asked = jaxfp8.linen.report(Model(), before, ONE, recipe=rule, rngs=RNGS)
    found = jaxfp8.linen.report(EIGHT_BIT, before, ONE, rngs=RNGS)
    assert [row.path for row in (*asked.rows, *found.rows)] == ["dense", "dense"]
    assert asked.total.sqnr == pytest.approx(found.total.sqnr) and asked.total.sqnr > 30
    alike(before, variables(given))


@each_given
def test_prepare_leaves_everything_but_weights(given):
    held, _ = jaxfp8.linen.quantize(EIGHT_BIT, variables(given), ONE, rngs=RNGS)
    prepared, _ = jaxfp8.linen.prepare(EIGHT_BIT, held, ONE, rngs=RNGS)
    assert isinstance(prepared["params"]["dense"]["kernel"], jaxfp8.PreparedArray)
    alike({**prepared, "params": 0}, {**held, "params": 0})


@pytest.mark.parametrize("call", [jaxfp8.linen.quantize, jaxfp8.linen.report])
def test_collections_that_may_change_can_be_named_as_for_apply(call):
    call(EIGHT_BIT, FLOATS, ONE, rngs=RNGS, mutable=["cache", "batch_stats"])
