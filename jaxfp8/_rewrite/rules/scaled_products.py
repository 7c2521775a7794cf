"""Products with scales of their own: `jax.nn.scaled_matmul`, its primitive in JAX, and
`lax.scaled_dot`.

They have one scale for each block along the contracting axis. Its dtype is often float8_e8m0fnu.
These powers of two are exact in bfloat16. A call takes their bytes.
"""

from __future__ import annotations

from jaxfp8._call.ops.dot import scaled_dot_p
from jaxfp8._call.ops.joint import dots_of, joint_dots_p
from jaxfp8._call.ops.ragged_call import ragged_dot_p
from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import casts, constants
from jaxfp8._rewrite.ir.factors import Factor, Factors
from jaxfp8._rewrite.ir.facts import Product
from jaxfp8._rewrite.ir.graph import Equation, Op, Value
from jaxfp8._rewrite.ir.scaled import Known, Lost
from jaxfp8._rewrite.ir.sites import DotSite
from jaxfp8._rewrite.rules.dot import product_of
from jaxfp8._rewrite.rules.registry import rule
from jaxfp8._value import dtypes

# The primitive of `lax.scaled_dot`. Our own, a call of a kernel, has the same name.
_LAX = "scaled_dot"
NAMES = (_LAX, "scaled_matmul", "scaled_matmul_wrapper")
_SERVED = "store it in float8_e4m3fn, float8_e5m2 or int8"


def is_one(eqn: Equation) -> bool:
    """Whether an equation is such a product."""
    return eqn.primitive.name in NAMES and eqn.primitive is not scaled_dot_p


@rule(*NAMES)
def scaled_product(walk: Context, op: Op) -> Product | None:
    """A product, if an operand is 8-bit data: the op gives the scales of its blocks."""
    if not is_one(op.equation):
        return None
    scales = _scales(op, 0), _scales(op, 1)
    left, right = (_given(walk, op, i, scales[i]) for i in (0, 1))
    return product_of(walk, DotSite(op, (left, right), scales))


def _given(walk: Context, op: Op, index: int, scales: Factors) -> tuple[Value, Known]:
    """An operand with the fact about its data."""
    value = op.inputs[index]
    fact = walk.scaled(value)
    if fact is not None:
        return value, fact.scaled(scales)
    if value.dtype not in dtypes.WIDE_FLOAT:
        reason = f"`{op.name.removesuffix('_wrapper')}` is given {value.dtype}, which no kernel has"
        return value, Lost(op, reason, _SERVED)
    # `lax.scaled_dot` multiplies in bfloat16.
    data = casts.cast(value, dtypes.BFLOAT16) if op.name == _LAX else value
    return data, walk.lost(value)


def _scales(op: Op, index: int) -> Factors:
    """The scale of an operand, rounded as the op rounds it; () if it is 1."""
    data, scale = op.inputs[index], op.inputs[index + 2]
    if constants.number(scale) == 1:
        return ()
    wide = scale.dtype in dtypes.WIDE_FLOAT and op.name != _LAX
    small = scale if wide else casts.cast(scale, dtypes.BFLOAT16)
    counts = [max(count, 1) for count in scale.shape]
    tiles = (max(-(-size // n), 1) for size, n in zip(data.shape, counts, strict=True))
    return (Factor(small, tuple(tiles)),)


def is_call(eqn: Equation) -> bool:
    """Whether an equation is a scaled dot, or several in one."""
    return eqn.primitive in (scaled_dot_p, joint_dots_p)


def calls_of(op: Op) -> list[Op]:
    """The scaled or ragged dots of an op: one, or each one of a joined call."""
    if op.equation.primitive is joint_dots_p:
        name, dots = scaled_dot_p.name, dots_of(op.inputs, op.params)
        return [Op(name, own, None, {"spec": spec}, op.eqn, op.callers) for spec, own in dots]
    return [op] if op.equation.primitive in (scaled_dot_p, ragged_dot_p) else []
