"""Dots inside equations that are not entered: counted, or reported as missed."""

from __future__ import annotations

from collections.abc import Sequence

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.graph import Jaxpr, Op
from jaxfp8._rewrite.ir.scaled import Lost, Scaled
from jaxfp8._rewrite.ir.sites import DotSite, Seen
from jaxfp8._rewrite.rules import scaled_products
from jaxfp8._rewrite.rules.reach import InnerDot, products, products_inside, remembered
from jaxfp8._value import compat, dtypes

# The user's own kernel: its references are memory that it may write to.
_KERNEL = "pallas_call"


@remembered
def holds_ref(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr reads or writes a mutable array, at any depth except in user kernels."""
    atoms = [*jaxpr.constvars, *jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    if any(hasattr(v.aval, "inner_aval") for v in atoms):
        return True
    outside = (eqn for eqn in jaxpr.eqns if eqn.primitive.name != _KERNEL)
    return any(holds_ref(inner) for eqn in outside for inner in compat.subjaxprs(eqn))


def left_alone(jaxpr: Jaxpr, reason: str, remedy: str) -> Seen:
    """The dots of a jaxpr that is not walked: missed, if 8-bit data reaches them."""
    seen = Seen()
    _tell(seen, products(jaxpr, ()), Lost(None, reason, remedy))
    return seen


_MOVE_OUT = "move the product out of `{0}`, or rewrite the function that is given to it"
_KERNEL_STAYS = (
    "keep it, as a kernel of your own that reads 8 bits already, or write the product with `@`"
)


def look_into(walk: Context, op: Op) -> None:
    """Count the dots inside an op, and report those that 8-bit data reaches."""
    if scaled_products.is_call(op.equation) or not compat.subjaxprs(op.equation):
        return
    remedy = _KERNEL_STAYS if op.name == _KERNEL else _MOVE_OUT.format(op.name)
    lost = Lost(op, f"it is inside `{op.name}`, which is left as it is", remedy)
    _tell(walk.seen, products_inside(op.equation, _hot(walk, op), op.callers), lost)


def look_into_condition(walk: Context, op: Op) -> None:
    """Count the dots in the condition of a while loop, and report those that 8-bit data reaches."""
    lost = Lost(
        op,
        "it is in the condition of a `while`, which is left as it is",
        "compute it in the body, and carry what the condition needs",
    )
    condition = compat.open_jaxpr(op.params["cond_jaxpr"])
    _tell(walk.seen, products_inside(op.equation, _hot(walk, op), op.callers, [condition]), lost)


def _hot(walk: Context, op: Op) -> list[bool]:
    """Which inputs of an op are or were 8-bit data."""
    return [
        v.dtype in dtypes.EIGHT_BIT or isinstance(walk.fact(v), Scaled | Lost) for v in op.inputs
    ]


def _tell(seen: Seen, found: Sequence[InnerDot], lost: Lost) -> None:
    """Count dots, as missed ones if 8-bit data reaches them."""
    for dot in found:
        lhs, rhs, *more = (graph.value_of(v.aval) for v in dot.eqn.invars)
        op = graph.equation_op(dot.eqn, [lhs, rhs, *more], dot.callers)
        if calls := scaled_products.calls_of(op):
            seen.calls += calls
            continue
        fact = lost if dot.reached else None
        site = DotSite(op, ((lhs, fact), (rhs, fact)))
        site.miss(lost.reason, lost.remedy, lost.op)
        seen.see(site)
