"""`gathered_matmul`: an all-gather beside the products of the parts that are already here."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxfp8._ops.products import Operand, matmul
from jaxfp8._value import compat, dtypes
from jaxfp8._value.errors import message

_OPERATION = "jaxfp8.gathered_matmul"
_AXES = {"lhs": 0, "rhs": 1}  # the output axis of a gathered operand's own axis


def gathered_matmul(
    lhs: Operand,
    rhs: Operand,
    axis_name: str,
    *,
    gathered: Literal["lhs", "rhs"] = "lhs",
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    compute: str | None = None,
) -> jax.Array:
    """A product of matrices with one of them gathered over a mesh axis, inside `jax.shard_map`.

    With n devices, and parts l_i or r_i:

        gathered="lhs"   y = concatenate_i(l_i @ rhs)   [M / n, K] @ [K, N] -> [M, N]
        gathered="rhs"   y = concatenate_i(lhs @ r_i)   [M, K] @ [K, N / n] -> [M, N]

    Parts go round a ring. Each device multiplies the part that it has while the next one arrives,
    so XLA can send beside the product. 8-bit parts travel as codes with their scales, and each may
    have scales of its own. As many bytes are sent as by an all-gather.

    Args:
      lhs, rhs: matrices of this device, as for `jaxfp8.matmul`.
      axis_name: the manual mesh axis.
      gathered: the operand to gather: rows of "lhs" or columns of "rhs".
      precision, preferred_element_type, compute: as in `jaxfp8.matmul`.

    Returns:
      The product [M, N] of this device.

    Raises:
      ValueError: an operand is no matrix, or `gathered` is unknown.

    Source: S. Wang et al., "Overlap Communication with Dependent Computation via Decomposition in
    Large Deep Learning Models" (ASPLOS 2023).

    Example:
      >>> import functools, jax, jax.numpy as jnp, jaxfp8
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("m",), (AxisType.Auto,))  # (4,), say, on four devices
      >>> w = jaxfp8.quantize(jnp.ones((8, 4)), channelwise_axes=(1,))
      >>> f = functools.partial(jaxfp8.gathered_matmul, axis_name="m")
      >>> split = {"in_specs": (P("m"), P(None, "m")), "out_specs": P(None, "m")}
      >>> y = jax.jit(jax.shard_map(f, mesh=mesh, **split))(jnp.ones((2, 8)), w)
      >>> y.shape, float(y[0, 0])
      ((2, 4), 8.0)
    """
    sides: dict[str, Any] = {"lhs": lhs, "rhs": rhs}
    _check(sides, gathered)
    asked: dict[str, Any] = {
        "precision": precision,
        "preferred_element_type": preferred_element_type,
    }
    devices, here, axis = lax.axis_size(axis_name), lax.axis_index(axis_name), _AXES[gathered]
    y: Any = None
    for step in range(devices):
        own = dict(sides)
        if step + 1 < devices:
            sides[gathered] = _next(own[gathered], axis_name)
        part = matmul(own["lhs"], own["rhs"], compute=compute, **asked)
        if y is None:
            y = jnp.zeros_like(part, shape=_whole(part.shape, axis, devices))
        y, part = compat.vary_alike([y, part])
        place = (here - step) % devices * part.shape[axis]
        y = lax.dynamic_update_slice_in_dim(y, part, place, axis)
    return y


def _check(sides: dict[str, Any], gathered: str) -> None:
    if gathered not in _AXES:
        needs, remedy = "'lhs' or 'rhs' is needed", "name the operand that is split"
        raise ValueError(message(_OPERATION, "`gathered`", f"is {gathered!r}", needs, remedy))
    for name, side in sides.items():
        if len(jnp.shape(side)) != 2:
            got, needs = f"has shape {jnp.shape(side)}", "a matrix is needed"
            remedy = "reshape it, or gather with `jax.lax.all_gather`"
            raise ValueError(message(_OPERATION, f"`{name}`", got, needs, remedy))


def _whole(shape: tuple[int, ...], axis: int, devices: int) -> tuple[int, ...]:
    """The shape of all parts along an axis."""
    return tuple(size * devices if i == axis else size for i, size in enumerate(shape))


def _next(side: Any, axis_name: str) -> Any:
    """The part of the device before this one."""
    devices = lax.axis_size(axis_name)
    ring = [(i, (i + 1) % devices) for i in range(devices)]

    send = functools.partial(lax.ppermute, axis_name=axis_name, perm=ring)
    return jax.tree.map(functools.partial(dtypes.moved, send), side)
