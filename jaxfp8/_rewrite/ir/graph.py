"""The program as a graph: the decide pass builds it and the emit pass evaluates it.

Each equation of the function becomes an `Op`. Its inputs and outputs are `Value`s. The rewrite adds
ops of its own: bytes of an array, arithmetic on scales, scaled dots. It never removes an op. An op
without a reader is not emitted.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core, source_info_util
from jax.typing import DTypeLike

from jaxfp8._value import compat
from jaxfp8._value.spec import Shape

Equation = core.JaxprEqn
# Without its constants, and with them.
Jaxpr = core.Jaxpr
ClosedJaxpr = core.ClosedJaxpr
Var = core.Var
Literal = core.Literal
# The equations of inlined calls, outermost first.
Callers = tuple[Equation, ...]
# An array, or a tracer of one.
Array = jax.Array | np.ndarray
# Parameters of an equation by name; each primitive has types of its own.
Params = dict[str, Any]


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """One array of the program."""

    # shape, dtype, weak_type: its type.
    shape: Shape
    dtype: np.dtype
    # op, index: its op and its position among the outputs; None for an input of the program.
    op: Op | None = None
    index: int = 0
    weak_type: bool = False
    literal: np.ndarray | None = None  # the number, if it is written in the program
    concrete: Array | None = None  # the array, if the function closes over one
    # Inside a region, the value outside it that enters as this one, or as slices.
    outer: Value | None = None
    number: float | None = None  # inside a region, the known number in every entry

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(eq=False, slots=True)
class Op:
    """Something to evaluate."""

    name: str  # the name of the primitive or of the synthesised operation
    inputs: tuple[Value, ...]  # the values it reads
    # Evaluates it with JAX operations: `run(*inputs) -> outputs`. None evaluates `eqn`.
    run: Callable[..., Sequence[Array]] | None
    params: Params  # parameters of the equation, if it has one
    eqn: Equation | None = None  # its equation; None for an op added by the rewrite
    callers: Callers = ()  # the equations of the inlined calls around it, outermost first
    effectful: bool = False  # whether it must run, in order, even if nobody reads its outputs
    outputs: tuple[Value, ...] = ()

    @property
    def equation(self) -> Equation:
        """The equation of an op, not None."""
        assert self.eqn is not None, self.name
        return self.eqn

    @property
    def inside(self) -> Callers:
        """The callers for ops inside the equation."""
        return (*self.callers, self.equation)

    def evaluate(self, *arrays: Array) -> Sequence[Array]:
        """The outputs for given inputs."""
        if self.run is None:
            return bind(self.equation, arrays, self.callers)
        return self.run(*arrays)


def value_of(aval: Any) -> Value:
    """An input of the program of the given abstract value."""
    return Value(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def inputs_of(jaxpr: ClosedJaxpr) -> list[Value]:
    """The inputs of a closed jaxpr as values: its constants, then its arguments."""
    opened = compat.open_jaxpr(jaxpr)
    consts = [value_of(v.aval) for v in opened.constvars]
    for value, array in zip(consts, compat.consts_of(jaxpr), strict=True):
        value.concrete = None if isinstance(array, jax.core.Tracer) else array
    return [*consts, *(value_of(v.aval) for v in opened.invars)]


def literal(value: np.ndarray | float, dtype: DTypeLike | None = None) -> Value:
    """A scalar constant."""
    array = np.asarray(value, dtype)
    return Value(array.shape, array.dtype, literal=array)


def literal_of(atom: Literal) -> Value:
    """The value of a literal in a jaxpr."""
    value = value_of(atom.aval)
    value.literal = np.asarray(atom.val, value.dtype)
    return value


def array_of(value: Value) -> Array:
    """A literal for JAX: a weakly typed one as a Python number, if that has its dtype."""
    number = value.literal
    assert number is not None
    if value.weak_type and number.ndim == 0:
        plain = number.item()
        if jax.dtypes.result_type(plain) == value.dtype:
            return plain
    return number


def constant(array: Array) -> Value:
    """An array held by an inner jaxpr."""
    aval = jax.typeof(array)
    op = Op("constant", (), lambda: [array], {})
    op.outputs = (Value(aval.shape, aval.dtype, op, weak_type=aval.weak_type),)
    return op.outputs[0]


def derived(
    name: str,
    run: Callable[..., Array],
    inputs: Sequence[Value],
    shape: Shape,
    dtype: DTypeLike,
    params: Params | None = None,
) -> Value:
    """The output of an operation added by the rewrite."""
    op = Op(name, tuple(inputs), lambda *arrays: [run(*arrays)], params or {})
    op.outputs = (Value(tuple(shape), np.dtype(dtype), op),)
    return op.outputs[0]


def equation_op(eqn: Equation, inputs: Sequence[Value], callers: Callers = ()) -> Op:
    """The op of an equation as the function has it."""
    name, effectful = eqn.primitive.name, compat.has_effects(eqn)
    op = Op(name, tuple(inputs), None, eqn.params, eqn, callers, effectful)
    op.outputs = tuple([_output(v.aval, op, i) for i, v in enumerate(eqn.outvars)])
    return op


def equations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """The equations of a jaxpr, at any depth."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in compat.subjaxprs(eqn):
            yield from equations(inner)


_NO_ARRAY = np.dtype(bool)  # placeholder for the type of a token; nothing reads it


def _output(aval: Any, op: Op, index: int) -> Value:
    if isinstance(aval, jax.core.ShapedArray):
        return Value(aval.shape, aval.dtype, op, index, aval.weak_type)
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", _NO_ARRAY)
    return Value(shape, dtype, op, index, getattr(aval, "weak_type", False))


