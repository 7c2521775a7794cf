"""The program with 8-bit roundings put before its dots, and everything else as it was.

A walk like the one that decides, with another rule for dots: instead of looking for 8-bit data it
rounds the operands of a dot to what 8 bits can hold. What comes out is an ordinary differentiable
program, whose dots the rewrite then captures.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from jaxfp8._ops.quantize import fake_quantize
from jaxfp8._recipes.quantization import Quantization
from jaxfp8._rewrite.derive import derivatives
from jaxfp8._rewrite.derive.derivatives import Halves, Remake
from jaxfp8._rewrite.floats import roles as _roles
from jaxfp8._rewrite.floats.roles import Role
from jaxfp8._rewrite.ir import emit, graph
from jaxfp8._rewrite.ir.emit import Program
from jaxfp8._rewrite.ir.facts import Lost
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.sites import Seen, Site
from jaxfp8._rewrite.plan.walk import Walk
from jaxfp8._rewrite.regions import regions
from jaxfp8._rewrite.regions.borders import Border
from jaxfp8._rewrite.rules import scaled_products
from jaxfp8._value import compat
from jaxfp8._value.spec import Shape

_DOTS = ("dot_general",)


@dataclasses.dataclass(frozen=True, eq=False)
class Dot:
    """A dot as it stands in the function.

    Attributes:
      op: the dot.
      roles: where its operands come from.
      weight: which operand is the weight, or None where neither is.
    """

    op: Op
    roles: tuple[Role, Role]
    weight: int | None

    def axes(self, index: int) -> tuple[Shape, Shape]:
        """Contracted and batch axes of an operand."""
        contracting, batch = self.op.params["dimension_numbers"]
        return tuple(map(int, contracting[index])), tuple(map(int, batch[index]))


@dataclasses.dataclass(frozen=True, eq=False)
class Rounded:
    """How the operands of a dot are rounded; None leaves an operand as it is."""

    operands: tuple[Quantization | None, Quantization | None]


# What becomes of a dot: roundings, or why there are none and what to do.
Plan = Callable[[Dot], Rounded | tuple[str, str]]


@dataclasses.dataclass(eq=False)
class Found:
    """The dots of a walk, regions included: rounded ones, and the others with why and a remedy."""

    rounded: list[tuple[Dot, Rounded]] = dataclasses.field(default_factory=list)
    left: list[Site] = dataclasses.field(default_factory=list)


class Rounding(Walk):
    """Facts and roundings of one program.

    Attributes:
      plan: what becomes of a dot.
      found: the dots so far, shared with the walks of regions.
    """

    def __init__(self, plan: Plan, seen: Seen | None = None, found: Found | None = None) -> None:
        super().__init__(_settle, seen)
        self.plan = plan
        self.found = Found() if found is None else found
        self._done: dict[Any, Value] = {}

    def nested(self) -> Rounding:
        """A walk for the inside of a region."""
        inside = Rounding(self.plan, self.seen, self.found)
        self._nested.append(inside)
        return inside

    def concerns(self, eqn: Any, inputs: Sequence[Value]) -> bool:
        """Whether a region holds a dot."""
        return any(_holds_dot(jaxpr) for jaxpr in compat.subjaxprs(eqn))

    def equation(self, eqn: Any, inputs: list[Value], callers: tuple[Any, ...]) -> Sequence[Value]:
        """Add an equation to the graph, with roundings before it if it is a chosen dot."""
        name = eqn.primitive.name
        if name in _DOTS:
            return self._dot(eqn, inputs, callers)
        if scaled_products.is_one(eqn):  # of operands that are held in 8 bits already
            op = graph.equation_op(eqn, inputs, callers)
            self.note(op)
            return op.outputs
        rule = _ENTERED.get(name)
        if rule is not None and self.concerns(eqn, inputs):
            return self._enter(rule, eqn, inputs, callers)
        return super().equation(eqn, inputs, callers)

    def _dot(self, eqn: Any, inputs: list[Value], callers: tuple[Any, ...]) -> Sequence[Value]:
        left, right = (_roles.role_of(self, value) for value in inputs)
        dot = Dot(
            graph.equation_op(eqn, inputs, callers),
            (left, right),
            _roles.weight_index((left, right)),
        )
        site = Site(dot.op, ((inputs[0], None), (inputs[1], None)))
        plan = self.plan(dot)
        if not isinstance(plan, Rounded):
            site.miss(*plan)
            self.found.left.append(site)
            self.note(dot.op)
            return dot.op.outputs
        site.call = plan
        self.seen.sites.append(site)
        self.found.rounded.append((dot, plan))
        operands = [self._operand(dot, i, q) for i, q in enumerate(plan.operands)]
        op = graph.equation_op(eqn, operands, callers)
        self.note(op)
        return op.outputs

    def _operand(self, dot: Dot, index: int, quantization: Quantization | None) -> Value:
        """An operand, rounded if it is to be; once for all dots that round it alike."""
        value = dot.op.inputs[index]
        if quantization is None:
            return value
        tiles = quantization.tiles(value.shape, *dot.axes(index))
        key = (value, quantization, tuple(sorted(tiles.items())))
        if key not in self._done:
            self._done[key] = _rounded_value(dot.op, value, quantization, tiles)
        return self._done[key]

    def _jit(self, eqn: Any, inputs: list[Value], callers: tuple[Any, ...]) -> Sequence[Value]:
        """A jitted function, rebuilt with its own parameters if it has any.

        What donates or shards takes the same arguments as before, so the rewrite lets no facts in.
        These here are never computed with: what is known of an argument is known inside.
        """
        if regions.asks_for_nothing(eqn.params):
            return super().equation(eqn, inputs, callers)
        border = Border(self, inputs)
        args = [border.enter_plain(value, lambda: Lost(eqn, "", "")) for value in inputs]
        for value, arg in zip(inputs, args, strict=True):
            if (fact := self.scaled(value)) is not None:
                border.inner.facts[arg] = fact
        inside = border.settle(_inner(border, eqn, "jaxpr", args, callers), keep=args)
        op = graph.equation_op(eqn, inputs, callers)
        self.note(op)
        if inside.changed:
            op.run = functools.partial(_run_jit, op, inside.program)
        return op.outputs

    def _custom_rule(
        self, eqn: Any, inputs: list[Value], callers: tuple[Any, ...]
    ) -> Sequence[Value]:
        """A function with a derivative of its own: its dots are rounded, its rule is kept.

        In the rule, dots of primal values are rounded like those of the function, so that the
        value is the same with and without derivatives; what is linear is left as written.
        """
        border = Border(self, inputs)
        args = [border.enter(value) for value in inputs]
        inside = border.settle(_inner(border, eqn, "call_jaxpr", args, callers))
        op = graph.equation_op(eqn, inputs, callers)
        self.note(op)
        if not inside.changed:
            return op.outputs
        places = [inputs.index(value) for value, _ in inside.sources]
        roles = [_roles.role_of(self, value).kind for value in inputs]
        given = [i for i, kind in enumerate(roles) if kind != "computed"]
        run = functools.partial(_run_at, inside.program, places)
        op.run = _with_rule(op, run, self.plan, given)
        return op.outputs


# What is entered in another way than by the rewrite.
_ENTERED = {
    "custom_jvp_call": Rounding._custom_rule,
    "custom_vjp_call": Rounding._custom_rule,
    **dict.fromkeys(regions.JITS, Rounding._jit),
}


def _inner(
    border: Border, eqn: Any, name: str, args: Sequence[Value], callers: tuple[Any, ...]
) -> list[Value]:
    """Walk the jaxpr in a parameter of an equation."""
    jaxpr = eqn.params[name]
    consts = [graph.constant(c) for c in compat.consts_of(jaxpr)]
    return border.inner.jaxpr(compat.open_jaxpr(jaxpr), consts, args, (*callers, eqn))


def _run_jit(op: Op, program: Program, *arrays: Any) -> Sequence[Any]:
    """Bind a jit of another program, all else as it was."""
    eqn = op.eqn
    with graph.context_inside(op):
        jaxpr = jax.make_jaxpr(lambda *xs: program.run(xs))(*arrays)
        return eqn.primitive.bind(*arrays, **{**eqn.params, "jaxpr": jaxpr})


def _run_at(program: Program, places: Sequence[int], *arrays: Any) -> list[Any]:
    """Run a program on the arrays that it reads among those given."""
    return program.run([arrays[i] for i in places])


def _rounded_value(dot: Op, value: Value, quantization: Quantization, tiles: Any) -> Value:
    def run(x: Any) -> Any:
        with graph.context_of(dot.eqn, dot.callers):
            return fake_quantize(
                x,
                quantization.dtype,
                tiled_axes=tiles,
                zero_point=None if quantization.symmetric else True,
                scale_dtype=quantization.scale_dtype,
            )

    return graph.derived("fake_quantize", run, [value], value.shape, value.dtype)


def _with_rule(
    op: Op, run: Callable[..., Any], plan: Plan, given: Sequence[int]
) -> Callable[..., Sequence[Any]]:
    """`run` with the derivative of the equation of `op`, of whose inputs some are `given`."""

    def call(*arrays: Any) -> Sequence[Any]:
        def alone(*xs: Any) -> Any:
            return graph.bind(op.eqn, xs, op.callers)

        jaxpr, consts = compat.hoisted(alone, arrays)
        number = len(consts)
        places = [number + i for i in given]

        def value(*both: Any) -> Any:
            return run(*both[number:])

        def split(first: Any, second: Any, primals: Any, is_linear: bool) -> Halves:
            del primals, is_linear
            return Halves(_rounded_function(first, plan, places), second)

        every = range(number + len(arrays))
        # No `join`: in one function, tangents would be rounded as the values are.
        remake = Remake(split)
        return derivatives.differentiable(value, jaxpr, every, remake)(*consts, *arrays)

    return call


def _rounded_function(
    fun: Callable[..., Any], plan: Plan, given: Sequence[int]
) -> Callable[..., Any]:
    """A function of arrays with roundings put into it; some arguments are `given`."""

    def rounded(*arrays: Any) -> Any:
        jaxpr, shape = jax.make_jaxpr(fun, return_shape=True)(*arrays)
        consts = compat.consts_of(jaxpr)
        program, _ = round_dots(jaxpr, plan, [len(consts) + i for i in given])
        return jax.tree.unflatten(jax.tree.structure(shape), program.run([*consts, *arrays]))

    return rounded


def round_dots(
    jaxpr: Any, plan: Plan, given: Collection[int] | None = None
) -> tuple[Program, Found]:
    """Put roundings into a closed jaxpr.

    Args:
      jaxpr: the program.
      plan: what becomes of each dot.
      given: which of the program's inputs (constants, then arguments) may be weights; by default
        all of them.

    Returns:
      The program with roundings, whose inputs are the constants and arguments of the jaxpr, and
      the dots.
    """
    opened = compat.open_jaxpr(jaxpr)
    walk = Rounding(plan)
    inputs = [graph.value_of(v.aval) for v in (*opened.constvars, *opened.invars)]
    for i, value in enumerate(inputs):
        if given is None or i in given:
            _roles.mark(walk, value)
    number = len(opened.constvars)
    outputs = walk.jaxpr(opened, inputs[:number], inputs[number:])
    others = (s for s in walk.seen.sites if not scaled_products.is_one(s.op.eqn))
    walk.found.left += [_as_written(site) for site in others if site.call is None]
    return walk.settle(outputs, inputs), walk.found


def _as_written(site: Site) -> Site:
    """A row on a product that is not entered, without what was only said of its operands here."""
    (lhs, _), (rhs, _) = site.given
    plain = Site(site.op, ((lhs, None), (rhs, None)))
    plain.miss(site.reason, site.remedy)
    return plain


def _settle(walk: Walk, outputs: Sequence[Value], inputs: list[Value]) -> Program:
    return emit.schedule(outputs, walk.effects, {}, inputs)


def _holds_dot(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name in _DOTS or any(map(_holds_dot, compat.subjaxprs(eqn)))
        for eqn in jaxpr.eqns
    )
