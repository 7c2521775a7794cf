"""Lists of modules in a configuration: which entry names a module, in time that no list stretches.

A mixture of experts has 75,000 modules and hundreds of entries, so entries are never tried in turn.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

_EXPRESSION = "re:"
_WILD = re.compile(r"[*?[]")
# An expression of one name alone, which is looked up.
_EXACT = re.compile(r"re:\^?((?:[\w-]|\\\.)+)\$")
# An expression refers to its own groups by number or name, or sets flags: it stays on its own.
_ALONE = re.compile(r"\\[1-9]|\(\?P|\(\?\(|\(\?[aiLmsux]")


class Patterns:
    """Entries of a skip list, or targets.

    `re:` begins a regular expression, a star makes a pattern of the shell. Anything else names a
    module, all modules below it, or the last parts of its name.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        wild: dict[str, str] = {}
        self._exact: dict[str, str] = {}
        # Names by their last part, since few modules share it with an entry.
        self._names: dict[str, dict[int, set[str]]] = {}
        # Of modules around others; one has hundreds of experts.
        self._found: dict[str, str | None] = {"": None}
        for entry in entries:
            if exact := _EXACT.fullmatch(entry):
                self._exact.setdefault(exact[1].replace("\\.", "."), entry)
            elif entry.startswith(_EXPRESSION):
                wild.setdefault(entry, entry.removeprefix(_EXPRESSION))
            elif _WILD.search(entry):
                wild.setdefault(entry, fnmatch.translate(entry).replace("(?s:", "(?:", 1))
            elif entry:
                parts = entry.split(".")
                by_length = self._names.setdefault(parts[-1], {})
                by_length.setdefault(len(parts), set()).add(entry)
        compiled = {entry: _compiled(text) for entry, text in wild.items()}
        self._wild = {entry: found for entry, found in compiled.items() if found}
        self._any = [found for found in self._wild.values() if _ALONE.search(found.pattern)]
        joint = [f"(?:{x.pattern})" for x in self._wild.values() if x not in self._any]
        self._any += [re.compile("|".join(joint))] if joint else []

    def first(self, module: str) -> str | None:
        """The entry for a module, or None."""
        named = self._named(module) or self._exact.get(module)
        if named is not None or not self._any or not any(x.match(module) for x in self._any):
            return named
        matched = (entry for entry, found in self._wild.items() if found.match(module))
        return next(matched, None)

    def _named(self, module: str) -> str | None:
        """The name among the entries of a module or of one around it."""
        around, _, last = module.rpartition(".")
        if around not in self._found:
            self._found[around] = self._named(around)
        named = self._found[around]
        if named is None and last in self._names:
            parts = module.split(".")
            for length, entries in self._names[last].items():
                name = ".".join(parts[-length:])
                named = name if name in entries else named
        return named


def _compiled(text: str) -> re.Pattern[str] | None:
    """An expression; None for one that is none, since no module matches it."""
    try:
        return re.compile(text)
    except re.error:
        return None
