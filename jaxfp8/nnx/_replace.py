"""Walks a live model: its modules, which may be replaced in place, and its variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx

Path = tuple[str, ...]
# From the path of a module and the module itself: its replacement, or the module.
Replace = Callable[[str, nnx.Module], nnx.Module]


def replace(model: nnx.Module, new: Replace) -> None:
    """Puts `new(path, module)` in place of each module below `model`, if it is another module.

    A module with two paths gets one replacement. Modules inside a replaced one are not
    visited. The model changes only after `new` was called for all modules, so an error in `new`
    leaves it as it was.
    """
    replacer = _Replacer(new)
    replacer.enter(model, ())
    for node, name, child in replacer.changes:
        setattr(node, name, child)


def modules(model: nnx.Module) -> list[tuple[str, Any]]:
    """Paths and modules below `model`, each module once."""
    below: list[tuple[str, Any]] = []

    def note(path: str, module: nnx.Module) -> nnx.Module:
        below.append((path, module))
        return module

    replace(model, note)
    return below


class _Replacer:
    def __init__(self, new: Replace) -> None:
        self.new = new
        self.done: dict[int, Any] = {}
        self.changes: list[tuple[Any, str, Any]] = []

    def enter(self, node: Any, path: Path) -> None:
        """Finds replacements among the attributes of a node of the model."""
        self.done[id(node)] = node
        # In order of names: a copy of a model does not keep the order of assignment, and a module
        # with two paths should have the same one in both.
        for name in sorted(vars(node), key=by_number):
            child = vars(node)[name]
            if name.startswith("_pytree__"):
                continue
            new = self.visit(child, (*path, name))
            if new is not child:
                self.changes.append((node, name, new))

    def visit(self, value: Any, path: Path) -> Any:
        """A value, or its replacement."""
        if isinstance(value, list | tuple | dict) and type(value) in (list, tuple, dict):
            return self._container(value, path)
        if not isinstance(value, nnx.Pytree):
            return value
        if id(value) not in self.done:
            new = self.new("/".join(path), value) if isinstance(value, nnx.Module) else value
            self.done[id(value)] = new
            if new is value:
                self.enter(value, path)
        return self.done[id(value)]

    def _container(self, value: Any, path: Path) -> Any:
        """A plain container; another one only if something in it was replaced."""
        if isinstance(value, dict):
            items = {k: self.visit(v, (*path, str(k))) for k, v in value.items()}
            return items if any(items[k] is not v for k, v in value.items()) else value
        parts = [self.visit(v, (*path, str(i))) for i, v in enumerate(value)]
        same = all(a is b for a, b in zip(parts, value, strict=True))
        return value if same else type(value)(parts)


def by_number(name: str) -> tuple[int, str]:
    """Sort key: items of a list, named by number, go by number."""
    return (int(name), "") if name.isdigit() else (-1, name)


def variables(
    model: nnx.Module, kind: type[nnx.Variable] = nnx.Variable
) -> Iterator[tuple[Path, Any, Any]]:
    """Path, module and variable for each of a kind, once."""
    yield from _below(model, (), model, kind, set())


def _below(
    value: Any, path: Path, holder: Any, kind: type[nnx.Variable], seen: set[int]
) -> Iterator[tuple[Path, Any, Any]]:
    if id(value) in seen:
        return
    if isinstance(value, kind):
        seen.add(id(value))
        yield path, holder, value
    elif isinstance(value, nnx.Pytree):
        seen.add(id(value))
        inner = value if isinstance(value, nnx.Module) else holder
        for name in sorted(vars(value), key=by_number):
            if not name.startswith("_pytree__"):
                yield from _below(vars(value)[name], (*path, name), inner, kind, seen)
    elif isinstance(value, dict | list | tuple):
        named: Any = value if isinstance(value, dict) else dict(enumerate(value))
        for name in named:
            yield from _below(named[name], (*path, str(name)), holder, kind, seen)
