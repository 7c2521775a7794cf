"""The results as JSON; docs/benchmark.md lists the fields."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxfp8._bench import _peaks
from jaxfp8._bench._case import Goal, Measured
from jaxfp8._bench._measure import Missing, Timing
from jaxfp8._bench._profile import Group, Kernel, Profile
from jaxfp8._call.library import ffi

SCHEMA = 1
_PACKAGES = ("jaxfp8", "jax", "jaxlib", "numpy", "torch")


def text(machine: dict[str, Any], settings: Mapping[str, Any], done: Sequence[Measured]) -> str:
    """The whole run."""
    run = {
        "schema": SCHEMA,
        "machine": machine,
        "settings": dict(settings),
        "cases": [_case(measured) for measured in done],
    }
    return json.dumps(run, indent=1) + "\n"


def machine(platform_name: str) -> dict[str, Any]:
    """What it was measured on."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "features": ffi.cpu_features(),
        "threads": _peaks.threads(),
        "platform": platform_name,
        "devices": [device.device_kind for device in jax.devices(platform_name)],
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def title(machine: dict[str, Any]) -> str:
    """One line about it."""
    packages = machine["packages"]  # this one is not among them where a checkout is on the path
    names = [f"{name} {packages[name]}" for name in ("jaxfp8", "jax") if name in packages]
    if machine["platform"] == "cpu":
        return ", ".join([*names, machine["processor"], f"{machine['threads']} threads"])
    return ", ".join([*names, *machine["devices"][:1]])


def processor() -> str:
    """Its name, as the system knows it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            found = re.search(r"^model name\s*:\s*(.+)$", file.read(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _case(measured: Measured) -> dict[str, Any]:
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
    """What a case of whole steps adds."""
    case = measured.case
    if not case.against:
        return {}
    return {"bytes": case.moved.get(name, case.bytes), "speed": measured.speed(name)}


def _profiles(measured: Measured) -> dict[str, Any]:
    """The breakdowns, where the case has them."""
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
