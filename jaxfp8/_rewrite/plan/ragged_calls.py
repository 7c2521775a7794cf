"""From a ragged product to a call: its spec, and the op that binds it in place of the dot."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxfp8._call.library import targets
from jaxfp8._call.ops import ragged_call
from jaxfp8._call.ops.ragged_reference import RaggedSpec
from jaxfp8._rewrite.ir import casts, graph
from jaxfp8._rewrite.ir.graph import Array, Op, Value
from jaxfp8._rewrite.ir.sites import DotSite
from jaxfp8._value import compat, dtypes
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, Shape

NAME = "ragged_dot"


def spec_of(
    site: DotSite, lhs: OperandSpec, rhs: OperandSpec, epilogue: EpilogueSpec
) -> RaggedSpec:
    """The problem, with the epilogue of the output at the rank of groups, rows and columns."""
    return RaggedSpec(
        lhs=lhs,
        rhs=rhs,
        groups=site.op.inputs[2].shape[0],
        epilogue=epilogue.map_shapes(_plane),
        precision=site.precision,
    )


def _plane(shape: Shape) -> Shape:
    return (1,) * (3 - len(shape)) + shape


def why_not(spec: RaggedSpec) -> str | None:
    """Why no call computes a problem, its epilogue inside, or None if one does.

    XLA computes an epilogue behind the call, too, but from float32 sums: it reads more than behind
    the product as written.
    """
    epilogue = spec.epilogue
    if spec.grouping == "contracted" and not spec.is_plain:
        return "groups along the contracted axis are sums alone"
    if epilogue.amax is not None and set(epilogue.amax) != {1}:
        return "groups have one amax in all"
    platform = targets.platform()
    return ragged_call.why_not(spec, platform) or ragged_call.why_behind(spec)


def op_of(spec: RaggedSpec, operands: dict[str, Value], dot: Op) -> Op:
    """The op that binds the ragged dot in place of `dot`, without its outputs."""
    planes = {
        name: graph.reshape(operands[name], shape) for name, shape in spec.plane_shapes.items()
    }
    sizes = casts.cast(dot.inputs[2], np.int32)
    named = {**operands, **planes, "group_sizes": sizes}
    names, sharding = tuple(named), compat.spec_of_output(dot.equation)
    sides = {"lhs": np.dtype(spec.lhs.dtype), "rhs": np.dtype(spec.rhs.dtype)}

    def run(*arrays: Array) -> list[Array]:
        with graph.context_of(dot.equation, dot.callers):
            given: dict[str, Any] = dict(zip(names, arrays, strict=True))
            for name, dtype in sides.items():
                if dtypes.is_float8(dtype) and given[name].dtype == np.uint8:
                    given[name] = jax.lax.bitcast_convert_type(given[name], dtype)
            return list(ragged_call.results_of(spec, given, sharding))

    return Op(NAME, tuple(named.values()), run, {"spec": spec})
