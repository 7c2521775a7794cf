"""Checkpoints in 8 bits: load them, save them, make them from floats, and inspect them.

Weights go from the disk to the devices in their 8 bits; docs/checkpoint.md is the guide.
"""

from jaxfp8._recipes.placing import torch_name
from jaxfp8.checkpoint._convert import convert
from jaxfp8.checkpoint._errors import CheckpointError
from jaxfp8.checkpoint._load import inspect, load, open
from jaxfp8.checkpoint._quantize import quantize
from jaxfp8.checkpoint._save import save

__all__ = [
    "CheckpointError",
    "convert",
    "inspect",
    "load",
    "open",
    "quantize",
    "save",
    "torch_name",
]
