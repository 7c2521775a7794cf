"""The program as a graph: what the decide pass builds and the emit pass evaluates.

Every equation of the function becomes an `Op` whose inputs and outputs are `Value`s. The rewrite
adds ops of its own (bytes of an array, arithmetic on scales, scaled dots) to the same graph, and
never removes one: an op that nobody demands is not emitted.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util

from jaxfp8._value import compat
from jaxfp8._value.spec import Shape


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """One array of the program: an output of `op`, or an input of the program if `op` is None."""

    shape: Shape
    dtype: np.dtype
    op: Op | None = None
    index: int = 0
    weak_type: bool = False
    literal: Any = None
    concrete: Any = None  # the array, where the function closes over one
    outer: Value | None = None  # of the program around a region: enters as this one, or in part

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(eq=False, slots=True)
class Op:
    """Something to evaluate.

    Attributes:
      name: the primitive's name, or that of the synthesised operation.
      inputs: the values it reads.
      run: evaluates it with jax operations, `run(*inputs) -> outputs`; None for the equation as is.
      params: parameters of the equation, where it is one.
      eqn: the equation it stands for, or None.
      callers: the equations of the calls that it was inlined from, outermost first.
      effectful: whether it must run, in order, even if nobody reads its outputs.
    """

    name: str
    inputs: tuple[Value, ...]
    run: Callable[..., Sequence[Any]] | None
    params: dict[str, Any]
    eqn: Any = None
    callers: tuple[Any, ...] = ()
    effectful: bool = False
    outputs: tuple[Value, ...] = ()

    def evaluate(self, *arrays: Any) -> Sequence[Any]:
        """The outputs for given inputs."""
        if self.run is None:
            return bind(self.eqn, arrays, self.callers)
        return self.run(*arrays)


def value_of(aval: Any) -> Value:
    """An input of the program of the given abstract value."""
    return Value(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def inputs_of(jaxpr: Any) -> list[Value]:
    """The inputs of a closed jaxpr as values: its constants, then its arguments."""
    opened = compat.open_jaxpr(jaxpr)
    consts = [value_of(v.aval) for v in opened.constvars]
    for value, array in zip(consts, compat.consts_of(jaxpr), strict=True):
        value.concrete = None if isinstance(array, jax.core.Tracer) else array
    return [*consts, *(value_of(v.aval) for v in opened.invars)]


def literal(value: Any, dtype: Any = None) -> Value:
    """A scalar constant."""
    array = np.asarray(value, dtype)
    return Value(array.shape, array.dtype, literal=array)


def literal_of(atom: Any) -> Value:
    """The value of a literal in a jaxpr."""
    return Value(
        atom.aval.shape,
        atom.aval.dtype,
        weak_type=getattr(atom.aval, "weak_type", False),
        literal=np.asarray(atom.val, atom.aval.dtype) if hasattr(atom.aval, "dtype") else atom.val,
    )


def array_of(value: Value) -> Any:
    """A literal as JAX is to see it: a weak one as a Python number, if that has its dtype."""
    number = value.literal
    if value.weak_type and np.ndim(number) == 0:
        plain = number.item()
        if jax.dtypes.result_type(plain) == value.dtype:
            return plain
    return number


def constant(array: Any) -> Value:
    """An array that an inner jaxpr holds."""
    aval = jax.typeof(array)
    op = Op("constant", (), lambda: [array], {})
    op.outputs = (Value(aval.shape, aval.dtype, op, weak_type=aval.weak_type),)
    return op.outputs[0]


def derived(
    name: str,
    run: Callable[..., Any],
    inputs: Sequence[Value],
    shape: Shape,
    dtype: Any,
    params: dict[str, Any] | None = None,
) -> Value:
    """The output of an operation that the rewrite adds."""
    op = Op(name, tuple(inputs), lambda *arrays: [run(*arrays)], params or {})
    op.outputs = (Value(tuple(shape), np.dtype(dtype), op),)
    return op.outputs[0]


def equation_op(eqn: Any, inputs: Sequence[Value], callers: tuple[Any, ...] = ()) -> Op:
    """The op of an equation, as it stands in the function."""
    name, effectful = eqn.primitive.name, compat.has_effects(eqn)
    op = Op(name, tuple(inputs), None, eqn.params, eqn, callers, effectful)
    op.outputs = tuple([_output(v.aval, op, i) for i, v in enumerate(eqn.outvars)])
    return op


_NO_ARRAY = np.dtype(bool)  # of tokens and the like, which nothing looks into


def _output(aval: Any, op: Op, index: int) -> Value:
    if isinstance(aval, jax.core.ShapedArray):
        return Value(aval.shape, aval.dtype, op, index, aval.weak_type)
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", _NO_ARRAY)
    return Value(shape, dtype, op, index, getattr(aval, "weak_type", False))


def bind(eqn: Any, arrays: Sequence[Any], callers: tuple[Any, ...] = ()) -> Sequence[Any]:
    """Evaluate an equation on arrays, in the context that it was traced in."""
    functions, params = compat.bind_params(eqn)
    with eqn.ctx.manager, context_of(eqn, callers):
        out = eqn.primitive.bind(*functions, *arrays, **params)
    return out if eqn.primitive.multiple_results else [out]


def context_of(eqn: Any, callers: tuple[Any, ...] = ()) -> Any:
    """The source line and the name stack of an equation, for what is traced in its place."""
    stack = source_info_util.current_name_stack()
    for outer in (*callers[_ENTERED.get() :], eqn):
        if (own := outer.source_info.name_stack).stack:
            stack = stack + own
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)


# How many callers of what runs now are around a region that is being rebuilt, or are the region
# itself: JAX has their names, and begins a new stack in each region.
_ENTERED: contextvars.ContextVar[int] = contextvars.ContextVar("jaxfp8_entered", default=0)


@contextlib.contextmanager
def context_inside(op: Op) -> Iterator[None]:
    """The context of a region's equation, for what is traced in the region."""
    with op.eqn.ctx.manager, context_of(op.eqn, op.callers):
        token = _ENTERED.set(len(op.callers) + 1)
        try:
            yield
        finally:
            _ENTERED.reset(token)


