"""Runs a copy of a model and reports the calls of its layers."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx

from jaxfp8.nnx._replace import modules

# Called after each call of a layer with path, layer, method, positional arguments and output.
Watch = Callable[[str, Any, str, tuple[Any, ...], Any], None]
_METHODS = ("__call__", "attend")
# Attributes of a watched layer and of its weight: its path, and the function to call.
_PATH, _WATCH, _NOTE = "watched_path", "watched_by", "watched_note"


def run_watched(
    model: nnx.Module,
    chosen: Callable[[str, nnx.Module], bool],
    watch: Watch,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls a copy of a model and watches its chosen layers; the model itself is not changed.

    A watched layer becomes an instance of a subclass in the same place, with the same variables.

    Args:
      model: the model.
      chosen: whether the layer at a path is watched.
      watch: called after each call of a watched layer; while tracing, if the model traces it.
      args, kwargs: for the call.

    Returns:
      The output of the model.
    """
    copy = nnx.clone(model)
    for path, layer in [item for item in modules(copy) if chosen(*item)]:
        setattr(layer, _PATH, path)
        setattr(layer, _WATCH, watch)
        kind: Any = type(layer)
        _become(layer, _watched(kind))
    return copy(*args, **kwargs)  # type: ignore[operator]


def _become(thing: Any, kind: type) -> None:
    object.__setattr__(thing, "__class__", kind)


@functools.cache
def _watched(kind: type) -> type:
    """A subclass of a layer to report its calls."""

    def method(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _tell(self, kind, name, args, kwargs)

        return call

    methods = {name: method(name) for name in _METHODS if hasattr(kind, name)}
    return _subclass(kind, methods)


def _subclass(kind: type, methods: dict[str, Any]) -> type:
    made: type = type(kind)(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})
    return made


def _tell(
    layer: Any, kind: type, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a watched layer and reports the call. During the call its class is the original."""
    watched = type(layer)
    _become(layer, kind)
    try:
        with _inside_a_layer():
            y = getattr(layer, method)(*args, **kwargs)
            getattr(layer, _WATCH)(getattr(layer, _PATH), layer, method, args, y)
    finally:
        _become(layer, watched)
    return y


# Whether a watched layer is called at the moment.
_INSIDE: contextvars.ContextVar[bool] = contextvars.ContextVar("jaxfp8_inside", default=False)


@contextlib.contextmanager
def _inside_a_layer() -> Iterator[None]:
    token = _INSIDE.set(True)
    try:
        yield
    finally:
        _INSIDE.reset(token)


def note_other_uses(variable: nnx.Variable, note: Callable[[], None]) -> None:
    """Has a variable report reads and writes outside calls of watched layers."""
    variable.set_metadata(_NOTE, note)
    _become(variable, _noting(type(variable)))


@functools.cache
def _noting(kind: type) -> type:
    """A subclass of a variable to report its reads and writes."""

    def method(name: str) -> Callable[..., Any]:
        def use(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not _INSIDE.get():
                self.get_metadata()[_NOTE]()
            return getattr(kind, name)(self, *args, **kwargs)

        return use

    methods = {name: method(name) for name in ("get_value", "set_value")}
    return _subclass(kind, {"__slots__": (), **methods})
