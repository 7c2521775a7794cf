"""Which products 8-bit data reaches inside equations that are not entered: by flow of data alone.

Nothing is known of values here but whether they are, or were made of, 8-bit data. What is compared
with something is no longer: a mask of bytes reaches no product. Memory that a kernel of the user's
writes to holds 8-bit data as soon as some is written.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import numpy as np

from jaxfp8._call.primitive import scaled_dot_p
from jaxfp8._rewrite.rules import scaled_products, unserved
from jaxfp8._value import compat, dtypes

Callers = tuple[Any, ...]
_EIGHT_BIT = (*dtypes.EIGHT_BIT, *dtypes.UNSERVED_FLOAT8, dtypes.E8M0)
_DOTS = ("dot_general", *unserved.NAMES)
_READS = ("get", "load", "masked_load")
# Those whose inner jaxprs take the operands in order, in a branch all but the first.
_CALLS = (
    *("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"),
    *("remat2", "checkpoint", "remat", "scan", "cond"),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """A product inside an equation, the equations around it, and whether 8-bit data reaches it."""

    eqn: Any
    callers: Callers
    reached: bool


def remembered(predicate: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """The predicate with what it said of each jaxpr, for as long as that lives."""
    known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    @functools.wraps(predicate)
    def of(jaxpr: Any) -> bool:
        answer = known.get(jaxpr)
        if answer is None:
            answer = known[jaxpr] = predicate(jaxpr)
        return answer

    return of


@remembered
def holds_eight_bit(jaxpr: Any) -> bool:
    """Whether any variable or constant of a jaxpr, at any depth, is 8-bit data."""
    variables = [*jaxpr.constvars, *jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    inner = (j for eqn in jaxpr.eqns for j in compat.subjaxprs(eqn))
    return any(map(_is_eight_bit, variables)) or any(map(holds_eight_bit, inner))


def products(jaxpr: Any, hot: Iterable[Any], callers: Callers = ()) -> list[Found]:
    """The products in an open jaxpr of which the inputs in `hot` are 8-bit data."""
    found: list[Found] = []
    _flow(jaxpr, _settled(jaxpr, set(hot)), callers, found)
    return found


def products_inside(
    eqn: Any, hot: Sequence[bool], callers: Callers = (), jaxprs: Sequence[Any] | None = None
) -> list[Found]:
    """The products in the jaxprs of an equation, or in some, by which operands are 8-bit data."""
    found: list[Found] = []
    _enter(eqn, hot, callers, found, compat.subjaxprs(eqn) if jaxprs is None else jaxprs)
    return found


def _flow(jaxpr: Any, hot: Set[Any], callers: Callers, found: list[Found] | None) -> set[Any]:
    """The variables of a jaxpr that are 8-bit data, from those of its inputs that are."""
    inputs = (*jaxpr.constvars, *jaxpr.invars)
    known = {v for v in inputs if v in hot or _is_eight_bit(v)}
    for eqn in jaxpr.eqns:
        marks = [not compat.is_literal(v) and v in known for v in eqn.invars]
        if is_product(eqn):
            if found is not None:
                found.append(Found(eqn, callers, any(marks[:2])))
            made: Iterable[Any] = ()
        elif compat.subjaxprs(eqn) and eqn.primitive is not scaled_dot_p:
            made = _enter(eqn, marks, callers, found, compat.subjaxprs(eqn))
        else:
            made = _passed_on(eqn) if any(marks) else ()
        known.update(made)
        known.update(filter(_is_eight_bit, eqn.outvars))
    return known


def _settled(jaxpr: Any, hot: set[Any], carried: Sequence[tuple[Any, Any]] = ()) -> set[Any]:
    """The inputs that are 8-bit data once memory and carried values are what they become."""
    changes = carried or any(map(_is_ref, jaxpr.invars))
    while changes and (hot or holds_eight_bit(jaxpr)):
        known = _flow(jaxpr, hot, (), None)
        before = {v for out, v in carried if not compat.is_literal(out) and out in known}
        more = {v for v in jaxpr.invars if v in known} | before
        if more <= hot:
            break
        hot = hot | more
    return hot


def is_product(eqn: Any) -> bool:
    """Whether an equation is a product, a scaled dot as it stands included."""
    name, own = eqn.primitive.name, eqn.primitive is scaled_dot_p
    return own or name in _DOTS or scaled_products.is_one(eqn)


def _passed_on(eqn: Any) -> Iterator[Any]:
    """What holds 8-bit data after an operation on some: its outputs, and memory that it writes."""
    yield from (v for v in eqn.outvars if _dtype(v) != np.dtype(bool))
    if eqn.primitive.name not in _READS:
        yield from filter(_is_ref, eqn.invars)


def _enter(
    eqn: Any,
    marks: Sequence[bool],
    callers: Callers,
    found: list[Found] | None,
    jaxprs: Sequence[Any],
) -> set[Any]:
    """The outputs and the memory of an equation that are 8-bit data, by its inner jaxprs."""
    made: set[Any] = set()
    for jaxpr in jaxprs:
        places = _places(eqn, jaxpr)
        hot = {v for v, i in zip(jaxpr.invars, places, strict=False) if marks[i]}
        if not places and any(marks):
            hot = {*jaxpr.constvars, *jaxpr.invars}
        hot = _settled(jaxpr, hot, _carried(eqn, jaxpr))
        known = _flow(jaxpr, hot, (*callers, eqn), found)
        written = zip(jaxpr.invars, places, strict=False)
        made.update(eqn.invars[i] for v, i in written if v in known and _is_ref(eqn.invars[i]))
        made.update(_left(eqn, jaxpr, known))
    return made


def _left(eqn: Any, jaxpr: Any, known: Set[Any]) -> Iterator[Any]:
    """The outputs of an equation that are 8-bit data where an inner jaxpr returns such."""
    hot = [not compat.is_literal(v) and v in known for v in jaxpr.outvars]
    if len(hot) == len(eqn.outvars):
        yield from (v for v, is_hot in zip(eqn.outvars, hot, strict=True) if is_hot)
    elif any(hot):
        yield from eqn.outvars


def _places(eqn: Any, jaxpr: Any) -> Sequence[int]:
    """Which operand each input of an inner jaxpr is, as far as they are any; () if unknown."""
    name, own, given = eqn.primitive.name, len(jaxpr.invars), len(eqn.invars)
    if name == "pallas_call":
        return range(min(given, own))
    if name == "while":
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carry = range(n_cond + n_body, given)
        is_condition = jaxpr is compat.open_jaxpr(eqn.params["cond_jaxpr"])
        return [*(range(n_cond) if is_condition else range(n_cond, n_cond + n_body)), *carry]
    return range(given - own, given) if name in _CALLS and own <= given else ()


def _carried(eqn: Any, jaxpr: Any) -> list[tuple[Any, Any]]:
    """The outputs of the body of a loop that are inputs of its next turn, with these."""
    if eqn.primitive.name == "scan":
        first, number = compat.scan_counts(eqn.params)
    elif eqn.primitive.name == "while" and len(jaxpr.outvars) <= len(jaxpr.invars):
        number = len(eqn.outvars) if len(jaxpr.outvars) == len(eqn.outvars) else 0
        first = len(jaxpr.invars) - number
    else:
        return []
    return list(zip(jaxpr.outvars[:number], jaxpr.invars[first : first + number], strict=True))


def _dtype(variable: Any) -> Any:
    return getattr(variable.aval, "dtype", None)


def _is_eight_bit(variable: Any) -> bool:
    return _dtype(variable) in _EIGHT_BIT


def _is_ref(variable: Any) -> bool:
    return hasattr(variable.aval, "inner_aval")
