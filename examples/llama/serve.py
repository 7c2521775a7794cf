"""Serving: prefill and decode, compiled, from one set of bytes.

Inputs of the 8-bit layers are in floats at decode (W8A16), where reading the weights takes the
time, and in 8 bits at prefill (W8A8), where multiplying does.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxfp8
import jaxfp8.nnx
from llama import cache as caches
from llama.config import Config
from llama.model import Decoder
from llama.sampling import Sampling, sample

# Lengths that prefill is compiled for are multiples of this.
STEP = 64
# Tokens of each text that one program makes on a GPU; the host reads them together.
CHUNK = 8


def w8a8(held: jaxfp8.Recipe) -> jaxfp8.Recipe:
    """A recipe with the weights of another, and inputs quantized as they come."""
    weight = held.weight
    if weight is None:
        return held
    if jnp.dtype(weight.dtype).name in ("int8", "uint8"):
        return dataclasses.replace(held, name="W8A8", activation=jaxfp8.INT8_DYNAMIC.activation)
    blocks = isinstance(weight.granularity, tuple)
    like = jaxfp8.FP8_BLOCK if blocks else jaxfp8.FP8_DYNAMIC
    return dataclasses.replace(held, name="W8A8", activation=like.activation)


def w8a16(held: jaxfp8.Recipe) -> jaxfp8.Recipe:
    """A recipe with the weights of another, and inputs in floats."""
    return dataclasses.replace(held, name="W8A16", activation=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """A decoder, ready to generate.

    Attributes:
      config: its sizes.
      params: its arrays, once for both programs.
      prefill: from `params`, ids [B, S], lengths [B] and empty caches to logits and caches.
      decode: from `params`, token [B], position [B], caches and a key to the next token, its
        position and caches; with `logits=True` logits, too. Position and caches are
        donated: results take their place, so a CUDA graph of the step need not be updated.
      decode_chunk: the same `number` times in one program: tokens [number, B] in front of the
        results of the last time.
      empty: caches for a number of texts of a length.
      how: the choice of tokens.
      looked_up: bytes of parameters of which a step reads single rows: of the table of tokens, if
        it is not the head.
    """

    config: Config
    params: Any
    prefill: Callable[..., Any]
    decode: Callable[..., Any]
    decode_chunk: Callable[..., Any]
    empty: Callable[[int, int], Any]
    how: Sampling
    looked_up: int

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters, scales included."""
        return nbytes(self.params)


def nbytes(params: Any) -> int:
    """Bytes of the arrays of a tree, each array once."""
    return sum({id(leaf): leaf.nbytes for leaf in jax.tree.leaves(params)}.values())


def server(
    model: Decoder,
    *,
    cache: str = "fp8",
    prefill_in_8_bits: bool = True,
    how: Sampling | None = None,
) -> Server:
    """A server of a model in nnx.

    Args:
      model: loaded.
      cache: how keys and values are kept: "fp8", "bf16" or "f32".
      prefill_in_8_bits: whether prefill multiplies 8 bits by 8 bits.
      how: the choice of tokens; greedy by default.
    """
    config = model.config

    def program(recipe: Callable[[jaxfp8.Recipe], jaxfp8.Recipe]) -> Any:
        for _, layer in nnx.iter_modules(model):
            if isinstance(layer, jaxfp8.nnx.EightBitLayer):
                # A row of each text alone meets the head, at prefill too.
                own = w8a16 if isinstance(layer, jaxfp8.nnx.Embed) else recipe
                layer.recipe = own(layer.recipe)
        graph, state = nnx.split(model)
        # A plain list of arrays: a call takes long to find hundreds of them in a state of nnx.
        leaves, tree = jax.tree.flatten(state)

        def run(params: Any, *args: Any, span: int) -> Any:
            return nnx.merge(graph, jax.tree.unflatten(tree, params))(*args, span=span)

        return run, leaves

    prefill, params = program(w8a8 if prefill_in_8_bits else w8a16)
    decode, _ = program(w8a16)
    programs = prefill, decode
    table = nnx.state(model.model.embed_tokens)
    looked_up = 0 if config.tied else nbytes(table)
    return compiled(
        config, params, *programs, cache, how or Sampling(), stacked=False, looked_up=looked_up
    )


