"""How a program makes its quantized rows: by a norm, or by an activation and a factor.

A norm is read by its meaning, in any spelling:

    c = x, or x - mean(x)
    y = c * rsqrt(mean(c**2) + epsilon) * gain + shift

Products may be grouped in any way, the root may be a divisor, the variance mean(x**2) - mean(x)**2.
Roundings to 16 bits in between are kept, as `Norm` has them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from jaxfp8._call.reference.produce_reference import Norm
from jaxfp8._rewrite.ir import constants, graph
from jaxfp8._rewrite.ir.graph import Value
from jaxfp8._rewrite.ir.numbering import Numbering
from jaxfp8._rewrite.rules import curves

_FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RowProgram:
    """How rows are made of `x`.

    Attributes:
      x: of 16 bits, [..., K]; float32 if it is rounded.
      others: factor, or gain and shift [K].
      norm: the norm, or None.
      activation: of `x`; "none" beside a norm.
      of_rows: of a norm, the inverse of each row's root mean square and, if it is centred, its
        mean, as the program finds them; float32 [..., 1].
    """

    x: Value
    others: tuple[Value, ...] = ()
    norm: Norm | None = None
    activation: str = "none"
    of_rows: tuple[Value, ...] = ()

    def extended(self, vectors: Sequence[Value] = (), **fields: bool) -> RowProgram:
        """A norm with more vectors, and with other fields."""
        assert self.norm is not None
        norm = dataclasses.replace(self.norm, **fields)
        return dataclasses.replace(self, others=(*self.others, *vectors), norm=norm)

    @property
    def has_factor(self) -> bool:
        """Whether the other operand is a factor."""
        return self.norm is None and bool(self.others)

    @property
    def name(self) -> str:
        """Its name in a report; "" if the rows are `x` itself."""
        if self.norm is not None:
            return "LayerNorm" if self.norm.centred else "RMSNorm"
        if self.x.dtype == _FLOAT32:
            return "rounding"
        parts = [self.activation] if self.activation != "none" else []
        return " and ".join(parts + ["a factor"] * self.has_factor)


def elementwise(y: Value, in_memory: Callable[[Value], bool]) -> RowProgram | None:
    """The rows as an activation and a factor; `y` itself without either.

    Args:
      y: of 16 bits.
      in_memory: whether a value is written to memory anyway. Otherwise XLA would fuse the reader
        with its producer, and None is returned.
    """
    if (made := _activated(y, in_memory)) is not None:
        return RowProgram(x=made[0], activation=made[1])
    op = graph.producer(y, "mul")
    for one, other in () if op is None else (op.inputs, op.inputs[::-1]):
        is_alike = all((v.shape, v.dtype) == (y.shape, y.dtype) for v in (one, other))
        made = _activated(one, in_memory) if is_alike and in_memory(other) else None
        if made is not None:
            return RowProgram(x=made[0], others=(other,), activation=made[1])
    return None


def rounded(y: Value, in_memory: Callable[[Value], bool]) -> RowProgram | None:
    """The values as the rounding of a float32 array, such as a master weight."""
    op = graph.producer(_reshaped(y), "convert_element_type")
    if op is None or op.inputs[0].dtype != _FLOAT32 or not in_memory(op.inputs[0]):
        return None
    return RowProgram(x=graph.reshape(op.inputs[0], y.shape))


def _activated(value: Value, in_memory: Callable[[Value], bool]) -> tuple[Value, str] | None:
    """The value in memory behind an activation of its dtype, and the name; "none" for itself."""
    if in_memory(value):
        return value, "none"
    last = _unrounded(value, value.dtype)[0].op
    if last is None:
        return None
    if last.name == "max" and 0 in (numbers := [constants.number(v) for v in last.inputs]):
        base = last.inputs[1 - numbers.index(0)]
        return (base, "relu") if in_memory(base) and base.dtype == value.dtype else None
    activation = curves.identify(last, _curves(last.outputs[0], in_memory, {}))
    return activation if activation and activation[0].dtype == value.dtype else None


# How many operations an activation may have.
_LONGEST = 24


def _curves(
    value: Value, in_memory: Callable[[Value], bool], known: dict[Value, curves.Curves]
) -> curves.Curves:
    """Samples of a value as a function of the one in memory behind it."""
    if value not in known:
        op = value.op
        known[value] = {}
        if constants.number(value) is None and in_memory(value):
            known[value] = {value: curves.GRID}
        elif op is not None and op.eqn is not None and len(known) < _LONGEST:
            known[value] = curves.extend(op, [_curves(v, in_memory, known) for v in op.inputs])
    return known[value]


class Norms:
    """Reads norms back."""

    def __init__(self, number: Numbering) -> None:
        self._number = number

    def read(self, y: Value) -> RowProgram | None:
        """The norm behind `y`, of 16 bits; None without one."""
        before, _ = _unrounded(y, y.dtype)
        op = graph.producer(before, "add")
        for rest, shift in () if op is None else (op.inputs, op.inputs[::-1]):
            vector = _vector(shift, y)
            inner, rounded = _unrounded(rest, y.dtype)
            row = None if vector is None else self._gained(inner, y)
            if row is not None and vector is not None:
                return row.extended((vector,), has_shift=True, rounded_second=rounded)
        return self._gained(before, y)

    def _gained(self, value: Value, y: Value) -> RowProgram | None:
        """A norm, and a gain maybe: before it is rounded."""
        factors = _factors(value)
        for i, wide in enumerate(factors):
            rest = [f for j, f in enumerate(factors) if j != i]
            inverse = [f for f in rest if _is_of_rows(f, y)]
            vectors = [_vector(f, y) for f in rest if f not in inverse]
            if not _is_wide(wide, y) or len(vectors) > 1 or None in vectors or len(inverse) > 1:
                continue
            gain = [v for v in vectors if v is not None]
            if (row := self._of_wide(wide, inverse, y)) is not None:
                return row.extended(gain, has_gain=bool(gain))
        return None

    def _of_wide(self, wide: Value, inverse: list[Value], y: Value) -> RowProgram | None:
        """The norm with a value as its part of the size of `y`, without the gain."""
        if inverse:
            return self._normalised(wide, inverse[0], y)
        inner, rounded = _unrounded(wide, y.dtype)
        factors = _factors(inner)
        if not rounded or len(factors) != 2 or not any(_is_of_rows(f, y) for f in factors):
            return None
        for one, other in (factors, factors[::-1]):
            row = self._normalised(one, other, y) if _is_wide(one, y) else None
            if row is not None:
                return row.extended(rounded_first=True)
        return None

    def _normalised(self, wide: Value, inverse: Value, y: Value) -> RowProgram | None:
        """`wide` divided by its root mean square."""
        root = graph.producer(_reshaped(inverse), "rsqrt")
        total = None if root is None else graph.producer(_reshaped(root.inputs[0]), "add")
        if total is None:
            return None
        x, mean = self._centred(wide)
        centred, rows = mean is not None, (*y.shape[:-1], 1)
        source = graph.producer(_reshaped(x), "convert_element_type")
        if source is None or x.dtype != _FLOAT32 or source.inputs[0].dtype != y.dtype:
            return None
        for variance, epsilon in (total.inputs, total.inputs[::-1]):
            number = constants.number(epsilon)
            if number is not None and self._is_variance(variance, x, centred=centred):
                of_rows = (inverse,) if mean is None else (inverse, mean)
                return RowProgram(
                    x=graph.reshape(source.inputs[0], y.shape),
                    norm=Norm(epsilon=number, centred=centred),
                    of_rows=tuple(graph.reshape(value, rows) for value in of_rows),
                )
        return None

    def _centred(self, wide: Value) -> tuple[Value, Value | None]:
        """A value before its mean was taken away, and the mean; None for the mean if it was not."""
        op = graph.producer(wide, "sub")
        if op is None:
            return wide, None
        x, taken = op.inputs
        if constants.number(taken) == 0:
            return x, None
        of_rows = x.size == wide.size and taken.size * x.shape[-1] == x.size
        of = _mean_of(taken) if of_rows and taken.shape[-1:] == (1,) else None
        return (x, taken) if of is not None and self._same(of, x) else (wide, None)

    def _is_variance(self, value: Value, x: Value, *, centred: bool) -> bool:
        """Whether a value is mean(c**2) of each row."""
        value = _reshaped(value)
        if centred and (fast := self._fast_variance(value)) is not None:
            return self._same(fast, x)
        of = _mean_of(value)
        squared = None if of is None else self._square_of(of)
        if squared is None:
            return False
        base, mean = self._centred(squared)
        return (mean is not None) == centred and self._same(base, x)

    def _fast_variance(self, value: Value) -> Value | None:
        """`x` of mean(x**2) - mean(x)**2, or of its maximum with 0."""
        op = graph.producer(value, "max")
        if op is not None and 0 in (numbers := [constants.number(v) for v in op.inputs]):
            value = _reshaped(op.inputs[1 - numbers.index(0)])
        op = graph.producer(value, "sub")
        if op is None:
            return None
        of, mean = _mean_of(op.inputs[0]), self._square_of(_reshaped(op.inputs[1]))
        x = None if of is None else self._square_of(of)
        again = None if mean is None else _mean_of(mean)
        return x if x is not None and again is not None and self._same(x, again) else None

    def _square_of(self, value: Value) -> Value | None:
        op = value.op
        if op is None:
            return None
        if op.name == "square" or (op.name == "integer_pow" and op.params["y"] == 2):
            return op.inputs[0]
        return op.inputs[0] if op.name == "mul" and self._same(*op.inputs) else None

    def _same(self, one: Value, other: Value) -> bool:
        """Whether two values hold equal rows."""
        if one.shape[-1:] != other.shape[-1:]:
            return False
        return self._number(_reshaped(one)) == self._number(_reshaped(other))


def _unrounded(value: Value, narrow: np.dtype) -> tuple[Value, bool]:
    """A value before it was rounded to a 16-bit dtype, and whether it was.

    A value computed in 16 bits is rounded as it is made.
    """
    value = _reshaped(value)
    op = graph.producer(value, "convert_element_type")
    if op is not None and value.dtype == _FLOAT32 and op.inputs[0].dtype == narrow:
        value = _reshaped(op.inputs[0])
        op = graph.producer(value, "convert_element_type")
    rounded = value.dtype == narrow
    if rounded and op is not None and op.inputs[0].dtype == _FLOAT32:
        value = _reshaped(op.inputs[0])
    return value, rounded


def _factors(value: Value) -> list[Value]:
    """The factors of a float32 value, in the order of its products; the last two in 16 bits."""
    op = _reshaped(value).op
    if op is not None and op.name == "mul":
        is_wide = op.outputs[0].dtype == _FLOAT32
        return [f for v in op.inputs for f in _factors(v)] if is_wide else list(op.inputs)
    if op is not None and op.name == "div" and op.outputs[0].dtype == _FLOAT32:
        root = graph.producer(_reshaped(op.inputs[1]), "sqrt")
        if root is not None:
            shape = op.inputs[1].shape
            inverse = graph.derived("rsqrt", jnp.reciprocal, root.inputs, shape, _FLOAT32)
            return [*_factors(op.inputs[0]), inverse]
    return [value]


def _reshaped(value: Value) -> Value:
    """The same numbers in the same order, before they were reshaped or chosen by a constant."""
    while (op := value.op) is not None and op.inputs:
        source = op.inputs[0]
        if op.name == "select_n":
            choice = constants.known(source)
            if choice is None or choice.size != 1:
                break
            source = op.inputs[1 + int(choice.reshape(()))]
        elif not graph.is_reshape(op):
            break
        if source.size != value.size or source.dtype != value.dtype:
            break
        value = source
    return value


def _is_of_rows(value: Value, y: Value) -> bool:
    """Whether a factor has one number for each row, and is the inverse of a root."""
    one_each = value.shape[-1:] == (1,) and value.size * y.shape[-1] == y.size
    return one_each and graph.producer(_reshaped(value), "rsqrt") is not None


def _is_wide(value: Value, y: Value) -> bool:
    return value.size == y.size and value.shape[-1] == y.shape[-1]


def _vector(value: Value, y: Value) -> Value | None:
    """A value with one number for each column as [K], as narrow as it was given; else None."""
    columns = y.shape[-1]
    if value.shape[-1:] != (columns,):
        return None
    while (op := value.op) is not None and op.inputs:
        source = op.inputs[0]
        if op.name == "convert_element_type":
            if value.dtype != _FLOAT32 or source.dtype != y.dtype:
                break
        elif op.name == "broadcast_in_dim":
            last = op.params["broadcast_dimensions"]
            at_end = last and last[-1] == len(value.shape) - 1
            if source.size != columns or source.shape[-1] != columns or not at_end:
                break
        elif not graph.is_reshape(op) or source.size != value.size:
            break
        value = source
    if value.size != columns or value.dtype not in (y.dtype, _FLOAT32):
        return None
    return graph.reshape(value, (columns,))


def _mean_of(value: Value) -> Value | None:
    """The values behind their mean along the last axis, one for each row."""
    value = _reshaped(value)
    op = value.op
    if op is None or op.name not in ("div", "mul"):
        return None
    for total, count in (op.inputs, op.inputs[::-1])[: 1 if op.name == "div" else 2]:
        summed = graph.producer(_reshaped(total), "reduce_sum")
        number = _number(count)
        if summed is None or number is None:
            continue
        of = summed.inputs[0]
        size = of.shape[-1]
        wanted = float(size) if op.name == "div" else float(np.float32(1) / np.float32(size))
        if tuple(summed.params["axes"]) == (len(of.shape) - 1,) and number == wanted:
            return of
    return None


def _number(value: Value) -> float | None:
    """The number in every entry of a value, computed from numbers maybe."""
    number = constants.number(value)
    if number is None and value.size == 1:
        known = constants.known(value)
        number = None if known is None else float(known.reshape(()))
    return number
