"""The operands of attention beside its query and its cache: scales, a bias, lengths.

Each is an array [texts, heads, rows, tokens]. An axis has size 1 if the array is constant along it:
broadcasts of the function are sliced, and XLA makes the slice alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._rewrite.ir import constants, graph
from jaxfp8._rewrite.ir.graph import Array, Op, Value
from jaxfp8._rewrite.plan.softmax_rows import Labels, Mask, Softmax, Term, Unread, varying
from jaxfp8._value.spec import Shape

_NAMES = ("texts", "heads", "rows", "tokens")
_TEXTS, _HEADS, _ROWS, _TOKENS = range(4)
# A bias of at most this replaces its score.
_MASKED = -(2.0**100)
# A score replaced by this or less has the weight 0.
_NO_WEIGHT = -1e9


@dataclasses.dataclass(frozen=True, eq=False)
class Groups:
    """Labels by text, head, row and token, and the sizes of all labels."""

    parts: tuple[Shape, Shape, Shape, Shape]
    sizes: dict[int, int]

    def size(self, labels: Iterable[int]) -> int:
        return math.prod(self.sizes[x] for x in labels)

    def sizes_by_name(self) -> dict[str, Any]:
        return {name: self.size(own) for name, own in zip(_NAMES, self.parts, strict=True)}

    def by_head(self, width: int) -> Shape:
        """The order of a cache [texts, heads, tokens, width] in memory."""
        texts, heads, _, tokens = self.parts
        return (*texts, *heads, *tokens, width)

    def by_token(self, width: int) -> Shape:
        """The order of a cache [texts, tokens, heads, width] in memory."""
        texts, heads, _, tokens = self.parts
        return (*texts, *tokens, *heads, width)

    def laid(self, x: Array, labels: Labels, width: int) -> jax.Array:
        """An array with labels as [texts, heads, rows, width]."""
        parts = (*self.parts[:_TOKENS], (width,))
        return self._split(x, labels, [y for own in parts for y in own]).reshape(
            [self.size(own) for own in parts]
        )

    def unlaid(self, x: jax.Array, labels: Labels, shape: Shape, width: int) -> jax.Array:
        """An array [texts, heads, rows, width] with labels, of a shape."""
        own = [y for part in self.parts[:_TOKENS] for y in part] + [width]
        order = [own.index(y) for axis in labels for y in axis]
        return x.reshape([self.sizes[y] for y in own]).transpose(order).reshape(shape)

    def stored(self, x: Array, width: int, *, by_token: bool) -> jax.Array:
        """A cache with four axes."""
        texts, heads, _, tokens = map(self.size, self.parts)
        middle = (tokens, heads) if by_token else (heads, tokens)
        return jnp.reshape(x, (texts, *middle, self.sizes[width]))

    def _split(self, x: Array, labels: Labels, order: Sequence[int]) -> jax.Array:
        """An array with an axis for each label, in an order; missing ones have size 1."""
        held = [y for axis in labels for y in axis]
        x = jnp.reshape(x, [self.sizes[y] for y in held])
        x = x.transpose([held.index(y) for y in order if y in held])
        return jnp.reshape(x, [self.sizes[y] if y in held else 1 for y in order])

    def term(self, x: Array, labels: Labels, kept: Labels) -> jax.Array:
        """An array of scores as [texts, heads, rows, tokens], with size 1 along constant axes.

        Args:
          x: the array.
          labels: its own.
          kept: labels of its varying axes.
        """
        x = jnp.asarray(x)
        for axis, (own, changing) in enumerate(zip(labels, kept, strict=True)):
            if own and not changing:
                x = lax.slice_in_dim(x, 0, 1, axis=axis)
        held = {y for axis in kept for y in axis}
        x = self._split(x, kept, [y for part in self.parts for y in part])
        wide = [
            self.sizes[y] if held.intersection(part) else 1 for part in self.parts for y in part
        ]
        shape = [self.size(part) if held.intersection(part) else 1 for part in self.parts]
        return jnp.broadcast_to(x, wide).reshape(shape)

    def shape_of(self, terms: Iterable[Labels]) -> Shape:
        """The joint shape of terms with these labels of varying axes."""
        held = {y for labels in terms for axis in labels for y in axis}
        return tuple(self.size(part) if held.intersection(part) else 1 for part in self.parts)


@dataclasses.dataclass(frozen=True, eq=False)
class _Own:
    """A term, and the labels of its varying axes."""

    term: Term
    kept: Labels

    @classmethod
    def of(cls, term: Term) -> _Own:
        changes = _changing(term.value)
        return cls(term, tuple(x if a in changes else () for a, x in enumerate(term.labels)))

    def laid(self, x: Array, groups: Groups) -> jax.Array:
        y = groups.term(x, self.term.labels, self.kept)
        return y.astype(jnp.bfloat16) if self.term.rounded else y


@dataclasses.dataclass(frozen=True, eq=False)
class Terms:
    """The operands of a call beside query and cache.

    Attributes:
      fields: of the spec.
      groups: how they are laid.
      parts: by name the terms of an operand.
      mask: hides scores; None without a mask, or with lengths in its place.
      one_more: whether to add 1 to given lengths.
    """

    fields: dict[str, Any]
    groups: Groups
    parts: dict[str, tuple[_Own, ...]]
    mask: Mask | None
    one_more: bool

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The values to give to `arrays`."""
        return tuple(own.term.value for parts in self.parts.values() for own in parts)

    def arrays(self, given: Sequence[Array]) -> dict[str, jax.Array]:
        """The operands by name."""
        left = iter(given)
        laid = {
            name: [(own.term.inverse, own.laid(next(left), self.groups)) for own in parts]
            for name, parts in self.parts.items()
        }
        made: dict[str, jax.Array] = {}
        for name in ("key_scale", "value_scale"):
            if name in laid:
                made[name] = _product(laid[name])
        if "bias" in laid or "mask" in laid:
            made["bias"] = self._bias(laid.get("bias", []), laid.get("mask", []))
        if "lengths" in laid:
            ((_, lengths),) = laid["lengths"]
            made["lengths"] = lengths.astype(jnp.int32) + self.one_more
        return {name: jnp.broadcast_to(x, self.fields[name]) for name, x in made.items()}

    def _bias(self, biases: list[Any], masks: list[Any]) -> jax.Array:
        total = jnp.zeros((1, 1, 1, 1), jnp.float32)
        for is_inverse, x in biases:
            total = total - x.astype(jnp.float32) if is_inverse else total + x.astype(jnp.float32)
        for _, x in masks:
            assert self.mask is not None
            hides = x if not self.mask.kept_where else ~x
            total = jnp.where(hides, np.float32(self.mask.lowest), total)
        return total


