"""The dot: when it becomes a scaled dot, and why not when it does not."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxfp8 import _dtypes
from jaxfp8._rewrite import _graph, _masks, _precision, _rules, _tiles
from jaxfp8._rewrite._facts import (
    Factor,
    Factors,
    Lost,
    Product,
    Scaled,
    full_tiles,
)
from jaxfp8._rewrite._graph import Op, Value
from jaxfp8._spec import Shape, tile_counts

if TYPE_CHECKING:
    from jaxfp8._rewrite._walk import Walk


@dataclasses.dataclass(frozen=True, eq=False)
class Side:
    """One operand of a product, in the order of axes that its data lies in.

    Attributes:
      value: the data: bytes, or an array of float32, bfloat16 or float16.
      dtype: logical dtype of the data.
      contracting, batch: axes of `value`, in the order of the other side's.
      output: for each axis of `value` the output's axis, or -1 where it is contracted.
      zero_point, factors: over `value`.
      scaled: the fact that the data came from, for the report; None for a float operand.
    """

    value: Value
    dtype: np.dtype
    contracting: Shape
    batch: Shape
    output: Shape
    zero_point: Factor | None = None
    factors: Factors = ()
    scaled: Scaled | None = None

    def from_output(self, factor: Factor) -> Factor:
        """A factor of the output as one of this operand: constant along what is contracted."""
        kept = [axis for axis in self.output if axis >= 0]
        small = _graph.transpose(_only(factor.small, kept), tuple(np.argsort(np.argsort(kept))))
        counts = iter(small.shape)
        shape = tuple(1 if axis < 0 else next(counts) for axis in self.output)
        tiles = tuple(
            max(size, 1) if axis < 0 else factor.tiles[axis]
            for size, axis in zip(self.value.shape, self.output, strict=True)
        )
        return Factor(_graph.reshape(small, shape), tiles)


def _only(small: Value, axes: list[int]) -> Value:
    """The array without the axes (all of size 1) that are not among `axes`."""
    return _graph.reshape(small, tuple(small.shape[axis] for axis in sorted(axes)))


@dataclasses.dataclass(eq=False)
class Seen:
    """The dots of a function, regions included.

    Attributes:
      sites: those that 8-bit data reached, in order.
      others: how many it never did.
      calls: the scaled dots among them as they stand, which are calls of a kernel already.
    """

    sites: list[Site] = dataclasses.field(default_factory=list)
    others: int = 0
    calls: list[Op] = dataclasses.field(default_factory=list)

    def see(self, site: Site) -> None:
        """Note a dot, or count it if it has nothing to do with 8-bit data."""
        if site.concerned:
            self.sites.append(site)
        else:
            self.others += 1


@dataclasses.dataclass(eq=False)
class Site:
    """One dot_general of the function: a row of the report, and a product if one was found.

    Attributes:
      op: the dot as it stands.
      given: the two operands as the dot has them, each with its fact or None.
      lhs, rhs: the sides of the product, once there is one.
      reason, remedy: why there is none; "" while there is one.
      blame: the equation that ended the fact and its callers, where another than the dot did.
      call: the scaled dot that it became, set when the program is resolved.
      quantized: of each operand that the function quantises itself, "one call" or "as written".
    """

    op: Op
    given: tuple[tuple[Value, Any], tuple[Value, Any]]
    lhs: Any = None
    rhs: Any = None
    reason: str = ""
    remedy: str = ""
    blame: Any = None
    call: Any = None
    quantized: list[str] = dataclasses.field(default_factory=lambda: ["", ""])

    @property
    def out(self) -> Value:
        """The output of the dot."""
        return self.op.outputs[0]

    @property
    def out_shape(self) -> Shape:
        """Shape of the output of the dot."""
        return self.op.outputs[0].shape

    @property
    def precision(self) -> str:
        """`default` or `highest`."""
        return _precision.asked(self.op.params.get("precision"))

    @property
    def concerned(self) -> bool:
        """Whether 8-bit data was ever under one of the operands, and they are not empty."""
        is_empty = any(value.size == 0 for value, _ in self.given)
        return not is_empty and any(fact is not None for _, fact in self.given)

    def side_of(self, factor: Factor) -> str | None:
        """The side whose axes hold all along which an output factor varies; None if neither."""
        varying = set(factor.varying())
        if not varying:
            return "rhs" if self.rhs.scaled is not None else "lhs"
        for name, side in (("rhs", self.rhs), ("lhs", self.lhs)):
            if varying <= set(side.output):
                return name
        return None

    def too_fine(self, lhs: Factors, rhs: Factors) -> bool:
        """Whether further scales of the sides would make either as fine as its data."""
        return _grows_too_fine(self.lhs, lhs) or _grows_too_fine(self.rhs, rhs)

    def miss(self, reason: str, remedy: str, blame: Any = None) -> None:
        """Record why this dot stays as it is."""
        self.reason, self.remedy, self.blame = reason, remedy, blame


def dot_general(walk: Walk, op: Op) -> Product | None:
    """A product, if an operand is dequantised 8-bit data and nothing stands against it."""
    lhs, rhs = [(value, walk.scaled(value) or walk.lost(value)) for value in op.inputs]
    site = Site(op, (lhs, rhs))
    walk.see(site)
    if not site.concerned:
        return None
    objection = _lost(site) or _arrange(walk, site)
    if objection is not None:
        site.miss(*objection)
        return None
    return Product(site, site.out)


# Why a dot is not a product, what to change, and the equation to blame (with its callers) where it
# is another.
Objection = tuple[str, str, Any]


def _objection(reason: str, remedy: str, blame: Any = None) -> Objection:
    return reason, remedy, blame


def _lost(site: Site) -> Objection | None:
    """The 8-bit data of both operands was lost on the way, or was in one and was lost there."""
    facts = [fact for _, fact in site.given]
    if any(isinstance(fact, Scaled) for fact in facts):
        return None
    lost = next(fact for fact in facts if isinstance(fact, Lost))
    return _objection(lost.reason, lost.remedy, (lost.eqn, lost.callers))


def _arrange(walk: Walk, site: Site) -> Objection | None:
    """Give the site its two sides: 8-bit data where there is some, else float values."""
    lhs, rhs = [_scaled_side(walk, site, i) or _float_side(walk, site, i) for i in (0, 1)]
    if lhs is None or rhs is None:
        value, _ = site.given[0 if lhs is None else 1]
        return _objection(
            f"the other operand is {value.dtype}, not 8-bit, float32, bfloat16 or float16",
            "convert it to float32 or bfloat16",
        )
    first, second = _shared(lhs, rhs)
    lhs = _float_side(walk, site, 0) if saves_nothing(first) else first
    rhs = _float_side(walk, site, 1) if saves_nothing(second) else second
    if first.scaled is None and second.scaled is None:
        return _objection(
            "zeros were put over dequantised values whose scale is differentiated",
            "put the zeros over the 8-bit array, before dequantising",
        )
    if lhs is None or rhs is None or (lhs.scaled is None and rhs.scaled is None):
        return _objection(
            f"the scale of {_finest(first, second)} varies with every element of it, or nearly",
            "scale by rows, columns or blocks; a scale for each element saves nothing",
        )
    site.lhs, site.rhs = _peel(lhs), _peel(rhs)
    return _against(site, site.lhs, site.rhs)


def _finest(lhs: Side, rhs: Side) -> str:
    """The operand whose scales are as fine as its data, in words."""
    name, side = ("left", lhs) if saves_nothing(lhs) else ("right", rhs)
    return f"the {name} operand, {side.dtype}{list(side.value.shape)},"


def _scaled_side(walk: Walk, site: Site, index: int) -> Side | None:
    """The side made of the 8-bit data behind an operand."""
    fact = site.given[index][1]
    if not isinstance(fact, Scaled):
        return None
    numbers = site.op.params["dimension_numbers"]
    contracting, batch = (tuple(map(int, d[index])) for d in numbers)
    settled = _masks.settle(fact.factors, fact.q.shape, contracting, walk.linear)
    if settled is None:
        return None
    return Side(
        fact.q,
        fact.dtype,
        contracting,
        batch,
        _output_axes(site, index),
        fact.zero_point,
        settled.scales,
        dataclasses.replace(fact, guards=fact.guards + settled.guards),
    )


def _float_side(walk: Walk, site: Site, index: int) -> Side | None:
    """The side made of the float values of an operand, or None if they are of another dtype."""
    value = site.given[index][0]
    if value.dtype not in _dtypes.WIDE_FLOAT:
        return None
    source = _exact_source(walk, value)
    numbers = site.op.params["dimension_numbers"]
    contracting, batch = (tuple(map(int, d[index])) for d in numbers)
    return Side(source, source.dtype, contracting, batch, _output_axes(site, index))


def _shared(lhs: Side, rhs: Side) -> tuple[Side, Side]:
    """The sides with scales along the contracted axes handed over where that keeps both small.

    A scale by row and a scale by column of one operand are as many numbers together as it has;
    but what varies along contracted axes only may as well scale the other operand.
    """
    if is_elementwise(rhs):
        rhs, lhs = _hand_over(rhs, lhs)
    if is_elementwise(lhs):
        lhs, rhs = _hand_over(lhs, rhs)
    return lhs, rhs


def _hand_over(giver: Side, taker: Side) -> tuple[Side, Side]:
    contracted = set(giver.contracting)
    moving = [f for f in giver.factors if f.varying() and set(f.varying()) <= contracted]
    staying = tuple(f for f in giver.factors if f not in moving)
    moved = tuple(_across(f, giver, taker) for f in moving)
    after = (
        dataclasses.replace(giver, factors=staying),
        dataclasses.replace(taker, factors=taker.factors + moved),
    )
    return after if not any(map(is_elementwise, after)) else (giver, taker)


def _across(factor: Factor, giver: Side, taker: Side) -> Factor:
    """A factor along contracted axes of one side as one along those of the other."""
    shape, order = taker.value.shape, np.argsort(taker.contracting)
    axes = [giver.contracting[i] for i in order]
    kept = _graph.reshape(factor.small, tuple(factor.small.shape[a] for a in sorted(axes)))
    moved = _graph.transpose(kept, tuple(int(i) for i in np.argsort(np.argsort(axes))))
    tiles, counts = list(full_tiles(shape)), [1] * len(shape)
    for axis, source in zip(sorted(taker.contracting), axes, strict=True):
        tiles[axis], counts[axis] = factor.tiles[source], factor.small.shape[source]
    return Factor(_graph.reshape(moved, tuple(counts)), tuple(tiles))


def is_elementwise(side: Side, more: Factors = ()) -> bool:
    """Whether scales vary along all that is contracted, element by element, and along a free axis.

    Those of rows and of columns, say: few numbers as two factors, as many as the data as one.
    """
    tiles = _common_tiles(side, more)
    fine = [axis for axis, size in enumerate(side.value.shape) if size > 1 == tiles[axis]]
    free = [a for a in fine if a not in side.contracting and a not in side.batch]
    summed = [a for a in side.contracting if side.value.shape[a] > 1]
    return bool(free) and bool(summed) and all(axis in fine for axis in summed)


def saves_nothing(side: Side, more: Factors = ()) -> bool:
    """Whether such scales, in float32, take more memory than the data."""
    counts = tile_counts(side.value.shape, _common_tiles(side, more))
    return is_elementwise(side, more) and 4 * math.prod(counts) > side.value.size


def _grows_too_fine(side: Side, more: Factors) -> bool:
    return saves_nothing(side, more) or is_elementwise(side, more) > is_elementwise(side)


def _common_tiles(side: Side, more: Factors) -> Shape:
    return _tiles.common(side.value.shape, [f.tiles for f in side.factors + more])


def _output_axes(site: Site, index: int) -> Shape:
    """For each axis of an operand the axis of the output, or -1."""
    (contracting, batch) = site.op.params["dimension_numbers"]
    rank = len(site.op.inputs[index].shape)
    lhs_rank = len(site.op.inputs[0].shape)
    start = len(batch[0])
    if index == 1:
        start = lhs_rank - len(contracting[0])
    out = [-1] * rank
    for position, axis in enumerate(batch[index]):
        out[axis] = position
    free = [a for a in range(rank) if a not in batch[index] and a not in contracting[index]]
    for position, axis in enumerate(free):
        out[axis] = start + position
    return tuple(out)


def _exact_source(walk: Walk, value: Value) -> Value:
    """The 16-bit array that a float32 operand was converted from, which holds the same numbers."""
    op = _graph.producer(value, "convert_element_type")
    if op is None or value.dtype != np.float32:
        return value
    source = op.inputs[0]
    return source if source.dtype in _dtypes.WIDE_FLOAT else value


def _peel(side: Side) -> Side:
    """The side with transposes folded into its axes, where the free ones keep their order."""
    while (op := _graph.producer(side.value, "transpose")) is not None:
        moved = _transposed(side, op.inputs[0], tuple(int(a) for a in op.params["permutation"]))
        if not _in_order(moved):
            return side
        side = moved
    return side


def _transposed(side: Side, source: Value, permutation: Shape) -> Side:
    """The side on the array before a transpose, whose axis permutation[i] is the value's axis i."""
    inverse = tuple(int(axis) for axis in np.argsort(permutation))

    def move(factor: Factor) -> Factor:
        return Factor(
            _graph.transpose(factor.small, inverse), _tiles.transpose(factor.tiles, inverse)
        )

    return dataclasses.replace(
        side,
        value=source,
        contracting=tuple(permutation[a] for a in side.contracting),
        batch=tuple(permutation[a] for a in side.batch),
        output=tuple(side.output[a] for a in inverse),
        zero_point=move(side.zero_point) if side.zero_point is not None else None,
        factors=tuple(move(f) for f in side.factors),
    )


