"""The epilogue of a call: rules to add steps to a product."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jax import lax

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import constants, graph
from jaxfp8._rewrite.ir.factors import Factor, Factors, all_moved, constant, factor_of
from jaxfp8._rewrite.ir.facts import Amax, Magnitude, Product, Step
from jaxfp8._rewrite.ir.fused import FusedDot
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.rules.registry import rule
from jaxfp8._value import dtypes


def extend(product: Product, op: Op, *steps: Step, views: tuple[Op, ...] = ()) -> Product | None:
    """The product with further steps, or None if they do not fit."""
    views = product.views + views
    for step in steps:
        product = Product(product.dot, op.outputs[0], product, step, views, ready=False)
    fused = product.fused()
    return None if isinstance(fused, str) else dataclasses.replace(product, ready=fused.ready)


def same(product: Product, op: Op) -> Product | None:
    """The product, renamed."""
    return extend(product, op, lambda fused: None)


def convert(product: Product, op: Op) -> Product | None:
    """A cast between float types, from int32 to float, or to 8 bit."""
    source, target = op.inputs[0].dtype, op.outputs[0].dtype
    if target in dtypes.WIDE_FLOAT and (source in dtypes.WIDE_FLOAT or source == np.int32):
        return extend(product, op, lambda fused: fused.cast(target))
    if target in dtypes.EIGHT_BIT and source in dtypes.WIDE_FLOAT:
        return extend(product, op, lambda fused: fused.quantize(target))
    return None


def scale(product: Product, op: Op, factors: Factors) -> Product | None:
    """Multiplication by a small array."""
    value, out = product.value, op.outputs[0]
    if out.dtype not in dtypes.WIDE_FLOAT or value.shape != out.shape:
        return None
    placed = all_moved(factors, lambda f: to_output(product, f.at(out.shape)))
    if placed is None or any(f.small.dtype not in dtypes.WIDE_FLOAT for f in placed):
        return None
    return extend(product, op, lambda fused: fused.scale(placed))


def add(
    walk: Context, product: Product, op: Op, other: Value, sign: tuple[int, int]
) -> Product | None:
    """Addition of a bias (broadcast to the output) or of a residual (of the output's shape).

    Groups have a bias of their own, and none in rows of no group. So each addend is a residual.

    `sign` holds the signs of the product and of the other value.
    """
    out = op.outputs[0]
    if product.value.shape != out.shape or out.dtype not in dtypes.WIDE_FLOAT:
        return None
    bias = _bias(walk, product, other)
    array = _residual(product, other) if bias is None else bias
    if array is None or (product.dot.site.grouping and _is_faster_behind(other)):
        return None
    addend = array if sign[1] > 0 else graph.negate(array)
    minus = constant(-1.0, product.dot.out_shape)
    signs: tuple[Step, ...] = () if sign[0] > 0 else (lambda fused: fused.scale((minus,)),)
    if bias is None or product.dot.site.grouping:
        return extend(product, op, *signs, lambda fused: fused.add_residual(addend))
    return extend(product, op, *signs, lambda fused: fused.add_bias(addend))


def _bias(walk: Context, product: Product, other: Value) -> Value | None:
    """The addend at the output's rank, with size 1 for its constant axes, if it has any."""
    factors = walk.factors(other)
    factor = factors[0].at(product.value.shape)
    if len(factors) != 1 or factor.small.size == product.value.size > 1:
        return None
    placed = to_output(product, factor)
    if placed is None or placed.small.dtype not in dtypes.WIDE_FLOAT:
        return None
    shape = product.dot.out_shape
    if any(t not in (1, max(s, 1)) for t, s in zip(placed.tiles, shape, strict=True)):
        return None
    return placed.small


def _is_faster_behind(value: Value) -> bool:
    """Whether rows are picked in float32, such as the bias of each row's expert.

    XLA picks them in the loop of its own epilogue. The call reads them from memory, 1.1x slower
    with K of 256. In 16 bits the call is faster: XLA's loop computes in float32 all the same.
    """
    source = value
    while (op := graph.producer(source, "convert_element_type")) is not None:
        source = op.inputs[0]
    return value.dtype == np.float32 and graph.producer(source, "gather") is not None


def _residual(product: Product, other: Value) -> Value | None:
    """The addend as a whole array."""
    if other.shape != product.value.shape or other.dtype not in dtypes.WIDE_FLOAT:
        return None
    placed = to_output(product, factor_of(other))
    return placed.small if placed is not None else None


@rule("max", "min", "clamp", "round")
def bound(walk: Context, op: Op) -> Product | None:
    """relu; or part of a quantized output: a clip to its range, a rounding to whole numbers."""
    source = op.inputs[1] if op.name == "clamp" else op.inputs[0]
    if op.name in ("max", "min") and walk.product(source) is None:
        source = op.inputs[1]
    product = walk.product(source)
    if product is None or source.dtype not in dtypes.WIDE_FLOAT:
        return None
    if op.name == "round":
        nearest_even = op.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN
        return extend(product, op, FusedDot.round) if nearest_even else None
    if op.name == "clamp":
        low, high = _limit(op.inputs[0]), _limit(op.inputs[2])
        both = low is not None and high is not None
        return extend(product, op, lambda fused: fused.clip(low, high)) if both else None
    limit = _limit(op.inputs[1] if op.inputs[0] is source else op.inputs[0])
    if limit is None:
        return None
    if op.name == "max" and limit == 0 and (relu := activate(product, op, "relu")) is not None:
        return relu
    bounds = (limit, None) if op.name == "max" else (None, limit)
    return extend(product, op, lambda fused: fused.clip(*bounds))


def _limit(value: Value) -> float | None:
    """The number to clip at; None if it is unknown or NaN."""
    number = constants.number(value)
    return None if number is None or math.isnan(number) else number


def activate(product: Product, op: Op, name: str) -> Product | None:
    """An activation of the product, completed by the op."""
    return extend(product, op, lambda fused: fused.activate(name, op.outputs[0].dtype))


@rule("abs")
def magnitude(walk: Context, op: Op) -> Magnitude | None:
    """|product|, the start of an amax, if a kernel holds the product in float."""
    product = walk.product(op.inputs[0])
    if product is None or not product.ready:
        return None
    # A product in 8 bits was rounded or clipped, and a kernel's amax is of the values before.
    return Magnitude(product) if product.value.dtype in dtypes.WIDE_FLOAT else None


@rule("reduce_max")
def amax(walk: Context, op: Op) -> Amax | None:
    """The maximum of |product| over some axes."""
    fact = walk.fact(op.inputs[0])
    if not isinstance(fact, Magnitude):
        return None
    views = fact.product.views
    rank, axes = len(fact.product.value.shape), op.params["axes"]
    if views and len(axes) != rank:
        return None
    shape = fact.product.dot.out_shape
    kept = tuple(1 if views or axis in axes else size for axis, size in enumerate(shape))
    return Amax(fact.product, op.outputs[0], kept)


def to_output(product: Product, factor: Factor) -> Factor | None:
    """A factor of the product's value as one of the dot's own output, views undone."""
    undone: Factor | None = factor
    for op in reversed(product.views):
        shape, before = op.outputs[0].shape, op.inputs[0].shape
        if undone is not None and op.name == "transpose":
            undone = undone.placed(np.argsort(op.params["permutation"]).tolist(), before)
        elif undone is not None:
            undone = undone.reshaped(shape, before)
    return undone


def view(product: Product, op: Op) -> Product | None:
    """A transpose, or a reshape of any name, of the product."""
    return extend(product, op, lambda fused: fused.view(op), views=(op,))
