"""The products of FP8 training in nnx: modules for the argument `dot_general` of layers.

Their scaling state is kept like batch statistics: the forward pass updates its variables in place,
and gradients and optimisers ignore them. The forward pass does not see the gradient of the output.
So the backward pass scales it by its own amax.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.typing import ArrayLike, DTypeLike

from jaxfp8._ops import einsum
from jaxfp8._recipes.recipes import DelayedScaling, TrainingRecipe, check_training_recipe
from jaxfp8._recipes.scaling import Scaling, ScalingState
from jaxfp8._recipes.training import dot_and_scalings
from jaxfp8._recipes.training_ragged import ragged_dot_and_scalings
from jaxfp8._value import compat
from jaxfp8._value.errors import message
from jaxfp8._value.no_gradient import undifferentiated
from jaxfp8._value.spec import DimensionNumbers, Shape
from jaxfp8.nnx._grouped import GroupedLinear


class ScalingStat(nnx.Variable):
    """A scale, or a history of largest magnitudes, of delayed scaling."""


class Fp8Codes(nnx.Variable):
    """A weight in 8 bits, while `encoded_weights` is in force."""


class Fp8DotGeneral(nnx.Module):
    """The product of FP8 training, for any layer of nnx with an argument `dot_general`.

    Forward and both backward products run on 8-bit operands. With `DelayedScaling` the scales of
    input and kernel come from the amax of earlier steps, kept in four variables with Flax's names.
    Each call in training is a step of the history. The gradient is scaled by its own amax, since
    only gradients leave a backward pass. Each layer needs a module of its own.

    Args:
      recipe: `jaxfp8.DelayedScaling`, or `jaxfp8.CurrentScaling` without variables.
      path: the path of the layer in its model, the name of its scope.
      stack: leading axes of a stacked layer, as `nnx.vmap` makes it.

    Attributes:
      use_running_average: whether the history stays as it is, for evaluation; `model.eval()` and
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
        remedy = "recipes of inference go to `jaxfp8.nnx.quantize`"
        check_training_recipe(f"jaxfp8.nnx.{type(self).__name__}", recipe, remedy)
        self.recipe, self.path = recipe, path
        self.use_running_average = False
        if isinstance(recipe, DelayedScaling):
            first = ScalingState.init(recipe)
            self.input_scale, self.input_amax_history = _variables(first.input, stack)
            self.kernel_scale, self.kernel_amax_history = _variables(first.kernel, stack)

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
        with self._scope():
            return self._dot(
                dot_and_scalings,
                jnp.asarray(lhs),
                jnp.asarray(rhs),
                dimension_numbers,
                preferred_element_type=preferred_element_type,
                out_sharding=out_sharding,
            )

    def _scope(self) -> Any:
        return jax.named_scope(self.path) if self.path else contextlib.nullcontext()

    def _dot(self, multiply: Callable[..., tuple[jax.Array, Any]], *args: Any, **kw: Any) -> Any:
        """A product with the state, which then has its next scalings."""
        state = self.state()
        known: dict[str, Any] = {"recipe": self.recipe, "evaluates": self.use_running_average}
        if hasattr(self, "codes"):
            known["rhs_codes"] = self.codes.get_value()
        y, scalings = multiply(*args, state, **known, **kw)
        if state is not None and not self.use_running_average:
            of_input, of_kernel = scalings
            _enter(self.input_scale, self.input_amax_history, of_input)
            _enter(self.kernel_scale, self.kernel_amax_history, of_kernel)
        return y

    def state(self) -> ScalingState | None:
        """The scaling before the next step; None for `CurrentScaling`."""
        if not isinstance(self.recipe, DelayedScaling):
            return None
        return ScalingState(
            input=_scaling(self.input_scale, self.input_amax_history),
            kernel=_scaling(self.kernel_scale, self.kernel_amax_history),
            output_grad=None,
        )


def _enter(scale: ScalingStat, amax_history: ScalingStat, new: Scaling | None) -> None:
    assert new is not None  # there is one beside a state
    scale[...], amax_history[...] = new.scale, new.amax_history


