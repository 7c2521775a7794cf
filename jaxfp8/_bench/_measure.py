"""Times contenders in turns: machines are shared, so only times of the same rounds compare."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

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
# More than any cache, so rotated operands are read from memory; and so many copies at most.
BEYOND_CACHES = 256 << 20
MOST_COPIES = 24


T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds for one unit of work."""

    median: float  # over the rounds
    spread: float  # half the distance between the quartiles, as a share of the median


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to do some work."""

    enqueue: Callable[[], Any]  # starts the work once and returns its result
    wait: Callable[[Any], object] = jax.block_until_ready  # waits for the result of `enqueue`
    units: float = 1  # units of work of one call of `enqueue`
    # The text of a compiled program. With one, the work is profiled by kernel, too.
    program: str = ""
    temporary: int = 0  # bytes of the program beside its arguments and results

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
    """Why a contender did not take part, and whether it failed or has no such form."""

    reason: str
    failed: bool = True


# What a device, a compiler, a missing package or unsuitable sizes raise. Any other error is a
# mistake of the benchmark and ends it.
_REFUSALS = (RuntimeError, ValueError, ArithmeticError, MemoryError, ImportError, OSError)


def attempt(make: Callable[[], T]) -> T | Missing:
    """The result of `make`, or why it was refused. The table shows that, and others go on."""
    try:
        return make()
    except _REFUSALS as error:
        first = next(iter(str(error).splitlines()), "")
        return Missing(f"{type(error).__name__}: {first}" if first else type(error).__name__)


def contender(
    platform: str,
    function: Callable[..., Any],
    *operands: Any,
    least: int = 1,
    options: Mapping[str, bool] | None = None,
) -> Contender:
    """A jitted function of some operands; `least` is the number of their copies.

    On a GPU, operands are rotated beyond the caches and one program has all copies: a dispatch
    takes longer than a small product. On the CPU each call is waited for, since calls beside each
    other would share its cores. `options` are those of XLA's compiler.
    """
    if platform == "cpu":
        return one_at_a_time(function, _copies(operands, least))
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(operands))
    count = min(MOST_COPIES, max(least, 2, BEYOND_CACHES // max(nbytes, 1)))
    return over_copies(function, _copies(operands, count), options)


def _copies(operands: tuple, count: int) -> list[tuple]:
    return [operands, *(jax.tree.map(jnp.copy, operands) for _ in range(count - 1))]


def one_at_a_time(function: Callable[..., object], sets: Sequence[tuple]) -> Contender:
    """A jitted function of one set of operands after the other, each result waited for."""
    jitted = jax.jit(function)
    turns = itertools.cycle(sets)
    return Contender(lambda: jax.block_until_ready(jitted(*next(turns))))


def over_copies(
    function: Callable[..., object],
    sets: Sequence[tuple],
    options: Mapping[str, bool] | None = None,
) -> Contender:
    """One program with a call for each set of operands."""

    def program(sets: Sequence[tuple]) -> list[object]:
        return [function(*operands) for operands in sets]

    jitted = jax.jit(program, compiler_options=None if options is None else dict(options))
    return Contender(lambda: jitted(sets), units=len(sets))


def measure(
    contenders: Mapping[str, Contender | Missing], rounds: int = 15
) -> dict[str, Timing | Missing]:
    """Times contenders in turns; a failed one is left out from there on.

    Each round has another order, since a contender can slow down the next one.

    Args:
      contenders: by name.
      rounds: turns of each contender, after a first call that compiles and is not timed.

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
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(ready), len(ready)):
            taken = attempt(ready[name])
            if isinstance(taken, Missing):
                failed[name] = taken
                del ready[name]
            else:
                seconds.setdefault(name, []).append(taken)
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