def replay(op: Op, inputs: Sequence[Value], shape: Shape, dtype: Any) -> Value:
    """The same data movement on other inputs: on bytes, or on an array of scales."""
    eqn = op.eqn

    def run(*arrays: Any) -> Any:
        return bind(eqn, compat.vary_alike(arrays), op.callers)[0]

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
    """The value sharded as the one it replaces, where types say how: on a mesh of explicit axes."""
    op = original.op
    if op is None or op.eqn is None:
        return value
    aval = op.eqn.outvars[original.index].aval
    if jax.sharding.AxisType.Explicit not in aval.sharding.mesh.axis_types:
        return value
    run = functools.partial(compat.laid_out_like, aval=aval)
    return derived("reshard", run, [value], value.shape, value.dtype)


def multiply(left: Value, right: Value) -> Value:
    """The product of two float32 arrays of one rank, size-1 axes stretched."""
    shape = np.broadcast_shapes(left.shape, right.shape)
    return derived("mul", jnp.multiply, [left, right], shape, left.dtype)


def add(left: Value, right: Value) -> Value:
    """The sum of two arrays of one rank and dtype, size-1 axes stretched."""
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
    """Each entry `repeats` times along each axis, cut to `counts`."""

    def run(x: Any) -> Any:
        for axis, (times, count) in enumerate(zip(repeats, counts, strict=True)):
            if x.shape[axis] != count:
                index = np.arange(count) // times
                x = x[(slice(None),) * axis + (index,)]
        return x

    return value if value.shape == counts else derived("repeat", run, [value], counts, value.dtype)


def producer(value: Value, name: str) -> Op | None:
    """The op that made `value`, if it is a `name`."""
    return value.op if value.op is not None and value.op.name == name else None


_PASS_CONSTANT = ("convert_element_type", "broadcast_in_dim", "reshape", "copy", "copy_p")


def number(value: Value) -> float | None:
    """The number that every entry of the value is known to be, or None."""
    dtypes = []
    while value.literal is None:
        if value.op is None or value.op.name not in _PASS_CONSTANT:
            return None
        dtypes.append(value.dtype)
        value = value.op.inputs[0]
    if value.literal.size != 1 or value.dtype.kind == "c":
        return None
    scalar = value.literal.reshape(())
    for dtype in reversed(dtypes):
        if dtype.kind in "iu" and not _holds(dtype, float(scalar)):
            return None
        with np.errstate(all="ignore"):
            scalar = scalar.astype(dtype)
    return float(scalar)


_MOST_KNOWN = 2**22  # entries of an index worth evaluating while a function is traced


def known(value: Value) -> np.ndarray | None:
    """The entries of an array that depends on no input; None if it does, or is large."""
    order: dict[Op, None] = {}
    stack = [(value, False)]
    while stack:
        top, is_ready = stack.pop()
        if top.size > _MOST_KNOWN or (top.op is None and _given(top) is None):
            return None
        if top.op is None or top.op in order:
            continue
        if top.op.effectful:
            return None
        if is_ready:
            order[top.op] = None
        else:
            stack += [(top, True), *((source, False) for source in top.op.inputs)]
    return _evaluated(value, list(order))


def _evaluated(value: Value, ops: list[Op]) -> np.ndarray:
    env: dict[Value, Any] = {}
    # Not what the guards of the function are for.
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"), jax.debug_nans(False):
        for op in ops:
            inputs = [_given(v) if v.op is None else env[v] for v in op.inputs]
            env.update(zip(op.outputs, op.evaluate(*inputs), strict=True))
    return np.asarray(_given(value) if value.op is None else env[value])


def _given(value: Value) -> Any:
    """The array that an input of a program is known to be, if it is."""
    return value.concrete if value.literal is None else value.literal


def _holds(dtype: np.dtype, number: float) -> bool:
    """Whether an integer dtype holds a number, the fraction cut off."""
    return bool(np.iinfo(dtype).min <= number <= np.iinfo(dtype).max)
