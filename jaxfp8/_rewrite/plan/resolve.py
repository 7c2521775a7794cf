"""Which products become calls, and how many steps each call has: one call per dot.

A product may be read after several steps: a dot's output, say, and its activation. One call
computes it, up to the last step that all readers share. What follows is left as written. That
changes what is read, so this repeats until nothing changes. A call only ever loses steps, so it
ends.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from jaxfp8._rewrite.ir import casts, graph
from jaxfp8._rewrite.ir.facts import Amax, Product
from jaxfp8._rewrite.ir.graph import Value
from jaxfp8._rewrite.ir.scaled import Scaled
from jaxfp8._rewrite.ir.sites import Captured, DotSite
from jaxfp8._rewrite.plan import calls, guards
from jaxfp8._rewrite.plan.body import Body, Replaced
from jaxfp8._rewrite.plan.calls import Call, Refusal
from jaxfp8._rewrite.plan.walk import Walk
from jaxfp8._rewrite.rules import gathers
from jaxfp8._value import dtypes

# What XLA on the CPU does to a whole FP8 array, in float16, to get a part of it.
_PICKS = ("dynamic_slice", *gathers.NAMES)


@dataclasses.dataclass
class Wants:
    """What is read of one dot: products, and their maxima. The dicts are ordered sets."""

    products: dict[Product, None] = dataclasses.field(default_factory=dict)
    maxima: dict[Amax, None] = dataclasses.field(default_factory=dict)


def call_dots(body: Body, replaced: Replaced) -> Replaced:
    """The pass that puts calls in place of dots."""
    roots = [*body.outputs, *(v for op in body.walk.effects for v in op.inputs)]
    return {**replaced, **_Resolver(body.walk, body.compute).resolve(roots)}


class _Resolver:
    """Settles which call each dot of a walk becomes.

    Attributes:
      walk: the walk.
      compute: in what products are computed.
      chosen: for each dot the call, None where it stays as it is.
      refused: the maxima that no call gives.
      picked: FP8 arrays that are picked from others, each with itself as it is picked in bytes.
    """

    def __init__(self, walk: Walk, compute: str | None) -> None:
        self.walk, self.compute = walk, compute
        self.chosen: dict[DotSite, Call | None] = {}
        self.refused: set[Amax] = set()
        self.picked: dict[Value, Value] = {}
        self._calls: dict[tuple[Product, Amax | None], Call | Refusal] = {}
        self._readers = collections.Counter(v for site in walk.own for v in _floats(site))

    def resolve(self, roots: Sequence[Value]) -> Replaced:
        """For each value of a product or maximum that a call gives, the output of the call.

        The roots are needed in any case.
        """
        while True:
            wants, replaced, live = self._demand(roots)
            if not [site for site, wanted in wants.items() if self._revise(site, wanted)]:
                self._record(wants, live)
                return replaced

    def _record(self, wants: dict[DotSite, Wants], live: set[Value]) -> None:
        """Note in each dot what became of it. A dot whose output nobody reads is no row."""
        picked = (value.op for value in self.picked if value in live)
        self.walk.seen.picks.update(op for op in picked if op is not None)
        for site in self.walk.own:
            if site not in wants and site.op.outputs[0] not in live:
                self.walk.seen.sites.remove(site)
            elif not site.reason and (call := self.chosen.get(site)) is not None:
                dot = call.product.dot
                site.captured = Captured(call.spec, call.stored, (dot.lhs, dot.rhs), self.compute)

    def _demand(
        self, roots: Iterable[Value]
    ) -> tuple[dict[DotSite, Wants], dict[Value, Value], set[Value]]:
        """Walk back from the roots: reads of each dot, replacements by value, and live values."""
        wants: dict[DotSite, Wants] = {}
        replaced: dict[Value, Value] = {}
        stack, live = list(roots), set()
        while stack:
            value = stack.pop()
            if value in live:
                continue
            live.add(value)
            source = self._replacement(value, wants)
            if source is not None:
                replaced[value] = source
            op = (source or value).op
            if op is not None:
                stack.extend(op.inputs)
        return wants, replaced, live

    def _replacement(self, value: Value, wants: dict[DotSite, Wants]) -> Value | None:
        """The value to read instead of this one, if any; notes what is read of a dot."""
        fact = self.walk.fact(value)
        if isinstance(fact, Scaled):
            return self.walk.early.get(value) or self._picked(value, fact)
        if isinstance(fact, Product) and self._open(fact):
            wants.setdefault(fact.dot.site, Wants()).products[fact] = None
            call = self.chosen.get(fact.dot.site) or self._call(fact, None)
            if isinstance(call, Call) and call.product is fact:
                return call.value
        if isinstance(fact, Amax) and fact not in self.refused and self._open(fact.product):
            wants.setdefault(fact.product.dot.site, Wants()).maxima[fact] = None
            call = self.chosen.get(fact.product.dot.site) or self._call(fact.product, fact)
            if isinstance(call, Call) and call.amax is fact:
                return call.amax_value
        return None

    def _picked(self, value: Value, fact: Scaled) -> Value | None:
        """An FP8 array that an op picks from another one, picked as bytes."""
        op = value.op
        if op is None or op.name not in _PICKS or not gathers.is_in_bounds(op):
            return None
        is_plain = fact.dtype == value.dtype and not (fact.smalls or fact.guards)
        if value.dtype not in dtypes.FLOAT8 or not is_plain or not self.walk.picks_bytes:
            return None
        if value not in self.picked:
            self.picked[value] = casts.bitcast(fact.q, value.dtype)
        return self.picked[value]

    def _open(self, product: Product) -> bool:
        """Whether the call of its dot, as far as it is settled, may compute the product."""
        if product.dot.site not in self.chosen:
            return True
        call = self.chosen[product.dot.site]
        if call is None:
            return False
        above_amax = call.amax is not None and product in call.amax.product.ancestry()
        return product in call.product.ancestry() or above_amax

    def _revise(self, site: DotSite, wants: Wants) -> bool:
        """Choose the call of a dot again; whether that changed anything."""
        call = self.chosen.get(site)
        if call is not None and _gives(call, wants):
            return False
        self.chosen[site] = self._agree(wants)
        chosen = self.chosen[site]
        kept = chosen.amax if chosen is not None else None
        self.refused |= {amax for amax in wants.maxima if amax is not kept}
        return True

    def _agree(self, wants: Wants) -> Call | None:
        """The call up to the last step that all readers share."""
        amax = next(iter(wants.maxima), None)
        products = list(wants.products) or [a.product for a in wants.maxima]
        if amax is not None:
            for candidates in (products, [*products, amax.product]):
                call = self._call(meeting(candidates), amax)
                if isinstance(call, Call):
                    return call
            products = [*products, amax.product]
        last = meeting(products)
        call = self._call(last, None)
        while not isinstance(call, Call) and last.parent is not None:
            last = last.parent
            call = self._call(last, None)
        if isinstance(call, Call):
            return call
        last.dot.site.miss(call.reason, call.remedy)
        return None

    def _call(self, product: Product, amax: Amax | None) -> Call | Refusal:
        """The call for a product, made once; or why there is none."""
        key = (product, amax)
        if key not in self._calls:
            shares = any(self._readers[value] > 1 for value in _floats(product.dot.site))
            call = calls.make(product, amax, self.compute, shares)
            if isinstance(call, Call) and amax is not None and _feeds_itself(call, amax):
                call = Refusal("its amax is an input of what follows the product")
            if isinstance(call, Call):
                call = guards.guarded(self.walk, call)
            self._calls[key] = call
        return self._calls[key]


def _floats(site: DotSite) -> set[Value]:
    """The operands of a dot beside its 8-bit data."""
    return {value for value, fact in site.given if not isinstance(fact, Scaled)}


def _feeds_itself(call: Call, amax: Amax) -> bool:
    """Whether an operand of the call needs the amax that the call gives."""
    assert call.amax_value is not None and call.amax_value.op is not None

    def before(value: Value) -> Sequence[Value]:
        return () if value is amax.value else graph.inputs(value)

    return amax.value in graph.behind(call.amax_value.op.inputs, before)


def _gives(call: Call, wants: Wants) -> bool:
    """Whether the call gives all that is read."""
    return set(wants.products) <= {call.product} and set(wants.maxima) <= {call.amax}


def meeting(products: Sequence[Product]) -> Product:
    """The last product that is an ancestor of, or is, each of the products of one dot."""
    first, *others = [p.ancestry() for p in products]
    for product in first:
        if all(product in ancestry for ancestry in others):
            return product
    raise AssertionError("products of one dot share the dot itself")
