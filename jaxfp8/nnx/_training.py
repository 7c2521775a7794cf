"""FP8 training in the layers of nnx: modules that go where a layer takes a `dot_general`.

Their scaling state is kept as batch statistics are: in variables that the forward pass updates in
place, and that no gradient and no optimiser touches. What the forward pass does not see, the
gradient of the output, is scaled by its own amax in the backward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from jaxfp8 import _compat, _einsum
from jaxfp8._dimensions import normalise
from jaxfp8._errors import message
from jaxfp8._recipes import CurrentScaling, DelayedScaling, TrainingRecipe
from jaxfp8._scaling import Scaling, ScalingState, advance
from jaxfp8._spec import DimensionNumbers, Shape
from jaxfp8._training import fp8_dot_general
from jaxfp8.nnx._base import EightBitLayer
from jaxfp8.nnx._layers import TWINS
from jaxfp8.nnx._quantize import Where, selector, why_unfit
from jaxfp8.nnx._replace import replace

_OPERATION = "jaxfp8.nnx.fp8_training"


class ScalingStat(nnx.Variable):
    """A scale, or a history of largest magnitudes, of delayed scaling."""


class Fp8DotGeneral(nnx.Module):
    """The product of FP8 training, for any layer of nnx that takes a `dot_general`.

    Forward and both backward products run on 8-bit operands. With `DelayedScaling` the scales of
    input and kernel come from the amax of earlier steps, kept in four variables with Flax's names;
    each call in training is a step of the history. The gradient is scaled by its own amax, as
    nothing leaves a backward pass but gradients. One such module belongs to one layer.

    Args:
      recipe: `jaxfp8.DelayedScaling` or `jaxfp8.CurrentScaling`, which has no variables.
      path: the layer's place in its model, the name of its scope.
      stack: leading axes of a layer that is stacked, as by `nnx.vmap`.

    Attributes:
      use_running_average: whether the history stays as it is, as in evaluation; `model.eval()` and
        `model.train()` set it.

    Example:
      >>> import jax.numpy as jnp, jaxfp8.nnx
      >>> from flax import nnx
      >>> layer = nnx.Linear(8, 4, dot_general=jaxfp8.nnx.Fp8DotGeneral(), rngs=nnx.Rngs(0))
      >>> y = layer(jnp.full((2, 8), 3.0))
      >>> float(layer.dot_general.input_amax_history[0])
      3.0
    """

    def __init__(
        self,
        recipe: TrainingRecipe | None = None,
        *,
        path: str = "",
        stack: Shape = (),
    ) -> None:
        recipe = DelayedScaling() if recipe is None else recipe
        if not isinstance(recipe, DelayedScaling | CurrentScaling):
            got, needs = f"is {recipe!r}", "DelayedScaling or CurrentScaling is needed"
            remedy = "recipes of inference go to `jaxfp8.nnx.quantize`"
            raise TypeError(
                message(f"jaxfp8.nnx.{type(self).__name__}", "`recipe`", got, needs, remedy)
            )
        self.recipe, self.path = recipe, path
        self.use_running_average = False
        if isinstance(recipe, DelayedScaling):
            first = ScalingState.init(recipe)
            for tensor in ("input", "kernel"):
                for name in ("scale", "amax_history"):
                    value = getattr(getattr(first, tensor), name)
                    whole = jnp.broadcast_to(value, (*stack, *value.shape))
                    setattr(self, f"{tensor}_{name}", ScalingStat(whole))

    def __call__(
        self,
        lhs: ArrayLike,
        rhs: ArrayLike,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """The product, as `jax.lax.dot_general`; the recipe settles the precision.

        Args:
          lhs: activations.
          rhs: weights in the dtype of the computation.
          dimension_numbers: as in `jax.lax.dot_general`.
          precision: not used.
          preferred_element_type: output dtype.
          out_sharding: sharding of the output, as of `jax.lax.dot_general`.
        """
        del precision
        with jax.named_scope(self.path) if self.path else contextlib.nullcontext():
            y = self._dot(
                jnp.asarray(lhs), jnp.asarray(rhs), dimension_numbers, preferred_element_type
            )
        return _compat.sharded(y, out_sharding)

    def _dot(
        self, lhs: jax.Array, rhs: jax.Array, numbers: DimensionNumbers, dtype: DTypeLike | None
    ) -> jax.Array:
        state = self._state() if isinstance(self.recipe, DelayedScaling) else None
        y = fp8_dot_general(
            lhs, rhs, numbers, state, recipe=self.recipe, preferred_element_type=dtype
        )
        if state is not None and not self.use_running_average:
            self._step("input", lhs, state.input)
            self._step("kernel", rhs, state.kernel)
        return y

    def _state(self) -> ScalingState:
        input_, kernel = (
            Scaling(
                scale=jax.lax.stop_gradient(getattr(self, f"{tensor}_scale")[...]),
                amax_history=jax.lax.stop_gradient(getattr(self, f"{tensor}_amax_history")[...]),
            )
            for tensor in ("input", "kernel")
        )
        return ScalingState(input=input_, kernel=kernel, output_grad=None)

    def _step(self, tensor: str, x: jax.Array, old: Scaling) -> None:
        """Enter the amax of a tensor into its history."""
        assert isinstance(self.recipe, DelayedScaling)
        constant = jax.lax.stop_gradient(x)
        new = advance(self.recipe, self.recipe.forward_dtype, constant, old)
        getattr(self, f"{tensor}_scale")[...] = new.scale
        getattr(self, f"{tensor}_amax_history")[...] = new.amax_history


class Fp8Einsum(Fp8DotGeneral):
    """The same for `flax.nnx.Einsum`, which takes it as `einsum_op`.

    Example:
      >>> import jax.numpy as jnp, jaxfp8.nnx
      >>> from flax import nnx
      >>> op = jaxfp8.nnx.Fp8Einsum(jaxfp8.CurrentScaling())
      >>> layer = nnx.Einsum("btd,dhk->bthk", (8, 2, 4), einsum_op=op, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((3, 5, 8))).shape
      (3, 5, 2, 4)
    """

    def __call__(  # type: ignore[override]
        self,
        subscripts: str,
        lhs: ArrayLike,
        rhs: ArrayLike,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """The einsum of activations `lhs` and weights `rhs`; see `Fp8DotGeneral`."""
        lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
        operation = "jaxfp8.nnx.Fp8Einsum"
        parsed = _einsum.parse(operation, subscripts, lhs.ndim, rhs.ndim)
        numbers = normalise(operation, parsed.dimension_numbers, (lhs.shape, rhs.shape))
        y = super().__call__(lhs, rhs, numbers, precision, preferred_element_type)
        y = y.transpose(parsed.order)
        return _compat.sharded(y, out_sharding)


def fp8_training(
    model: nnx.Module, recipe: TrainingRecipe | None = None, *, where: Where = None
) -> Sequence[str]:
    """Makes the layers of a live model train in FP8, in place; parameters stay as they are.

    Every `nnx.Linear`, `LinearGeneral` and `Einsum` gets a product of its own, `Fp8DotGeneral` or
    `Fp8Einsum`; the model's structure, parameters and optimiser go on as before. `nnx.jit`,
    `nnx.grad`, `nnx.remat`, `nnx.scan` and `nnx.vmap` carry the scaling state as they do batch
    statistics; `nnx.Optimizer(model, tx, wrt=nnx.Param)` leaves it alone.

    Args:
      model: changed in place.
      recipe: `jaxfp8.DelayedScaling` (default) or `jaxfp8.CurrentScaling`.
      where: which layers: a function of path and module, or a regular expression that is searched
        in the path. By default all.

    Returns:
      The paths of the layers that changed.

    Raises:
      TypeError: `recipe` is one for inference.
      ValueError: a chosen layer has 8-bit weights, or no layer is chosen.

    Example:
      >>> import jaxfp8.nnx
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.relu)
      >>> jaxfp8.nnx.fp8_training(model, jaxfp8.CurrentScaling())
      ['layers/0']
    """
    selects = selector(_OPERATION, where)
    chosen: list[tuple[str, Any]] = []

    def note(path: str, module: nnx.Module) -> nnx.Module:
        if isinstance(module, EightBitLayer) and selects(path, module):
            got, needs = f"`{path}` has 8-bit weights", "training needs float master weights"
            remedy = "choose others in `where`, or undo it with `jaxfp8.nnx.dequantize`"
            raise ValueError(message(_OPERATION, "layer", got, needs, remedy))
        if type(module) in _SLOTS and selects(path, module) and not why_unfit(module):
            chosen.append((path, module))
        return module

    replace(model, note)
    if not chosen:
        got, needs = "has no layer to change", "an nnx.Linear, LinearGeneral or Einsum is needed"
        remedy = "name one in `where`; those with a `dot_general` of their own are passed over"
        raise ValueError(message(_OPERATION, "`model`", got, needs, remedy))
    for path, layer in chosen:
        slot, kind = _SLOTS[type(layer)]
        stack = layer.kernel[...].shape[: layer.kernel[...].ndim - _rank(layer)]
        setattr(layer, slot, nnx.data(kind(recipe, path=path, stack=stack)))
    return [path for path, _ in chosen]


_SLOTS: dict[type[nnx.Module], tuple[str, type[Fp8DotGeneral]]] = {
    nnx.Linear: ("dot_general", Fp8DotGeneral),
    nnx.LinearGeneral: ("dot_general", Fp8DotGeneral),
    nnx.Einsum: ("einsum_op", Fp8Einsum),
}


def _rank(layer: Any) -> int:
    """Rank of the kernel of a layer that is not stacked."""
    return TWINS[type(layer)].rank_of(layer)
