"""What may follow a product and still be part of it: steps, and folding them into one call.

Each rule adds a `Step` to a product; `fold` replays the steps onto the form that a kernel
computes, `activation(sum * scales + residual + bias) / out_scale`, or says which step does not fit.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from jax import lax

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import casts, graph, tiles
from jaxfp8._rewrite.ir.facts import (
    Amax,
    Factor,
    Factors,
    Magnitude,
    Product,
    Step,
    combine,
    constant,
    full_tiles,
    whole,
)
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.sites import Site
from jaxfp8._value import dtypes
from jaxfp8._value.spec import Shape

# How far a form has come, in the order of a kernel's work, and the last of these stages that each
# kind of step may follow: a kernel has one order of work, and no step overtakes another.
_STAGES = ("sum", "activation", "amax", "out scale", "clip or rounding", "quantised output")
_ORDER = {stage: i for i, stage in enumerate(_STAGES)}
_FOLLOWS = {
    "bias": "sum",
    "residual": "sum",
    "activation": "sum",
    "scale": "out scale",
    "cast": "clip or rounding",
    "clip": "clip or rounding",
    "round": "clip or rounding",
    "quantize": "clip or rounding",
    "same": "quantised output",
    "view": "quantised output",
}
_PENDING = ("out scale", "clip or rounding")
_VERBS = {
    "bias": "adds a bias",
    "residual": "adds a residual",
    "activation": "is an activation",
    "scale": "scales",
    "cast": "converts",
    "clip": "clips",
    "round": "rounds",
    "quantize": "quantises",
}


@dataclasses.dataclass
class Form:
    """The scaled dot that the steps so far amount to; `dtype` is that of the value they end in."""

    site: Site
    dtype: np.dtype
    lhs: Factors = ()
    rhs: Factors = ()
    residual: Value | None = None
    bias: Value | None = None
    activation: str = "none"
    out: Factors = ()
    low: float | None = None
    high: float | None = None
    rounded: bool = False
    quantized: np.dtype | None = None
    sealed: bool = False
    narrowed: bool = False
    views: tuple[Op, ...] = ()

    @property
    def stage(self) -> str:
        """How far the form has come: one of `_STAGES`."""
        if self.quantized is not None:
            return "quantised output"
        if self.low is not None or self.high is not None or self.rounded:
            return "clip or rounding"
        if self.out:
            return "out scale"
        if self.sealed:
            return "amax"
        return "sum" if self.activation == "none" else "activation"

    @property
    def ready(self) -> bool:
        """Whether a kernel computes exactly this, nothing pending."""
        return self.stage not in _PENDING

    def apply(self, step: Step) -> str | None:
        """Take one more step; a sentence where it does not fit."""
        if _ORDER[self.stage] > _ORDER[_FOLLOWS[step.kind]]:
            return f"{_VERBS[step.kind]} after the {self.stage}"
        if self.dtype == dtypes.INT32 and step.kind not in ("same", "view", "cast"):
            return f"{_VERBS[step.kind]} in int32, where a kernel computes in float32"
        return getattr(self, "_" + step.kind)(step)

    def _same(self, step: Step) -> str | None:
        return None

    def _view(self, step: Step) -> str | None:
        assert step.op is not None
        self.views += (step.op,)
        return None

    def _cast(self, step: Step) -> str | None:
        """A cast to another float; float16 makes infinite what a wider float does not."""
        if self.narrowed and step.data != np.float16:
            return f"widens what float16 may have made infinite to {step.data}"
        self.narrowed |= step.data == np.float16 != self.dtype
        self.dtype = step.data
        return None

    def _scale(self, step: Step) -> str | None:
        if self.stage != "sum" or self.residual is not None:
            self.out += step.data
            return None
        for factor in step.data:
            reason = self._assign(factor)
            if reason:
                return reason
            if self.bias is not None:
                self.bias = _scaled_bias(self.bias, factor, self.site.out_shape)
                if self.bias is None:
                    return "scales the bias by blocks"
        return None

    def _assign(self, factor: Factor) -> str | None:
        """Give an output factor to the side along whose axes it varies."""
        side = self.site.side_of(factor)
        if side is None:
            return (
                f"multiplies by an array of shape {list(factor.small.shape)} that varies along "
                "rows and columns together"
            )
        if side == "lhs":
            self.lhs += (self.site.lhs.from_output(factor),)
        else:
            self.rhs += (self.site.rhs.from_output(factor),)
        if self.site.too_fine(self.lhs, self.rhs):
            return "scales rows or columns that are scaled along the contracted axis already"
        return None

    def _bias(self, step: Step) -> str | None:
        bias = casts.cast(step.data, np.float32)
        self.bias = bias if self.bias is None else graph.add(self.bias, bias)
        return None

    def _residual(self, step: Step) -> str | None:
        if self.residual is not None:
            return "adds a second residual"
        self.residual = step.data
        return None

    def _activation(self, step: Step) -> str | None:
        self.activation, dtype = step.data
        return self._cast(Step("cast", dtype))

    def _clip(self, step: Step) -> str | None:
        """Clips in a row are one clip to the bounds they have in common."""
        low, high = step.data
        self.low = max((b for b in (self.low, low) if b is not None), default=None)
        self.high = min((b for b in (self.high, high) if b is not None), default=None)
        return None

    def _round(self, step: Step) -> str | None:
        self.rounded = True
        return None

    def _quantize(self, step: Step) -> str | None:
        dtype = step.data
        low, high = dtypes.finite_range(dtype)
        if dtypes.is_float8(dtype):
            if (self.low, self.high) != (low, high) or self.rounded:
                return f"converts to {dtype} without clipping to [{low:g}, {high:g}] first"
        elif not self._is_clipped_to(low, high):
            return f"clips to [{self.low}, {self.high}], not to the range of {dtype}"
        elif not self.rounded:
            return f"converts to {dtype} without rounding first"
        if self.out and out_scale(self) is None:
            return "scales the quantised output by blocks"
        self.quantized = np.dtype(dtype)
        return None

    def _is_clipped_to(self, low: float, high: float) -> bool:
        """Whether values end up in the range of an integer dtype as a saturating kernel has them.

        XLA saturates when it converts to int8; to uint8 it need not.
        """
        if low < 0:
            return (self.low is None or self.low <= low) and (
                self.high is None or self.high >= high
            )
        return (self.low == low or self._is_never_negative()) and self.high == high

    def _is_never_negative(self) -> bool:
        """Whether relu bounds the values from below: no scale after it may be negative."""
        scales = [graph.number(factor.small) for factor in self.out]
        positive = all(number is not None and number > 0 for number in scales)
        return self.low is None and self.activation == "relu" and positive


def _scaled_bias(bias: Value, factor: Factor, out_shape: Shape) -> Value | None:
    """The bias times a factor that was applied after it."""
    for tile, size in zip(factor.tiles, out_shape, strict=True):
        if tile not in (1, max(size, 1)):
            return None
    return graph.multiply(bias, casts.cast(factor.small, np.float32))


def fold(product: Product, amax_of: Product | None = None) -> Form | str:
    """The form that a product amounts to, or why there is none."""
    form = Form(product.site, product.site.out.dtype)
    for part in reversed(product.ancestry()):
        if part.step is not None and (reason := form.apply(part.step)):
            return reason
        if part is amax_of:
            form.sealed = True
    return form


def extend(product: Product, op: Op, *steps: Step) -> Product | None:
    """The product with further steps, or None where they do not fit."""
    for step in steps:
        product = Product(product.site, op.outputs[0], product, step, ready=False)
    form = fold(product)
    if isinstance(form, str):
        return None
    return dataclasses.replace(product, ready=form.ready)


def same(product: Product, op: Op) -> Product | None:
    """The product under another name."""
    return extend(product, op, Step("same"))


def convert(product: Product, op: Op) -> Product | None:
    """A cast between float types, from int32 to float, or to 8 bit."""
    source, target = op.inputs[0].dtype, op.outputs[0].dtype
    if target in dtypes.WIDE_FLOAT and (source in dtypes.WIDE_FLOAT or source == np.int32):
        return extend(product, op, Step("cast", target))
    if target in dtypes.EIGHT_BIT and source in dtypes.WIDE_FLOAT:
        return extend(product, op, Step("quantize", target))
    return None


def scale(product: Product, op: Op, factors: Factors) -> Product | None:
    """Multiplication by a small array."""
    value, out = product.value, op.outputs[0]
    if out.dtype not in dtypes.WIDE_FLOAT or value.shape != out.shape:
        return None
    placed = [to_output(product, f.at(out.shape)) for f in factors]
    if any(f is None or f.small.dtype not in dtypes.WIDE_FLOAT for f in placed):
        return None
    return extend(product, op, Step("scale", tuple(placed)))


def add(
    walk: Context, product: Product, op: Op, other: Value, sign: tuple[int, int]
) -> Product | None:
    """Addition of a bias (an array that broadcasts) or of a residual (one that does not)."""
    out = op.outputs[0]
    if product.value.shape != out.shape or out.dtype not in dtypes.WIDE_FLOAT:
        return None
    steps = []
    if sign[0] < 0:
        steps.append(Step("scale", (constant(-1.0, product.site.out_shape),)))
    addend = _bias(walk, product, other) or _residual(product, other)
    if addend is None:
        return None
    if sign[1] < 0:
        addend = Step(addend.kind, graph.negate(addend.data))
    return extend(product, op, *steps, addend)


def _bias(walk: Context, product: Product, other: Value) -> Step | None:
    """The addend as an array of the output's rank with axes of size 1, if it is constant there."""
    factors = walk.factors(other)
    factor = factors[0].at(product.value.shape)
    if len(factors) != 1 or factor.small.size == product.value.size > 1:
        return None
    placed = to_output(product, factor)
    if placed is None or placed.small.dtype not in dtypes.WIDE_FLOAT:
        return None
    shape = product.site.out_shape
    if any(t not in (1, max(s, 1)) for t, s in zip(placed.tiles, shape, strict=True)):
        return None
    return Step("bias", placed.small)


