"""What stands inside equations that are not entered: counted, or reported as missed."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxfp8 import _compat, _dtypes
from jaxfp8._rewrite import _graph
from jaxfp8._rewrite._dots import Site
from jaxfp8._rewrite._facts import Lost, Scaled
from jaxfp8._rewrite._graph import Value

if TYPE_CHECKING:
    from jaxfp8._rewrite._walk import Walk

# A kernel of the user's own: its dots are on blocks in fast memory, and are meant as they are.
_KERNELS = ("pallas_call",)


@functools.lru_cache(maxsize=4096)
def holds_eight_bit(jaxpr: Any) -> bool:
    """Whether any variable of a jaxpr, at any depth, is 8-bit data."""
    atoms = [*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    here = any(getattr(v.aval, "dtype", None) in _dtypes.EIGHT_BIT for v in atoms)
    inner = (j for eqn in jaxpr.eqns for j in _compat.subjaxprs(eqn))
    return here or any(map(holds_eight_bit, inner))


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
        f"rewrite inside `{name}`",
        callers,
    )
    for dot, outer in _dots_in(jaxprs, (*callers, eqn)):
        values = [_graph.value_of(v.aval) for v in dot.invars]
        op = _graph.equation_op(dot, values, outer)
        fact = lost if reached else None
        site = Site(op, ((values[0], fact), (values[1], fact)))
        site.miss(lost.reason, lost.remedy)
        walk.see(site)


def _dots_in(
    jaxprs: Sequence[Any], callers: tuple[Any, ...]
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Every dot_general in jaxprs, with the equations around it."""
    for jaxpr in jaxprs:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                yield eqn, callers
            elif eqn.primitive.name not in _KERNELS:
                yield from _dots_in(_compat.subjaxprs(eqn), (*callers, eqn))
