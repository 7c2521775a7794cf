"""How long contenders take, in turns: machines are shared, and only what ran together compares."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import jax

# A round shorter than this measures the dispatch rather than the work.
_ROUND_SECONDS = 0.02
_LONGEST_ROUND = 2000
# XLA's own FP8 products stand behind those of Triton, which take the same graphs first.
NO_TRITON = {"xla_gpu_enable_triton_gemm": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds for one unit of work.

    Attributes:
      median: over the rounds.
      spread: half the distance between the quartiles, as a share of the median.
    """

    median: float
    spread: float


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to do some work.

    Attributes:
      enqueue: starts the work once and returns what has to be waited for.
      wait: waits for what `enqueue` returned.
      units: how many units of work one call of `enqueue` does.
    """

    enqueue: Callable[[], object]
    wait: Callable[[object], object] = jax.block_until_ready
    units: int = 1

    def seconds(self, calls: int) -> float:
        """Wall time of so many calls, started one after the other and waited for together."""
        start = time.perf_counter()
        last = None
        for _ in range(calls):
            last = self.enqueue()
        self.wait(last)
        return time.perf_counter() - start


def over_copies(
    function: Callable[..., object],
    copies: Sequence[tuple],
    options: Mapping[str, bool] | None = None,
) -> Contender:
    """A jitted function of several sets of operands, one call working on each in turn.

    Together they should be larger than the caches, and their work long beside a dispatch.
    `options` are those of XLA's compiler.
    """

    def program(copies: Sequence[tuple]) -> list[object]:
        return [function(*operands) for operands in copies]

    jitted = jax.jit(program, compiler_options=None if options is None else dict(options))
    return Contender(lambda: jitted(copies), units=len(copies))


def measure(contenders: Mapping[str, Contender], rounds: int = 15) -> dict[str, Timing]:
    """Times contenders in turns; the first call of each, which compiles, does not count.

    Each round has an order of its own: what ran before leaves its heat behind.
    """
    calls = {name: _calls_per_round(one) for name, one in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(contenders), len(contenders)):
            one = contenders[name]
            seconds[name].append(one.seconds(calls[name]) / (calls[name] * one.units))
    return {name: _timing(values) for name, values in seconds.items()}


def _calls_per_round(contender: Contender) -> int:
    contender.seconds(2)
    once = contender.seconds(3) / 3
    return max(1, min(_LONGEST_ROUND, round(_ROUND_SECONDS / max(once, 1e-7))))


def _timing(values: list[float]) -> Timing:
    median = statistics.median(values)
    if len(values) < 4:
        return Timing(median=median, spread=0.0)
    low, _, high = statistics.quantiles(values, n=4)
    return Timing(median=median, spread=(high - low) / 2 / median)
