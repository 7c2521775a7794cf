"""Selects layers, weights or tensors by pattern or function, and warns of an empty selection.

A mistyped pattern changes nothing, and nobody notices. Every pattern argument is therefore a
`Selection`. Its caller asks it about all items, then calls `tell`.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from jaxfp8._recipes.rules import Rule
from jaxfp8._value import tables
from jaxfp8._value.checks import as_pattern
from jaxfp8._value.errors import FallbackWarning, level_of_user, message

# A regular expression to search for, a collection of paths, or a function of path and item.
Where = str | Collection[str] | Callable[[str, Any], bool] | None
_NEAREST = 3


class Selection:
    """The selection by an argument: a regular expression, some paths, or a function.

    It is called with the path of an item and the item, and remembers the answers. Errors name the
    items `what` (plural) and `of`, and a regular expression as `example`. The regular expression is
    searched in the `texts` of an item, its path first. By default None selects everything.
    """

    def __init__(
        self,
        operation: str,
        argument: str,
        given: Where,
        *,
        what: str = "layers",
        of: str = "module",
        example: str = r"layers/\d+/mlp",
        default: bool = True,
        texts: Callable[[str, Any], tuple[str, ...]] = lambda path, item: (path,),
    ) -> None:
        self.operation, self.argument, self.given, self.what = operation, argument, given, what
        self._default, self._texts = default, texts
        self._answers: dict[tuple[str, ...], bool] = {}
        is_text = isinstance(given, str | bytes)
        self.paths = () if is_text or not isinstance(given, Collection) else given
        self._pattern: re.Pattern[str] | None = None
        if given is not None and not callable(given) and given is not self.paths:
            needs = f"a regular expression, paths or a function of path and {of} is needed"
            remedy = f"write one such as `r'{example}'`"
            self._pattern = as_pattern(operation, argument, given, needs, remedy)

    def __call__(self, path: str, item: Any) -> bool:
        """Whether the argument selects an item."""
        if self.given is None:
            return self._default
        texts = self._texts(path, item)
        if self._pattern is not None:
            answer = any(map(self._pattern.search, texts))
        else:
            answer = bool(self.given(path, item)) if callable(self.given) else path in self.paths
        self._answers[texts] = answer or self._answers.get(texts, False)
        return answer

    def unmatched(self) -> str:
        """A sentence on an empty selection, or an unknown path; "" if there is neither."""
        names = [text for texts in self._answers for text in texts if text]
        if unknown := unknown_names(self.operation, self.argument, self.paths, names, self.what):
            return unknown[0]
        if self.given is None or any(self._answers.values()):
            return ""
        count = f"none of {len(self._answers)} {self.what}"
        if not isinstance(self.given, str):
            shown, got = names[:_NEAREST], f"selects {count}"
        else:
            shown, got = nearest(self.given, names), f"{self.given!r} matches {count}"
        needs = "it has to select one"
        return message(self.operation, f"`{self.argument}`", got, needs, _remedy(self.what, shown))

    def tell(self) -> None:
        """Warns if nothing is selected."""
        tell(self.unmatched())


def unmatched_rules(operation: str, rules: Sequence[Rule], paths: Collection[str]) -> list[str]:
    """A sentence for each rule without effect on `paths`; none for a rule of every path."""
    texts = [_unmatched(operation, rules[:i], rule, paths) for i, rule in enumerate(rules)]
    return [text for text in texts if text]


def _unmatched(operation: str, before: Sequence[Rule], rule: Rule, paths: Collection[str]) -> str:
    if rule.where == Rule.where:
        return ""
    operand = f"rule {rule.where!r}"
    matching = [path for path in paths if re.search(rule.where, path)]
    if not matching:
        got, needs = f"matches none of {len(paths)} layers", "it has to match one"
        remedy = _remedy("layers", nearest(rule.where, paths))
        return message(operation, operand, got, needs, remedy)
    if all(any(re.search(b.where, path) for b in before) for path in matching):
        got, needs = "matches only layers of earlier rules", "the first rule that matches counts"
        return message(operation, operand, got, needs, "put it before them")
    return ""


def unknown_names(
    operation: str, argument: str, given: Any, known: Collection[str], what: str = "layers"
) -> list[str]:
    """A sentence for each unknown name of a mapping or collection; none if `given` is neither."""
    names = given if isinstance(given, Mapping | Collection) else ()
    needs = f"it is none of {len(known)} {what}"
    unknown = [(name, nearest(str(name), known)) for name in names if name not in known]
    return [
        message(operation, f"`{argument}`", f"names {name!r}", needs, _remedy(what, near))
        for name, near in unknown
    ]


def tell(*texts: str) -> None:
    """Warns of each sentence; passes over empty ones."""
    for text in filter(None, texts):
        warnings.warn(text, FallbackWarning, stacklevel=level_of_user())


def _remedy(what: str, shown: Sequence[str]) -> str:
    if not shown:
        return f"there are no {what} to select"
    return f"name {what} such as {', '.join(f'`{name}`' for name in shown)}"


def nearest(pattern: str, names: Iterable[str]) -> list[str]:
    """The names most like a pattern; one of several with other numbers."""
    words = re.findall(r"\w+", re.sub(r"\\[A-Za-z]", " ", pattern))

    def likeness(name: str) -> float:
        parts = [name, *re.findall(r"\w+", name)]
        return sum(max(_ratio(word, part) for part in parts) for word in words)

    distinct = {tables.numberless(name): name for name in reversed([*names])}
    return sorted(reversed(distinct.values()), key=likeness, reverse=True)[:_NEAREST]


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()
