"""A model run with something to watch its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

from jaxfp8.nnx._replace import replace

# Told of each call: path, layer, method, positional arguments and output.
Watch = Callable[[str, Any, str, tuple[Any, ...], Any], None]


class _Watched(nnx.Module):
    """A layer that tells of its calls, and is in everything else the layer."""

    def __init__(self, layer: nnx.Module, path: str, watch: Watch) -> None:
        self.layer, self.path, self.watch = layer, path, watch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tell("__call__", args, kwargs)

    def attend(self, *args: Any, **kwargs: Any) -> Any:
        """The product of an embedding."""
        return self._tell("attend", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        layer = vars(self).get("layer")
        if layer is None:
            raise AttributeError(name)
        return getattr(layer, name)

    def _tell(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        y = getattr(self.layer, method)(*args, **kwargs)
        self.watch(self.path, self.layer, method, args, y)
        return y


def run_watched(
    model: nnx.Module,
    chosen: Callable[[str, nnx.Module], bool],
    watch: Watch,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls a copy of a model whose chosen layers are watched; the model itself is not changed.

    Args:
      model: the model.
      chosen: whether the layer at a path is watched.
      watch: told of each call, while it is traced if the model traces it.
      args, kwargs: what the model is called with.

    Returns:
      What the model returns.
    """
    copy = nnx.clone(model)

    def new(path: str, module: nnx.Module) -> nnx.Module:
        return _Watched(module, path, watch) if chosen(path, module) else module

    replace(copy, new)
    return copy(*args, **kwargs)  # type: ignore[operator]
