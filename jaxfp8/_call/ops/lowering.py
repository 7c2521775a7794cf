"""Lowers a scaled dot to StableHLO: to the custom call, or to the reference without a kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from jaxfp8._call.gpu import asked, canonical, xla_products
from jaxfp8._call.library import ffi, support, targets
from jaxfp8._call.library.strictness import warn_once
from jaxfp8._call.reference import dot_reference
from jaxfp8._value import dtypes
from jaxfp8._value.spec import OperandSpec, ScaledDotSpec

# Paths with a use for sums, and "" for the best.
_READ_SUMS = ("", "sm90_gemm", "cublaslt_int8")
# K of a block of scales that tensor cores sum in 8 bits.
_BLOCK = 128


def why_not(spec: ScaledDotSpec, platform: str) -> str | None:
    """Says why `spec` would not run on a kernel of `platform` now, or None if it would.

    A program lowered for GPUs without a GPU here runs on an unknown machine; XLA refuses the call
    there if the library is missing.
    """
    platform = {"gpu": "cuda"}.get(platform, platform)
    reason = support.why_unsupported(spec, platform)
    if reason is not None or platform != "cuda":
        return reason or ffi.why_unavailable(platform)
    capability = targets.compute_capability()
    if capability is None:
        return None
    reason = support.why_too_old(capability)
    return reason if reason or targets.given() else ffi.why_unavailable(platform)


def lower(platform: str, ctx: Any, *operands: Any, spec: ScaledDotSpec, kernel: str) -> Any:
    """The lowering rule of `scaled_dot_p` for one platform."""
    reason = why_not(spec, platform)
    if reason is not None:
        text = (
            f"`jaxfp8.dot_general`: {spec.told()} has no kernel on {platform!r} because {reason}; "
            "plain XLA computes it and widens the 8-bit data; `python -m jaxfp8 doctor` says more"
        )
        warn_once(text, "leave `jaxfp8.strict()` to allow that", (platform, reason))
        return _lower_reference(ctx, *operands, spec=spec)
    if platform == "cuda":
        parameters = ctx.module_context.lowering_parameters
        known = None if parameters.for_export else ffi.compute_capability()
        if xla_products.takes(spec, kernel, known):
            return _lower_by_xla(ctx, *operands, spec=spec, kernel=kernel)
        return _lower_cuda(ctx, *operands, spec=spec, kernel=kernel, compute_capability=known)
    ffi.ensure_registered(platform)
    rule = jax.ffi.ffi_lowering(ffi.TARGET)
    return rule(ctx, *operands, **spec.attributes(), kernel=kernel)


def _call_cuda(
    *operands: jax.Array, spec: ScaledDotSpec, kernel: str, compute_capability: int | None
) -> list[jax.Array]:
    """The call in canonical form; its last result is scratch memory."""
    ffi.register_if_it_runs_here("cuda")
    if canonical.is_empty(spec):
        return list(dot_reference.scaled_dot(spec, *operands))
    if kernel in _READ_SUMS:
        spec, operands = _with_sums(spec, operands)
    form, arrays = in_canonical_form(*operands, spec=spec, kernel=kernel)
    scratch = asked.workspace_bytes(form.spec, kernel, compute_capability)
    results = [*result_types(form.spec), jax.ShapeDtypeStruct((scratch,), np.uint8)]
    call = jax.ffi.ffi_call(ffi.TARGET, results)
    *outputs, _ = call(*arrays, **form.spec.attributes(), kernel=kernel)
    return form.results(outputs)


def _with_sums(
    spec: ScaledDotSpec, operands: tuple[jax.Array, ...]
) -> tuple[ScaledDotSpec, tuple[jax.Array, ...]]:
    """The problem with the sums of lhs, if zero points of rhs need them and they are not given.

    lhs are activations as a rule, and XLA sums codes as it makes them; others it sums as fast as
    the library does. Those of rhs are left to the library: XLA would fold the sums of a constant
    while it compiles, and is slow along another axis than the last. uint8 has no sums here, since
    cuBLASLt shifts it.
    """
    lhs, rhs = spec.lhs, spec.rhs
    is_last = lhs.contracting == (len(lhs.shape) - 1,)
    integers = lhs.dtype == "int8" and dtypes.is_int8(rhs.dtype)
    varies = lhs.scale_varies or rhs.scale_varies
    if lhs.sums or not (rhs.zero_point and integers and is_last) or varies:
        return spec, operands
    named = dict(zip(spec.operand_names(), operands, strict=True))
    named["lhs_sums"] = jnp.sum(named["lhs"], lhs.contracting, np.int32, keepdims=True)
    spec = dataclasses.replace(spec, lhs=dataclasses.replace(lhs, sums=True))
    return spec, tuple(named[name] for name in spec.operand_names())


def in_canonical_form(
    *operands: jax.Array, spec: ScaledDotSpec, kernel: str = ""
) -> tuple[canonical.Canonical, list[jax.Array]]:
    """A problem without empty axes, and its operands, in canonical form for a GPU."""
    stored = _scales_as_stored(canonical.canonical(spec, kernel).spec, kernel)
    given = dict(zip(spec.operand_names(), operands, strict=True))
    wide = dot_reference.widened(spec, {n: x for n, x in given.items() if n not in stored})
    form = canonical.canonical(_stored_only(spec, stored), kernel)
    named = form.operands(given | wide)
    return form, [named[name] for name in form.spec.operand_names()]


def result_types(form: ScaledDotSpec) -> list[jax.ShapeDtypeStruct]:
    """Types of the output of a canonical problem, and of its amax."""
    epilogue = form.epilogue
    out = jax.ShapeDtypeStruct(form.out_shape, dtypes.storage(epilogue.out_dtype))
    amax = epilogue.amax
    return [out] if amax is None else [out, jax.ShapeDtypeStruct(amax, np.float32)]


def as_gpus_read_it(spec: ScaledDotSpec) -> ScaledDotSpec:
    """The canonical problem whose scales are widened before the call, where it does not read them.

    A path is asked for this one.
    """
    stored = _scales_as_stored(canonical.canonical(spec).spec, "")
    return canonical.canonical(_stored_only(spec, stored)).spec


def _scales_as_stored(form: ScaledDotSpec, kernel: str) -> tuple[str, ...]:
    """The scales read as stored and rounded by the call.

    A conversion before a call is a kernel of its own: 1.4 us, while a product of one row takes 10.
    `sm80_w8a16`, and `sm90_gemm` in its place, read scales of weights in any form; other paths read
    float32. Exponents of MX change within the 128 of K of a block; some paths fold them into the
    codes, exactly, and read them as stored.
    """
    sides = {"lhs_scale": form.lhs, "rhs_scale": form.rhs}
    exponents = tuple(name for name, side in sides.items() if side.scale_exponents)
    fine = any(_is_fine(sides[name]) for name in exponents)
    if fine and asked.reads_exponents(form, kernel):
        return exponents
    weights = asked.weights_of(form, kernel)
    return () if weights is None else (f"{weights}_scale",)


def _is_fine(side: OperandSpec) -> bool:
    return side.scale_varies and side.tiles[side.contracting[0]] < _BLOCK


def _stored_only(spec: ScaledDotSpec, names: tuple[str, ...]) -> ScaledDotSpec:
    """The problem after scales were widened and rounded, except the named ones."""
    lhs, rhs = (
        side
        if scale in names
        else dataclasses.replace(side, scale_rounded=False, scale_exponents=False)
        for side, scale in ((spec.lhs, "lhs_scale"), (spec.rhs, "rhs_scale"))
    )
    return dataclasses.replace(spec, lhs=lhs, rhs=rhs)


_lower_cuda = mlir.lower_fun(_call_cuda, multiple_results=True)
_lower_by_xla = mlir.lower_fun(xla_products.scaled_dot, multiple_results=True)


_lower_reference = mlir.lower_fun(
    lambda *operands, spec: dot_reference.scaled_dot(spec, *operands), multiple_results=True
)
