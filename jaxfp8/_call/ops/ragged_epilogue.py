"""The epilogue of a ragged dot by XLA, behind its sums.

It is the definition. It also serves wherever the library has no epilogue in groups: on meshes, for
gates, and where no kernel takes the groups. Weights of rows right behind the sums are a scale of
the rows, and need no epilogue.

    z = sum + residual + bias of its group
    y = activation(z), or activation(z[:, :N / 2]) * z[:, N / 2:] if gated;  times the row's weight

A row of no group has a sum of 0, and no bias.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxfp8._call.mesh import explicit
from jaxfp8._call.ops.ragged_reference import RaggedSpec, group_of_rows
from jaxfp8._call.reference import dot_reference
from jaxfp8._value import compat
from jaxfp8._value.spec import OperandSpec
from jaxfp8._value.tiles import repeated


def finish(sums: jax.Array, named: dict[str, Any], spec: RaggedSpec) -> list[jax.Array]:
    """The results of a ragged dot: `[out]` or `[out, amax]`.

    Args:
      sums: of `spec.plain`, float32.
      named: operands of `spec` by name.
      spec: the problem.
    """
    if spec.gated:
        sums = _of_whole_rows(sums)
    if "residual" in named:
        sums = sums + compat.laid_along(_plane(named["residual"], spec), sums)
    if "bias" in named:
        sums = sums + _bias(named["bias"], named["group_sizes"], spec, sums)
    y = _activated(sums, spec)
    if "row_weights" in named:
        weights = named["row_weights"].astype(jnp.float32)[..., None]
        y = y * compat.laid_along(weights, y)
    amax = [] if spec.epilogue.amax is None else [jnp.max(jnp.abs(y), initial=0).reshape(1, 1, 1)]
    if "out_scale" in named:
        y = y / compat.laid_along(_plane(named["out_scale"], spec), y)
    return [dot_reference.cast_output(y, spec.out_dtype), *amax]


def _activated(sums: jax.Array, spec: RaggedSpec) -> jax.Array:
    activate = dot_reference.ACTIVATIONS[spec.epilogue.activation]
    if not spec.gated:
        return activate(sums)
    gate, up = jnp.split(sums, 2, -1)
    return activate(gate) * up


def _plane(x: jax.Array, spec: RaggedSpec) -> jax.Array:
    """A plane at the rank of the output, in float32."""
    return (x[0] if spec.grouping == "rows" else x).astype(jnp.float32)


def _of_whole_rows(x: jax.Array) -> jax.Array:
    """The array with its columns unsplit along explicit mesh axes."""
    if not explicit.splits(jax.typeof(x))[-1]:
        return x
    return jax.reshard(x, PartitionSpec(*jax.typeof(x).sharding.spec[:-1], None))


def _bias(bias: jax.Array, sizes: jax.Array, spec: RaggedSpec, like: jax.Array) -> jax.Array:
    """The bias of each row's group; 0 for rows of no group."""
    wide = bias.astype(jnp.float32)
    if spec.grouping == "masked":
        inside = jnp.arange(spec.rows) < sizes[:, None]
        return jnp.where(inside[..., None], compat.laid_along(wide, like), 0)
    split = jax.typeof(like).sharding if explicit.mesh_of([jax.typeof(like)]) else None
    if split is not None:
        wide = jax.reshard(wide, PartitionSpec())
    return compat.laid_along(rows_of(wide[:, 0], sizes, spec.rows, _rows(split)), like)


def rows_of(values: jax.Array, sizes: jax.Array, rows: int, out_sharding: Any = None) -> jax.Array:
    """For each row the values [G, N] of its group; 0 for rows of none."""
    group = group_of_rows(sizes, rows)
    if not values.shape[0]:  # a gather needs a row to point at
        values = jnp.pad(values, ((0, 1), (0, 0)))
    return values.at[group].get(mode="fill", fill_value=0, out_sharding=out_sharding)


def _rows(split: Any) -> Any:
    """Rows split like those of the output, each of them whole."""
    return None if split is None else split.update(spec=PartitionSpec(split.spec[0], None))


def are_weights_scales(spec: RaggedSpec) -> bool:
    """Whether weights of rows follow the sums at once, and so are scales of the rows of lhs."""
    epilogue = spec.epilogue
    is_first = epilogue.bias is None and epilogue.residual is None
    return is_first and epilogue.activation == "none" and not spec.gated


def with_weights_as_scales(
    named: dict[str, Any], spec: RaggedSpec
) -> tuple[dict[str, Any], RaggedSpec]:
    """The operands and the problem with weights of rows in the scale of lhs."""
    rest, side = dict(named), spec.lhs
    weights, axes = rest.pop("row_weights").astype(jnp.float32), (*side.batch, *side.free)
    if axes != tuple(sorted(axes)):
        weights = weights.T
    scale = jnp.expand_dims(weights, side.contracting)
    for name in ("lhs_scale", "lhs_zero_point"):
        if name in rest:
            rest[name] = _of_each_row(rest[name], side)
    if side.scale:
        scale = rest["lhs_scale"].astype(jnp.float32) * scale
    (along,) = side.contracting
    tiles = [1] * len(side.shape)
    tiles[along] = side.tiles[along] if side.scale or side.zero_point else side.depth
    if side.zero_point and not side.scale:
        scale = jnp.broadcast_to(scale, rest["lhs_zero_point"].shape)
    lhs = dataclasses.replace(side, scale=True, tiles=tuple(tiles))
    return {**rest, "lhs_scale": scale}, dataclasses.replace(spec, lhs=lhs, weighted=False)


def _of_each_row(factor: jax.Array, side: OperandSpec) -> jax.Array:
    """A factor of lhs with an entry for each row of each group."""
    for axis in (*side.batch, *side.free):
        if factor.shape[axis] != side.shape[axis]:
            factor = repeated(factor, axis, side.tiles[axis], side.shape[axis])
    return factor
