"""Facts with guards: if they hold when the program runs, it runs the call, else the function.

A zero point may be an int32 argument, of which a call takes 16 bits. Then the program runs a
`lax.cond` on whether all entries fit. One branch is the scaled dot. The other is the function as
written, from the 8-bit array on. Scales under a mask may have guards too (`rules/masks`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jax import lax

from jaxfp8._rewrite.ir.emit import Program
from jaxfp8._rewrite.ir.facts import Amax, Magnitude, Product
from jaxfp8._rewrite.ir.graph import Array, Op, Value
from jaxfp8._rewrite.plan import calls
from jaxfp8._rewrite.plan.calls import Call, Refusal
from jaxfp8._rewrite.plan.walk import Walk
from jaxfp8._value import compat

# Here devices wait for each other. Devices in different branches would wait for ever.
_MEETINGS = (
    *("all_gather", "all_gather_invariant", "ppermute", "pbroadcast", "all_to_all"),
    *("psum", "psum_invariant", "psum2", "pmax", "pmin", "psum_scatter", "reduce_scatter"),
)


def guarded(walk: Walk, call: Call) -> Call | Refusal:
    """The call behind the guards of its operands, or why there is none; as it is without guards."""
    sides = (call.product.dot.lhs, call.product.dot.rhs)
    every = [guard for s in sides if s.scaled for guard in s.scaled.guards]
    guards = list(dict.fromkeys(every))
    if not guards:
        return call
    fast_outputs = [call.value] + ([] if call.amax_value is None else [call.amax_value])
    slow_outputs = [call.product.value] + ([] if call.amax is None else [call.amax.value])
    stops = set(_dot(call.value).inputs)
    fast = _program(fast_outputs, lambda value: value in stops)
    slow = _program(slow_outputs, lambda value: not _belongs(walk, value))
    if any(op.name in _MEETINGS for program in (fast, slow) for op, _ in program.ops):
        return Refusal(
            "whether its zero point fits, or its scale is finite, is known on each device alone, "
            "and devices meet in it",
            "keep zero points in int8 or uint8, and put zeros over the 8-bit array",
        )
    inputs = tuple(dict.fromkeys((*guards, *fast.inputs, *slow.inputs)))
    op = Op("guarded", inputs, _choice(inputs, guards, fast, slow), {})
    op.outputs = tuple(Value(v.shape, v.dtype, op, i) for i, v in enumerate(slow_outputs))
    amax_value = op.outputs[1] if call.amax is not None else None
    return dataclasses.replace(call, value=op.outputs[0], amax_value=amax_value)


def _dot(value: Value) -> Op:
    """The op of the scaled or ragged dot that a value is a view of."""
    assert value.op is not None
    return value.op if value.op.name in calls.NAMES else _dot(value.op.inputs[0])


def _belongs(walk: Walk, value: Value) -> bool:
    """Whether a value is dequantized data, or computed from a product: the slow branch makes it."""
    if value.op is None or value.op.effectful:
        return False
    if value.op.eqn is None or compat.subjaxprs(value.op.eqn):
        return False
    is_product = isinstance(walk.fact(value), Product | Magnitude | Amax) or value in walk.curves
    return is_product or walk.dequantized(value) is not None


def _program(outputs: Sequence[Value], is_input: Callable[[Value], bool]) -> Program:
    """The program from the values that are inputs to the outputs."""
    ops: dict[Op, tuple[Value, ...]] = {}
    inputs: dict[Value, None] = {}

    def visit(value: Value) -> None:
        if value.literal is not None:
            return
        if value.op is None or is_input(value):
            inputs[value] = None
        elif value.op not in ops:
            for source in value.op.inputs:
                visit(source)
            ops[value.op] = value.op.inputs

    for value in outputs:
        visit(value)
    return Program(tuple(ops.items()), tuple(inputs), tuple(outputs))


def _choice(
    inputs: Sequence[Value], guards: Sequence[Value], fast: Program, slow: Program
) -> Callable[..., Sequence[Array]]:
    """Evaluates `fast` if all guards hold, else `slow`."""

    def branch(program: Program) -> Callable[..., list[Array]]:
        places = [inputs.index(value) for value in program.inputs]
        return lambda *arrays: program.run([arrays[i] for i in places])

    def run(*arrays: Array) -> Sequence[Array]:
        holds = arrays[inputs.index(guards[0])]
        for guard in guards[1:]:
            holds = holds & arrays[inputs.index(guard)]
        return lax.cond(holds, branch(fast), branch(slow), *arrays)

    return run
