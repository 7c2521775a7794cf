"""8-bit matrix products in JAX: a dequantise-matmul pattern becomes one call on the 8-bit data.

See `README.md` for a tour and `docs/design.md` for the map. Importing this package starts no
backend and changes no configuration. `jaxfp8.checkpoint`, `jaxfp8.linen`, `jaxfp8.nnx` and
`jaxfp8.testing` are imported when they are first used, and Flax with the layers.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxfp8._call.library.ffi import register_ffi_targets
from jaxfp8._call.library.strictness import strict
from jaxfp8._call.mesh.partitioning import unpartitioned
from jaxfp8._export import export_checks
from jaxfp8._ops.products import dot_general, einsum, matmul
from jaxfp8._ops.quantize import dequantize, fake_quantize, quantize
from jaxfp8._ops.ragged import ragged_dot
from jaxfp8._ops.solve import Solution, solve
from jaxfp8._ops.terms import split_dot
from jaxfp8._recipes.quantization import Quantization
from jaxfp8._recipes.recipe_dot import recipe_dot_general
from jaxfp8._recipes.recipes import (
    FP8_AS_INT8,
    FP8_BLOCK,
    FP8_DYNAMIC,
    FP8_STATIC,
    FP8_W8A16,
    INT8_ASYMMETRIC,
    INT8_DYNAMIC,
    INT8_SPLIT,
    INT8_W8A16,
    CurrentScaling,
    DelayedScaling,
    Recipe,
)
from jaxfp8._recipes.rules import Rule
from jaxfp8._recipes.scaling import Scaling, ScalingState
from jaxfp8._recipes.training import fp8_dot_general
from jaxfp8._rewrite import Report, explain, quantize_dots, rewrite
from jaxfp8._value.errors import FallbackWarning, LibraryError, UnsupportedError
from jaxfp8._value.joining import concatenate, stack
from jaxfp8._value.prepared import PreparedArray, prepare
from jaxfp8._value.qarray import QArray
from jaxfp8._value.transposed import TransposedArray
from jaxfp8._value.version import __version__ as __version__

if TYPE_CHECKING:
    from jaxfp8 import checkpoint as checkpoint
    from jaxfp8 import linen as linen
    from jaxfp8 import nnx as nnx
    from jaxfp8 import testing as testing

_ON_DEMAND = ("checkpoint", "linen", "nnx", "testing")


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_DEMAND})


__all__ = [
    "FP8_AS_INT8",
    "FP8_BLOCK",
    "FP8_DYNAMIC",
    "FP8_STATIC",
    "FP8_W8A16",
    "INT8_ASYMMETRIC",
    "INT8_DYNAMIC",
    "INT8_SPLIT",
    "INT8_W8A16",
    "CurrentScaling",
    "DelayedScaling",
    "FallbackWarning",
    "LibraryError",
    "PreparedArray",
    "QArray",
    "Quantization",
    "Recipe",
    "Report",
    "Rule",
    "Scaling",
    "ScalingState",
    "Solution",
    "TransposedArray",
    "UnsupportedError",
    "concatenate",
    "dequantize",
    "dot_general",
    "einsum",
    "explain",
    "export_checks",
    "fake_quantize",
    "fp8_dot_general",
    "matmul",
    "prepare",
    "quantize",
    "quantize_dots",
    "ragged_dot",
    "recipe_dot_general",
    "register_ffi_targets",
    "rewrite",
    "solve",
    "split_dot",
    "stack",
    "strict",
    "unpartitioned",
]
