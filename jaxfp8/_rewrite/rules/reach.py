"""A data-flow analysis: finds dots on 8-bit data inside equations not entered by the walk.

Here a variable is only *hot* or not: 8-bit data, or computed from 8-bit data. The result of a
comparison is not hot. Memory written by a user's kernel is hot once it holds hot data.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set

import numpy as np

from jaxfp8._rewrite.ir.graph import Callers, Equation, Jaxpr, Literal, Var
from jaxfp8._rewrite.rules import dot, scaled_products, unserved
from jaxfp8._value import compat, dtypes

# Outputs of a body, each with the input fed by it in the next turn.
Carried = Sequence[tuple[Var | Literal, Var]]
_EIGHT_BIT = (*dtypes.EIGHT_BIT, *dtypes.UNSERVED_FLOAT8, dtypes.E8M0)
_DOTS = (*dot.NAMES, *unserved.NAMES)
KERNEL = "pallas_call"
_READS = ("get", "load", "masked_load")
# Their inner jaxprs take the operands in order. A branch takes all but the first.
_CALLS = (
    *("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"),
    "ruled_call",
    *("remat2", "checkpoint", "remat", "scan", "cond"),
    *("composite", "custom_vmap_call", "compute_on"),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Reached:
    """The dots inside an equation, and its outputs returned hot."""

    dots: list[InnerDot]
    made: Set[Var]


@dataclasses.dataclass(frozen=True, eq=False)
class InnerDot:
    """A dot inside an equation, the equations around it, and whether 8-bit data reaches it."""

    eqn: Equation
    callers: Callers
    reached: bool


def remembered(predicate: Callable[[Jaxpr], bool]) -> Callable[[Jaxpr], bool]:
    """The predicate with a cache of answers; an entry lives as long as its jaxpr."""
    known: weakref.WeakKeyDictionary[Jaxpr, bool] = weakref.WeakKeyDictionary()

    @functools.wraps(predicate)
    def of(jaxpr: Jaxpr) -> bool:
        answer = known.get(jaxpr)
        if answer is None:
            answer = known[jaxpr] = predicate(jaxpr)
        return answer

    return of


@remembered
def holds_eight_bit(jaxpr: Jaxpr) -> bool:
    """Whether any variable or constant of a jaxpr, at any depth, is 8-bit data."""
    variables = [*jaxpr.constvars, *jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    inner = (j for eqn in jaxpr.eqns for j in compat.subjaxprs(eqn))
    return any(map(_is_eight_bit, variables)) or any(map(holds_eight_bit, inner))


def products(jaxpr: Jaxpr, hot: Iterable[Var], callers: Callers = ()) -> list[InnerDot]:
    """The dots in an open jaxpr, for the hot inputs in `hot`."""
    dots: list[InnerDot] = []
    _flow(jaxpr, _settled(jaxpr, set(hot)), callers, dots)
    return dots


def inside(
    eqn: Equation,
    hot: Sequence[bool],
    callers: Callers = (),
    jaxprs: Sequence[Jaxpr] | None = None,
) -> Reached:
    """The contents of all or some jaxprs of an equation; `hot` marks its hot operands."""
    dots: list[InnerDot] = []
    inner = compat.subjaxprs(eqn) if jaxprs is None else jaxprs
    return Reached(dots, _enter(eqn, hot, callers, dots, inner))


def _flow(jaxpr: Jaxpr, hot: Set[Var], callers: Callers, dots: list[InnerDot] | None) -> set[Var]:
    """The hot variables of a jaxpr, from its hot inputs.

    The dots in it are added to `dots`.
    """
    inputs = (*jaxpr.constvars, *jaxpr.invars)
    known = {v for v in inputs if v in hot or _is_eight_bit(v)}
    for eqn in jaxpr.eqns:
        marks = [not isinstance(v, Literal) and v in known for v in eqn.invars]
        if is_product(eqn):
            if dots is not None:
                dots.append(InnerDot(eqn, callers, any(marks[:2])))
            made: Iterable[Var] = ()
        elif compat.subjaxprs(eqn):
            made = _enter(eqn, marks, callers, dots, compat.subjaxprs(eqn))
        else:
            made = _passed_on(eqn) if any(marks) else ()
        known.update(made)
        known.update(filter(_is_eight_bit, eqn.outvars))
    return known


def _settled(jaxpr: Jaxpr, hot: set[Var], carried: Carried = ()) -> set[Var]:
    """All hot inputs: those given, memory written by the jaxpr, and carried values."""
    changes = carried or any(map(_is_ref, jaxpr.invars))
    while changes and (hot or holds_eight_bit(jaxpr)):
        known = _flow(jaxpr, hot, (), None)
        before = {v for out, v in carried if not isinstance(out, Literal) and out in known}
        more = {v for v in jaxpr.invars if v in known} | before
        if more <= hot:
            break
        hot = hot | more
    return hot


def is_product(eqn: Equation) -> bool:
    """Whether an equation is a dot, a scaled dot included."""
    is_call = scaled_products.is_call(eqn)
    return is_call or eqn.primitive.name in _DOTS or scaled_products.is_one(eqn)


def _passed_on(eqn: Equation) -> Iterator[Var]:
    """The hot results of an operation on hot operands: its outputs and the memory it writes."""
    yield from (v for v in eqn.outvars if _dtype(v) != np.dtype(bool))
    if eqn.primitive.name not in _READS:
        yield from (v for v in eqn.invars if not isinstance(v, Literal) and _is_ref(v))


def _enter(
    eqn: Equation,
    marks: Sequence[bool],
    callers: Callers,
    dots: list[InnerDot] | None,
    jaxprs: Sequence[Jaxpr],
) -> set[Var]:
    """The hot outputs and memory of an equation, by its inner jaxprs."""
    made: set[Var] = set()
    for jaxpr in jaxprs:
        places = _places(eqn, jaxpr)
        hot = {v for v, i in zip(jaxpr.invars, places, strict=False) if marks[i]}
        if not places and any(marks):
            hot = {*jaxpr.constvars, *jaxpr.invars}
        hot = _settled(jaxpr, hot, _carried(eqn, jaxpr))
        known = _flow(jaxpr, hot, (*callers, eqn), dots)
        given = zip(jaxpr.invars, (eqn.invars[i] for i in places), strict=False)
        made.update(
            own for v, own in given if v in known and not isinstance(own, Literal) and _is_ref(own)
        )
        made.update(_left(eqn, jaxpr, known))
    return made


def _left(eqn: Equation, jaxpr: Jaxpr, known: Set[Var]) -> Iterator[Var]:
    """The outputs of an equation returned hot by an inner jaxpr."""
    hot = [not isinstance(v, Literal) and v in known for v in jaxpr.outvars]
    if eqn.primitive.name == KERNEL:  # it returns nothing, and writes to memory behind its inputs
        first = len(eqn.invars)
        written = jaxpr.invars[first : first + len(eqn.outvars)]
        yield from (v for v, ref in zip(eqn.outvars, written, strict=False) if ref in known)
    elif len(hot) == len(eqn.outvars):
        yield from (v for v, is_hot in zip(eqn.outvars, hot, strict=True) if is_hot)
    elif any(hot):
        yield from eqn.outvars


def _places(eqn: Equation, jaxpr: Jaxpr) -> Sequence[int]:
    """The operand of each of the first inputs of an inner jaxpr; () if unknown."""
    name, own, given = eqn.primitive.name, len(jaxpr.invars), len(eqn.invars)
    if name == KERNEL:
        return range(min(given, own))
    if name == "while":
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carry = range(n_cond + n_body, given)
        is_condition = jaxpr is compat.open_jaxpr(eqn.params["cond_jaxpr"])
        return [*(range(n_cond) if is_condition else range(n_cond, n_cond + n_body)), *carry]
    return range(given - own, given) if name in _CALLS and own <= given else ()


def _carried(eqn: Equation, jaxpr: Jaxpr) -> Carried:
    """The outputs of the body of a loop, each with the input fed by it in the next turn."""
    if eqn.primitive.name == "scan":
        first, number = compat.scan_counts(eqn.params)
    elif eqn.primitive.name == "while" and len(jaxpr.outvars) <= len(jaxpr.invars):
        number = len(eqn.outvars) if len(jaxpr.outvars) == len(eqn.outvars) else 0
        first = len(jaxpr.invars) - number
    else:
        return []
    return list(zip(jaxpr.outvars[:number], jaxpr.invars[first : first + number], strict=True))


def _dtype(variable: Var) -> object:
    return getattr(variable.aval, "dtype", None)


def _is_eight_bit(variable: Var) -> bool:
    return _dtype(variable) in _EIGHT_BIT


def _is_ref(variable: Var) -> bool:
    return hasattr(variable.aval, "inner_aval")
