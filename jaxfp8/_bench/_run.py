"""A run of `python -m jaxfp8 bench` or `compare`: its plan, and how it is shown and kept."""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import jax

from jaxfp8._bench import _plot, _record
from jaxfp8._value import tables
from jaxfp8._value.files import write_whole


class Screen:
    """Shows results as they come.

    Attributes:
      said: all lines and tables so far, as text.
    """

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        """One line."""
        self.said.append(text)
        print(text, flush=True)

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table."""
        self.say(f"\n{tables.text(title, head, rows)}")


class Result(Protocol):
    """The result of one part of a run."""

    @property
    def failed(self) -> bool:
        """Whether something of ours did not run."""


R = TypeVar("R", bound=Result)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Generic[R]):
    """The plan of a run."""

    parts: Mapping[str, Callable[[], R]]  # measuring functions, by name
    names: Sequence[str]  # the lines of `--list`
    platform: str  # "cpu" or "cuda"
    # json, plot: files to write, or None.
    json: str | None
    plot: str | None
    settings: Mapping[str, Any]  # the options, for the record
    schema: int | str  # names the fields of the JSON
    key: str  # the field of the JSON with the results
    record: Callable[[R], dict[str, Any]]  # a result as JSON
    show: Callable[[Screen, R], None]  # shows a result as soon as it is known
    # Shows a summary of all results, and returns whether the run failed.
    finish: Callable[[Screen, Sequence[R]], bool]
    figure: Callable[[str, Sequence[R]], Any]  # draws all results under a title, with matplotlib

    def text(self, machine: dict[str, Any], done: Sequence[R]) -> str:
        """The whole run as JSON."""
        results = [self.record(result) for result in done]
        head = {"schema": self.schema, "machine": machine, "settings": dict(self.settings)}
        return tables.json({**head, self.key: results}, 1) + "\n"


def run(plan: Plan[R]) -> int:
    """Measures and shows.

    Returns:
      0; 1 if something of ours failed, or a file was not written; 130 if interrupted.
    """
    screen = Screen()
    machine = _record.machine(plan.platform)
    title = _record.title(machine)
    screen.say(title)
    done: list[R] = []
    stopped, failed = False, False
    try:
        with jax.default_device(jax.devices(plan.platform)[0]):
            for measure in plan.parts.values():
                done.append(measure())
                gc.collect()  # frees the data of the part
                plan.show(screen, done[-1])
                failed |= fails_to_write(plan.json, plan.text(machine, done)) or done[-1].failed
    except KeyboardInterrupt:
        stopped = True
    if done:
        failed |= plan.finish(screen, done)
    if done and plan.plot:
        page = _plot.drawn(plan.plot, title, plan.figure(title, done), "\n".join(screen.said[1:]))
        failed |= fails_to_write(plan.plot, page)
    return 130 if stopped else int(failed)


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
