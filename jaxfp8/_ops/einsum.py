"""Einsum of two operands as one dot: its batch, contracted and free axes."""

from __future__ import annotations

import dataclasses

from jaxfp8._value.errors import message, shown
from jaxfp8._value.spec import DimensionNumbers, Shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Einsum:
    """A parsed subscript string.

    Attributes:
      dimension_numbers: as `jax.lax.dot_general` takes them.
      order: axis `i` of the result is axis `order[i]` of the dot.
    """

    dimension_numbers: DimensionNumbers
    order: Shape


def parse(operation: str, subscripts: str, lhs_ndim: int, rhs_ndim: int) -> Einsum:
    """Reads `"...k,kn->...n"`-like subscripts of two operands.

    Args:
      operation: name for errors.
      subscripts: letters by axis, `...` allowed; without `->` the letters found once, sorted.
      lhs_ndim, rhs_ndim: ranks of the operands.

    Raises:
      ValueError: the subscripts are not one dot of the two operands.
    """
    if not isinstance(subscripts, str):
        raise _error(operation, subscripts, "a string is needed")
    inputs, arrow, output = subscripts.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != 2:
        raise _error(operation, subscripts, "exactly two operands are needed")
    lhs = _expand(operation, subscripts, terms[0], lhs_ndim)
    rhs = _expand(operation, subscripts, terms[1], rhs_ndim)
    out = _expand_output(operation, subscripts, output, lhs, rhs) if arrow else _implicit(lhs, rhs)
    _check_letters(operation, subscripts, lhs, rhs, out)
    batch = [c for c in lhs if c in rhs and c in out]
    contracting = [c for c in lhs if c in rhs and c not in out]
    natural = batch + [c for c in lhs if c not in rhs] + [c for c in rhs if c not in lhs]
    numbers = (_axes(lhs, contracting), _axes(rhs, contracting))
    return Einsum(
        dimension_numbers=(numbers, (_axes(lhs, batch), _axes(rhs, batch))),
        order=tuple(natural.index(c) for c in out),
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
    return ValueError(
        message(
            operation,
            "`subscripts`",
            f"is {shown(subscripts)}",
            needs,
            "write one dot of two operands, as in 'bmk,kn->bmn'",
        )
    )
