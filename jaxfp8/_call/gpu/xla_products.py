"""Products that are left to XLA on a GPU: those so small that the call costs more than it saves.

XLA compiles such a product as one kernel. The kernel reads codes, makes floats of them in
registers, and computes the operations behind the product. A custom call is a launch more, and ends
every fusion around it.

Where the border lies was measured on an H100 alone; docs/measured_h100.md has the table. So other
GPUs keep the call, and so do programs that are exported to run elsewhere.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxfp8._call.reference import dot_reference
from jaxfp8._value import dtypes
from jaxfp8._value.spec import ScaledDotSpec

# How reports name these products, beside the paths of the library.
NAME = "xla"

MEASURED_ON = 90
# Stored values of the 8-bit side, where the other side is in floats. XLA was faster with one row
# (1024 x 4096 in 3.9 µs and not 6.7) and with 4096; with 4096 x 4096 values it was level.
_MOST_WEIGHTS = 8 << 20
# The same for one row and weights [K, N], which XLA reads slowly: 12.9 µs for 1024 x 4096.
_MOST_BY_COLUMNS = 1 << 20
# The same with 8 bits on both sides, and the most rows: XLA multiplies 16 bits.
_MOST_IN_8_BITS = 2 << 20
_MOST_ROWS = 64
# Sums of integers are exact in float32 up to here.
_EXACT = 2**24


def takes(spec: ScaledDotSpec, kernel: str, compute_capability: int | None) -> bool:
    """Whether XLA computes a product on a GPU, rather than the call.

    Args:
      spec: the problem.
      kernel: the path of the library that was asked for; "" for the best.
      compute_capability: 10 * major + minor of the device; None where it is not known.
    """
    if kernel != "" or compute_capability != MEASURED_ON or multiplied_in(spec) is None:
        return False
    if spec.lhs.batch:
        return False  # attention over a cache took as long either way
    codes = [side for side in (spec.lhs, spec.rhs) if dtypes.is_eight_bit(side.dtype)]
    stored = max(math.prod(side.shape) for side in codes)
    rows = min(math.prod(side.sizes(side.free)) for side in (spec.lhs, spec.rhs))
    if len(codes) == 2:
        return stored <= _MOST_IN_8_BITS and rows <= _MOST_ROWS
    is_last = len(codes[0].shape) - 1 in codes[0].contracting
    return stored <= (_MOST_WEIGHTS if is_last or rows > 1 else _MOST_BY_COLUMNS)


def multiplied_in(spec: ScaledDotSpec) -> DTypeLike | None:
    """The type that holds the values of both sides exactly; None where XLA is not asked.

    Products of 16-bit floats are exact in float32. Scales are multiplied with the sums.
    """
    sides = (spec.lhs, spec.rhs)
    if any(side.zero_point or (side.scale and side.scale_varies) for side in sides):
        return None
    if spec.epilogue.out_dtype == "int32" or spec.precision != "default":
        return None
    wide = {side.dtype for side in sides if not dtypes.is_eight_bit(side.dtype)}
    if not wide:
        integers = all(dtypes.is_int8(side.dtype) for side in sides)
        return None if integers and _largest_sum(spec) > _EXACT else jnp.bfloat16
    return next(iter(wide))


def _largest_sum(spec: ScaledDotSpec) -> int:
    """Of products of two integer codes."""
    largest = (255 if side.dtype == "uint8" else 128 for side in (spec.lhs, spec.rhs))
    return spec.contracting_size * math.prod(largest)


def scaled_dot(*operands: jax.Array, spec: ScaledDotSpec, kernel: str) -> tuple[jax.Array, ...]:
    """The scaled dot as XLA is given it: floats, their sums in float32, and then the scales.

    Weights that a loop does not change are decoded in each turn. Without a barrier XLA decodes a
    stack of them in front of the loop, and stores it: 48 MiB where the codes have 24. Each operand
    has a barrier of its own. So XLA still sees that products share an input, and joins them.
    """
    del kernel  # of the library, which is not called
    named = dict(zip(spec.operand_names(), operands, strict=True))
    for name, side in (("lhs", spec.lhs), ("rhs", spec.rhs)):
        if dtypes.is_eight_bit(side.dtype):
            named[name] = jax.lax.optimization_barrier(named[name])
    return dot_reference.scaled_dot(spec, *named.values(), multiplied_in=multiplied_in(spec))
