"""A launch of several calls on a GPU: what the calls share, and its op."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from jaxfp8._call.ops import joint
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.graph import Array, Op, Value
from jaxfp8._rewrite.ir.numbering import Numbering
from jaxfp8._rewrite.ir.sites import DotSite
from jaxfp8._rewrite.plan import row_scales


@dataclasses.dataclass(frozen=True)
class Shared:
    """The common part of calls in one launch.

    Attributes:
      key: equal for calls that may share a launch.
      others: the operands of the call itself.
    """

    key: Hashable
    others: tuple[Value, ...]


def shared(op: Op, inputs: Sequence[Value], number: Numbering) -> Shared | None:
    """What a call shares with possible partners; None if it joins none.

    Args:
      op: of the program.
      inputs: its inputs, after replacements.
      number: numbers scales: each product has a view of its own of the scale of its rows.
    """
    found = joint.what_is_shared(op.params["spec"]) if op.params.get("joins") else None
    if found is None:
        return None
    name, alike = found
    given = dict(zip(op.params["names"], inputs, strict=True))
    x, scale = given.pop(name), given.pop(f"{name}_scale", None)
    of_scale = None if scale is None else number(row_scales.before_reshapes(scale))
    return Shared((x, of_scale, alike), tuple(given.values()))


def op_of(ops: Sequence[Op], multiplied: str = "") -> Op:
    """The op of one launch for some calls, as `joint.joint_dots` has it."""
    specs = [op.params["spec"] for op in ops]
    names = [op.params["names"] for op in ops]
    first: Op = ops[0].params["dot"]

    def run(*arrays: Array) -> Sequence[Array]:
        left = iter(arrays)
        operands = [dict(zip(own, left)) for own in names]  # noqa: B905
        with graph.context_of(first.equation, first.callers):
            return joint.joint_dots(specs, operands, multiplied)

    inputs = tuple(value for op in ops for value in op.inputs)
    joined = Op("joint_dots", inputs, run, {})
    outs = [op.outputs[0] for op in ops[: 1 if multiplied else len(ops)]]
    types = [(out.shape, np.dtype(multiplied or out.dtype)) for out in outs]
    joined.outputs = tuple(Value(*one, joined, i) for i, one in enumerate(types))
    return joined


def note(sites: Iterable[DotSite], ops: Sequence[Op], *, multiplied: bool = False) -> None:
    """Say in the dots of some calls what their launch is."""
    dots = [op.params["dot"] for op in ops]
    for site in sites:
        if site.op in dots:
            site.joined, site.multiplied = len(ops), multiplied
