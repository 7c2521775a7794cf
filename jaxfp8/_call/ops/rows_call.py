"""Producing and quantising rows as one primitive, `quantize_rows_p`: one kernel on a GPU.

A norm, or an activation and a factor, then an amax, a scale and codes for each row. `RowsSpec` of
`reference/rows_reference` says what that means. On other platforms it is computed as it is defined.

Order of this file: primitive, bind, abstract evaluation, batching, differentiation, splitting over
a mesh, lowering, registration.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxfp8._call.library import ffi
from jaxfp8._call.mesh import explicit
from jaxfp8._call.mesh.partitioning import is_wanted, lowering
from jaxfp8._call.mesh.shards import Factors, Parts, Shards
from jaxfp8._call.ops.eager import run_compiled
from jaxfp8._call.reference.rows_reference import Norm, RowsSpec, quantized_rows
from jaxfp8._value import compat
from jaxfp8._value.spec import Shape, is_known

# A block has 1024 threads, each with four times the 8 values of 16 bytes.
_CHUNK, _LONGEST_ROW = 8, 32768

quantize_rows_p = Primitive("quantize_rows")
quantize_rows_p.multiple_results = True


def why_no_kernel(shape: Shape, dtype: np.dtype) -> str | None:
    """Why no kernel produces and quantises rows of an array, or None if one does."""
    if dtype not in (jnp.bfloat16, np.float16):
        return f"what is quantised has dtype {dtype}, and the kernel takes bfloat16 and float16"
    if not shape or not is_known(shape) or math.prod(shape) == 0:
        return "it has no rows"
    if shape[-1] % _CHUNK or shape[-1] > _LONGEST_ROW:
        return f"rows of {shape[-1]} values; the kernel takes multiples of 8, up to {_LONGEST_ROW}"
    return None


def quantize_rows(x: jax.Array, *others: jax.Array, spec: RowsSpec) -> list[jax.Array]:
    """Codes, scales and amaxes of the rows that `spec` makes of `x`.

    Args:
      x: bfloat16 or float16, [..., K].
      *others: factor, or gain and shift, as `spec` has them.
      spec: what is computed.

    Returns:
      The codes [..., K]; in float32 the scale and the amax, [..., 1].
    """
    operands = compat.vary_alike((x, *others))
    return quantize_rows_p.bind(*operands, spec=spec, split=is_wanted(operands))


run_compiled(quantize_rows_p)


# Abstract evaluation


@quantize_rows_p.def_abstract_eval
def _abstract_eval(
    *avals: jax.core.ShapedArray, spec: RowsSpec, split: bool
) -> list[jax.core.ShapedArray]:
    del split
    shape = avals[0].shape
    float32, of_rows = np.dtype(np.float32), (*shape[:-1], 1)
    shapes, dtypes = [shape, of_rows, of_rows], [spec.dtype, float32, float32]
    return explicit.output_avals(avals, shapes, dtypes, functools.partial(_parts, spec=spec))


# Batching: more rows, unless each array of a batch has vectors of its own.


def _batch(
    operands: tuple[jax.Array, ...], axes: tuple[int | None, ...], *, spec: RowsSpec, split: bool
) -> tuple[list[jax.Array], list[int]]:
    del split  # `quantize_rows` makes that of the new arrays
    vectors = len(operands) - spec.vectors
    if any(axis is not None for axis in axes[vectors:]):
        results = jax.vmap(functools.partial(quantized_rows, spec=spec), axes)(*operands)
        return results, [0] * len(results)
    sizes = {x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None}
    front = [
        jnp.broadcast_to(x, (*sizes, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands[:vectors], axes, strict=False)
    ]
    results = quantize_rows(*front, *operands[vectors:], spec=spec)
    return results, [0] * len(results)


# Differentiation: the codes have no derivative, scale and amax that of their definition.


def _jvp(
    primals: tuple[jax.Array, ...], tangents: tuple[Any, ...], *, spec: RowsSpec, split: bool
) -> tuple[list[jax.Array], list[Any]]:
    results = quantize_rows_p.bind(*primals, spec=spec, split=split)
    filled = [ad.instantiate_zeros(tangent) for tangent in tangents]
    define = functools.partial(quantized_rows, spec=spec)
    d_rows = jax.jvp(lambda *xs: define(*xs)[1:], primals, tuple(filled))[1]
    return results, [ad.Zero(jax.typeof(results[0]).to_tangent_aval()), *d_rows]


# Splitting over a mesh: rows that are split are computed by definition, with maxima and means over
# devices.


def _parts(
    avals: Sequence[Any], *, spec: RowsSpec, split: bool = False, out_sharding: Any = None
) -> Parts:
    """The factors of the call, and the call on shards."""
    del out_sharding  # it has none
    leading = {f"a{axis}": size for axis, size in enumerate(avals[0].shape[:-1])}
    names, of_rows = (*leading, "k"), (*leading, None)
    factors = Factors(
        operands=(*[names] * (len(avals) - spec.vectors), *[("k",)] * spec.vectors),
        results=(names, of_rows, of_rows),
        pieces=leading | {"k": avals[0].shape[-1]},
        ragged=frozenset(leading),
    )

    def on_shards(shards: Shards) -> Any:
        if mesh_axes := shards.axes("k"):
            return functools.partial(quantized_rows, spec=spec, mesh_axes=mesh_axes)
        return functools.partial(_on_one_device, spec=spec, split=split)

    return factors, on_shards


def _on_one_device(*operands: jax.Array, spec: RowsSpec, split: bool) -> list[jax.Array]:
    return quantize_rows_p.bind(*operands, spec=spec, split=split)


# Lowering


def _on_gpu(x: jax.Array, *others: jax.Array, spec: RowsSpec) -> list[jax.Array]:
    """The call of docs/custom_call.md."""
    unavailable = ffi.has_backend("cuda") and ffi.why_unavailable("cuda")
    if unavailable or why_no_kernel(x.shape, x.dtype):
        return quantized_rows(x, *others, spec=spec)
    ffi.register_if_it_runs_here("cuda")
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    flat = [y if y.ndim == 1 else y.reshape(rows, columns) for y in others]
    of_rows = jax.ShapeDtypeStruct((rows,), np.float32)
    outputs = [jax.ShapeDtypeStruct((rows, columns), spec.dtype), of_rows, of_rows]
    codes, *values = jax.ffi.ffi_call(ffi.ROWS_TARGET, outputs)(
        x.reshape(rows, columns), *flat, **_attributes(spec)
    )
    return [codes.reshape(x.shape), *(v.reshape(*x.shape[:-1], 1) for v in values)]


def _attributes(spec: RowsSpec) -> dict[str, Any]:
    norm, scale = spec.norm or Norm(epsilon=0.0), spec.scale
    return {
        "out_dtype": spec.dtype.name,
        "activation": spec.activation,
        "norm": spec.norm is not None,
        "factor": spec.has_factor,
        "gain": norm.has_gain,
        "shift": norm.has_shift,
        "centred": norm.centred,
        "rounded_first": norm.rounded_first,
        "rounded_second": norm.rounded_second,
        "epsilon": np.float32(norm.epsilon),
        "amax_floor": np.float32(scale.amax_floor),
        "scale_floor": np.float32(scale.scale_floor),
        "of_zeros": np.float32(scale.of_zeros),
        "of_nan": np.float32(scale.of_nan),
    }


# Registration

ad.primitive_jvps[quantize_rows_p] = _jvp
batching.primitive_batchers[quantize_rows_p] = _batch
for _platform, _call in ((None, quantized_rows), ("cuda", _on_gpu)):
    _rule = lowering(mlir.lower_fun(_call, multiple_results=True), _parts)
    mlir.register_lowering(quantize_rows_p, explicit.lowering(_rule, _parts), platform=_platform)
