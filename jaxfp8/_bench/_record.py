"""A run as JSON, and its machine."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import time
from collections.abc import Sequence
from typing import Any

import jax

from jaxfp8._bench import _peaks
from jaxfp8._bench._plan import Plan, R
from jaxfp8._call.library import ffi

_PACKAGES = ("jaxfp8", "jax", "jaxlib", "numpy", "torch")


def text(machine: dict[str, Any], plan: Plan[R], done: Sequence[R]) -> str:
    """The whole run."""
    run = {
        "schema": plan.schema,
        "machine": machine,
        "settings": dict(plan.settings),
        plan.key: [plan.record(result) for result in done],
    }
    return json.dumps(run, indent=1) + "\n"


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
            found = re.search(r"^model name\s*:\s*(.+)$", file.read(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
