"""One call in place of making values and quantizing them, on a GPU.

Values with another reader stay as written: they would be made twice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import numpy as np

from jaxfp8._call.ops.dot import scaled_dot_p
from jaxfp8._call.ops.produce_call import quantize_produced
from jaxfp8._call.reference.produce_reference import ProduceSpec
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.plan.body import Body, Replaced
from jaxfp8._rewrite.plan.row_programs import RowProgram
from jaxfp8._value.spec import Shape

# XLA does not fuse these with their readers.
_IN_MEMORY = ("dot_general", "ragged_dot_general", "conv_general_dilated", scaled_dot_p.name)


@dataclasses.dataclass(frozen=True, eq=False)
class Produced:
    """A call: it makes values and quantizes them.

    Attributes:
      row: how it makes them.
      replaced: for values of the function, its outputs.
      swallowed: the op behind the values. If anything else reads them the call is dropped. None
        for given values.
    """

    row: RowProgram
    replaced: Replaced
    swallowed: Op | None


def is_in_memory(value: Value) -> bool:
    """Whether a value is in memory anyway."""
    return value.op is None or value.op.name in _IN_MEMORY


def outputs_of(
    spec: ProduceSpec, inputs: Sequence[Value], types: Sequence[tuple[Shape, np.dtype]]
) -> tuple[Value, ...]:
    """The outputs of a call for `spec`, on these inputs."""
    run = functools.partial(quantize_produced, spec=spec)
    op = Op("quantize_produced", tuple(inputs), run, {})
    op.outputs = tuple(Value(*type_, op, i) for i, type_ in enumerate(types))
    return op.outputs


def unread(body: Body, replaced: Replaced, calls: Iterable[Produced]) -> list[Produced]:
    """The calls without another reader of their values. A dropped call may be such a reader."""
    kept = list(calls)
    while kept:
        ops = body.ops(with_calls(replaced, kept))
        read = [one for one in kept if one.swallowed in ops]
        if not read:
            break
        kept = [one for one in kept if one not in read]
    return kept


def with_calls(replaced: Replaced, calls: Iterable[Produced]) -> Replaced:
    """The replacements, and those by calls."""
    return {**{k: v for one in calls for k, v in one.replaced.items()}, **replaced}
