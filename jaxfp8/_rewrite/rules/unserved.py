"""Ragged dots and convolutions: missed, until `plan/ragged_calls` takes a ragged dot.

JAX knows three kinds of ragged dots. With groups of batch entries it is the plain dot: every entry
has its own matrix, and JAX ignores the sizes.
"""

from __future__ import annotations

import math

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir.facts import Product
from jaxfp8._rewrite.ir.graph import Op, Params
from jaxfp8._rewrite.ir.scaled import Lost
from jaxfp8._rewrite.ir.sites import DimensionNumbers, DotSite
from jaxfp8._rewrite.rules.dot import product_of
from jaxfp8._rewrite.rules.registry import rule
from jaxfp8._value.spec import Shape

Sizes = tuple[int, int, int, int]

RAGGED_DOT = "ragged_dot_general"
# Reason and remedy of each.
NAMES = {
    RAGGED_DOT: (
        "`rewrite` leaves `ragged_dot` as it is written",
        "give the 8-bit arrays to `jaxfp8.ragged_dot`, or leave it wide",
    ),
    "conv_general_dilated": (
        "there is no kernel for convolutions yet",
        "write a 1x1 convolution as `@`, or leave it wide",
    ),
}
UNCOUNTED = NAMES.keys() - {RAGGED_DOT}  # a report counts no products of floats of these


@rule(*NAMES)
def unserved(walk: Context, op: Op) -> Product | None:
    """A missed dot, if an operand is or was 8-bit data; of convolutions, dequantised data."""
    data = walk.scaled if op.name == RAGGED_DOT else walk.dequantised
    lhs, rhs = [(v, data(v) or walk.lost(v)) for v in op.inputs[:2]]
    site = DotSite(op, (lhs, rhs))
    if site.concerned and op.name == RAGGED_DOT and _has_groups_of_batches(op.params):
        return product_of(walk, site)
    _miss(walk, site)
    return None


def _has_groups_of_batches(params: Params) -> bool:
    """Whether a ragged dot is the plain dot of its operands."""
    numbers = params["ragged_dot_dimension_numbers"]
    _, (batch, _) = numbers.dot_dimension_numbers
    return set(numbers.lhs_ragged_dimensions) <= set(batch) and params["group_offset"] is None


def _miss(walk: Context, site: DotSite) -> None:
    """Record why a product is missed, if 8-bit data reaches it; else only count a ragged dot."""
    if not site.concerned:
        if site.op.name == RAGGED_DOT:
            walk.see(site)
        return
    known = [fact for _, fact in site.given if fact is not None]
    ended = next((fact for fact in known if isinstance(fact, Lost)), None)
    if ended is not None and len(known) == 1:
        site.miss(ended.reason, ended.remedy, ended.op)
    else:
        site.miss(*NAMES[site.op.name])
    walk.see(site)


def sizes(params: Params, lhs: Shape, rhs: Shape) -> Sizes:
    """Batch, M, N and K of a ragged dot or a convolution as a matrix product."""
    ragged = params.get("ragged_dot_dimension_numbers")
    if ragged is not None:
        return dot_sizes(ragged.dot_dimension_numbers, lhs, rhs, ragged.rhs_group_dimensions)
    groups = params["feature_group_count"] * params["batch_group_count"]
    features, *_ = params["dimension_numbers"].rhs_spec
    n = rhs[features]
    k = math.prod(rhs) // max(n, 1)
    channel = params["dimension_numbers"].lhs_spec[1]
    return groups, math.prod(lhs) // max(lhs[channel], 1), n // groups, k


def dot_sizes(numbers: DimensionNumbers, lhs: Shape, rhs: Shape, dropped: Shape = ()) -> Sizes:
    """Batch, M, N and K of a dot, without the `dropped` axes of the right operand."""
    (contracting, rhs_contracting), (batch, rhs_batch) = numbers
    summed = (*rhs_contracting, *rhs_batch, *dropped)
    b, k = (math.prod(lhs[a] for a in axes) for axes in (batch, contracting))
    m = math.prod(s for a, s in enumerate(lhs) if a not in (*contracting, *batch))
    return b, m, math.prod(s for a, s in enumerate(rhs) if a not in summed), k


def sizes_of(site: DotSite) -> Sizes:
    """Batch, M, N and K of a row of the report; a symbolic size is -1."""
    lhs, rhs = (value.shape for value, _ in site.given)
    if site.op.name in NAMES:
        dims = sizes(site.op.params, lhs, rhs)
    else:
        dims = dot_sizes(site.numbers, lhs, rhs)
    b, m, n, k = (size if isinstance(size, int) else -1 for size in dims)
    return b, m, n, k
