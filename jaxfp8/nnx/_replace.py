"""Modules of a live model replaced where they stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

Path = tuple[str, ...]
# The module to put in place of one at a path, or the same one.
Replace = Callable[[str, nnx.Module], nnx.Module]


def replace(model: nnx.Module, new: Replace) -> None:
    """Puts `new(path, module)` in place of each module below `model` for which it is another.

    A module that is reached twice is replaced by one. What is replaced is not entered. Nothing is
    changed before all of `new` has been asked: an error leaves the model as it was.
    """
    replacer = _Replacer(new)
    replacer.enter(model, ())
    for node, name, found in replacer.changes:
        setattr(node, name, found)


class _Replacer:
    def __init__(self, new: Replace) -> None:
        self.new = new
        self.done: dict[int, Any] = {}
        self.changes: list[tuple[Any, str, Any]] = []

    def enter(self, node: Any, path: Path) -> None:
        """Look for replacements among the attributes of a node of the model."""
        self.done[id(node)] = node
        # In order of names, not of assignment, which a copy of a model does not keep: the path of a
        # module that is reached twice is then the same in both.
        for name in sorted(vars(node), key=by_number):
            child = vars(node)[name]
            if name.startswith("_pytree__"):
                continue
            found = self.visit(child, (*path, name))
            if found is not child:
                self.changes.append((node, name, found))

    def visit(self, value: Any, path: Path) -> Any:
        """What stands in the place of a value."""
        if isinstance(value, list | tuple | dict) and type(value) in (list, tuple, dict):
            return self._container(value, path)
        if not isinstance(value, nnx.Pytree):
            return value
        if id(value) not in self.done:
            found = self.new("/".join(path), value) if isinstance(value, nnx.Module) else value
            self.done[id(value)] = found
            if found is value:
                self.enter(value, path)
        return self.done[id(value)]

    def _container(self, value: Any, path: Path) -> Any:
        """A plain container; another one only if something in it was replaced."""
        if isinstance(value, dict):
            found = {k: self.visit(v, (*path, str(k))) for k, v in value.items()}
            return found if any(found[k] is not v for k, v in value.items()) else value
        items = [self.visit(v, (*path, str(i))) for i, v in enumerate(value)]
        same = all(a is b for a, b in zip(items, value, strict=True))
        return value if same else type(value)(items)


def by_number(name: str) -> tuple[int, str]:
    """Puts the items of a list, whose names are numbers, in their order."""
    return (int(name), "") if name.isdigit() else (-1, name)
