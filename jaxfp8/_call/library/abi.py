"""ctypes for ffi/include/jaxfp8/jaxfp8.h: the C functions called without XLA.

`tests/native/test_spec_fields.py` compares the fields below with those of the header.
"""

from __future__ import annotations

import ctypes
from typing import Any

from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec, Shape

_MESSAGE_BYTES = 1 << 14


class Dims(ctypes.Structure):
    """`jaxfp8_dims`."""

    _fields_ = (("rank", ctypes.c_size_t), ("values", ctypes.POINTER(ctypes.c_int64)))

    @classmethod
    def of(cls, shape: Shape | None) -> Dims:
        """Sizes or axes; none if the spec has none."""
        values = shape or ()
        return cls(len(values), (ctypes.c_int64 * len(values))(*values))


class Operand(ctypes.Structure):
    """`jaxfp8_operand_spec`."""

    _fields_ = (
        ("dtype", ctypes.c_char_p),
        ("shape", Dims),
        ("contracting", Dims),
        ("batch", Dims),
        ("tiles", Dims),
        ("scale", ctypes.c_int32),
        ("zero_point", ctypes.c_int32),
        ("sums", ctypes.c_int32),
        ("scale_exponents", ctypes.c_int32),
    )

    @classmethod
    def of(cls, spec: OperandSpec) -> Operand:
        """The twin of a side."""
        dims = (Dims.of(d) for d in (spec.shape, spec.contracting, spec.batch, spec.tiles))
        flags = (spec.scale, spec.zero_point, spec.sums, spec.scale_exponents)
        return cls(spec.dtype.encode(), *dims, *flags)


class Epilogue(ctypes.Structure):
    """`jaxfp8_epilogue_spec`."""

    _fields_ = (
        *((f"has_{name}", ctypes.c_int32) for name in ("residual", "bias", "out_scale", "amax")),
        *((name, Dims) for name in ("residual", "bias", "out_scale", "amax")),
        *((name, ctypes.c_char_p) for name in ("residual_dtype", "activation", "out_dtype")),
    )

    @classmethod
    def of(cls, spec: EpilogueSpec) -> Epilogue:
        """The twin of the epilogue."""
        planes = (spec.residual, spec.bias, spec.out_scale, spec.amax)
        names = (spec.residual_dtype, spec.activation, spec.out_dtype)
        given = (plane is not None for plane in planes)
        return cls(*given, *map(Dims.of, planes), *(name.encode() for name in names))


class Spec(ctypes.Structure):
    """`jaxfp8_scaled_dot_spec`."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("lhs", Operand),
        ("rhs", Operand),
        ("epilogue", Epilogue),
        ("precision", ctypes.c_char_p),
        ("kernel", ctypes.c_char_p),
    )

    @classmethod
    def of(cls, spec: ScaledDotSpec, kernel: str = "") -> Spec:
        """The twin of a problem."""
        sides = (Operand.of(spec.lhs), Operand.of(spec.rhs), Epilogue.of(spec.epilogue))
        return cls(ctypes.sizeof(cls), *sides, spec.precision.encode(), kernel.encode())


class Buffers(ctypes.Structure):
    """`jaxfp8_scaled_dot_buffers`."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("lhs", "rhs", "lhs_scale", "lhs_zero_point", "lhs_sums"),
                *("rhs_scale", "rhs_zero_point", "rhs_sums"),
                *("residual", "bias", "out_scale", "out", "amax", "workspace"),
            )
        ),
        ("workspace_bytes", ctypes.c_size_t),
    )

    @classmethod
    def of(cls, workspace_bytes: int = 0, **addresses: int) -> Buffers:
        """Addresses by name; null if absent."""
        return cls(struct_size=ctypes.sizeof(cls), workspace_bytes=workspace_bytes, **addresses)


# The functions by library: the types of their arguments before the message and its size.
_POINTERS = [ctypes.POINTER(Spec), ctypes.POINTER(Buffers)]
SIGNATURES: dict[str, dict[str, list[Any]]] = {
    "cpu": {
        "jaxfp8_cpu_scaled_dot": [*_POINTERS, ctypes.c_int],
        "jaxfp8_cpu_route": [_POINTERS[0]],
    },
    "cuda": {
        "jaxfp8_cuda_scaled_dot": [*_POINTERS, ctypes.c_void_p],
        "jaxfp8_cuda_prepare": [_POINTERS[0], ctypes.c_size_t],
        "jaxfp8_cuda_workspace": [
            _POINTERS[0],
            ctypes.c_int,
            ctypes.POINTER(ctypes.c_size_t),
        ],
        "jaxfp8_cuda_route": [_POINTERS[0], ctypes.c_int, ctypes.c_int],
    },
}


def call(library: ctypes.CDLL, name: str, *arguments: Any) -> tuple[int, str]:
    """Status and message of a function of `SIGNATURES`."""
    text = ctypes.create_string_buffer(_MESSAGE_BYTES)
    status = getattr(library, name)(*arguments, text, len(text))
    return status, text.value.decode()
