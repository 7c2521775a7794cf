"""A run of `python -m jaxfp8 bench` or `compare`."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator

import jax

from jaxfp8._bench import _plot, _record, _screen
from jaxfp8._bench._plan import Plan, R
from jaxfp8._value.files import write_whole


def run(plan: Plan[R]) -> int:
    """Measures and shows.

    Returns:
      0; 1 if something of ours failed, or a file was not written; 130 if interrupted.
    """
    screen = _screen.screen()
    machine = _record.machine(plan.platform)
    title = _record.title(machine)
    screen.say(title)
    done: list[R] = []
    stopped, failed = False, False
    try:
        for result in _each(plan, screen):
            done.append(result)
            plan.show(screen, result)
            record = _record.text(machine, plan, done)
            failed |= fails_to_write(plan.json, record) or result.failed
    except KeyboardInterrupt:
        stopped = True
    if done:
        failed |= plan.finish(screen, done)
    if done and plan.plot:
        page = _plot.drawn(plan.plot, title, plan.figure(title, done), "\n".join(screen.said[1:]))
        failed |= fails_to_write(plan.plot, page)
    return 130 if stopped else int(failed)


def _each(plan: Plan[R], screen: _screen.Screen) -> Iterator[R]:
    """Measures one part after the other and frees the data of each."""
    with (
        jax.default_device(jax.devices(plan.platform)[0]),
        screen.progress(len(plan.parts)) as show,
    ):
        for number, (name, measure) in enumerate(plan.parts.items()):
            show(name, number)
            yield measure(functools.partial(_show_part, show, name, number))
            gc.collect()


def _show_part(show: _screen.Show, name: str, number: int, part: float) -> None:
    show(name, number + part)


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
