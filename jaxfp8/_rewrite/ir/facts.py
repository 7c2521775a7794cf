"""Facts: what is known about a value beside the array itself.

A fact never replaces a value; it says what else the value equals. The decide pass hands facts
from equation to equation, and the emit pass uses one only where it saves widening 8-bit data.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfp8._rewrite.ir import casts, graph
from jaxfp8._rewrite.ir import tiles as _tiles
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._value import dtypes
from jaxfp8._value.spec import Shape, tile_counts


@dataclasses.dataclass(frozen=True, eq=False)
class Factor:
    """A small array seen as a large one: each entry of `small` fills a tile.

    Invariant: `small.shape == tile_counts(shape, tiles)`, for the shape of the value it scales.
    """

    small: Value
    tiles: Shape

    def at(self, shape: Shape) -> Factor:
        """The same factor for a value of `shape`, to which it broadcasts (of equal rank, or 0)."""
        if not self.tiles and shape:
            return Factor(graph.reshape(self.small, (1,) * len(shape)), full_tiles(shape))
        stretched = [
            size if count == 1 else tile
            for size, count, tile in zip(shape, self.small.shape, self.tiles, strict=True)
        ]
        return Factor(self.small, tuple(max(t, 1) for t in stretched))

    def varying(self) -> Shape:
        """Axes along which the factor is not constant."""
        return tuple(axis for axis, count in enumerate(self.small.shape) if count > 1)

    def map_small(self, function: Any) -> Factor:
        """The factor with `function` applied to each entry."""
        return Factor(function(self.small), self.tiles)


Factors = tuple[Factor, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Scales:
    """This value is the product of small arrays, each seen as a large one."""

    factors: Factors


@dataclasses.dataclass(frozen=True, eq=False)
class Scaled:
    """This value is `(decode(q) - zero_point) * product of factors`, up to rounding of that.

    Attributes:
      q: the 8-bit data in storage dtype, of the value's shape.
      dtype: logical dtype of `q`.
      zero_point: an int32 factor to subtract, or None; a call takes the bytes it was cast from.
      factors: scales to multiply by; and masks (dtype bool): the value is zero where they are
        False, whatever the factors before them.
      origin: the value of dtype `dtype` that the data was first seen as, for reports.
      guards: scalars of dtype bool, without all of which the fact does not hold; known only when
        the program runs. A fact with guards stays in its region.
    """

    q: Value
    dtype: np.dtype
    zero_point: Factor | None = None
    factors: Factors = ()
    origin: Value | None = None
    guards: tuple[Value, ...] = ()

    def scaled(self, factors: Factors) -> Scaled:
        """Multiplied by further factors."""
        return dataclasses.replace(self, factors=self.factors + factors)

    def stretched(self, shape: Shape) -> Scaled:
        """The same for a value of `shape`, to which this one's axes of size 1 are stretched."""
        if self.q.shape == shape:
            return self
        q = graph.derived(
            "broadcast", lambda q: jnp.broadcast_to(q, shape), [self.q], shape, self.q.dtype
        )
        zero = None if self.zero_point is None else self.zero_point.at(shape)
        factors = tuple(f.at(shape) for f in self.factors)
        return dataclasses.replace(self, q=q, zero_point=zero, factors=factors)


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One operation after a product: `kind` names it, `data` is what it needs.

    Kinds: scale (Factors), bias (Factor), residual (Value), activation (name, dtype), cast (dtype),
    round, clip ((low, high)), quantize (dtype), view (Op, with `data` its inverse).
    """

    kind: str
    data: Any = None
    op: Op | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """This value is the scaled dot of `site`, followed by `steps`.

    Attributes:
      site: the dot and its operands.
      value: the value that this fact is about.
      parent: the product before the last step, or None at the dot itself.
      step: the last step.
      ready: whether a kernel can stop here; a clip without its convert, say, is not.
    """

    site: Any
    value: Value
    parent: Product | None = None
    step: Step | None = None
    ready: bool = True

    def ancestry(self) -> list[Product]:
        """This product and those before it, the dot itself last."""
        out: list[Product] = []
        product: Product | None = self
        while product is not None:
            out.append(product)
            product = product.parent
        return out

    def steps(self) -> list[Step]:
        """The steps from the dot to this value."""
        return [p.step for p in reversed(self.ancestry()) if p.step is not None]


@dataclasses.dataclass(frozen=True, eq=False)
class Magnitude:
    """This value is |product|, and may become its amax."""

    product: Product


@dataclasses.dataclass(frozen=True, eq=False)
class Amax:
    """This value is the largest |product| over the axes where `shape` is 1 and the dot's is not."""

    product: Product
    value: Value
    shape: Shape


