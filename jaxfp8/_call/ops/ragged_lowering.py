"""Limits and call of the kernels for ragged dots.

Two 8-bit operands take `sm90_gemm`, on Hopper. 16-bit rows of 8-bit weights take `sm80_w8a16`, and
on Hopper, if they are many, `sm90_gemm`.

Order of this file: whether a kernel takes a problem, whether it runs here, the call.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._call.library import ffi, targets
from jaxfp8._call.ops.ragged_reference import RaggedSpec, group_ends
from jaxfp8._value import dtypes
from jaxfp8._value.spec import OperandSpec, Shape, is_known
from jaxfp8._value.tiles import repeated

_AMPERE, _HOPPER, _ITS_CODE = 80, 90, "90a"
# As in ffi/cuda/kernels/sm90_gemm: K of a step and the alignment of lines in bytes; the most
# products of int8, or of uint8, in an int32 sum, in multiples of 16 as K is padded; its smallest
# tile, and the most tiles it counts.
_STEP, _ALIGNMENT = 128, 16
_LONGEST_SUM = {
    name: (2**31 - 1) // largest**2 // _ALIGNMENT * _ALIGNMENT
    for name, largest in (("int8", 128), ("uint8", 255))
}
_TILE, _MOST = (64, 32), (2**31 - 1) // 2


def why_no_kernel(spec: RaggedSpec) -> str | None:
    """Why no kernel multiplies these groups on any GPU, or None if one does on Hopper."""
    if not is_known((*spec.lhs.shape, *spec.rhs.shape, spec.groups)):
        return "its sizes are not known when the program is lowered"
    if math.prod(spec.out_shape) * spec.groups * spec.lhs.depth == 0:
        return "there is nothing to multiply"
    reason = _why_not_weights(spec) if _has_weights(spec) else _why_not_eight_bits(spec)
    if reason is None and _counts(spec) > _MOST:
        return "the kernel counts rows and tiles in 32 bits, and there are more"
    return reason


def takes_eight_bits(spec: RaggedSpec) -> bool:
    """Whether both operands are 8-bit, and so take `sm90_gemm`."""
    return not _has_weights(spec)


def _has_weights(spec: RaggedSpec) -> bool:
    """Whether rows of a float type are multiplied by 8-bit weights."""
    return not dtypes.is_eight_bit(spec.lhs.dtype) and dtypes.is_eight_bit(spec.rhs.dtype)


def _why_not_weights(spec: RaggedSpec) -> str | None:
    """Why no kernel multiplies rows by 8-bit weights; the rules of `sm80_w8a16`."""
    rows, weights = spec.lhs, spec.rhs
    if spec.grouping == "contracted":
        return "groups along K need 8 bits on both sides"
    if rows.dtype not in ("bfloat16", "float16"):
        return f"rows beside 8-bit weights need 16 bits, and these are {rows.dtype}"
    if rows.zero_point or (rows.scale and rows.scale_varies):
        return "16-bit rows have no zero points, and one scale along K"
    tile = weights.tiles[weights.contracting[0]]
    if (weights.scale or weights.zero_point) and weights.scale_varies and tile % _STEP:
        return _cut_along_k(tile)
    return None


def _why_not_eight_bits(spec: RaggedSpec) -> str | None:
    sides = (spec.lhs, spec.rhs)
    names = [side.dtype for side in sides]
    if not (all(map(dtypes.is_float8, names)) or all(map(dtypes.is_int8, names))):
        pairs = "FP8 by FP8, integers by integers or 16-bit rows by 8-bit weights"
        return f"the kernels multiply {pairs}, not {' by '.join(names)}"
    if any(side.zero_point for side in sides):
        return "the kernel takes no zero points beside groups of 8-bit rows"
    return next(filter(None, map(_why_not_along_k, sides)), None)


def _counts(spec: RaggedSpec) -> int:
    """The kernel's largest counter, as in why_not.cc."""
    rows = spec.rows * (spec.groups if spec.grouping == "masked" else 1)
    down, across = -(-rows // _TILE[0]), -(-spec.columns // _TILE[1])
    contracted = spec.grouping == "contracted"
    down = (down + 1) * spec.groups if contracted else down + 2 * spec.groups
    return max(rows, spec.columns, _padded(spec.lhs.depth), down * (across + 1))


def _why_not_along_k(side: OperandSpec) -> str | None:
    tile, longest = side.tiles[side.contracting[0]], _LONGEST_SUM.get(side.dtype)
    if longest is not None and side.depth > longest:
        return f"the kernel sums up to {longest} products of {side.dtype}, not {side.depth}"
    if not (side.scale and side.scale_varies):
        return None
    if longest is not None:
        return "the kernel sums integers over all of K, along which scales change"
    return _cut_along_k(tile) if tile % _STEP else None


def _cut_along_k(tile: int) -> str:
    return f"scales have tiles of {tile} along K; the kernel takes multiples of {_STEP}"


def why_not(spec: RaggedSpec, platform: str) -> str | None:
    """Why no kernel computes a ragged dot on this machine's `platform`, or None."""
    if platform not in ("cuda", "gpu"):
        return f"there is no kernel for groups on {platform!r}"
    capability = targets.compute_capability()
    if capability is None:
        return "there is no GPU here, and no telling on which one it will run"
    weights = _has_weights(spec)
    if capability < _AMPERE or (capability != _HOPPER and not weights):
        major, minor = divmod(capability, 10)
        needs = "8.0 or later" if weights else "9.0"
        return f"the GPU has compute capability {major}.{minor}, and the kernel is for {needs}"
    reason = why_no_kernel(spec)
    if targets.given():
        return reason
    reason = reason or ffi.why_unavailable("cuda")
    if reason is None and not weights and _ITS_CODE not in ffi.cuda_architectures():
        return f"the library has no code for sm_{_ITS_CODE}"
    return reason


def call(*operands: jax.Array, spec: RaggedSpec) -> list[jax.Array]:
    """The call of docs/custom_call.md: lines of K, of whole 16 bytes, or weights as stored."""
    ffi.register_if_it_runs_here("cuda")
    named = dict(zip(spec.operand_names(), operands, strict=True))
    weights = _has_weights(spec)
    order = _stored_order(spec.rhs) if weights else _order(spec.rhs)
    arrays = [
        named["lhs"].transpose(_order(spec.lhs)) if weights else _lines(named["lhs"], spec.lhs),
        named["rhs"].transpose(order) if weights else _lines(named["rhs"], spec.rhs),
        _sizes(named["group_sizes"], spec),
    ]
    lhs_tiles, rhs_tiles = _tiles(spec.lhs), _tiles(spec.rhs)
    if spec.lhs.scale:
        scale, lhs_tiles = _lhs_scale(named["lhs_scale"], spec.lhs)
        arrays.append(scale)
    for name, dtype in (("rhs_scale", jnp.float32), ("rhs_zero_point", jnp.int32)):
        if name in named:
            arrays.append(_rhs_factor(named[name].astype(dtype), spec.rhs, order, spec.groups))
    arrays += [_plane(named[name], name, spec) for name in spec.plane_shapes]
    results = [jax.ShapeDtypeStruct(spec.out_shape, dtypes.storage(spec.out_dtype))]
    epilogue = spec.epilogue
    if epilogue.amax is not None:
        results.append(jax.ShapeDtypeStruct((1, 1), np.dtype(np.float32)))
    found = jax.ffi.ffi_call(ffi.RAGGED_TARGET, results)(
        *arrays,
        lhs_scale=spec.lhs.scale,
        rhs_scale=spec.rhs.scale,
        rhs_zero_point=spec.rhs.zero_point,
        rhs_mn_major=order[-1] in spec.rhs.free,
        lhs_tiles=np.asarray(lhs_tiles, np.int64),
        rhs_tiles=np.asarray(rhs_tiles, np.int64),
        residual=epilogue.residual is not None,
        bias=epilogue.bias is not None,
        out_scale=epilogue.out_scale is not None,
        amax=epilogue.amax is not None,
        activation=epilogue.activation,
        out_dtype=spec.out_dtype,
        precision=spec.precision,
        kernel="",
    )
    return [found[0], *(y.reshape(1, 1, 1) for y in found[1:])]


def _plane(x: jax.Array, name: str, spec: RaggedSpec) -> jax.Array:
    """An operand of the epilogue as a matrix: a bias by group, others by row of all groups."""
    if name != "residual":
        x = x.astype(jnp.float32)
    if name == "bias":
        return x[:, 0]
    if spec.grouping == "masked" and x.shape[:2] != (1, 1):
        x = jnp.broadcast_to(x, (*spec.row_shape, x.shape[2]))
    return x.reshape(-1, x.shape[2])


def _sizes(sizes: jax.Array, spec: RaggedSpec) -> jax.Array:
    """Sizes without the padding of K in any group: zero times a scale of NaN is NaN."""
    depth = spec.lhs.depth
    if spec.grouping != "contracted" or _padded(depth) == depth:
        return sizes
    return jnp.diff(group_ends(sizes, depth), prepend=0)


def _order(side: OperandSpec) -> Shape:
    return (*side.batch, *side.free, *side.contracting)


def _stored_order(side: OperandSpec) -> Shape:
    """Groups first, the other axes as they are stored."""
    return (*side.batch, *sorted((*side.free, *side.contracting)))


def _padded(depth: int) -> int:
    return -(-depth // _ALIGNMENT) * _ALIGNMENT


def _lines(x: jax.Array, side: OperandSpec) -> jax.Array:
    """Values with K last, and as many zeros there as fill 16 bytes."""
    x = x.transpose(_order(side))
    more = _padded(side.depth) - side.depth
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)]) if more else x


