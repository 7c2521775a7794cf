"""Captures existing functions: facts beside values, three passes, and a report."""

from jaxfp8._rewrite._engine import explain, rewrite
from jaxfp8._rewrite._quantize_dots import quantize_dots
from jaxfp8._rewrite._report import Operand, Report, Site
from jaxfp8._rewrite._report_text import show

__all__ = ["Operand", "Report", "Site", "explain", "quantize_dots", "rewrite", "show"]
