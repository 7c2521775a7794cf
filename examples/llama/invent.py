"""A checkpoint of random FP8 weights, to measure with where none can be had; `--help` for more."""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

if not __package__:  # run as a script: the folder above has the package
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import ml_dtypes
import numpy as np

import jaxfp8
from llama.config import Config, parse
from llama.names import HEAD, KINDS, TOKENS, module

DESCRIPTION = """\
Writes a Llama, or a mixture of experts, of random weights, in FP8 with a scale for each output
channel, or for blocks of 128 x 128. Tokens, head, norms and routers are in bfloat16. What it says
makes no sense; how fast it says it is that of a model of the same sizes.

    python examples/llama/invent.py llama-8b --like llama-3-8b
    python examples/llama/generate.py llama-8b --ids 1,2,3 --compare
    python examples/llama/invent.py experts --like qwen3-moe-small --block 128
"""
_LLAMA = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
SIZES: dict[str, dict[str, Any]] = {
    "small": _LLAMA
    | {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "vocab_size": 8192,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    "llama-3.2-1b": _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "llama-3-8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "mixtral-8x7b": _LLAMA
    | {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "vocab_size": 32000,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3-30b-a3b": _LLAMA
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "vocab_size": 151936,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
}
_SMALL = {**SIZES["small"], "num_hidden_layers": 4, "head_dim": 64}
SIZES |= {
    "mixtral-small": _SMALL
    | {
        "model_type": "mixtral",
        "intermediate_size": 1792,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3-moe-small": _SMALL
    | {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 384,
        "num_experts": 32,
        "num_experts_per_tok": 8,
    },
    "deepseek-v3-small": _SMALL
    | {
        "model_type": "deepseek_v3",
        "q_lora_rank": 384,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "moe_intermediate_size": 384,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
    },
}


def tensors(config: Config, block: int | None, seed: int = 0) -> dict[str, Any]:
    """Random tensors under the names of Hugging Face.

    Args:
      config: sizes.
      block: size of the blocks that share a scale; None for one by output channel.
      seed: of the draw.
    """
    random = np.random.default_rng(seed)
    width = config.width
    # Weights of a shape are drawn once: layers are alike, and 8 GB of them take seconds.
    codes = functools.cache(lambda shape: _codes(random, shape, block))
    table = config.vocabulary, width
    made: dict[str, Any] = {
        TOKENS: _floats(random, table),
        "model.norm.weight": np.ones(width, ml_dtypes.bfloat16),
    }
    if not config.tied:
        made[HEAD] = _floats(random, table)
    shapes, norms = _attention(config)
    norms |= {"input_layernorm": width, "post_attention_layernorm": width}
    for number in range(config.layers):
        layer = f"model.layers.{number}."
        for norm, length in norms.items():
            made[f"{layer}{norm}.weight"] = np.ones(length, ml_dtypes.bfloat16)
        made |= _router(config, layer, number, random)
        for name, shape in {**shapes, **_networks(config, number)}.items():
            made[f"{layer}{name}.weight"] = codes(shape)
    return made


def _attention(config: Config) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Shapes of the projections of a layer's attention, and sizes of its norms."""
    width, size, latent = config.width, config.head, config.latent
    shapes, norms = {"q_proj": (config.heads * size, width)}, {}
    if latent is None:
        shapes |= dict.fromkeys(("k_proj", "v_proj"), (config.kv_heads * size, width))
        shapes["o_proj"] = (width, config.heads * size)
        norms = dict.fromkeys(("q_norm", "k_norm"), size) if config.qk_norm else {}
    else:
        shapes["kv_a_proj_with_mqa"] = (latent.kv_rank + latent.rotated, width)
        shapes["kv_b_proj"] = (config.heads * (latent.plain + latent.value), latent.kv_rank)
        shapes["o_proj"] = (width, config.heads * latent.value)
        norms["kv_a_layernorm"] = latent.kv_rank
    if latent is not None and latent.q_rank is not None:
        shapes["q_b_proj"] = (shapes.pop("q_proj")[0], latent.q_rank)
        shapes["q_a_proj"] = (latent.q_rank, width)
        norms["q_a_layernorm"] = latent.q_rank
    of_layer = "self_attn.{}".format
    return {of_layer(n): s for n, s in shapes.items()}, {of_layer(n): s for n, s in norms.items()}


def _router(
    config: Config, layer: str, number: int, random: np.random.Generator
) -> dict[str, np.ndarray]:
    """The tensors that choose experts, in floats."""
    mixture = config.experts(number)
    if mixture is None:
        return {}
    gate = f"{layer}{module(config)}.gate"
    made = {f"{gate}.weight": _floats(random, (mixture.experts, config.width))}
    if mixture.sigmoid:
        made[f"{gate}.e_score_correction_bias"] = np.zeros(mixture.experts, np.float32)
    return made


def _networks(config: Config, number: int) -> dict[str, tuple[int, int]]:
    """Names and shapes of the feed-forward weights of a layer."""
    mixture, width = config.experts(number), config.width

    def network(start: str, hidden: int, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        shapes = ((hidden, width), (hidden, width), (width, hidden))
        return {f"{start}.{name}": shape for name, shape in zip(names, shapes, strict=True)}

    usual = [f"{kind}_proj" for kind in KINDS]
    if mixture is None:
        return network("mlp", config.hidden, usual)
    made: dict[str, tuple[int, int]] = {}
    if mixture.shared:
        made |= network("mlp.shared_experts", mixture.shared, usual)
    own = KINDS.values() if config.family == "mixtral" else usual
    for expert in range(mixture.experts):
        made |= network(f"{module(config)}.experts.{expert}", mixture.hidden, own)
    return made


def _floats(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Normal numbers, of which rows repeat after a while: drawing takes longer than writing."""
    some = random.standard_normal((min(shape[0], 4096), shape[1]), np.float32) * shape[1] ** -0.5
    return np.resize(some.astype(ml_dtypes.bfloat16), shape)


def _codes(random: np.random.Generator, shape: tuple[int, int], block: int | None) -> jaxfp8.QArray:
    """All codes but those of NaN, with scales that keep the size of what is multiplied."""
    codes = np.frombuffer(random.bytes(shape[0] * shape[1]), np.uint8).reshape(shape) & 0xF7
    values = codes.view(ml_dtypes.float8_e4m3fn)
    rms = float(np.sqrt(np.mean(values[:16].astype(np.float32) ** 2)))
    counts = (shape[0], 1) if block is None else tuple(-(-n // block) for n in shape)
    scale = np.full(counts, shape[1] ** -0.5 / rms, np.float32)
    tiles = None if block is None else (block, block)
    return jaxfp8.QArray(values, scale, tiles=tiles)  # type: ignore[arg-type]


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes; returns the exit code."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--like", choices=SIZES, default="small")
    parser.add_argument("--block", type=int, help="blocks of so many by so many, such as 128")
    options = parser.parse_args(arguments)
    said: Mapping[str, Any] = SIZES[options.like]
    made = tensors(parse(said), options.block)
    jaxfp8.checkpoint.save(options.folder, made, config=said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
