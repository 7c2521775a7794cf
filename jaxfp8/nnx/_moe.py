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
_KERNEL_INIT = nnx.initializers.lecun_normal()


class Router(nnx.Linear):
    """The linear layer whose outputs choose experts; it stays in floats."""


class MoE(nnx.Module):
    """A dropless mixture of experts: each token is computed by its `top_k` experts.

        s = softmax(x @ router)              or the sigmoid of each score
        y = sum over the top_k of s[e] * down[e](act(gate[e](x)) * up[e](x))  [+ shared(x)]

    Rows are sorted by expert and multiplied in groups, gate and up in one product. So each expert
    computes its own tokens alone, shapes are static, and no token is dropped. The layers inside are
    `GroupedLinear`s and `nnx.Linear`s: `jaxfp8.nnx.quantize`, `fp8_training`, `load` and `report`
    treat them as any other layer. The router stays in floats.

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
      axis_name: inside `jax.shard_map`, the mesh axis that splits tokens and experts.
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
        axis_name: str | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: Any = None,
        kernel_init: Init = _KERNEL_INIT,
        experts_init: Init = EXPERTS_INIT,
        rngs: nnx.Rngs,
    ) -> None:
        self.routing = experts.Routing(
            operation="jaxfp8.nnx.MoE",
            num_experts=num_experts,
            top_k=top_k,
            score=score,
            renormalize=renormalize,
            scale=scale,
            num_groups=num_groups,
            top_groups=top_groups,
        )
        self.activation, self.gated, self.axis_name = activation, gated, axis_name
        settings = {"param_dtype": param_dtype, "precision": precision, "rngs": rngs}
        self._make_router(in_features, use_selection_bias, kernel_init, settings)
        settings["dtype"] = dtype
        self._make_experts(in_features, hidden_features, experts_init, settings)
        self._make_shared(in_features, shared_features, kernel_init, settings)

    def _make_router(self, features: int, has_bias: bool, init: Init, settings: Any) -> None:
        count, dtype = self.routing.num_experts, jnp.float32
        kinds = {"use_bias": False, "dtype": dtype, "kernel_init": init, **settings}
        self.router = Router(features, count, **kinds)
        bias = nnx.Param(jnp.zeros(count, settings["param_dtype"])) if has_bias else None
        self.selection_bias = nnx.data(bias)

    def _make_experts(self, features: int, hidden: int, init: Init, settings: Any) -> None:
        count, kinds = self.routing.num_experts, {"kernel_init": init, **settings}
        self.up = GroupedLinear(count, features, (1 + self.gated) * hidden, **kinds)
        self.down = GroupedLinear(count, hidden, features, **kinds)

    def _make_shared(self, features: int, hidden: int, init: Init, settings: Any) -> None:
        self.shared_up = self.shared_down = nnx.data(None)
        if hidden:
            kinds = {"use_bias": False, "kernel_init": init, **settings}
            self.shared_up = nnx.data(nnx.Linear(features, (1 + self.gated) * hidden, **kinds))
            self.shared_down = nnx.data(nnx.Linear(hidden, features, **kinds))

    def route(self, inputs: ArrayLike) -> experts.Routed:
        """The choice for tokens: `weights`, `experts` and the `scores` of all experts."""
        bias = None if self.selection_bias is None else self.selection_bias[...]
        return self.routing(self.router(jnp.asarray(inputs)), bias)

    def __call__(self, inputs: ArrayLike) -> jax.Array:
        """Applies the layer to tokens [..., in_features]."""
        x = jnp.asarray(inputs)
        count = self.routing.num_experts
        y = experts.mixture(x, self.route(x), count, self._experts, self.axis_name)
        if self.shared_up is None:
            return y
        return y + self.shared_down(self._activated(self.shared_up(x)))

    def _experts(self, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        return self.down(self._activated(self.up(rows, sizes)), sizes)

    def _activated(self, y: jax.Array) -> jax.Array:
        return experts.activated(self.activation, self.gated, y)
