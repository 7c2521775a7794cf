"""What Hugging Face calls the tensors of a decoder, and which of them there is no use for."""

from __future__ import annotations

import re

import jaxfp8.nnx
from llama.config import Config

# The table of tokens, and the product to the vocabulary.
TOKENS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# By kind of projection, what Mixtral calls it.
KINDS = {"gate": "w1", "up": "w3", "down": "w2"}


def module(config: Config) -> str:
    """What a family calls the module around its experts."""
    return "block_sparse_moe" if config.family == "mixtral" else "mlp"


def shared_module(config: Config) -> str:
    """What a family calls its shared experts."""
    return "shared_expert" if config.family == "qwen2_moe" else "shared_experts"


def expert_names(config: Config, layer: int, kind: str) -> list[str]:
    """The tensors of one projection ("gate", "up" or "down") of all experts of a layer."""
    name = KINDS[kind] if config.family == "mixtral" else f"{kind}_proj"
    start = f"model.layers.{layer}.{module(config)}.experts"
    mixture = config.experts(layer)
    return [f"{start}.{i}.{name}.weight" for i in range(mixture.experts if mixture else 0)]


def name_of(config: Config, path: str) -> str | list[str] | list[list[str]]:
    """The tensor, or the tensors, for a parameter of `llama.model.Decoder`."""
    found = re.fullmatch(r"model/layers/(\d+)/mlp/([a-z_]+)(/kernel)?", path)
    if found and config.experts(int(found[1])):
        return _of_mixture(config, int(found[1]), found[2])
    return jaxfp8.checkpoint.torch_name(path)


def _of_mixture(config: Config, layer: int, part: str) -> str | list[str] | list[list[str]]:
    """The tensors of a part of `jaxfp8.nnx.MoE`: gate and up are one weight there."""
    start = f"model.layers.{layer}.{module(config)}"
    if part == "up":
        both = (expert_names(config, layer, kind) for kind in ("gate", "up"))
        return [[gate, up] for gate, up in zip(*both, strict=True)]
    if part == "down":
        return expert_names(config, layer, part)
    if part == "shared_up":
        shared = f"{start}.{shared_module(config)}"
        return [f"{shared}.{kind}_proj.weight" for kind in ("gate", "up")]
    names = {
        "router": "gate.weight",
        "selection_bias": "gate.e_score_correction_bias",
        "shared_down": f"{shared_module(config)}.down_proj.weight",
        "shared_gate": "shared_expert_gate.weight",
    }
    return f"{start}.{names[part]}"


def unused(config: Config) -> str:
    """Tensors that a decoder does not take, as a regular expression.

    Wavelengths are computed. Inputs are quantized as they come, so static scales of theirs are not
    read. A tied head is the table of tokens.
    """
    # DeepSeek-V3 has one more layer, to predict a second token.
    more = rf"^model\.layers\.{config.layers}\."
    parts = [more, r"rotary_emb\.inv_freq$", r"^rope_freqs\.weight$", r"\.input_scale$"]
    return "|".join([*parts, r"^lm_head\.weight$"] if config.tied else parts)
