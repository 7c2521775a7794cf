"""The lowering rule of a call on any mesh: by types, by XLA, or on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend import core
from jax.interpreters import mlir

from jaxfp8._call import explicit
from jaxfp8._value import compat


def lowering(rule: Callable[..., Any], parts: Callable[..., explicit.Parts]) -> Callable[..., Any]:
    """The lowering rule of a primitive with a parameter `split`: a jaxpr of `partitioned`, or None.

    On explicit mesh axes the types decide how the call is split. On automatic ones XLA does, as
    the jaxpr says. On one device, and inside shard_map, the call is lowered as it is.

    Args:
      rule: lowers the call on one device, from its other parameters.
      parts: from the types of the operands and those other parameters, the factors of the call
        and the call on shards.
    """

    def lower(ctx: Any, *operands: Any, split: Any, out_sharding: Any = None, **params: Any) -> Any:
        del out_sharding  # the types of the results have it
        mesh = explicit.mesh_of((*ctx.avals_in, *ctx.avals_out))
        if mesh is not None:
            return explicit.lower_on_shards(mesh, parts(ctx.avals_in, **params), ctx, operands)
        if split is not None and compat.splits_calls(ctx):
            return mlir.lower_fun(core.jaxpr_as_fun(split), multiple_results=True)(ctx, *operands)
        return rule(ctx, *operands, **params)

    return lower