def _residual(product: Product, other: Value) -> Step | None:
    """The addend as a whole array."""
    if other.shape != product.value.shape or other.dtype not in dtypes.WIDE_FLOAT:
        return None
    placed = to_output(product, whole(other))
    return Step("residual", placed.small) if placed is not None else None


def bound(product: Product, op: Op, source: Value) -> Product | None:
    """relu; or clip against numbers, or round, on the way to a quantised output."""
    if source.dtype not in dtypes.WIDE_FLOAT:
        return None
    if op.name == "round":
        nearest_even = op.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN
        return extend(product, op, Step("round")) if nearest_even else None
    if op.name == "clamp":
        limits = (_limit(op.inputs[0]), _limit(op.inputs[2]))
        return extend(product, op, Step("clip", limits)) if None not in limits else None
    limit = _limit(op.inputs[1] if op.inputs[0] is source else op.inputs[0])
    if limit is None:
        return None
    if op.name == "max" and limit == 0 and (relu := activate(product, op, "relu")) is not None:
        return relu
    return extend(product, op, Step("clip", (limit, None) if op.name == "max" else (None, limit)))


def _limit(value: Value) -> float | None:
    """The number to clip at; NaN is none."""
    number = graph.number(value)
    return None if number is None or math.isnan(number) else number


