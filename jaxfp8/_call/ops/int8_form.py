"""A scaled dot computed in int8: its operands rounded, by themselves or in one call on a GPU.

`_ops/int8_compute` defines the product. It is composed of two operations `quantize` and a scaled
dot of int8. With few rows `sm80_imma` computes it in one call, from FP8
weights and from activations of int8 or 16 bits. Other activations are rounded first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jaxfp8._call.gpu import canonical
from jaxfp8._call.library import ffi
from jaxfp8._call.ops.quantize_call import quantize_tiles
from jaxfp8._call.reference import dot_reference
from jaxfp8._value import dtypes
from jaxfp8._value.spec import OperandSpec, ScaledDotSpec, Shape, is_known
from jaxfp8._value.tiles import map_tiles

# In place of a kernel's name, as in ffi/cuda/route.h; and the path behind it.
IN_INT8 = "int8"
PATH = "sm80_imma"
BOTH = ("lhs", "rhs")


def is_rounded(side: OperandSpec) -> bool:
    """Whether a product in int8 rounds an operand: integers stay as they are."""
    return not dtypes.is_int8(side.dtype)


def narrowed(spec: ScaledDotSpec, names: Sequence[str] = BOTH) -> ScaledDotSpec:
    """The problem with some operands in int8; by default both."""
    lhs, rhs = (
        _in_int8(side) if name in names else side
        for name, side in (("lhs", spec.lhs), ("rhs", spec.rhs))
    )
    return dataclasses.replace(spec, lhs=lhs, rhs=rhs)


def requantized(
    spec: ScaledDotSpec, named: dict[str, jax.Array], names: Sequence[str] = BOTH
) -> dict[str, jax.Array]:
    """The operands of `narrowed(spec, names)`, from those of `spec`."""
    wide = dot_reference.widened(spec, {n: x for n, x in named.items() if n.endswith("_scale")})
    made = dict(named)
    for name in names:
        side: OperandSpec = getattr(spec, name)
        if is_rounded(side):
            scale = wide.get(f"{name}_scale")
            made[name], made[f"{name}_scale"] = _side_in_int8(side, named[name], scale)
    return made


def rounded(x: jax.Array, contracting: Shape) -> tuple[jax.Array, jax.Array]:
    """An array of floats, FP8 among them, in int8, and the scale of each line."""
    if not x.size:
        counts = (min(n, 1) if axis in contracting else n for axis, n in enumerate(x.shape))
        return jnp.zeros(x.shape, jnp.int8), jnp.ones(tuple(counts), jnp.float32)
    tiles = (size if axis in contracting else 1 for axis, size in enumerate(x.shape))
    return quantize_tiles(x, np.dtype(np.int8), tuple(tiles))


def _side_in_int8(
    side: OperandSpec, x: jax.Array, scale: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The int8 codes of an operand and the scale of each line."""
    if dtypes.is_float8(side.dtype) and x.dtype == np.uint8:
        x = jax.lax.bitcast_convert_type(x, side.dtype)
    if scale is not None and side.scale_varies:
        wide = x.astype(jnp.bfloat16) if dtypes.is_float8(side.dtype) else x
        x = map_tiles(lambda v, s: v.astype(jnp.float32) * s, wide, [scale], side.tiles)
        scale = None
    codes, of_line = rounded(x, side.contracting)
    if scale is None:
        return codes, of_line
    tiles = (1 if axis in side.contracting else tile for axis, tile in enumerate(side.tiles))
    return codes, map_tiles(jnp.multiply, of_line, [scale], tuple(tiles))


def _in_int8(side: OperandSpec) -> OperandSpec:
    if not is_rounded(side):
        return side
    tiles = (max(n, 1) if a in side.contracting else 1 for a, n in enumerate(side.shape))
    return dataclasses.replace(
        side,
        dtype="int8",
        tiles=tuple(tiles),
        scale=True,
        scale_rounded=False,
        scale_exponents=False,
    )


def rounded_first(spec: ScaledDotSpec, compute_capability: int | None) -> tuple[str, ...]:
    """The operands to be rounded before the call; both if no call takes FP8.

    `compute_capability` is 10 * major + minor of the GPU; None if unknown.
    """
    known = is_known(spec.lhs.shape) and is_known(spec.rhs.shape)
    if compute_capability is None or not known or canonical.is_empty(spec):
        return BOTH
    for weights, values in (BOTH[::-1], BOTH):
        if not dtypes.is_float8(getattr(spec, weights).dtype):
            continue
        for names in ((), (values,)):
            if why_not_one_call(narrowed(spec, names), compute_capability) is None:
                return names
    return BOTH


def why_not_one_call(spec: ScaledDotSpec, compute_capability: int) -> str | None:
    """Why `sm80_imma` does not take a problem without empty axes; None if it does."""
    form = canonical.canonical(spec, IN_INT8).spec
    paths = ffi.cuda_paths(form, compute_capability, cublaslt_version=0, kernel=IN_INT8)
    return paths if isinstance(paths, str) else paths[PATH] or None


def in_one_call(spec: ScaledDotSpec, operands: Sequence[Any] = ()) -> bool:
    """Whether the GPU at hand computes the product in one call, as far as tracing can tell.

    Not on a mesh with automatic or explicit axes: a line may be cut there.
    """
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in operands)]
    kinds = {kind for mesh in meshes for kind in mesh.axis_types}
    return kinds <= {AxisType.Manual} and rounded_first(spec, ffi.compute_capability()) != BOTH
