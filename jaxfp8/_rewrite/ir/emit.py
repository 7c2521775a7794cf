"""The emit pass: evaluates outputs of a graph with JAX operations.

Ops with effects run first and in order, each after its inputs. Another op runs if an output needs
it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.graph import Array, Op, Value


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Ops in the order to run them, with their inputs and outputs."""

    # Each op once, with its inputs after replacements.
    ops: tuple[tuple[Op, tuple[Value, ...]], ...]
    inputs: tuple[Value, ...]  # the values of the arguments of a run, in order
    outputs: tuple[Value, ...]  # the values of the results of a run, in order

    def run(self, arrays: Sequence[Array], used: Sequence[int] | None = None) -> list[Array]:
        """Evaluate on arrays, one for each of `inputs`, or for those at the positions `used`."""
        given = self.inputs if used is None else [self.inputs[i] for i in used]
        env: dict[Value, Array] = dict(zip(given, arrays, strict=True))

        def read(value: Value) -> Array:
            return env[value] if value.literal is None else graph.array_of(value)

        for op, inputs in self.ops:
            results = op.evaluate(*map(read, inputs))
            env.update(zip(op.outputs, results, strict=True))
        return [read(value) for value in self.outputs]

    def used(self) -> set[Value]:
        """The inputs with a reader."""
        read = {value for _, inputs in self.ops for value in inputs} | set(self.outputs)
        return read & set(self.inputs)


def schedule(
    outputs: Sequence[Value],
    effects: Sequence[Op],
    replaced: Mapping[Value, Value],
    inputs: Sequence[Value],
) -> Program:
    """Order the ops needed by outputs and effects."""
    order: dict[Op, tuple[Value, ...]] = {}

    def source(value: Value) -> Value:
        while value in replaced:
            value = replaced[value]
        return value

    for root in effects:
        _visit(root, source, order)
    finals = tuple(source(value) for value in outputs)
    for value in finals:
        if value.op is not None:
            _visit(value.op, source, order)
    return Program(tuple(order.items()), tuple(inputs), finals)


def _visit(root: Op, source: Callable[[Value], Value], order: dict[Op, tuple[Value, ...]]) -> None:
    """Add `root` to `order`, after the producers of its inputs."""
    stack = [root]
    while stack:
        op = stack[-1]
        if op in order:
            stack.pop()
            continue
        inputs = tuple(source(value) for value in op.inputs)
        waiting = [v.op for v in inputs if v.op is not None and v.op not in order]
        if waiting:
            stack.extend(waiting)
        else:
            order[op] = inputs
            stack.pop()
