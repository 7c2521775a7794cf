"""The results of a case as JSON; docs/benchmark.md lists the fields."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxfp8._bench._case import Goal, Measured
from jaxfp8._bench._measure import Missing, Timing
from jaxfp8._bench._profile import Group, Kernel, Profile


def case(measured: Measured) -> dict[str, Any]:
    """A case with its results."""
    case = measured.case
    return {
        "name": case.name,
        "flops": case.flops,
        "bytes": case.bytes,
        "limit": measured.limit,
        "peaks": dict(measured.peaks),
        "contenders": [_contender(measured, name) for name in measured.timings],
        "goals": [_goal(goal, measured) for goal in case.goals],
        **_profiles(measured),
    }


def _contender(measured: Measured, name: str) -> dict[str, Any]:
    timing = measured.timings[name]
    if not isinstance(timing, Timing):
        return {"name": name, "missing": timing.reason}
    return {
        "name": name,
        "seconds": timing.median,
        "spread": timing.spread,
        "rate": measured.rate(name),
        "share_of_peak": measured.share(name),
        "times_ours": measured.ratio(name),
        **_compared(measured, name),
        **({"held": measured.case.held[name]} if name in measured.case.held else {}),
    }


def _compared(measured: Measured, name: str) -> dict[str, Any]:
    """The additional fields of a case of whole steps."""
    case = measured.case
    if not case.against:
        return {}
    return {"bytes": case.moved.get(name, case.bytes), "speed": measured.speed(name)}


def _profiles(measured: Measured) -> dict[str, Any]:
    """The breakdowns, if the case has them."""
    if not measured.case.profiled:
        return {}
    return {"profiles": [_profile(*item) for item in measured.profiles.items()]}


def _profile(name: str, profile: Profile | Missing) -> dict[str, Any]:
    if isinstance(profile, Missing):
        return {"name": name, "missing": profile.reason}
    return {
        "name": name,
        "span": profile.span,
        "gaps": sum(profile.gaps),
        "kernels": [_with_bytes(group) for group in profile.groups()],
        "launches": [_with_bytes(kernel) for kernel in profile.kernels],
    }


def _with_bytes(row: Kernel | Group) -> dict[str, Any]:
    fields = dataclasses.asdict(row)
    return {**fields, "bytes": fields.pop("nbytes")}


def _goal(goal: Goal, measured: Measured) -> dict[str, Any]:
    return {
        "text": goal.text,
        "at_least" if goal.at_least else "at_most": goal.reach,
        "measured": goal.value(measured),
        "reached": goal.reached(measured),
    }
