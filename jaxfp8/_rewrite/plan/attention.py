"""Attention of a decoding step as one call on a GPU.

    query ─▶ dot(query, keys) ─▶ softmax ─▶ dot(weights, values) ─▶      two products over a cache
    query, keys, values, scales, mask ─▶ attention ─▶                    one call

Over a cache in 8 bits both products are calls already, with the scales of the cache beside its
codes. Over a cache in bfloat16 they are dots of the function. Nothing else may read the scores, so
the first half of a derivative keeps its products: it saves the weights. The kernel keeps scores in
float32 and rounds weights to bfloat16 before their sum is known.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxfp8._call.ops import attention
from jaxfp8._call.ops.attention import AttentionSpec
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.graph import Array, Op, Value
from jaxfp8._rewrite.ir.sites import IN_ONE_CALL
from jaxfp8._rewrite.plan import score_terms
from jaxfp8._rewrite.plan.body import Body, Replaced
from jaxfp8._rewrite.plan.cached_products import WIDTH, Cache, CachedProduct, other
from jaxfp8._rewrite.plan.score_terms import Groups
from jaxfp8._rewrite.plan.softmax_rows import Labels, Reader, Softmax, Term, Unread, varying
from jaxfp8._value.spec import OperandSpec, ScaledDotSpec, Shape


def join_attention(body: Body, replaced: Replaced) -> Replaced:
    """The pass: two products with a softmax between them become one call."""
    if not attention.runs_here():
        return replaced
    for op in body.ops(replaced):
        second = CachedProduct.of(op)
        if second is None:
            continue
        try:
            found = _Attention.of(second, replaced)
            made = found.replacement()
        except Unread as unread:
            _note(body, [second], f"not one call with its softmax: {unread}" if str(unread) else "")
            continue
        joined = {**replaced, op.outputs[0]: made}
        first = found.keys.product
        if first.op in body.ops(joined):
            _note(body, [second], "not one call with its softmax: something else reads the scores")
            continue
        replaced = joined
        _note(body, [first, second], IN_ONE_CALL)
        if second.is_of_floats:
            keys = found.keys.data
            body.walk.seen.attended[op] = (keys.dtype, keys.shape)
    return replaced


def _note(body: Body, products: Sequence[CachedProduct], text: str) -> None:
    dots = [product.dot for product in products]
    for site in body.walk.own:
        if site.op in dots:
            site.attention = text


@dataclasses.dataclass(frozen=True, eq=False)
class _Attention:
    """Two products and the softmax between them.

    Attributes:
      keys, values: the caches of the first product and of the second.
      softmax: the steps between.
      sizes: of labels, the width included.
      token: the label of tokens.
      rows: labels of rows, in the order of the query.
      query: labels of the query.
    """

    keys: Cache
    values: Cache
    softmax: Softmax
    sizes: dict[int, int]
    token: int
    rows: Shape
    query: Labels

    @classmethod
    def of(cls, second: CachedProduct, replaced: Replaced) -> _Attention:
        """The attention ended by a product; raises `Unread`."""
        if not _is_bare(second.spec):
            raise Unread("")
        return _first_read(second.caches, lambda name: cls._ended_by(second, name, replaced))

    @classmethod
    def _ended_by(cls, second: CachedProduct, name: str, replaced: Replaced) -> _Attention:
        """The same with a side as the cache of values."""
        side, rows = second.side(name), second.side(other(name))
        labels, sizes = _labelled(rows)
        token = [labels[axis] for axis in rows.contracting]
        if len(token) != 1 or not token[0]:
            raise Unread("")

        def source(value: Value) -> Value:
            while value in replaced:
                value = replaced[value]
            return value

        reader = Reader(source, sizes, token[0][0], _is_first)
        softmax = reader.weights(second.given(other(name)), labels)
        width = math.prod(side.sizes(side.free))
        stored = dataclasses.replace(reader, sizes=sizes | {WIDTH: width})
        values = Cache.of(second, name, _beside(side, rows, labels), stored)
        first = CachedProduct.of(softmax.scores.op)
        assert first is not None
        return _first_read(
            first.caches, lambda name: cls._with(first, name, values, softmax, stored)
        )

    @classmethod
    def _with(
        cls, first: CachedProduct, name: str, values: Cache, softmax: Softmax, reader: Reader
    ) -> _Attention:
        """The same with a side of the first product as the cache of keys."""
        placed = _of_output(first.spec, softmax.labels)
        side, rows = first.side(name), first.side(other(name))
        batch = {x for axis in side.batch for x in placed[name][axis]}
        own = [x for axis in side.free for x in placed[name][axis]]
        if own != [reader.token] or batch != set(values.order) - {reader.token, WIDTH}:
            raise Unread("its products share other axes than texts, heads and tokens")
        if side.depth != reader.sizes[WIDTH]:
            raise Unread("keys and values have heads of different size")
        keys, query = Cache.of(first, name, placed[name], reader), placed[other(name)]
        of_rows = tuple(x for axis in rows.free for x in query[axis])
        softmax = _with_epilogue(first, softmax)
        return cls(keys, values, softmax, dict(reader.sizes), reader.token, of_rows, query)

    def replacement(self) -> Value:
        """The output of one call in place of that of the second product; raises `Unread`."""
        groups = self._groups()
        terms = score_terms.of(self.softmax, self.keys.scale(), self.values.scale(), groups)
        spec = AttentionSpec(
            **groups.sizes_by_name(),
            width=self.sizes[WIDTH],
            cache=self.keys.side.dtype,
            keys_by_token=self.keys.order != groups.by_head(WIDTH),
            values_by_token=self.values.order != groups.by_head(WIDTH),
            out_dtype=self.values.product.spec.epilogue.out_dtype,
            **terms.fields,
        )
        if self.keys.side.dtype != self.values.side.dtype:
            raise Unread("keys and values have different dtypes")
        on_mesh = attention.why_not_on_mesh(self.values.product.dot.equation.outvars[0].aval)
        if (reason := attention.why_not(spec) or on_mesh) is not None:
            raise Unread(reason)
        return self._op(spec, groups, terms).outputs[0]

    def _groups(self) -> Groups:
        """The labels of texts, heads, rows and tokens."""
        orders = self.keys.order, self.values.order
        if any(order[-1:] != (WIDTH,) for order in orders):
            raise Unread("the axis of a head does not come last in the cache")
        behind = [order[order.index(self.token) + 1 : -1] for order in orders]
        heads = next(filter(None, behind), None)
        batch = tuple(x for x in self.keys.order if x not in (self.token, WIDTH))
        if heads is None:
            heads = batch[1:]
        texts = tuple(x for x in batch if x not in heads)
        groups = Groups((texts, heads, self.rows, (self.token,)), self.sizes)
        known = groups.by_head(WIDTH), groups.by_token(WIDTH)
        if not all(order in known for order in orders):
            raise Unread("keys and values lie in memory in different orders")
        return groups

    def _op(self, spec: AttentionSpec, groups: Groups, terms: score_terms.Terms) -> Op:
        first, second = self.keys.product, self.values.product
        dot, query = second.dot, first.given(other(self.keys.name))
        out = second.op.outputs[0]
        of_out = self._labels_of_output()

        def run(query: Array, keys: Array, values: Array, *others: Array) -> list[Array]:
            with graph.context_of(dot.equation, dot.callers):
                arrays: dict[str, Any] = {
                    "query": groups.laid(query, self.query, WIDTH),
                    "keys": groups.stored(keys, WIDTH, by_token=spec.keys_by_token),
                    "values": groups.stored(values, WIDTH, by_token=spec.values_by_token),
                }
                arrays |= terms.arrays(others)
                y = attention.attend(spec, **arrays)
                return [groups.unlaid(y, of_out, out.shape, WIDTH)]

        inputs = (query, self.keys.data, self.values.data, *terms.inputs)
        op = Op("attention", inputs, run, {})
        op.outputs = (Value(out.shape, out.dtype, op),)
        return op

    def _labels_of_output(self) -> Labels:
        """The labels of the output of the second product."""
        spec, name = self.values.product.spec, self.values.name
        side, rows = self.values.product.side(name), self.values.product.side(other(name))
        weights, _ = _labelled(rows)
        labels = {other(name): weights, name: _beside(side, rows, weights)}
        batch = [labels["lhs"][axis] for axis in spec.lhs.batch]
        sides = [(labels["lhs"], spec.lhs.free), (labels["rhs"], spec.rhs.free)]
        return (*batch, *(own[axis] for own, free in sides for axis in free))


def _is_bare(spec: ScaledDotSpec) -> bool:
    """Whether nothing follows a product."""
    e = spec.epilogue
    others = (e.residual, e.bias, e.amax, e.out_scale)
    return e.activation == "none" and all(x is None for x in others)


def _is_first(value: Value) -> bool:
    """Whether a value is the output of a possible first product."""
    product = CachedProduct.of(value.op) if value.index == 0 else None
    if product is None:
        return False
    e = product.spec.epilogue
    return e.activation == "none" and e.amax is None and e.out_scale is None


def _with_epilogue(first: CachedProduct, softmax: Softmax) -> Softmax:
    """With the biases of the first product."""
    given = [first.operand(name) for name in ("residual", "bias")]
    biases = [value for value in given if value is not None]
    if biases and softmax.factors:
        raise Unread("scores are scaled after a bias")
    terms = (Term(x, varying(softmax.labels, x.shape)) for x in biases)
    return dataclasses.replace(softmax, biases=(*softmax.biases, *terms))


def _first_read(names: Sequence[str], read: Callable[[str], _Attention]) -> _Attention:
    """What is read with the first possible side as the cache; raises the first `Unread`."""
    reasons = []
    for name in names:
        try:
            return read(name)
        except Unread as unread:
            reasons.append(str(unread))
    raise Unread(next(filter(None, reasons), ""))


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
    return (WIDTH,) if size > 1 else ()


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
