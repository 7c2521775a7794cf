"""The custom calls: registered, exported, and how their plans are chosen.

`jaxfp8` registers the calls itself. docs/custom_call.md describes them.
"""

from __future__ import annotations

from jaxfp8._call.library.ffi import allow_timing, keep_plans, register_targets
from jaxfp8._export import export_checks

__all__ = ["allow_timing", "export_checks", "keep_plans", "register_targets"]
