"""The 8-bit layers of nnx, with the attributes of Flax's layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from jaxfp8._ops import einsum
from jaxfp8._recipes.embedding import lookup
from jaxfp8._recipes.recipe_ragged import check_groups, recipe_ragged_dot
from jaxfp8._recipes.recipes import Recipe
from jaxfp8._value import compat
from jaxfp8._value.spec import DimensionNumbers, Shape
from jaxfp8.nnx._base import EightBitLayer
from jaxfp8.nnx._grouped import GroupedLinear


class Linear(EightBitLayer):
    """`flax.nnx.Linear` with its weight in 8 bits: `y = q(x) @ q(kernel) + bias`.

    Args:
      in_features, out_features: sizes of the last axis of input and output.
      recipe: how kernel and input are held.
      use_bias: whether a bias is added.
      dtype: dtype of the computation; by default the promotion of input and `param_dtype`.
      param_dtype: dtype of the bias, and of the kernel before it is quantized.
      **settings: those of `flax.nnx.Linear`: `precision`, initialisers, metadata, `rngs`.

    Example:
      >>> import jax.numpy as jnp, jaxfp8.nnx
      >>> from flax import nnx
      >>> layer = jaxfp8.nnx.Linear(8, 4, recipe=jaxfp8.FP8_DYNAMIC, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 8))).shape, layer.weight
      ((2, 4), QArray(float8_e4m3fn[8,4], scale=float32[1,4]))
    """

    in_features: int
    out_features: int

    FLOAT = nnx.Linear
    _POSITIONAL = ("in_features", "out_features")

    def _weight_axes(self) -> tuple[Shape, Shape]:
        return (0,), ()

    @staticmethod
    def shape_of(layer: Any) -> Shape:
        """Shape of the weight of an unstacked layer."""
        return layer.in_features, layer.out_features

    def numbers(self, x: jax.Array) -> DimensionNumbers:
        """Dimension numbers of the product with an input."""
        self._check_sizes(x, (-1,), (self.in_features,))
        return ((x.ndim - 1,), (0,)), ((), ())

    def __call__(self, inputs: ArrayLike, out_sharding: Any = None) -> jax.Array:
        """Applies the layer to the last axis of an input."""
        with self._scope():
            x = self.cast(inputs)
            bias = None if self.bias is None else self.bias[...]
            return self._product(x, self.numbers(x), bias, out_sharding)


class LoRALinear(Linear):
    """`flax.nnx.LoRALinear` with its base in 8 bits: `y = q(x) @ q(kernel) + bias + x @ a @ b`.

    The adapter `lora` stays in floats: it alone is trained (QLoRA, arXiv:2305.14314).

    Args:
      in_features, out_features: sizes of the last axis of input and output.
      lora_rank: size of the axis between `a` and `b`.
      recipe: how kernel and input are held.
      **settings: those of `flax.nnx.LoRALinear`.

    Example:
      >>> import jax.numpy as jnp, jaxfp8.nnx
      >>> from flax import nnx
      >>> layer = jaxfp8.nnx.LoRALinear(8, 4, lora_rank=2, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 8))).shape, layer.weight.qvalue.dtype.name, layer.lora.lora_a.shape
      ((2, 4), 'float8_e4m3fn', (8, 2))
    """

    lora: nnx.LoRA

    FLOAT: ClassVar[Any] = nnx.LoRALinear
    _KEYWORDS = ("lora_rank",)

    @property
    def lora_rank(self) -> int:
        """Size of the axis between the two matrices of the adapter."""
        return int(self.lora.lora_a.get_value().shape[-1])

    def __call__(self, inputs: ArrayLike, out_sharding: Any = None) -> jax.Array:
        """Applies the layer, and its adapter, to the last axis of an input."""
        return super().__call__(inputs, out_sharding) + self.lora(jnp.asarray(inputs))


class LinearGeneral(EightBitLayer):
    """`flax.nnx.LinearGeneral` with its weight in 8 bits: `y = q(x) . q(kernel) + bias`.

    Args:
      in_features, out_features: sizes or shapes of the contracted axes and of the output.
      axis: contracted axes of the input.
      recipe: how kernel and input are held.
      **settings: those of `flax.nnx.LinearGeneral`.

    Example:
      >>> import jax.numpy as jnp, jaxfp8.nnx
      >>> from flax import nnx
      >>> layer = jaxfp8.nnx.LinearGeneral((2, 3), (4, 5), axis=(1, -1), rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((16, 2, 3))).shape
      (16, 4, 5)
    """

    in_features: Shape
    out_features: Shape
    axis: Shape
    batch_axis: Mapping[int, int]

    FLOAT = nnx.LinearGeneral
    _POSITIONAL = ("in_features", "out_features")
    _KEYWORDS = ("axis",)

    def _weight_axes(self) -> tuple[Shape, Shape]:
        batch = len(self.batch_axis)
        return tuple(range(batch, batch + len(self.in_features))), tuple(range(batch))

    @staticmethod
    def shape_of(layer: Any) -> Shape:
        """Shape of the weight of an unstacked layer."""
        return (*layer.batch_axis.values(), *layer.in_features, *layer.out_features)

    def numbers(self, x: jax.Array) -> DimensionNumbers:
        """Dimension numbers of the product with an input."""
        batch, sizes = tuple(self.batch_axis), tuple(self.batch_axis.values())
        self._check_sizes(x, (*batch, *self.axis), (*sizes, *self.in_features))
        axes = tuple(sorted(axis % x.ndim for axis in self.axis))
        contracting, own = self._weight_axes()
        return (axes, contracting), (tuple(sorted(a % x.ndim for a in batch)), own)

    def __call__(self, inputs: ArrayLike, out_sharding: Any = None) -> jax.Array:
        """Applies the layer to the named axes of an input."""
        with self._scope():
            x = self.cast(inputs)
            numbers = self.numbers(x)
            bias = None if self.bias is None else self._bias(x, numbers)
            return self._product(x, numbers, bias, out_sharding)

    def _bias(self, x: jax.Array, numbers: DimensionNumbers) -> jax.Array:
        (axes, _), (batch, _) = numbers
        others = [x.shape[a] if a in batch else 1 for a in range(x.ndim) if a not in axes]
        return self.bias[...].reshape(*others, *self.out_features)


class Einsum(EightBitLayer):
    """`flax.nnx.Einsum` with its weight in 8 bits.

    Args:
      einsum_str: the equation of input and kernel; it may be given to the call instead.
      kernel_shape: shape of the kernel.
      bias_shape: shape of the bias, or None.
      recipe: how kernel and input are held.
      **settings: those of `flax.nnx.Einsum`.

    Example:
      >>> import jax.numpy as jnp, jaxfp8.nnx
      >>> from flax import nnx
      >>> layer = jaxfp8.nnx.Einsum("nta,hab->nthb", (8, 2, 4), (8, 4), rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((16, 11, 2))).shape
      (16, 11, 8, 4)
    """

    einsum_str: str
    kernel_shape: Shape
    bias_shape: Shape | None

    FLOAT = nnx.Einsum
    _POSITIONAL = ("einsum_str", "kernel_shape", "bias_shape")

    def _weight_axes(self) -> tuple[Shape, Shape]:
        """Axes of the kernel: contracted if the output lacks them, batch if the input has them."""
        inputs, output = self.einsum_str.replace(" ", "").split("->")
        x, kernel = inputs.split(",")
        summed = tuple(i for i, letter in enumerate(kernel) if letter not in output)
        batch = tuple(i for i, letter in enumerate(kernel) if letter in x and letter in output)
        return summed, batch

    @staticmethod
    def shape_of(layer: Any) -> Shape:
        """Shape of the weight of an unstacked layer."""
        return tuple(layer.kernel_shape)

    def _parsed(self, x: jax.Array, einsum_str: str | None) -> einsum.Einsum:
        equation = self.einsum_str if einsum_str is None else einsum_str
        return einsum.parse(self._operation(), equation, x.shape, tuple(self.kernel_shape))

    def numbers(self, x: jax.Array, einsum_str: str | None = None) -> DimensionNumbers:
        """Dimension numbers of the product with an input."""
        return self._parsed(x, einsum_str).numbers

    def __call__(
        self, inputs: ArrayLike, einsum_str: str | None = None, out_sharding: Any = None
    ) -> jax.Array:
        """Applies the layer; an equation given here counts before the attribute."""
        with self._scope():
            x = self.cast(inputs)
            parsed = self._parsed(x, einsum_str)
            bias = None if self.bias is None else parsed.along_dot(self.bias[...])
            asked = compat.reordered(out_sharding, parsed.order)
            y = self._product(x, parsed.numbers, bias, asked)
            return compat.sharded(y.transpose(parsed.order), out_sharding)


class Embed(EightBitLayer):
    """`flax.nnx.Embed` with its table in 8 bits, one scale per row in most recipes.

    Rows are widened as they are looked up. `attend` multiplies by the transposed table as it is.

    Args:
      num_embeddings, features: number and size of rows.
      recipe: how the table, and the input of `attend`, are held.
      **settings: those of `flax.nnx.Embed`.

    Example:
      >>> import jax.numpy as jnp, jaxfp8.nnx
      >>> from flax import nnx
      >>> layer = jaxfp8.nnx.Embed(50, 8, rngs=nnx.Rngs(0))
      >>> layer(jnp.arange(3)).shape, layer.attend(jnp.ones((2, 8))).shape
      ((3, 8), (2, 50))
    """

    num_embeddings: int
    features: int

    FLOAT = nnx.Embed
    WEIGHT = "embedding"
    _POSITIONAL = ("num_embeddings", "features")

    def _weight_axes(self) -> tuple[Shape, Shape]:
        return (1,), ()

    @staticmethod
    def shape_of(layer: Any) -> Shape:
        """Shape of the weight of an unstacked layer."""
        return layer.num_embeddings, layer.features

    def numbers(self, x: jax.Array) -> DimensionNumbers:
        """Dimension numbers of `attend`."""
        self._check_sizes(x, (-1,), (self.features,))
        return ((x.ndim - 1,), (1,)), ((), ())

    def why_not_prepared(self) -> str:
        """Why `jaxfp8.nnx.prepare` leaves the layer as it is."""
        return "its rows are looked up"

    def __call__(self, inputs: ArrayLike, out_sharding: Any = None) -> jax.Array:
        """The rows at `inputs`, integers of any shape."""
        with self._scope():
            indices = jnp.asarray(inputs)
            table: Any = self.weight
            if isinstance(table, jax.Array):
                rows = jnp.take(table, indices, axis=0).astype(self.dtype)
                return compat.sharded(rows, out_sharding)
            if self.num_embeddings == 1:
                indices = jnp.zeros_like(indices)
            return compat.sharded(lookup(table, indices, self.dtype), out_sharding)

    def attend(self, query: ArrayLike, out_sharding: Any = None) -> jax.Array:
        """`query @ table.T`: the inner product of each query with each row."""
        with self._scope():
            x = self.cast(query)
            return self._product(x, self.numbers(x), out_sharding=out_sharding)


class QGroupedLinear(EightBitLayer):
    """`GroupedLinear` with its weight in 8 bits: `y[m] = q(x)[m] @ q(kernel)[g(m)] + bias[g(m)]`.

    Args:
      num_groups: number of matrices.
      in_features, out_features: sizes of the rows of input and output.
      recipe: how kernel and input are held; one without `terms` and `compute`.
      **settings: those of `GroupedLinear`.

    Example:
      >>> import jax.numpy as jnp, jaxfp8.nnx
      >>> from flax import nnx
      >>> layer = jaxfp8.nnx.QGroupedLinear(2, 8, 4, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((5, 8)), jnp.array([3, 2])).shape, layer.weight
      ((5, 4), QArray(float8_e4m3fn[2,8,4], scale=float32[2,1,4]))
    """

    num_groups: int
    in_features: int
    out_features: int
    precision: Any

    FLOAT = GroupedLinear
    _POSITIONAL = ("num_groups", "in_features", "out_features")

    def _adopt(self, layer: nnx.Module, recipe: Recipe, path: str, scale: Any) -> None:
        check_groups(f"jaxfp8.nnx.QGroupedLinear at {path}", recipe)
        super()._adopt(layer, recipe, path, scale)

    def _weight_axes(self) -> tuple[Shape, Shape]:
        return (1,), (0,)

    @staticmethod
    def shape_of(layer: Any) -> Shape:
        """Shape of the weight of an unstacked layer."""
        return layer.num_groups, layer.in_features, layer.out_features

    def numbers(self, x: jax.Array, group_sizes: Any = None) -> DimensionNumbers:
        """Axes of the product with an input; groups are a batch of the kernel alone."""
        del group_sizes
        self._check_sizes(x, (-1,), (self.in_features,))
        return ((x.ndim - 1,), (1,)), ((), (0,))

    def why_not_prepared(self) -> str:
        """Why `jaxfp8.nnx.prepare` leaves the layer as it is."""
        return "products of groups take no prepared weight"

    def __call__(self, inputs: ArrayLike, group_sizes: ArrayLike) -> jax.Array:
        """Rows [M, in_features] sorted by group, and the number of rows of each."""
        with self._scope():
            x = self.cast(inputs)
            self.numbers(x)
            bias = None if self.bias is None else self.bias[...]
            given = {"scale": self.static_scale(), "bias": bias, "precision": self.precision}
            return recipe_ragged_dot(x, self.weight, group_sizes, self.recipe, **given)


TWINS: dict[type[nnx.Module], type[EightBitLayer]] = {
    layer.FLOAT: layer
    for layer in (Linear, LoRALinear, LinearGeneral, Einsum, Embed, QGroupedLinear)
}
