"""What stands inside equations that are not entered: counted, or reported as missed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxfp8._call.primitive import scaled_dot_p
from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.facts import Lost, Scaled
from jaxfp8._rewrite.ir.graph import Value
from jaxfp8._rewrite.ir.sites import Seen, Site
from jaxfp8._rewrite.rules.reach import Found, products, products_inside, remembered
from jaxfp8._value import compat, dtypes

# A kernel of the user's own, whose arrays are memory that it may write to.
_KERNEL = "pallas_call"


@remembered
def holds_ref(jaxpr: Any) -> bool:
    """Whether a jaxpr reads or writes a mutable array at any depth, user kernels apart."""
    atoms = [*jaxpr.constvars, *jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    if any(hasattr(v.aval, "inner_aval") for v in atoms):
        return True
    outside = (eqn for eqn in jaxpr.eqns if eqn.primitive.name != _KERNEL)
    return any(holds_ref(inner) for eqn in outside for inner in compat.subjaxprs(eqn))


def left_alone(jaxpr: Any, reason: str, remedy: str) -> Seen:
    """The dots of a whole jaxpr that is not walked: missed, if 8-bit data reaches them."""
    seen = Seen()
    _tell(seen, products(jaxpr, ()), Lost(None, reason, remedy))
    return seen


def look_into(walk: Context, eqn: Any, inputs: Sequence[Value], callers: tuple[Any, ...]) -> None:
    """Count the dots inside an equation; report those that 8-bit data reaches."""
    if eqn.primitive is scaled_dot_p or not compat.subjaxprs(eqn):
        return
    name = eqn.primitive.name
    lost = Lost(
        eqn,
        f"it stands inside `{name}`, which is left as it is",
        _KERNEL_STAYS if name == _KERNEL else _MOVE_OUT.format(name),
        callers,
    )
    _tell(walk.seen, products_inside(eqn, _hot(walk, inputs), callers), lost)


_MOVE_OUT = "move the product out of `{0}`, or rewrite the function that is given to it"
_KERNEL_STAYS = (
    "keep it, as a kernel of your own that reads 8 bits already, or write the product with `@`"
)


def _hot(walk: Context, inputs: Sequence[Value]) -> list[bool]:
    """Which operands of an equation are or were 8-bit data."""
    return [v.dtype in dtypes.EIGHT_BIT or isinstance(walk.fact(v), Scaled | Lost) for v in inputs]


def look_into_condition(walk: Context, eqn: Any, inputs: Sequence[Value], callers: Any) -> None:
    """Count the dots in the condition of a while loop; report those that 8-bit data reaches."""
    lost = Lost(
        eqn,
        "it stands in the condition of a `while`, which is left as it is",
        "compute it in the body, and carry what the condition needs",
        callers,
    )
    condition = compat.open_jaxpr(eqn.params["cond_jaxpr"])
    _tell(walk.seen, products_inside(eqn, _hot(walk, inputs), callers, [condition]), lost)


def _tell(seen: Seen, found: Sequence[Found], lost: Lost) -> None:
    """Count dots, as missed ones if 8-bit data reached them."""
    for dot in found:
        values = [graph.value_of(v.aval) for v in dot.eqn.invars]
        op = graph.equation_op(dot.eqn, values, dot.callers)
        if dot.eqn.primitive is scaled_dot_p:
            seen.calls.append(op)
            continue
        fact = lost if dot.reached else None
        site = Site(op, ((values[0], fact), (values[1], fact)))
        site.miss(lost.reason, lost.remedy, (lost.eqn, lost.callers) if lost.eqn else None)
        seen.see(site)
