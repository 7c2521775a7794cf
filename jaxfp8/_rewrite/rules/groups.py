"""Ragged dots with a call: groups of rows, each with a matrix of its own, or groups along K."""

from __future__ import annotations

from jaxfp8._rewrite.ir.scaled import Lost
from jaxfp8._rewrite.ir.sites import DotSite
from jaxfp8._value import dtypes

GIVE = "give the 8-bit arrays to `jaxfp8.ragged_dot`, or leave it wide"


def why_not(site: DotSite) -> Lost | None:
    """Why no call computes a ragged dot, whatever its operands; None for a plain dot."""
    if not site.grouping:
        return None
    params = site.op.params
    numbers = params["ragged_dot_dimension_numbers"]
    (contracted, batch), groups = numbers.dot_dimension_numbers, numbers.rhs_group_dimensions
    if any(batch) or (site.grouping == "contracted") == bool(groups):
        reason = "the call takes groups of rows, or along the contracted axis, without batch axes"
        return Lost(None, reason, "take `jax.lax.map` over the batch, or leave it wide")
    ranks = [len(value.shape) for value, _ in site.given]
    if ranks != [2, 2 + len(groups)] or any(len(axes) != 1 for axes in contracted):
        reason = "the call takes one contracted axis, and one other of each operand"
        return Lost(None, reason, "reshape operands to [M, K] and [G, K, N], or leave it wide")
    if params.get("group_offset") is not None:
        remedy = "slice the groups and their rows first, or leave it wide"
        return Lost(None, "the call takes no `group_offset`", remedy)
    out = site.op.outputs[0].dtype
    if out not in dtypes.WIDE_FLOAT + dtypes.FLOAT8:
        return Lost(None, f"the output dtype is {out}", GIVE)
    return None
