"""The main job: embed the sentences in three ways, check the numbers, and take the times."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import jax
import numpy as np

import jaxfp8
from jaxfp8 import testing
from minilm.model import Codes, Params, encode
from minilm.reference import Reference
from minilm.text import Batch, Sentence

T = TypeVar("T")
Encoder = Callable[..., tuple[jax.Array, Codes]]


class Track(Protocol):
    """Goes through items and shows how far it has come."""

    def __call__(self, items: Sequence[T], title: str) -> Iterable[T]:
        """Yield the items, the work on which is called `title`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled form of the encoder, with its weights."""

    name: str
    encode: Encoder
    params: Params

    def __call__(self, batch: Batch) -> tuple[np.ndarray, list[np.ndarray]]:
        """Embeddings and 8-bit activations of a batch."""
        return jax.device_get(self.encode(self.params, batch.ids, batch.mask))

    def seconds(self, batch: Batch) -> float:
        """Wall time of one call."""
        start = time.perf_counter()
        jax.block_until_ready(self.encode(self.params, batch.ids, batch.mask))
        return time.perf_counter() - start


def programs(wide: Params, narrow: Params, recipe: str) -> list[Program]:
    """The encoder in float32; with 8-bit weights as XLA runs it; and rewritten."""
    forward = encoder(recipe)
    return [
        Program(name="float32, XLA", encode=jax.jit(encoder("f32")), params=wide),
        Program(name=f"{recipe}, XLA", encode=jax.jit(forward), params=narrow),
        Program(name=f"{recipe}, jaxfp8", encode=jax.jit(jaxfp8.rewrite(forward)), params=narrow),
    ]


def encoder(recipe: str) -> Encoder:
    """The forward function of `recipe`; it knows nothing of jaxfp8."""

    def forward(params: Params, ids: jax.Array, mask: jax.Array) -> tuple[jax.Array, Codes]:
        return encode(params, ids, mask, recipe=recipe)

    return forward


def explain(params: Params, recipe: str, batch: Batch) -> jaxfp8.Report:
    """Which products of the forward function `jaxfp8.rewrite` takes."""
    return jaxfp8.explain(encoder(recipe))(params, batch.ids, batch.mask)


def embed(program: Program, batches: Sequence[Batch], track: Track) -> np.ndarray:
    """The embeddings, float32 [S, 384]; the first time, this compiles the program."""
    found: dict[int, np.ndarray] = {}
    for batch in track(batches, f"compiling {program.name}"):
        found.update(zip(batch.rows, program(batch)[0], strict=True))
    return in_order(found)


def embed_and_compare(
    program: Program,
    batches: Sequence[Batch],
    sentences: Sequence[Sentence],
    reference: Reference,
    track: Track,
) -> tuple[np.ndarray, np.ndarray]:
    """As `embed`, and the same by `reference`, which follows the program's choices at ties."""
    found: dict[int, np.ndarray] = {}
    expected: dict[int, np.ndarray] = {}
    for batch in track(batches, f"compiling {program.name}, comparing with numpy"):
        embeddings, codes = program(batch)
        for place, row in enumerate(batch.rows):
            ids = sentences[row].ids
            found[row] = embeddings[place]
            expected[row] = reference(ids, [array[place, : len(ids)] for array in codes])
    return in_order(found), in_order(expected)


def in_order(by_row: dict[int, np.ndarray]) -> np.ndarray:
    """Arrays stacked by their place in the list of sentences."""
    return np.stack([by_row[row] for row in range(len(by_row))])


def platform() -> str:
    """What this process computes on, as reports name it."""
    return {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())


def count_calls(action: Callable[[], T]) -> tuple[T, dict[str, int]]:
    """What `action` returns, and how often each kernel ran during it."""
    before = testing.kernel_calls(platform())
    result = action()
    after = testing.kernel_calls(platform())
    calls = {name: after[name] - before.get(name, 0) for name in after}
    return result, {name: count for name, count in calls.items() if count}


def times(
    contenders: Sequence[Program], batches: Sequence[Batch], repeat: int, track: Track
) -> dict[str, float]:
    """Seconds for all batches, by program: the median of each batch, summed.

    The programs take turns at every batch, so that a slow spell of the machine meets all alike.
    """
    taken: dict[tuple[str, int], list[float]] = {}
    for _ in track(range(repeat), "taking times"):
        for number, batch in enumerate(batches):
            for program in contenders:
                taken.setdefault((program.name, number), []).append(program.seconds(batch))
    return {
        program.name: sum(statistics.median(taken[program.name, n]) for n in range(len(batches)))
        for program in contenders
    }
