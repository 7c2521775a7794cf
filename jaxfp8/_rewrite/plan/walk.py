"""The decide pass: walk a jaxpr, keep facts beside values. Nothing is executed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxfp8._call.primitive import scaled_dot_p
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.emit import Program
from jaxfp8._rewrite.ir.facts import (
    Fact,
    Factors,
    Lost,
    Product,
    Scaled,
    Scales,
    storage_bytes,
    whole,
)
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.sites import Seen, Site
from jaxfp8._rewrite.regions import opaque, regions
from jaxfp8._rewrite.rules import (
    collectives,
    early,
    epilogue,
    gathers,
    reach,
    scaled_products,
    unserved,
)
from jaxfp8._rewrite.rules import curves as _curves
from jaxfp8._rewrite.rules.arithmetic import RULES, lost, remedy_for
from jaxfp8._rewrite.rules.joins import MULTIPLE
from jaxfp8._value import compat, dtypes

# After these an array is another one: a dot on it is not a missed 8-bit dot.
_PRODUCTS = ("dot_general", *unserved.NAMES, *scaled_products.NAMES, scaled_dot_p.name)
_ENDS_TRAIL = (*_PRODUCTS, "argmax", "argmin", "iota")
# These may make an array smaller and still hold the same data.
_MOVES = (*gathers.NAMES, *collectives.NAMES)
_VIEWS = ("slice", "dynamic_slice", "squeeze", "split", "top_k", *_MOVES)
# Facts that tell of 8-bit data, found or lost.
_DATA = (Scaled, Lost)

_SMALL = 32  # equations in a jitted function that is entered whatever it holds

Settler = Callable[["Walk", Sequence[Value], list[Value]], Program]


class Walk:
    """Facts, dots and effects of one program (a function, or the body of a region).

    Attributes:
      settler: how a walk becomes a program, here and inside regions.
      facts: what is known beside each value.
      curves: values that are scalar functions of a product, sampled.
      seen: the dots seen so far, shared with the walks of regions.
      early: rows of dequantised arrays, by the value that they are, picked before dequantising.
      effects: ops that must run whatever is demanded.
      own: those of this walk, not of regions inside it.
      results: the outputs of the jaxpr that was walked last.
    """

    def __init__(self, settler: Settler, seen: Seen | None = None) -> None:
        self.settler = settler
        self.facts: dict[Value, Fact] = {}
        self.curves: dict[Value, _curves.Curves] = {}
        self.seen = Seen() if seen is None else seen
        self.own: list[Site] = []
        self.effects: list[Op] = []
        self.results: list[Value] = []
        self.early: dict[Value, Value] = {}
        self._implicit: dict[Value, Scaled] = {}
        self._nested: list[Walk] = []

    # What is known about a value

    def fact(self, value: Value) -> Fact | None:
        """The fact beside a value."""
        return self.facts.get(value)

    def product(self, value: Value) -> Product | None:
        """The product that the value is."""
        fact = self.facts.get(value)
        return fact if isinstance(fact, Product) else None

    def scaled(self, value: Value) -> Scaled | None:
        """The 8-bit data behind a value; an 8-bit array is its own."""
        fact = self.facts.get(value)
        if isinstance(fact, Scaled):
            return fact
        if value.dtype not in dtypes.EIGHT_BIT or value.literal is not None:
            return None
        if value not in self._implicit:
            self._implicit[value] = Scaled(storage_bytes(value), value.dtype, origin=value)
        return self._implicit[value]

    def dequantised(self, value: Value) -> Scaled | None:
        """The 8-bit data behind a value of a wider dtype."""
        fact = self.facts.get(value)
        wide = value.dtype not in dtypes.EIGHT_BIT
        return fact if wide and isinstance(fact, Scaled) else None

    def lost(self, value: Value) -> Lost | None:
        """Where the value's 8-bit data was lost."""
        fact = self.facts.get(value)
        return fact if isinstance(fact, Lost) else None

    def factors(self, value: Value, shape: Any = None) -> Factors:
        """The value as a product of small arrays; at worst of itself."""
        fact = self.facts.get(value)
        return fact.factors if isinstance(fact, Scales) else (whole(value),)

    def concerns(self, eqn: Any, inputs: Sequence[Value]) -> bool:
        """Whether 8-bit data goes into a region, or is made in it, in any form."""
        known = any(v in self.facts or v in self.curves for v in inputs)
        inner = compat.subjaxprs(eqn)
        if known or any(map(reach.holds_eight_bit, inner)):
            return True
        # Many functions of jax.numpy are such: `take`, say, which may stretch scales.
        return eqn.primitive.name in regions.JITS and all(len(j.eqns) < _SMALL for j in inner)

    # The walk

    def jaxpr(
        self,
        jaxpr: Any,
        consts: Sequence[Value],
        args: Sequence[Value],
        callers: tuple[Any, ...] = (),
        names: dict[Any, Value] | None = None,
    ) -> list[Value]:
        """Walk a jaxpr on given values and return its outputs; `names` gets all its variables."""
        env: dict[Any, Value] = {} if names is None else names
        env.update(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            outs = self.equation(eqn, _read(env, eqn.invars), callers)
            env.update(zip(eqn.outvars, outs, strict=True))
        self.results = _read(env, jaxpr.outvars)
        return self.results

    def equation(self, eqn: Any, inputs: list[Value], callers: tuple[Any, ...]) -> Sequence[Value]:
        """Add an equation to the graph; its outputs, with facts."""
        name = eqn.primitive.name
        concerned = name in regions.REGIONS and self.concerns(eqn, inputs)
        if concerned:
            return self._region(eqn, inputs, callers)
        op = graph.equation_op(eqn, inputs, callers)
        if eqn.primitive is scaled_dot_p:
            self.seen.calls.append(op)
        self.note(op)
        if not op.effectful:
            self._know(op)
        if name not in RULES:
            opaque.look_into(self, eqn, inputs, callers)
        return op.outputs

    def _region(self, eqn: Any, inputs: list[Value], callers: tuple[Any, ...]) -> Sequence[Value]:
        """The outputs of a region that 8-bit data goes into, or is made in."""
        return self._enter(regions.REGIONS[eqn.primitive.name], eqn, inputs, callers)

    def _enter(
        self, rule: Any, eqn: Any, inputs: list[Value], callers: tuple[Any, ...]
    ) -> Sequence[Value]:
        """The outputs of an equation by a rule that walks what it holds, or as it stands.

        Walks nested in this one are those of one equation at a time: what leaves them leaves it.
        """
        before, self._nested = self._nested, []
        outputs = rule(self, eqn, inputs, callers)
        insides, self._nested = self._nested, before
        if outputs is None:
            op = graph.equation_op(eqn, inputs, callers)
            self.note(op)
            outputs = op.outputs
            if not op.effectful and not insides:
                self._know(op)
        for inside in insides:
            self._leave(inside, outputs, eqn, callers)
        return outputs

    def _leave(self, inside: Walk, outputs: Sequence[Value], eqn: Any, callers: Any) -> None:
        """Say of what leaves a region that it was dequantised data in there; no fact leaves it."""
        for inner, value in zip(inside.results, outputs, strict=True):
            if value in self.facts:
                continue
            if (earlier := inside.lost(inner)) is not None:
                self._learn(value, earlier)
            elif inside.dequantised(inner) is not None:
                reason = f"`{eqn.primitive.name}` returns dequantised values"
                remedy = "return the 8-bit array and its scale, and dequantise after it"
                self._learn(value, Lost(eqn, reason, remedy, callers))

    def see(self, site: Site) -> None:
        """Note a dot of this walk, or count it if it has nothing to do with 8-bit data."""
        self.seen.see(site)
        if site.concerned:
            self.own.append(site)

    def note(self, op: Op) -> None:
        """Note of a new op whether it has effects."""
        if op.effectful:
            self.effects.append(op)

    def nested(self) -> Walk:
        """A walk for the inside of a region."""
        inside = Walk(self.settler, self.seen)
        self._nested.append(inside)
        return inside

    def settle(self, outputs: Sequence[Value], inputs: list[Value]) -> Program:
        """Settle the calls of this walk and order what is left to do."""
        return self.settler(self, outputs, inputs)

    def _know(self, op: Op) -> None:
        """Apply the rule of an op's primitive, then look for an activation, then for a loss."""
        if any([not isinstance(v.dtype, np.dtype) for v in op.outputs]):
            return  # keys of random numbers and the like hold no 8-bit data
        if op.name in MULTIPLE:
            for value, fact in zip(op.outputs, MULTIPLE[op.name](self, op), strict=True):
                self._learn(value, fact)
            return
        rule = RULES.get(op.name)
        fact = rule(self, op) if rule is not None else None
        if len(op.outputs) != 1:
            self._trail_of_many(op)
            return
        fact = self._activation(op) or fact
        if fact is None or isinstance(fact, Scales):
            fact = self._trail(op) or fact
        if fact is not None:
            self._learn(op.outputs[0], fact)
        if isinstance(fact, Scaled):
            self._pick_early(op)

    def _learn(self, value: Value, fact: Fact | None) -> None:
        if isinstance(fact, Product) and value.dtype in dtypes.WIDE_FLOAT:
            self.curves.setdefault(value, {})[value] = _curves.GRID
        if isinstance(fact, Lost) and value.dtype in (*dtypes.EIGHT_BIT, np.dtype(bool)):
            return
        if fact is not None:
            self.facts[value] = fact

    def _pick_early(self, op: Op) -> None:
        """Rows of a dequantised array, for who wants them as they are."""
        value = early.picked(self, op)
        if value is not None:
            self.early[op.outputs[0]] = value

    def _activation(self, op: Op) -> Product | None:
        """A product where the op completes an activation of one."""
        if not any([v in self.curves for v in op.inputs]):
            return None
        inputs = [self.curves.get(v, {}) for v in op.inputs]
        curves = _curves.extend(op, inputs)
        if not curves:
            return None
        self.curves[op.outputs[0]] = curves
        found = _curves.identify(op, curves)
        if found is None:
            return None
        base = self.product(found[0])
        return epilogue.activate(base, op, found[1]) if base else None

    def _trail_of_many(self, op: Op) -> None:
        """Where dequantised values end in an op with several outputs: all that may hold them."""
        lost = self._trail(op) if op.outputs else None
        for value in op.outputs if lost is not None else ():
            if value.dtype in dtypes.WIDE_FLOAT:
                self._learn(value, lost)

    def _trail(self, op: Op) -> Lost | None:
        """Where dequantised values end in an op without a rule, for the report."""
        facts = [self.facts.get(v) for v in op.inputs]
        if not any([isinstance(f, _DATA) for f in facts]) or op.name in _ENDS_TRAIL:
            return None
        largest = max(v.size for v in op.inputs)
        if max(v.size for v in op.outputs) < largest and op.name not in _VIEWS:
            return None
        for value in op.inputs:
            if value.size < largest:
                continue
            if (earlier := self.lost(value)) is not None:
                return earlier
            if self.dequantised(value) is not None:
                what = f"{value.dtype}[{','.join(map(str, value.shape))}]"
                reason = f"is applied to the dequantised values, {what}"
                return lost(op, reason, remedy_for(op.name))
        return None


def _read(env: dict[Any, Value], atoms: Sequence[Any]) -> list[Value]:
    """The values of variables and literals."""
    return [graph.literal_of(a) if compat.is_literal(a) else env[a] for a in atoms]