def _product(factors: list[tuple[bool, jax.Array]]) -> jax.Array:
    total = jnp.ones((1, 1, 1, 1), jnp.float32)
    for is_inverse, x in factors:
        wide = x.astype(jnp.float32)
        total = total / wide if is_inverse else total * wide
    return total


def of(softmax: Softmax, key_scale: Term | None, value_scale: Term | None, groups: Groups) -> Terms:
    """The operands between two products; raises `Unread`.

    Args:
      softmax: the steps between them.
      key_scale, value_scale: of the caches.
      groups: of labels.
    """
    keys, scale = _without_numbers(filter(None, (key_scale, *softmax.factors)))
    weighing = (value_scale, *softmax.weights)
    values = [_Own.of(term) for term in filter(None, weighing) if _number(term.value) != 1]
    for own in (*keys, *values):
        if groups.shape_of([own.kept])[_ROWS] > 1:
            raise Unread("a factor of its scores or weights differs by row")
    biases = tuple(map(_Own.of, softmax.biases))
    parts = {"key_scale": tuple(keys), "value_scale": tuple(values), "bias": biases}
    mask, one_more = softmax.mask, False
    fields: dict[str, Any] = {"scale": scale, "masked": _MASKED}
    if mask is not None:
        fields["equal_if_empty"] = bool(np.isfinite(mask.lowest))
        lengths = _lengths(mask, groups) if mask.lowest <= _NO_WEIGHT else None
        if lengths is not None:
            parts["lengths"], one_more, mask = (lengths[0],), lengths[1], None
        else:
            fields["masked"] = max(mask.lowest, _MASKED)
            parts["mask"] = (_Own.of(mask.term),)
    if mask is not None and biases and mask.lowest > _MASKED:
        raise Unread(f"its scores have a bias, and where they are masked {mask.lowest}")
    parts = {name: own for name, own in parts.items() if own}
    shapes = {name: groups.shape_of([one.kept for one in own]) for name, own in parts.items()}
    if "mask" in shapes:
        both = [one.kept for name in ("bias", "mask") for one in parts.get(name, ())]
        shapes["bias"] = groups.shape_of(both)
        del shapes["mask"]
    return Terms(fields | shapes, groups, parts, mask, one_more)


def _without_numbers(factors: Iterable[Term]) -> tuple[list[_Own], float]:
    """The arrays among factors, and the product of the numbers."""
    arrays, total = [], 1.0
    for factor in factors:
        value, number = _split_number(factor.value)
        total = total / number if factor.inverse else total * number
        if value is not None:
            arrays.append(_Own.of(dataclasses.replace(factor, value=value)))
    return arrays, total


