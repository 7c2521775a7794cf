"""Values known before the program runs, as one number or as all their entries."""

from __future__ import annotations

import jax
import numpy as np

from jaxfp8._rewrite.ir import emit, graph
from jaxfp8._rewrite.ir.graph import Array, Value

# Marks a value as varying along a mesh axis. JAX binds these inside `shard_map` alone.
_VARY = ("pvary", "pcast")
_PASS_CONSTANT = ("convert_element_type", "broadcast_in_dim", "reshape", "copy", "copy_p", *_VARY)


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
        if dtype.kind in "iu" and not np.iinfo(dtype).min <= scalar <= np.iinfo(dtype).max:
            return None  # not even after truncation
        with np.errstate(all="ignore"):
            scalar = scalar.astype(dtype)
    return float(scalar)


# The largest index, in entries, to evaluate while a function is traced.
_MOST_KNOWN = 2**22


def known(value: Value) -> np.ndarray | None:
    """The entries of a constant array. None if it is large, or depends on an input or a device."""
    for source in graph.behind([value]):
        is_unknown = source.op is None and source.literal is None and source.concrete is None
        if is_unknown or source.size > _MOST_KNOWN or _has_effects(source):
            return None
    # The user's transfer guard and NaN check concern the function, not this evaluation.
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"), jax.debug_nans(False):
        return np.asarray(evaluated(value))


def _has_effects(value: Value) -> bool:
    """Whether the op of a value has effects. JAX lists a named mesh axis as one."""
    return value.op is not None and value.op.eqn is not None and bool(value.op.eqn.effects)


def evaluated(value: Value) -> Array:
    """A value that depends on known arrays alone."""
    every = [*graph.behind([value])]
    given = [(v, v.concrete) for v in every if v.op is None and v.literal is None]
    inputs, arrays = [v for v, _ in given], [array for _, array in given if array is not None]
    same = {v: v.op.inputs[0] for v in every if v.op is not None and v.op.name in _VARY}
    return emit.schedule([value], (), same, inputs).run(arrays)[0]
