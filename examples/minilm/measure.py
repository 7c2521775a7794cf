"""The encoder in float32 and in 8 bits, with and without `jaxfp8.rewrite`; what each takes."""

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
    """A compiled form of the encoder, with its weights; `recipe` may also be "f32"."""

    recipe: str
    by: str
    encode: Encoder
    params: Params

    @property
    def name(self) -> str:
        """As `INT8_DYNAMIC, jaxfp8`."""
        return f"{'float32' if self.recipe == 'f32' else self.recipe}, {self.by}"

    def __call__(self, batch: Batch) -> tuple[np.ndarray, list[np.ndarray]]:
        """Embeddings and 8-bit activations of a batch."""
        return jax.device_get(self.encode(self.params, batch.ids, batch.mask))

    def seconds(self, batch: Batch) -> float:
        """Wall time of one call."""
        start = time.perf_counter()
        jax.block_until_ready(self.encode(self.params, batch.ids, batch.mask))
        return time.perf_counter() - start


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A program on one batch.

    Attributes:
      program: the program.
      embeddings: of the batch, float32 [B, 384].
      kernels: jaxfp8's kernels that ran, by the number of calls.
      seconds: median of its calls.
    """

    program: Program
    embeddings: np.ndarray
    kernels: dict[str, int]
    seconds: float


def as_written(params: Params, recipe: str) -> Program:
    """The encoder as XLA runs it; `recipe` may also be "f32"."""
    return Program(recipe=recipe, by="XLA", encode=jax.jit(encoder(recipe)), params=params)


def rewritten(params: Params, recipe: str) -> Program:
    """The same through `jaxfp8.rewrite`."""
    encode = jax.jit(jaxfp8.rewrite(encoder(recipe)))
    return Program(recipe=recipe, by="jaxfp8", encode=encode, params=params)


def encoder(recipe: str) -> Encoder:
    """The forward function of `recipe`; it knows nothing of jaxfp8."""

    def forward(params: Params, ids: jax.Array, mask: jax.Array) -> tuple[jax.Array, Codes]:
        return encode(params, ids, mask, recipe=recipe)

    return forward


def explain(params: Params, recipe: str, batch: Batch) -> jaxfp8.typing.Report:
    """Which products of the forward function `jaxfp8.rewrite` takes."""
    return jaxfp8.explain(encoder(recipe))(params, batch.ids, batch.mask)


def embed(program: Program, batches: Sequence[Batch], track: Track) -> np.ndarray:
    """The embeddings, float32 [S, 384]; the first time, this compiles the program."""
    embedded: dict[int, np.ndarray] = {}
    for batch in track(batches, f"compiling {program.name}"):
        embedded.update(zip(batch.rows, program(batch)[0], strict=True))
    return in_order(embedded)


def embed_and_compare(
    program: Program,
    batches: Sequence[Batch],
    sentences: Sequence[Sentence],
    reference: Reference,
    track: Track,
) -> tuple[np.ndarray, np.ndarray]:
    """As `embed`, and the same by `reference`, which follows the program's choices at ties."""
    embedded: dict[int, np.ndarray] = {}
    expected: dict[int, np.ndarray] = {}
    for batch in track(batches, f"compiling {program.name}, comparing with numpy"):
        embeddings, codes = program(batch)
        for place, row in enumerate(batch.rows):
            ids = sentences[row].ids
            embedded[row] = embeddings[place]
            expected[row] = reference(ids, [array[place, : len(ids)] for array in codes])
    return in_order(embedded), in_order(expected)


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


def race(contenders: Sequence[Program], batch: Batch, repeat: int, track: Track) -> list[Measured]:
    """Each program on one batch; the programs take turns, so that a slow spell meets them all."""
    runs = [
        count_calls(lambda program=program: program(batch)[0])  # type: ignore[misc]
        for program in track(contenders, "compiling the programs")
    ]
    rounds = [
        [program.seconds(batch) for program in contenders]
        for _ in track(range(repeat), "taking times")
    ]
    return [
        Measured(
            program=program,
            embeddings=embeddings,
            kernels=kernels,
            seconds=statistics.median(taken),
        )
        for program, (embeddings, kernels), taken in zip(
            contenders, runs, zip(*rounds, strict=True), strict=True
        )
    ]
