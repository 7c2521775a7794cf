"""A mixture of experts in nnx."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from jaxfp8._recipes import experts
from jaxfp8.nnx._grouped import EXPERTS_INIT, GroupedLinear

Init = Callable[..., Any]
_OPERATION = "jaxfp8.nnx.MoE"
_KERNEL_INIT = nnx.initializers.lecun_normal()


class Router(nnx.Linear):
    """The linear layer whose outputs choose experts; it stays in floats."""


class MoE(nnx.Module):
    """A mixture of experts: each token is computed by its `top_k` experts.

        s = softmax(x @ router)              or the sigmoid of each score
        y = sum over the top_k of s[e] * down[e](act(gate[e](x)) * up[e](x))  [+ shared(x)]

    Rows are sorted by expert and multiplied in groups, gate and up in one product. So each expert
    computes its own tokens alone, shapes are static, and no token is dropped, unless devices have a
    `capacity_factor`. The layers inside are `GroupedLinear`s and `nnx.Linear`s:
    `jaxfp8.nnx.quantize`, `fp8_training`, `load` and `report` treat them as any other layer. The
    router stays in floats.

    Args:
      in_features: size of a token.
      hidden_features: size of a hidden row of one expert.
      num_experts, top_k: number of experts, and of those of a token.
      activation: of hidden rows, such as `jax.nn.silu`, `gelu` or `relu`.
      gated: whether the activation of a gate multiplies a second row, `up`.
      score: "softmax" over all experts, or "sigmoid" of each, as in DeepSeek-V3.
      renormalize: whether the weights of a token are divided by their sum.
      scale: a factor of these weights.
      num_groups, top_groups: number of equal groups of experts, and of those a token chooses from.
      use_selection_bias: whether `selection_bias` [num_experts] is added to scores for the choice
        alone. It has no gradient: a training loop sets it from the load of the experts.
      shared_features: hidden size of an expert for all tokens; 0 for none.
      use_shared_gate: whether sigmoid(x @ shared_gate) multiplies it, as in Qwen2-MoE.
      use_bias: whether router and experts have biases, as in GPT-OSS.
      glu: a function of rows [..., 2 hidden_features] of gate and up to hidden rows, in place of
        `activation(gate) * up`.
      axis_name: inside `jax.shard_map`, the mesh axis that splits tokens and experts.
      capacity_factor: None if each device gathers all tokens. A number makes devices exchange rows
        by expert (all-to-all): of its T tokens a device sends at most capacity_factor * T * top_k /
        devices rows to each one, and drops later tokens' rows beyond. They count as 0.
      dtype: dtype of the experts; by default the promotion of input and `param_dtype`. The router
        computes in float32.
      param_dtype: dtype of all parameters.
      precision: as in `jax.lax.ragged_dot`.
      kernel_init: initialiser of a matrix [inputs, outputs].
      experts_init: initialiser of the matrices of all experts [num_experts, inputs, outputs].
      rngs: for all parameters.

    Example:
      >>> import jax.numpy as jnp, jaxfp8.nnx
      >>> from flax import nnx
      >>> layer = jaxfp8.nnx.MoE(8, 16, num_experts=4, top_k=2, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 5, 8))).shape, layer.route(jnp.ones((3, 8))).experts.shape
      ((2, 5, 8), (3, 2))
    """

    shared_up: Any
    shared_down: Any
    shared_gate: Any

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        num_experts: int,
        top_k: int,
        *,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
        gated: bool = True,
        score: Literal["softmax", "sigmoid"] = "softmax",
        renormalize: bool = True,
        scale: float = 1.0,
        num_groups: int = 1,
        top_groups: int = 1,
        use_selection_bias: bool = False,
        shared_features: int = 0,
        use_shared_gate: bool = False,
        use_bias: bool = False,
        glu: Callable[[jax.Array], jax.Array] | None = None,
        axis_name: str | None = None,
        capacity_factor: float | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: Any = None,
        kernel_init: Init = _KERNEL_INIT,
        experts_init: Init = EXPERTS_INIT,
        rngs: nnx.Rngs,
    ) -> None:
        sizes = {"in_features": in_features, "hidden_features": hidden_features}
        experts.check_sizes(_OPERATION, num_experts=num_experts, **sizes)
        self.routing = experts.Routing(
            operation=_OPERATION,
            num_experts=num_experts,
            top_k=top_k,
            score=score,
            renormalize=renormalize,
            scale=scale,
            num_groups=num_groups,
            top_groups=top_groups,
        )
        self.axis_name, self.capacity_factor = axis_name, capacity_factor
        self._spread()  # refuses a wrong capacity
        self.hidden = experts.Hidden(activation=activation, gated=gated, glu=glu)
        settings = {"param_dtype": param_dtype, "precision": precision, "rngs": rngs}
        kinds = {"kernel_init": kernel_init, **settings}
        self._make_router(in_features, use_selection_bias, use_bias, kinds)
        kinds["dtype"] = dtype
        own = {**kinds, "kernel_init": experts_init, "use_bias": use_bias}
        self._make_experts(in_features, hidden_features, own)
        self._make_shared(in_features, shared_features, use_shared_gate, kinds)

    def _make_router(
        self, features: int, has_selection_bias: bool, use_bias: bool, kinds: Any
    ) -> None:
        count = self.routing.num_experts
        self.router = Router(features, count, use_bias=use_bias, **kinds, dtype=jnp.float32)
        bias = nnx.Param(jnp.zeros(count, kinds["param_dtype"])) if has_selection_bias else None
        self.selection_bias = nnx.data(bias)

    def _make_experts(self, features: int, hidden: int, kinds: Any) -> None:
        count = self.routing.num_experts
        self.up = GroupedLinear(count, features, self.hidden.width * hidden, **kinds)
        self.down = GroupedLinear(count, hidden, features, **kinds)

    def _make_shared(self, features: int, hidden: int, has_gate: bool, kinds: Any) -> None:
        experts.check_sizes(_OPERATION, least=int(has_gate), shared_features=hidden)
        self.shared_up = self.shared_down = self.shared_gate = nnx.data(None)
        kinds = {"use_bias": False, **kinds}
        if hidden:
            up = nnx.Linear(features, self.hidden.width * hidden, **kinds)
            self.shared_up = nnx.data(up)
            self.shared_down = nnx.data(nnx.Linear(hidden, features, **kinds))
        if has_gate:
            self.shared_gate = nnx.data(Router(features, 1, **{**kinds, "dtype": jnp.float32}))

    def route(self, inputs: ArrayLike) -> experts.Routed:
        """The choice for tokens: `weights`, `experts` and the `scores` of all experts."""
        x = experts.as_tokens(_OPERATION, inputs, self.router.in_features)
        bias = None if self.selection_bias is None else self.selection_bias[...]
        return self.routing(self.router(x), bias)

    def __call__(self, inputs: ArrayLike) -> jax.Array:
        """Applies the layer to tokens [..., in_features]."""
        x = experts.as_tokens(_OPERATION, inputs, self.router.in_features)
        spread = self._spread(getattr(self.up, "recipe", None))
        y = experts.mixture(x, self.route(x), self.routing.num_experts, self._experts, spread)
        if self.shared_up is None:
            return y
        gate = None if self.shared_gate is None else self.shared_gate(x)
        return y + experts.shared(self.shared_down(self.hidden(self.shared_up(x))), gate)

    def dropped(self, inputs: ArrayLike) -> jax.Array:
        """Number of rows that this device drops, a row being a token at one of its experts."""
        return self._spread().dropped(self.route(inputs).experts, self.routing.num_experts)

    def _spread(self, recipe: Any = None) -> experts.Spread:
        return experts.Spread(
            operation=_OPERATION,
            axis_name=self.axis_name,
            capacity_factor=self.capacity_factor,
            recipe=recipe,
        )

    def _experts(self, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        return self.down(self.hidden(self.up(rows, sizes)), sizes)
