"""Checks of the dimension numbers and shapes of a product."""

from __future__ import annotations

import operator
from typing import Any

import jax

from jaxfp8._value.errors import message, shown
from jaxfp8._value.spec import DimensionNumbers, Shape


def normalise(
    operation: str,
    numbers: DimensionNumbers,
    shapes: tuple[Shape, Shape],
    *,
    broadcast: bool = False,
) -> DimensionNumbers:
    """Dimension numbers with non-negative axes, checked against the shapes of the operands.

    With `broadcast`, a batch axis may have size 1 on one side.
    """
    pairs_of_axes = _read(operation, numbers)
    contracting, batch = (_axes_of_both(operation, pair, shapes) for pair in pairs_of_axes)
    for kind, (lhs_axes, rhs_axes) in (("contracting", contracting), ("batch", batch)):
        lhs_sizes = [shapes[0][a] for a in lhs_axes]
        rhs_sizes = [shapes[1][a] for a in rhs_axes]
        one_is_allowed = broadcast and kind == "batch"
        pairs = zip(lhs_sizes, rhs_sizes, strict=False)
        fits = all(a == b or (one_is_allowed and 1 in (a, b)) for a, b in pairs)
        if not fits or len(lhs_sizes) != len(rhs_sizes):
            raise _mismatch(operation, kind, shapes, lhs_axes, rhs_axes)
    for name, lists in zip(("lhs", "rhs"), zip(contracting, batch, strict=True), strict=True):
        _check_once(operation, name, [axis for axes in lists for axis in axes])
    return contracting, batch


def axes_of_rhs(operation: str, numbers: DimensionNumbers, rank: int) -> tuple[Shape, Shape]:
    """Its contracting and its batch axes from checked dimension numbers; `lhs` is not known yet."""
    summed, batch = (
        tuple(_axis(operation, "rhs", axis, rank) for axis in axes)
        for _, axes in _read(operation, numbers)
    )
    _check_once(operation, "rhs", [*summed, *batch])
    return summed, batch


def free_axes(rank: int, contracting: Shape, batch: Shape) -> Shape:
    """The axes of an operand, contracted and batch axes aside."""
    return tuple(axis for axis in range(rank) if axis not in {*contracting, *batch})


def of_gradient(
    numbers: DimensionNumbers, ranks: tuple[int, int], side: int
) -> tuple[DimensionNumbers, Shape]:
    """The product for the gradient of an operand of a dot: `g . rhs^T` or `lhs^T . g`.

    `side` is 0 for the gradient of lhs, 1 for rhs. The second result has, by axis of the product,
    the axis of the operand.
    """
    contracting, batches = numbers
    free = [free_axes(*of) for of in zip(ranks, contracting, batches, strict=True)]
    lead = tuple(range(len(batches[0])))
    border = len(lead) + len(free[0])
    of_free = tuple(range(len(lead), border)), tuple(range(border, border + len(free[1])))
    other = 1 - side
    paired = dict(zip(contracting[other], contracting[side], strict=True))
    summed = tuple(paired[axis] for axis in sorted(contracting[other]))
    if side == 0:
        return ((of_free[1], free[1]), (lead, batches[1])), (*batches[0], *free[0], *summed)
    return ((free[0], of_free[0]), (batches[0], lead)), (*batches[1], *summed, *free[1])


def in_order(x: jax.Array, axes: Shape) -> jax.Array:
    """`x` with its axis `i` moved to axis `axes[i]`."""
    return x.transpose([axes.index(axis) for axis in range(x.ndim)])


def _read(operation: str, numbers: Any) -> DimensionNumbers:
    """Dimension numbers as two pairs of lists of ints."""
    try:
        (lhs, rhs), (lhs_batch, rhs_batch) = numbers
        return (_whole(lhs), _whole(rhs)), (_whole(lhs_batch), _whole(rhs_batch))
    except (TypeError, ValueError) as error:
        got, remedy = f"is {shown(numbers)}", "a matrix product is (((1,), (0,)), ((), ()))"
        needs = "((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)) is needed"
        text = message(operation, "`dimension_numbers`", got, needs, remedy)
        raise TypeError(text) from error


def _whole(axes: Any) -> Shape:
    if any(isinstance(axis, bool) for axis in axes):
        raise TypeError("a bool is no axis")
    return tuple(map(operator.index, axes))


def _axes_of_both(
    operation: str, axes: tuple[Shape, Shape], shapes: tuple[Shape, Shape]
) -> tuple[Shape, Shape]:
    lhs, rhs = (
        tuple(_axis(operation, name, axis, len(shape)) for axis in own)
        for name, own, shape in zip(("lhs", "rhs"), axes, shapes, strict=True)
    )
    return lhs, rhs


def _check_once(operation: str, name: str, used: list[int]) -> None:
    if len(set(used)) != len(used):
        got, needs = f"names axes {used}", "an axis is contracted or batch, once"
        raise _wrong_axes(operation, name, got, needs, "name each axis once")


def _axis(operation: str, name: str, axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        got, needs = f"names axis {axis}", f"`{name}` has {ndim} axes"
        raise _wrong_axes(operation, name, got, needs, "name axes of the operand")
    return axis % ndim


def _wrong_axes(operation: str, name: str, got: str, needs: str, remedy: str) -> ValueError:
    return ValueError(message(operation, f"`dimension_numbers` of `{name}`", got, needs, remedy))


def _mismatch(
    operation: str, kind: str, shapes: tuple[Shape, Shape], lhs_axes: Shape, rhs_axes: Shape
) -> ValueError:
    operand = f"{kind} axes {list(lhs_axes)} of `lhs` of shape {shapes[0]}"
    got = f"meet axes {list(rhs_axes)} of `rhs` of shape {shapes[1]}"
    needs, remedy = "their sizes have to be equal", "transpose an operand or name other axes"
    return ValueError(message(operation, operand, got, needs, remedy))


def check_matmul(operation: str, lhs: Shape, rhs: Shape) -> None:
    for name, shape in (("lhs", lhs), ("rhs", rhs)):
        if not shape:
            needs, remedy = "at least one axis is needed", "multiply with `*`"
            raise ValueError(message(operation, f"`{name}`", "is a scalar", needs, remedy))
    if lhs[-1] != rhs[-2 if len(rhs) > 1 else 0]:
        raise _mismatch(
            operation, "contracting", (lhs, rhs), (len(lhs) - 1,), (max(len(rhs) - 2, 0),)
        )
    pairs = zip(reversed(lhs[:-2]), reversed(rhs[:-2]), strict=False)
    if any(a != b and 1 not in (a, b) for a, b in pairs):
        operand, got = f"`lhs` of shape {lhs}", f"meets `rhs` of shape {rhs}"
        needs = "leading axes have to be equal or 1"
        raise ValueError(message(operation, operand, got, needs, "reshape an operand"))
