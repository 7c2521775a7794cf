"""8-bit matrix products in JAX: a dequantize-matmul pattern becomes one call on the 8-bit data.

See `README.md` for a tour and `docs/design.md` for the map. Importing this package starts no
backend and changes no configuration. `jaxfp8.checkpoint`, `ffi`, `linen`, `nnx`, `testing` and
`typing` are imported when they are first used, and Flax with the layers. docs/api_stability.md
lists the public names.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxfp8 import _export as _export  # registers pytrees with jax.export
from jaxfp8._call.library.strictness import strict
from jaxfp8._call.mesh.sums import sums_over_devices
from jaxfp8._ops.products import dot_general, einsum, matmul
from jaxfp8._ops.quantize import dequantize, fake_quantize, quantize
from jaxfp8._ops.ragged import ragged_dot
from jaxfp8._ops.ring import gathered_matmul
from jaxfp8._ops.terms import split_dot
from jaxfp8._recipes.handed_codes import with_codes
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
from jaxfp8._recipes.saved_codes import codes_saveable
from jaxfp8._recipes.scaling import ScalingState
from jaxfp8._recipes.training import fp8_dot_general
from jaxfp8._recipes.training_ragged import fp8_ragged_dot
from jaxfp8._recipes.weight_codes import WeightCodes, encode_weight
from jaxfp8._rewrite import Target, explain, quantize_dots, rewrite
from jaxfp8._value.errors import FallbackWarning, LibraryError, UnsupportedError
from jaxfp8._value.joining import concatenate, stack
from jaxfp8._value.prepared import PreparedArray, prepare
from jaxfp8._value.qarray import QArray
from jaxfp8._value.transposed import TransposedArray
from jaxfp8._value.version import __version__ as __version__

if TYPE_CHECKING:
    from jaxfp8 import checkpoint as checkpoint
    from jaxfp8 import ffi as ffi
    from jaxfp8 import linen as linen
    from jaxfp8 import nnx as nnx
    from jaxfp8 import testing as testing
    from jaxfp8 import typing as typing

_ON_DEMAND = ("checkpoint", "ffi", "linen", "nnx", "testing", "typing")


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
    "Rule",
    "ScalingState",
    "Target",
    "TransposedArray",
    "UnsupportedError",
    "WeightCodes",
    "codes_saveable",
    "concatenate",
    "dequantize",
    "dot_general",
    "einsum",
    "encode_weight",
    "explain",
    "fake_quantize",
    "fp8_dot_general",
    "fp8_ragged_dot",
    "gathered_matmul",
    "matmul",
    "prepare",
    "quantize",
    "quantize_dots",
    "ragged_dot",
    "recipe_dot_general",
    "rewrite",
    "split_dot",
    "stack",
    "strict",
    "sums_over_devices",
    "with_codes",
]
