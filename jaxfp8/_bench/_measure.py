"""Times contenders in turns: machines are shared, so only times of the same rounds compare."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

# A round shorter than this measures the dispatch rather than the work.
_ROUND_SECONDS = 0.02
_LONGEST_ROUND = 2000
# XLA prefers Triton to its own FP8 products for some graphs.
NO_TRITON = {"xla_gpu_enable_triton_gemm": False}
# Untimed calls before a turn, as a share of its calls. Other contenders evict the operands: with 16
# MiB in an L3 of 32, the first 10 to 30 reads were up to 3x slower.
_WARM_SHARE = 0.5
# Threads of a pool spin for a while after their last task; the next contender has to run alone.
_REST_SECONDS = 0.002


T = TypeVar("T")


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
      enqueue: starts the work once and returns its result.
      wait: waits for the result of `enqueue`.
      units: units of work of one call of `enqueue`.
      exact: the result in float64; None if there is nothing to compare.
      error: the error allowed, as a share of the norm.
      program: the text of the compiled program, if it is known.
    """

    enqueue: Callable[[], Any]
    wait: Callable[[Any], object] = jax.block_until_ready
    units: float = 1
    exact: Callable[[], Any] | None = None
    error: float = 0.0
    program: Callable[[], str | None] = lambda: None

    def seconds(self, calls: int) -> float:
        """Wall time of some calls, started one after the other and waited for together."""
        start = time.perf_counter()
        last = None
        for _ in range(calls):
            last = self.enqueue()
        self.wait(last)
        return time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class Missing:
    """Why a contender did not take part."""

    reason: str


def attempt(make: Callable[[], T]) -> T | Missing:
    """The result of `make`, or why there is none. An error in one does not stop the others."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001 (a row of the table shows it)
        first = next(iter(str(error).splitlines()), "")
        return Missing(f"{type(error).__name__}: {first}" if first else type(error).__name__)


def over_copies(
    function: Callable[..., object],
    copies: Sequence[tuple],
    options: Mapping[str, bool] | None = None,
) -> Contender:
    """A jitted function of several sets of operands, one call working on each in turn.

    Together they should be larger than the caches, and their work much longer than a dispatch.
    `options` are those of XLA's compiler.
    """

    def program(copies: Sequence[tuple]) -> list[object]:
        return [function(*operands) for operands in copies]

    jitted = jax.jit(program, compiler_options=None if options is None else dict(options))
    return Contender(lambda: jitted(copies), units=len(copies))


def measure(
    contenders: Mapping[str, Contender | Missing],
    rounds: int = 15,
    tick: Callable[[], object] = lambda: None,
) -> dict[str, Timing | Missing]:
    """Times contenders in turns; a failed one is left out from there on.

    Each round has another order, since a contender can slow down the next one.

    Args:
      contenders: by name.
      rounds: turns of each contender.
      tick: called after each turn, and after each first call; that one compiles and is not timed.

    Returns:
      For each name its timing, or why there is none.
    """
    ready: dict[str, Callable[[], float]] = {}
    failed: dict[str, Missing] = {}
    seconds: dict[str, list[float]] = {}
    for name, one in contenders.items():
        turn = one if isinstance(one, Missing) else attempt(functools.partial(_turn, one))
        if isinstance(turn, Missing):
            failed[name] = turn
        else:
            ready[name] = turn
        tick()
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(ready), len(ready)):
            taken = attempt(ready[name])
            if isinstance(taken, Missing):
                failed[name] = taken
                del ready[name]
            else:
                seconds.setdefault(name, []).append(taken)
            tick()
    return {name: failed[name] if name in failed else _timing(seconds[name]) for name in contenders}


def _turn(contender: Contender) -> Callable[[], float]:
    """Compiles a contender and returns a function to time a unit of its work."""
    calls = _calls_per_round(contender)

    def turn() -> float:
        time.sleep(_REST_SECONDS)
        if calls > 1:
            contender.seconds(math.ceil(calls * _WARM_SHARE))
        return contender.seconds(calls) / (calls * contender.units)

    return turn


def _calls_per_round(contender: Contender) -> int:
    contender.seconds(1)
    once = contender.seconds(1)
    if once < _ROUND_SECONDS:
        once = contender.seconds(3) / 3
    return max(1, min(_LONGEST_ROUND, round(_ROUND_SECONDS / max(once, 1e-7))))


def _timing(values: list[float]) -> Timing:
    median = statistics.median(values)
    if len(values) < 4:
        return Timing(median=median, spread=0.0)
    low, _, high = statistics.quantiles(values, n=4)
    return Timing(median=median, spread=(high - low) / 2 / median)
