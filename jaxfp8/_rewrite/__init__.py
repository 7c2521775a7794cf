"""Captures the 8-bit dots of existing functions: facts about values, three passes, a report."""

from jaxfp8._call.library.targets import Target
from jaxfp8._rewrite.engine import explain, rewrite
from jaxfp8._rewrite.floats.quantize_dots import quantize_dots
from jaxfp8._rewrite.report.model import Operand, Site
from jaxfp8._rewrite.report.report import Report

__all__ = ["Operand", "Report", "Site", "Target", "explain", "quantize_dots", "rewrite"]