def compiled(
    config: Config,
    params: Any,
    prefill: Callable[..., Any],
    decode: Callable[..., Any],
    cache: str,
    how: Sampling,
    *,
    stacked: bool,
    looked_up: int,
) -> Server:
    """A server of two functions like `Decoder.__call__`, whose first argument are parameters.

    `jaxfp8.rewrite` makes the products of attention read the codes of an FP8 cache.
    """

    @functools.partial(jax.jit, donate_argnums=3)
    def first(params: Any, ids: jax.Array, lengths: jax.Array, cache: Any) -> Any:
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        run = jaxfp8.rewrite(functools.partial(prefill, span=ids.shape[1]))
        return run(params, ids, positions, cache, lengths - 1)

    def step(params: Any, key: Any, token: jax.Array, position: jax.Array, cache: Any) -> Any:
        span = jax.tree.leaves(cache)[0].shape[-2]
        run = jaxfp8.rewrite(functools.partial(decode, span=span))
        last = jnp.zeros_like(position)
        scores, cache = run(params, token[:, None], position[:, None], cache, last)
        token = sample(how, scores, jax.random.fold_in(key, position[0]))
        return token, position + 1, cache, scores

    @functools.partial(jax.jit, donate_argnums=(2, 3), static_argnames="logits")
    def following(
        params: Any, token: Any, position: Any, cache: Any, key: Any, logits: bool = False
    ) -> Any:
        return step(params, key, token, position, cache)[: 4 if logits else 3]

    @functools.partial(jax.jit, donate_argnums=(2, 3), static_argnames="number")
    def chunk(params: Any, token: Any, position: Any, cache: Any, key: Any, number: int) -> Any:
        def turn(carry: Any, _: None) -> Any:
            token, position, cache, _ = step(params, key, *carry)
            return (token, position, cache), token

        carry, tokens = jax.lax.scan(turn, (token, position, cache), length=number)
        return tokens, *carry

    def empty(batch: int, length: int) -> Any:
        if stacked:
            return caches.empty(config, batch, length, cache, config.layers)
        return [caches.empty(config, batch, length, cache) for _ in range(config.layers)]

    return Server(
        config=config,
        params=params,
        prefill=first,
        decode=following,
        decode_chunk=chunk,
        empty=empty,
        how=how,
        looked_up=looked_up,
    )


def usual_chunk() -> int:
    """How many tokens one program makes.

    On a CPU a loop gains nothing: a step takes far longer than its call, and XLA widens the tables
    of bfloat16 in front of each loop.
    """
    return CHUNK if jax.default_backend() == "gpu" else 1


def pad(prompts: Sequence[Sequence[int]]) -> tuple[jax.Array, jax.Array]:
    """Prompts as ids [B, S], padded on the right, and their lengths [B]."""
    if not prompts or not all(prompts):
        raise ValueError("a prompt has no tokens; each needs one at least")
    longest = -(-max(map(len, prompts)) // STEP) * STEP
    ids = np.zeros((len(prompts), longest), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return jnp.asarray(ids), jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)


def generate(
    server: Server,
    prompts: Sequence[Sequence[int]],
    number: int,
    *,
    seed: int = 0,
    chunk: int | None = None,
) -> Iterator[np.ndarray]:
    """At most `number` more tokens of each prompt, int32 [B] at a time.

    A text that has ended goes on with its last token. Prompts may have different lengths: each
    text has positions of its own, and what was padding is overwritten. Tokens come in chunks.
    When all texts have ended, the rest of a chunk is dropped.

    Args:
      server: the decoder.
      prompts: token ids.
      number: of tokens to make.
      seed: of the choice.
      chunk: tokens of each text that one program makes; None for `usual_chunk()`.

    Raises:
      ValueError: a prompt is empty or holds an id that is no token, or `number` or `chunk` is not
        positive.
    """
    chunk = usual_chunk() if chunk is None else chunk
    _check(server.config.vocabulary, prompts, number)
    if chunk < 1:
        raise ValueError(f"a program is to make {chunk} tokens; give a chunk of 1 or more")
    ended, last = np.zeros(len(prompts), bool), None
    made = _made(server, prompts, number, jax.random.key(seed), chunk)
    for now in itertools.islice(made, number):
        last = now if last is None else np.where(ended, last, now)
        yield last
        ended |= np.isin(last, server.config.end)
        if ended.all():
            return


def _made(
    server: Server, prompts: Sequence[Sequence[int]], number: int, key: jax.Array, chunk: int
) -> Iterator[np.ndarray]:
    """At least `number` tokens of each prompt, [B] at a time."""
    ids, lengths = pad(prompts)
    chunk = min(chunk, max(number - 1, 1))
    cache = server.empty(len(prompts), room(ids, number))
    logits, cache = server.prefill(server.params, ids, lengths, cache)
    token, position = sample(server.how, logits, key), lengths
    tokens = token[None]
    for _ in range(0, number - 1, chunk):
        earlier = tokens  # the next chunk is under way before these are read
        tokens, token, position, cache = server.decode_chunk(
            server.params, token, position, cache, key, number=chunk
        )
        yield from np.asarray(earlier)
    yield from np.asarray(tokens)


def _check(vocabulary: int, prompts: Sequence[Sequence[int]], number: int) -> None:
    if number < 1:
        raise ValueError(f"{number} tokens are to be made; ask for 1 or more")
    for place, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {place} is empty; give it one token at least")
        wrong = [token for token in prompt if not 0 <= token < vocabulary]
        if wrong:
            raise ValueError(
                f"prompt {place}: {wrong[0]} is no token; ids are 0 to {vocabulary - 1} in this "
                "vocabulary"
            )


def room(ids: jax.Array, number: int) -> int:
    """Slots of a cache for padded prompts and a number of tokens, as programs are compiled for."""
    return -(-(int(ids.shape[1]) + number) // STEP) * STEP
