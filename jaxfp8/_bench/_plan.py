"""The plan of a run, of `bench` and of `compare`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from jaxfp8._bench._screen import Screen

Progress = Callable[[float], None]  # called with the completed share


class Result(Protocol):
    """The result of one part of a run."""

    @property
    def failed(self) -> bool:
        """Whether something of ours did not run."""


R = TypeVar("R", bound=Result)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Generic[R]):
    """The plan of a run.

    Attributes:
      parts: measuring functions, by name.
      names: the lines of `--list`.
      platform: "cpu" or "cuda".
      json, plot: files to write, or None.
      settings: the options, for the record.
      schema: names the fields of the JSON.
      key: the field of the JSON with the results.
      record: a result as JSON.
      show: shows a result as soon as it is known.
      finish: shows a summary of all results, and returns whether the run failed.
      figure: draws all results under a title, with matplotlib.
    """

    parts: Mapping[str, Callable[[Progress], R]]
    names: Sequence[str]
    platform: str
    json: str | None
    plot: str | None
    settings: Mapping[str, Any]
    schema: int | str
    key: str
    record: Callable[[R], dict[str, Any]]
    show: Callable[[Screen, R], None]
    finish: Callable[[Screen, Sequence[R]], bool]
    figure: Callable[[str, Sequence[R]], Any]
