"""The tables of rules, and the reasons and remedies for ended facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir.facts import Fact
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.scaled import Lost
from jaxfp8._value import dtypes

# From the walk and an op to the fact about its output, or a sequence of facts for several outputs.
# None if nothing is known, `Lost` if the op ends a fact and another operation would have kept it.
Rule = Callable[[Context, Op], Fact | Sequence[Fact | None] | None]
Function = TypeVar("Function")

RULES: dict[str, Rule] = {}


def into(table: dict[str, Function], names: Sequence[str]) -> Callable[[Function], Function]:
    """A decorator to put a function into a table, by the names of primitives."""

    def register(function: Function) -> Function:
        table.update(dict.fromkeys(names, function))
        return function

    return register


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of primitives."""
    return into(RULES, names)


def lost(op: Op, reason: str, remedy: str) -> Lost:
    """The fact that 8-bit data was lost at `op`."""
    return Lost(op, f"`{op.name}` {reason}", remedy)


# Remedies shared by several rules.
STAYS_WIDE = "the product needs the dequantized values themselves, so this dot stays wide"
BEFORE = "apply it to the 8-bit array and to the scales, before dequantizing"

# If the bounds bind, the product needs the bounded values. If they cannot bind, nothing is lost.
_BOUNDS = ("max", "min", "clamp")
_UNBOUND = f"drop it if it never binds; else {STAYS_WIDE.replace('dequantized', 'bounded')}"
_BEFORE_DEQUANTIZING = (
    "gather",
    "slice",
    "dynamic_slice",
    "split",
    "rev",
    "reshape",
    "transpose",
    "squeeze",
    "device_put",
    "layout_constraint",
    "xla_metadata_value",
)


def remedy_for(name: str) -> str:
    """What to do about a primitive without a rule for dequantized values."""
    if name in _BOUNDS:
        return _UNBOUND
    if name in _BEFORE_DEQUANTIZING:
        return BEFORE
    return (
        f"the product needs what `{name}` makes of them, so this dot stays wide; for an 8-bit "
        "product, quantize that (`jaxfp8.quantize`)"
    )


def is_wide_float(value: Value) -> bool:
    """Whether the value is float32, bfloat16 or float16."""
    return value.dtype in dtypes.WIDE_FLOAT
