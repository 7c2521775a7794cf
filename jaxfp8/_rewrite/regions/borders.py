"""Facts at the entry of a region: 8-bit data and scales go in instead of the wide value.

A region (a scan, a branch, a rematerialised function) is a program of its own. Each entering value
gets an inner value. If the outer value is dequantized 8-bit data, its bytes and scales get inner
values too, with the same fact. The settled region is passed only the inputs it reads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal

from jax.sharding import PartitionSpec

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import casts, constants, emit
from jaxfp8._rewrite.ir.factors import Factor
from jaxfp8._rewrite.ir.graph import Value
from jaxfp8._rewrite.ir.scaled import Lost, Scaled, Scales
from jaxfp8._value import dtypes
from jaxfp8._value.spec import Shape, tile_counts

# How a value enters: whole, as slices along its first axis (made by the loop, or picked as bytes by
# its body), as a carried value, or as shards.
How = Literal["whole", "slice", "pick", "carry"] | PartitionSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Inside:
    """A settled region."""

    program: emit.Program  # evaluates the inside from its inputs
    # For each input of `program`, the outer value and how it enters.
    sources: tuple[tuple[Value, How], ...]
    # Whether a dot inside was changed, or an FP8 array is picked from as bytes instead.
    changed: bool


class Border:
    """Makes the inner values of one region.

    Attributes:
      outer, inner: the contexts around the region and inside it.
      links: for each inner value the outer value, and how it enters.
    """

    def __init__(self, outer: Context, inputs: Sequence[Value]) -> None:
        self.outer = outer
        self.inner = outer.nested()
        self.links: dict[Value, tuple[Value, How]] = {}
        self._before = outer.seen.size

    def enter(self, value: Value, *, facts: bool = True) -> Value:
        """The inner value of one entering whole, with its facts."""
        if value.literal is not None:
            return value
        fact = self._fact(value)
        inner = self._link(value, value.shape, "whole")
        inner.number = constants.number(value)  # JAX moves numbers out of loops
        if facts and fact is not None:
            self._know(inner, fact, lambda f: Factor(self._link(f.small), f.tiles), "whole")
        return inner

    def enter_slices(self, value: Value) -> Value:
        """The inner value of one entering slice by slice along its first axis."""
        inner = self._link(value, value.shape[1:], "slice")
        fact = self._fact(value)
        if fact is not None:
            self._know(inner, fact, self._slice_factor, "slice")
        return inner

    def enter_plain(self, value: Value, ended: Lost) -> Value:
        """The inner value of one changed inside: if it was 8-bit data, its fact is now `ended`."""
        inner = self._link(value, value.shape, "carry")
        if (before := self.outer.lost(value)) is not None:
            self.inner.facts[inner] = before
        elif self.outer.dequantized(value) is not None:
            self.inner.facts[inner] = ended
        return inner

    def enter_shards(self, value: Value, shape: Shape, spec: PartitionSpec) -> Value:
        """The inner value of one split by `spec` into a shard of `shape` per device."""
        inner = self._link(value, shape, spec)
        fact = self._fact(value)
        if fact is not None:
            self._know(inner, fact, functools.partial(self._shard_factor, shape, spec), spec)
        return inner

    def _shard_factor(self, shape: Shape, spec: PartitionSpec, factor: Factor) -> Factor | None:
        """A factor of the whole value as one of a shard, split along its varying axes.

        None if a shard would end inside a tile.
        """
        parts = [*spec, *[None] * (len(shape) - len(spec))]
        rows = list(zip(shape, parts, factor.tiles, factor.small.shape, strict=True))
        if any(part and count > 1 and size % tile for size, part, tile, count in rows):
            return None
        own = PartitionSpec(*(part if count > 1 else None for _, part, _, count in rows))
        tiles = tuple(tile if count > 1 else max(size, 1) for size, _, tile, count in rows)
        return Factor(self._link(factor.small, tile_counts(shape, tiles), own), tiles)

    def _link(self, value: Value, shape: Shape | None = None, how: How = "whole") -> Value:
        """The inner value of an outer one."""
        shape = value.shape if shape is None else shape
        inner = Value(shape, value.dtype, weak_type=value.weak_type, outer=value)
        self.links[inner] = (value, how)
        return inner

    def _fact(self, value: Value) -> Scaled | Scales | Lost | None:
        """The outer fact, if it can enter. An FP8 array is known by its bytes."""
        fact = self.outer.fact(value)
        if isinstance(fact, Scaled | Scales | Lost):
            return fact
        return self.outer.scaled(value) if value.dtype in dtypes.FLOAT8 else None

    def _know(
        self,
        inner: Value,
        fact: Scaled | Scales | Lost,
        enter: Callable[[Factor], Factor | None],
        how: How,
    ) -> None:
        """State a fact inside, if all its factors can enter."""
        if isinstance(fact, Lost):
            self.inner.facts[inner] = fact
            return
        own = fact.moved(lambda q: self._data(q, inner, how), enter)
        if isinstance(own, Scaled):
            # A guard is the same for every slice and on every device.
            whole: How = "whole" if isinstance(how, str) else PartitionSpec()
            guards = tuple(self._link(guard, (), whole) for guard in own.guards)
            own = dataclasses.replace(own, guards=guards)
        if own is not None:
            self.inner.facts[inner] = own

    def _data(self, q: Value, inner: Value, how: How) -> Value:
        """The bytes inside. An FP8 array becomes bytes inside, to avoid a copy of the stack."""
        source = None
        if self.outer.picks_bytes and isinstance(how, str):
            source = casts.float8_behind(q)
        if source is None:
            return self._link(q, inner.shape, how)
        is_it = self.links[inner][0] is source
        return casts.bitcast(inner if is_it else self._link(source, inner.shape, how), q.dtype)

    def _slice_factor(self, factor: Factor) -> Factor | None:
        """A factor of the stack as one of a slice: sliced too, or whole if all slices share it."""
        shape = factor.small.shape
        own = factor.placed(range(1, len(shape)), shape[1:])
        if shape[0] == 1:
            return own.map_small(self._link)
        if factor.tiles[0] != 1:
            return None
        return Factor(self._link(factor.small, shape[1:], "slice"), factor.tiles[1:])

    def settle(self, outputs: Sequence[Value], *, keep: Sequence[Value] = ()) -> Inside:
        """Settle the inside; inputs in `keep` are passed even if nobody reads them."""
        program = self.inner.settle(outputs, list(self.links))
        used = program.used() | set(keep)
        inputs = tuple(v for v in self.links if v in used)
        program = dataclasses.replace(program, inputs=inputs)
        return Inside(
            program,
            tuple(self.links[v] for v in inputs),
            self.outer.seen.changed_since(self._before),
        )