def activate(product: Product, op: Op, name: str) -> Product | None:
    """An activation of the product, which the op completes."""
    return extend(product, op, Step("activation", (name, op.outputs[0].dtype)))


def magnitude(product: Product) -> Magnitude | None:
    """|product|, where the product is a value that a kernel holds."""
    is_float = product.value.dtype in dtypes.WIDE_FLOAT  # of 8 bits, it was rounded or clipped
    return Magnitude(product) if product.ready and is_float else None


def amax(fact: Any, op: Op) -> Amax | None:
    """The maximum of |product| over some axes."""
    if not isinstance(fact, Magnitude):
        return None
    views = [s for s in fact.product.steps() if s.kind == "view"]
    rank, axes = len(fact.product.value.shape), op.params["axes"]
    if views and len(axes) != rank:
        return None
    shape = fact.product.site.out_shape
    kept = tuple(1 if views or axis in axes else size for axis, size in enumerate(shape))
    return Amax(fact.product, op.outputs[0], kept)


def to_output(product: Product, factor: Factor) -> Factor | None:
    """A factor of the product's value as one of the dot's own output, views undone."""
    for step in reversed(product.steps()):
        if step.op is not None:
            undone = _undo(step.op, factor)
            if undone is None:
                return None
            factor = undone
    return factor


def _undo(op: Op, factor: Factor) -> Factor | None:
    shape, new_shape = op.outputs[0].shape, op.inputs[0].shape
    if op.name == "transpose":
        inverse = tuple(int(axis) for axis in np.argsort(op.params["permutation"]))
        return Factor(
            graph.transpose(factor.small, inverse), tiles.transpose(factor.tiles, inverse)
        )
    tiled = tiles.reshape(shape, factor.tiles, new_shape)
    return Factor(graph.reshape(factor.small, tiled[0]), tiled[1]) if tiled else None


def view(product: Product, op: Op) -> Product | None:
    """A transpose, or a reshape of any name, of the product."""
    return extend(product, op, Step("view", op=op))


def out_scale(form: Form) -> Value | None:
    """The array that dequantises the output of a form, of the output's rank; None for none."""
    if not form.out:
        return None
    shape = form.site.out_shape
    total = combine(form.out, shape)
    if any(t not in (1, full) for t, full in zip(total.tiles, full_tiles(shape), strict=True)):
        return None
    return graph.reciprocal(total.small)
