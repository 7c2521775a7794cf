"""A mixture of experts in linen, and the layer of groups of rows that it is made of."""

from __future__ import annotations

from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax.typing import ArrayLike, DTypeLike

from jaxfp8._recipes import experts
from jaxfp8._recipes.recipe_ragged import recipe_ragged_dot, with_bias
from jaxfp8._recipes.recipes import Recipe
from jaxfp8._value.errors import message
from jaxfp8.linen._kernel import Weight, input_scale, weight_of
from jaxfp8.linen._layers import Dense, Init

_OPERATION = "jaxfp8.linen.MoE"
_KERNEL_INIT = nn.initializers.lecun_normal()
_EXPERTS_INIT = nn.initializers.lecun_normal(batch_axis=(0,))
_FLOATS = Recipe(name="recipe=None", weight=None)


class GroupedDense(nn.Module):
    """`y[m] = x[m] @ kernel[g(m)] + bias[g(m)]`: rows in groups, times the matrix of their group.

    Attributes:
      num_groups: number of matrices.
      features: number of output features.
      dtype: dtype of the computation; by default the promotion of input and `param_dtype`.
      param_dtype: dtype of the kernel before it is quantized.
      precision: as in `jaxfp8.ragged_dot`.
      use_bias: whether each group has a bias [features].
      kernel_init, bias_init: initialisers of [num_groups, inputs, features] and [num_groups,
        features].
      recipe: how kernel and input are held; None in floats. One without `terms` and `compute`.
      ragged_dot_cls: None, or the class of the product in floats, such as `Fp8RaggedDot`. Not
        beside a recipe.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8.linen
      >>> layer, x = jaxfp8.linen.GroupedDense(2, 4, recipe=jaxfp8.FP8_W8A16), jnp.ones((5, 8))
      >>> layer.init(jax.random.key(0), x, jnp.array([3, 2]))["params"]["kernel"]
      QArray(float8_e4m3fn[2,8,4], scale=float32[2,1,4])
    """

    num_groups: int
    features: int
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: Any = None
    use_bias: bool = False
    kernel_init: Init = _EXPERTS_INIT
    bias_init: Init = nn.initializers.zeros_init()
    recipe: Recipe | None = None
    ragged_dot_cls: Any = None

    @nn.compact
    def __call__(self, inputs: ArrayLike, group_sizes: ArrayLike) -> jax.Array:
        """Rows [M, K] sorted by group, and the number of rows of each."""
        _check_one("jaxfp8.linen.GroupedDense", self, "ragged_dot_cls")
        x, recipe = jnp.asarray(inputs), self.recipe or _FLOATS
        weight = Weight(
            name="kernel",
            shape=(self.num_groups, x.shape[-1], self.features),
            contracting=(1,),
            batch=(0,),
            recipe=recipe,
            why_not_prepared="products of groups take no prepared weight",
        )
        kernel = weight_of(self, weight, self.kernel_init, self.param_dtype)
        bias = None
        if self.use_bias:
            shape = (self.num_groups, self.features)
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)
        if self.recipe is None:
            x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
            product: Any = jax.lax.ragged_dot
            if self.ragged_dot_cls is not None:
                product = self.ragged_dot_cls()
            y = product(x, kernel, group_sizes, precision=self.precision)
            return y if bias is None else with_bias(y, bias, jnp.asarray(group_sizes))
        x = x.astype(self.dtype or jnp.promote_types(x.dtype, self.param_dtype))
        scale = input_scale(self, recipe, x)
        given = {"scale": scale, "bias": bias, "precision": self.precision}
        return recipe_ragged_dot(x, kernel, group_sizes, recipe, **given)


def _check_one(operation: str, layer: Any, name: str) -> None:
    """Refuses a class for products of floats beside a recipe."""
    if layer.recipe is not None and getattr(layer, name) is not None:
        got, needs = f"is given beside the recipe {layer.recipe.name}", "one of them is needed"
        remedy = "leave `recipe` out to train in FP8, or the class out to serve in 8 bits"
        raise ValueError(message(operation, f"`{name}`", got, needs, remedy))


class Router(nn.Dense):
    """The layer whose outputs choose experts; it stays in floats."""


