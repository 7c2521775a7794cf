"""Convolutions, which no kernel computes; and the sizes of all products."""

from __future__ import annotations

import math

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir.graph import Op, Params
from jaxfp8._rewrite.ir.scaled import Lost
from jaxfp8._rewrite.ir.sites import DotSite
from jaxfp8._rewrite.rules.registry import rule
from jaxfp8._value.spec import Shape

Sizes = tuple[int, int, int, int]

NAMES = ("conv_general_dilated",)
_REASON = "there is no kernel for convolutions yet"
_REMEDY = "write a 1x1 convolution as `@`, or leave it wide"


@rule(*NAMES)
def unserved(walk: Context, op: Op) -> None:
    """A missed product, if an operand is or was dequantized data."""
    lhs, rhs = [(v, walk.dequantized(v) or walk.lost(v)) for v in op.inputs[:2]]
    site = DotSite(op, (lhs, rhs))
    if not site.concerned:
        return
    known = [fact for _, fact in site.given if fact is not None]
    ended = next((fact for fact in known if isinstance(fact, Lost)), None)
    if ended is not None and len(known) == 1:
        site.miss(ended.reason, ended.remedy, ended.op)
    else:
        site.miss(_REASON, _REMEDY)
    walk.see(site)


def _of_convolution(params: Params, lhs: Shape, rhs: Shape) -> Sizes:
    """Batch, M, N and K of a convolution as a matrix product."""
    groups = params["feature_group_count"] * params["batch_group_count"]
    features, *_ = params["dimension_numbers"].rhs_spec
    n = rhs[features]
    k = math.prod(rhs) // max(n, 1)
    channel = params["dimension_numbers"].lhs_spec[1]
    return groups, math.prod(lhs) // max(lhs[channel], 1), n // groups, k


def _of_dot(site: DotSite, lhs: Shape, rhs: Shape) -> Sizes:
    """Batch, M, N and K of a dot; groups are no part of N."""
    (contracting, _), (batch, _) = site.numbers
    summed = [axis for axes in site.axes(1) for axis in axes]
    b, k = (math.prod(lhs[a] for a in axes) for axes in (batch, contracting))
    m = math.prod(s for a, s in enumerate(lhs) if a not in (*contracting, *batch))
    return b, m, math.prod(s for a, s in enumerate(rhs) if a not in summed), k


def sizes_of(site: DotSite) -> Sizes:
    """Batch, M, N and K of a row of the report; a symbolic size is -1."""
    lhs, rhs = (value.shape for value, _ in site.given)
    if site.op.name in NAMES:
        dims = _of_convolution(site.op.params, lhs, rhs)
    else:
        dims = _of_dot(site, lhs, rhs)
    b, m, n, k = (size if isinstance(size, int) else -1 for size in dims)
    return b, m, n, k
