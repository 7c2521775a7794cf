"""FP8 training in the layers of Flax: classes for their argument `dot_general_cls`.

Class names, variable names, shapes and arithmetic of the state are those of Flax. So a checkpoint
of Flax's classes continues with these, and the other way round.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT, Fp8DotGeneralBase, fp32_max_grad
from jax.typing import ArrayLike, DTypeLike

from jaxfp8._ops import einsum
from jaxfp8._recipes.recipes import DelayedScaling, TrainingRecipe, check_training_recipe
from jaxfp8._recipes.scaling import Scaling, ScalingState, check_scalings
from jaxfp8._recipes.training import fp8_dot_general
from jaxfp8._recipes.training_ragged import fp8_ragged_dot
from jaxfp8._recipes.weight_codes import WeightCodes, encode_weight
from jaxfp8._value import compat
from jaxfp8._value.errors import message
from jaxfp8._value.spec import DimensionNumbers

# The collection of codes of weights, for the steps that encode them once.
CODES = "fp8_codes"
# Arguments of layers for the class of their product.
PRODUCTS = ("dot_general_cls", "ragged_dot_cls")


class _Fp8(nn.Module):
    """Holds the state of delayed scaling in Flax's six variables.

    Attributes:
      recipe: `DelayedScaling`, or `CurrentScaling` without variables.
    """

    recipe: TrainingRecipe = DelayedScaling()

    def setup(self) -> None:
        """Makes the variables, or finds the given ones."""
        remedy = "recipes of inference go with the layers of `jaxfp8.linen`"
        check_training_recipe(self._operation, self.recipe, remedy)
        self.state = self._variables() if isinstance(self.recipe, DelayedScaling) else None

    @property
    def _operation(self) -> str:
        return f"jaxfp8.linen.{type(self).__name__}"

    def _variables(self) -> ScalingState:
        """The state; its variables are Flax's own."""
        first = ScalingState.init(self.recipe)  # type: ignore[arg-type]
        return ScalingState(
            input=self._scaling("input", first.input),
            kernel=self._scaling("kernel", first.kernel),
            output_grad=self._scaling("output_grad", first.output_grad),
        )

    def _scaling(self, tensor: str, first: Scaling | None) -> Scaling:
        assert first is not None
        return Scaling(
            scale=self._variable(f"{tensor}_scale", first.scale),
            amax_history=self._variable(f"{tensor}_amax_history", first.amax_history),
        )

    def _variable(self, name: str, first: jax.Array) -> jax.Array:
        kind, initial = OVERWRITE_WITH_GRADIENT, first
        missing = not self.has_variable(kind, name)
        if missing and not self.is_mutable_collection(kind):
            needs = f"DelayedScaling keeps `{name}` there"
            remedy = "pass all of what `init` returned, or take `jaxfp8.CurrentScaling()`"
            got = "lacks it"
            raise ValueError(message(self._operation, f"collection `{kind}`", got, needs, remedy))
        value = self.variable(kind, name, lambda: initial).value
        if jnp.shape(value) != first.shape:
            got, needs = f"has shape {jnp.shape(value)}", f"the recipe needs {first.shape}"
            remedy = "use the `amax_history_length` it was made with, or map layers over it"
            raise ValueError(message(self._operation, f"`{name}`", got, needs, remedy))
        return value

    def _dot(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        numbers: DimensionNumbers,
        dtype: DTypeLike,
        out_sharding: Any = None,
    ) -> jax.Array:
        return fp8_dot_general(
            lhs,
            rhs,
            numbers,
            self.state,
            recipe=self.recipe,
            preferred_element_type=dtype,
            out_sharding=out_sharding,
            rhs_codes=self._codes(rhs, numbers),
        )

    def _codes(self, rhs: jax.Array, numbers: DimensionNumbers) -> WeightCodes | None:
        """The codes of the weight in the collection of codes, made now if `mutable` names that."""
        if self.is_initializing():
            return None
        assert self.scope is not None  # the module is bound
        # All that may change, as `mutable=True` says, is no wish for codes: a loop would keep them.
        named = isinstance(self.scope.root.mutable, str | Collection)
        if named and self.is_mutable_collection(CODES):
            made = encode_weight(rhs, numbers, self.state, recipe=self.recipe)
            self.put_variable(CODES, "kernel", made)
        return self.get_variable(CODES, "kernel")


