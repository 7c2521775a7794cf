"""The problem: all facts of a scaled dot except its data.

The C++ twin of these classes is `ffi/common/spec.h`; both keep one field order, and
`docs/custom_call.md` describes their call.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxfp8._value import dtypes

ACTIVATIONS = ("none", "relu", "gelu_tanh", "gelu_erf", "silu")

# Dtypes of operands: the call's own, and narrower ones. The CPU reads the narrower ones as stored,
# without a conversion before the call. A GPU does so for scales of weights with 16-bit activations.
AS_STORED: dict[str, tuple[np.dtype, tuple[np.dtype, ...]]] = {
    "lhs_scale": (np.dtype(np.float32), dtypes.SIXTEEN_BIT_FLOATS),
    "lhs_zero_point": (dtypes.INT32, dtypes.EIGHT_BIT_INTS),
    "rhs_scale": (np.dtype(np.float32), dtypes.SIXTEEN_BIT_FLOATS),
    "rhs_zero_point": (dtypes.INT32, dtypes.EIGHT_BIT_INTS),
    "bias": (np.dtype(np.float32), dtypes.SIXTEEN_BIT_FLOATS),
}

Shape = tuple[int, ...]
DimensionNumbers = tuple[tuple[Shape, Shape], tuple[Shape, Shape]]


def is_known(shape: Shape) -> bool:
    """Whether all sizes are numbers: those of an exported function may be symbols."""
    return all(isinstance(size, int | np.integer) for size in shape)


def tile_counts(shape: Shape, tiles: Shape) -> Shape:
    """By axis, the number of tiles in an array of `shape`; the last one may be partial."""
    return tuple(-(-size // tile) for size, tile in zip(shape, tiles, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperandSpec:
    """One side of the product: `(values - zero_point) * scale`.

    Attributes:
      dtype: logical dtype of the values; FP8 values travel as uint8.
      shape: shape of the values. A batch axis may have size 1 if the other side has more: the whole
        batch then shares the values without a copy.
      contracting: axes summed over, in the order of the other side's.
      batch: axes shared by both sides, in the order of the output's leading axes.
      tiles: sizes, by axis, of a tile, the unit of one scale and zero point; at least 1.
      scale: whether a scale of shape `tile_counts(shape, tiles)` is given.
      zero_point: whether a zero point of the same shape is given (int8 and uint8 only).
      scale_rounded: whether the float32 scale is rounded to bfloat16 as it is read. A cast before
        the call would do the same, but can take longer than the product.
      sums: whether the sums of the values over the contracted axes are given: int32, of shape
        `sums_shape` (int8 and uint8 only). A GPU needs them where the other side has a zero point,
        and makes them in each call otherwise.
      scale_exponents: whether the scale is given as the bytes of float8_e8m0fnu, as uint8:
        2^(byte - 127), and NaN for 255.
    """

    dtype: str
    shape: Shape
    contracting: Shape
    batch: Shape
    tiles: Shape
    scale: bool
    zero_point: bool
    scale_rounded: bool = False
    sums: bool = False
    scale_exponents: bool = False

    @classmethod
    def unscaled(
        cls, dtype: str, shape: Shape, contracting: Shape, batch: Shape = ()
    ) -> OperandSpec:
        """A side without a scale or a zero point."""
        return cls(
            dtype=dtype,
            shape=shape,
            contracting=contracting,
            batch=batch,
            tiles=shape,
            scale=False,
            zero_point=False,
        )

    @property
    def free(self) -> Shape:
        """Axes neither contracted nor batch, in order."""
        used = {*self.contracting, *self.batch}
        return tuple(axis for axis in range(len(self.shape)) if axis not in used)

    @property
    def scale_shape(self) -> Shape:
        """Shape of the scale and of the zero point, if given."""
        return tile_counts(self.shape, self.tiles)

    @property
    def sums_shape(self) -> Shape:
        """Shape of the sums, if given: the values' shape with 1 along contracted axes."""
        return tuple(1 if i in self.contracting else size for i, size in enumerate(self.shape))

    @property
    def depth(self) -> int:
        """The number of values in a sum."""
        return math.prod(self.sizes(self.contracting))

    @property
    def scale_varies(self) -> bool:
        """Whether scales and zero points, if given, change along the sum."""
        counts = {self.scale_shape[axis] for axis in self.contracting}
        return not counts <= {0, 1}  # symbolic sizes have no order

    def sizes(self, axes: Shape) -> Shape:
        """Sizes of the given axes."""
        return tuple(self.shape[axis] for axis in axes)

    def __str__(self) -> str:
        """Such as `float8_e4m3fn[8,4]*[1,4]`, the second bracket being the scale's shape."""
        parts = array(self)
        parts += f"-{_bracket(self.scale_shape)}" if self.zero_point else ""
        parts += f"*{_bracket(self.scale_shape)}" if self.scale else ""
        return parts + (" with sums" if self.sums else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpilogueSpec:
    """Operations on the sum before it is stored.

    `y = activation(sum + residual + bias)`; `amax = max |y|`; `out = cast(y / out_scale)`. Shapes
    have the rank of the output, each axis 1 or full; `None` if not given.

    Attributes:
      residual: shape of the residual, or None.
      residual_dtype: float32, bfloat16 or float16; "" without a residual.
      bias: shape of the bias, or None.
      activation: one of `ACTIVATIONS`.
      out_dtype: logical dtype of the output; FP8 travels as uint8.
      out_scale: shape of the float32 scale of an 8-bit output (it dequantizes), or None.
      amax: shape of the float32 amax: axes of size 1 are reduced, or None.
    """

    residual: Shape | None = None
    residual_dtype: str = ""
    bias: Shape | None = None
    activation: str = "none"
    out_dtype: str
    out_scale: Shape | None = None
    amax: Shape | None = None

    def map_shapes(self, fun: Callable[[Shape], Shape]) -> EpilogueSpec:
        """The spec with `fun` applied to each given shape."""
        names = ("residual", "bias", "out_scale", "amax")
        given = {name: getattr(self, name) for name in names}
        new: dict[str, Any] = {n: fun(shape) for n, shape in given.items() if shape is not None}
        return dataclasses.replace(self, **new)

    def __str__(self) -> str:
        """Such as `+ bias[1,4] > relu > bfloat16`."""
        steps = [
            f"+ {name}{_bracket(shape)}"
            for name, shape in (("residual", self.residual), ("bias", self.bias))
            if shape is not None
        ]
        steps += [f"> {self.activation}"] if self.activation != "none" else []
        steps += [f"> amax{_bracket(self.amax)}"] if self.amax is not None else []
        steps += [f"/ out_scale{_bracket(self.out_scale)}"] if self.out_scale is not None else []
        return " ".join([*steps, f"> {self.out_dtype}"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledDotSpec:
    """A whole scaled dot. Output axes are batch, free axes of lhs, free axes of rhs.

    Attributes:
      lhs, rhs: the two sides.
      epilogue: operations after the sum.
      precision: "default" lets a device accumulate fast, "highest" asks for full float32.
    """

    lhs: OperandSpec
    rhs: OperandSpec
    epilogue: EpilogueSpec
    precision: str = "default"

    @property
    def batch_shape(self) -> Shape:
        """Sizes of the batch axes; size 1 broadcasts to the other side's."""
        pairs = zip(self.lhs.sizes(self.lhs.batch), self.rhs.sizes(self.rhs.batch), strict=True)
        return tuple(r if left == 1 else left for left, r in pairs)

    @property
    def out_shape(self) -> Shape:
        """Shape of the output."""
        lhs, rhs = self.lhs, self.rhs
        return self.batch_shape + lhs.sizes(lhs.free) + rhs.sizes(rhs.free)

    @property
    def contracting_size(self) -> int:
        """Number of terms in each sum (K)."""
        return self.lhs.depth

    @property
    def dimension_numbers(self) -> DimensionNumbers:
        """As `jax.lax.dot_general` takes them."""
        lhs, rhs = self.lhs, self.rhs
        return (lhs.contracting, rhs.contracting), (lhs.batch, rhs.batch)

    def __str__(self) -> str:
        """The form in a printed jaxpr: sides, contracted axes, epilogue."""
        lhs, rhs = self.lhs, self.rhs
        batch = f" batch {_bracket(lhs.batch)}.{_bracket(rhs.batch)}" if lhs.batch else ""
        axes = f"{_bracket(lhs.contracting)}.{_bracket(rhs.contracting)}"
        return f"({lhs} . {rhs} over {axes}{batch} {self.epilogue})"

    def told(self, x: Any = None) -> str:
        """The product in words, for messages; the arrays are those of the spec, not `x`."""
        del x
        return f"the product of {array(self.lhs)} and {array(self.rhs)}"

    @functools.cached_property
    def operand_shapes(self) -> dict[str, Shape]:
        """The operands of the call in order, by name; docs/custom_call.md explains them."""
        shapes = {"lhs": self.lhs.shape, "rhs": self.rhs.shape}
        for name, side in (("lhs", self.lhs), ("rhs", self.rhs)):
            shapes |= {f"{name}_scale": side.scale_shape} if side.scale else {}
            shapes |= {f"{name}_zero_point": side.scale_shape} if side.zero_point else {}
            shapes |= {f"{name}_sums": side.sums_shape} if side.sums else {}
        planes = {name: getattr(self.epilogue, name) for name in ("residual", "bias", "out_scale")}
        return shapes | {name: shape for name, shape in planes.items() if shape is not None}

    def operand_names(self) -> tuple[str, ...]:
        """The names of the operands of the call, in order."""
        return tuple(self.operand_shapes)

    def rounds(self, name: str) -> bool:
        """Whether the named operand is a scale, rounded to bfloat16 as it is read."""
        sides = {"lhs_scale": self.lhs, "rhs_scale": self.rhs}
        return name in sides and sides[name].scale_rounded

    def has_exponents(self, name: str) -> bool:
        """Whether the named operand is a scale, given as bytes of float8_e8m0fnu."""
        sides = {"lhs_scale": self.lhs, "rhs_scale": self.rhs}
        return name in sides and sides[name].scale_exponents

    def attributes(self) -> dict[str, Any]:
        """The attributes of the custom call, as docs/custom_call.md lists them."""
        return {
            **_attributes(self.lhs, "lhs_"),
            **_attributes(self.rhs, "rhs_"),
            **_attributes(self.epilogue, ""),
            "precision": self.precision,
        }


def array(x: Any) -> str:
    """Dtype and shape, such as `float8_e4m3fn[8,4]`."""
    return f"{x.dtype}{_bracket(x.shape)}"


def _bracket(shape: Shape) -> str:
    return f"[{','.join(map(str, shape))}]"


def _attributes(spec: OperandSpec | EpilogueSpec, prefix: str) -> dict[str, Any]:
    """The fields of a spec: shapes as int64 arrays, an optional one also as `has_NAME`.

    They are not nested: `jax.ffi.ffi_call` takes no dictionary of arrays.
    """
    out: dict[str, Any] = {}
    for field in dataclasses.fields(spec):
        name, value = prefix + field.name, getattr(spec, field.name)
        if field.type == "Shape | None":
            out["has_" + name] = value is not None
            value = value or ()
        out[name] = np.asarray(value, np.int64) if isinstance(value, tuple) else value
    return out
