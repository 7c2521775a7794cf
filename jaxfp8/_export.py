"""Registers custom calls and pytrees of this package with `jax.export`."""

from __future__ import annotations

import json
from typing import Any

import jax.export

from jaxfp8._call.library import ffi
from jaxfp8._recipes.scaling import Scaling, ScalingState
from jaxfp8._value.prepared import PreparedArray
from jaxfp8._value.qarray import QArray
from jaxfp8._value.transposed import TransposedArray


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Allows `jax.export` to export the custom calls of this package.

    JAX exports only custom calls with a promise of stability, or with the caller's permission. A
    process has to `import jaxfp8`, this version or a later one, to run the exported program. On a
    GPU it needs the libraries for products, too.

    Returns:
      The argument `disabled_checks` of `jax.export.export`.

    Example:
      >>> import jax, jax.export, jax.numpy as jnp, jaxfp8
      >>> w = jaxfp8.quantize(jnp.eye(4))
      >>> export = jax.export.export(
      ...     jax.jit(jaxfp8.matmul), disabled_checks=jaxfp8.ffi.export_checks()
      ... )
      >>> exported = export(jnp.ones((2, 4)), w)
      >>> exported.call(jnp.ones((2, 4)), w).shape
      (2, 4)
    """
    targets = dict.fromkeys(target for calls in ffi.TARGETS.values() for target in calls)
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]


def _to_bytes(static: tuple[Any, ...]) -> bytes:
    """The static fields of a pytree: sizes of tiles, an axis."""
    return json.dumps(static, default=int).encode()


def _from_bytes(data: bytes) -> tuple[Any, ...]:
    return tuple(tuple(x) if isinstance(x, list) else x for x in json.loads(data))


def register() -> None:
    """Registers the pytrees of this package with `jax.export`, and its custom calls with XLA.

    The names are stored in files of users, so they may not change.
    """
    for kind in (QArray, TransposedArray, PreparedArray, Scaling, ScalingState):
        jax.export.register_pytree_node_serialization(
            kind,
            serialized_name=f"jaxfp8.{kind.__name__}",
            serialize_auxdata=_to_bytes,
            deserialize_auxdata=_from_bytes,
        )
    ffi.register_ahead()


register()
