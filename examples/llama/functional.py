"""The same decoder as plain functions: a tree of arrays, and a loop over its layers.

A loop compiles one layer, whatever their number. It counts layers, and its body picks the one of
each turn, `w[number]`: XLA on a CPU widens a stack of float8 arrays that a scan slices. The number
is that of `fori_loop`, by which XLA on a GPU finds the layer where it lies; by a number that comes
from an array it copies the layer first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jaxfp8
import jaxfp8.linen
from llama.attention import rms_norm
from llama.cache import Cache
from llama.config import Config, Mixture
from llama.decoder import layer
from llama.names import HEAD, TOKENS, expert_names

Params = dict[str, Any]


def parameters(config: Config, tensors: Mapping[str, Any], *, stacked: bool = True) -> Params:
    """The tensors of a checkpoint, those of the layers stacked by name.

    Args:
      config: sizes.
      tensors: arrays and `QArray`s by the names of Hugging Face; weights are [N, K].
      stacked: whether the layers are for a scan; if not, they are compiled one by one, and so are
        layers that differ. XLA on a CPU is slow with bfloat16 weights that a scan slices.

    Returns:
      "embed", "norm", "head" and "layers": arrays with a first axis for the layers, or a list.
    """
    rows = [_layer(config, tensors, i) for i in range(config.layers)]
    stacked = stacked and all(row.keys() == rows[0].keys() for row in rows)
    table = tensors[TOKENS]
    return {
        "embed": table,
        "norm": tensors["model.norm.weight"],
        "head": table if config.tied else tensors[HEAD],
        "layers": {name: _stack([row[name] for row in rows]) for name in rows[0]}
        if stacked
        else rows,
    }


def _layer(config: Config, tensors: Mapping[str, Any], number: int) -> Params:
    """The tensors of a layer by the ends of their names; experts stacked."""
    start = f"model.layers.{number}."
    own = {n.removeprefix(start): n for n in tensors if n.startswith(start)}
    if config.experts(number) is None:
        return {name: tensors[whole] for name, whole in own.items()}
    part = {name: tensors[whole] for name, whole in own.items() if ".experts." not in name}
    if config.family == "mixtral":
        part["mlp.gate.weight"] = part.pop("block_sparse_moe.gate.weight")
    for kind in ("gate", "up", "down"):
        if f"mlp.shared_expert.{kind}_proj.weight" in part:  # Qwen2-MoE's name of the one
            own_name = f"mlp.shared_expert.{kind}_proj.weight"
            part[f"mlp.shared_experts.{kind}_proj.weight"] = part.pop(own_name)
        names = expert_names(config, number, kind)
        part[f"mlp.{kind}_proj.weight"] = _stack([tensors[name] for name in names])
    return part


def _stack(arrays: list[Any]) -> Any:
    """Arrays as one with a new first axis; FP8 is moved as bytes, which keeps all codes."""

    def stacked(*leaves: jax.Array) -> jax.Array:
        dtype = leaves[0].dtype
        held = jnp.uint8 if dtype.itemsize == 1 else dtype
        bytes_ = [jax.lax.bitcast_convert_type(leaf, held) for leaf in leaves]
        whole = jnp.stack([leaf.reshape(leaf.shape or (1, 1)) for leaf in bytes_])
        return jax.lax.bitcast_convert_type(whole, dtype)

    return jax.tree.map(stacked, *arrays)


def project(
    equation: str, x: jax.Array, w: Any, bias: jax.Array | None, inputs_in_8_bits: bool
) -> jax.Array:
    """An einsum with a weight in 8 bits or in floats, in the dtype of `x`."""
    if not isinstance(w, jaxfp8.QArray):
        y = jnp.einsum(equation, x, w.astype(x.dtype))
    else:
        q = in_8_bits(x, w) if inputs_in_8_bits else x
        y = jaxfp8.einsum(equation, q, w, preferred_element_type=x.dtype)
    return y if bias is None else y + bias.astype(y.dtype)


def in_8_bits(x: jax.Array, w: jaxfp8.QArray) -> jaxfp8.QArray:
    """An input with a scale for each token; beside a weight in blocks, for each block of it."""
    tile = min(w.tile_sizes[-1], x.shape[-1])
    is_float = w.zero_point is None and w.qvalue.dtype != jnp.int8
    leading = {axis: 1 for axis in range(x.ndim - 1)}
    dtype = jnp.float8_e4m3fn if is_float else jnp.int8
    return jaxfp8.quantize(x, dtype, tiled_axes={**leading, x.ndim - 1: tile})


def experts(mixture: Mixture, own: Params, inputs_in_8_bits: bool, x: jax.Array) -> jax.Array:
    """The mixture of experts of a layer, as `jaxfp8.nnx.MoE` computes it.

    Rows are sorted by expert, so that each expert multiplies its own tokens alone.
    """
    chosen, weights = route(mixture, own, x)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=mixture.experts)

    def grouped(rows: jax.Array, kind: str) -> jax.Array:
        w = own[f"mlp.{kind}_proj.weight"]
        if not isinstance(w, jaxfp8.QArray):
            return jax.lax.ragged_dot(rows, w.astype(rows.dtype).mT, sizes)
        q = in_8_bits(rows, w) if inputs_in_8_bits else rows
        return jaxfp8.ragged_dot(q, w.mT, sizes, preferred_element_type=rows.dtype)

    rows = x.reshape(-1, x.shape[-1])[order // mixture.per_token]
    rows = grouped(jax.nn.silu(grouped(rows, "gate")) * grouped(rows, "up"), "down")
    y = rows[jnp.argsort(order)].reshape(*chosen.shape, -1)
    y = jnp.einsum("bsk,bskd->bsd", weights, y).astype(x.dtype)
    if not mixture.shared:
        return y

    def shared(kind: str, x: jax.Array) -> jax.Array:
        w = own[f"mlp.shared_experts.{kind}_proj.weight"]
        return project("bsk,nk->bsn", x, w, None, inputs_in_8_bits)

    z = shared("down", jax.nn.silu(shared("gate", x)) * shared("up", x))
    if mixture.shared_gate:
        gate = own["mlp.shared_expert_gate.weight"].T.astype(jnp.float32)
        z = (jax.nn.sigmoid(x.astype(jnp.float32) @ gate) * z).astype(z.dtype)
    return y + z


def route(mixture: Mixture, own: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The experts of each token [B, S, per_token], and their weights."""
    params = {"router": {"kernel": own["mlp.gate.weight"].T}}
    if mixture.sigmoid:
        params["selection_bias"] = own["mlp.gate.e_score_correction_bias"]
    layer = jaxfp8.linen.MoE(mixture.hidden, **mixture.settings)
    routed: Any = layer.apply({"params": params}, x, method="route")
    return routed.experts, routed.weights


