"""Runs a model on a sample: for scales of inputs, and to see other readers of float weights."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxfp8._ops.quantize import quantize
from jaxfp8._recipes.quantization import Quantization
from jaxfp8._recipes.rules import Rule, choose
from jaxfp8.nnx._layers import TWINS
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
    """Observations of a model's run on a sample.

    Attributes:
      scales: for each layer with a static recipe, by path, the largest scale its inputs need.
      read: paths of layers with a weight read or written outside the layer's own call.
    """

    scales: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    read: frozenset[str] = frozenset()


def static_activation(rules: tuple[Rule, ...], path: str) -> Quantization | None:
    """How the input of a layer is held, if its scale is static."""
    recipe = choose(rules, path)
    how = None if recipe is None else recipe.activation
    return how if how is not None and how.static else None


def observed(
    model: nnx.Module,
    rules: tuple[Rule, ...],
    selects: Callable[[str, nnx.Module], bool],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Observed:
    """Calls a copy of a model with a sample and observes its layers."""
    scales: dict[str, np.ndarray] = {}
    read: set[str] = set()
    sharing: dict[int, list[str]] = {}  # by id of a weight its layers

    def note(path: str, scale: np.ndarray) -> None:
        scales[path] = np.maximum(scales.get(path, 0), scale)

    def watch(path: str, layer: Any, method: str, given: tuple[Any, ...], y: Any) -> None:
        how = static_activation(rules, path)
        x = jnp.asarray(given[0])
        if how is None or not jnp.issubdtype(x.dtype, jnp.floating):
            return
        scale = quantize(x, how.dtype, scale_dtype=how.scale_dtype).scale.reshape(())
        jax.debug.callback(lambda scale: note(path, np.asarray(scale)), scale)

    def chosen(path: str, module: nnx.Module) -> bool:
        is_chosen = type(module) in TWINS and choose(rules, path) is not None
        is_chosen = is_chosen and selects(path, module)
        if is_chosen:
            weight = getattr(module, TWINS[type(module)].WEIGHT)
            paths = sharing.setdefault(id(weight), [])
            paths.append(path)
            if len(paths) == 1:
                note_other_uses(weight, lambda: read.update(paths))
        return is_chosen

    run_watched(model, chosen, watch, args, kwargs)
    jax.effects_barrier()
    return Observed(scales=scales, read=frozenset(read))
