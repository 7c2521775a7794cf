"""The same encoder as a model of Flax nnx, which `jaxfp8.nnx.quantize` makes 8-bit in place."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from minilm import model
from minilm.model import Params
from minilm.quantize import LINEAR


class Encoder(nnx.Module):
    """Unit-length embeddings of a batch of sentences; `minilm.model.encoder` computes them."""

    def __init__(self, params: Params) -> None:
        tables = params["embeddings"]
        arrays = {name: nnx.Param(tables[name]) for name in ("word", "position", "type")}
        self.embeddings = nnx.Dict(**arrays, norm=_norm(tables["norm"]))
        self.layers = nnx.List([_layer(layer) for layer in params["layers"]])

    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """Token ids [B, T] and which of them are no padding; float32 [B, 384]."""
        params = {"embeddings": self.embeddings, "layers": self.layers}
        return model.encoder(params, ids, mask, _apply, _apply)


def _apply(layer: Any, x: jax.Array) -> jax.Array:
    return layer(x)


def _layer(params: Params) -> nnx.Dict:
    norms = {name: _norm(params[name]) for name in ("attention_norm", "output_norm")}
    return nnx.Dict(**{name: _linear(params[name]) for name in LINEAR}, **norms)


def _linear(params: Params) -> nnx.Linear:
    zeros, rngs = nnx.initializers.zeros_init(), nnx.Rngs(0)
    layer: Any = nnx.Linear(*params["kernel"].shape, kernel_init=zeros, rngs=rngs)
    layer.kernel[...], layer.bias[...] = params["kernel"], params["bias"]
    return layer


def _norm(params: Params) -> nnx.LayerNorm:
    size = params["scale"].size
    norm: Any = nnx.LayerNorm(size, epsilon=model.LAYER_NORM_EPS, rngs=nnx.Rngs(0))
    norm.scale[...], norm.bias[...] = params["scale"], params["bias"]
    return norm
