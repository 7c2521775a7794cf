"""The results of ways on one pair of operands: errors, bytes, times, bounds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxfp8._bench._measure import Contender, Missing, Timing, attempt, measure, one_at_a_time
from jaxfp8._bench._ways import Way
from jaxfp8._bench.compare import bounds
from jaxfp8._bench.compare.bounds import Check
from jaxfp8._bench.compare.data import Data
from jaxfp8._value import accuracy
from jaxfp8._value.accuracy import Error

KERNEL, LAYER, END_TO_END = "kernel", "layer", "end to end"
STAGES = (KERNEL, LAYER, END_TO_END)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A way on one pair of operands."""

    way: str  # the name of the way
    error: Error  # of the product, against float64
    bytes: int  # of the stored operands, and of the output in float32
    check: Check | None  # the check of its bounds; None if not requested
    timings: Mapping[str, Timing | Missing] = dataclasses.field(default_factory=dict)  # by stage

    def seconds(self, stage: str) -> float | None:
        """The median of a stage; None if not measured."""
        timing = self.timings.get(stage)
        return timing.median if isinstance(timing, Timing) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """All ways on one pair of operands."""

    name: str  # sizes and distribution
    shape: tuple[int, int, int]  # M, N and K
    results: Sequence[Result]  # of the completed ways
    missing: Mapping[str, str]  # by name, the reason why a way did not run

    @property
    def operations(self) -> float:
        """2 M N K."""
        m, n, k = self.shape
        return 2.0 * m * n * k

    @property
    def missed(self) -> list[str]:
        """Why ways did not run, and why others have no time."""
        untimed = [
            f"{result.way}, {stage}: {timing.reason}"
            for result in self.results
            for stage, timing in result.timings.items()
            if isinstance(timing, Missing)
        ]
        return [*(f"{name}: {reason}" for name, reason in self.missing.items()), *untimed]

    @property
    def failed(self) -> bool:
        """Whether a way did not run, or was not timed."""
        return bool(self.missed)

    @property
    def front(self) -> frozenset[str]:
        """The Pareto front in accuracy and speed, as a layer."""
        points = {
            r.way: (r.error.relative_l2, t)
            for r in self.results
            if (t := r.seconds(LAYER)) is not None and np.isfinite(r.error.relative_l2)
        }
        return frozenset(
            name
            for name, (error, time) in points.items()
            if not any(_better(other, (error, time)) for other in points.values())
        )


def _better(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def compared(data: Data, ways: Sequence[Way], platform: str, rounds: int, verify: bool) -> Compared:
    """Runs all ways on one pair of operands, and times them in turns if there are `rounds`."""
    exact = data.exact()
    x, w = jax.numpy.asarray(data.x), jax.numpy.asarray(data.w)
    ran: dict[str, Result | Missing] = {}
    contenders: dict[str, Contender | Missing] = {}
    for way in ways:
        made = attempt(functools.partial(_one, way, data, x, w, exact, platform, verify))
        ran[way.name] = made if isinstance(made, Missing) else made[0]
        if not isinstance(made, Missing) and rounds:
            contenders.update(_contenders(way, x, w, made[1], platform))
    timings = measure(contenders, rounds) if contenders else {}
    results = [
        dataclasses.replace(r, timings=_of_way(timings, name))
        for name, r in ran.items()
        if isinstance(r, Result)
    ]
    missing = {name: r.reason for name, r in ran.items() if isinstance(r, Missing)}
    return Compared(name=data.name, shape=data.shape, results=results, missing=missing)


def _one(
    way: Way,
    data: Data,
    x: jax.Array,
    w: jax.Array,
    exact: np.ndarray,
    platform: str,
    verify: bool,
) -> tuple[Result, tuple[Any, Any]]:
    """A way without its times, and its stored operands."""
    held = jax.jit(way.hold_x)(x), jax.jit(way.hold_w)(w)
    y = np.asarray(jax.jit(way.multiply)(*held), np.float64)
    result = Result(
        way=way.name,
        error=accuracy.error(exact, y),
        bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(held)) + 4 * y.size,
        check=bounds.check(way, data, *held, y, platform) if verify else None,
    )
    return result, held


def _contenders(
    way: Way, x: jax.Array, w: jax.Array, held: tuple[Any, Any], platform: str
) -> Iterator[tuple[str, Contender]]:
    stages: dict[str, tuple[Callable[..., Any], tuple[Any, Any]]] = {
        KERNEL: (way.multiply, held),
        LAYER: (way.layer, (x, held[1])),
        END_TO_END: (way.end_to_end, (x, w)),
    }
    for stage, (function, operands) in stages.items():
        yield f"{way.name}/{stage}", _contender(function, operands, platform)


def _contender(function: Callable[..., Any], operands: tuple, platform: str) -> Contender:
    if platform == "cpu":
        return one_at_a_time(function, [operands])
    jitted = jax.jit(function)
    return Contender(lambda: jitted(*operands))


def _of_way(timings: Mapping[str, Timing | Missing], name: str) -> dict[str, Timing | Missing]:
    return {stage: timings[key] for stage in STAGES if (key := f"{name}/{stage}") in timings}
