"""Encodes the weights of an nnx model once for several products of FP8 training."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from jaxfp8._recipes.weight_codes import weight_codes
from jaxfp8._value.errors import message
from jaxfp8.nnx._layers import TWINS
from jaxfp8.nnx._products import Fp8Codes, Fp8DotGeneral, Fp8RaggedDot, training_product
from jaxfp8.nnx._training import training_layers


@contextlib.contextmanager
def encoded_weights(model: nnx.Module) -> Iterator[None]:
    """Inside, the layers of a model multiply by codes of their weights that are made once, here.

    Each product of FP8 training encodes its weight by itself. A step with microbatches or with
    remat would read the weight and round it again each time. The numbers are those of a step, or
    after `model.eval()` those of evaluation, and gradients still go to the float weights. Change
    weights and mode only outside. With `DelayedScaling` the history of a kernel moves once, at the
    first product.

    Args:
      model: a model that `fp8_training` changed; experts keep encoding their weights by themselves.

    Raises:
      ValueError: no layer trains in FP8.

    Example:
      >>> import jax.numpy as jnp, jaxfp8, jaxfp8.nnx
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.relu)
      >>> _ = jaxfp8.nnx.fp8_training(model, jaxfp8.CurrentScaling())
      >>> @nnx.jit
      ... def outputs(model, batches):
      ...     with jaxfp8.nnx.encoded_weights(model):
      ...         return [model(x) for x in batches]
      >>> len(outputs(model, jnp.ones((3, 2, 8))))
      3
    """
    layers: list[Any] = [layer for _, layer in training_layers(model)]
    products: list[tuple[Any, Any]] = [(layer, training_product(layer)) for layer in layers]
    chosen = [(own, p) for own, p in products if not isinstance(p, Fp8RaggedDot)]
    if not chosen:
        operation, got = "jaxfp8.nnx.encoded_weights", "has no layer that trains in FP8"
        remedy = "call `jaxfp8.nnx.fp8_training(model)` first"
        raise ValueError(message(operation, "`model`", got, "one is needed", remedy))
    made = [(product, Fp8Codes(_codes(layer, product))) for layer, product in chosen]
    before = [(product, getattr(product, "codes", None)) for product, _ in made]
    for product, codes in made:
        product.codes = codes
    try:
        yield
    finally:
        for product, outer in before:
            if outer is None:
                del product.codes
            else:
                product.codes = outer


def _codes(layer: Any, product: Fp8DotGeneral) -> Any:
    """The codes of a weight; of a stack of layers one for each."""
    kernel = layer.kernel[...]
    kernel = kernel.astype(layer.dtype or kernel.dtype)
    twin = TWINS[type(layer)]
    rank = len(twin.shape_of(layer))
    axes, training = twin.axes_of(layer, rank), not product.use_running_average
    encode: Any = functools.partial(_encoded, product.recipe, axes, training)
    for _ in range(kernel.ndim - rank):
        encode = jax.vmap(encode)
    return encode(kernel, product.state())


def _encoded(recipe: Any, axes: Any, training: bool, kernel: jax.Array, state: Any) -> Any:
    summed, batch = axes
    return weight_codes(recipe, kernel, state, summed, batch, training)
