"""Recipes: how the operands of a product are held in 8 bits, under the names people know.

Layers, `quantize_dots` and training all quantize through these. So a recipe means the same codes
and scales everywhere.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxfp8._ops.int8_compute import check_compute
from jaxfp8._ops.terms import checked_terms
from jaxfp8._recipes.quantization import Axes, Granularity, Quantization
from jaxfp8._value.checks import as_dtype, as_index
from jaxfp8._value.dtypes import FLOAT8
from jaxfp8._value.errors import message, shown
from jaxfp8._value.joining import tiles_within
from jaxfp8._value.prepared import stored
from jaxfp8._value.qarray import QArray
from jaxfp8._value.spec import Shape, is_known
from jaxfp8._value.transposed import TransposedArray

_FP8 = Quantization()
_FP8_TENSOR = Quantization(granularity="tensor")
_INT8 = Quantization(dtype=jnp.int8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How weights and activations of a product are held in 8 bits, for inference.

    Attributes:
      name: its name in reports.
      weight: how weights are held; None leaves them as they are.
      activation: how activations are held; None leaves them as they are.
      rows: from how many rows M of a product activations are held so; with fewer rows they stay as
        they are. By default always.
      terms: None, or the number of int8 terms of each operand during the product, as by
        `jaxfp8.split_dot`. Operands are held in floats then.
      compute: None, or "int8": float and FP8 operands are rounded once more, to int8, as by
        `compute` of `jaxfp8.dot_general`. Gradients ignore this rounding.

    Raises:
      ValueError: `terms` is out of range, or is given beside `weight` or `activation`; `rows` is no
        number from 1, or is given without `activation`; `compute` is unknown, or is given while
        both operands are held in floats.

    Example:
      >>> import dataclasses, jax.numpy as jnp
      >>> FP8_BLOCK.quantize_weight(jnp.ones((256, 128)), contracting=(0,))
      QArray(float8_e4m3fn[256,128], scale=float32[2,1])
      >>> groups = Quantization(dtype=jnp.int8, granularity=(64, 1))
      >>> dataclasses.replace(FP8_W8A16, name="int8 in groups of 64", weight=groups).activation
    """

    name: str
    weight: Quantization | None = _FP8
    activation: Quantization | None = None
    rows: int = 1
    terms: int | None = None
    compute: str | None = None

    def __post_init__(self) -> None:
        """Refuses contradictory fields."""
        operation = "jaxfp8.Recipe"
        _check_rows(operation, self.rows)
        if self.rows > 1 and self.activation is None:
            got, needs = f"is {self.rows}", "activations stay as they are for any number of rows"
            remedy = "leave it out, or say in `activation` how they are held from there on"
            raise ValueError(message(operation, "`rows`", got, needs, remedy))
        check_compute(operation, self.compute)
        in_floats = (self.weight, self.activation) == (None, None)
        if self.compute is not None and in_floats:
            got, needs = f'is "{self.compute}"', "an operand that is held in 8 bits is computed so"
            remedy = "hold the weight in 8 bits, or leave it out"
            raise ValueError(message(operation, "`compute`", got, needs, remedy))
        if self.terms is None:
            return
        checked_terms(operation, self.terms)
        if not in_floats:
            got, needs = f"is {self.terms}", "operands that are made of terms are held in floats"
            remedy = "pass `weight=None, activation=None` as well"
            raise ValueError(message(operation, "`terms`", got, needs, remedy))

    def from_rows(self, rows: int) -> Recipe:
        """This recipe for products of so many rows or more; with fewer, activations stay wide.

        One weight serves both. Few rows wait for the weight to be read, and gain nothing by 8-bit
        activations; many rows wait for products, which are twice as fast in 8 bits. The choice is
        made by shapes, when a product is traced: a token is rounded otherwise alone than in a large
        batch. A recipe that leaves activations as they are, such as `FP8_W8A16`, never switches.

        Args:
          rows: the least M with activations in 8 bits. M is the product of the free axes of the
            activations, as the product is written: `vmap` and batch axes do not count.

        Returns:
          A recipe whose name says `rows`; reports show it in the path of a product.

        Raises:
          ValueError: `rows` is no number from 1, or the recipe leaves activations as they are.

        Example:
          >>> import jax.numpy as jnp
          >>> recipe = FP8_DYNAMIC.from_rows(16)
          >>> recipe.name, recipe.quantize_activation(jnp.ones((15, 8)), contracting=(1,)).dtype
          ('FP8_DYNAMIC.from_rows(16)', dtype('float32'))
          >>> recipe.quantize_activation(jnp.ones((16, 8)), contracting=(1,))
          QArray(float8_e4m3fn[16,8], scale=float32[16,1])
        """
        return dataclasses.replace(self, name=f"{self.name}.from_rows({rows})", rows=rows)

    def activation_of(self, rows: Any) -> Quantization | None:
        """How the activations of a product of so many rows are held; None leaves them as they are.

        Raises:
          ValueError: the recipe asks for a number of rows, and `rows` is a symbol.
        """
        if self.rows == 1:
            return self.activation
        if not is_known((rows,)):
            got, needs = f"is {rows}", f"{self.name} chooses by the number of rows"
            remedy = "export a program for each size, or use `jaxfp8.FP8_W8A16`"
            raise ValueError(message("jaxfp8.Recipe", "the number of rows", got, needs, remedy))
        return self.activation if rows >= self.rows else None

    def quantize_weight(
        self, w: ArrayLike, contracting: Axes, batch: Axes = ()
    ) -> QArray | jax.Array:
        """A weight in 8 bits; unchanged if the recipe leaves weights as they are."""
        if self.weight is None:
            return jnp.asarray(w)
        return self.weight.quantize(w, contracting, batch, operand="weight")

    def quantize_activation(
        self,
        x: ArrayLike,
        contracting: Axes,
        batch: Axes = (),
        *,
        scale: ArrayLike | None = None,
        zero_point: ArrayLike | None = None,
    ) -> QArray | jax.Array:
        """An activation in 8 bits; unchanged if the recipe leaves activations as they are."""
        x = jnp.asarray(x)
        how = self.activation_of(rows_of(x.shape, contracting, batch))
        if how is None:
            return x
        given = {"scale": scale, "zero_point": zero_point}
        return how.quantize(x, contracting, batch, operand="activation", **given)


