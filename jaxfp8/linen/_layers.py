"""The 8-bit layers of linen, with the names and parameters of Flax's layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta
from jax.typing import ArrayLike, DTypeLike

from jaxfp8._ops import einsum
from jaxfp8._recipes.embedding import lookup
from jaxfp8._recipes.recipe_dot import recipe_dot_general
from jaxfp8._recipes.recipes import FP8_W8A16, Recipe
from jaxfp8._value.spec import DimensionNumbers, Shape
from jaxfp8.linen._kernel import Weight, input_scale, weight_of

Init = Callable[..., Any]

_KERNEL_INIT = nn.initializers.lecun_normal()
_EMBEDDING_INIT = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)


class _Layer(nn.Module):
    """The base class of the layers: the dtype of the product, and the product."""

    def _compute_dtype(self, x: jax.Array) -> Any:
        return self.dtype or jnp.promote_types(x.dtype, self.param_dtype)

    def _product(
        self, x: jax.Array, w: Any, numbers: DimensionNumbers, bias: jax.Array | None = None
    ) -> jax.Array:
        x = x.astype(self._compute_dtype(x))
        scale = input_scale(self, self.recipe, x)
        return recipe_dot_general(
            x, w, numbers, self.recipe, scale=scale, bias=bias, precision=self.precision
        )


class DenseGeneral(_Layer):
    """`flax.linen.DenseGeneral` with a weight in 8 bits: `y = q(x) . q(kernel) + bias`.

    Attributes:
      features: number or shape of the output features.
      axis: contracted axes of the input.
      batch_dims: leading axes; each index of them has a kernel of its own.
      use_bias: whether a bias is added.
      dtype: dtype of the computation; by default the promotion of input and `param_dtype`.
      param_dtype: dtype of the bias, and of the kernel before it is quantized.
      kernel_init, bias_init: initialisers.
      precision: as in `jaxfp8.dot_general`.
      recipe: how kernel and input are held.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8.linen
      >>> layer = jaxfp8.linen.DenseGeneral((4, 5), axis=(1, -1), recipe=jaxfp8.INT8_DYNAMIC)
      >>> params = layer.init(jax.random.key(0), jnp.ones((1, 3, 6, 7)))["params"]
      >>> params["kernel"]
      QArray(int8[3,7,4,5], scale=float32[1,1,4,5])
    """

    features: int | Sequence[int]
    axis: int | Sequence[int] = -1
    batch_dims: Sequence[int] = ()
    use_bias: bool = True
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: Init = _KERNEL_INIT
    bias_init: Init = nn.initializers.zeros_init()
    precision: Any = None
    recipe: Recipe = FP8_W8A16

    @nn.compact
    def __call__(self, inputs: ArrayLike) -> jax.Array:
        """Applies the layer to an input of any shape with the named axes."""
        x = jnp.asarray(inputs)
        features = _tuple(self.features)
        axes = tuple(sorted(a % x.ndim for a in _tuple(self.axis)))  # as Flax has its kernels
        batch = tuple(a % x.ndim for a in _tuple(self.batch_dims))
        if batch != tuple(range(len(batch))):
            raise ValueError(f"batch_dims {self.batch_dims} must be the leading axes, in order.")
        batch_shape = tuple(x.shape[a] for a in batch)
        contracting = tuple(range(len(batch), len(batch) + len(axes)))
        weight = Weight(
            name="kernel",
            shape=batch_shape + tuple(x.shape[a] for a in axes) + features,
            contracting=contracting,
            batch=batch,
            recipe=self.recipe,
        )
        init = _matrix_init(self.kernel_init, len(features))
        kernel = weight_of(self, weight, init, self.param_dtype)
        bias = None
        if self.use_bias:
            init = _vector_init(self.bias_init)
            bias = self.param("bias", init, batch_shape + features, self.param_dtype)
            others = (1,) * (x.ndim - len(batch) - len(axes))
            bias = bias.reshape(batch_shape + others + features)
        numbers = ((axes, contracting), (batch, batch))
        return self._product(x, kernel, numbers, bias)


class Dense(_Layer):
    """`flax.linen.Dense` with a weight in 8 bits: `y = q(x) @ q(kernel) + bias`.

    Attributes:
      features: number of output features.
      use_bias: whether a bias is added.
      dtype: dtype of the computation; by default the promotion of input and `param_dtype`.
      param_dtype: dtype of the bias, and of the kernel before it is quantized.
      precision: as in `jaxfp8.dot_general`.
      kernel_init, bias_init: initialisers.
      recipe: how kernel and input are held.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8.linen
      >>> layer = jaxfp8.linen.Dense(4, recipe=jaxfp8.FP8_DYNAMIC)
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 8)))
      >>> y.shape, variables["params"]["kernel"]
      ((2, 4), QArray(float8_e4m3fn[8,4], scale=float32[1,4]))
    """

    features: int
    use_bias: bool = True
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: Any = None
    kernel_init: Init = _KERNEL_INIT
    bias_init: Init = nn.initializers.zeros_init()
    recipe: Recipe = FP8_W8A16

    @nn.compact
    def __call__(self, inputs: ArrayLike) -> jax.Array:
        """Applies the layer to the last axis of an input."""
        x = jnp.asarray(inputs)
        shape = (x.shape[-1], self.features)
        weight = Weight(name="kernel", shape=shape, contracting=(0,), recipe=self.recipe)
        kernel = weight_of(self, weight, self.kernel_init, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        return self._product(x, kernel, (((x.ndim - 1,), (0,)), ((), ())), bias)


class Einsum(_Layer):
    """`flax.linen.Einsum` with a weight in 8 bits.

    Attributes:
      shape: shape of the kernel.
      einsum_str: the equation of input and kernel, unless it is given to the call.
      use_bias: whether a bias is added, of the kernel's axes in the output.
      dtype: dtype of the computation; by default the promotion of input and `param_dtype`.
      param_dtype: dtype of the bias, and of the kernel before it is quantized.
      precision: as in `jaxfp8.dot_general`.
      kernel_init, bias_init: initialisers.
      recipe: how kernel and input are held.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8.linen
      >>> layer = jaxfp8.linen.Einsum((5, 6, 7), "abc,cde->abde")
      >>> layer.init(jax.random.key(0), jnp.ones((3, 4, 5)))["params"]["kernel"]
      QArray(float8_e4m3fn[5,6,7], scale=float32[1,6,7])
    """

    shape: Sequence[int]
    einsum_str: str | None = None
    use_bias: bool = True
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: Any = None
    kernel_init: Init = _KERNEL_INIT
    bias_init: Init = nn.initializers.zeros_init()
    recipe: Recipe = FP8_W8A16

    @nn.compact
    def __call__(self, inputs: ArrayLike, einsum_str: str | None = None) -> jax.Array:
        """Applies the layer; an equation given here counts before the attribute."""
        x, shape = jnp.asarray(inputs), tuple(self.shape)
        equation: Any = self.einsum_str if einsum_str is None else einsum_str
        parsed = einsum.parse("jaxfp8.linen.Einsum", equation, x.shape, shape)
        (_, contracting), (_, batch) = parsed.numbers
        weight = Weight(
            name="kernel", shape=shape, contracting=contracting, batch=batch, recipe=self.recipe
        )
        kernel = weight_of(self, weight, self.kernel_init, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, parsed.kernel_shape, self.param_dtype)
            bias = parsed.along_dot(bias)
        return self._product(x, kernel, parsed.numbers, bias).transpose(parsed.order)


class Embed(_Layer):
    """`flax.linen.Embed` with a table in 8 bits, one scale per row in most recipes.

    Rows are widened as they are looked up. `attend` multiplies by the transposed table as it is.

    Attributes:
      num_embeddings: number of rows.
      features: size of a row.
      dtype: dtype of the computation; by default `param_dtype`.
      param_dtype: dtype of the table before it is quantized.
      embedding_init: initialiser.
      precision: as in `jaxfp8.dot_general`.
      recipe: how the table, and the input of `attend`, are held.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8.linen
      >>> layer = jaxfp8.linen.Embed(num_embeddings=50, features=8)
      >>> layer.init(jax.random.key(0), jnp.arange(3))["params"]["embedding"]
      QArray(float8_e4m3fn[50,8], scale=float32[50,1])
    """

    num_embeddings: int
    features: int
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    embedding_init: Init = _EMBEDDING_INIT
    precision: Any = None
    recipe: Recipe = FP8_W8A16

    def setup(self) -> None:
        """Makes or finds the table."""
        shape = (self.num_embeddings, self.features)
        weight = Weight(
            name="embedding",
            shape=shape,
            contracting=(1,),
            recipe=self.recipe,
            why_not_prepared="its rows are looked up",
        )
        self.embedding = weight_of(self, weight, self.embedding_init, self.param_dtype)

    def __call__(self, inputs: ArrayLike) -> jax.Array:
        """The rows at `inputs`, integers of any shape."""
        dtype = self.dtype or self.param_dtype
        if isinstance(self.embedding, jax.Array):  # the recipe leaves it in floats
            return jnp.take(self.embedding, inputs, axis=0).astype(dtype)
        return lookup(self.embedding, inputs, dtype)

    def attend(self, query: ArrayLike) -> jax.Array:
        """`query @ table.T`: the inner product of each query with each row."""
        query = jnp.asarray(query)
        return self._product(query, self.embedding, (((query.ndim - 1,), (1,)), ((), ())))


def _tuple(axes: int | Sequence[int]) -> Shape:
    return (axes,) if isinstance(axes, int) else tuple(axes)


def _matrix_init(init: Init, features: int) -> Init:
    """An initialiser for a matrix: inputs, batch included, by output features."""

    def reshaped(key: jax.Array, shape: Shape, dtype: Any) -> Any:
        border = len(shape) - features
        flat = math.prod(shape[:border]), math.prod(shape[border:])
        return _reshape(init(key, flat, dtype), shape)

    return reshaped


def _vector_init(init: Init) -> Init:
    """An initialiser for a vector."""

    def reshaped(key: jax.Array, shape: Shape, dtype: Any) -> Any:
        return _reshape(init(key, (math.prod(shape),), dtype), shape)

    return reshaped


def _reshape(value: Any, shape: Shape) -> Any:
    if isinstance(value, meta.AxisMetadata):
        return meta.replace_boxed(value, value.unbox().reshape(shape))
    return value.reshape(shape)
