"""What selects nothing is told, with the names that are there, in every place that selects."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxfp8
import jaxfp8.linen
import jaxfp8.nnx
from jaxfp8._recipes.selection import Selection

X = jnp.ones((2, 32))
W = jaxfp8.quantize(jnp.ones((32, 32)), channelwise_axes=(0,))
NAMED = {"layers.0.weight": W, "layers.0.bias": jnp.zeros(32)}
TYPO = r"layrs/\d"
RULES = [jaxfp8.Rule(where="layres/0", recipe=None), jaxfp8.INT8_DYNAMIC]


def model():
    return nnx.Sequential(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), nnx.relu)


def held():
    made = model()
    jaxfp8.nnx.quantize(made, jaxfp8.INT8_DYNAMIC)
    return made


def training():
    made = model()
    jaxfp8.nnx.fp8_training(made)
    return made


def linen():
    made = nn.Sequential([nn.Dense(8)])
    return made, made.init(jax.random.key(0), X)


def saved(tmp_path):
    jaxfp8.checkpoint.save(tmp_path / "float", {"layers.0.weight": jnp.ones((32, 32))})
    return tmp_path / "float"


def by_scope(w, x):
    with jax.named_scope("layers/0"):
        return x @ w


def loaded(**arguments):
    jaxfp8.nnx.load(model(), NAMED, **arguments)


CASES = {
    "nnx.quantize where": lambda p: jaxfp8.nnx.quantize(model(), jaxfp8.INT8_DYNAMIC, where=TYPO),
    "nnx.quantize function": lambda p: jaxfp8.nnx.quantize(
        model(), jaxfp8.INT8_DYNAMIC, where=lambda path, layer: path == "layer/0"
    ),
    "nnx.quantize rule": lambda p: jaxfp8.nnx.quantize(model(), RULES),
    "nnx.quantize scales": lambda p: jaxfp8.nnx.quantize(
        model(), jaxfp8.INT8_DYNAMIC, scales={"layrs/0": jnp.ones(())}
    ),
    "nnx.dequantize of training": lambda p: jaxfp8.nnx.dequantize(training(), where=TYPO),
    "nnx.dequantize where": lambda p: jaxfp8.nnx.dequantize(held(), where=TYPO),
    "nnx.report where": lambda p: jaxfp8.nnx.report(
        model(), X, recipe=jaxfp8.INT8_DYNAMIC, where=TYPO
    ),
    "nnx.report rule": lambda p: jaxfp8.nnx.report(model(), X, recipe=RULES),
    "nnx.report reference": lambda p: jaxfp8.nnx.report(held(), X, reference=model(), where=TYPO),
    "nnx.load rule": lambda p: loaded(recipe=RULES),
    "nnx.load keep": lambda p: loaded(keep=TYPO),
    "nnx.load mapping": lambda p: loaded(mapping={"layrs/0/kernel": "x"}),
    "linen.report where": lambda p: jaxfp8.linen.report(
        *linen(), X, recipe=jaxfp8.INT8_DYNAMIC, where=TYPO
    ),
    "linen.report rule": lambda p: jaxfp8.linen.report(*linen(), X, recipe=RULES),
    "quantize_dots rule": lambda p: jaxfp8.quantize_dots(by_scope, RULES)(X.T, X),
    "checkpoint.quantize where": lambda p: jaxfp8.checkpoint.quantize(
        saved(p), p / "new", jaxfp8.INT8_DYNAMIC, where=TYPO
    ),
    "checkpoint.load where": lambda p: jaxfp8.checkpoint.load(saved(p), where=TYPO),
    "checkpoint.load sharding": lambda p: jaxfp8.checkpoint.load(
        saved(p), sharding={"layrs.0": jax.sharding.SingleDeviceSharding(jax.devices()[0])}
    ),
}


@pytest.mark.parametrize("call", CASES.values(), ids=CASES)
def test_what_selects_nothing_is_told_with_the_names_that_are_there(call, tmp_path):
    says = r"none of [12] .* such as `.*layers[./_]0"
    with pytest.warns(jaxfp8.FallbackWarning, match=says) as told:
        call(tmp_path)
    assert len(told) == 1 and told[0].filename == __file__


def test_where_an_empty_choice_is_an_error_it_says_the_same():
    with pytest.raises(ValueError, match=r"matches none of 1 layers.* such as `layers/0`"):
        jaxfp8.nnx.fp8_training(model(), where=TYPO)


def test_a_rule_behind_one_that_takes_its_layers_is_told():
    rules = [jaxfp8.INT8_DYNAMIC, jaxfp8.Rule(where="layers/0", recipe=None)]
    with pytest.warns(jaxfp8.FallbackWarning, match="'layers/0' matches only layers of earlier"):
        jaxfp8.nnx.quantize(model(), rules)


def test_what_selects_something_is_not_told():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jaxfp8.nnx.quantize(
            model(), [jaxfp8.Rule(where="layers/0", recipe=None), jaxfp8.INT8_DYNAMIC]
        )
        jaxfp8.nnx.quantize(model(), jaxfp8.INT8_DYNAMIC, where=r"layers/\d")


def test_a_collection_holds_whole_paths():
    selects = Selection("f", "where", ["layers/1", "head"])
    assert [selects(path, None) for path in ("layers/1", "layers/10", "head")] == [
        True,
        False,
        True,
    ]
    assert not selects.unmatched()


def test_an_unknown_path_of_a_collection_is_told():
    selects = Selection("f", "where", ["layers/1", "layers/2"])
    assert selects("layers/1", None)
    assert "names 'layers/2', but it is none of 1 layers" in selects.unmatched()


def test_the_names_that_are_most_like_the_pattern_come_first_and_numbered_ones_once():
    selects = Selection("f", "where", r".*/attention/qury")
    for number in range(9):
        for name in ("mlp/up", "attn/query", "attn/key"):
            assert not selects(f"layers/{number}/{name}", None)
    assert "matches none of 27 layers" in selects.unmatched()
    assert (
        "such as `layers/0/attn/query`, `layers/0/attn/key`, `layers/0/mlp" in selects.unmatched()
    )