def _variables(first: Scaling, stack: Shape) -> tuple[ScalingStat, ScalingStat]:
    """Scale and history of a tensor before the first step, for each layer of a stack."""
    scale, history = (
        ScalingStat(jnp.broadcast_to(value, (*stack, *value.shape)))
        for value in (first.scale, first.amax_history)
    )
    return scale, history


def _scaling(scale: ScalingStat, amax_history: ScalingStat) -> Scaling:
    """The scaling of a tensor as its variables hold it; a gradient of it is refused."""
    return Scaling(
        scale=undifferentiated(_NO_GRADIENT, scale[...]),
        amax_history=undifferentiated(_NO_GRADIENT, amax_history[...]),
    )


_NO_GRADIENT = message(
    "jaxfp8.nnx.Fp8DotGeneral",
    "the scaling state",
    "is differentiated",
    "each step overwrites it, and an optimiser would decay it",
    "take gradients of `nnx.Param` alone, as `nnx.grad` does by default, and give "
    "`nnx.Optimizer` `wrt=nnx.Param`",
)


class Fp8Einsum(Fp8DotGeneral):
    """The same for the argument `einsum_op` of `flax.nnx.Einsum`.

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
        parsed = einsum.parse(operation, subscripts, lhs.shape, rhs.shape)
        asked = compat.reordered(out_sharding, parsed.order)
        y = super().__call__(lhs, rhs, parsed.numbers, precision, preferred_element_type, asked)
        return compat.sharded(y.transpose(parsed.order), out_sharding)


class Fp8RaggedDot(Fp8DotGeneral):
    """The same for the argument `ragged_dot` of `GroupedLinear`, the experts of `MoE`.

    Example:
      >>> import jax.numpy as jnp, jaxfp8.nnx
      >>> from flax import nnx
      >>> product = jaxfp8.nnx.Fp8RaggedDot(jaxfp8.CurrentScaling())
      >>> layer = jaxfp8.nnx.GroupedLinear(2, 8, 4, ragged_dot=product, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((5, 8)), jnp.array([3, 2])).shape
      (5, 4)
    """

    def __call__(  # type: ignore[override]
        self,
        lhs: ArrayLike,
        rhs: ArrayLike,
        group_sizes: ArrayLike,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> jax.Array:
        """The ragged dot of rows `lhs` and weights `rhs`; see `jaxfp8.fp8_ragged_dot`."""
        del precision
        asked = {"preferred_element_type": preferred_element_type}
        with self._scope():
            return self._dot(ragged_dot_and_scalings, lhs, rhs, group_sizes, **asked)


# The default products of Flax's layers.
USUAL: dict[str, Any] = {
    "dot_general": jax.lax.dot_general,
    "dot_general_cls": None,
    "einsum_op": jnp.einsum,
    "ragged_dot": jax.lax.ragged_dot,
    "promote_dtype": promote_dtype,
}
# By kind of layer, the attribute for its product, and the product of FP8 training.
SLOTS: dict[type[nnx.Module], tuple[str, type[Fp8DotGeneral]]] = {
    nnx.Linear: ("dot_general", Fp8DotGeneral),
    nnx.LinearGeneral: ("dot_general", Fp8DotGeneral),
    nnx.Einsum: ("einsum_op", Fp8Einsum),
    GroupedLinear: ("ragged_dot", Fp8RaggedDot),
}


def training_product(layer: nnx.Module) -> Fp8DotGeneral | None:
    """The product of a layer in FP8 training; None for other layers."""
    slot, _ = SLOTS.get(type(layer), ("", None))
    product = getattr(layer, slot, None) if slot else None
    return product if isinstance(product, Fp8DotGeneral) else None


def stop_training_in_fp8(layer: nnx.Module) -> None:
    """Restores the default product of a layer, in place."""
    slot, _ = SLOTS[type(layer)]
    setattr(layer, slot, nnx.static(USUAL[slot]))
