"""Programs on a mesh, each beside the same program in floats: layouts times kinds of product."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxfp8
import jaxfp8.linen
import jaxfp8.nnx

BATCH, LENGTH, DIM, HIDDEN = 8, 16, 256, 512
Product = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the arrays of `x @ w` lie on a mesh of axes d and m.

    Attributes:
      x, w: specs of the operands.
      out: the sharding that the product asks for; None where the types say it.
    """

    x: P
    w: P
    out: P | None = None


LAYOUTS = {
    "data": Layout(P("d", None, None), P(None, None)),
    "columns": Layout(P(None, None, None), P(None, "m")),
    "data and columns": Layout(P("d", None, None), P(None, "m")),
    "rows": Layout(P(None, None, "m"), P("m", None), P(None, None, None)),
    "data and rows": Layout(P("d", None, "m"), P("m", None), P("d", None, None)),
    "fsdp": Layout(P("d", None, None), P("d", None)),
    "fsdp of columns": Layout(P(("d", "m"), None, None), P(None, None)),
    "fsdp and columns": Layout(P("d", None, None), P("d", "m")),
    "sequence": Layout(P("d", "m", None), P(None, None)),
    "sequence to rows": Layout(P("d", None, "m"), P("m", None), P("d", "m", None)),
}


def _float(x: jax.Array, w: jax.Array, out: Any) -> jax.Array:
    return jnp.einsum("bsk,kn->bsn", x, w, out_sharding=out)


NUMBERS = (((2,), (0,)), ((), ()))


def _weight(dtype: Any, **how: Any) -> Callable[[jax.Array], Any]:
    return lambda w: jaxfp8.quantize(w, dtype, channelwise_axes=(1,), **how)


def _held(x: jax.Array, q: Any, out: Any) -> jax.Array:
    return jaxfp8.dot_general(x, q, NUMBERS, out_sharding=out)


def _of_recipe(recipe: Any) -> Product:
    def product(x: jax.Array, w: Any, out: Any) -> jax.Array:
        return jaxfp8.recipe_dot_general(x, w, NUMBERS, recipe, out_sharding=out)

    return product


def _trained(recipe: Any) -> Product:
    def product(x: jax.Array, w: jax.Array, out: Any) -> jax.Array:
        return jaxfp8.fp8_dot_general(x, w, NUMBERS, recipe=recipe, out_sharding=out)

    return product


def _rewritten(x: jax.Array, q: Any, out: Any) -> jax.Array:
    return jaxfp8.rewrite(lambda x, q: _float(x, jaxfp8.dequantize(q, x.dtype), out))(x, q)


def _quantized_dots(x: jax.Array, w: jax.Array, out: Any) -> jax.Array:
    return jaxfp8.quantize_dots(lambda x, w: _float(x, w, out), jaxfp8.INT8_DYNAMIC)(x, w)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A product: how its weight is held, and whether its weight has a gradient."""

    product: Product
    hold: Callable[[jax.Array], Any] = lambda w: w
    trains: bool = False


KINDS = {
    "int8 weight": Kind(_held, _weight(jnp.int8)),
    "e4m3 weight": Kind(_held, _weight(jnp.float8_e4m3fn)),
    "int8 weight, zero points": Kind(_held, _weight(jnp.int8, zero_point=True)),
    "e4m3 weight in blocks": Kind(_held, lambda w: jaxfp8.quantize(w, tiled_axes={0: 32, 1: 32})),
    "INT8": Kind(
        _of_recipe(jaxfp8.INT8_DYNAMIC), lambda w: jaxfp8.INT8_DYNAMIC.quantize_weight(w, (0,))
    ),
    "FP8_DYNAMIC": Kind(
        _of_recipe(jaxfp8.FP8_DYNAMIC), lambda w: jaxfp8.FP8_DYNAMIC.quantize_weight(w, (0,))
    ),
    "rewrite": Kind(_rewritten, _weight(jnp.int8)),
    "quantize_dots": Kind(_quantized_dots, trains=True),
    "current scaling": Kind(_trained(jaxfp8.CurrentScaling()), trains=True),
    "current scaling by row": Kind(
        _trained(jaxfp8.CurrentScaling(granularity="channel")), trains=True
    ),
}