def rows_of(shape: Shape, contracting: Axes, batch: Axes = ()) -> Any:
    """The rows M of a product with an activation of `shape`: its free axes together."""
    used = {axis % len(shape) for axis in (*contracting, *batch)} if shape else set()
    return math.prod(size for axis, size in enumerate(shape) if axis not in used)


def _check_rows(operation: str, rows: Any) -> None:
    if (as_index(rows) or 0) < 1:
        got, needs = f"is {shown(rows)}", "a number of rows from 1 is needed"
        remedy = "give a number such as 64"
        raise ValueError(message(operation, "`rows`", got, needs, remedy))


# A name is the dtype of the weights, then what becomes of the activations.
FP8_W8A16 = Recipe(name="FP8_W8A16")
INT8_W8A16 = Recipe(name="INT8_W8A16", weight=_INT8)
FP8_DYNAMIC = Recipe(name="FP8_DYNAMIC", activation=_FP8)
FP8_STATIC = Recipe(
    name="FP8_STATIC", weight=_FP8_TENSOR, activation=dataclasses.replace(_FP8_TENSOR, static=True)
)
FP8_BLOCK = Recipe(
    name="FP8_BLOCK",
    weight=Quantization(granularity=(128, 128)),
    activation=Quantization(granularity=(128, 1)),
)
INT8_DYNAMIC = Recipe(name="INT8_DYNAMIC", weight=_INT8, activation=_INT8)
INT8_ASYMMETRIC = Recipe(
    name="INT8_ASYMMETRIC", weight=_INT8, activation=dataclasses.replace(_INT8, symmetric=False)
)
FP8_AS_INT8 = Recipe(name="FP8_AS_INT8", activation=_INT8, compute="int8")
INT8_SPLIT = Recipe(name="INT8_SPLIT", weight=None, terms=3)


