"""A linear layer with a kernel for each group of rows, in floats: the experts of `MoE`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.typing import ArrayLike, DTypeLike

from jaxfp8._recipes.recipe_ragged import with_bias

_BIAS_INIT = nnx.initializers.zeros_init()
EXPERTS_INIT = nnx.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=(0,))


class GroupedLinear(nnx.Module):
    """`y[m] = x[m] @ kernel[g(m)] + bias[g(m)]`: rows in groups, times the matrix of their group.

    `jaxfp8.nnx.quantize` replaces it by `QGroupedLinear`, `fp8_training` gives it an
    `Fp8RaggedDot`.

    Args:
      num_groups: number of matrices.
      in_features, out_features: sizes of the rows of input and output.
      dtype: dtype of the computation; by default the promotion of input and `param_dtype`.
      param_dtype: dtype of the kernel [num_groups, in_features, out_features].
      precision: as in `jax.lax.ragged_dot`.
      use_bias: whether each group has a bias [out_features].
      kernel_init, bias_init: initialisers.
      ragged_dot: the product, as `jax.lax.ragged_dot`.
      rngs: for the kernel.

    Example:
      >>> import jax.numpy as jnp, jaxfp8.nnx
      >>> from flax import nnx
      >>> layer = jaxfp8.nnx.GroupedLinear(2, 8, 4, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((5, 8)), jnp.array([3, 2])).shape
      (5, 4)
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: Any = None,
        use_bias: bool = False,
        kernel_init: Callable[..., Any] = EXPERTS_INIT,
        bias_init: Callable[..., Any] = _BIAS_INIT,
        ragged_dot: Callable[..., jax.Array] = jax.lax.ragged_dot,
        rngs: nnx.Rngs,
    ) -> None:
        shape = (num_groups, in_features, out_features)
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype))
        self.bias = nnx.data(None)
        if use_bias:
            bias = bias_init(rngs.params(), (num_groups, out_features), param_dtype)
            self.bias = nnx.data(nnx.Param(bias))
        self.num_groups = num_groups
        self.in_features, self.out_features = in_features, out_features
        self.dtype, self.param_dtype, self.precision = dtype, param_dtype, precision
        self.ragged_dot = ragged_dot

    def __call__(self, inputs: ArrayLike, group_sizes: ArrayLike) -> jax.Array:
        """Rows [M, in_features] sorted by group, and the number of rows of each."""
        bias = None if self.bias is None else self.bias[...]
        arrays = (jnp.asarray(inputs), self.kernel[...], bias)
        x, kernel, bias = promote_dtype(arrays, dtype=self.dtype)
        y = self.ragged_dot(x, kernel, group_sizes, precision=self.precision)
        return y if bias is None else with_bias(y, bias, jnp.asarray(group_sizes))
