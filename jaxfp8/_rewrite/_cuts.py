"""Whether a function cuts or bends the gradient of dequantised data on its way to a product.

`stop_gradient` and custom rules leave no trace in a derivative: an array that is made again from
its 8-bit data would have another derivative than the one it stands for. The first derivative is
not affected, because nothing is differentiated through what is made again; the second one is.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from jaxfp8 import _compat, _dtypes

_EIGHT_BIT = {dtype.name for dtype in _dtypes.EIGHT_BIT}
# What ends the trail from 8-bit data: a product or sum is data of its own.
_ENDS = ("dot_general", "conv_general_dilated", "reduce_sum", "ragged_dot", "ragged_dot_general")


def cuts_gradients(jaxpr: Any) -> bool:
    """Whether `stop_gradient` or a custom rule is applied to what may be dequantised data."""
    return _follow(jaxpr, set())[0]


def _follow(jaxpr: Any, data: Set[Any]) -> tuple[bool, Set[Any]]:
    """Whether there is a cut, and the variables that may be dequantised data."""
    known = set(data)
    for eqn in jaxpr.eqns:
        given = [v for v in eqn.invars if _is_data(v, known)]
        if not given or eqn.primitive.name in _ENDS:
            continue
        if eqn.primitive.name == "stop_gradient":
            return True, known
        inner = _compat.subjaxprs(eqn)
        if not inner:
            known.update(eqn.outvars)
        for region in inner:
            cut, reached = _follow(region, _inputs(region, eqn, known))
            leaves = any(_is_data(v, reached) for v in region.outvars)
            if cut or (leaves and eqn.primitive.name.startswith("custom_")):
                return True, known
            known.update(eqn.outvars if leaves else ())
    return False, known


def _is_data(variable: Any, known: Set[Any]) -> bool:
    if _compat.is_literal(variable):
        return False
    return variable in known or str(getattr(variable.aval, "dtype", "")) in _EIGHT_BIT


def _inputs(region: Any, eqn: Any, known: Set[Any]) -> Set[Any]:
    """The inputs of a region that may be dequantised data; all of them where it is not plain."""
    if len(region.invars) != len(eqn.invars):
        return set(region.invars)
    pairs = zip(region.invars, eqn.invars, strict=True)
    return {inner for inner, outer in pairs if _is_data(outer, known)}
