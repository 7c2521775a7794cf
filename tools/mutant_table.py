"""What tools/mutants.py plants: the mutants of tools/mutants.toml, and who ought to find them."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tools" / "mutants.toml"
SUITES = ("native", "python")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mistake: `find` in `file`, which occurs there once, becomes `put`.

    Attributes:
      id: names it, from one state of the sources to the next.
      breaks: what is wrong then.
      file: from the root of the repository.
      find, put: whole lines or parts of them.
      tests: commands, some of which ought to fail.
      only: C++ sources (without ".cc") that alone see the change; () means all.
    """

    id: str
    breaks: str
    file: str
    find: str
    put: str
    tests: tuple[str, ...]
    only: tuple[str, ...] = ()

    @property
    def suite(self) -> str:
        """The part of the suite that ought to find it."""
        return "native" if self.file.startswith("ffi/") else "python"

    def applied(self, root: Path) -> str:
        """The text of the file with the mistake in it."""
        path = root / self.file
        count = path.read_text().count(self.find) if path.exists() else 0
        if count != 1:
            raise ValueError(f"mutant `{self.id}`: its text occurs {count} times in {self.file}")
        return path.read_text().replace(self.find, self.put)


@dataclasses.dataclass(frozen=True)
class Table:
    """The mutants, and the commands of each whole suite."""

    mutants: tuple[Mutant, ...]
    suites: dict[str, tuple[str, ...]]


def read_table(path: Path = TABLE) -> Table:
    """The mutants of a table; a test that `commands` has under a name is replaced by those."""
    text = tomllib.loads(path.read_text())
    commands = text.get("commands", {})

    def full(tests: Sequence[str]) -> tuple[str, ...]:
        return tuple(c for test in tests for c in commands.get(test, [test]))

    mutants = tuple(
        Mutant(**{**row, "tests": full(row["tests"]), "only": tuple(row.get("only", ()))})
        for row in text["mutant"]
    )
    return Table(mutants, {name: full(text["suites"][name]) for name in SUITES})
