"""Flax nnx: layers with 8-bit parameters, whole models in place, FP8 training, accuracy reports.

`import jaxfp8` alone does not import Flax: this module does, when it is first used.
"""

from jaxfp8.nnx._base import EightBitLayer
from jaxfp8.nnx._encoded import encoded_weights
from jaxfp8.nnx._grouped import GroupedLinear
from jaxfp8.nnx._layers import (
    Einsum,
    Embed,
    Linear,
    LinearGeneral,
    LoRALinear,
    QGroupedLinear,
)
from jaxfp8.nnx._load import load
from jaxfp8.nnx._moe import MoE
from jaxfp8.nnx._prepare import prepare, unprepare
from jaxfp8.nnx._products import Fp8DotGeneral, Fp8Einsum, Fp8RaggedDot
from jaxfp8.nnx._quantize import dequantize, quantize
from jaxfp8.nnx._report import report
from jaxfp8.nnx._training import fp8_training
from jaxfp8.nnx._variables import QParam

__all__ = [
    "EightBitLayer",
    "Einsum",
    "Embed",
    "Fp8DotGeneral",
    "Fp8Einsum",
    "Fp8RaggedDot",
    "GroupedLinear",
    "Linear",
    "LinearGeneral",
    "LoRALinear",
    "MoE",
    "QGroupedLinear",
    "QParam",
    "dequantize",
    "encoded_weights",
    "fp8_training",
    "load",
    "prepare",
    "quantize",
    "report",
    "unprepare",
]
