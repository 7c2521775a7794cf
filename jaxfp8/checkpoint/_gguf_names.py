"""The names and the configuration of Hugging Face for the models of GGUF files.

llama.cpp rotates pairs of neighbours for some families. Their writers therefore alternate the rows
of both halves of each attention head, for queries and keys; readers put them back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxfp8.checkpoint._errors import CheckpointError

ARCHITECTURE = "general.architecture"
ROPE_FACTORS = "rope_freqs.weight"
# What a file is; files without the key are older than adapters.
_TYPE, _MODEL_TYPE, _STATISTICS_TYPE = "general.type", "model", "imatrix"
# By llama.cpp's name of a family: Hugging Face's, and True for alternating rows of heads.
_FAMILIES = {
    "llama": ("llama", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
    "qwen2moe": ("qwen2_moe", False),
    "qwen3moe": ("qwen3_moe", False),
}
_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
# Mixtral's own names; its family is `llama` in files.
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# By key of config.json: the ends of GGUF's keys, below the architecture.
_SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "num_experts_per_tok": "expert_used_count",
}
# Keys with words of their own in config.json, and keys without any meaning for it.
_OTHERS = (
    "expert_count",
    "vocab_size",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "tensor_data_layout",
    "expert_group_count",
    "expert_group_used_count",
)
# Keys of a second name for a size, and the size.
_SAME = {"rope.dimension_count": "head_dim", "attention.value_length": "head_dim"}
# llama.cpp computes these families so, without a key. Hugging Face's defaults differ.
_RENORMALISE = {"qwen2_moe": False, "qwen3_moe": True}
# Llama 3 stretches wavelengths by this rule. Files have the factors alone.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def family(metadata: Mapping[str, Any]) -> str | None:
    """Hugging Face's name of the model's family; None for a family without a table."""
    name = str(metadata.get(ARCHITECTURE))
    if name == "llama" and metadata.get("llama.expert_count"):
        return "mixtral"
    return _FAMILIES[name][0] if name in _FAMILIES else None


def names_of(name: str, metadata: Mapping[str, Any], experts: int) -> list[str]:
    """Hugging Face's names of a tensor: several for so many stacked experts.

    A tensor of another family, or without a place in the table, keeps its name.
    """
    kind = family(metadata)
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+?)(_exps)?(?:\.(\d+))?\.(weight|bias)", name)
    table = _LAYER if found and found[1] else _MODEL
    if kind is None or not found or found[2] not in table:
        return [name]
    layer, part, stacked, expert, end = found.groups()
    if layer is None:
        return [f"{table[part]}.{end}"]
    inner, _, last = table[part].rpartition(".")
    if kind == "mixtral":
        inner, last = inner.replace("mlp", "block_sparse_moe"), _MIXTRAL.get(last, last)
    start = f"model.layers.{layer}." + (f"{inner}." if inner else "")
    if stacked or expert:
        numbers = range(experts) if stacked else [expert]
        return [f"{start}experts.{number}.{last}.{end}" for number in numbers]
    return [f"{start}{last}.{end}"]


def check(file: str, metadata: Mapping[str, Any], kinds: Mapping[str, str]) -> None:
    """Refuses files without weights, and what means something else in a family with a table.

    Args:
      file: its path.
      metadata: of the file.
      kinds: ggml's type of each tensor by its name.

    Raises:
      CheckpointError: it is no whole model, or outputs of a weight in Q8_0 have a scale.
    """
    kind = metadata.get(_TYPE, _MODEL_TYPE)
    got, remedy = f"{_TYPE} is {str(kind)[:40]!r}", "load the model's own file"
    if kind == _STATISTICS_TYPE:
        needs = "it has statistics for llama.cpp's quantizer, and no weights"
        raise CheckpointError(file, "", got, needs, remedy)
    if family(metadata) is None:
        return
    if kind != _MODEL_TYPE:
        needs = f"{_MODEL_TYPE!r} is needed: the order of rows of others is unknown"
        raise CheckpointError(file, "", got, needs, remedy)
    for name in kinds:
        weight = name.removesuffix(".scale") + ".weight"
        if name.endswith(".scale") and kinds.get(weight) == "Q8_0":
            got = f"scales the output of {weight!r}"
            needs = "weights in Q8_0 have no other scale"
            raise CheckpointError(file, name, got, needs, "fetch the model's own Q8_0 file")


def alternating_heads(file: str, name: str, rows: int, metadata: Mapping[str, Any]) -> int:
    """The number of heads whose rows alternate in a tensor of so many rows; 0 for rows in order.

    Raises:
      CheckpointError: the file does not say how many heads there are, or their size is another.
    """
    architecture = str(metadata.get(ARCHITECTURE))
    found = re.fullmatch(r"blk\.\d+\.attn_(q|k)\.(weight|bias)", name)
    if found is None or not _FAMILIES.get(architecture, ("", False))[1]:
        return 0
    heads = f"{architecture}.attention.head_count"
    # Without a count of its own, each query has a key.
    count = metadata.get(heads if found[1] == "q" else f"{heads}_kv", metadata.get(heads))
    if type(count) is not int or count < 1:
        needs = f"one number under {heads!r} is needed to put its rows in order"
        raise CheckpointError(file, name, f"has {count!r} heads", needs, "fetch the file again")
    size = _head_size(metadata, architecture) or rows // count
    if size % 2 or rows != count * size:
        of = f"{size} rows" if size % 2 == 0 else "an even size"
        needs = f"the metadata says {count} heads of {of}"
        raise CheckpointError(file, name, f"has {rows} rows", needs, "fetch the file again")
    return count


def _head_size(metadata: Mapping[str, Any], architecture: str) -> int:
    """Rows of a head; 0 if the metadata does not tell them."""

    def said(end: str) -> int:
        value = metadata.get(f"{architecture}.{end}")
        return value if type(value) is int else 0

    width, heads = said("embedding_length"), said("attention.head_count")
    return said("attention.key_length") or (width // heads if heads > 0 else 0)


def config_of(
    file: str, metadata: Mapping[str, Any], shapes: Mapping[str, Any], factors: np.ndarray | None
) -> dict[str, Any]:
    """The model's config.json, in Hugging Face's words.

    Args:
      file: its path.
      metadata: of the file.
      shapes: of its tensors by Hugging Face's names.
      factors: of the wavelengths of rotary positions, if the file has some.

    Returns:
      The configuration; empty for a family without a table.

    Raises:
      CheckpointError: the metadata has no words in config.json.
    """
    kind, architecture = family(metadata), str(metadata.get(ARCHITECTURE))
    if kind is None:
        return {}
    said: dict[str, Any] = {"model_type": kind, "architectures": [_CLASSES[kind]]}
    for key, end in _SIZES.items():
        value = metadata.get(f"{architecture}.{end}")
        if type(value) not in (int, float, type(None)):
            needs = "config.json has one number for all layers"
            got = f"{architecture}.{end} is {str(value)[:60]}"
            raise CheckpointError(file, "", got, needs, "fetch the model's safetensors files")
        if value is not None:
            said[key] = _short(value) if isinstance(value, float) else value
    _check_keys(file, metadata, said)
    said |= {"norm_topk_prob": _RENORMALISE[kind]} if kind in _RENORMALISE else {}
    experts = metadata.get(f"{architecture}.expert_count")
    if experts:
        said["num_local_experts" if kind == "mixtral" else "num_experts"] = experts
    table = shapes.get("model.embed_tokens.weight")
    if table is not None:
        said["vocab_size"] = table[0]
    said["tie_word_embeddings"] = "lm_head.weight" not in shapes
    for end in ("bos", "eos"):
        token = metadata.get(f"tokenizer.ggml.{end}_token_id")
        said |= {} if token is None else {f"{end}_token_id": token}
    scaling = _scaling(file, metadata, said, factors)
    return {**said, **({"rope_scaling": scaling} if scaling else {})}


def _check_keys(file: str, metadata: Mapping[str, Any], said: Mapping[str, Any]) -> None:
    """Refuses what would change the model, and is not said in config.json."""
    start = f"{metadata.get(ARCHITECTURE)}."
    width, heads = said.get("hidden_size"), said.get("num_attention_heads")
    sizes = {"head_dim": width // heads if width and heads else None, **said}
    for key, value in metadata.items():
        end = key.removeprefix(start)
        is_said = end == key or end in _OTHERS or end in _SIZES.values()
        if not is_said and value != sizes.get(_SAME.get(end, "")):
            got, needs = f"the metadata has {key} = {str(value)[:60]}", "config.json has no words"
            remedy = "take the configuration of the model's safetensors files"
            raise CheckpointError(file, "", got, f"{needs} for it here", remedy)


def _short(value: float) -> float:
    """A float32 as the shortest decimal that rounds to it."""
    return float(str(np.float32(value)))


def _scaling(
    file: str, metadata: Mapping[str, Any], said: Mapping[str, Any], factors: np.ndarray | None
) -> dict[str, Any] | None:
    """How wavelengths are stretched, as config.json says it."""
    start = f"{metadata.get(ARCHITECTURE)}.rope.scaling"
    factor = _short(float(metadata.get(f"{start}.factor") or 1))
    # llama.cpp's default: positions of such a file are divided by the factor.
    kind = metadata.get(f"{start}.type", "none" if factor == 1 else "linear")
    if factors is not None:
        return _llama3(file, said, factors)
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": factor}
    original = metadata.get(f"{start}.original_context_length")
    return scaling | ({} if original is None else {"original_max_position_embeddings": original})


def _llama3(file: str, said: Mapping[str, Any], factors: np.ndarray) -> dict[str, Any]:
    """Llama 3's rule, if it gives the factors of the file."""
    factor, size = float(factors.max()), 2 * factors.size
    plain = float(said.get("rope_theta", 10000.0)) ** (-np.arange(0, size, 2) / size)
    turns = _LLAMA3["original_max_position_embeddings"] * plain / (2 * np.pi)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(factors, 1 / (kept + (1 - kept) / factor), rtol=1e-3):
        needs = "config.json has words for Llama 3's rule alone"
        remedy = "take the configuration of the model's safetensors files"
        raise CheckpointError(file, ROPE_FACTORS, "has other factors", needs, remedy)
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
