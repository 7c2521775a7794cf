"""The variables of a model, and their paths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flax import nnx

from jaxfp8.nnx._replace import Path, by_number


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
