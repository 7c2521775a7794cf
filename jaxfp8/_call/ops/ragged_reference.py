"""The definition of a ragged dot by scaled dots: one for each group, with all rows or all of K."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._call.ops.dot import scaled_dot
from jaxfp8._call.reference import dot_reference
from jaxfp8._value import compat, dtypes
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec, Shape, array
from jaxfp8._value.tiles import repeated

_FACTORS = ("scale", "zero_point")


Grouping = Literal["rows", "masked", "contracted"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedSpec:
    """Products of groups; axes are those of the stored arrays.

    Attributes:
      lhs: with one contracting and one free axis, and the groups as its batch axis if masked.
      rhs: with one contracting and one free axis, and the groups as its batch axis unless they
        divide the contracting one.
      groups: number of groups (G).
      epilogue: with shapes [G or 1, M or 1, N or 1] for any grouping. A bias has one row for each
        group. Groups along the contracted axis have an output dtype alone, a wide float.
      gated: whether the output is `activation(first half of columns) * second half`.
      weighted: whether each row is multiplied by a weight, before amax and the output scale.
      precision: as in `ScaledDotSpec`.
    """

    lhs: OperandSpec
    rhs: OperandSpec
    groups: int
    epilogue: EpilogueSpec
    gated: bool = False
    weighted: bool = False
    precision: str = "default"

    @property
    def grouping(self) -> Grouping:
        """The axis divided into groups.

        "rows": the rows of lhs. "masked": lhs has rows for each group; only the first ones count.
        "contracted": the contracted axis of both sides.
        """
        if not self.rhs.batch:
            return "contracted"
        return "masked" if self.lhs.batch else "rows"

    @property
    def rows(self) -> int:
        """Rows of lhs (M), per group if masked."""
        return self.lhs.shape[self.lhs.free[0]]

    @property
    def columns(self) -> int:
        """Columns of the output (N)."""
        return self.rhs.shape[self.rhs.free[0]]

    @property
    def out_dtype(self) -> str:
        """Logical dtype of the output."""
        return self.epilogue.out_dtype

    @property
    def is_plain(self) -> bool:
        """Whether the output is the sum, rounded."""
        plain = EpilogueSpec(out_dtype=self.out_dtype)
        return not (self.gated or self.weighted) and self.epilogue == plain

    @property
    def plain(self) -> RaggedSpec:
        """The same without its epilogue, in float32."""
        plain = EpilogueSpec(out_dtype="float32")
        return dataclasses.replace(self, epilogue=plain, gated=False, weighted=False)

    @property
    def out_shape(self) -> Shape:
        """[M, N], or [G, M, N]; half the columns if gated."""
        columns = self.columns // 2 if self.gated else self.columns
        return (*self.row_shape, columns)

    @property
    def row_shape(self) -> Shape:
        """[M], or [G, M]."""
        return (self.rows,) if self.grouping == "rows" else (self.groups, self.rows)

    @property
    def plane_shapes(self) -> dict[str, Shape]:
        """Shapes of the epilogue's operands, in order."""
        given = {name: getattr(self.epilogue, name) for name in ("residual", "bias", "out_scale")}
        given["row_weights"] = self.row_shape if self.weighted else None
        return {name: shape for name, shape in given.items() if shape is not None}

    def operand_names(self) -> tuple[str, ...]:
        """The operands of the primitive, in order."""
        sides = (("lhs", self.lhs), ("rhs", self.rhs))
        given = [f"{n}_{f}" for n, side in sides for f in _FACTORS if getattr(side, f)]
        return ("lhs", "rhs", "group_sizes", *given, *self.plane_shapes)

    def told(self, x: Any = None) -> str:
        """The product in words, for messages; the arrays are those of the spec, not `x`."""
        del x
        return f"the ragged dot of {array(self.lhs)} and {array(self.rhs)}"

    def __str__(self) -> str:
        """Such as `(float8_e4m3fn[8,4] . float8_e4m3fn[2,4,6] in 2 groups > bfloat16)`."""
        more = " gated" * self.gated + " weighted" * self.weighted
        return f"({self.lhs} . {self.rhs} in {self.groups} groups{more} {self.epilogue})"


def ragged_dot(*operands: jax.Array, spec: RaggedSpec) -> jax.Array:
    """The ragged dot of `spec`, by scaled dots.

    Args:
      *operands: as `spec.operand_names()` lists them.
      spec: the problem, without an epilogue.
    """
    named: dict[str, Any] = dict(zip(spec.operand_names(), operands, strict=True))
    sizes = named.pop("group_sizes")
    define = {"rows": _group_by_group, "masked": _masked, "contracted": _contracted}
    return define[spec.grouping](named, sizes, spec)


def dot_of_group(spec: RaggedSpec) -> ScaledDotSpec:
    """The scaled dot of one group, with all rows or all of K; of all groups if masked."""
    rhs = _one_of(spec.rhs) if spec.grouping == "rows" else spec.rhs
    plain = spec.epilogue if spec.is_plain else spec.plain.epilogue
    return ScaledDotSpec(lhs=spec.lhs, rhs=rhs, epilogue=plain, precision=spec.precision)


def _masked(named: dict[str, Any], sizes: jax.Array, spec: RaggedSpec) -> jax.Array:
    inside = jnp.arange(spec.rows) < sizes[:, None]
    y = scaled_dot(dot_of_group(spec), **{**named, **_of_rows(named, inside, spec.lhs)})[0]
    return jnp.where(inside[..., None], y, jnp.zeros_like(y))