def _tiles(side: OperandSpec) -> Shape:
    """Sizes of a tile along the free axis and along K; a tile of all K includes the padding."""
    free, depth = side.tiles[side.free[0]], side.tiles[side.contracting[0]]
    return free, depth if side.scale_varies else max(depth, _padded(side.depth))


def _lhs_scale(scale: jax.Array, side: OperandSpec) -> tuple[jax.Array, Shape]:
    """Scales [rows, K] of the rows of all groups, and their tiles."""
    scale = scale.astype(jnp.float32).transpose(_order(side))
    tile, depth = _tiles(side)
    if not side.batch:
        return scale, (tile, depth)
    (batch,), (free,) = side.batch, side.free
    groups, rows = side.shape[batch], side.shape[free]
    if scale.shape[:2] == (1, 1):
        return scale[0], (groups * rows, depth)
    for axis, (size, own) in enumerate(((groups, side.tiles[batch]), (rows, tile))):
        if scale.shape[axis] != size:
            own = size if scale.shape[axis] == 1 else own
            scale = repeated(scale, axis, own, size)
    return scale.reshape(groups * rows, -1), (1, depth)


def _rhs_factor(factor: jax.Array, side: OperandSpec, order: Shape, groups: int) -> jax.Array:
    """Scales or zero points [G or 1, columns, K], or the last two in the order of the values."""
    if not side.batch:
        return factor.transpose(order)[None]
    (axis,) = side.batch
    if factor.shape[axis] not in (1, groups):
        factor = repeated(factor, axis, side.tiles[axis], groups)
    return factor.transpose(order)
