"""Serving: the trained model with 8-bit weights and a cache, against its float forms."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfp8
import jaxfp8.linen
from gpt import text
from gpt.model import GPT, Config

FLOATS = {"f32": jnp.float32, "bf16": jnp.bfloat16}
RECIPES = {
    recipe.name: recipe for recipe in (jaxfp8.FP8_W8A16, jaxfp8.FP8_DYNAMIC, jaxfp8.INT8_DYNAMIC)
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """A form of the model.

    Attributes:
      name: "f32", "bf16" or the name of a recipe.
      config: its sizes and layers.
      params: its parameters.
    """

    name: str
    config: Config
    params: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters, scales included."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))

    def logits(self, tokens: jax.Array) -> jax.Array:
        """Logits after every token of texts, int [B, T]; float32 [B, T, 256]."""
        return GPT(self.config).apply({"params": self.params}, tokens)  # type: ignore[return-value]


def server(name: str, params: Any, config: Config = Config()) -> Server:  # noqa: B008 - frozen
    """The model in floats or in 8 bits, from its float32 parameters.

    The table of tokens, which gives the logits too, stays wide, as is usual: what is rounded there
    goes straight into the choice of the next byte.
    """
    config = dataclasses.replace(config, remat=False)
    if name in FLOATS:
        dtype = FLOATS[name]
        dense: Any = functools.partial(nn.Dense, dtype=dtype, param_dtype=dtype)
    else:
        dtype = jnp.bfloat16
        dense = functools.partial(jaxfp8.linen.Dense, dtype=dtype, recipe=RECIPES[name])
    embed = functools.partial(nn.Embed, dtype=dtype, param_dtype=dtype)
    config = dataclasses.replace(config, dense=dense, embed=embed, dtype=dtype)
    if name in RECIPES:
        tokens = jnp.zeros((1, config.length), jnp.int32)
        held, _ = jaxfp8.linen.quantize(GPT(config), {"params": params}, tokens)
        params = held["params"]
    # Biases, norms and places in the dtype of the computation; 8-bit weights as they are.
    cast = jax.tree.map(
        lambda x: x if _is_qarray(x) else x.astype(dtype), params, is_leaf=_is_qarray
    )
    return Server(name=name, config=config, params=cast)


def _is_qarray(leaf: Any) -> bool:
    return isinstance(leaf, jaxfp8.QArray)


def generator(server: Server, number: int) -> Callable[[Any, jax.Array], jax.Array]:
    """A compiled function from parameters and a prompt [B, T] to `number` more tokens, greedily."""
    model = GPT(server.config, decode=True)

    @jax.jit
    def generate(params: Any, prompt: jax.Array) -> jax.Array:
        logits, state = model.apply({"params": params}, prompt, mutable=["cache"])

        def step(carry: Any, place: jax.Array) -> tuple[Any, jax.Array]:
            token, cache = carry
            variables = {"params": params, "cache": cache}
            logits, state = model.apply(variables, token[:, None], place, mutable=["cache"])
            following = jnp.argmax(logits[:, -1], -1).astype(jnp.int32)
            return (following, state["cache"]), token

        first = jnp.argmax(logits[:, -1], -1).astype(jnp.int32)
        places = prompt.shape[1] + jnp.arange(number)
        _, tokens = jax.lax.scan(step, (first, state["cache"]), places)
        return tokens.T

    return generate


def tokens_per_second(
    servers: Sequence[Server], prompt: jax.Array, number: int, repeat: int
) -> dict[str, float]:
    """By name, the median of `repeat` runs; the servers take turns."""
    runs = [(s, generator(s, number)) for s in servers]
    taken: dict[str, list[float]] = {s.name: [] for s in servers}
    for s, generate in runs:
        jax.block_until_ready(generate(s.params, prompt))
    for _ in range(repeat):
        for s, generate in runs:
            start = time.perf_counter()
            jax.block_until_ready(generate(s.params, prompt))
            taken[s.name].append(time.perf_counter() - start)
    made = number * prompt.shape[0]
    return {name: made / statistics.median(times) for name, times in taken.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quality:
    """How well a server predicts text that was not trained on.

    Attributes:
      perplexity: exp of the mean negative log-likelihood of the next byte.
      agreement: share of places where it names the same next byte as the first server.
    """

    perplexity: float
    agreement: float


def quality(servers: Sequence[Server], batches: int) -> dict[str, Quality]:
    """By name; the first server is the one to agree with."""
    _, validation = text.load()
    length = servers[0].config.length
    windows = [text.batch(validation, 16, length, seed=i) for i in range(batches)]
    predicted = {s.name: [_predict(s, tokens) for tokens in windows] for s in servers}
    best = [following for _, following in predicted[servers[0].name]]
    return {
        name: Quality(
            perplexity=float(np.exp(np.mean([loss for loss, _ in rows]))),
            agreement=float(np.mean([a == b for (_, a), b in zip(rows, best, strict=True)])),
        )
        for name, rows in predicted.items()
    }


@functools.partial(jax.jit, static_argnums=0)
def _apply(model: GPT, params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits: Any = model.apply({"params": params}, tokens[:, :-1])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    return loss, jnp.argmax(logits, -1)


def _predict(server: Server, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean loss, and the likeliest next byte at every place."""
    return jax.device_get(_apply(GPT(server.config), server.params, jnp.asarray(tokens)))
