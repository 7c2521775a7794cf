"""Ragged dots on dequantised data become the ragged dot of the 8-bit data: experts as written.

Two kinds of `jax.lax.ragged_dot_general` have a call: groups of rows, each with a matrix of its
own, and groups along the contracted axis.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfp8._call.library import targets
from jaxfp8._call.ops import ragged_call
from jaxfp8._call.ops.ragged_reference import RaggedSpec
from jaxfp8._rewrite.ir import casts, graph, sides
from jaxfp8._rewrite.ir import precision as _precision
from jaxfp8._rewrite.ir.graph import Array, Value
from jaxfp8._rewrite.ir.scaled import Scaled
from jaxfp8._rewrite.ir.sides import Side, peel
from jaxfp8._rewrite.ir.sites import Captured, DotSite
from jaxfp8._rewrite.plan import calls
from jaxfp8._rewrite.plan.body import Body, Replaced
from jaxfp8._rewrite.rules import masks, unserved
from jaxfp8._value import compat, dtypes
from jaxfp8._value.spec import EpilogueSpec

_NAME = "ragged_dot_general"
_GIVE = "give the 8-bit arrays to `jaxfp8.ragged_dot`, or leave it wide"
_RESHAPE = "reshape operands to [M, K] and [G, K, N], or leave it wide"


class _Miss(NamedTuple):
    """Why there is no call for a ragged dot, and the change to make."""

    reason: str
    remedy: str = _GIVE


def call_ragged_dots(body: Body, replaced: Replaced) -> Replaced:
    """The pass: ragged dots of 8-bit data become calls."""
    if body.compute is not None:
        return replaced
    made: dict[Value, Value] = {}
    for site in body.walk.own:
        if site.op.name == _NAME and site.reason == unserved.NAMES[_NAME][0]:
            call = _call(site)
            if isinstance(call, _Miss):
                site.miss(*call)
            else:
                made[site.op.outputs[0]] = call
                site.reason = site.remedy = ""
    return {**replaced, **made}


def _call(site: DotSite) -> Value | _Miss:
    """The output of a call in place of a ragged dot, or why there is none."""
    lhs, rhs = _side(site, 0), _side(site, 1)
    for side in (lhs, rhs):
        if isinstance(side, _Miss):
            return side
    assert isinstance(lhs, Side) and isinstance(rhs, Side)
    if (miss := _why_not(site)) is not None:
        return miss
    sizes, out = site.op.inputs[2], site.op.outputs[0]
    lhs_spec, lhs_operands = calls.operand("lhs", lhs, in_call=False)
    rhs_spec, rhs_operands = calls.operand("rhs", rhs, in_call=False)
    spec = RaggedSpec(
        lhs=lhs_spec,
        rhs=rhs_spec,
        groups=sizes.shape[0],
        epilogue=EpilogueSpec(out_dtype=out.dtype.name),
        precision=site.precision,
    )
    if (reason := ragged_call.why_not(spec, targets.platform())) is not None:
        return _Miss(reason)
    operands = {**lhs_operands, **rhs_operands, "group_sizes": casts.cast(sizes, np.int32)}
    names, sharding = tuple(operands), compat.spec_of_output(site.op.equation)

    def run(*arrays: Array) -> Array:
        with graph.context_of(site.op.equation, site.op.callers):
            named: dict[str, Any] = dict(zip(names, arrays, strict=True))
            for name, side in (("lhs", lhs_spec), ("rhs", rhs_spec)):
                if dtypes.is_float8(side.dtype) and named[name].dtype == np.uint8:
                    named[name] = jax.lax.bitcast_convert_type(named[name], np.dtype(side.dtype))
            return ragged_call.ragged_dot(spec, named, sharding)

    site.captured = Captured(spec, spec, (lhs, rhs))
    return graph.derived("ragged_dot", run, list(operands.values()), out.shape, out.dtype)


def _why_not(site: DotSite) -> _Miss | None:
    """Why the call cannot compute a ragged dot, whatever its operands."""
    params = site.op.params
    numbers = params["ragged_dot_dimension_numbers"]
    (contracted, batch), groups = numbers.dot_dimension_numbers, numbers.rhs_group_dimensions
    along_k = set(numbers.lhs_ragged_dimensions) <= set(contracted[0])
    if any(batch) or along_k == bool(groups):
        reason = "the call takes groups of rows, or along the contracted axis, without batch axes"
        return _Miss(reason, "take `jax.lax.map` over the batch, or leave it wide")
    ranks = [len(value.shape) for value, _ in site.given]
    if ranks != [2, 2 + len(groups)] or any(len(axes) != 1 for axes in contracted):
        reason = "the call takes one contracted axis, and one other of each operand"
        return _Miss(reason, _RESHAPE)
    if params.get("group_offset") is not None:
        remedy = "slice the groups and their rows first, or leave it wide"
        return _Miss("the call takes no `group_offset`", remedy)
    if site.op.outputs[0].dtype not in dtypes.WIDE_FLOAT:
        return _Miss(f"the output dtype is {site.op.outputs[0].dtype}")
    inexact = _precision.why_not(params.get("precision"))
    return None if inexact is None else _Miss(inexact)


def _side(site: DotSite, index: int) -> Side | _Miss:
    """An operand with its groups as a batch axis, or why it is none of a call."""
    value, fact = site.given[index]
    contracting, groups = site.axes(index)
    rank = len(value.shape)
    output = tuple(-1 if axis in contracting else axis for axis in range(rank))
    if not isinstance(fact, Scaled):
        if value.dtype in dtypes.WIDE_FLOAT:
            return Side(value, value.dtype, contracting, groups, output)
        reason = f"the other operand is {value.dtype}, not 8-bit, float32, bfloat16 or float16"
        return _Miss(reason, "convert it to float32 or bfloat16")
    settled = masks.settle(fact.factors, fact.q.shape, contracting)
    if fact.guards or settled.guards:
        return _Miss("it has zeros whose scale may be infinite")
    side = Side(
        fact.q,
        fact.dtype,
        contracting,
        groups,
        output,
        fact.zero_point,
        settled.scales,
        fact,
    )
    if sides.saves_nothing(side):
        remedy = "scale by rows, columns or blocks; a scale for each element saves nothing"
        return _Miss("its scale varies with every element, or nearly", remedy)
    return peel(side)
