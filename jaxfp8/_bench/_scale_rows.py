"""The results of `--devices`: speedups over one device, bytes sent, and time in collectives."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from jaxfp8._bench import _rows
from jaxfp8._bench._case import Measured
from jaxfp8._bench._measure import Missing
from jaxfp8._bench._run import Screen
from jaxfp8._bench._scale import FLOATS, named
from jaxfp8._value import tables

_TIMES = ("form", "devices", "time", "spread", "speedup", "efficiency", "of bf16")
HEAD = (*_TIMES, "sent", "bf16 sent", "in collectives")
# Kernels of NCCL, and of XLA where it has its own; or the instruction that they belong to.
_COLLECTIVE = re.compile(
    r"nccl|all[-_]?reduce|all[-_]?gather|reduce[-_]?scatter|all[-_]?to[-_]?all|collective|permute"
    r"|^p(?:sum|max|min)",  # an all-reduce that JAX wrote, inside a fusion of XLA
    re.IGNORECASE,
)


def show(screen: Screen, measured: Measured) -> None:
    """Shows all forms of a program, and what each sends by kind."""
    screen.table(measured.case.name, HEAD, list(_table(measured, list(measured.timings))))
    for name, sent in measured.case.sent.items():
        if sent:
            parts = ", ".join(f"{kind} {tables.size(size)}" for kind, size in sent.items())
            screen.say(f"  {name} sends by device: {parts}")
    for name, one in (*measured.timings.items(), *measured.profiles.items()):
        if isinstance(one, Missing):
            screen.say(f"  {name}: {one.reason}")


def finish(screen: Screen, done: Sequence[Measured]) -> bool:
    """One short table: each program and form on most devices."""
    rows = []
    for measured in done:
        most = max((_parts(name)[1] for name in measured.timings), default=1)
        last = [name for name in measured.timings if _parts(name)[1] == most]
        title = measured.case.name.removeprefix("scale ")
        rows += [(title, *row) for row in _table(measured, last)]
    screen.table("All programs on most devices", ("program", *HEAD), rows)
    return False


def _parts(name: str) -> tuple[str, int]:
    """The form and the number of devices of a contender."""
    form, _, number = name.rpartition(" x")
    return (form, int(number)) if number.isdigit() else (name, 1)


def _table(measured: Measured, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for name in names:
        timing = measured.timings[name]
        if isinstance(timing, Missing):
            continue
        form, devices = _parts(name)
        floats = named(FLOATS, devices)
        speedup, of_floats = measured.ratio(named(form, 1), name), measured.ratio(floats, name)
        share = share_of_collectives(measured, name)
        yield (
            form,
            str(devices),
            _rows.time(timing.median),
            f"±{timing.spread:.0%}",
            "" if speedup is None else _rows.times(speedup),
            "" if speedup is None else f"{speedup / devices:.0%}",
            "" if of_floats is None else _rows.times(of_floats),
            *(tables.size(sum(measured.case.sent.get(one, {}).values())) for one in (name, floats)),
            "not measured" if share is None else f"{share:.0%}",
        )


def share_of_collectives(measured: Measured, name: str) -> float | None:
    """Time in collectives as a share of all kernels' time, their waiting included; or None."""
    if measured.case.sent.get(name) == {}:
        return 0.0
    kernels = measured.profiles.get(name)
    if not kernels or isinstance(kernels, Missing):
        return None
    sent = (k for k in kernels if _COLLECTIVE.search(k.name) or _COLLECTIVE.search(k.op))
    return sum(k.seconds for k in sent) / sum(k.seconds for k in kernels)
