"""Handwritten digits learnt in bfloat16 and in FP8; `python examples/digits.py --help` for more."""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jaxfp8
import jaxfp8.linen

DESCRIPTION = """\
Trains a perceptron and a small convolutional net on scikit-learn's handwritten digits, in linen
and in nnx, in bfloat16 and in FP8 with delayed and with current scaling, each from the same seeds.
Prints the accuracy on a fifth of the digits that was not trained on, as the mean over the seeds.
"""
RECIPES: dict[str, Any] = {
    "bf16": None,
    "delayed": jaxfp8.DelayedScaling(),
    "current": jaxfp8.CurrentScaling(),
}
Data = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def load() -> Data:
    """Images [N, 8, 8, 1] and labels for training, and the same for the test."""
    digits = load_digits()
    images = digits.images[..., None].astype(np.float32) / 16
    parts = train_test_split(
        images, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )
    training, test, labels, test_labels = map(jnp.asarray, parts)
    return training, labels, test, test_labels


# The same two nets in linen and in nnx


class LinenNet(nn.Module):
    """64 - 256 - 256 - 10, or two convolutions before the dense layers."""

    kind: str
    product: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = functools.partial(nn.Dense, dtype=jnp.bfloat16, dot_general_cls=self.product)
        if self.kind == "conv":
            x = x.astype(jnp.float32)  # XLA's convolutions in bfloat16 are slow on the CPU
            x = nn.max_pool(nn.relu(nn.Conv(16, (3, 3))(x)), (2, 2), (2, 2))
            x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = x.reshape(len(x), -1)
        x = nn.relu(dense(256)(x))
        x = nn.relu(dense(256)(x)) if self.kind == "mlp" else x
        return dense(10)(x).astype(jnp.float32)


class NnxNet(nnx.Module):
    """64 - 256 - 256 - 10, or two convolutions before the dense layers."""

    def __init__(self, kind: str, rngs: nnx.Rngs) -> None:
        conv = functools.partial(nnx.Conv, kernel_size=(3, 3), rngs=rngs)
        dense = functools.partial(nnx.Linear, dtype=jnp.bfloat16, rngs=rngs)
        convolutions = [conv(1, 16), conv(16, 32)] if kind == "conv" else []
        sizes = [512, 256, 10] if kind == "conv" else [64, 256, 256, 10]
        self.convolutions = nnx.List(convolutions)
        self.layers = nnx.List([dense(a, b) for a, b in itertools.pairwise(sizes)])

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.convolutions:
            x = nnx.max_pool(nnx.relu(self.convolutions[0](x)), (2, 2), (2, 2))
            x = nnx.relu(self.convolutions[1](x))
        x = x.reshape(len(x), -1)
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x).astype(jnp.float32)


# Training


def loss_of(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def batches(seed: int, steps: int, count: int, size: int = 64) -> jax.Array:
    """Indices of the images of each step, int32 [steps, size], in shuffled rounds."""
    rounds = -(-steps * size // count)
    shuffled = [np.random.default_rng((seed, i)).permutation(count) for i in range(rounds)]
    return jnp.asarray(np.concatenate(shuffled)[: steps * size].reshape(steps, size), jnp.int32)


def optimiser(steps: int) -> optax.GradientTransformation:
    """AdamW on a cosine."""
    return optax.adamw(optax.cosine_decay_schedule(2e-3, steps), weight_decay=1e-2)


def train_linen(kind: str, recipe: Any, seed: int, steps: int, data: Data) -> float:
    """Accuracy on the test images."""
    product = recipe and functools.partial(jaxfp8.linen.Fp8DirectDotGeneralOp, recipe=recipe)
    apply, params = _linen_start(kind, product, seed, data[0][:1])
    state = TrainState.create(apply_fn=apply, params=params, tx=optimiser(steps))
    images, labels, test, test_labels = data

    def step(state: TrainState, chosen: jax.Array) -> tuple[TrainState, None]:
        def loss(params: Any) -> jax.Array:
            return loss_of(apply(params, images[chosen]), labels[chosen])

        return state.apply_gradients(grads=jax.grad(loss)(state.params)), None

    @jax.jit
    def run(state: TrainState, order: jax.Array) -> jax.Array:
        state, _ = jax.lax.scan(step, state, order)
        return jnp.mean(jnp.argmax(apply(state.params, test), -1) == test_labels)

    state = state.replace(step=jnp.zeros((), jnp.int32))
    return float(run(state, batches(seed, steps, len(images))))


def _linen_start(kind: str, product: Any, seed: int, x: jax.Array) -> tuple[Callable, Any]:
    """The net as a function of what TrainState keeps: parameters, or all variables with a state."""
    net = LinenNet(kind, product)
    variables = jax.jit(net.init)(jax.random.key(seed), x)
    if "_overwrite_with_gradient" in variables:
        return net.apply, variables
    return lambda params, x: net.apply({"params": params}, x), variables["params"]


def train_nnx(kind: str, recipe: Any, seed: int, steps: int, data: Data) -> float:
    """Accuracy on the test images."""
    import jaxfp8.nnx

    images, labels, test, test_labels = data
    net = NnxNet(kind, nnx.Rngs(seed))
    if recipe is not None:
        jaxfp8.nnx.fp8_training(net, recipe)
    optimizer = nnx.Optimizer(net, optimiser(steps), wrt=nnx.Param)

    @nnx.jit
    def step(net: NnxNet, optimizer: nnx.Optimizer, chosen: jax.Array) -> None:
        gradients = nnx.grad(lambda net: loss_of(net(images[chosen]), labels[chosen]))(net)
        optimizer.update(net, gradients)

    for chosen in batches(seed, steps, len(images)):
        step(net, optimizer, chosen)
    net.eval()
    return float(jnp.mean(jnp.argmax(net(test), -1) == test_labels))


TRAINERS = {"linen": train_linen, "nnx": train_nnx}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table; the exit code says whether FP8 was as good as bfloat16."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--api", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--net", nargs="+", choices=["mlp", "conv"], default=["mlp", "conv"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args(arguments)
    data, good = load(), True
    for api in options.api:
        for net in options.net:
            means = {}
            for name, recipe in RECIPES.items():
                seeds = range(options.seeds)
                scores = [TRAINERS[api](net, recipe, s, options.steps, data) for s in seeds]
                means[name] = 100 * float(np.mean(scores))
                print(f"{api:5} {net:4} {name:7} {means[name]:6.2f} %", flush=True)
            good &= all(m >= 97 and m >= means["bf16"] - 0.5 for m in means.values())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
