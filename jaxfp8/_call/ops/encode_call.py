"""Producing and encoding values as one primitive, `encode_produced_p`: one kernel on a GPU.

A norm, an activation and a factor, or a rounding to 16 bits, then codes for scales that are given,
in one layout or two, and an amax. `reference.EncodeSpec` defines it.
On other platforms it is computed as it is defined.

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
from jaxfp8._call.reference.encode_reference import EncodeSpec, encoded
from jaxfp8._call.reference.rows_reference import NormForm
from jaxfp8._value import compat
from jaxfp8._value.dtypes import is_float8
from jaxfp8._value.spec import Shape, is_known

# Of one call.
MOST_SCALES = 4
_CHUNK = 8  # values of 16 bytes
_FLOAT32 = np.dtype(np.float32)

encode_produced_p = Primitive("encode_produced")
encode_produced_p.multiple_results = True


def why_no_kernel(
    shape: Shape, row_dtype: np.dtype, dtype: np.dtype, transpose_from: int | None
) -> str | None:
    """Why no kernel produces and encodes values, or None if one does.

    Args:
      shape: of the values.
      row_dtype: theirs.
      dtype: of the codes.
      transpose_from: as in `EncodeSpec`.
    """
    if row_dtype not in (jnp.bfloat16, np.float16):
        return f"what is encoded has dtype {row_dtype}; the kernel takes bfloat16 and float16"
    if not is_float8(dtype):
        return f"the codes have dtype {dtype}; the kernel gives float8_e4m3fn and float8_e5m2"
    if not shape or not is_known(shape) or math.prod(shape) == 0:
        return "it has no rows"
    columns = _matrix(shape, transpose_from)[1]
    if columns % _CHUNK:
        return f"rows of {columns} values; the kernel takes multiples of {_CHUNK}"
    return None


def _matrix(shape: Shape, transpose_from: int | None) -> Shape:
    """The rows and columns of an array; the transposed copy has its columns in front."""
    first = len(shape) - 1 if transpose_from is None else transpose_from
    return math.prod(shape[:first]), math.prod(shape[first:])


def encode_produced(x: jax.Array, *others: jax.Array, spec: EncodeSpec) -> list[jax.Array]:
    """Codes for each scale and the amax; the operands and results are those of `EncodeSpec`."""
    operands = compat.vary_alike((x, *others))
    return encode_produced_p.bind(*operands, spec=spec, split=is_wanted(operands))


run_compiled(encode_produced_p)


# Abstract evaluation


@encode_produced_p.def_abstract_eval
def _abstract_eval(
    *avals: jax.core.ShapedArray, spec: EncodeSpec, split: bool
) -> list[jax.core.ShapedArray]:
    del split
    shapes, dtypes = _results(avals[0].shape, spec)
    return explicit.output_avals(avals, shapes, dtypes, functools.partial(_parts, spec=spec))


def _results(shape: Shape, spec: EncodeSpec) -> tuple[list[Shape], list[np.dtype]]:
    layouts = _layouts(shape, spec)
    shapes = [*layouts * spec.scales, (1,) * len(shape)]
    return shapes, [*[spec.dtype] * (len(shapes) - 1), _FLOAT32]


def _layouts(axes: tuple[Any, ...], spec: EncodeSpec) -> list[tuple[Any, ...]]:
    first = spec.transpose_from
    return [axes] if first is None else [axes, axes[first:] + axes[:first]]


# Batching: each array of a batch has an amax of its own, and a scale maybe. No kernel does that.


def _batch(
    operands: tuple[jax.Array, ...], axes: tuple[int | None, ...], *, spec: EncodeSpec, split: bool
) -> tuple[list[jax.Array], list[int]]:
    del split  # XLA splits the definition as it likes
    results = jax.vmap(functools.partial(encoded, spec=spec), axes)(*operands)
    return results, [0] * len(results)


# Differentiation: there is none, as of `encode` in `_call/ops/quantize_call`.


def _jvp(
    primals: tuple[jax.Array, ...], tangents: tuple[Any, ...], *, spec: EncodeSpec, split: bool
) -> tuple[list[jax.Array], list[Any]]:
    del tangents
    results = encode_produced_p.bind(*primals, spec=spec, split=split)
    return results, [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]


# Splitting over a mesh: everything but the amax belongs to one element.


def _parts(
    avals: Sequence[Any], *, spec: EncodeSpec, split: bool = False, out_sharding: Any = None
) -> Parts:
    """The factors of the call, and the call on shards."""
    del out_sharding  # it has none
    shape = avals[0].shape
    names = tuple(f"a{axis}" for axis in range(len(shape)))
    of_rows, one = (*names[:-1], None), (None,) * len(shape)
    factors = Factors(
        operands=(
            *[names] * (1 + spec.has_factor),
            *[of_rows] * spec.of_rows,
            *[names[-1:]] * spec.vectors,
            *[one] * spec.scales,
        ),
        results=(*_layouts(names, spec) * spec.scales, one),
        pieces=dict(zip(names, shape, strict=True)),
    )

    def on_shards(shards: Shards) -> Any:
        mesh_axes = shards.axes(*names)

        def run(*operands: jax.Array) -> list[jax.Array]:
            *codes, amax = encode_produced_p.bind(*operands, spec=spec, split=split)
            return [*codes, jax.lax.pmax(amax, mesh_axes) if mesh_axes else amax]

        return run

    return factors, on_shards


# Lowering


def _on_gpu(x: jax.Array, *others: jax.Array, spec: EncodeSpec) -> list[jax.Array]:
    """The call of docs/custom_call.md."""
    unavailable = ffi.has_backend("cuda") and ffi.why_unavailable("cuda")
    shape, first = x.shape, spec.transpose_from
    if unavailable or why_no_kernel(shape, spec.row_dtype, spec.dtype, first):
        return encoded(x, *others, spec=spec)
    ffi.register_if_it_runs_here("cuda")
    rows, columns = _matrix(shape, first)
    flat = [x.reshape(rows, columns)]
    for i, y in enumerate(others):
        is_row = i < spec.of_rows
        is_scale = i >= len(others) - spec.scales
        size = (rows,) if is_row else (1,) if is_scale else (columns,)
        flat.append(y.reshape((rows, columns) if spec.has_factor and i == 0 else size))
    codes = [(rows, columns), (columns, rows)][: spec.layouts]
    outputs = [jax.ShapeDtypeStruct(one, spec.dtype) for one in codes * spec.scales]
    outputs.append(jax.ShapeDtypeStruct((1,), _FLOAT32))
    results = jax.ffi.ffi_call(ffi.ENCODE_TARGET, outputs)(*flat, **_attributes(spec))
    shapes, _ = _results(shape, spec)
    return [y.reshape(one) for y, one in zip(results, shapes, strict=True)]


def _attributes(spec: EncodeSpec) -> dict[str, Any]:
    norm = spec.norm or NormForm()
    return {
        "out_dtype": spec.dtype.name,
        "row_dtype": spec.row_dtype.name,
        "activation": spec.activation,
        "norm": spec.norm is not None,
        "factor": spec.has_factor,
        "gain": norm.has_gain,
        "shift": norm.has_shift,
        "centred": norm.centred,
        "rounded_first": norm.rounded_first,
        "rounded_second": norm.rounded_second,
        "transposed": spec.transpose_from is not None,
        "scales": np.int64(spec.scales),
    }


# Registration

ad.primitive_jvps[encode_produced_p] = _jvp
batching.primitive_batchers[encode_produced_p] = _batch
for _platform, _call in ((None, encoded), ("cuda", _on_gpu)):
    _rule = lowering(mlir.lower_fun(_call, multiple_results=True), _parts)
    mlir.register_lowering(encode_produced_p, explicit.lowering(_rule, _parts), platform=_platform)
