"""Which products are emitted, and where: one call per dot, at the point its uses agree on.

A product may be wanted at several steps (a dot's output, and its activation). Emitting it twice
would compute it twice, so it is emitted at the last step that all uses have in common, and what
follows is left as it was. That changes what is wanted, so this repeats until it settles; points
of emission only ever move towards the dot, so it does settle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from jaxfp8._rewrite.ir.facts import Amax, Product, Scaled
from jaxfp8._rewrite.ir.graph import Value
from jaxfp8._rewrite.ir.sites import Site
from jaxfp8._rewrite.plan import calls, guards
from jaxfp8._rewrite.plan.calls import Call
from jaxfp8._rewrite.plan.walk import Walk
from jaxfp8._value.spec import ScaledDotSpec

WhyNot = Callable[[ScaledDotSpec], str | None]


@dataclasses.dataclass
class Wants:
    """What is wanted of one site: products at their steps, and maxima of them."""

    products: dict[Product, None] = dataclasses.field(default_factory=dict)
    maxima: dict[Amax, None] = dataclasses.field(default_factory=dict)


class Resolver:
    """Settles which call each site of a walk becomes, for given outputs."""

    def __init__(self, walk: Walk, why_not: WhyNot) -> None:
        self.walk, self.why_not = walk, why_not
        self.chosen: dict[Site, Call | None] = {}
        self.refused: set[Amax] = set()
        self._calls: dict[tuple[Product, Amax | None], Call | str] = {}

    def resolve(self, outputs: Sequence[Value]) -> dict[Value, Value]:
        """Where the values of products and maxima come from, instead of from their own ops."""
        roots = [*outputs, *(v for op in self.walk.effects for v in op.inputs)]
        while True:
            wants, replaced, live = self._demand(roots)
            if not [site for site, wanted in wants.items() if self._revise(site, wanted)]:
                self._record(wants, live)
                return replaced

    def _record(self, wants: dict[Site, Wants], live: set[Value]) -> None:
        """Tell each site what became of it; one whose output nobody uses is not computed at all."""
        for site in self.walk.own:
            if site not in wants and site.out not in live:
                self.walk.seen.sites.remove(site)
            elif not site.reason:
                site.call = self.chosen.get(site)

    def _demand(
        self, roots: Iterable[Value]
    ) -> tuple[dict[Site, Wants], dict[Value, Value], set[Value]]:
        """Walk back from the roots: wants of each site, what replaces what, and what is live."""
        wants: dict[Site, Wants] = {}
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

    def _replacement(self, value: Value, wants: dict[Site, Wants]) -> Value | None:
        fact = self.walk.fact(value)
        if isinstance(fact, Scaled):
            return self.walk.early.get(value)
        if isinstance(fact, Product) and self._open(fact):
            wants.setdefault(fact.site, Wants()).products[fact] = None
            call = self.chosen.get(fact.site) or self._call(fact, None)
            if isinstance(call, Call) and call.product is fact:
                return call.value
        if isinstance(fact, Amax) and fact not in self.refused and self._open(fact.product):
            wants.setdefault(fact.product.site, Wants()).maxima[fact] = None
            call = self.chosen.get(fact.product.site) or self._call(fact.product, fact)
            if isinstance(call, Call) and call.amax is fact:
                return call.amax_value
        return None

    def _open(self, product: Product) -> bool:
        """Whether the product is not past the point where its site's call is cut."""
        if product.site not in self.chosen:
            return True
        call = self.chosen[product.site]
        if call is None:
            return False
        above_amax = call.amax is not None and product in call.amax.product.ancestry()
        return product in call.product.ancestry() or above_amax

    def _revise(self, site: Site, wants: Wants) -> bool:
        """Choose the call of a site anew; whether that changed anything."""
        call = self.chosen.get(site)
        if call is not None and _gives(call, wants):
            return False
        self.chosen[site] = self._agree(wants)
        chosen = self.chosen[site]
        kept = chosen.amax if chosen is not None else None
        self.refused |= {amax for amax in wants.maxima if amax is not kept}
        return True

    def _agree(self, wants: Wants) -> Call | None:
        """The call at the last step that all uses have in common."""
        amax = next(iter(wants.maxima), None)
        products = list(wants.products) or [a.product for a in wants.maxima]
        if amax is not None:
            for candidates in (products, [*products, amax.product]):
                call = self._call(meeting(candidates), amax)
                if isinstance(call, Call):
                    return call
            products = [*products, amax.product]
        for product in meeting(products).ancestry():
            call = self._call(product, None)
            if isinstance(call, Call):
                return call
        product.site.miss(call, "leave it to XLA here; there are kernels for cpu and cuda")
        return None

    def _call(self, product: Product, amax: Amax | None) -> Call | str:
        """The call for a product, made once; or why there is none."""
        key = (product, amax)
        if key not in self._calls:
            call = calls.make(product, amax, self.why_not)
            if isinstance(call, Call) and amax is not None and _feeds_itself(call, amax):
                call = "its amax is an input of what follows the product"
            if isinstance(call, Call):
                call = guards.guarded(self.walk, call)
            self._calls[key] = call
        return self._calls[key]


def _feeds_itself(call: Call, amax: Amax) -> bool:
    """Whether an operand of the call needs the amax that the call gives."""
    assert call.amax_value is not None and call.amax_value.op is not None
    stack, seen = list(call.amax_value.op.inputs), {amax.value}
    while stack:
        value = stack.pop()
        if value is amax.value:
            return True
        if value not in seen:
            seen.add(value)
            stack.extend(value.op.inputs if value.op is not None else ())
    return False


def _gives(call: Call, wants: Wants) -> bool:
    """Whether the call gives all that is wanted."""
    return set(wants.products) <= {call.product} and set(wants.maxima) <= {call.amax}


def meeting(products: Sequence[Product]) -> Product:
    """The last step that is an ancestor of, or is, each of the products of one site."""
    first, *others = [p.ancestry() for p in products]
    for product in first:
        if all(product in ancestry for ancestry in others):
            return product
    raise AssertionError("products of one site have the dot itself in common")
