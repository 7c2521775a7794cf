"""Value numbering: finds values equal by the same computation.

A program may quantize its input once for each product. JAX traces each one anew, so one array has
several values.
"""

from __future__ import annotations

from collections.abc import Hashable

from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._value import compat

# Values this many operations back are compared by computation, and older ones by identity.
_FARTHEST = 16


# Pure to JAX, but two calls may give different results.
_DRAWS = ("rng_uniform", "pure_callback")


class Numbering:
    """Numbers values. Two share a number only if they are equal in every run."""

    def __init__(self) -> None:
        self._of_values: dict[Value, int] = {}
        self._of_keys: dict[Hashable, int] = {}

    def __call__(self, value: Value, farthest: int = _FARTHEST) -> int:
        """The number of a value."""
        if value not in self._of_values:
            key = self._key(value, farthest)
            self._of_values[value] = self._of_keys.setdefault(key, len(self._of_keys))
        return self._of_values[value]

    def _key(self, value: Value, farthest: int) -> Hashable:
        if value.literal is not None:
            return (value.literal.dtype.name, value.literal.shape, value.literal.tobytes())
        op = value.op
        params = None if op is None or farthest == 0 else _comparable(op)
        if op is None or params is None:
            return value
        inputs = tuple(self(v, farthest - 1) for v in op.inputs)
        return (op.name, params, value.index, value.dtype.name, inputs)


def _comparable(op: Op) -> Hashable | None:
    """The parameters of a pure equation; None for any other op, or if they are not hashable."""
    if op.eqn is None or op.effectful or op.name in _DRAWS or compat.subjaxprs(op.eqn):
        return None
    params = tuple(sorted(op.params.items()))
    try:
        hash(params)
    except TypeError:
        return None
    return params