class Fp8DirectDotGeneralOp(_Fp8):
    """FP8 training for any layer of Flax with an argument `dot_general_cls`.

    A drop-in for `flax.linen.Fp8DirectDotGeneralOp`: forward and both backward products run on
    8-bit operands. With `DelayedScaling` the state lives in the collection
    `_overwrite_with_gradient`: a gradient is the next value there, as `TrainState` knows. A call
    with `mutable=["fp8_codes"]` encodes the weight into that collection, once for several calls;
    `mutable=True` does not.

    Attributes:
      recipe: `jaxfp8.DelayedScaling` or `jaxfp8.CurrentScaling`.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> import jaxfp8.linen
      >>> layer = nn.Dense(4, dot_general_cls=jaxfp8.linen.Fp8DirectDotGeneralOp)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 8)))
      >>> sorted(variables)
      ['_overwrite_with_gradient', 'params']
    """

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
          lhs: activations; rounded to the dtype of `rhs` as Flax does.
          rhs: weights in the dtype of the computation.
          dimension_numbers: as in `jax.lax.dot_general`.
          precision: not used.
          preferred_element_type: output dtype, by default that of `rhs`.
          out_sharding: sharding of the output, as of `jax.lax.dot_general`.
        """
        del precision
        rhs = jnp.asarray(rhs)
        dtype = rhs.dtype if preferred_element_type is None else preferred_element_type
        lhs = jnp.asarray(lhs, rhs.dtype)
        return self._dot(lhs, rhs, dimension_numbers, dtype, out_sharding)


class Fp8Einsum(_Fp8):
    """FP8 training for an einsum of activations and weights; a drop-in for Flax's `Fp8Einsum`.

    Attributes:
      recipe: `jaxfp8.DelayedScaling` or `jaxfp8.CurrentScaling`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8, jaxfp8.linen
      >>> layer = jaxfp8.linen.Fp8Einsum(recipe=jaxfp8.CurrentScaling())
      >>> x, w = jnp.ones((2, 5, 8)), jnp.ones((3, 8, 4))
      >>> layer.apply({}, "btd,hdk->bhtk", x, w).shape
      (2, 3, 5, 4)
    """

    def __call__(
        self,
        eqn: str,
        lhs: ArrayLike,
        rhs: ArrayLike,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> jax.Array:
        """The einsum `eqn` of activations `lhs` and weights `rhs`; see `Fp8DirectDotGeneralOp`."""
        del precision
        rhs = jnp.asarray(rhs)
        lhs = jnp.asarray(lhs, rhs.dtype)
        dtype = rhs.dtype if preferred_element_type is None else preferred_element_type
        parsed = einsum.parse(self._operation, eqn, lhs.shape, rhs.shape)
        return self._dot(lhs, rhs, parsed.numbers, dtype).transpose(parsed.order)


class Fp8RaggedDot(_Fp8):
    """FP8 training for the argument `ragged_dot_cls` of `GroupedDense` and `MoE`.

    Attributes:
      recipe: `jaxfp8.DelayedScaling` or `jaxfp8.CurrentScaling`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8, jaxfp8.linen
      >>> product = jaxfp8.linen.Fp8RaggedDot(recipe=jaxfp8.CurrentScaling())
      >>> x, w = jnp.ones((5, 8)), jnp.ones((2, 8, 4))
      >>> product.apply({}, x, w, jnp.array([3, 2])).shape
      (5, 4)
    """

    def __call__(
        self,
        lhs: ArrayLike,
        rhs: ArrayLike,
        group_sizes: ArrayLike,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> jax.Array:
        """The ragged dot of rows `lhs` and weights `rhs`; see `jaxfp8.fp8_ragged_dot`."""
        del precision
        asked: dict[str, Any] = {"preferred_element_type": preferred_element_type}
        return fp8_ragged_dot(lhs, rhs, group_sizes, self.state, recipe=self.recipe, **asked)


def training_recipe(layer: nn.Module) -> TrainingRecipe | None:
    """The recipe of a layer in FP8 training, with our classes or Flax's; None for others."""
    slots = (getattr(layer, name, None) for name in PRODUCTS)
    given: Any = next((slot for slot in slots if slot is not None), None)
    cls = given.func if isinstance(given, functools.partial) else given
    if not isinstance(cls, type) or not issubclass(cls, (_Fp8, Fp8DotGeneralBase)):
        return None
    return getattr(given(parent=None), "recipe", DelayedScaling())


def scaling_of(layer: nn.Module, tensor: str) -> Scaling | None:
    """The delayed scaling of the input or kernel of a layer, as its variables have it."""
    state = layer.variables.get(OVERWRITE_WITH_GRADIENT)
    if not state:
        return None
    (own,) = state.values()  # those of the product, the one module in the layer
    return Scaling(scale=own[f"{tensor}_scale"], amax_history=own[f"{tensor}_amax_history"])


