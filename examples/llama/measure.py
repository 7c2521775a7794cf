"""Tokens per second and bytes of servers, which take turns; `--help` for more."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

if not __package__:  # run as a script: the folder above has the package
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import jax
import jax.numpy as jnp

from llama import functional, invent, load
from llama import options as shared
from llama.config import parse
from llama.sampling import Sampling
from llama.serve import Server, pad, room, server, usual_chunk

DESCRIPTION = """\
Measures decoding on random FP8 weights, made in memory: tokens per second, the bytes that a token
has to read, and on a GPU their rate as a share of a copy's. One row has its head in bfloat16, the
other in 8 bits. Steps are the last ones of a full cache, without compilation.

    python examples/llama/measure.py --like llama-3-8b
    python examples/llama/measure.py --like llama-3.2-1b --texts 16 --temperature 1 --top-p 0.9
"""
_COPIED = 1 << 30  # bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """What was measured of a server.

    Attributes:
      nbytes, cache: bytes of the parameters, and of keys and values.
      decode: tokens per second, of all texts together.
      read: bytes that a token of a text has to read; None for experts, of which few are read.
      share: their rate as a share of that of a copy, or None where none is measured.
      prefill: tokens per second of all prompts together, or None.
      off: relative distance of the logits after prompts from those of the last server, or None.
    """

    nbytes: int
    cache: int
    decode: float
    read: float | None
    share: float | None
    prefill: float | None = None
    off: float | None = None


def measure(
    servers: Mapping[str, Server], prompts: Sequence[Sequence[int]], number: int, repeat: int
) -> dict[str, Speed]:
    """Medians by name of prefill of prompts and of `number` steps of decode behind it."""
    slots, logits = room(pad(prompts)[0], number), {}
    tokens = sum(map(len, prompts))

    def once(name: str) -> tuple[float, float]:
        made, (ids, lengths) = servers[name], pad(prompts)  # decode takes the lengths away
        cache = jax.block_until_ready(made.empty(len(prompts), slots))
        start = time.perf_counter()
        scores, cache = jax.block_until_ready(made.prefill(made.params, ids, lengths, cache))
        seconds, logits[name] = time.perf_counter() - start, scores
        token = jnp.argmax(scores, -1).astype(jnp.int32)
        return seconds, _decode(made, token, lengths, cache, number)

    taken, copied = _medians(servers, once, repeat), copy_rate()
    filled = tokens / len(prompts) + number / 2
    exact = [*logits.values()][-1]
    return {
        name: dataclasses.replace(
            _speed(servers[name], len(prompts), slots, filled, decode / number, copied),
            prefill=tokens / prefill,
            off=float(jnp.linalg.norm(logits[name] - exact) / jnp.linalg.norm(exact)),
        )
        for name, (prefill, decode) in taken.items()
    }


def decoding(
    servers: Mapping[str, Server], texts: int, slots: int, number: int, repeat: int
) -> dict[str, Speed]:
    """Medians by name of the last `number` steps of a cache of a number of slots."""

    def once(name: str) -> tuple[float]:
        made = servers[name]
        cache = jax.block_until_ready(made.empty(texts, slots))
        position = jnp.full(texts, slots - number, jnp.int32)
        return (_decode(made, jnp.zeros(texts, jnp.int32), position, cache, number),)

    taken, copied = _medians(servers, once, repeat), copy_rate()
    filled = slots - number / 2
    return {
        name: _speed(servers[name], texts, slots, filled, seconds / number, copied)
        for name, (seconds,) in taken.items()
    }


def copy_rate() -> float | None:
    """Bytes per second that a copy on a GPU reads and writes, the median of 5.

    None on a CPU, on which a copy waits for fresh pages of memory.
    """
    if jax.default_backend() != "gpu":
        return None
    x = jnp.ones(_COPIED, jnp.uint8)
    copied = jax.jit(jnp.copy)
    jax.block_until_ready(copied(x))
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([copied(x) for _ in range(4)])
        taken.append((time.perf_counter() - start) / 4)
    return 2.0 * x.nbytes / statistics.median(taken)


def _medians(
    servers: Mapping[str, Server], once: Callable[[str], tuple[float, ...]], repeat: int
) -> dict[str, tuple[float, ...]]:
    """Medians of `repeat` turns by name, without the first, which compiles."""
    taken: dict[str, list[tuple[float, ...]]] = {name: [] for name in servers}
    for turn in range(repeat + 1):
        for name in servers:
            times = once(name)
            if turn:
                taken[name].append(times)
    return {
        name: tuple(statistics.median(part) for part in zip(*times, strict=True))
        for name, times in taken.items()
    }


def _decode(made: Server, token: Any, position: Any, cache: Any, number: int) -> float:
    """Seconds of a number of steps."""
    key, chunk = jax.random.key(0), usual_chunk()
    start = time.perf_counter()
    for done in range(0, number, chunk):
        _, token, position, cache = made.decode_chunk(
            made.params, token, position, cache, key, number=min(chunk, number - done)
        )
    jax.block_until_ready(token)
    return time.perf_counter() - start


def _speed(
    made: Server, texts: int, slots: int, filled: float, step: float, copied: float | None
) -> Speed:
    """A step's speed and bytes; `filled` slots of each text are read."""
    shapes = jax.tree.leaves(jax.eval_shape(lambda: made.empty(texts, slots)))
    cache = sum(leaf.size * leaf.dtype.itemsize for leaf in shapes)
    read = None
    if made.config.mixture is None:
        seen = min(filled, made.config.window or filled)
        read = (made.nbytes - made.looked_up + cache * seen / slots) / texts
    return Speed(
        nbytes=made.nbytes,
        cache=cache,
        decode=texts / step,
        read=read,
        share=None if read is None or copied is None else read * texts / step / copied,
    )