def bind(eqn: Equation, arrays: Sequence[Array], callers: Callers = ()) -> Sequence[Array]:
    """Evaluate an equation on arrays, in the context of its tracing."""
    functions, params = compat.bind_params(eqn)
    with eqn.ctx.manager, context_of(eqn, callers):
        out = eqn.primitive.bind(*functions, *arrays, **params)
    return out if eqn.primitive.multiple_results else [out]


def context_of(eqn: Equation, callers: Callers = ()) -> contextlib.AbstractContextManager[object]:
    """Gives ops traced inside it the source line and the name stack of an equation."""
    stack = source_info_util.current_name_stack()
    for outer in (*callers[_ENTERED.get() :], eqn):
        if (own := outer.source_info.name_stack).stack:
            stack = stack + own
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)


# JAX begins a new name stack in each region, and adds the names around it. While a region is
# rebuilt, this many outer callers are therefore not named again.
_ENTERED: contextvars.ContextVar[int] = contextvars.ContextVar("jaxfp8_entered", default=0)


@contextlib.contextmanager
def context_inside(op: Op) -> Iterator[None]:
    """The context of a region's equation, for tracing inside the region."""
    with op.equation.ctx.manager, context_of(op.equation, op.callers):
        token = _ENTERED.set(len(op.callers) + 1)
        try:
            yield
        finally:
            _ENTERED.reset(token)


def replay(op: Op, inputs: Sequence[Value], shape: Shape, dtype: DTypeLike) -> Value:
    """The same operation on other inputs: data movement on bytes, or on an array of scales."""

    def run(*arrays: Array) -> Array:
        return bind(op.equation, compat.vary_alike(arrays), op.callers)[0]

    return derived(op.name, run, inputs, shape, dtype, op.params)


def reshape(value: Value, shape: Shape) -> Value:
    """The value in another shape."""
    shape = tuple(shape)
    if value.shape == shape:
        return value
    if value.literal is not None:
        return literal(np.reshape(value.literal, shape))
    return derived("reshape", lambda x: lax.reshape(x, shape), [value], shape, value.dtype)


def transpose(value: Value, permutation: Shape) -> Value:
    """The value with its axes permuted."""
    permutation = tuple(int(axis) for axis in permutation)
    if permutation == tuple(range(len(permutation))):
        return value
    shape = tuple(value.shape[axis] for axis in permutation)
    return derived(
        "transpose",
        lambda x: lax.transpose(x, permutation),
        [value],
        shape,
        value.dtype,
        {"permutation": permutation},
    )


def laid_out_like(value: Value, original: Value) -> Value:
    """The value with the sharding of the one it replaces, on a mesh with explicit axes."""
    op = original.op
    if op is None or op.eqn is None:
        return value
    aval: Any = op.eqn.outvars[original.index].aval
    if jax.sharding.AxisType.Explicit not in aval.sharding.mesh.axis_types:
        return value
    run = functools.partial(compat.laid_out_like, aval=aval)
    return derived("reshard", run, [value], value.shape, value.dtype)


def multiply(left: Value, right: Value) -> Value:
    """The product of two float32 arrays of equal rank; axes of size 1 broadcast."""
    shape = np.broadcast_shapes(left.shape, right.shape)
    return derived("mul", jnp.multiply, [left, right], shape, left.dtype)


def add(left: Value, right: Value) -> Value:
    """The sum of two arrays of equal rank and dtype; axes of size 1 broadcast."""
    shape = np.broadcast_shapes(left.shape, right.shape)
    return derived("add", jnp.add, [left, right], shape, left.dtype)


def negate(value: Value) -> Value:
    """The value with its sign changed."""
    return derived("neg", jnp.negative, [value], value.shape, value.dtype)


def reciprocal(value: Value) -> Value:
    """One over a float32 array."""
    if (op := producer(value, "reciprocal")) is not None:
        return op.inputs[0]
    if value.literal is not None and np.all(value.literal != 0):
        with np.errstate(all="ignore"):
            return literal(np.float32(1.0) / value.literal)
    return derived("reciprocal", jnp.reciprocal, [value], value.shape, value.dtype)


def repeat(value: Value, repeats: Shape, counts: Shape) -> Value:
    """Each entry `repeats[axis]` times along each axis, with the result cut to `counts`."""

    def run(x: Array) -> Array:
        for axis, (times, count) in enumerate(zip(repeats, counts, strict=True)):
            if x.shape[axis] != count:
                index = np.arange(count) // times
                x = x[(slice(None),) * axis + (index,)]
        return x

    return value if value.shape == counts else derived("repeat", run, [value], counts, value.dtype)


# These change the shape or repeat entries, and keep their order.
_RESHAPES = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy")


def is_reshape(op: Op) -> bool:
    """Whether an op changes the shape or repeats entries, and keeps their order."""
    turns = op.name == "reshape" and op.params.get("dimensions") is not None
    return op.name in _RESHAPES and not turns


def producer(value: Value, name: str) -> Op | None:
    """The op that made `value`, if its name is `name`."""
    return value.op if value.op is not None and value.op.name == name else None


def inputs(value: Value) -> tuple[Value, ...]:
    """The inputs of the op that made `value`; () if none did."""
    return () if value.op is None else value.op.inputs


def behind(
    values: Iterable[Value], before: Callable[[Value], Iterable[Value]] = inputs
) -> Iterator[Value]:
    """Values and everything behind them, each once; `before` gives the values just behind one."""
    stack, seen = list(values), set[Value]()
    while stack:
        value = stack.pop()
        if value not in seen:
            seen.add(value)
            yield value
            stack.extend(before(value))
