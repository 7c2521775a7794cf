"""The form in which a scaled dot reaches a GPU: three axes on each side, and strides.

Any scaled dot is a batch of products of two matrices, once its axes are ordered and neighbours of
one kind are merged. This takes transposes, reshapes and repeated scales. XLA does them, outside the
call: it fuses them with the operations that make the operands and moves them out of loops. A
weight that is stored with its contracted axis last needs no transpose.

    lhs  [B or 1, M, K] or [B or 1, K, M]
    rhs  [B or 1, N, K] or [B or 1, K, N]
    out  [B, M, N];  residual, bias, out_scale, amax  [1 or B, 1 or M, 1 or N]

Weights of few rows are read as they are stored, too, where their batch does not come first. It is
two axes where another stands between them, as in a cache [B, T, H, D] with the batch (B, H).

    weights  [B, T, H, D];  the other side  [B, H, M, K];  out  [B, H, M, N]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._call.gpu import asked, layout
from jaxfp8._call.gpu.layout import DEPTH, FREE, Groups, Layout
from jaxfp8._call.reference import dot_reference
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec, Shape

Named = dict[str, jax.Array]

# Up to so many rows, which are one tile or two, weights are read in whatever order their axes are
# stored. With more, each tile reads them again, and paths with larger tiles need the usual order.
_ROWS_IN_PLACE = 64


@dataclasses.dataclass(frozen=True)
class Canonical:
    """A scaled dot in canonical form.

    Attributes:
      spec: the canonical problem.
      operands: brings the operands of the original problem into this form.
      results: brings the outputs of this form back to those of the original.
    """

    spec: ScaledDotSpec
    operands: Callable[[Named], Named]
    results: Callable[[Sequence[jax.Array]], list[jax.Array]]


def is_empty(spec: ScaledDotSpec) -> bool:
    """Whether an axis has size 0: canonical tiles would have no size."""
    return 0 in spec.lhs.shape + spec.rhs.shape


def canonical(spec: ScaledDotSpec, kernel: str = "") -> Canonical:
    """The canonical form of a scaled dot without empty axes.

    Args:
      spec: the scaled dot.
      kernel: the path that is asked for; "" for the best.
    """
    usual = layout.usual(spec)
    form = _form(spec, usual)
    weights = asked.weights_of(form.spec, kernel)
    if weights is None or asked.rows_beside(weights, form.spec) > _ROWS_IN_PLACE:
        return form
    stored = layout.in_place(spec, usual, weights)
    if stored is None:
        return form
    in_place = _form(spec, stored)
    return form if asked.weights_of(in_place.spec, kernel) is None else in_place


def _form(spec: ScaledDotSpec, of: Layout) -> Canonical:
    sides = {
        name: _Side.of(getattr(spec, name), getattr(of, name), of.orders[name])
        for name in layout.SIDES
    }
    planes = _Planes(spec, of.out)
    new = ScaledDotSpec(
        lhs=sides["lhs"].spec,
        rhs=sides["rhs"].spec,
        epilogue=planes.epilogue(),
        precision=spec.precision,
    )

    def operand(name: str, x: jax.Array) -> jax.Array:
        if name in sides:
            return sides[name].values(x)
        side = sides.get(name.partition("_")[0])
        if side is None:
            return planes.plane(x)
        return side.sums(x) if name.endswith("_sums") else side.shared(x)

    return Canonical(
        spec=new,
        operands=lambda named: {name: operand(name, x) for name, x in named.items()},
        results=planes.results,
    )


@dataclasses.dataclass(frozen=True)
class _Side:
    """One side: the order of its axes, and the canonical operand that it becomes."""

    old: OperandSpec
    groups: Groups
    order: Shape  # of the groups
    spec: OperandSpec
    repeated: Shape  # axes along which a scale is repeated for each index

    @classmethod
    def of(cls, old: OperandSpec, groups: Groups, order: Shape) -> _Side:
        batch = range(len(groups[:FREE]))
        tiles = [_tile(old, group) for group in groups]
        if any(tiles[b] != math.prod(old.sizes(groups[b])) for b in batch):
            tiles[:FREE] = [_EACH for b in batch]
        repeated = tuple(a for g, t in zip(groups, tiles, strict=True) if t == _EACH for a in g)
        new = dataclasses.replace(
            old,
            shape=tuple(math.prod(old.sizes(groups[g])) for g in order),
            contracting=(order.index(len(groups) + DEPTH),),
            batch=tuple(order.index(b) for b in batch),
            tiles=tuple(max(tiles[g], 1) for g in order),
        )
        return cls(old, groups, order, new, repeated)

    def values(self, x: jax.Array) -> jax.Array:
        """Values of the original side in canonical form."""
        return self._arranged(x).reshape(self.spec.shape)

    def shared(self, x: jax.Array) -> jax.Array:
        """A scale or zero point of the original side in canonical form."""
        tiles = tuple(t if a in self.repeated else 1 for a, t in enumerate(self.old.tiles))
        shape = tuple(
            size if a in self.repeated else count
            for a, (size, count) in enumerate(zip(self.old.shape, x.shape, strict=True))
        )
        wide = dataclasses.replace(self.old, shape=shape, tiles=tiles)
        x = jnp.broadcast_to(dot_reference.expand_tiles(x, wide), shape)
        return self._arranged(x).reshape(self.spec.scale_shape)

    def sums(self, x: jax.Array) -> jax.Array:
        """Sums of the original side in canonical form."""
        return self._arranged(x).reshape(self.spec.sums_shape)

    def _arranged(self, x: jax.Array) -> jax.Array:
        return _transposed(x, tuple(axis for g in self.order for axis in self.groups[g]))


# No single tile size describes the scales of a group of axes: each index gets its own scale.
_EACH = 0


def _tile(side: OperandSpec, group: Shape) -> int:
    """The size of the tiles of some axes taken as one, or `_EACH`."""
    tile = 1
    whole = True  # all axes behind the current one lie within one tile
    for axis in reversed(group):
        size = side.shape[axis]
        own = min(side.tiles[axis], size)
        if whole:
            tile *= own
            whole = own == size
            regular = own == size or size % own == 0 or axis == group[0]
        else:
            regular = own == 1
        if not regular:
            return _EACH
    return tile


def _transposed(x: jax.Array, order: Shape) -> jax.Array:
    moved = [axis for axis in order if x.shape[axis] != 1]
    if moved == sorted(moved):
        return x.reshape([x.shape[axis] for axis in order])
    return lax.transpose(x, order)


class _Planes:
    """The output and the arrays that broadcast against it."""

    def __init__(self, spec: ScaledDotSpec, groups: Groups):
        self.old = spec
        self.groups = (sum(groups[:FREE], ()), *groups[FREE:])  # the batch is one
        self.order = tuple(axis for group in groups for axis in group)
        self.sizes = tuple(spec.out_shape[axis] for axis in self.order)
        shape = tuple(math.prod(spec.out_shape[a] for a in group) for group in groups)
        self.shapes = (shape[:FREE], shape[FREE:DEPTH], shape[DEPTH:])  # of the groups

    def epilogue(self) -> EpilogueSpec:
        """The canonical epilogue."""
        return self.old.epilogue.map_shapes(self._full_groups)

    def _full_groups(self, shape: Shape) -> Shape:
        """The canonical shape of an array: a group of axes is full unless all its axes are 1."""
        full = (any(shape[a] != 1 for a in group) for group in self.groups)
        pairs = zip(self.shapes, full, strict=True)
        return tuple(size if kept else 1 for sizes, kept in pairs for size in sizes)

    def plane(self, x: jax.Array) -> jax.Array:
        """A residual, bias or output scale in canonical form."""
        full = jnp.broadcast_to(x, self._filled(x.shape))
        return full.transpose(self.order).reshape(self._full_groups(x.shape))

    def _filled(self, shape: Shape) -> Shape:
        """`shape`, full along all axes of a group that is full along one of them."""
        filled = list(shape)
        for group in self.groups:
            if any(shape[axis] != 1 for axis in group):
                for axis in group:
                    filled[axis] = self.old.out_shape[axis]
        return tuple(filled)

    def results(self, outputs: Sequence[jax.Array]) -> list[jax.Array]:
        """The outputs of the original problem from those of the canonical one."""
        back = tuple(self.order.index(axis) for axis in range(len(self.order)))
        out, *amax = outputs
        results = [_transposed(out.reshape(self.sizes), back)]
        if amax:
            results.append(self._amax(amax[0], back))
        return results

    def _amax(self, x: jax.Array, back: Shape) -> jax.Array:
        wanted = self.old.epilogue.amax
        assert wanted is not None
        filled = self._filled(wanted)
        x = _transposed(x.reshape([filled[axis] for axis in self.order]), back)
        axes = tuple(a for a, (f, w) in enumerate(zip(filled, wanted, strict=True)) if f != w)
        return jnp.max(x, axis=axes, keepdims=True) if axes else x
