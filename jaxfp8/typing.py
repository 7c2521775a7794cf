"""The types of results, for annotations. Functions of this package make them; programs do not."""

from __future__ import annotations

from jaxfp8._recipes.accuracy_report import AccuracyReport
from jaxfp8._recipes.scaling import Scaling
from jaxfp8._rewrite import Report, Site
from jaxfp8._rewrite.floats.quantize_dots import QuantizedDots
from jaxfp8._value.accuracy import Comparison
from jaxfp8._value.changes import Change, Changes
from jaxfp8.checkpoint._inspect import CheckpointSummary, StoredTensor
from jaxfp8.checkpoint._load import Checkpoint

__all__ = [
    "AccuracyReport",
    "Change",
    "Changes",
    "Checkpoint",
    "CheckpointSummary",
    "Comparison",
    "QuantizedDots",
    "Report",
    "Scaling",
    "Site",
    "StoredTensor",
]
