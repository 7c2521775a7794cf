"""Reads the softmax between two products, from the weights of the second back to the first.

    scores ─▶ * scale ─▶ + bias ─▶ where(mask, ..., lowest) ─▶ softmax ─▶ * scale ─▶ weights

Transposes and reshapes may lie anywhere. So each value has labels: each of its axes holds axes of
the weights. An axis of size 1 holds none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxfp8._rewrite.ir import constants, graph
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._value import dtypes
from jaxfp8._value.spec import Shape

# For each axis of a value its labels, outermost first.
Labels = tuple[Shape, ...]

_VIEWS = ("transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim")
_SAME = ("copy", "stop_gradient", "pvary", "pcast")
_FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class Term:
    """An array combined with scores or weights."""

    value: Value
    labels: Labels
    inverse: bool = False  # a divisor, or subtracted
    rounded: bool = False  # to bfloat16 as it is read


@dataclasses.dataclass(frozen=True, eq=False)
class Mask:
    """Scores are kept where a mask is true, or false, and are `lowest` elsewhere."""

    term: Term
    kept_where: bool
    lowest: float


@dataclasses.dataclass(frozen=True, eq=False)
class Softmax:
    """The steps between the two products.

    Attributes:
      scores: the output of the first product, and its labels.
      factors, biases, mask: its next steps, in this order.
      weights: factors behind the softmax.
    """

    scores: Value
    labels: Labels
    factors: tuple[Term, ...] = ()
    biases: tuple[Term, ...] = ()
    mask: Mask | None = None
    weights: tuple[Term, ...] = ()


def varying(labels: Labels, shape: Shape) -> Labels:
    """The labels of an operand of this shape, whose axes of size 1 broadcast; none of a number."""
    if not shape:
        return ()
    return tuple(own if n > 1 else () for own, n in zip(labels, shape, strict=True))


class Unread(Exception):
    """Why no softmax is read; "" if there is none."""


@dataclasses.dataclass(frozen=True, eq=False)
class Reader:
    """Reads values of one program.

    Attributes:
      source: the value in place of one of the function.
      sizes: of labels.
      token: the label summed by the softmax.
      is_product: tells whether a value is the output of a possible first product.
    """

    source: Callable[[Value], Value]
    sizes: Mapping[int, int]
    token: int
    is_product: Callable[[Value], bool]

    def weights(self, value: Value, labels: Labels, after: tuple[Term, ...] = ()) -> Softmax:
        """Reads back from weights; raises `Unread`."""
        value, labels = self.strip(value, labels)
        op = value.op
        if op is None or op.name not in ("mul", "div"):
            raise Unread("")
        if op.name == "div" and (exp := self._exp_over_its_sum(op, labels)) is not None:
            return dataclasses.replace(self._behind_exp(*exp), weights=after)
        path, own, term = self._path(op, labels)
        return self.weights(path, own, (*after, term))

    def _path(self, op: Op, labels: Labels) -> tuple[Value, Labels, Term]:
        """The input of an op on the way back, with the other as a term; raises `Unread`."""
        numbers = len(op.inputs) if op.name in ("mul", "add") else 1
        for i in range(numbers):
            path, other = op.inputs[i], op.inputs[1 - i]
            own = varying(labels, path.shape)
            if self._holds_product(path) and self._held(own) == self._held(labels):
                term = Term(other, varying(labels, other.shape), op.name in ("div", "sub"))
                return path, own, term
        raise Unread("")

    def _holds_product(self, value: Value) -> bool:
        """Whether a value depends on a product by arrays as large as the scores."""
        least = math.prod(self.sizes.values())

        def before(value: Value) -> Sequence[Value]:
            inputs = () if self.is_product(value) else graph.inputs(value)
            return [self.source(v) for v in inputs if v.size >= least]

        return any(map(self.is_product, graph.behind([self.source(value)], before)))

    def _exp_over_its_sum(self, op: Op, labels: Labels) -> tuple[Op, Labels] | None:
        """The op of exp in `exp(x) / sum(exp(x))` over tokens."""
        top, own = self.strip(op.inputs[0], varying(labels, op.inputs[0].shape))
        if top.op is None or top.op.name != "exp":
            return None
        found = self._reduced("reduce_sum", op.inputs[1], labels)
        return (top.op, own) if found == (top, own) else None

    def _reduced(self, name: str, value: Value, labels: Labels) -> tuple[Value, Labels] | None:
        """The operand of a reduction over tokens, spread over them again; stripped."""
        one = tuple(tuple(x for x in axis if x != self.token) for axis in labels)
        value, one = self.strip(value, varying(one, value.shape))
        op = value.op
        if op is not None and op.name == "max" and name == "reduce_max":
            least = [constants.number(v) == -np.inf for v in op.inputs]
            if not any(least):
                return None
            value, one = self.strip(op.inputs[least.index(False)], one)
            op = value.op
        if op is None or op.name != name or len(op.params["axes"]) != 1:
            return None
        (axis,) = op.params["axes"]
        inner = (*one[:axis], (self.token,), *one[axis:])
        if op.inputs[0].shape[axis] != self.sizes[self.token]:
            return None
        return self.strip(op.inputs[0], inner)

    def _behind_exp(self, exp: Op, labels: Labels) -> Softmax:
        if exp.outputs[0].dtype != _FLOAT32:
            raise Unread(f"its softmax is in {exp.outputs[0].dtype}")
        value, labels = self.strip(exp.inputs[0], labels)
        op = value.op
        if op is None or op.name != "sub":
            raise Unread("its softmax does not subtract the largest score")
        top = self.strip(op.inputs[0], varying(labels, op.inputs[0].shape))
        if self._reduced("reduce_max", op.inputs[1], labels) != top:
            raise Unread("its softmax does not subtract the largest score")
        return self._scores(*top, Softmax(*top))

    def _scores(self, value: Value, labels: Labels, found: Softmax) -> Softmax:
        """Reads back from the scores of the softmax."""
        value, labels = self.strip(value, labels)
        if self.is_product(value):
            return dataclasses.replace(found, scores=value, labels=labels)
        op = value.op
        if op is not None and op.name == "select_n" and len(op.inputs) == 3:
            return self._masked(op, labels, found)
        if op is None or op.name not in ("mul", "div", "add", "sub"):
            raise Unread(f"{op.name if op else 'an input'} lies between the scores and the softmax")
        if op.name in ("add", "sub") and found.factors:
            raise Unread("scores are scaled after a bias")
        path, own, term = self._path(op, labels)
        return self._scores(path, own, _with(found, op.name, term))

    def _masked(self, op: Op, labels: Labels, found: Softmax) -> Softmax:
        if found.factors or found.biases or found.mask is not None:
            raise Unread("scores are masked before a scale, a bias or another mask")
        which, *cases = op.inputs
        lowest = [constants.number(value) for value in cases]
        if (lowest[0] is None) == (lowest[1] is None):
            raise Unread("a mask does not replace scores by one number")
        kept = lowest.index(None)
        number = lowest[1 - kept]
        assert number is not None
        term = Term(which, varying(labels, which.shape))
        mask = Mask(term, bool(kept), number)
        own = varying(labels, cases[kept].shape)
        return self._scores(cases[kept], own, dataclasses.replace(found, mask=mask))

    # Labels

    def stored(self, value: Value, labels: Labels) -> tuple[Value, Labels]:
        """A cache as it lies in memory, with its labels; raises `Unread` if entries repeat."""
        value, labels = self.strip(value, labels, casts=False)
        behind = value
        while behind.op is not None and behind.op.name in (*_SAME, *_VIEWS):
            before = self.source(behind.op.inputs[0])
            if before.size < behind.size:
                raise Unread("heads of the cache are repeated")
            behind = before
        return value, labels

    def strip(self, value: Value, labels: Labels, *, casts: bool = True) -> tuple[Value, Labels]:
        """The value before views, and before casts if asked, with its labels."""
        while True:
            value = self.source(value)
            op = value.op
            if op is None:
                return value, labels
            if op.name in _SAME or (casts and _is_cast(op)):
                value = op.inputs[0]
            elif op.name in _VIEWS and (before := self._before(op, labels)) is not None:
                value, labels = op.inputs[0], before
            else:
                return value, labels

    def _before(self, op: Op, labels: Labels) -> Labels | None:
        """The labels of the input of a view; None if it cuts one, or repeats along one."""
        shape = op.inputs[0].shape
        if op.name == "transpose":
            order = list(op.params["permutation"])
            return tuple(labels[order.index(axis)] for axis in range(len(shape)))
        if op.name == "broadcast_in_dim":
            places = op.params["broadcast_dimensions"]
            before = tuple(labels[i] if n > 1 else () for i, n in zip(places, shape, strict=True))
            return before if self._held(before) == self._held(labels) else None
        if not graph.is_reshape(op):
            return None
        return self._regrouped([x for axis in labels for x in axis], shape)

    def _regrouped(self, held: list[int], shape: Shape) -> Labels | None:
        """Labels in order, on the axes of a shape; None if one is cut, or an axis has no label."""
        left, labels = list(held), []
        for size in shape:
            own: list[int] = []
            while size > 1 and left and size % self.sizes[left[0]] == 0:
                size //= self.sizes[left[0]]
                own.append(left.pop(0))
            if size != 1:
                return None
            labels.append(tuple(own))
        return None if left else tuple(labels)

    @staticmethod
    def _held(labels: Labels) -> set[int]:
        return {x for axis in labels for x in axis}


def _with(found: Softmax, name: str, term: Term) -> Softmax:
    if name in ("mul", "div"):
        return dataclasses.replace(found, factors=(*found.factors, term))
    return dataclasses.replace(found, biases=(*found.biases, term))


def _is_cast(op: Op) -> bool:
    floats = (*dtypes.SIXTEEN_BIT_FLOATS, _FLOAT32)
    return (
        op.name == "convert_element_type"
        and op.outputs[0].dtype in floats
        and op.inputs[0].dtype in floats
    )