def table(speeds: Mapping[str, Speed]) -> str:
    """What was measured, a line for each server."""

    def line(name: str, *cells: Any) -> str:
        return f"{name:12} " + " ".join(f"{cell:>11}" for cell in cells)

    def mib(nbytes: float | None) -> str:
        return "-" if nbytes is None else f"{nbytes / 2**20:.2f}"

    def percent(share: float | None) -> str:
        return "-" if share is None else f"{share:.1%}"

    names = ("weights MiB", "cache MiB", "prefill/s", "decode/s", "MiB/token", "of a copy")
    lines = [line("", *names, "logits off")]
    for name, speed in speeds.items():
        prefill = "-" if speed.prefill is None else f"{speed.prefill:.0f}"
        cells = mib(speed.nbytes), mib(speed.cache), prefill, f"{speed.decode:.1f}"
        lines.append(line(name, *cells, mib(speed.read), percent(speed.share), percent(speed.off)))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures; returns the exit code."""
    options, how = _parse(arguments)
    said = dict(invent.SIZES[options.like])
    if options.layers is not None:
        said["num_hidden_layers"] = options.layers
    config = parse(said)
    # Arrays of their own: layers that share memory would be read from a cache.
    tensors = jax.tree.map(jnp.array, invent.tensors(config, None))
    servers = {}
    for head in options.head:
        own = (config, tensors)
        if head == "W8A16":
            own = load.with_head_in_8_bits(*own)
        if options.functions:
            params = functional.parameters(*own)
            made = load.served(own[0], params, jnp.bfloat16, options.cache, how, True)
        else:
            made = server(load.filled(*own, jnp.bfloat16)[0], cache=options.cache, how=how)
        servers[f"{head} head"] = made
    print(table(decoding(servers, options.texts, options.length, options.tokens, options.repeat)))
    return 0


def _parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Sampling]:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--like", choices=invent.SIZES, default="small")
    parser.add_argument("--layers", type=int, help="another number of layers")
    parser.add_argument("--head", nargs="+", choices=load.HEADS, default=list(load.HEADS))
    parser.add_argument("--texts", type=int, default=1)
    parser.add_argument("--length", type=int, default=1024, help="slots of the cache of a text")
    parser.add_argument("--tokens", type=int, default=64, help="steps to measure")
    parser.add_argument("--repeat", type=int, default=5)
    shared.add_decoding(parser)
    options = parser.parse_args(arguments)
    try:
        how = shared.sampling(options)
    except ValueError as error:
        parser.error(str(error))
    if options.repeat < 1:
        parser.error("--repeat: give 1 or more")
    if not 0 < options.tokens <= options.length:
        parser.error(f"--tokens: 1 to {options.length} fit into a cache of that --length")
    return options, how


if __name__ == "__main__":
    sys.exit(main())