def _split_number(value: Value) -> tuple[Value | None, float]:
    """A value as another one times a number."""
    if (number := _number(value)) is not None:
        return None, number
    op = value.op
    if op is not None and op.name == "mul":
        for x, other in (op.inputs, op.inputs[::-1]):
            number = _number(x)
            if number is not None and other.shape == value.shape and other.dtype == value.dtype:
                inner, rest = _split_number(other)
                return inner, number * rest
    return value, 1.0


def _number(value: Value) -> float | None:
    """The number in every entry of a constant, or None."""
    known = constants.known(value) if value.size == 1 else None
    return constants.number(value) if known is None else float(known.reshape(()))


# Varying axes

_ELEMENTWISE = (
    *("and", "or", "xor", "not", "eq", "ne", "lt", "le", "gt", "ge", "select_n"),
    *("add", "sub", "mul", "div", "neg", "max", "min", "convert_element_type", "copy"),
)
_FARTHEST = 24


def _changing(value: Value, farthest: int = _FARTHEST) -> set[int]:
    """The axes of possible changes of a value."""
    every = {axis for axis, size in enumerate(value.shape) if size > 1}
    op = value.op
    if constants.number(value) is not None:
        return set()
    if op is None or farthest == 0:
        return every
    if op.name == "iota":
        return every & {op.params["dimension"]}
    if op.name in _ELEMENTWISE:
        found = [_changing(x, farthest - 1) for x in op.inputs]
        return every & set().union(*found)
    places = _places(op)
    if places is None:
        return every
    return every & {places[axis] for axis in _changing(op.inputs[0], farthest - 1)}


def _places(op: Op) -> list[int] | None:
    """For each axis of the input of a view its axis of the output; any for size 1."""
    if op.name == "transpose":
        order = list(op.params["permutation"])
        return [order.index(axis) for axis in range(len(order))]
    if op.name == "broadcast_in_dim":
        return list(op.params["broadcast_dimensions"])
    if not graph.is_reshape(op):
        return None
    shape, new = op.inputs[0].shape, op.outputs[0].shape
    if [n for n in shape if n > 1] != [n for n in new if n > 1]:
        return None
    left = iter(axis for axis, n in enumerate(new) if n > 1)
    return [next(left) if n > 1 else 0 for n in shape]


# Lengths

# Of `iota OP x`: true for small iota; true for iota = x.
_COMPARISONS = {"lt": (True, False), "le": (True, True), "gt": (False, True), "ge": (False, False)}
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_INTEGERS = tuple(map(np.dtype, (np.int32, np.int16, np.int8, np.uint8, np.uint16)))


def _lengths(mask: Mask, groups: Groups) -> tuple[_Own, bool] | None:
    """The number of tokens kept by a mask of the first ones; True to add 1 to it."""
    value, labels = _unspread(mask.term.value, mask.term.labels)
    op = value.op
    if op is None or op.name not in _COMPARISONS:
        return None
    (token,) = groups.parts[_TOKENS]
    for name, (counted, other) in (
        (op.name, op.inputs),
        (_MIRRORED[op.name], op.inputs[::-1]),
    ):
        is_first, with_equal = _COMPARISONS[name]
        of_counted = varying(labels, counted.shape)
        if is_first != mask.kept_where or not _counts(counted, of_counted, token):
            continue
        own = _Own.of(Term(other, varying(labels, other.shape)))
        shape = groups.shape_of([own.kept])
        if shape[_HEADS] == shape[_TOKENS] == 1 and other.dtype in _INTEGERS:
            return own, with_equal
    return None


def _counts(value: Value, labels: Labels, token: int) -> bool:
    """Whether a value is 0, 1, 2, ... along tokens."""
    value, labels = _unspread(value, labels)
    op = value.op
    return op is not None and op.name == "iota" and labels[op.params["dimension"]] == (token,)


def _unspread(value: Value, labels: Labels) -> tuple[Value, Labels]:
    """The value before views, casts, and `and` with true; with its labels."""
    while (op := value.op) is not None:
        if op.name == "and":
            are_true = [constants.number(x) == 1.0 for x in op.inputs]
            if not any(are_true):
                break
            value = op.inputs[are_true.index(True) - 1]
            labels = varying(labels, value.shape)
        elif op.name in ("convert_element_type", "copy"):
            value = op.inputs[0]
        elif (places := _places(op)) is not None:
            source = op.inputs[0]
            labels = tuple(
                labels[at] if n > 1 else () for at, n in zip(places, source.shape, strict=True)
            )
            value = source
        else:
            break
    return value, labels
