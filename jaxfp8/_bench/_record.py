"""A run as JSON, and its machine."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import time
from typing import Any

import jax

from jaxfp8._bench import _peaks, _profile
from jaxfp8._bench._case import Measured
from jaxfp8._bench._measure import Missing, Timing
from jaxfp8._call.library import ffi

_PACKAGES = ("jaxfp8", "jax", "jaxlib", "numpy", "torch")


def case(measured: Measured) -> dict[str, Any]:
    """A case with its results; docs/benchmark.md lists the fields."""
    case = measured.case
    return {
        "name": case.name,
        "flops": case.flops,
        "bytes": case.bytes,
        "limit": measured.limit,
        "peaks": dict(measured.peaks),
        "contenders": [_contender(measured, name) for name in measured.timings],
        "profiles": [_kernels(*item) for item in measured.profiles.items()],
    }


def _kernels(name: str, profile: _profile.Kernels | Missing) -> dict[str, Any]:
    if isinstance(profile, Missing):
        return {"name": name, "missing": profile.reason}
    whole = _profile.whole(profile)
    return {
        "name": name,
        "span": whole.seconds,
        "gaps": whole.gaps,
        "kernels": [group._asdict() for group in _profile.groups(profile)],
        "launches": [kernel._asdict() for kernel in profile],
    }


def _contender(measured: Measured, name: str) -> dict[str, Any]:
    timing = measured.timings[name]
    if not isinstance(timing, Timing):
        return {"name": name, "missing": timing.reason}
    temporary = measured.case.temporary.get(name)
    return {
        "name": name,
        **({} if temporary is None else {"temporary": temporary}),
        "seconds": timing.median,
        "spread": timing.spread,
        "rate": measured.rate(name),
        "share_of_peak": measured.share(name),
        "times_ours": measured.ratio(name),
        **({"bytes": measured.case.moved[name]} if name in measured.case.moved else {}),
        **({"sent": dict(measured.case.sent[name])} if name in measured.case.sent else {}),
    }


def machine(platform_name: str) -> dict[str, Any]:
    """The machine of the measurement."""
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
    packages = machine["packages"]  # lacks this one if a checkout is on the path
    names = [f"{name} {packages[name]}" for name in ("jaxfp8", "jax") if name in packages]
    if machine["platform"] == "cpu":
        return ", ".join([*names, machine["processor"], f"{machine['threads']} threads"])
    return ", ".join([*names, *machine["devices"][:1]])


def processor() -> str:
    """Its name, as the system knows it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            named = re.search(r"^model name\s*:\s*(.+)$", file.read(), re.MULTILINE)
    except OSError:
        named = None
    return named[1] if named else platform.processor()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