def check_recipe(operation: str, recipe: Any) -> None:
    """Refuses anything but a recipe for inference."""
    if not isinstance(recipe, Recipe):
        got, needs = f"is {shown(recipe)}", "a recipe such as `jaxfp8.FP8_DYNAMIC` is needed"
        remedy = "recipes of training go to `jaxfp8.fp8_dot_general` and what is made of it"
        raise TypeError(message(operation, "`recipe`", got, needs, remedy))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedScaling:
    """FP8 training with one scale per tensor, from the amax of earlier steps.

    `scale = amax / max(dtype) * 2^margin`, with `amax` the largest, or the most recent, of the last
    `amax_history_length` steps. The scale is therefore known before the tensor. A tensor saturates
    for a step if it outgrows the margin. The method and the layout of the history follow
    Transformer Engine and Flax.

    Attributes:
      amax_history_length: number of steps remembered.
      amax_compute: "max" or "most_recent".
      margin: powers of two to stay below the largest code.
      forward_dtype: dtype of activations and weights.
      gradient_dtype: dtype of the gradients that flow back.
      precision: accumulation of the forward product; DEFAULT lets a device be fast.
      backward_precision: accumulation of both backward products.
    """

    amax_history_length: int = 1024
    amax_compute: Literal["max", "most_recent"] = "max"
    margin: int = 0
    forward_dtype: DTypeLike = jnp.float8_e4m3fn
    gradient_dtype: DTypeLike = jnp.float8_e5m2
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT
    backward_precision: jax.lax.Precision = jax.lax.Precision.HIGHEST

    def __post_init__(self) -> None:
        """Checks the fields."""
        operation = "jaxfp8.DelayedScaling"
        _check_training_dtypes(operation, self)
        if (as_index(self.amax_history_length) or 0) < 1:
            got, needs = f"is {shown(self.amax_history_length)}", "one step at least is remembered"
            remedy = "give a number such as 1024"
            raise ValueError(message(operation, "`amax_history_length`", got, needs, remedy))
        _check_choice(operation, "amax_compute", self.amax_compute, ("max", "most_recent"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurrentScaling:
    """FP8 training with scales from the tensors of the same step; there is no state.

    Attributes:
      granularity: "tensor"; "channel": one scale for each index that is not summed over; or
        "block": 128 x 128 of a weight, and 128 along the sum of anything else. Except for a weight
        in blocks, a tensor that two products sum along different axes is then quantized for each.
      power_of_two: whether scales are rounded up to powers of two, which makes scaling exact;
        by default unless there is one for each tensor.
      forward_dtype: dtype of activations and weights.
      gradient_dtype: dtype of the gradients that flow back.
      precision: accumulation of the forward product; DEFAULT lets a device be fast.
      backward_precision: accumulation of both backward products.
      second_derivatives: whether gradients may be differentiated again. Both operands are then
        kept in floats, too, for the backward pass.
    """

    granularity: Literal["tensor", "channel", "block"] = "tensor"
    power_of_two: bool | None = None
    forward_dtype: DTypeLike = jnp.float8_e4m3fn
    gradient_dtype: DTypeLike = jnp.float8_e5m2
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT
    backward_precision: jax.lax.Precision = jax.lax.Precision.HIGHEST
    second_derivatives: bool = False

    def __post_init__(self) -> None:
        """Checks the fields and settles the default."""
        operation = "jaxfp8.CurrentScaling"
        _check_training_dtypes(operation, self)
        _check_choice(operation, "granularity", self.granularity, ("tensor", "channel", "block"))
        if self.power_of_two is None:
            object.__setattr__(self, "power_of_two", self.granularity != "tensor")

    def quantization(self, dtype: DTypeLike, is_weight: bool = False) -> Quantization:
        """How a tensor is held: as `forward_dtype` or `gradient_dtype`."""
        of_blocks = FP8_BLOCK.weight if is_weight else FP8_BLOCK.activation
        assert of_blocks is not None
        return Quantization(
            dtype=dtype,
            granularity=of_blocks.granularity if self.granularity == "block" else self.granularity,
            scale_dtype=jnp.float8_e8m0fnu if self.power_of_two else jnp.float32,
        )


TrainingRecipe = DelayedScaling | CurrentScaling


def check_training_recipe(operation: str, recipe: Any, remedy: str) -> None:
    """Refuses anything but a recipe for training; `remedy` says where those for inference go."""
    if not isinstance(recipe, TrainingRecipe):
        got, needs = f"is {shown(recipe)}", "DelayedScaling or CurrentScaling is needed"
        raise TypeError(message(operation, "`recipe`", got, needs, remedy))


def _check_training_dtypes(operation: str, recipe: Any) -> None:
    for name in ("forward_dtype", "gradient_dtype"):
        dtype = as_dtype(operation, name, getattr(recipe, name), FLOAT8)
        object.__setattr__(recipe, name, dtype)


def _check_choice(operation: str, name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        needs, remedy = f"{' or '.join(map(repr, choices))} is needed", "choose one of these"
        raise ValueError(message(operation, f"`{name}`", f"is {shown(value)}", needs, remedy))


def recipe_for(
    q: QArray | TransposedArray, recipe: Recipe, contracting: Shape, batch: Shape
) -> Recipe:
    """`recipe` for activations, with the weight's part derived from `q` if it differs."""
    own = quantization_of(q, contracting, batch)
    for known in (recipe, FP8_W8A16, INT8_W8A16):
        alike = (known.activation, known.compute) == (recipe.activation, recipe.compute)
        if alike and _same(known.weight, own, q, contracting, batch):
            return known
    name = f"{recipe.name}, weight {own.dtype} {_worded(own.granularity)}"
    return dataclasses.replace(recipe, name=name, weight=own)


def quantization_of(q: QArray | TransposedArray, contracting: Shape, batch: Shape) -> Quantization:
    """The weight's part of a recipe, from a weight; the finest granularity if none fits."""
    codes = stored(q)
    common: dict[str, Any] = {
        "dtype": codes.qvalue.dtype,
        "symmetric": codes.zero_point is None,
        "scale_dtype": codes.scale.dtype,
    }
    free = [axis for axis in range(q.ndim) if axis not in {*contracting, *batch}]
    sizes = q.tile_sizes
    pair = tuple(sizes[max(axes)] if axes else None for axes in (contracting, free))
    kinds: tuple[Any, ...] = ("tensor", "channel", pair)
    made = [Quantization(granularity=kind, **common) for kind in kinds]
    fitting = [how for how in made if _tiles(how, q, contracting, batch) == tiles_within(q)]
    return (fitting or made)[0 if fitting else -1]


def _same(
    how: Quantization | None, own: Quantization, q: Any, contracting: Shape, batch: Shape
) -> bool:
    if how is None or (how.dtype, how.symmetric) != (own.dtype, own.symmetric):
        return False
    return _tiles(how, q, contracting, batch) == tiles_within(q)


def _tiles(how: Quantization, q: Any, contracting: Shape, batch: Shape) -> Shape:
    tiles = how.tiles(q.shape, contracting, batch)
    return tuple(min(tiles.get(axis, size), size) for axis, size in enumerate(q.shape))


def _worded(granularity: Granularity) -> str:
    if isinstance(granularity, str):
        return f"per {granularity}"
    return "in tiles of " + " x ".join(map(str, granularity))
