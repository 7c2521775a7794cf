"""Equations not entered by the walk: the dots inside them, and their 8-bit inputs.

Dots inside are counted, or reported as missed. If an equation makes floats of 8-bit data, the trail
ends there, and a dot on these floats is reported.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.graph import Jaxpr, Op, Value
from jaxfp8._rewrite.ir.scaled import Lost, Scaled
from jaxfp8._rewrite.ir.sites import DotSite, Seen
from jaxfp8._rewrite.rules import reach, scaled_products
from jaxfp8._rewrite.rules.reach import InnerDot, products, remembered
from jaxfp8._rewrite.rules.registry import lost as lost_at
from jaxfp8._value import compat, dtypes


@remembered
def holds_ref(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr reads or writes a mutable array, at any depth except in user kernels."""
    atoms = [*jaxpr.constvars, *jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    if any(hasattr(v.aval, "inner_aval") for v in atoms):
        return True
    outside = (eqn for eqn in jaxpr.eqns if eqn.primitive.name != reach.KERNEL)
    return any(holds_ref(inner) for eqn in outside for inner in compat.subjaxprs(eqn))


def left_alone(jaxpr: Jaxpr, reason: str, remedy: str) -> Seen:
    """The dots of a jaxpr without a walk: missed, if 8-bit data reaches them."""
    seen = Seen()
    _tell(seen, products(jaxpr, ()), Lost(None, reason, remedy))
    return seen


_MOVE_OUT = "move the product out of `{0}`, or rewrite the function that is given to it"
_KERNEL_STAYS = (
    "keep it, as a kernel of your own that reads 8 bits already, or write the product with `@`"
)

_MAKES_FLOATS = "makes floats of 8-bit data, in a way that the rewrite does not follow"
_DEQUANTIZE_OUTSIDE = (
    "dequantize outside of `{0}`, by operations of JAX such as `q.astype(dtype) * scale`"
)


def look_into(walk: Context, op: Op) -> None:
    """Count the dots inside an op, and report 8-bit data at a dot or at its end."""
    if scaled_products.is_call(op.equation):
        return
    hot, inner = _hot(walk, op), compat.subjaxprs(op.equation)
    if not inner:
        if any(hot):
            _end(walk, op, hot, [v for v in op.outputs if _is_decoded(op, hot, v)])
        return
    remedy = _KERNEL_STAYS if op.name == reach.KERNEL else _MOVE_OUT.format(op.name)
    lost = Lost(op, f"it is inside `{op.name}`, which is left as it is", remedy)
    inside = reach.inside(op.equation, hot, op.callers)
    _tell(walk.seen, inside.dots, lost)
    if all(map(_is_of_scalars, inner)):
        return
    pairs = zip(op.outputs, op.equation.outvars, strict=True)
    _end(walk, op, hot, [value for value, variable in pairs if variable in inside.made])


def _end(walk: Context, op: Op, hot: Sequence[bool], made: Sequence[Value]) -> None:
    """State the end of the trail, here or earlier, for floats made of 8-bit data by an op."""
    data = [value for value, is_hot in zip(op.inputs, hot, strict=True) if is_hot]
    largest = max((value.size for value in data), default=0)
    for value in made:
        if value.dtype in dtypes.WIDE_FLOAT and value.size >= largest and value not in walk.facts:
            known = [fact for v in data if (fact := walk.lost(v)) is not None]
            remedy = _DEQUANTIZE_OUTSIDE.format(op.name)
            walk.facts[value] = next(iter(known), lost_at(op, _MAKES_FLOATS, remedy))


def _is_of_scalars(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr only combines two elements, as in a scatter or a reduction."""
    return all(getattr(v.aval, "shape", None) == () for v in jaxpr.invars)


def _is_decoded(op: Op, hot: Sequence[bool], value: Value) -> bool:
    """Whether an output of an opaque function may be its 8-bit data as floats.

    It has as many values as there are bytes, or two for each, and is no operand in another order.
    """
    sizes = [v.size for v, is_hot in zip(op.inputs, hot, strict=True) if is_hot]
    types = [(v.shape, v.dtype) for v in op.inputs]
    is_alike = value.size in (*sizes, *(2 * size for size in sizes))
    return is_alike and (value.shape, value.dtype) not in types


def look_into_condition(walk: Context, op: Op) -> None:
    """Count the dots in the condition of a while loop, and report those with 8-bit data."""
    lost = Lost(
        op,
        "it is in the condition of a `while`, which is left as it is",
        "compute it in the body, and carry what the condition needs",
    )
    condition = compat.open_jaxpr(op.params["cond_jaxpr"])
    inside = reach.inside(op.equation, _hot(walk, op), op.callers, [condition])
    _tell(walk.seen, inside.dots, lost)


def _hot(walk: Context, op: Op) -> list[bool]:
    """Whether each input of an op is or was 8-bit data."""
    return [
        v.dtype in dtypes.EIGHT_BIT or isinstance(walk.fact(v), Scaled | Lost) for v in op.inputs
    ]


def _tell(seen: Seen, dots: Sequence[InnerDot], lost: Lost) -> None:
    """Count dots, as missed ones if 8-bit data reaches them."""
    for dot in dots:
        lhs, rhs, *more = (graph.value_of(v.aval) for v in dot.eqn.invars)
        op = graph.equation_op(dot.eqn, [lhs, rhs, *more], dot.callers)
        if calls := scaled_products.calls_of(op):
            seen.calls += calls
            continue
        fact = lost if dot.reached else None
        site = DotSite(op, ((lhs, fact), (rhs, fact)))
        site.miss(lost.reason, lost.remedy, lost.op)
        seen.see(site)
