"""Layers of experts in nnx and linen for tests, and the parameters that they stand for."""

import functools

import jax
import jax.numpy as jnp
import mixtures
import numpy as np
from flax import nnx

import jaxfp8
import jaxfp8.linen
import jaxfp8.nnx

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
}
NAMES = ("router", "up", "down", "shared_up", "shared_down", "shared_gate")
WIDTH, HIDDEN = 10, 6
MIXTRAL = {"num_experts": 4, "top_k": 2}
DEEPSEEK = {
    "num_experts": 8,
    "top_k": 3,
    "score": "sigmoid",
    "num_groups": 4,
    "top_groups": 2,
    "scale": 2.5,
    "shared_features": 5,
    "use_selection_bias": True,
}
# A bias of everything, a gate of the shared expert, no gate of the others.
BIASED = {
    "num_experts": 5,
    "top_k": 2,
    "renormalize": False,
    "use_bias": True,
    "shared_features": 4,
    "use_shared_gate": True,
    "activation": "gelu",
    "gated": False,
}
DELAYED = jaxfp8.DelayedScaling(amax_history_length=4)
TRAINING = {"delayed": DELAYED, "current": jaxfp8.CurrentScaling()}


def named(recipe):
    """The name of a recipe, for the ids of tests."""
    return "floats" if recipe is None else recipe.name


def arguments(settings):
    """The arguments of a layer."""
    return {**settings, "activation": ACTIVATIONS[settings.get("activation", "silu")]}


class Block(nnx.Module):
    """A model around the layer: its layers are replaced, not itself."""

    def __init__(self, settings, rngs, **more):
        self.moe = jaxfp8.nnx.MoE(WIDTH, HIDDEN, **arguments(settings), **more, rngs=rngs)

    def __call__(self, x):
        return self.moe(x)


def nnx_layer(settings, **more):
    """A model, and its parameters by name."""
    model, params = Block(settings, nnx.Rngs(0), **more), {}
    if model.moe.selection_bias is not None:
        model.moe.selection_bias[...] = drawn((settings["num_experts"],))
        params["selection_bias"] = model.moe.selection_bias[...]
    for name in NAMES:
        if (layer := getattr(model.moe, name)) is not None:
            params[name] = layer.kernel[...]
            if getattr(layer, "bias", None) is not None:
                layer.bias[...] = drawn(layer.bias.shape)
                params[f"{name}_bias"] = layer.bias[...]
    return model, params


def linen_layer(settings, **more):
    """A model, its variables, and its parameters by name."""
    model = jaxfp8.linen.MoE(HIDDEN, **arguments(settings), **more)
    variables = model.init(jax.random.key(0), jnp.ones((1, WIDTH)))
    own = {}
    for name, leaf in variables["params"].items():
        own[name] = drawn(leaf.shape) if name == "selection_bias" else dict(leaf)
        if name in NAMES and "bias" in leaf:
            own[name]["bias"] = drawn(leaf["bias"].shape)
    params = {n: leaf["kernel"] if n in NAMES else leaf for n, leaf in own.items()}
    biases = {n: leaf["bias"] for n, leaf in own.items() if n in NAMES and "bias" in leaf}
    params |= {f"{name}_bias": bias for name, bias in biases.items()}
    return model, {**variables, "params": own}, params


def drawn(shape):
    """Values of a bias."""
    return jax.random.normal(jax.random.key(9), shape) * 0.3


def tokens(count, seed=1, dtype=jnp.float32):
    """Random tokens."""
    return jax.random.normal(jax.random.key(seed), (count, WIDTH), dtype)


def plain(params, x, settings):
    """Every expert of a layer like Mixtral's on every token, in JAX."""
    scores = jax.nn.softmax(x @ params["router"])
    best, chosen = jax.lax.top_k(scores, settings["top_k"])
    best = best / best.sum(-1, keepdims=True)
    weights = jnp.einsum("tk,tke->te", best, jax.nn.one_hot(chosen, settings["num_experts"]))
    gate, up = jnp.split(jnp.einsum("td,edf->tef", x, params["up"]), 2, -1)
    return jnp.einsum("te,tef,efd->td", weights, jax.nn.silu(gate) * up, params["down"])


def near(got, want, bound):
    """Asserts that trees agree within a relative error of each leaf."""
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(mine - other) <= bound * np.linalg.norm(other)


def experts_are_in_8_bits(recipe, run, changes, params):
    """Asserts that experts like DeepSeek's are in 8 bits, near floats, and their router is not."""
    names = {row.path.rpartition("/")[2] for row in changes.changed}
    assert names == {"up", "down", "shared_up", "shared_down"}
    assert [row.reason for row in changes.left] == ["Router is a class of its own"]
    x = tokens(16)
    exact, y = mixtures.dense(params, x, DEEPSEEK), jax.jit(run)(x)
    error = np.linalg.norm(y - exact) / np.linalg.norm(exact)
    assert error < (2e-6 if recipe.activation is None else 0.06)
    assert error > 1e-3 or recipe.activation is None


def auto_mesh():
    """Four devices along an automatic axis."""
    return jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def published():
    """The tensors of a layer of experts in 8 bits, [N, K], and names for each parameter."""
    tensors, mapping = {"gate.weight": jnp.ones((2, WIDTH))}, {"moe/router/kernel": "gate.weight"}
    shapes = {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
    for number, (kind, shape) in enumerate([*shapes.items()] * 2):
        w = jax.random.normal(jax.random.key(number), shape)
        tensors[f"{number // 3}.{kind}"] = jaxfp8.quantize(w, channelwise_axes=(0,))
    mapping["moe/up/kernel"] = [[f"{i}.gate", f"{i}.up"] for i in range(2)]
    mapping["moe/down/kernel"] = [f"{i}.down" for i in range(2)]
    return tensors, mapping
