"""What stands inside equations that are not entered: counted, or reported as missed."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxfp8 import _compat, _dtypes
from jaxfp8._primitive import scaled_dot_p
from jaxfp8._rewrite import _graph
from jaxfp8._rewrite._dots import Seen, Site
from jaxfp8._rewrite._facts import Lost, Scaled
from jaxfp8._rewrite._graph import Value

if TYPE_CHECKING:
    from jaxfp8._rewrite._walk import Walk

_SCALED = scaled_dot_p.name
# What is meant as it is: a kernel of the user's own, whose dots are on blocks in fast memory, and
# a scaled dot, which holds how it is split over a mesh.
_KERNELS = ("pallas_call", _SCALED)


def _remembered(predicate: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """The predicate with what it said of each jaxpr, for as long as that lives."""
    known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    @functools.wraps(predicate)
    def of(jaxpr: Any) -> bool:
        answer = known.get(jaxpr)
        if answer is None:
            answer = known[jaxpr] = predicate(jaxpr)
        return answer

    return of


@_remembered
def holds_eight_bit(jaxpr: Any) -> bool:
    """Whether any variable or constant of a jaxpr, at any depth, is 8-bit data."""
    atoms = [*jaxpr.constvars, *jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    eight_bit = _dtypes.EIGHT_BIT + _dtypes.UNSERVED_FLOAT8
    here = any(getattr(v.aval, "dtype", None) in eight_bit for v in atoms)
    inner = (j for eqn in jaxpr.eqns for j in _compat.subjaxprs(eqn))
    return here or any(map(holds_eight_bit, inner))


@_remembered
def holds_ref(jaxpr: Any) -> bool:
    """Whether a jaxpr reads or writes a mutable array at any depth, user kernels apart."""
    atoms = [*jaxpr.constvars, *jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    if any(hasattr(v.aval, "inner_aval") for v in atoms):
        return True
    outside = (eqn for eqn in jaxpr.eqns if eqn.primitive.name not in _KERNELS)
    return any(holds_ref(inner) for eqn in outside for inner in _compat.subjaxprs(eqn))


def left_alone(jaxpr: Any, reason: str, remedy: str) -> Seen:
    """The dots of a whole jaxpr that is not walked: missed, if it holds 8-bit data."""
    seen = Seen()
    _tell(seen, [jaxpr], Lost(None, reason, remedy), (), reached=holds_eight_bit(jaxpr))
    return seen


def look_into(walk: Walk, eqn: Any, inputs: Sequence[Value], callers: tuple[Any, ...]) -> None:
    """Count the dots inside an equation; report them if 8-bit data goes in or is made there."""
    jaxprs = _compat.subjaxprs(eqn)
    if not jaxprs or eqn.primitive.name in _KERNELS:
        return
    reached = any(isinstance(walk.fact(v), Scaled | Lost) for v in inputs)
    reached = reached or any(map(holds_eight_bit, jaxprs))
    name = eqn.primitive.name
    lost = Lost(
        eqn,
        f"it stands inside `{name}`, which is left as it is",
        f"move the product out of `{name}`, or rewrite the function that is given to it",
        callers,
    )
    _tell(walk.seen, jaxprs, lost, (*callers, eqn), reached=reached)


def look_into_condition(walk: Walk, eqn: Any, inputs: Sequence[Value], callers: Any) -> None:
    """Count the dots in the condition of a while loop; report them if 8-bit data goes in."""
    jaxpr = _compat.open_jaxpr(eqn.params["cond_jaxpr"])
    reached = holds_eight_bit(jaxpr) or any(isinstance(walk.fact(v), Scaled | Lost) for v in inputs)
    lost = Lost(
        eqn,
        "it stands in the condition of a `while`, which is left as it is",
        "compute it in the body, and carry what the condition needs",
        callers,
    )
    _tell(walk.seen, [jaxpr], lost, (*callers, eqn), reached=reached)


def _tell(
    seen: Seen, jaxprs: Sequence[Any], lost: Lost, callers: tuple[Any, ...], *, reached: bool
) -> None:
    """Count the dots in jaxprs, as missed ones if 8-bit data reached them."""
    fact = lost if reached else None
    for eqn, outer in _dots_in(jaxprs, callers):
        values = [_graph.value_of(v.aval) for v in eqn.invars]
        op = _graph.equation_op(eqn, values, outer)
        if eqn.primitive.name == _SCALED:
            seen.calls.append(op)
            continue
        site = Site(op, ((values[0], fact), (values[1], fact)))
        site.miss(lost.reason, lost.remedy, (lost.eqn, lost.callers) if lost.eqn else None)
        seen.see(site)


def _dots_in(
    jaxprs: Sequence[Any], callers: tuple[Any, ...]
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Every dot in jaxprs, scaled ones too, with the equations around it."""
    for jaxpr in jaxprs:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("dot_general", "ragged_dot_general", _SCALED):
                yield eqn, callers
            elif eqn.primitive.name not in _KERNELS:
                yield from _dots_in(_compat.subjaxprs(eqn), (*callers, eqn))
