"""Einsum of two operands as one dot: its batch, contracted and free axes."""

from __future__ import annotations

import dataclasses

import jax

from jaxfp8._ops.dimensions import normalise
from jaxfp8._value.errors import message, shown
from jaxfp8._value.spec import DimensionNumbers, Shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Einsum:
    """A parsed subscript string.

    Attributes:
      numbers: normalised dimension numbers of the dot.
      order: axis `i` of the result is axis `order[i]` of the dot.
      kernel_sizes: size of each axis of the result in the right operand; None if it lacks the axis.
    """

    numbers: DimensionNumbers
    order: Shape
    kernel_sizes: tuple[int | None, ...]

    @property
    def kernel_shape(self) -> Shape:
        """Sizes of the right operand's axes in the result."""
        return tuple(size for size in self.kernel_sizes if size is not None)

    def along_dot(self, bias: jax.Array) -> jax.Array:
        """A bias of shape `kernel_shape`, laid along the axes of the dot."""
        aligned = bias.reshape([1 if size is None else size for size in self.kernel_sizes])
        return aligned.transpose([self.order.index(axis) for axis in range(len(self.order))])


def parse(
    operation: str, subscripts: str, lhs: Shape, rhs: Shape, *, broadcast: bool = False
) -> Einsum:
    """Reads `"...k,kn->...n"`-like subscripts of two operands.

    Without `->` the letters found once, sorted, are the output. With `broadcast` a batch axis may
    have size 1 on one side. Anything but one dot of the two operands is a ValueError.
    """
    if not isinstance(subscripts, str):
        raise _error(operation, subscripts, "a string is needed")
    inputs, arrow, output = subscripts.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != 2:
        raise _error(operation, subscripts, "exactly two operands are needed")
    left = _expand(operation, subscripts, terms[0], len(lhs))
    right = _expand(operation, subscripts, terms[1], len(rhs))
    out = _implicit(left, right)
    if arrow:
        out = _expand_output(operation, subscripts, output, left, right)
    _check_letters(operation, subscripts, left, right, out)
    batch = [c for c in left if c in right and c in out]
    contracting = [c for c in left if c in right and c not in out]
    natural = batch + [c for c in left if c not in right] + [c for c in right if c not in left]
    axes = (_axes(left, contracting), _axes(right, contracting))
    numbers = axes, (_axes(left, batch), _axes(right, batch))
    return Einsum(
        numbers=normalise(operation, numbers, (lhs, rhs), broadcast=broadcast),
        order=tuple(natural.index(c) for c in out),
        kernel_sizes=tuple(rhs[right.index(c)] if c in right else None for c in out),
    )


def _axes(term: str, letters: list[str]) -> Shape:
    return tuple(term.index(c) for c in letters)


def _expand(operation: str, subscripts: str, term: str, ndim: int) -> str:
    """Replaces `...` by digits, counted from the last axis, to align operands on the right."""
    head, dots, tail = term.partition("...")
    missing = ndim - len(head) - len(tail)
    if missing < 0 or (missing and not dots):
        raise _error(operation, subscripts, f"{term!r} does not name the {ndim} axes it is given")
    return head + _ellipsis(missing) + tail


def _ellipsis(count: int) -> str:
    return "".join(chr(0x2460 + i) for i in reversed(range(count)))


def _expand_output(operation: str, subscripts: str, output: str, lhs: str, rhs: str) -> str:
    if "..." not in output:
        return output
    head, _, tail = output.partition("...")
    return head + _ellipsis(sum(not c.isalpha() for c in {*lhs, *rhs})) + tail


def _implicit(lhs: str, rhs: str) -> str:
    dots = _ellipsis(sum(not c.isalpha() for c in {*lhs, *rhs}))
    once = [c for c in lhs + rhs if (lhs + rhs).count(c) == 1 and c.isalpha()]
    return dots + "".join(sorted(once))


def _check_letters(operation: str, subscripts: str, lhs: str, rhs: str, out: str) -> None:
    for term in (lhs, rhs, out):
        if len(set(term)) != len(term):
            raise _error(operation, subscripts, "a letter occurs twice in one term (a diagonal)")
    if not {*out} <= {*lhs, *rhs}:
        raise _error(operation, subscripts, "the output names a letter that no operand has")
    if {*lhs, *rhs} - {*out} - ({*lhs} & {*rhs}):
        raise _error(operation, subscripts, "a letter of one operand alone is summed away")


def _error(operation: str, subscripts: str, needs: str) -> ValueError:
    got, remedy = f"is {shown(subscripts)}", "write one dot of two operands, as in 'bmk,kn->bmn'"
    return ValueError(message(operation, "`subscripts`", got, needs, remedy))