class MoE(nn.Module):
    """A mixture of experts: each token is computed by its `top_k` experts.

    It is `jaxfp8.nnx.MoE`, with parameters of the same names and shapes. Its `recipe` holds experts
    and shared experts in 8 bits; the router stays in floats. `MoE(recipe=None)` gives the float
    variables for `jaxfp8.linen.quantize`.

    Attributes:
      hidden_features: size of a hidden row of one expert.
      num_experts, top_k: number of experts, and of those of a token.
      activation: of hidden rows, such as `jax.nn.silu`, `gelu` or `relu`.
      gated, score, renormalize, scale, num_groups, top_groups, use_selection_bias: as in
        `jaxfp8.nnx.MoE`.
      shared_features: hidden size of an expert for all tokens; 0 for none.
      use_shared_gate, use_bias, glu: as in `jaxfp8.nnx.MoE`.
      axis_name: inside `jax.shard_map`, the mesh axis that splits tokens and experts.
      capacity_factor: None to gather tokens over this axis, or a number to exchange rows, as in
        `jaxfp8.nnx.MoE`.
      dtype: dtype of the experts; by default the promotion of input and `param_dtype`.
      param_dtype: dtype of all parameters before they are quantized.
      precision: as in `jaxfp8.ragged_dot`.
      kernel_init: initialiser of a matrix [inputs, outputs].
      experts_init: initialiser of the matrices of all experts [num_experts, inputs, outputs].
      recipe: how the weights and inputs of experts are held; None in floats.
      ragged_dot_cls: None, or a class for the products of experts, such as `Fp8RaggedDot`. Not
        beside a recipe.
      dot_general_cls: the same for shared experts, such as `Fp8DirectDotGeneralOp`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8.linen
      >>> layer, x = jaxfp8.linen.MoE(16, 4, 2, recipe=jaxfp8.FP8_W8A16), jnp.ones((2, 5, 8))
      >>> y, variables = layer.init_with_output(jax.random.key(0), x)
      >>> y.shape, variables["params"]["up"]["kernel"]
      ((2, 5, 8), QArray(float8_e4m3fn[4,8,32], scale=float32[4,1,32]))
    """

    hidden_features: int
    num_experts: int
    top_k: int
    activation: Any = jax.nn.silu
    gated: bool = True
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    use_selection_bias: bool = False
    shared_features: int = 0
    use_shared_gate: bool = False
    use_bias: bool = False
    glu: Any = None
    axis_name: str | None = None
    capacity_factor: float | None = None
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: Any = None
    kernel_init: Init = _KERNEL_INIT
    experts_init: Init = _EXPERTS_INIT
    recipe: Recipe | None = None
    ragged_dot_cls: Any = None
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, inputs: ArrayLike) -> jax.Array:
        """Applies the layer to tokens [..., features]."""
        self._check()
        spread = self._spread()
        x = experts.as_tokens(_OPERATION, inputs)
        hidden = experts.Hidden(activation=self.activation, gated=self.gated, glu=self.glu)
        routed, features = self.route(x), x.shape[-1]
        up = self._grouped("up", hidden.width * self.hidden_features)
        down = self._grouped("down", features)

        def network(rows: jax.Array, sizes: jax.Array) -> jax.Array:
            return down(hidden(up(rows, sizes)), sizes)

        y = experts.mixture(x, routed, self.num_experts, network, spread)
        if not self.shared_features:
            return y
        rows = hidden(self._shared("shared_up", hidden.width * self.shared_features)(x))
        gate = self._router("shared_gate", 1, use_bias=False)(x) if self.use_shared_gate else None
        return y + experts.shared(self._shared("shared_down", features)(rows), gate)

    def _check(self) -> None:
        for name in ("ragged_dot_cls", "dot_general_cls"):
            _check_one(_OPERATION, self, name)
        sizes = {"hidden_features": self.hidden_features, "num_experts": self.num_experts}
        experts.check_sizes(_OPERATION, **sizes)
        least = int(self.use_shared_gate)
        experts.check_sizes(_OPERATION, least=least, shared_features=self.shared_features)

    def _spread(self) -> experts.Spread:
        return experts.Spread(
            operation=_OPERATION,
            axis_name=self.axis_name,
            capacity_factor=self.capacity_factor,
            recipe=self.recipe,
        )

    def dropped(self, inputs: ArrayLike) -> jax.Array:
        """Number of rows that this device drops, a row being a token at one of its experts."""
        return self._spread().dropped(self.route(inputs).experts, self.num_experts)

    @nn.compact
    def route(self, inputs: ArrayLike) -> experts.Routed:
        """The choice for tokens: `weights`, `experts` and the `scores` of all experts."""
        settings = {name: getattr(self, name) for name in experts.SETTINGS}
        routing = experts.Routing(operation=_OPERATION, **settings)
        x = experts.as_tokens(_OPERATION, inputs)
        logits = self._router("router", self.num_experts, use_bias=self.use_bias)(x)
        if not self.use_selection_bias:
            return routing(logits)
        zeros, shape = nn.initializers.zeros_init(), (self.num_experts,)
        return routing(logits, self.param("selection_bias", zeros, shape, self.param_dtype))

    def _router(self, name: str, features: int, *, use_bias: bool) -> nn.Module:
        """A product in floats, whatever the recipe."""
        return Router(
            features,
            use_bias=use_bias,
            dtype=jnp.float32,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            name=name,
        )

    def _of_layers(self, *names: str) -> dict[str, Any]:
        names = ("dtype", "param_dtype", "precision", *names)
        return {name: getattr(self, name) for name in names}

    def _grouped(self, name: str, features: int) -> nn.Module:
        settings = self._of_layers("use_bias", "recipe", "ragged_dot_cls")
        count = self._spread().own(self.num_experts)
        init = self.experts_init
        return GroupedDense(count, features, kernel_init=init, name=name, **settings)

    def _shared(self, name: str, features: int) -> nn.Module:
        common: dict[str, Any] = {"use_bias": False, "kernel_init": self.kernel_init, "name": name}
        if self.recipe is not None:
            return Dense(features, **common, **self._of_layers("recipe"))
        return nn.Dense(features, **common, **self._of_layers("dot_general_cls"))
