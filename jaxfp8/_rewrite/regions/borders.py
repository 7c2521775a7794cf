"""Facts across the border of a region: 8-bit data and scales go in instead of the wide value.

A region (a scan, a branch, a rematerialised function) is a program of its own. Each value that
enters it gets a value inside; where the outer one is dequantised 8-bit data, its bytes and scales
get values inside too, with the same fact. Once the inside is settled, only what it reads is passed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import emit, graph
from jaxfp8._rewrite.ir.facts import Factor, Lost, Scaled, Scales, all_moved
from jaxfp8._rewrite.ir.graph import Value
from jaxfp8._value import dtypes
from jaxfp8._value.spec import Shape, tile_counts

_LOOPS = ("whole", "slice", "carry")  # ways to enter other than by a sharding


@dataclasses.dataclass(frozen=True, eq=False)
class Inside:
    """A settled region.

    Attributes:
      program: evaluates the inside from what it reads.
      sources: for each input of `program`, the outer value and how it enters: "whole", as a
        "slice", as "carry", or by the spec of its sharding.
      changed: whether a dot inside became a scaled dot.
    """

    program: emit.Program
    sources: tuple[tuple[Value, Any], ...]
    changed: bool


class Border:
    """Makes the inner values of one region."""

    def __init__(self, outer: Context, inputs: Sequence[Value]) -> None:
        self.outer = outer
        self.inner = outer.nested()
        self.links: dict[Value, tuple[Value, Any]] = {}
        self._first_site = len(outer.seen.sites)

    def enter(self, value: Value, *, facts: bool = True) -> Value:
        """The inner value of one that enters whole, with what is known about it."""
        if value.literal is not None:
            return value
        inner = self._link(value, value.shape, "whole")
        fact = self._fact(value)
        if facts and fact is not None:
            self._know(inner, fact, lambda f: Factor(self._link(f.small), f.tiles), "whole")
        return inner

    def enter_slices(self, value: Value) -> Value:
        """The inner value of one that enters slice by slice along its first axis."""
        inner = self._link(value, value.shape[1:], "slice")
        fact = self._fact(value)
        if fact is not None:
            self._know(inner, fact, self._slice_factor, "slice")
        return inner

    def enter_plain(self, value: Value, lose: Callable[[], Lost]) -> Value:
        """The inner value of one that changes inside, of which nothing else is known.

        Where it was dequantised 8-bit data outside, `lose` says what it is no longer.
        """
        inner = self._link(value, value.shape, "carry")
        if (before := self.outer.lost(value)) is not None:
            self.inner.facts[inner] = before
        elif self.outer.dequantised(value) is not None:
            self.inner.facts[inner] = lose()
        return inner

    def enter_shards(self, value: Value, shape: Shape, spec: Any) -> Value:
        """The inner value of one of which each device gets a shard of `shape`, as `spec` says."""
        inner = self._link(value, shape, spec)
        fact = self._fact(value)
        if fact is not None:
            self._know(inner, fact, functools.partial(self._shard_factor, shape, spec), spec)
        return inner

    def _shard_factor(self, shape: Shape, spec: Any, factor: Factor) -> Factor | None:
        """A factor as one of a shard: sharded along the axes that it varies along."""
        parts = [*spec, *[None] * (len(shape) - len(spec))]
        rows = list(zip(shape, parts, factor.tiles, factor.small.shape, strict=True))
        if any(part and count > 1 and size % tile for size, part, tile, count in rows):
            return None
        own = type(spec)(*(part if count > 1 else None for _, part, _, count in rows))
        tiles = tuple(tile if count > 1 else max(size, 1) for size, _, tile, count in rows)
        return Factor(self._link(factor.small, tile_counts(shape, tiles), own), tiles)

    def _link(self, value: Value, shape: Any = None, how: Any = "whole") -> Value:
        if shape is None:
            shape = value.shape
        inner = Value(tuple(shape), value.dtype, weak_type=value.weak_type, outer=value)
        self.links[inner] = (value, how)
        return inner

    def _fact(self, value: Value) -> Scaled | Scales | Lost | None:
        """The outer fact that may cross; an integer array is its own fact on either side."""
        fact = self.outer.fact(value)
        if isinstance(fact, Scaled | Scales | Lost):
            return fact
        return self.outer.scaled(value) if value.dtype in dtypes.FLOAT8 else None

    def _know(
        self,
        inner: Value,
        fact: Scaled | Scales | Lost,
        enter: Callable[[Factor], Factor | None],
        how: Any,
    ) -> None:
        """State the fact inside, if all its factors can enter."""
        if isinstance(fact, Lost):
            self.inner.facts[inner] = fact
            return
        factors = all_moved(fact.factors, enter)
        zero = fact.zero_point if isinstance(fact, Scaled) else None
        inner_zero = enter(zero) if zero is not None else None
        if factors is None or (zero is not None and inner_zero is None):
            return
        if isinstance(fact, Scales):
            self.inner.facts[inner] = Scales(factors)
            return
        q = self._link(fact.q, inner.shape, how)
        guards = tuple(self._guard(guard, how) for guard in fact.guards)
        self.inner.facts[inner] = Scaled(q, fact.dtype, inner_zero, factors, fact.origin, guards)

    def _guard(self, guard: Value, how: Any) -> Value:
        """A guard inside, the same for every slice and on every device."""
        return self._link(guard, (), "whole" if how in _LOOPS else type(how)())

    def _slice_factor(self, factor: Factor) -> Factor | None:
        """A factor of the stack as one of a slice: itself sliced, or whole if constant."""
        counts, tiles = factor.small.shape[1:], factor.tiles[1:]
        if factor.small.shape[0] == 1:
            return Factor(self._link(graph.reshape(factor.small, counts)), tiles)
        if factor.tiles[0] != 1:
            return None
        return Factor(self._link(factor.small, counts, "slice"), tiles)

    def settle(self, outputs: Sequence[Value], *, keep: Sequence[Value] = ()) -> Inside:
        """Decide what is emitted inside; inputs in `keep` are passed even if nobody reads them."""
        program = self.inner.settle(outputs, list(self.links))
        used = program.used() | set(keep)
        inputs = tuple(v for v in self.links if v in used)
        program = dataclasses.replace(program, inputs=inputs)
        changed = any(site.call is not None for site in self.outer.seen.sites[self._first_site :])
        return Inside(program, tuple(self.links[v] for v in inputs), changed)
