"""The decide pass: walks a jaxpr and keeps facts about its values. It executes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxfp8._call.library import targets
from jaxfp8._call.ops.dot import scaled_dot_p
from jaxfp8._call.ops.joint import joint_dots_p
from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.emit import Program
from jaxfp8._rewrite.ir.facts import Fact, Product
from jaxfp8._rewrite.ir.graph import Callers, ClosedJaxpr, Equation, Jaxpr, Literal, Op, Value, Var
from jaxfp8._rewrite.ir.scaled import Lost, Parts, Scaled, Scales
from jaxfp8._rewrite.ir.sites import Seen
from jaxfp8._rewrite.plan import cached_products
from jaxfp8._rewrite.regions import JITS, REGIONS, Region, opaque
from jaxfp8._rewrite.rules import (
    RULES,
    collectives,
    dot,
    epilogue,
    gathers,
    reach,
    scaled_products,
    unserved,
)
from jaxfp8._rewrite.rules import curves as _curves
from jaxfp8._rewrite.rules.registry import lost, remedy_for
from jaxfp8._value import compat, dtypes

# What these make is no longer the 8-bit data: a dot that reads it is not a missed one.
_PRODUCTS = (*dot.NAMES, *unserved.NAMES, *scaled_products.NAMES)
_CALLS = (scaled_dot_p.name, joint_dots_p.name)
_ENDS_TRAIL = (*_PRODUCTS, *_CALLS, "argmax", "argmin", "iota", reach.KERNEL)
# These may make an array smaller, and what is left is the same data.
_VIEWS = (
    *("slice", "dynamic_slice", "squeeze", "split", "top_k"),
    *(*gathers.NAMES, *collectives.NAMES),
)
# These pick a part of an array.
_PICKS = ("slice", "dynamic_slice", *gathers.NAMES)
# Facts that tell of 8-bit data, found or lost.
_DATA = (Scaled, Lost)

# A jitted function with fewer equations is entered whatever it holds. Many functions of jax.numpy
# are such, and some stretch scales (`take`).
_SMALL = 32

Settler = Callable[["Walk", Sequence[Value], Sequence[Value]], Program]


class Walk(Context):
    """Walks one program (a function, or the body of a region).

    Attributes:
      settler: makes a program of a walk, here and inside regions.
      curves: samples of the values that are scalar functions of a product.
      early: for a value that picks rows of a dequantized array, rows picked before dequantizing.
      results: the outputs of the jaxpr that was walked last.
    """

    def __init__(self, settler: Settler, seen: Seen | None = None) -> None:
        super().__init__(seen)
        self.settler = settler
        self.curves: dict[Value, _curves.Curves] = {}
        self.results: list[Value] = []
        self.early: dict[Value, Value] = {}
        self._nested: list[Walk] = []

    def concerns(self, op: Op) -> bool:
        """Whether 8-bit data goes into a region or is made in it, or a pass may find attention."""
        known = any(v in self.facts or v in self.curves for v in op.inputs)
        inner = compat.subjaxprs(op.equation)
        if known or any(map(reach.holds_eight_bit, inner)):
            return True
        if targets.platform() == "cuda" and any(map(cached_products.may_be_in, inner)):
            return True
        return op.name in JITS and all(len(j.eqns) < _SMALL for j in inner)

    def program(self, jaxpr: ClosedJaxpr, inputs: Sequence[Value]) -> list[Value]:
        """Walk a closed jaxpr; `inputs` are its constants, then its arguments."""
        opened = compat.open_jaxpr(jaxpr)
        number = len(opened.constvars)
        return self.jaxpr(opened, inputs[:number], inputs[number:])

    def jaxpr(
        self, jaxpr: Jaxpr, consts: Sequence[Value], args: Sequence[Value], callers: Callers = ()
    ) -> list[Value]:
        """Walk an open jaxpr on given values, and return its outputs."""
        env: dict[Var, Value] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            outs = self.equation(eqn, _read(env, eqn.invars), callers)
            env.update(zip(eqn.outvars, outs, strict=True))
        self.results = _read(env, jaxpr.outvars)
        return self.results

    def equation(self, eqn: Equation, inputs: Sequence[Value], callers: Callers) -> Sequence[Value]:
        """Add an equation to the graph; its outputs, with facts."""
        op = graph.equation_op(eqn, inputs, callers)
        rule = self.region_rule(op)
        return self._as_written(op) if rule is None else self._enter(rule, op)

    def region_rule(self, op: Op) -> Region | None:
        """The rule of a region that is to be entered; None for any other op."""
        return REGIONS[op.name] if op.name in REGIONS and self.concerns(op) else None

    def _as_written(self, op: Op) -> Sequence[Value]:
        """Add an op as the function has it."""
        self.seen.calls += scaled_products.calls_of(op)
        self.note(op)
        if not op.effectful:
            self._know(op)
        if op.name not in RULES or len(op.outputs) > 1:
            opaque.look_into(self, op)
        return op.outputs

    def _enter(self, rule: Region, op: Op) -> Sequence[Value]:
        """The outputs of a region by its rule, or as the function has it.

        `_nested` gathers the walks of the region's bodies. `_leave` reports what each one loses.
        """
        before, self._nested = self._nested, []
        outputs = rule(self, op)
        insides, self._nested = self._nested, before
        if outputs is None and not insides:
            return self._as_written(op)
        if outputs is None:
            self.note(op)
            outputs = op.outputs
        for inside in insides:
            self._leave(inside, outputs, op)
        return outputs

    def _leave(self, inside: Walk, outputs: Sequence[Value], op: Op) -> None:
        """Say of the outputs of a region which of them were dequantized data inside it."""
        for inner, value in zip(inside.results, outputs, strict=True):
            if value in self.facts:
                continue
            if (earlier := inside.lost(inner)) is not None:
                self._learn(value, earlier)
            elif inside.dequantized(inner) is not None:
                remedy = "return the 8-bit array and its scale, and dequantize after it"
                self._learn(value, lost(op, "returns dequantized values", remedy))

    def nested(self) -> Walk:
        """A walk for the inside of a region."""
        inside = Walk(self.settler, self.seen)
        self._nested.append(inside)
        return inside

    def settle(self, outputs: Sequence[Value], inputs: Sequence[Value]) -> Program:
        """Settle which dots become calls, and order what is left to evaluate."""
        return self.settler(self, outputs, inputs)

    def _know(self, op: Op) -> None:
        """Learn what the rule of an op says; then look for an activation, then for a loss."""
        if any([not isinstance(v.dtype, np.dtype) for v in op.outputs]):
            return  # keys of random numbers hold no 8-bit data
        rule = RULES.get(op.name)
        fact = rule(self, op) if rule is not None else None
        if isinstance(fact, Sequence):
            for value, one in zip(op.outputs, fact, strict=True):
                self._learn(value, one)
            return
        if len(op.outputs) != 1:
            self._trail_of_many(op)
            return
        fact = self._activation(op) or fact
        if fact is None or isinstance(fact, Scales):
            fact = self._trail(op) or fact
        if fact is not None:
            self._learn(op.outputs[0], fact)
        if isinstance(fact, Scaled):
            self._pick_early(op, fact)

    def _learn(self, value: Value, fact: Fact | None) -> None:
        if isinstance(fact, Product) and value.dtype in dtypes.WIDE_FLOAT:
            self.curves.setdefault(value, {})[value] = _curves.GRID
        if isinstance(fact, Lost) and value.dtype in (*dtypes.EIGHT_BIT, np.dtype(bool)):
            return
        if fact is not None:
            self.facts[value] = fact

    def _pick_early(self, op: Op, fact: Scaled) -> None:
        """Pick rows of a dequantized array as bytes, for readers that are no dots.

        An embedding may be the output projection, too. Then nobody reads the wide table.
        """
        source, out = op.inputs[0], op.outputs[0]
        is_part = op.name in _PICKS and out.size < source.size
        if is_part and out.dtype in dtypes.WIDE_FLOAT and not fact.guards:
            self.early[out] = graph.laid_out_like(Parts(fact, out.dtype).value, out)

    def _activation(self, op: Op) -> Product | None:
        """The product with an activation that the op completes, if it does."""
        if not any([v in self.curves for v in op.inputs]):
            return None
        inputs = [self.curves.get(v, {}) for v in op.inputs]
        curves = _curves.extend(op, inputs)
        if not curves:
            return None
        self.curves[op.outputs[0]] = curves
        base, name = _curves.identify(op, curves) or (None, "")
        product = None if base is None else self.product(base)
        return None if product is None else epilogue.activate(product, op, name)

    def _trail_of_many(self, op: Op) -> None:
        """Note where dequantized values end in an op with several outputs without a rule."""
        ended = self._trail(op) if op.outputs else None
        for value in op.outputs if ended is not None else ():
            if value.dtype in dtypes.WIDE_FLOAT:
                self._learn(value, ended)

    def _trail(self, op: Op) -> Lost | None:
        """The loss where dequantized values end in an op without a rule."""
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
            if self.dequantized(value) is not None:
                what = f"{value.dtype}[{','.join(map(str, value.shape))}]"
                reason = f"is applied to the dequantized values, {what}"
                return lost(op, reason, remedy_for(op.name))
        return None


def _read(env: dict[Var, Value], atoms: Sequence[Var | Literal]) -> list[Value]:
    """The values of variables and literals."""
    return [graph.literal_of(a) if isinstance(a, Literal) else env[a] for a in atoms]
