"""What Hugging Face calls the tensors of a decoder, and which of them there is no use for."""

from __future__ import annotations

import re

import jaxfp8.nnx
from llama.config import Config

# By kind of projection, what Mixtral calls it.
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


def expert_names(config: Config, layer: int, kind: str) -> list[str]:
    """The tensors of one projection ("gate", "up" or "down") of all experts of a layer."""
    inner, name = ("mlp", f"{kind}_proj")
    if config.family == "mixtral":
        inner, name = "block_sparse_moe", _MIXTRAL[kind]
    start = f"model.layers.{layer}.{inner}.experts"
    return [f"{start}.{i}.{name}.weight" for i in range(config.experts)]


def name_of(config: Config, path: str) -> str | list[str]:
    """The tensor, or the tensors, for a parameter of `llama.model.Decoder`."""
    weights = re.fullmatch(r"model/layers/(\d+)/mlp/(gate|up|down)_proj/kernel", path)
    if config.experts and weights:
        return expert_names(config, int(weights[1]), weights[2])
    name = jaxfp8.checkpoint.torch_name(path)
    return name.replace(".mlp.", ".block_sparse_moe.") if config.family == "mixtral" else name


def unused(config: Config) -> str:
    """Tensors that a decoder does not take, as a regular expression.

    Wavelengths are computed. Inputs are quantised as they come, so static scales of theirs are not
    read. A tied head is the table of tokens.
    """
    parts = [r"rotary_emb\.inv_freq$", r"^rope_freqs\.weight$", r"\.input_scale$"]
    return "|".join([*parts, r"^lm_head\.weight$"] if config.tied else parts)