def _group_by_group(named: dict[str, Any], sizes: jax.Array, spec: RaggedSpec) -> jax.Array:
    group_of_row = group_of_rows(sizes, spec.rows)
    of_lhs: dict[str, Any] = {name: x for name, x in named.items() if name.startswith("lhs")}
    of_rhs = {name: x for name, x in named.items() if name.startswith("rhs")}
    if dtypes.is_float8(of_rhs["rhs"].dtype):  # XLA:CPU slices FP8 in float16
        of_rhs["rhs"] = lax.bitcast_convert_type(of_rhs["rhs"], np.uint8)
    (axis,) = spec.rhs.batch
    stacked = {n: jnp.moveaxis(for_each(x, spec.rhs), axis, 0) for n, x in of_rhs.items()}
    dot = dot_of_group(spec)

    def add(out: jax.Array, group: tuple[jax.Array, dict[str, Any]]) -> tuple[Any, None]:
        index, own = group
        inside = group_of_row == index
        y = scaled_dot(dot, **_of_rows(of_lhs, inside, spec.lhs), **own)[0]
        return jnp.where(inside[:, None], y, out), None

    avals = [jax.typeof(x) for x in (*named.values(), sizes)]
    zeros = compat.zeros(compat.output_aval(avals, spec.out_shape, np.dtype(spec.out_dtype)))
    groups = jnp.arange(spec.groups, dtype=jnp.int32)
    return lax.scan(add, zeros, (groups, stacked))[0]


def _contracted(named: dict[str, Any], sizes: jax.Array, spec: RaggedSpec) -> jax.Array:
    ends = group_ends(sizes, spec.lhs.depth)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    dot = dot_of_group(spec)

    def multiply(_: None, group: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        start, end = group
        lhs = _within(start, end, named, "lhs", spec.lhs)
        rhs = _within(start, end, named, "rhs", spec.rhs)
        y = scaled_dot(dot, **{**named, **lhs, **rhs})[0]
        return None, jnp.where(start < end, y, jnp.zeros_like(y))

    return lax.scan(multiply, None, (starts, ends))[1]


def _within(
    start: jax.Array, end: jax.Array, named: dict[str, Any], name: str, side: OperandSpec
) -> dict[str, Any]:
    """Values and scales of a side from `start` to `end` along K; elsewhere zeros and ones.

    Other groups may hold NaN, and NaN times zero is NaN. Both sides are therefore masked. The code
    of zero is the zero point.
    """
    (axis,) = side.contracting
    others = tuple(i for i in range(len(side.shape)) if i != axis)

    def kept(x: jax.Array, tile: int, other: Any) -> jax.Array:
        first = jnp.arange(x.shape[axis], dtype=jnp.int32) * tile
        inside = (first > start - tile) & (first < end)
        return jnp.where(jnp.expand_dims(inside, others), x, jnp.asarray(other, x.dtype))

    values, zero = named[name], named.get(f"{name}_zero_point", 0)
    if dtypes.is_float8(values.dtype):  # XLA:CPU selects FP8 in float16
        values = lax.bitcast_convert_type(values, np.uint8)
    if side.zero_point:
        zero = dot_reference.expand_tiles(zero, side)
    own = {name: kept(values, 1, zero)}
    if side.scale:
        own[f"{name}_scale"] = kept(named[f"{name}_scale"], side.tiles[axis], 1)
    return own


def _of_rows(named: dict[str, Any], inside: jax.Array, side: OperandSpec) -> dict[str, Any]:
    """Values and scales of lhs in the rows inside; elsewhere zeros and ones.

    Rows of no group may hold anything. In derivatives their cotangents are zeros, and zero times
    NaN is NaN.
    """
    axes = (*side.batch, *side.free)
    if axes != tuple(sorted(axes)):
        inside = inside.T
    kept = jnp.expand_dims(inside, side.contracting)
    others = {"lhs": 0, "lhs_scale": 1}
    return named | {
        name: jnp.where(kept, x, jnp.full((), others[name], x.dtype))
        for name, x in named.items()
        if name in others and all(x.shape[axis] == side.shape[axis] for axis in axes)
    }


def group_ends(sizes: jax.Array, rows: int) -> jax.Array:
    """The row after the last of each group. Sizes below 0 count as 0; excess is cut off."""

    def add(x: jax.Array, y: jax.Array) -> jax.Array:
        return x + jnp.minimum(y, rows - x)

    clipped = jnp.clip(sizes, 0, rows)
    return lax.associative_scan(add, clipped) if clipped.size else clipped


def group_of_rows(sizes: jax.Array, rows: int) -> jax.Array:
    """The group of each row; the number of groups for rows of none."""
    return jnp.searchsorted(group_ends(sizes, rows), jnp.arange(rows), "right")


def for_each(x: jax.Array, side: OperandSpec) -> jax.Array:
    """Values, or a factor of them, with an entry for each group."""
    (axis,) = side.batch
    size = side.shape[axis]
    if x.shape[axis] == size:
        return x
    if x.shape[axis] == 1:
        return jnp.broadcast_to(x, (*x.shape[:axis], size, *x.shape[axis + 1 :]))
    return repeated(x, axis, side.tiles[axis], size)


def _one_of(side: OperandSpec) -> OperandSpec:
    """A side without its axis of groups."""
    (axis,) = side.batch

    def without(axes: Shape) -> Shape:
        return tuple(each - (each > axis) for each in axes)

    return dataclasses.replace(
        side,
        shape=side.shape[:axis] + side.shape[axis + 1 :],
        tiles=side.tiles[:axis] + side.tiles[axis + 1 :],
        contracting=without(side.contracting),
        batch=(),
    )
