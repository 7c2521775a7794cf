"""The base class of the 8-bit layers of nnx: a weight in 8 bits, and the product with it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from jaxfp8._recipes.recipe_dot import recipe_dot_general
from jaxfp8._recipes.recipes import FP8_W8A16, Recipe, recipe_for
from jaxfp8._value.errors import message
from jaxfp8._value.no_gradient import constant_codes
from jaxfp8._value.prepared import PreparedArray, stored
from jaxfp8._value.qarray import QArray, adopt, check_shapes
from jaxfp8._value.spec import DimensionNumbers, Shape
from jaxfp8._value.transposed import TransposedArray
from jaxfp8.nnx._products import USUAL, training_product
from jaxfp8.nnx._variables import (
    Held,
    QParam,
    as_qarray,
    check_held,
    hold,
    holding,
    prepared,
    release,
    restored,
    why_not_prepared,
)


class EightBitLayer(nnx.Module):
    """An nnx layer with a weight in 8 bits.

    Args:
      *arguments, **settings: those of the layer of Flax.
      recipe: how its weight and input are held.
      layer: such a layer, in place of its arguments.
      path: its place in its model.
      scale: of the input, for a static recipe.

    Attributes:
      recipe: how weight and input are held.
      path: the path of the layer in its model, the name of its scope; "" if unknown.
      input_scale: scale of the input of a static recipe, else None.
    """

    recipe: Recipe
    path: str
    tiles: tuple[int | None, ...] | None
    order: Shape | None
    prepared: int | None
    input_scale: Any
    bias: Any
    dtype: Any
    param_dtype: Any

    FLOAT: ClassVar[Any]
    WEIGHT: ClassVar[str] = "kernel"
    __signature__: ClassVar[inspect.Signature]

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if hasattr(cls, "FLOAT"):
            cls.__signature__ = _signature(cls)

    def __init__(
        self,
        *arguments: Any,
        recipe: Recipe = FP8_W8A16,
        layer: nnx.Module | None = None,
        path: str = "",
        scale: Any = None,
        **settings: Any,
    ) -> None:
        made = self.FLOAT(*arguments, **settings) if layer is None else layer
        self._adopt(made, recipe, path, scale)

    def _adopt(self, layer: nnx.Module, recipe: Recipe, path: str, scale: Any) -> None:
        """Takes over the settings and the bias of a float layer, and its weight in 8 bits."""
        product = training_product(layer)
        for name, value in vars(layer).items():
            if not name.startswith("_pytree__") and name not in (self.WEIGHT, "bias"):
                setattr(
                    self, name, value if product is None or value is not product else USUAL[name]
                )
        self.recipe, self.path = recipe, path
        weight = getattr(layer, self.WEIGHT)
        # The dtype of the computation: parameters may have been cast since the layer was made.
        own = [p.get_value().dtype for p in (weight, getattr(layer, "bias", None)) if p is not None]
        with jax.numpy_dtype_promotion("standard"):
            self.param_dtype = jnp.result_type(*own)
        self._keep(hold(weight, recipe, *self.axes_of(self, len(weight.get_value().shape))))
        self.input_scale = nnx.data(None if scale is None else QParam(jnp.asarray(scale)))
        if hasattr(layer, "bias"):
            self.bias = nnx.data(layer.bias)

    def _keep(self, held: Held) -> None:
        """Stores the weight."""
        setattr(self, self.WEIGHT, held.codes)
        setattr(self, f"{self.WEIGHT}_scale", nnx.data(held.scale))
        setattr(self, f"{self.WEIGHT}_zero_point", nnx.data(held.zero_point))
        self.tiles, self.order, self.prepared = held.tiles, held.order, held.prepared

    def held(self) -> Held:
        """The weight as this layer stores it."""
        names = (self.WEIGHT, f"{self.WEIGHT}_scale", f"{self.WEIGHT}_zero_point")
        codes, scale, zero_point = (getattr(self, name) for name in names)
        return Held(
            codes=codes,
            scale=scale,
            zero_point=zero_point,
            tiles=self.tiles,
            order=self.order,
            prepared=self.prepared,
        )

    def why_not_prepared(self) -> str:
        """Why `jaxfp8.nnx.prepare` does not change the layer; "" if it does."""
        axes, rank = self._weight_axes()[0], len(self.shape_of(self))
        return why_not_prepared(self.held(), axes, rank, self.recipe)

    def prepare(self) -> None:
        """Prepares the weight, in place; see `jaxfp8.prepare`."""
        (axis,) = self._weight_axes()[0]
        self._keep(prepared(self.held(), axis - len(self.shape_of(self))))

    def unprepare(self) -> None:
        """Lays a prepared weight out as it was, in place."""
        self._keep(restored(self.held()))

    @property
    def weight(self) -> QArray | TransposedArray | PreparedArray | jax.Array:
        """The weight, ready for `jaxfp8.dot_general`; a `QArray` may be assigned."""
        held = self.held()
        check_held(held, self.shape_of(self), self._operation(), f"`{self.WEIGHT}`")
        remedy = "differentiate with respect to `nnx.Param`, as `nnx.grad` does by default"
        return constant_codes(as_qarray(held), self._operation(), self.WEIGHT, remedy)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; `layer.weight = q` puts an 8-bit array in place of the weight."""
        if name == "weight":
            self._set_weight(value)
        else:
            super().__setattr__(name, value)

    def _set_weight(self, value: Any) -> None:
        """Takes an 8-bit weight as it lies; `recipe` then says how it is held."""
        operation, operand = self._operation(), f"`{self.WEIGHT}`"
        q, shape = adopt(value), self.whole_shape()
        if not isinstance(q, QArray | TransposedArray):
            got, needs = f"is assigned a {type(q).__name__}", "a QArray is needed"
            remedy = "quantize it with `layer.recipe.quantize_weight(w, contracting)`"
            raise TypeError(message(operation, operand, got, needs, remedy))
        check_shapes(stored(q), operation, self.WEIGHT)
        if tuple(q.shape) != shape:
            got, needs = f"is assigned an array of {tuple(q.shape)}", f"{shape} is needed"
            turned = q.ndim > 1 and q.mT.shape == shape
            remedy = "assign `q.mT`, which moves nothing" if turned else "make another layer"
            raise ValueError(message(operation, operand, got, needs, remedy))
        self._keep(holding(self.held(), q))
        self.recipe = recipe_for(q, self.recipe, *self.axes_of(self, q.ndim))

    def whole_shape(self) -> Shape:
        """Shape of the weight, stacked or not, as its axes are read."""
        held, own = self.held(), self.shape_of(self)
        if held.prepared is not None:
            return as_qarray(held).shape
        codes: Any = held.codes.get_value()
        stack = tuple(codes.shape)[: len(codes.shape) - len(own)]
        return (*stack, *own)

    @classmethod
    def axes_of(cls, layer: Any, rank: int) -> tuple[Shape, Shape]:
        """Contracted and batch axes of a weight of a rank; stacked layers have the first axes.

        Args:
          layer: one of this class or of its class of Flax.
          rank: number of axes of its weight.
        """
        contracting, batch = cls._weight_axes(layer)
        stack = rank - len(cls.shape_of(layer))
        shared = (*range(stack), *(stack + axis for axis in batch))
        return tuple(stack + axis for axis in contracting), shared

    @classmethod
    def of(
        cls, layer: nnx.Module, recipe: Recipe = FP8_W8A16, *, path: str = "", scale: Any = None
    ) -> Any:
        """The 8-bit twin of a layer of Flax; a bias is shared with it.

        Args:
          layer: the float layer, stacked or not.
          recipe: how its weight and input are held.
          path: its place in its model.
          scale: of the input, for a static recipe.

        Raises:
          TypeError: `layer` is of another kind.
        """
        if not isinstance(layer, cls.FLOAT):
            got, needs = f"is of type {type(layer).__name__}", f"a {cls.FLOAT.__name__} is needed"
            remedy = "use the class of `jaxfp8.nnx` that has the name of the layer's"
            raise TypeError(message(f"jaxfp8.nnx.{cls.__name__}.of", "`layer`", got, needs, remedy))
        return cls(recipe=recipe, layer=layer, path=path, scale=scale)

    # Arguments of the layer of Flax.
    _POSITIONAL: ClassVar[tuple[str, ...]]
    _KEYWORDS: ClassVar[tuple[str, ...]] = ()

    def to_float(self) -> Any:
        """The layer of Flax with the dequantized weight and the same bias."""
        arguments = [getattr(self, name) for name in self._POSITIONAL]
        keywords = {name: getattr(self, name) for name in self._KEYWORDS}
        made: Any = nnx.eval_shape(lambda: self.FLOAT(*arguments, **keywords, rngs=nnx.Rngs(0)))
        own = {"recipe", "path", "tiles", "order", "prepared", "input_scale", "bias"}
        own |= {f"{self.WEIGHT}{suffix}" for suffix in ("", "_scale", "_zero_point")}
        for name, value in vars(self).items():
            if not name.startswith("_pytree__") and name not in own:
                setattr(made, name, value)
        setattr(made, self.WEIGHT, release(self.held(), self.param_dtype))
        if hasattr(self, "bias"):
            made.bias = nnx.data(self.bias)
        return made

    def _weight_axes(self) -> tuple[Shape, Shape]:
        """Contracted and batch axes of an unstacked weight."""
        raise NotImplementedError

    @staticmethod
    def shape_of(layer: Any) -> Shape:
        """Shape of the weight of an unstacked layer."""
        raise NotImplementedError

    def cast(self, x: ArrayLike) -> jax.Array:
        """An input in the dtype of the computation: `dtype`, or the promoted one."""
        x = jnp.asarray(x)
        if self.dtype is not None:
            return x.astype(self.dtype)
        return x.astype(jnp.promote_types(x.dtype, self.param_dtype))

    def static_scale(self) -> jax.Array | None:
        """The scale of the input of a static recipe."""
        return None if self.input_scale is None else self.input_scale[...]

    def _product(
        self,
        x: jax.Array,
        numbers: DimensionNumbers,
        bias: jax.Array | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        return recipe_dot_general(
            x,
            self.weight,
            numbers,
            self.recipe,
            scale=self.static_scale(),
            bias=bias,
            precision=getattr(self, "precision", None),
            preferred_element_type=getattr(self, "preferred_element_type", None),
            out_sharding=out_sharding,
        )

    def _scope(self) -> Any:
        return jax.named_scope(self.path) if self.path else contextlib.nullcontext()

    def _check_sizes(self, x: jax.Array, axes: Sequence[int], sizes: Sequence[int]) -> None:
        """Refuses an input of another feature size."""
        in_range = max([-a if a < 0 else a + 1 for a in axes], default=0) <= x.ndim
        if in_range and tuple(x.shape[axis] for axis in axes) == tuple(sizes):
            return
        got, needs = f"has shape {x.shape}", f"size {_list(sizes)} on axis {_list(axes)} is needed"
        remedy = "apply the layer to what it was made for"
        raise ValueError(message(self._operation(), "the input", got, needs, remedy))

    def _operation(self) -> str:
        at = f" at {self.path}" if self.path else ""
        return f"jaxfp8.nnx.{type(self).__name__}{at}"


def _signature(cls: type[EightBitLayer]) -> inspect.Signature:
    """The signature of a layer: the arguments of Flax's layer, and ours by keyword."""
    _, *own = inspect.signature(cls.__init__).parameters.values()
    if cls.__init__ is EightBitLayer.__init__:
        ours = [one for one in own if one.kind is inspect.Parameter.KEYWORD_ONLY]
        _, *theirs = inspect.signature(cls.FLOAT.__init__).parameters.values()
        own = sorted([*theirs, *ours], key=lambda one: one.kind)  # `**kwargs` stay last
    return inspect.Signature(own)


def _list(items: Sequence[int]) -> str:
    return ", ".join(map(str, items))
