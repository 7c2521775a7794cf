"""A dot with the steps after it, as one scaled dot; or the first misfit among them.

A kernel works in one order: `activation(sum * scales + residual + bias) / out_scale`, then clip,
round and convert. It takes the steps after a dot one by one, and no step may overtake another.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Concatenate, Literal, ParamSpec

import numpy as np

from jaxfp8._rewrite.ir import casts, constants, graph
from jaxfp8._rewrite.ir.factors import Factor, Factors, combine, full_tiles
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.sides import ScaledSide, grows_too_fine
from jaxfp8._rewrite.ir.sites import DotSite
from jaxfp8._value import dtypes
from jaxfp8._value.spec import Shape

Args = ParamSpec("Args")
Apply = Callable[Concatenate["FusedDot", Args], str | None]

# The stages of a kernel's work, in its order.
_STAGES = ("sum", "activation", "amax", "out scale", "clip or rounding", "quantized output")
_ORDER = {stage: i for i, stage in enumerate(_STAGES)}
# At these stages a call cannot stop.
_PENDING = ("out scale", "clip or rounding")


def _step(last: str, verb: str, *, in_int32: bool = False) -> Callable[[Apply[Args]], Apply[Args]]:
    """A step that may follow stages up to `last`; it returns a sentence if it does not fit."""

    def checking(apply: Apply[Args]) -> Apply[Args]:
        @functools.wraps(apply)
        def checked(fused: FusedDot, *args: Args.args, **kwargs: Args.kwargs) -> str | None:
            if _ORDER[fused.stage] > _ORDER[last]:
                return f"{verb} after the {fused.stage}"
            if fused.dtype == dtypes.INT32 and not in_int32:
                return f"{verb} in int32, where a kernel computes in float32"
            return apply(fused, *args, **kwargs)

        return checked

    return checking


@dataclasses.dataclass(frozen=True, eq=False)
class ScaledDot:
    """A candidate for a scaled dot: its site and its two sides."""

    site: DotSite
    lhs: ScaledSide
    rhs: ScaledSide

    @property
    def out(self) -> Value:
        """The output of the dot."""
        return self.site.op.outputs[0]

    @property
    def out_shape(self) -> Shape:
        """The shape of the output of the dot."""
        return self.out.shape

    def side_of(self, factor: Factor) -> Literal["lhs", "rhs"] | None:
        """The side with all varying axes of an output factor; None if neither has them."""
        varying = set(factor.varying())
        if varying <= set(self.rhs.output):
            return "rhs"
        return "lhs" if varying <= set(self.lhs.output) else None

    def side_of_numbers(self, lhs: Factors, rhs: Factors) -> Literal["lhs", "rhs"]:
        """The 8-bit side to give scalar scales to, next to scales `lhs` and `rhs`.

        The default is the right side. It is the left side if only the right one has a vector of
        scales: a vector times a number would be one more operation.
        """
        if self.lhs.scaled is None or self.rhs.scaled is None:
            return "lhs" if self.rhs.scaled is None else "rhs"
        left, right = (
            any(factor.varying() for factor in factors)
            for factors in (self.lhs.factors + lhs, self.rhs.factors + rhs)
        )
        return "lhs" if right and not left else "rhs"

    def too_fine(self, lhs: Factors, rhs: Factors) -> bool:
        """Whether further scales of the sides give either side a scale for each element."""
        return grows_too_fine(self.lhs, lhs) or grows_too_fine(self.rhs, rhs)


@dataclasses.dataclass
class FusedDot:
    """A dot with the steps fused into it so far."""

    dot: ScaledDot
    dtype: np.dtype  # the dtype of the value after the last step
    # lhs, rhs: scales after the sum, as scales of a side.
    lhs: Factors = ()
    rhs: Factors = ()
    numbers: Factors = ()  # constant scales after the sum, as factors of the output
    # residual, bias, activation: the steps after the sum.
    residual: Value | None = None
    bias: Value | None = None
    activation: str = "none"
    out: Factors = ()  # scales after the activation
    # low, high, is_rounded: the clip and the rounding on the way to an 8-bit output.
    low: float | None = None
    high: float | None = None
    is_rounded: bool = False
    quantized: np.dtype | None = None  # the dtype of an 8-bit output
    gives_amax: bool = False  # whether the call gives the amax of the values before `out`
    is_narrowed: bool = False  # whether a cast to float16 may have made values infinite
    views: tuple[Op, ...] = ()  # transposes and reshapes of the output

    @property
    def stage(self) -> str:
        """The last stage of `_STAGES` among the steps."""
        if self.quantized is not None:
            return "quantized output"
        if self.low is not None or self.high is not None or self.is_rounded:
            return "clip or rounding"
        if self.out:
            return "out scale"
        if self.gives_amax:
            return "amax"
        return "sum" if self.activation == "none" else "activation"

    @property
    def ready(self) -> bool:
        """Whether a call can compute exactly this."""
        return self.stage not in _PENDING

    @_step("clip or rounding", "converts", in_int32=True)
    def cast(self, dtype: np.dtype) -> str | None:
        """Convert to another float dtype."""
        if self.is_narrowed and dtype != np.float16:
            return f"widens what float16 may have made infinite to {dtype}"
        self.is_narrowed |= dtype == np.float16 != self.dtype
        self.dtype = dtype
        return None

    @_step("sum", "is an activation")
    def activate(self, name: str, dtype: np.dtype) -> str | None:
        """Apply an activation with a result of `dtype`."""
        self.activation = name
        return self.cast(dtype)

    @_step("quantized output", "views", in_int32=True)
    def view(self, op: Op) -> str | None:
        """Transpose or reshape."""
        self.views += (op,)
        return None

    @_step("out scale", "scales")
    def scale(self, factors: Factors) -> str | None:
        """Multiply by factors of the output: the sides if only a bias came before."""
        if self.stage != "sum" or self.residual is not None:
            self.out += factors
            return None
        for factor in factors:
            if (reason := self._scale_side(factor)) is not None:
                return reason
            if self.bias is not None:
                self.bias = _scaled_bias(self.bias, factor, self.dot.out_shape)
                if self.bias is None:
                    return "scales the bias by blocks"
        return None

    def _scale_side(self, factor: Factor) -> str | None:
        """Give a factor of the output to the side with its varying axes."""
        if not factor.varying():
            self.numbers += (factor,)
            return None
        side = self.dot.side_of(factor)
        if side is None:
            return (
                f"multiplies by an array of shape {list(factor.small.shape)} that varies along "
                "rows and columns together"
            )
        if side == "lhs":
            self.lhs += (self.dot.lhs.from_output(factor),)
        else:
            self.rhs += (self.dot.rhs.from_output(factor),)
        if self.dot.too_fine(self.lhs, self.rhs):
            return "scales rows or columns that are scaled along the contracted axis already"
        return None

    def scales(self) -> tuple[Factors, Factors]:
        """The scales after the sum, of both sides."""
        side = self.dot.side_of_numbers(self.lhs, self.rhs)
        if side == "lhs":
            return (*self.lhs, *map(self.dot.lhs.from_output, self.numbers)), self.rhs
        return self.lhs, (*self.rhs, *map(self.dot.rhs.from_output, self.numbers))

    @_step("sum", "adds a bias")
    def add_bias(self, value: Value) -> str | None:
        """Add an array of the output's rank; axes of size 1 broadcast."""
        bias = casts.cast(value, np.float32)
        self.bias = bias if self.bias is None else graph.add(self.bias, bias)
        return None

    @_step("sum", "adds a residual")
    def add_residual(self, value: Value) -> str | None:
        """Add an array of the output's shape."""
        if self.residual is not None:
            return "adds a second residual"
        self.residual = value
        return None

    @_step("clip or rounding", "clips")
    def clip(self, low: float | None, high: float | None) -> str | None:
        """Clip to bounds, and so to the intersection of all clips; None is no bound."""
        self.low = max((b for b in (self.low, low) if b is not None), default=None)
        self.high = min((b for b in (self.high, high) if b is not None), default=None)
        return None

    @_step("clip or rounding", "rounds")
    def round(self) -> str | None:
        """Round to the nearest whole number, ties to even."""
        self.is_rounded = True
        return None

    @_step("clip or rounding", "quantizes")
    def quantize(self, dtype: np.dtype) -> str | None:
        """Convert to an 8-bit dtype."""
        low, high = dtypes.finite_range(dtype)
        if dtypes.is_float8(dtype):
            if (self.low, self.high) != (low, high) or self.is_rounded:
                return f"converts to {dtype} without clipping to [{low:g}, {high:g}] first"
        elif not self._is_clipped_to(low, high):
            return f"clips to [{self.low}, {self.high}], not to the range of {dtype}"
        elif not self.is_rounded:
            return f"converts to {dtype} without rounding first"
        if self.out and self.out_scale() is None:
            return "scales the quantized output by blocks"
        self.quantized = np.dtype(dtype)
        return None

    def _is_clipped_to(self, low: float, high: float) -> bool:
        """Whether the conversion to an integer dtype saturates, as a kernel's does.

        XLA saturates when it converts to int8. To uint8 it need not.
        """
        if low < 0:
            return (self.low is None or self.low <= low) and (
                self.high is None or self.high >= high
            )
        return (self.low == low or self._is_never_negative()) and self.high == high

    def _is_never_negative(self) -> bool:
        """Whether relu bounds the values from below: no scale after it may be negative."""
        scales = [constants.number(factor.small) for factor in self.out]
        positive = all(number is not None and number > 0 for number in scales)
        return self.low is None and self.activation == "relu" and positive

    def out_scale(self) -> Value | None:
        """The scale to dequantize the output, of the output's rank.

        None if there is none, or if it varies by blocks.
        """
        if not self.out:
            return None
        shape = self.dot.out_shape
        total = combine(self.out, shape)
        if any(t not in (1, full) for t, full in zip(total.tiles, full_tiles(shape), strict=True)):
            return None
        return graph.reciprocal(total.small)


def _scaled_bias(bias: Value, factor: Factor, out_shape: Shape) -> Value | None:
    """The bias times a later factor; None if the factor varies by blocks."""
    for tile, size in zip(factor.tiles, out_shape, strict=True):
        if tile not in (1, max(size, 1)):
            return None
    return graph.multiply(bias, casts.cast(factor.small, np.float32))
