"""Products that JAX scales itself: `jax.nn.scaled_matmul` and what is made of it, `lax.scaled_dot`.

Scales are one for each block along the contracted axis, often of float8_e8m0fnu: exact powers of
two in bfloat16 too, as which a call takes them.
"""

from __future__ import annotations

from typing import Any

from jaxfp8._call.primitive import scaled_dot_p
from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import casts, graph
from jaxfp8._rewrite.ir.facts import Factor, Factors, Lost, Product, Scaled
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.sites import Site
from jaxfp8._rewrite.rules import arithmetic
from jaxfp8._rewrite.rules.dot import product_of
from jaxfp8._value import dtypes

_LAX = "scaled_dot"  # so is ours named, which is no such product but a call of a kernel
NAMES = (_LAX, "scaled_matmul", "scaled_matmul_wrapper")
_SERVED = "store it in float8_e4m3fn, float8_e5m2 or int8"


def is_one(eqn: Any) -> bool:
    """Whether an equation is such a product."""
    return eqn.primitive.name in NAMES and eqn.primitive is not scaled_dot_p


@arithmetic.rule(*NAMES)
def scaled_product(walk: Context, op: Op) -> Product | None:
    """A product, if an operand is 8-bit data: its blocks have the scales that the op is given."""
    if not is_one(op.eqn):
        return None
    scales = _scales(op, 0), _scales(op, 1)
    left, right = (_given(walk, op, i, scales[i]) for i in (0, 1))
    return product_of(walk, Site(op, (left, right), scales))


def _given(
    walk: Context, op: Op, index: int, scales: Factors
) -> tuple[Value, Scaled | Lost | None]:
    """An operand with what is known of it."""
    value = op.inputs[index]
    fact = walk.scaled(value)
    if fact is not None:
        return value, fact.scaled(scales)
    if value.dtype not in dtypes.WIDE_FLOAT:
        reason = f"`{op.name.removesuffix('_wrapper')}` is given {value.dtype}, which no kernel has"
        return value, Lost(op.eqn, reason, _SERVED, op.callers)
    # `lax.scaled_dot` multiplies in bfloat16.
    data = casts.cast(value, dtypes.BFLOAT16) if op.name == _LAX else value
    return data, walk.lost(value)


def _scales(op: Op, index: int) -> Factors:
    """What an operand is scaled by, as the op rounds it; nothing where that is 1."""
    data, scale = op.inputs[index], op.inputs[index + 2]
    if graph.number(scale) == 1:
        return ()
    wide = scale.dtype in dtypes.WIDE_FLOAT and op.name != _LAX
    small = scale if wide else casts.cast(scale, dtypes.BFLOAT16)
    counts = [max(count, 1) for count in scale.shape]
    tiles = (max(-(-size // n), 1) for size, n in zip(data.shape, counts, strict=True))
    return (Factor(small, tuple(tiles)),)
