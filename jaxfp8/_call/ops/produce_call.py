"""Producing and quantizing values as one primitive, `quantize_produced_p`: one kernel on a GPU.

A norm, an activation and a factor, or a rounding to 16 bits, then codes: for a scale that is found
for each row, or for scales that are given, in one layout or two. `reference.ProduceSpec` defines
it. On other platforms it is computed as it is defined.

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
from jaxfp8._call.reference.produce_reference import (
    Norm,
    NormForm,
    ProduceSpec,
    quantized_values,
)
from jaxfp8._value import compat
from jaxfp8._value.dtypes import is_float8
from jaxfp8._value.spec import Shape, is_known

# Of one call.
MOST_SCALES = 4
_CHUNK = 8  # values of 16 bytes
# With a scale for each row a block has 1024 threads, each with four times a chunk.
_LONGEST_ROW = 32768

quantize_produced_p = Primitive("quantize_produced")
quantize_produced_p.multiple_results = True


def why_no_rows_kernel(shape: Shape, dtype: np.dtype) -> str | None:
    """Why no kernel produces rows and finds a scale for each, or None if one does."""
    if dtype not in (jnp.bfloat16, np.float16):
        return f"what is quantized has dtype {dtype}, and the kernel takes bfloat16 and float16"
    if not _has_values(shape):
        return "it has no rows"
    if shape[-1] % _CHUNK or shape[-1] > _LONGEST_ROW:
        return f"rows of {shape[-1]} values; the kernel takes multiples of 8, up to {_LONGEST_ROW}"
    return None


def why_no_given_kernel(
    shape: Shape, row_dtype: np.dtype, dtype: np.dtype, transpose_from: int | None
) -> str | None:
    """Why no kernel produces values and encodes them for given scales, or None if one does."""
    if row_dtype not in (jnp.bfloat16, np.float16):
        return f"what is encoded has dtype {row_dtype}; the kernel takes bfloat16 and float16"
    if not is_float8(dtype):
        return f"the codes have dtype {dtype}; the kernel gives float8_e4m3fn and float8_e5m2"
    if not _has_values(shape):
        return "it has no rows"
    columns = _matrix(shape, transpose_from)[1]
    if columns % _CHUNK:
        return f"rows of {columns} values; the kernel takes multiples of {_CHUNK}"
    return None


def _has_values(shape: Shape) -> bool:
    return bool(shape) and is_known(shape) and math.prod(shape) > 0


def _matrix(shape: Shape, transpose_from: int | None) -> Shape:
    """The rows and columns of an array; the transposed copy has its columns in front."""
    first = len(shape) - 1 if transpose_from is None else transpose_from
    return math.prod(shape[:first]), math.prod(shape[first:])


def quantize_produced(x: jax.Array, *others: jax.Array, spec: ProduceSpec) -> list[jax.Array]:
    """Codes and amax of the values that `spec` makes of its operands; see `ProduceSpec`."""
    operands = compat.vary_alike((x, *others))
    return quantize_produced_p.bind(*operands, spec=spec, split=is_wanted(operands))


run_compiled(quantize_produced_p)


# Abstract evaluation


@quantize_produced_p.def_abstract_eval
def _abstract_eval(
    *avals: jax.core.ShapedArray, spec: ProduceSpec, split: bool
) -> list[jax.core.ShapedArray]:
    del split
    shapes = spec.results(avals[0].shape, 1)
    parts = functools.partial(_parts, spec=spec)
    return explicit.output_avals(avals, shapes, _dtypes(spec, len(shapes)), parts)


def _dtypes(spec: ProduceSpec, results: int) -> list[np.dtype]:
    in_float32 = 1 if spec.rule is None else 2
    return [spec.dtype] * (results - in_float32) + [np.dtype(np.float32)] * in_float32


# Batching: with a found scale more rows, unless each array of a batch has vectors of its own. With
# given ones each array has an amax of its own. No kernel does that.


def _batch(
    operands: tuple[jax.Array, ...], axes: tuple[int | None, ...], *, spec: ProduceSpec, split: bool
) -> tuple[list[jax.Array], list[int]]:
    del split  # `quantize_produced` makes that of the new arrays
    are_shared = spec.operands(False, False, True, True)
    pairs = list(zip(axes, are_shared, strict=True))
    if spec.rule is None or any(is_shared and axis is not None for axis, is_shared in pairs):
        results = jax.vmap(functools.partial(quantized_values, spec=spec), axes)(*operands)
        return results, [0] * len(results)
    (size,) = {x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None}
    front = [
        y if is_shared else compat.in_front(y, axis, size)
        for y, (axis, is_shared) in zip(operands, pairs, strict=True)
    ]
    results = quantize_produced(*front, spec=spec)
    return results, [0] * len(results)


# Differentiation: the codes have no derivative. A found scale and its amax have that of their
# definition. With given scales there is none, as of `encode` in `_call/ops/quantize_call`.


def _jvp(
    primals: tuple[jax.Array, ...], tangents: tuple[Any, ...], *, spec: ProduceSpec, split: bool
) -> tuple[list[jax.Array], list[Any]]:
    results = quantize_produced_p.bind(*primals, spec=spec, split=split)
    zeros = [*map(compat.zero_tangent, results)]
    if spec.rule is None:
        return results, zeros
    filled = [ad.instantiate_zeros(tangent) for tangent in tangents]
    define = functools.partial(quantized_values, spec=spec)
    d_rows = jax.jvp(lambda *xs: define(*xs)[1:], primals, tuple(filled))[1]
    return results, [zeros[0], *d_rows]


# Splitting over a mesh: rows that are split and find a scale are computed by definition, with
# maxima and means over devices. With given scales everything but the amax belongs to one element.


def _parts(
    avals: Sequence[Any], *, spec: ProduceSpec, split: bool = False, out_sharding: Any = None
) -> Parts:
    """The factors of the call, and the call on shards."""
    del out_sharding  # it has none
    shape = avals[0].shape
    names: tuple[str | None, ...] = tuple(f"a{axis}" for axis in range(len(shape)))
    of_row, one = (*names[:-1], None), (None,) * len(shape)
    factors = Factors(
        operands=tuple(spec.operands(names, of_row, names[-1:], one)),
        results=tuple(spec.results(names, None)),
        pieces={str(name): size for name, size in zip(names, shape, strict=True)},
        ragged=frozenset(map(str, names[:-1])) if spec.rule is not None else frozenset(),
    )
    run = functools.partial(quantize_produced_p.bind, spec=spec, split=split)

    def on_shards(shards: Shards) -> Any:
        if spec.rule is not None:
            mesh_axes = shards.axes(names[-1])
            by_definition = functools.partial(quantized_values, spec=spec, mesh_axes=mesh_axes)
            return by_definition if mesh_axes else run
        mesh_axes = shards.axes(*names)

        def with_amax_of_all(*operands: jax.Array) -> list[jax.Array]:
            *codes, amax = run(*operands)
            return [*codes, jax.lax.pmax(amax, mesh_axes) if mesh_axes else amax]

        return with_amax_of_all

    return factors, on_shards


# Lowering


def _on_gpu(x: jax.Array, *others: jax.Array, spec: ProduceSpec) -> list[jax.Array]:
    """The calls of docs/custom_call.md."""
    unavailable = ffi.has_backend("cuda") and ffi.why_unavailable("cuda")
    if unavailable or _why_no_kernel(x, spec):
        return quantized_values(x, *others, spec=spec)
    ffi.register_if_it_runs_here("cuda")
    rows, columns = _matrix(x.shape, spec.transpose_from)
    flat_shapes = spec.operands((rows, columns), (rows,), (columns,), (1,))
    flat = [y.reshape(size) for y, size in zip((x, *others), flat_shapes, strict=True)]
    shapes = spec.results(x.shape, 1)
    outputs = [
        jax.ShapeDtypeStruct(size, dtype)
        for size, dtype in zip(
            _flat_results(rows, columns, spec), _dtypes(spec, len(shapes)), strict=True
        )
    ]
    target = ffi.ENCODE_TARGET if spec.rule is None else ffi.ROWS_TARGET
    results = jax.ffi.ffi_call(target, outputs)(*flat, **_attributes(spec))
    return [y.reshape(shape) for y, shape in zip(results, shapes, strict=True)]


def _why_no_kernel(x: jax.Array, spec: ProduceSpec) -> str | None:
    if spec.rule is not None:
        return why_no_rows_kernel(x.shape, x.dtype)
    row_dtype = x.dtype if spec.row_dtype is None else spec.row_dtype
    return why_no_given_kernel(x.shape, row_dtype, spec.dtype, spec.transpose_from)


def _flat_results(rows: int, columns: int, spec: ProduceSpec) -> list[Shape]:
    if spec.rule is not None:
        return [(rows, columns), (rows,), (rows,)]
    codes: list[Shape] = [(rows, columns), (columns, rows)]
    return [*codes[: 1 if spec.transpose_from is None else 2] * spec.scales, (1,)]


def _attributes(spec: ProduceSpec) -> dict[str, Any]:
    norm = spec.norm or NormForm()
    made = {
        "out_dtype": spec.dtype.name,
        "activation": spec.activation,
        "norm": spec.norm is not None,
        "factor": spec.has_factor,
        "gain": norm.has_gain,
        "shift": norm.has_shift,
        "centred": norm.centred,
        "rounded_first": norm.rounded_first,
        "rounded_second": norm.rounded_second,
    }
    if (rule := spec.rule) is None:
        assert spec.row_dtype is not None
        return made | {
            "row_dtype": spec.row_dtype.name,
            "transposed": spec.transpose_from is not None,
            "scales": np.int64(spec.scales),
        }
    return made | {
        "epsilon": np.float32(norm.epsilon if isinstance(norm, Norm) else 0.0),
        "amax_floor": np.float32(rule.amax_floor),
        "scale_floor": np.float32(rule.scale_floor),
        "of_zeros": np.float32(rule.of_zeros),
        "of_nan": np.float32(rule.of_nan),
    }


# Registration

ad.primitive_jvps[quantize_produced_p] = _jvp
batching.primitive_batchers[quantize_produced_p] = _batch
for _platform, _call in ((None, quantized_values), ("cuda", _on_gpu)):
    _rule = explicit.lowering(
        lowering(mlir.lower_fun(_call, multiple_results=True), _parts), _parts
    )
    mlir.register_lowering(quantize_produced_p, _rule, platform=_platform)
