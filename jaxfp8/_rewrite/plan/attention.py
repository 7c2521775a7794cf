"""Attention of a decoding step as one call on a GPU.

    query ─▶ dot(query, keys) ─▶ softmax ─▶ dot(weights, values) ─▶      two calls over a cache
    query, keys, values, scales, mask ─▶ attention ─▶                    one

Both products are captured already, with the scales of the cache beside its codes. Nothing else may
read the scores. The kernel keeps scores in float32 and rounds weights to bfloat16 before their sum
is known.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from jaxfp8._call.ops import attention
from jaxfp8._call.ops.attention import AttentionSpec
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.graph import Array, Op, Value
from jaxfp8._rewrite.plan import score_terms
from jaxfp8._rewrite.plan.body import Body, Replaced
from jaxfp8._rewrite.plan.score_terms import Groups
from jaxfp8._rewrite.plan.softmax_rows import Labels, Reader, Softmax, Term, Unread, varying
from jaxfp8._value import dtypes
from jaxfp8._value.spec import OperandSpec, ScaledDotSpec, Shape

_TEXT = "one call with the softmax between them, `jaxfp8_attention`"


def join_attention(body: Body, replaced: Replaced) -> Replaced:
    """The pass: two products with a softmax between them become one call."""
    if not attention.runs_here():
        return replaced
    for op in body.ops(replaced):
        if not op.params.get("joins"):
            continue
        try:
            found = _Attention.of(op, replaced)
            made = found.replacement()
        except Unread as unread:
            _note(body, [op], f"not one call with its softmax: {unread}" if str(unread) else "")
            continue
        joined = {**replaced, op.outputs[0]: made}
        if found.first in body.ops(joined):
            _note(body, [op], "not one call with its softmax: something else reads the scores")
            continue
        replaced = joined
        _note(body, [found.first, op], _TEXT)
    return replaced


def _note(body: Body, ops: Sequence[Op], text: str) -> None:
    dots = [op.params["dot"] for op in ops]
    for site in body.walk.own:
        if site.op in dots:
            site.attention = text


@dataclasses.dataclass(frozen=True, eq=False)
class _Cache:
    """The cache of a product, and the labels of its axes; `width` for the axis of a head."""

    op: Op
    name: str  # of the side
    labels: Labels

    @property
    def side(self) -> OperandSpec:
        return getattr(self.op.params["spec"], self.name)

    @property
    def order(self) -> Shape:
        """The labels as they lie in memory."""
        return tuple(label for axis in self.labels for label in axis)

    def operand(self, name: str) -> Value | None:
        given = dict(zip(self.op.params["names"], self.op.inputs, strict=True))
        return given.get(name)

    @property
    def codes(self) -> Value:
        value = self.operand(self.name)
        assert value is not None
        return value

    def scale(self) -> Term | None:
        """Its scale, one for each entry of labelled axes or one for all."""
        value = self.operand(f"{self.name}_scale")
        if value is None:
            return None
        side = self.side
        if side.scale_exponents or any(
            1 < tile < size for tile, size in zip(side.tiles, side.shape, strict=True)
        ):
            raise Unread("the scales of the cache are exponents, or hold for blocks")
        return Term(value, varying(self.labels, value.shape), rounded=side.scale_rounded)


def _cache_of(spec: ScaledDotSpec) -> str | None:
    """The side with the cache; None unless the other one is bfloat16 as it is."""
    for name, other in (("rhs", "lhs"), ("lhs", "rhs")):
        side, rows = getattr(spec, name), getattr(spec, other)
        is_plain = rows.dtype == "bfloat16" and not rows.scale
        if is_plain and dtypes.is_eight_bit(side.dtype) and not side.zero_point:
            return name
    return None


def _other(name: str) -> str:
    return "lhs" if name == "rhs" else "rhs"


_WIDTH = -1  # the label of the axis of a head


@dataclasses.dataclass(frozen=True, eq=False)
class _Attention:
    """Two products and the softmax between them.

    Attributes:
      first, second: their calls.
      keys, values: their caches.
      softmax: the steps between.
      sizes: of labels, the width included.
      rows: labels of rows, in the order of the query.
      query: labels of the query.
    """

    first: Op
    second: Op
    keys: _Cache
    values: _Cache
    softmax: Softmax
    sizes: dict[int, int]
    rows: Shape
    query: Labels

    @classmethod
    def of(cls, op: Op, replaced: Replaced) -> _Attention:
        """The attention ended by a call; raises `Unread`."""
        spec: ScaledDotSpec = op.params["spec"]
        name = _cache_of(spec)
        if name is None or not _is_bare(spec):
            raise Unread("")
        if _is_explicit(op.params["dot"]):
            raise Unread("a mesh has explicit axes")
        side, rows = getattr(spec, name), getattr(spec, _other(name))
        labels, sizes = _labelled(rows)
        token = [labels[axis] for axis in rows.contracting]
        if len(token) != 1 or not token[0]:
            raise Unread("")

        def source(value: Value) -> Value:
            while value in replaced:
                value = replaced[value]
            return value

        reader = Reader(source, sizes, token[0][0], _is_first)
        weights = dict(zip(op.params["names"], op.inputs, strict=True))[_other(name)]
        softmax = reader.weights(weights, labels)
        values = _Cache(op, name, _beside(side, rows, labels))
        first = softmax.scores.op
        assert first is not None
        return cls._with(first, op, values, softmax, sizes, token[0][0])

    @classmethod
    def _with(
        cls,
        first: Op,
        second: Op,
        values: _Cache,
        softmax: Softmax,
        sizes: dict[int, int],
        token: int,
    ) -> _Attention:
        spec: ScaledDotSpec = first.params["spec"]
        name = _cache_of(spec)
        assert name is not None
        sides = {"lhs": spec.lhs, "rhs": spec.rhs}
        placed = _of_output(spec, softmax.labels)
        keys, query = _Cache(first, name, placed[name]), placed[_other(name)]
        batch = {x for axis in sides[name].batch for x in placed[name][axis]}
        own = [x for axis in sides[name].free for x in placed[name][axis]]
        rows = tuple(x for axis in sides[_other(name)].free for x in query[axis])
        if own != [token] or batch != set(values.order) - {token, _WIDTH}:
            raise Unread("its products share other axes than texts, heads and tokens")
        softmax = _with_epilogue(first, softmax)
        width = sides[name].depth
        if width != math.prod(values.side.sizes(values.side.free)):
            raise Unread("keys and values have heads of different size")
        return cls(first, second, keys, values, softmax, sizes | {_WIDTH: width}, rows, query)

    def replacement(self) -> Value:
        """The output of one call in place of that of the second product; raises `Unread`."""
        groups = self._groups()
        terms = score_terms.of(self.softmax, self.keys.scale(), self.values.scale(), groups)
        spec = AttentionSpec(
            **groups.sizes_by_name(),
            width=self.sizes[_WIDTH],
            cache=self.keys.side.dtype,
            keys_by_token=self.keys.order != groups.by_head(_WIDTH),
            values_by_token=self.values.order != groups.by_head(_WIDTH),
            out_dtype=self.second.params["spec"].epilogue.out_dtype,
            **terms.fields,
        )
        if self.keys.side.dtype != self.values.side.dtype:
            raise Unread("keys and values have different dtypes")
        if (reason := attention.why_not(spec)) is not None:
            raise Unread(reason)
        return self._op(spec, groups, terms).outputs[0]

    def _groups(self) -> Groups:
        """The labels of texts, heads, rows and tokens."""
        token = self.softmax_token
        orders = self.keys.order, self.values.order
        if any(order[-1:] != (_WIDTH,) for order in orders):
            raise Unread("the axis of a head does not come last in the cache")
        behind = [order[order.index(token) + 1 : -1] for order in orders]
        heads = next(filter(None, behind), None)
        batch = tuple(x for x in self.keys.order if x not in (token, _WIDTH))
        if heads is None:
            heads = batch[1:]
        texts = tuple(x for x in batch if x not in heads)
        groups = Groups((texts, heads, self.rows, (token,)), self.sizes)
        known = groups.by_head(_WIDTH), groups.by_token(_WIDTH)
        if not all(order in known for order in orders):
            raise Unread("keys and values lie in memory in different orders")
        return groups

    @property
    def softmax_token(self) -> int:
        (token,) = (x for axis in self.keys.side.free for x in self.keys.labels[axis])
        return token

    def _op(self, spec: AttentionSpec, groups: Groups, terms: score_terms.Terms) -> Op:
        dot: Op = self.second.params["dot"]
        query = self.keys.operand(_other(self.keys.name))
        assert query is not None
        out = self.second.outputs[0]
        of_out = self._labels_of_output()

        def run(query: Array, keys: Array, values: Array, *others: Array) -> list[Array]:
            with graph.context_of(dot.equation, dot.callers):
                arrays: dict[str, Any] = {
                    "query": groups.laid(query, self.query, _WIDTH),
                    "keys": groups.stored(keys, _WIDTH, by_token=spec.keys_by_token),
                    "values": groups.stored(values, _WIDTH, by_token=spec.values_by_token),
                }
                arrays |= terms.arrays(others)
                y = attention.attend(spec, **arrays)
                return [groups.unlaid(y, of_out, out.shape, _WIDTH)]

        inputs = (query, self.keys.codes, self.values.codes, *terms.inputs)
        op = Op("attention", inputs, run, {})
        op.outputs = (Value(out.shape, out.dtype, op),)
        return op

    def _labels_of_output(self) -> Labels:
        """The labels of the output of the second product."""
        spec: ScaledDotSpec = self.second.params["spec"]
        weights, _ = _labelled(getattr(spec, _other(self.values.name)))
        labels = {_other(self.values.name): weights, self.values.name: self.values.labels}
        batch = [labels["lhs"][axis] for axis in spec.lhs.batch]
        sides = [(labels["lhs"], spec.lhs.free), (labels["rhs"], spec.rhs.free)]
        return (*batch, *(own[axis] for own, free in sides for axis in free))


def _is_bare(spec: ScaledDotSpec) -> bool:
    """Whether nothing follows a product."""
    e = spec.epilogue
    others = (e.residual, e.bias, e.amax, e.out_scale)
    return e.activation == "none" and all(x is None for x in others)


def _is_explicit(dot: Op) -> bool:
    """Whether the output of a dot lies on a mesh with explicit axes: reshapes there may fail."""
    aval: Any = dot.equation.outvars[0].aval
    return jax.sharding.AxisType.Explicit in aval.sharding.mesh.axis_types


def _is_first(value: Value) -> bool:
    """Whether a value is the output of a possible call for scores."""
    op = value.op
    if op is None or not op.params.get("joins") or value.index != 0:
        return False
    spec: ScaledDotSpec = op.params["spec"]
    e = spec.epilogue
    is_linear = e.activation == "none" and e.amax is None and e.out_scale is None
    return _cache_of(spec) is not None and is_linear


def _with_epilogue(first: Op, softmax: Softmax) -> Softmax:
    """With the biases of the first call."""
    given = dict(zip(first.params["names"], first.inputs, strict=True))
    biases = [given[name] for name in ("residual", "bias") if name in given]
    if biases and softmax.factors:
        raise Unread("scores are scaled after a bias")
    terms = (Term(x, varying(softmax.labels, x.shape)) for x in biases)
    return dataclasses.replace(softmax, biases=(*softmax.biases, *terms))


def _labelled(side: OperandSpec) -> tuple[Labels, dict[int, int]]:
    """A label for each axis of more than one entry, and their sizes."""
    labels = tuple((axis,) if size > 1 else () for axis, size in enumerate(side.shape))
    return labels, {axis: size for axis, size in enumerate(side.shape) if size > 1}


def _beside(side: OperandSpec, rows: OperandSpec, labels: Labels) -> Labels:
    """The labels of a cache beside rows with these."""
    paired = dict(zip(side.batch, rows.batch, strict=True))
    paired |= dict(zip(side.contracting, rows.contracting, strict=True))
    if any(side.shape[axis] != rows.shape[other] for axis, other in paired.items()):
        raise Unread("texts share a cache")
    return tuple(
        labels[paired[axis]] if axis in paired else _of_width(size)
        for axis, size in enumerate(side.shape)
    )


def _of_width(size: int) -> Shape:
    return (_WIDTH,) if size > 1 else ()


def _of_output(spec: ScaledDotSpec, labels: Labels) -> dict[str, Labels]:
    """The labels of both sides of a product, from those of its output."""
    placed: dict[str, Labels] = {}
    batch, left = len(spec.lhs.batch), iter(labels[len(spec.lhs.batch) :])
    for name, side in (("lhs", spec.lhs), ("rhs", spec.rhs)):
        own = dict(zip(side.batch, labels[:batch], strict=True))
        own |= {axis: next(left) for axis in side.free}
        own |= {axis: _of_width(side.shape[axis]) for axis in side.contracting}
        placed[name] = tuple(own[axis] for axis in range(len(side.shape)))
        if any(bool(own[a]) != (size > 1) for a, size in enumerate(side.shape)):
            raise Unread("texts share a cache")
    return placed