def decoder(
    config: Config,
    params: Params,
    ids: jax.Array,
    positions: jax.Array,
    cache: Cache,
    last: jax.Array,
    *,
    span: int,
    inputs_in_8_bits: bool = False,
    dtype: Any = jnp.bfloat16,
) -> tuple[jax.Array, Cache]:
    """Logits [B, vocabulary] after the new token `last` [B], and the cache of all layers.

    Args:
      config: sizes.
      params: what `parameters` gives.
      ids, positions, last, span: as for `llama.model.Decoder`.
      cache: with a first axis for the layers.
      inputs_in_8_bits: whether what meets an 8-bit weight is quantized (W8A8).
      dtype: of what flows between layers.
    """
    table = params["embed"]
    if isinstance(table, jaxfp8.QArray):
        # `jaxfp8.rewrite` widens the rows that are taken alone.
        table = jaxfp8.dequantize(table, dtype)
    x = table[ids].astype(dtype)

    def step(number: Any, carry: Any, own: Params) -> Any:
        def linear(name: str, x: jax.Array) -> jax.Array:
            w, bias = own[f"{name}.weight"], own.get(f"{name}.bias")
            return project("bsk,nk->bsn", x, w, bias, inputs_in_8_bits)

        def norm(name: str, x: jax.Array) -> jax.Array:
            return rms_norm(x, own[f"{name}.weight"], config.eps)

        # The cache is carried, not scanned over, so that it is updated in place.
        x, cache = carry
        of_layer = jax.tree.map(lambda leaf: leaf[number], cache)
        network = None
        if config.mixture is not None and "mlp.gate.weight" in own:
            network = functools.partial(experts, config.mixture, own, inputs_in_8_bits)
        x, of_layer = layer(config, x, linear, norm, network, of_layer, positions, span)
        return x, jax.tree.map(lambda a, b: a.at[number].set(b), cache, of_layer)

    def picked(number: Any, carry: Any) -> Any:
        return step(number, carry, {name: w[number] for name, w in params["layers"].items()})

    if isinstance(params["layers"], list):
        for number, own in enumerate(params["layers"]):
            x, cache = step(number, (x, cache), own)
    else:
        x, cache = jax.lax.fori_loop(0, config.layers, picked, (x, cache))
    x = rms_norm(jnp.take_along_axis(x, last[:, None, None], 1)[:, 0], params["norm"], config.eps)
    # A row of each text alone meets the head, at prefill too: reading it takes the time.
    logits = project("bk,nk->bn", x, params["head"], None, False)
    return logits.astype(jnp.float32), cache
