"""Flax linen: layers with 8-bit parameters, and FP8 training inside any layer of Flax.

`import jaxfp8` alone does not import Flax: this module does, when it is first used.
"""

from jaxfp8.linen._layers import Dense, DenseGeneral, Einsum, Embed
from jaxfp8.linen._load import load
from jaxfp8.linen._moe import GroupedDense, MoE
from jaxfp8.linen._partition import combine, partition
from jaxfp8.linen._quantize import prepare, quantize
from jaxfp8.linen._report import report
from jaxfp8.linen._serialization import register as _register
from jaxfp8.linen._training import (
    Fp8DirectDotGeneralOp,
    Fp8Einsum,
    Fp8RaggedDot,
    accumulate,
    shared_scaling,
    split_state,
)

_register()

__all__ = [
    "Dense",
    "DenseGeneral",
    "Einsum",
    "Embed",
    "Fp8DirectDotGeneralOp",
    "Fp8Einsum",
    "Fp8RaggedDot",
    "GroupedDense",
    "MoE",
    "accumulate",
    "combine",
    "load",
    "partition",
    "prepare",
    "quantize",
    "report",
    "shared_scaling",
    "split_state",
]
