"""Values known before the program runs, as one number or as all their entries."""

from __future__ import annotations

import jax
import numpy as np

from jaxfp8._rewrite.ir.graph import Array, Op, Value

_PASS_CONSTANT = ("convert_element_type", "broadcast_in_dim", "reshape", "copy", "copy_p")


def number(value: Value) -> float | None:
    """The number in every entry of the value, if it is known; else None."""
    dtypes = []
    while value.literal is None and value.number is None:
        if value.op is None or value.op.name not in _PASS_CONSTANT:
            return None
        dtypes.append(value.dtype)
        value = value.op.inputs[0]
    entries = np.asarray(value.number, value.dtype) if value.literal is None else value.literal
    if entries.size != 1 or value.dtype.kind == "c":
        return None
    scalar = entries.reshape(())
    for dtype in reversed(dtypes):
        if dtype.kind in "iu" and not _holds(dtype, float(scalar)):
            return None
        with np.errstate(all="ignore"):
            scalar = scalar.astype(dtype)
    return float(scalar)


# The largest index, in entries, to evaluate while a function is traced.
_MOST_KNOWN = 2**22


def known(value: Value) -> np.ndarray | None:
    """The entries of a constant array. None if it depends on an input or is large."""
    order: dict[Op, None] = {}
    stack = [(value, False)]
    while stack:
        top, is_ready = stack.pop()
        if top.size > _MOST_KNOWN or (top.op is None and _given(top) is None):
            return None
        if top.op is None or top.op in order:
            continue
        if top.op.effectful:
            return None
        if is_ready:
            order[top.op] = None
        else:
            stack += [(top, True), *((source, False) for source in top.op.inputs)]
    return _evaluated(value, list(order))


def _evaluated(value: Value, ops: list[Op]) -> np.ndarray:
    env: dict[Value, Array] = {}

    def read(value: Value) -> Array:
        array = _given(value) if value.op is None else env[value]
        assert array is not None, "`known` looked"
        return array

    # The user's transfer guard and NaN check concern the function, not this evaluation.
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"), jax.debug_nans(False):
        for op in ops:
            env.update(zip(op.outputs, op.evaluate(*map(read, op.inputs)), strict=True))
    return np.asarray(read(value))


def _given(value: Value) -> Array | None:
    """The array of an input of a program, if it is known."""
    return value.concrete if value.literal is None else value.literal


def _holds(dtype: np.dtype, number: float) -> bool:
    """Whether an integer dtype holds a number after truncation."""
    return bool(np.iinfo(dtype).min <= number <= np.iinfo(dtype).max)
