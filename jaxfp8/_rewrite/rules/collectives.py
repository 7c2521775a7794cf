"""Collectives on dequantized values, inside shard_map: devices send bytes, and their scales.

Scales from several devices are concatenated. A scale constant on each device then has one tile per
device. A number in the code is the same on all devices.
"""

from __future__ import annotations

import math

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.factors import Factor, fill, refine
from jaxfp8._rewrite.ir.facts import Fact
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.rules.registry import lost, rule
from jaxfp8._rewrite.rules.views import MoveFactor, moved
from jaxfp8._value.spec import Shape, tile_counts

NAMES = ("all_gather", "ppermute", "all_to_all")


def _sent(walk: Context, op: Op, move: MoveFactor) -> Fact | None:
    """The fact about the result: bytes by the same collective, factors by `move`.

    A fact with guards is lost. Devices may disagree about a guard. Some would then run the call and
    others the function as written, and the collective would deadlock.
    """
    fact = walk.dequantized(op.inputs[0])
    if fact is not None and any(guard.literal is None for guard in fact.guards):
        return lost(
            op,
            "sends values to other devices whose zero point is known only when the program runs",
            "send the 8-bit array, or keep the zero point in int8 or uint8",
        )

    def unless_number(op: Op, factor: Factor) -> Factor | None:
        """A number in the code is a number of the result, too."""
        if factor.small.literal is not None and factor.small.size == 1:
            return Factor(graph.reshape(factor.small, ()), ()).at(op.outputs[0].shape)
        return move(op, factor)

    return moved(walk, op, unless_number)


@rule("all_gather")
def all_gather(walk: Context, op: Op) -> Fact | None:
    """The shards of all devices, side by side along an axis or along a new one."""
    return _sent(walk, op, _all_gather_factor)


def _all_gather_factor(op: Op, factor: Factor) -> Factor | None:
    axis, devices = op.params["all_gather_dimension"], op.params["axis_size"]
    counts, tiles = list(factor.small.shape), list(factor.tiles)
    if op.params["tiled"]:
        if op.inputs[0].shape[axis] % tiles[axis]:
            return None
        counts[axis] *= devices
    else:
        counts.insert(axis, devices)
        tiles.insert(axis, 1)
    small = graph.replay(op, [factor.small], tuple(counts), factor.small.dtype)
    return Factor(small, tuple(tiles))


@rule("ppermute")
def permute(walk: Context, op: Op) -> Fact | None:
    """The shard of another device; a device without a sender gets zero bytes and zero scales."""
    fact = walk.dequantized(op.inputs[0])
    zero = fact.zero_point if fact is not None else None
    if zero is not None and zero.small.literal is not None:
        return lost(op, "gives zeros where a zero point is meant", "send the 8-bit array instead")
    return _sent(walk, op, _permute_factor)


def _permute_factor(op: Op, factor: Factor) -> Factor:
    small = graph.replay(op, [factor.small], factor.small.shape, factor.small.dtype)
    return Factor(small, factor.tiles)


@rule("all_to_all")
def all_to_all(walk: Context, op: Op) -> Fact | None:
    """Pieces along one axis of each shard, side by side along another axis."""
    if not op.params["tiled"]:
        return lost(op, "sends one entry of an axis to each device", "exchange with `tiled=True`")
    return _sent(walk, op, _all_to_all_factor)


def _devices(op: Op) -> int:
    """How many devices take part in an exchange."""
    split, joined = op.params["split_axis"], op.params["concat_axis"]
    if op.params["axis_index_groups"] is not None:
        return len(op.params["axis_index_groups"][0])
    if split != joined:
        return op.inputs[0].shape[split] // op.outputs[0].shape[split]
    meshes = [eqn.params["mesh"] for eqn in op.callers if "mesh" in eqn.params]
    name = op.params["axis_name"]
    names = name if isinstance(name, tuple) else (name,)
    return math.prod(meshes[-1].shape[n] for n in names)


def _all_to_all_factor(op: Op, factor: Factor) -> Factor | None:
    """The scales are sent with at least one entry for each piece."""
    split, joined, devices = op.params["split_axis"], op.params["concat_axis"], _devices(op)
    shape = op.inputs[0].shape
    piece = shape[split] // devices
    tiles = list(factor.tiles)
    if tiles[split] > piece:
        if tiles[split] < shape[split]:
            return None
        tiles[split] = piece
    if piece % tiles[split] or shape[joined] % tiles[joined]:
        return None
    sent = _pieces(factor, shape, tuple(tiles), split)
    counts = list(sent.shape)
    counts[split] //= devices
    counts[joined] *= devices
    small = graph.replay(op, [sent], tuple(counts), sent.dtype)
    return Factor(small, tuple(tiles))


def _pieces(factor: Factor, shape: Shape, tiles: Shape, axis: int) -> Value:
    """The small array with an entry for each tile along `axis`."""
    small = refine(factor, shape, tiles)
    counts = list(small.shape)
    counts[axis] = tile_counts(shape, tiles)[axis]
    return fill(small, tuple(counts))
