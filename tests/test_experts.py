"""Experts without a layer around them: routing, sorted rows, weighted sums, bad arguments."""

import functools

import jax
import mixtures
import numpy as np
import pytest
from expert_layers import ACTIVATIONS, DEEPSEEK, HIDDEN, MIXTRAL, WIDTH, auto_mesh, tokens
from jax.sharding import PartitionSpec as P

from jaxfp8._recipes import experts

SETTINGS = {
    "mixtral": MIXTRAL,
    "qwen": {"num_experts": 7, "top_k": 3, "renormalize": False},
    "deepseek 3": {**DEEPSEEK, "shared_features": 0},
    "deepseek 2": {"num_experts": 6, "top_k": 2, "num_groups": 3, "top_groups": 1, "scale": 16.0},
    "gelu": {"num_experts": 16, "top_k": 1, "activation": "gelu", "gated": False},
    "relu": {"num_experts": 3, "top_k": 3, "activation": "relu"},
    "one": {"num_experts": 1, "top_k": 1},
}


def layer(settings, axis_name=None):
    """Parameters, and a function of them and of tokens."""
    spread = experts.Spread(operation="layer", axis_name=axis_name)
    count, gated = settings["num_experts"], settings.get("gated", True)
    keys = jax.random.split(jax.random.key(count), 4)
    params = {
        "router": jax.random.normal(keys[0], (WIDTH, count)),
        "up": jax.random.normal(keys[1], (count, WIDTH, (1 + gated) * HIDDEN)) / 3,
        "down": jax.random.normal(keys[2], (count, HIDDEN, WIDTH)) / 3,
    }
    if settings.get("use_selection_bias"):
        params["selection_bias"] = 0.3 * jax.random.normal(keys[3], (count,))
    own = {name: value for name, value in settings.items() if name in experts.SETTINGS}
    routing = experts.Routing(operation="layer", **own)
    activation = ACTIVATIONS[settings.get("activation", "silu")]
    hidden = experts.Hidden(activation=activation, gated=gated)

    def run(params, x):
        def network(rows, sizes):
            h = hidden(jax.lax.ragged_dot(rows, params["up"], sizes))
            return jax.lax.ragged_dot(h, params["down"], sizes)

        routed = routing(x @ params["router"], params.get("selection_bias"))
        return experts.mixture(x, routed, count, network, spread)

    return params, run


@pytest.mark.parametrize("name", SETTINGS)
def test_values_are_those_of_all_experts_weighted(name):
    params, run = layer(SETTINGS[name])
    for count in (1, 19):  # one token leaves most experts empty
        x = tokens(count, seed=count)
        exact = mixtures.dense(params, x, SETTINGS[name])
        np.testing.assert_allclose(jax.jit(run)(params, x), exact, rtol=2e-5, atol=2e-5)


def test_leading_axes_and_no_tokens():
    params, run = layer(MIXTRAL)
    run, x = functools.partial(run, params), tokens(12)
    np.testing.assert_allclose(run(x.reshape(3, 4, WIDTH)), run(x).reshape(3, 4, WIDTH), 1e-5, 1e-6)
    assert jax.eval_shape(run, x[:0]).shape == (0, WIDTH)


def test_experts_and_tokens_are_split_over_devices_with_their_gradients():
    params, run = layer(MIXTRAL)
    split = jax.shard_map(
        layer(MIXTRAL, "x")[1],
        mesh=auto_mesh(),
        in_specs=({"router": P(), "up": P("x"), "down": P("x")}, P("x")),
        out_specs=P("x"),
    )
    got, want = (
        jax.jit(jax.value_and_grad(lambda p, x, f=f: (f(p, x) ** 2).sum(), (0, 1)))(
            params, tokens(8)
        )
        for f in (split, run)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)


@pytest.mark.parametrize("count", [2, 6])
def test_devices_that_do_not_divide_the_experts_are_an_error(count):
    _, run = layer({"num_experts": count, "top_k": 1}, "x")
    params = layer({"num_experts": count, "top_k": 1})[0]
    split = jax.shard_map(
        functools.partial(run, params), mesh=auto_mesh(), in_specs=P("x"), out_specs=P("x")
    )
    with pytest.raises(ValueError, match=f"is {count}, but a multiple of the 4 devices"):
        split(tokens(8))
