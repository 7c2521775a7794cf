"""The program with 8-bit roundings before its dots, and everything else as it was.

This walk has another rule for dots: it does not look for 8-bit data, but rounds the operands of a
dot to values of 8 bits. The result is an ordinary differentiable program. The rewrite then captures
its dots.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxfp8._ops.quantize import fake_quantize
from jaxfp8._ops.terms import split_dot
from jaxfp8._recipes.quantization import Quantization
from jaxfp8._recipes.recipes import rows_of
from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.derive import derivatives
from jaxfp8._rewrite.derive.derivatives import Halves, Remake
from jaxfp8._rewrite.floats import roles as _roles
from jaxfp8._rewrite.floats.roles import Role
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.emit import Program
from jaxfp8._rewrite.ir.graph import Array, Callers, Equation, Op, Value
from jaxfp8._rewrite.ir.scaled import Lost
from jaxfp8._rewrite.ir.sites import RAGGED_DOT, DotSite, Seen
from jaxfp8._rewrite.plan.body import Body
from jaxfp8._rewrite.plan.walk import Walk
from jaxfp8._rewrite.regions import JITS, functions
from jaxfp8._rewrite.regions.borders import Border
from jaxfp8._rewrite.regions.registry import Region, walk_inside
from jaxfp8._rewrite.rules import dot, scaled_products
from jaxfp8._value import compat, dtypes

# The second rounding of `compute="int8"`.
_IN_INT8 = Quantization(dtype=np.int8)


@dataclasses.dataclass(frozen=True, eq=False)
class FloatDot:
    """A dot of the float program."""

    site: DotSite
    roles: tuple[Role, Role]  # the origins of its operands
    weight: int | None  # the index of the weight among the operands, or None if neither is one

    @property
    def rows(self) -> Any:
        """The rows M: the free axes of the activation, or of the left one of two."""
        index = 1 if self.weight == 0 else 0
        return rows_of(self.op.inputs[index].shape, *self.site.axes(index))

    @property
    def op(self) -> Op:
        """The dot as the function has it."""
        return self.site.op

    @property
    def operands(self) -> tuple[Value, Value]:
        """Both sides, without the sizes of groups."""
        lhs, rhs, *_ = self.op.inputs
        return lhs, rhs

    @property
    def has_groups(self) -> bool:
        """Whether it is a ragged dot."""
        return self.op.name == RAGGED_DOT


@dataclasses.dataclass(frozen=True, eq=False)
class Rounded:
    """How each operand of a dot is rounded."""

    # The 8-bit form of each operand; None leaves it as it is.
    operands: tuple[Quantization | None, Quantization | None]
    # None, or "int8": float operands are rounded once more, as by `compute` of
    # `jaxfp8.dot_general`.
    compute: str | None = None
    scope: str = ""  # a part of the dot's path in reports, unless ""


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """A dot computed as products of so many int8 terms, as by `split_dot`."""

    terms: int


# The decision about a dot, or a reason to leave it and a remedy.
Choose = Callable[[FloatDot], Rounded | Split | tuple[str, str]]


@dataclasses.dataclass(eq=False)
class FloatDots:
    """The dots of a walk, regions included: rounded, split in terms, or left as they are."""

    rounded: list[tuple[FloatDot, Rounded]] = dataclasses.field(default_factory=list)
    split: list[DotSite] = dataclasses.field(default_factory=list)
    left: list[DotSite] = dataclasses.field(default_factory=list)


class Rounding(Walk):
    """Facts and roundings of one program.

    Attributes:
      choose: the decision about a dot.
      dots: the dots so far, shared with the walks of regions.
    """

    def __init__(
        self, choose: Choose, seen: Seen | None = None, dots: FloatDots | None = None
    ) -> None:
        super().__init__(_settle, seen)
        self.choose = choose
        self.dots = FloatDots() if dots is None else dots
        self._done: dict[Any, Value] = {}

    def nested(self) -> Rounding:
        """A walk for the inside of a region."""
        inside = Rounding(self.choose, self.seen, self.dots)
        self._nested.append(inside)
        return inside

    @property
    def picks_bytes(self) -> bool:
        """Never: this program is rewritten afterwards."""
        return False

    def concerns(self, op: Op) -> bool:
        """Whether a region holds a dot."""
        inside = itertools.chain(*map(graph.equations, compat.subjaxprs(op.equation)))
        return any(eqn.primitive.name in dot.NAMES for eqn in inside)

    def equation(self, eqn: Equation, inputs: Sequence[Value], callers: Callers) -> Sequence[Value]:
        """Add an equation to the graph, with roundings before it if it is a chosen dot."""
        if eqn.primitive.name in dot.NAMES:
            return self._dot(graph.equation_op(eqn, inputs, callers))
        if scaled_products.is_one(eqn):  # its operands are in 8 bits already
            op = graph.equation_op(eqn, inputs, callers)
            self.note(op)
            return op.outputs
        return super().equation(eqn, inputs, callers)

    def region_rule(self, op: Op) -> Region | None:
        """The rule of a region with a dot; None for any other op."""
        rule = super().region_rule(op)
        return None if rule is None else _REGIONS.get(op.name, rule)

    def _dot(self, op: Op) -> Sequence[Value]:
        left, right = (_roles.role_of(self, value) for value in op.inputs[:2])
        site = DotSite(op, ((op.inputs[0], None), (op.inputs[1], None)))
        dot = FloatDot(site, (left, right), _roles.weight_index((left, right)))
        chosen = self.choose(dot)
        if isinstance(chosen, Split):
            site.terms = chosen.terms
            self.dots.split.append(site)
            return [_in_terms(op, chosen.terms)]
        if not isinstance(chosen, Rounded):
            site.miss(*chosen)
            self.dots.left.append(site)
            self.note(op)
            return op.outputs
        site.rounded = True
        self.seen.sites.append(site)
        self.dots.rounded.append((dot, chosen))
        operands = [*(self._operand(dot, i, chosen) for i in (0, 1)), *op.inputs[2:]]
        new = graph.equation_op(op.equation, operands, op.callers)
        if chosen.scope:
            new.run = functools.partial(_in_scope, chosen.scope, op)
        self.note(new)
        return new.outputs

    def _operand(self, dot: FloatDot, index: int, chosen: Rounded) -> Value:
        """An operand, rounded as asked; dots with equal roundings of it share one."""
        value, steps = dot.op.inputs[index], self._steps(dot, index, chosen)
        if not steps:
            return value
        tiles = [how.tiles(value.shape, *dot.site.axes(index)) for how in steps]
        key = (value, steps, tuple(tuple(sorted(sizes.items())) for sizes in tiles))
        if key not in self._done:
            pairs = list(zip(steps, tiles, strict=True))
            self._done[key] = _rounded_value(dot.op, value, pairs)
        return self._done[key]

    def _steps(self, dot: FloatDot, index: int, chosen: Rounded) -> tuple[Quantization, ...]:
        """The roundings of an operand, one after the other."""
        how = chosen.operands[index]
        steps = () if how is None else (how,)
        if chosen.compute is None:
            return steps
        known = self.scaled(dot.op.inputs[index])
        held = known.dtype if how is None and known is not None else getattr(how, "dtype", None)
        return steps if held in dtypes.EIGHT_BIT_INTS else (*steps, _IN_INT8)


def _jit(walk: Context, op: Op) -> Sequence[Value] | None:
    """A jitted function: inlined, or rebuilt with its own parameters if it has any.

    The rewrite takes no facts into a function with donation or sharding, because its arguments must
    not change. The facts here are never computed, so they go in.
    """
    if functions.asks_for_nothing(op.params):
        return functions.jit(walk, op)
    border = Border(walk, op.inputs)
    args = [border.enter_plain(value, Lost(op, "", "")) for value in op.inputs]
    for value, arg in zip(op.inputs, args, strict=True):
        if (fact := walk.scaled(value)) is not None:
            border.inner.facts[arg] = fact
    outputs = walk_inside(border.inner, op, op.params["jaxpr"], args)
    return functions.rebuilt_jit(walk, op, border.settle(outputs, keep=args))


def _custom_rule(walk: Context, op: Op) -> Sequence[Value] | None:
    """A function with a derivative rule: its dots are rounded, and its rule is kept.

    In the rule, dots of primal values are rounded like the function's. The value is therefore the
    same with and without derivatives. The linear part is left as written.
    """
    assert isinstance(walk, Rounding)
    border = Border(walk, op.inputs)
    args = [border.enter(value) for value in op.inputs]
    inside = border.settle(walk_inside(border.inner, op, op.params["call_jaxpr"], args))
    if not inside.changed:
        return None
    places = [op.inputs.index(value) for value, _ in inside.sources]
    kinds = [_roles.role_of(walk, value).kind for value in op.inputs]
    given = [i for i, kind in enumerate(kinds) if kind != "computed"]
    new = graph.equation_op(op.equation, op.inputs, op.callers)
    run = lambda *arrays: inside.program.run([arrays[i] for i in places])  # noqa: E731
    new.run = _with_rule(op, run, walk.choose, given)
    walk.note(new)
    return new.outputs


def _custom_batching(walk: Context, op: Op) -> Sequence[Value] | None:
    """A function with a rule for vmap: dots are rounded in both, since the rule is its value."""
    assert isinstance(walk, Rounding)
    given = [
        i for i, value in enumerate(op.inputs) if _roles.role_of(walk, value).kind != "computed"
    ]

    def change(rule: Callable[..., Any]) -> Callable[..., Any]:
        return _rounded_function(rule, walk.choose, given)

    return functions.with_rule_for_vmap(walk, op, change)


# Regions with other rules here than in the rewrite.
_REGIONS: dict[str, Region] = {
    "custom_jvp_call": _custom_rule,
    "custom_vjp_call": _custom_rule,
    "ruled_call": _custom_rule,
    "custom_vmap_call": _custom_batching,
    **dict.fromkeys(JITS, _jit),
}


def _rounded_value(
    dot: Op, value: Value, steps: Sequence[tuple[Quantization, Mapping[int, int]]]
) -> Value:
    """A value rounded to 8 bits, at the place of a dot; in float32 between two roundings."""

    def run(x: Array) -> Array:
        y = x if len(steps) == 1 else x.astype(np.float32)
        with graph.context_of(dot.equation, dot.callers):
            for how, tiles in steps:
                y = fake_quantize(
                    y,
                    how.dtype,
                    tiled_axes=tiles,
                    zero_point=None if how.symmetric else True,
                    scale_dtype=how.scale_dtype,
                )
            return y.astype(x.dtype)

    return graph.derived("fake_quantize", run, [value], value.shape, value.dtype)


def _in_scope(scope: str, dot: Op, *arrays: Array) -> Sequence[Array]:
    """A dot, with a name in its path."""
    with jax.named_scope(scope):
        return graph.bind(dot.equation, arrays, dot.callers)


def _in_terms(dot: Op, terms: int) -> Value:
    """The output of a dot, computed by products of int8 terms."""

    def run(lhs: Array, rhs: Array) -> Array:
        asked: dict[str, Any] = {"preferred_element_type": dot.outputs[0].dtype, "terms": terms}
        sharding = dot.params.get("out_sharding")
        with graph.context_of(dot.equation, dot.callers):
            numbers = dot.params["dimension_numbers"]
            return split_dot(lhs, rhs, numbers, **asked, out_sharding=sharding)

    return graph.derived("split_dot", run, dot.inputs, dot.outputs[0].shape, dot.outputs[0].dtype)


def _with_rule(
    op: Op, run: Callable[..., list[Array]], choose: Choose, given: Sequence[int]
) -> Callable[..., Sequence[Array]]:
    """`run` with the derivative rule of `op`; its inputs at `given` are given to the function."""

    def call(*arrays: Any) -> Sequence[Any]:
        def alone(*xs: Any) -> Any:
            return graph.bind(op.equation, xs, op.callers)

        jaxpr, consts = compat.hoisted(alone, arrays)
        number = len(consts)
        places = [number + i for i in given]

        def value(*both: Any) -> Any:
            return run(*both[number:])

        def split(first: Any, second: Any, primals: Any, is_linear: bool) -> Halves:
            del primals, is_linear
            return Halves(_rounded_function(first, choose, places), second)

        every = range(number + len(arrays))
        # No `join`: it would round tangents as it rounds values.
        remake = Remake(split)
        return derivatives.differentiable(value, jaxpr, every, remake)(*consts, *arrays)

    return call


def _rounded_function(
    fun: Callable[..., Any], choose: Choose, given: Sequence[int]
) -> Callable[..., Any]:
    """A function of arrays with roundings before its dots; arguments at `given` may be weights."""

    def rounded(*arrays: Any) -> Any:
        jaxpr, shape = jax.make_jaxpr(fun, return_shape=True)(*arrays)
        consts = compat.consts_of(jaxpr)
        program, _ = round_dots(jaxpr, choose, [len(consts) + i for i in given])
        return jax.tree.unflatten(jax.tree.structure(shape), program.run([*consts, *arrays]))

    return rounded


def round_dots(
    jaxpr: Any, choose: Choose, given: Collection[int] | None = None
) -> tuple[Program, FloatDots]:
    """Put roundings before the dots of a closed jaxpr; returns the program and its dots.

    Its inputs are the constants, then the arguments. Those in `given` may be weights; by default
    all may.
    """
    walk = Rounding(choose)
    inputs = graph.inputs_of(jaxpr)
    for i, value in enumerate(inputs):
        if given is None or i in given:
            _roles.mark(walk, value)
    program = walk.settle(walk.program(jaxpr, inputs), inputs)
    others = (s for s in walk.seen.sites if not scaled_products.is_one(s.op.equation))
    walk.dots.left += [_as_written(site) for site in others if not site.changed]
    return program, walk.dots


def _as_written(site: DotSite) -> DotSite:
    """A dot to leave as it is, without the facts about its operands: they are no 8-bit data."""
    (lhs, _), (rhs, _) = site.given
    plain = DotSite(site.op, ((lhs, None), (rhs, None)))
    plain.miss(site.reason, site.remedy)
    return plain


def _settle(walk: Walk, outputs: Sequence[Value], inputs: Sequence[Value]) -> Program:
    return Body(walk, outputs, inputs).program({})
