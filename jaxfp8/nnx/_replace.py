"""Replaces modules of a live model in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

Path = tuple[str, ...]
# From the path of a module and the module itself: its replacement, or the module.
Replace = Callable[[str, nnx.Module], nnx.Module]


def replace(model: nnx.Module, new: Replace) -> None:
    """Puts `new(path, module)` in place of each module below `model`, if that is another module.

    A module that is reached twice gets one replacement. Modules inside a replaced one are not
    visited. The model changes only after `new` was called for all modules, so an error in `new`
    leaves it as it was.
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
        """Finds replacements among the attributes of a node of the model."""
        self.done[id(node)] = node
        # In order of names: a copy of a model does not keep the order of assignment, and a module
        # that is reached twice should have the same path in both.
        for name in sorted(vars(node), key=by_number):
            child = vars(node)[name]
            if name.startswith("_pytree__"):
                continue
            found = self.visit(child, (*path, name))
            if found is not child:
                self.changes.append((node, name, found))

    def visit(self, value: Any, path: Path) -> Any:
        """A value, or its replacement."""
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
    """Sort key that orders the items of a list, whose names are numbers, by number."""
    return (int(name), "") if name.isdigit() else (-1, name)