def split_state(variables: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits variables into those for an optimiser, and the states of delayed scaling.

    The gradient of a state is the next state, so it overwrites the state. An optimiser would treat
    it as a derivative, and make the state meaningless. This splits variables and gradients alike;
    `{**rest, **state}` are the variables again. `TrainState` of Flax does the same by itself.

    Args:
      variables: all variables of a model, or the gradients of them.

    Returns:
      The other collections, and the collection `_overwrite_with_gradient`; the second is empty with
      `CurrentScaling`.

    Raises:
      ValueError: a state has negative values, so an optimiser trained it; tracers are not checked.

    Example:
      >>> import jax.numpy as jnp, jaxfp8.linen
      >>> variables = {"params": jnp.ones(2), "_overwrite_with_gradient": {"scale": jnp.ones(1)}}
      >>> params, state = jaxfp8.linen.split_state(variables)
      >>> list(params), list(state)
      (['params'], ['_overwrite_with_gradient'])
    """
    state = {kind: variables[kind] for kind in variables if kind == OVERWRITE_WITH_GRADIENT}
    _check_states(state, "variables")
    return {kind: variables[kind] for kind in variables if kind not in state}, state


def _check_states(tree: Any, path: str) -> None:
    """Refuses states in nested dictionaries not written by a step of training."""
    for name in tree:
        if isinstance(tree[name], Mapping):
            _check_states(tree[name], f"{path}[{name!r}]")
        tensor = name.removesuffix("_amax_history")
        if tensor != name and f"{tensor}_scale" in tree:
            scaling = Scaling(scale=tree[f"{tensor}_scale"], amax_history=tree[name])
            check_scalings("jaxfp8.linen.split_state", {f"{path}: {tensor}": scaling})


def shared_scaling(variables: Any) -> Any:
    """Variables with scaling states that add by maximum, for a state of several products.

    If a layer is called twice, or a scan over layers shares a state, JAX adds the gradients of the
    state. A gradient of a state is its next value, and the right next value is the largest. Call
    this inside the differentiated function, on its argument.

    Args:
      variables: variables of a model, with a collection `_overwrite_with_gradient`.

    Returns:
      The same, those states converted to `flax.linen.fp8_ops.fp32_max_grad`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8.linen
      >>> state = {"_overwrite_with_gradient": {"scale": jnp.ones(1)}}
      >>> def twice(state):
      ...     scale = jaxfp8.linen.shared_scaling(state)["_overwrite_with_gradient"]["scale"]
      ...     return scale.dtype
      >>> twice(state)
      fp8_meta32
    """
    if OVERWRITE_WITH_GRADIENT not in variables:
        got, needs = f"is in {sorted(variables)}", "the scaling states are there"
        remedy = "pass all variables, those of DelayedScaling among them"
        operand = f"none of `variables` is `{OVERWRITE_WITH_GRADIENT}`: it"
        raise ValueError(message("jaxfp8.linen.shared_scaling", operand, got, needs, remedy))
    compat.let_extended_dtypes_add()
    convert = jax.lax.convert_element_type
    states = jax.tree.map(
        lambda leaf: convert(leaf, fp32_max_grad), variables[OVERWRITE_WITH_GRADIENT]
    )
    return {**variables, OVERWRITE_WITH_GRADIENT: states}


def accumulate(total: Any, gradients: Any) -> Any:
    """Adds the gradients of two microbatches: the sum of derivatives, the maximum of states.

    Args:
      total: gradients so far, with respect to variables of a model.
      gradients: those of the next microbatch, taken at the same variables.

    Returns:
      Their sum; in `_overwrite_with_gradient` the elementwise maximum, since each microbatch
      wrote its amax into the same entry of the history. Divide the sum by the number of
      microbatches after `split_state`: a state has no mean.

    Example:
      >>> import jax.numpy as jnp, jaxfp8.linen
      >>> one = {"params": jnp.ones(2), "_overwrite_with_gradient": jnp.array([3.0])}
      >>> two = {"params": jnp.ones(2), "_overwrite_with_gradient": jnp.array([2.0])}
      >>> both = jaxfp8.linen.accumulate(one, two)
      >>> both["params"].tolist(), both["_overwrite_with_gradient"].tolist()
      ([2.0, 2.0], [3.0])
    """
    kinds = {OVERWRITE_WITH_GRADIENT: jnp.maximum}
    return {
        kind: jax.tree.map(kinds.get(kind, jnp.add), total[kind], gradients[kind]) for kind in total
    }