@dataclasses.dataclass(frozen=True, eq=False)
class Lost:
    """This value once was dequantised 8-bit data; `eqn` in `callers` ended it, for `reason`."""

    eqn: Any
    reason: str
    remedy: str
    callers: tuple[Any, ...] = ()


Fact = Scales | Scaled | Product | Magnitude | Amax | Lost


def full_tiles(shape: Shape) -> Shape:
    """The tiles of a factor that is constant over `shape`."""
    return tuple(max(size, 1) for size in shape)


def whole(value: Value) -> Factor:
    """A value as a factor of itself: each axis varies, except those of size 1."""
    return Factor(value, (1,) * len(value.shape))


def constant(number: float, shape: Shape) -> Factor:
    """A number as a factor of a value of `shape`."""
    return Factor(graph.literal(number, np.float32), ()).at(shape)


def storage_bytes(value: Value) -> Value:
    """The bytes of an 8-bit value."""
    return casts.bitcast(value, dtypes.storage(value.dtype))


def combine(factors: Factors, shape: Shape, dtype: Any = np.float32) -> Factor:
    """The product of at least one factor, as one factor of `dtype`."""
    tiles = _tiles.common(shape, [f.tiles for f in factors])
    smalls = [casts.cast(refine(f, shape, tiles), dtype) for f in factors]
    total = functools.reduce(graph.multiply, smalls)
    return Factor(fill(total, tile_counts(shape, tiles)), tiles)


def each(op: Op, inputs: Sequence[Factors]) -> Factors | None:
    """What an elementwise op makes of products of factors: one factor, of values of its own dtypes.

    None where that had more entries than the largest of them.
    """
    out = op.outputs[0]
    factors = [f for product in inputs for f in product]
    tiles = _tiles.common(out.shape, [f.tiles for f in factors])
    counts = tile_counts(out.shape, tiles)
    if math.prod(counts) > max(f.small.size for f in factors):
        return None
    given = list(zip(inputs, op.inputs, strict=True))
    numbers = [_known(product, x.dtype) for product, x in given]
    if all(number is not None for number in numbers):
        with np.errstate(all="ignore"):
            result = _IN_NUMPY[op.name](*numbers).astype(out.dtype)
        return (Factor(graph.literal(result), ()).at(out.shape),)
    small = [
        _as_read(fill(refine(as_one(product, out.shape), out.shape, tiles), counts), x)
        for product, x in given
    ]
    return (Factor(graph.replay(op, small, counts, out.dtype), tiles),)


def _as_read(small: Value, value: Value) -> Value:
    """The entries of `value` in its dtype, rounded where the function rounds them."""
    small = casts.cast(small, value.dtype)
    return casts.rounded(small) if casts.was_spread(value) else small


# The operations of `each` on numbers: while a function is traced, no device is to be asked.
_IN_NUMPY: dict[str, Callable[..., Any]] = {
    "convert_element_type": np.asarray,
    "mul": np.multiply,
    "div": np.divide,
}


def _known(factors: Factors, dtype: np.dtype) -> np.ndarray | None:
    """The number that a product of factors is known to be, computed in float32; or None."""
    numbers = [graph.number(f.small) for f in factors]
    known = [np.float32(number) for number in numbers if number is not None]
    if len(known) < len(numbers):
        return None
    with np.errstate(all="ignore"):
        return np.prod(known, dtype=np.float32).astype(dtype)


def as_one(factors: Factors, shape: Shape) -> Factor:
    """At least one factor as one: a single one as it is, the product of several in float32."""
    is_one = len(factors) == 1 and factors[0].small.dtype in dtypes.WIDE_FLOAT
    return factors[0] if is_one else combine(factors, shape)


def refine(factor: Factor, shape: Shape, tiles: Shape) -> Value:
    """The small array of a factor for finer tiles; axes where it is constant stay 1."""
    counts = tuple(
        1 if count == 1 else -(-size // tile)
        for size, tile, count in zip(shape, tiles, factor.small.shape, strict=True)
    )
    times = tuple(old // new for old, new in zip(factor.tiles, tiles, strict=True))
    return graph.repeat(factor.small, times, counts)


def fill(small: Value, counts: Shape) -> Value:
    """The small array with axes of size 1 stretched to `counts`."""
    if small.shape == counts:
        return small
    times = tuple(max(counts, default=1) for _ in counts)
    return graph.repeat(small, times, counts)


def all_moved(factors: Factors, move: Callable[[Factor], Factor | None]) -> Factors | None:
    """Each factor moved; None if one of them cannot be."""
    return all_found([move(factor) for factor in factors])


def all_found(factors: Sequence[Factor | None]) -> Factors | None:
    """The factors, or None if one is missing."""
    found = tuple(f for f in factors if f is not None)
    return found if len(found) == len(factors) else None
