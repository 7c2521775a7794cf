"""A run of `python -m jaxfp8 compare`."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from jaxfp8._bench import _record as _machine
from jaxfp8._bench import _screen
from jaxfp8._bench._run import fails_to_write
from jaxfp8._compare import _plot, _record, _rows
from jaxfp8._compare._cli import Plan
from jaxfp8._compare._result import Compared, compared


def run(plan: Plan) -> int:
    """Compares and shows; returns 0, 1 if a way failed, left a bound, or a file is not written.

    An interrupt ends it with 130, and what was compared by then.
    """
    screen = _screen.screen()
    machine = _machine.machine(plan.platform)
    title = _machine.title(machine)
    screen.say(title)
    done: list[Compared] = []
    failed = stopped = False
    try:
        for one in _each(plan, screen):
            done.append(one)
            _show(screen, plan, one)
            record = _record.text(machine, plan.settings, done)
            failed |= fails_to_write(plan.json, record) or bool(_rows.missing(one))
    except KeyboardInterrupt:
        stopped = True
    if not done:
        return 130 if stopped else int(failed)
    if plan.verify:
        for line in _rows.verdict(done):
            screen.say(line)
        failed |= any(r.check is not None and not r.check.passed for c in done for r in c.results)
    if plan.plot:
        failed |= fails_to_write(plan.plot, _plot.drawn(plan.plot, title, done))
    return 130 if stopped else int(failed)


def _each(plan: Plan, screen: _screen.Screen) -> Iterator[Compared]:
    """Compares on one pair of operands after the other."""
    with (
        jax.default_device(jax.devices(plan.platform)[0]),
        screen.progress(len(plan.data)) as show,
    ):
        for number, make in enumerate(plan.data):
            data = make()
            show(data.name, number)

            def progress(part: float, name: str = data.name, number: int = number) -> None:
                show(name, number + part)

            yield compared(data, plan.paths, plan.platform, plan.rounds, plan.verify, progress)


def _show(screen: _screen.Screen, plan: Plan, one: Compared) -> None:
    timed = plan.rounds > 0
    rows = list(_rows.rows(one, timed, plan.spread, plan.verify))
    if rows:
        screen.table(one.name, _rows.head(timed, plan.verify), rows)
    for line in _rows.missing(one):
        screen.say(f"  {line}")
