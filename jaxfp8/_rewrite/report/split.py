"""How a scaled dot is split over a mesh, and what it sends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxfp8._call.mesh import explicit, sharded_dot
from jaxfp8._value import dtypes, tables
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec

_KINDS = {"b": "batch", "m": "rows", "n": "columns", "k": "depth"}
_PARTS = {"operand 0": "lhs", "operand 1": "rhs", "result 0": "output", "sums": "sums"}


def told(spec: ScaledDotSpec, eqn: Any) -> str:
    """The split over explicit mesh axes, and the bytes sent here and by a float program; or ""."""
    types = [v.aval for v in (*eqn.invars[:2], eqn.outvars[0])]
    mesh = explicit.mesh_of(types)
    shapes = (spec.lhs.shape, spec.rhs.shape, spec.out_shape)
    if mesh is None or tuple(aval.shape for aval in types) != shapes:
        return ""
    bare = _bare(spec)
    ours = [_of_dtype(a, side.dtype) for a, side in zip(types, (bare.lhs, bare.rhs), strict=False)]
    factors = sharded_dot.factors(bare)
    shards = explicit.choose_shards(mesh, factors, ours, types[2:])
    sent = explicit.bytes_sent(shards, factors, ours, types[2:])
    floats = [_of_dtype(aval, "bfloat16") for aval in types[:2]]
    in_floats = explicit.choose_shards(mesh, factors, floats, types[2:])
    plain = sum(explicit.bytes_sent(in_floats, factors, floats, types[2:]).values())
    return f"{_split(shards.mesh_axes)}; {_sent(sent, plain)}"


def _bare(spec: ScaledDotSpec) -> ScaledDotSpec:
    """The spec of the sum alone, since scales are small."""

    def plain(side: OperandSpec) -> OperandSpec:
        tiles = tuple(max(size, 1) for size in side.shape)
        return dataclasses.replace(side, tiles=tiles, scale=False, zero_point=False)

    epilogue = EpilogueSpec(out_dtype=spec.epilogue.out_dtype)
    lhs, rhs = plain(spec.lhs), plain(spec.rhs)
    return dataclasses.replace(spec, lhs=lhs, rhs=rhs, epilogue=epilogue)


def _of_dtype(aval: Any, dtype: str) -> Any:
    return jax.core.ShapedArray(aval.shape, np.dtype(dtypes.storage(dtype)), sharding=aval.sharding)


def _split(mesh_axes: Mapping[str, tuple[str, ...]]) -> str:
    parts = [
        f"{_KINDS[name[0]]} over {', '.join(axes)}" for name, axes in mesh_axes.items() if axes
    ]
    return "split by " + " and ".join(parts) if parts else "whole on each device"


def _sent(sent: Mapping[str, int], plain: int) -> str:
    if not sent:
        return "sends nothing"
    parts = [f"{_PARTS[name]} ({tables.size(number)})" for name, number in sent.items()]
    return f"sends {', '.join(parts)}; in floats {tables.size(plain)}"