def _in_order(side: Side) -> bool:
    """Whether free axes stand in the order of the output's."""
    free = [axis for i, axis in enumerate(side.output) if axis >= 0 and i not in side.batch]
    return free == sorted(free)


def _against(site: Site, lhs: Side, rhs: Side) -> Objection | None:
    """What stands against a product of two sides."""
    out, params = site.out, site.op.params
    if _splits(params.get("out_sharding")):
        return _objection("the dot states an output sharding", "leave out_sharding unset")
    if (reason := _precision.why_not(params.get("precision"))) is not None:
        return _objection(reason, "use an algorithm that sums in float32, DEFAULT or HIGHEST")
    if out.dtype == _dtypes.INT32:
        return _against_integers(lhs, rhs)
    if out.dtype not in _dtypes.WIDE_FLOAT + _dtypes.FLOAT8:
        return _objection(
            f"the output dtype is {out.dtype}",
            "set preferred_element_type to float32, bfloat16 or int32",
        )
    return None


def _splits(sharding: Any) -> bool:
    """Whether an output sharding names mesh axes; inside shard_map some name none."""
    return sharding is not None and any(part is not None for part in sharding.spec)


def _against_integers(lhs: Side, rhs: Side) -> Objection | None:
    """An int32 product needs 8-bit integers on both sides, and no scale before it."""
    for side in (lhs, rhs):
        if side.scaled is None or side.dtype not in _dtypes.INT8 or side.factors:
            return _objection(
                "the output is int32, but an operand is not 8-bit integers",
                "use int8 or uint8 operands",
            )
    return None


_rules.RULES["dot_general"] = dot_general


def tiles_of(side: Side, factors: Factors) -> Shape:
    """The tiles that the scales and the zero point of a side share."""
    parts = [f.tiles for f in factors]
    if side.zero_point is not None:
        parts.append(side.zero_point.tiles)
    return _tiles.common(side.value.shape, parts) if parts else full_tiles(side.value.shape)
