"""A run of `python -m jaxfp8 bench`."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping

import jax

from jaxfp8._bench import _plot, _record, _screen
from jaxfp8._bench._case import OURS, Case, Measured, is_ours
from jaxfp8._bench._cli import Plan
from jaxfp8._bench._measure import Contender, Missing, Timing, attempt, measure
from jaxfp8._bench._profile import Profile, profile
from jaxfp8._value.files import write_whole


def run(plan: Plan) -> int:
    """Measures and shows; returns 0, 1 if one of ours or a file failed, 130 if interrupted."""
    screen = _screen.screen()
    machine = _record.machine(plan.platform)
    title = _record.title(machine)
    screen.say(title)
    done: list[Measured] = []
    stopped, failed = False, False
    try:
        for measured in _each(plan, screen):
            done.append(measured)
            _screen.case(screen, measured)
            record = _record.text(machine, plan.settings, done)
            failed |= fails_to_write(plan.json, record) or _has_failed(measured)
    except KeyboardInterrupt:
        stopped = True
    _screen.goals(screen, done)
    if plan.plot:
        failed |= fails_to_write(plan.plot, _plot.drawn(plan.plot, title, done))
    return 130 if stopped else int(failed)


def _each(plan: Plan, screen: _screen.Screen) -> Iterator[Measured]:
    """Measures one case after the other and frees the data of each."""
    with (
        jax.default_device(jax.devices(plan.platform)[0]),
        screen.progress(len(plan.cases)) as show,
    ):
        for number, (name, make) in enumerate(plan.cases.items()):
            show(name, number)
            progress = functools.partial(_show_part, show, name, number)
            case = _made(name, make)
            if not plan.aims:
                case = dataclasses.replace(case, goals=())
            yield measured(case, plan.rounds, progress)
            gc.collect()


def _show_part(show: _screen.Show, name: str, number: int, part: float) -> None:
    show(name, number + part)


def _made(name: str, make: Callable[[], Case]) -> Case:
    """A case; without contenders if it cannot be made."""
    made = attempt(make)
    if isinstance(made, Missing):
        return Case(name=name, contenders={OURS: made})
    return made


def measured(
    case: Case, rounds: int, progress: Callable[[float], None] = lambda part: None
) -> Measured:
    """Times the contenders of a case and what limits it, all in turns."""
    peaks = {f"peak {kind}": peak for kind, peak in case.peaks.items()}
    contenders = {**case.contenders, **peaks}
    steps = len(contenders) * (rounds + 1)
    turns = itertools.count(1)
    timings = measure(contenders, rounds, lambda: progress(next(turns) / steps))
    rates = {
        kind: 1 / timing.median
        for kind in case.peaks
        if isinstance(timing := timings[f"peak {kind}"], Timing)
    }
    return Measured(
        case=dataclasses.replace(case, contenders={}, peaks={}),  # which hold the data
        timings={name: timings[name] for name in case.contenders},
        peaks=rates,
        profiles=_profiles(case, timings) if case.profiled else {},
    )


def _profiles(case: Case, timings: Mapping[str, Timing | Missing]) -> dict[str, Profile | Missing]:
    """The kernels of each contender that ran; after the timings, which a profiler would disturb."""
    return {
        name: attempt(functools.partial(profile, one))
        for name, one in case.contenders.items()
        if isinstance(one, Contender) and isinstance(timings[name], Timing)
    }


def _has_failed(measured: Measured) -> bool:
    """Whether a contender of ours did not run."""
    return any(is_ours(n) and isinstance(t, Missing) for n, t in measured.timings.items())


def fails_to_write(path: str | None, content: str | bytes) -> bool:
    """Writes a file, if one is asked for, and reports an error."""
    if path is None:
        return False
    try:
        write_whole(path, content)
    except OSError as error:
        print(f"{path} cannot be written: {error.strerror or error}", file=sys.stderr)
        return True
    return False
