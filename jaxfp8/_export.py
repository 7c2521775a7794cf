"""Programs that leave the process: what `jax.export` has to know of this package."""

from __future__ import annotations

import json
from typing import Any

import jax.export

from jaxfp8._call import ffi
from jaxfp8._recipes.scaling import Scaling, ScalingState
from jaxfp8._value.prepared import PreparedArray
from jaxfp8._value.qarray import QArray


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The consent to the custom calls of this package, which `jax.export` asks for.

    JAX exports a custom call only if it knows that later releases will have it, or by consent. A
    process that runs the exported program needs `import jaxfp8`, of this version or a later one,
    and on a GPU the libraries that products need there.

    Returns:
      What to pass as `disabled_checks`.

    Example:
      >>> import jax, jax.export, jax.numpy as jnp, jaxfp8
      >>> w = jaxfp8.quantize(jnp.eye(4))
      >>> export = jax.export.export(jax.jit(jaxfp8.matmul), disabled_checks=jaxfp8.export_checks())
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
    """Has `jax.export` know the pytrees of this package, and XLA its custom calls.

    The names stand in the files of users.
    """
    for kind in (QArray, PreparedArray, Scaling, ScalingState):
        jax.export.register_pytree_node_serialization(
            kind,
            serialized_name=f"jaxfp8.{kind.__name__}",
            serialize_auxdata=_to_bytes,
            deserialize_auxdata=_from_bytes,
        )
    ffi.register_ahead()


register()
