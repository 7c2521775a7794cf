"""Programs with a dot on 8-bit data, as people write them, and how many calls each becomes."""

from rewrite.programs import dequantizing, epilogues, structure, views
from rewrite.programs.table import Program, weight

PROGRAMS: list[Program] = [
    *dequantizing.TABLE,
    *views.TABLE,
    *epilogues.TABLE,
    *structure.TABLE,
]

__all__ = ["PROGRAMS", "Program", "weight"]
