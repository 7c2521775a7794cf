"""What tools/mutants.py says of mutants: verdicts, as rows and as JSON, beside those before."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mutant_table import Mutant

KILLED, SURVIVED, BROKEN, ERROR = "killed", "survived", "does not build", "not tried"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a mutant: `by` is what failed, or why it could not be tried."""

    mutant: Mutant
    verdict: str
    by: str
    seconds: float


class Progress:
    """A bar on a terminal, otherwise a line for each outcome."""

    def __init__(self, total: int) -> None:
        self.total, self.counts = total, Counter[str]()
        self.is_terminal = sys.stderr.isatty()

    def add(self, outcome: Outcome) -> None:
        self.counts[outcome.verdict] += 1
        done = sum(self.counts.values())
        said = ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items())
        if self.is_terminal:
            bar = "#" * (30 * done // self.total)
            end = "\n" if done == self.total else ""
            print(f"\r\x1b[K[{bar:30}] {done}/{self.total}: {said}", end=end, file=sys.stderr)
        else:
            print(f"{done}/{self.total} {line(outcome)}", file=sys.stderr)
        sys.stderr.flush()


def line(outcome: Outcome) -> str:
    """An outcome as a row."""
    mutant, by = outcome.mutant, outcome.by[:150]
    return f"{outcome.verdict:14} {outcome.seconds:5.0f} s  {mutant.id:34} {by or mutant.breaks}"


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """All outcomes, to keep."""
    rows = [
        {
            **{name: getattr(o.mutant, name) for name in ("id", "suite", "file", "breaks")},
            "verdict": o.verdict,
            "by": o.by,
            "seconds": round(o.seconds, 1),
        }
        for o in outcomes
    ]
    return {"counts": dict(Counter(o.verdict for o in outcomes)), "mutants": rows}


def no_longer_killed(outcomes: Sequence[Outcome], before: Path) -> list[str]:
    """The ids that an earlier run killed, and this one tried and did not."""
    rows = json.loads(before.read_text())["mutants"]
    earlier = {row["id"] for row in rows if row["verdict"] == KILLED}
    return [o.mutant.id for o in outcomes if o.verdict != KILLED and o.mutant.id in earlier]
