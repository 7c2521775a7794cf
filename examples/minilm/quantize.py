"""The model's weights: arranged for `model.encode`, and made 8-bit.

Only the 36 weight matrices become 8-bit. The embedding tables are read by row, not multiplied:
they stay float32, and so do the biases and the norms.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8
from minilm.model import LAYERS, Params

# By recipe: the dtypes of a kernel and of its scale. The scale multiplies a bfloat16 kernel in
# FP8_W8A16, and a float32 sum in the others.
DTYPES = {
    "FP8_W8A16": (jnp.float8_e4m3fn, jnp.bfloat16),
    "FP8_DYNAMIC": (jnp.float8_e4m3fn, jnp.float32),
    "INT8_DYNAMIC": (jnp.int8, jnp.float32),
}
RECIPES = tuple(DTYPES)

LINEAR = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_output": "attention.output.dense",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
}
WEIGHT_MATRICES = LAYERS * len(LINEAR)


def load_params(tensors: dict[str, np.ndarray]) -> Params:
    """The weights in float32, by the names `model.encode` uses."""
    return {
        "embeddings": {
            "word": jnp.asarray(tensors["embeddings.word_embeddings.weight"]),
            "position": jnp.asarray(tensors["embeddings.position_embeddings.weight"]),
            "type": jnp.asarray(tensors["embeddings.token_type_embeddings.weight"]),
            "norm": _norm(tensors, "embeddings.LayerNorm"),
        },
        "layers": [_layer(tensors, f"encoder.layer.{i}") for i in range(LAYERS)],
    }


def quantize(params: Params, recipe: str) -> Params:
    """The same weights with every kernel in 8 bit, one scale for each output channel."""
    return params | {"layers": [_quantize_layer(layer, recipe) for layer in params["layers"]]}


def matrix_bytes(params: Params) -> int:
    """Bytes of the weight matrices with their scales."""
    matrices = [leaf for layer in params["layers"] for n in LINEAR for leaf in _weights(layer[n])]
    return sum(leaf.nbytes for leaf in matrices)


def table_bytes(params: Params) -> int:
    """Bytes of the embedding tables."""
    return sum(leaf.nbytes for name, leaf in params["embeddings"].items() if name != "norm")


def _layer(tensors: dict[str, np.ndarray], prefix: str) -> Params:
    linear = {name: _linear(tensors, f"{prefix}.{key}") for name, key in LINEAR.items()}
    return linear | {
        "attention_norm": _norm(tensors, f"{prefix}.attention.output.LayerNorm"),
        "output_norm": _norm(tensors, f"{prefix}.output.LayerNorm"),
    }


def _linear(tensors: dict[str, np.ndarray], prefix: str) -> Params:
    """A linear layer; the file stores its kernel as [out, in]."""
    kernel = jnp.asarray(tensors[f"{prefix}.weight"].T)
    return {"kernel": kernel, "bias": jnp.asarray(tensors[f"{prefix}.bias"])}


def _norm(tensors: dict[str, np.ndarray], prefix: str) -> Params:
    names = {"scale": "weight", "bias": "bias"}
    return {name: jnp.asarray(tensors[f"{prefix}.{key}"]) for name, key in names.items()}


def _quantize_layer(layer: Params, recipe: str) -> Params:
    return layer | {name: _quantize_linear(layer[name], recipe) for name in LINEAR}


def _quantize_linear(linear: Params, recipe: str) -> Params:
    dtype, scale_dtype = DTYPES[recipe]
    kernel = jaxfp8.quantize(
        linear["kernel"], dtype, channelwise_axes=(1,), scale_dtype=scale_dtype
    )
    return linear | {"kernel": kernel.qvalue, "scale": kernel.scale}


def _weights(linear: Params) -> list[jax.Array]:
    return [linear[name] for name in ("kernel", "scale") if name in linear]
