"""The results as JSON; docs/precision.md lists the fields."""

from __future__ import annotations

import math
from typing import Any

from jaxfp8._bench._measure import Missing, Timing
from jaxfp8._bench.compare.result import Compared, Result


def product(compared: Compared) -> dict[str, Any]:
    """The ways on one pair of operands."""
    m, n, k = compared.shape
    front = compared.front
    ways = [
        {**_result(result, compared.operations), "on_front": result.way in front}
        for result in compared.results
    ]
    missing = [{"name": name, "missing": why} for name, why in compared.missing.items()]
    return {"name": compared.name, "m": m, "n": n, "k": k, "ways": [*ways, *missing]}


def _result(result: Result, operations: float) -> dict[str, Any]:
    return {
        "name": result.way,
        "relative_l2": _plain(result.error.relative_l2),
        "max_abs": _plain(result.error.max_abs),
        "sqnr": _plain(result.error.sqnr),
        "bytes": result.bytes,
        "times": {stage: _timing(t, operations) for stage, t in result.timings.items()},
        "check": None
        if result.check is None
        else {
            "share_of_bound": _plain(result.check.share),
            "what": result.check.what,
            "passed": result.check.passed,
        },
    }


def _timing(timing: Timing | Missing, operations: float) -> dict[str, Any]:
    if isinstance(timing, Missing):
        return {"missing": timing.reason}
    gops = operations / timing.median / 1e9
    return {"seconds": timing.median, "spread": timing.spread, "gops": gops}


def _plain(value: float) -> float | str:
    """A number as JSON has it; a non-finite one becomes a string."""
    return value if math.isfinite(value) else str(value)
