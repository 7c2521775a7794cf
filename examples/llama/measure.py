"""Tokens per second and bytes of servers, which take turns."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from llama.serve import Server, pad, room, usual_chunk


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """What was measured of a server.

    Attributes:
      nbytes, cache: bytes of the parameters, and of keys and values.
      prefill, decode: tokens per second, of all texts together.
    """

    nbytes: int
    cache: int
    prefill: float
    decode: float


def measure(
    servers: Mapping[str, Server], prompts: Sequence[Sequence[int]], number: int, repeat: int
) -> dict[str, Speed]:
    """Medians of `repeat` turns by name, without compilation."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
    for turn in range(repeat + 1):
        for name, server in servers.items():
            times = _once(server, prompts, number)
            if turn:
                taken[name].append(times)
    ids, lengths = pad(prompts)
    tokens = int(lengths.sum())
    speeds = {}
    for name, server in servers.items():
        prefill, decode = (statistics.median(part) for part in zip(*taken[name], strict=True))
        cache = jax.eval_shape(lambda server=server: server.empty(len(prompts), room(ids, number)))
        speeds[name] = Speed(
            nbytes=server.nbytes,
            cache=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)),
            prefill=tokens / prefill,
            decode=number * len(prompts) / decode,
        )
    return speeds


def _once(server: Server, prompts: Sequence[Sequence[int]], number: int) -> tuple[float, float]:
    """Seconds of prefill, and of `number` steps of decode."""
    ids, lengths = pad(prompts)
    cache: Any = server.empty(len(prompts), room(ids, number))
    jax.block_until_ready(cache)
    start = time.perf_counter()
    logits, cache = jax.block_until_ready(server.prefill(server.params, ids, lengths, cache))
    middle = time.perf_counter()
    token, key = jnp.argmax(logits, -1).astype(jnp.int32), jax.random.key(0)
    position = lengths
    chunk = usual_chunk()
    for made in range(0, number, chunk):
        _, token, position, cache = server.decode_chunk(
            server.params, token, position, cache, key, number=min(chunk, number - made)
        )
    jax.block_until_ready(token)
    return middle - start, time.perf_counter() - middle


def table(speeds: Mapping[str, Speed]) -> str:
    """What was measured, a line for each server."""
    lines = [f"{'':12} {'weights MiB':>12} {'cache MiB':>10} {'prefill/s':>10} {'decode/s':>9}"]
    for name, speed in speeds.items():
        lines.append(
            f"{name:12} {speed.nbytes / 2**20:12.2f} {speed.cache / 2**20:10.2f} "
            f"{speed.prefill:10.0f} {speed.decode:9.1f}"
        )
    return "\n".join(lines)
