"""A checkpoint of random FP8 weights, to measure with where none can be had; `--help` for more."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

if not __package__:  # run as a script: the folder above has the package
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import ml_dtypes
import numpy as np

import jaxfp8
from llama.config import Config, parse

DESCRIPTION = """\
Writes a Llama of random weights, in FP8 with a scale for each output channel, or for blocks of
128 x 128. Tokens, head and norms are in bfloat16. What it says makes no sense; how fast it says it
is that of a model of the same sizes.

    python examples/llama/invent.py llama-8b --like llama-3-8b
    python examples/llama/generate.py llama-8b --ids 1,2,3 --compare
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
    "llama-3-8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}


def tensors(config: Config, block: int | None, seed: int = 0) -> dict[str, Any]:
    """Random tensors under the names of Hugging Face.

    Args:
      config: sizes of a dense decoder.
      block: size of the blocks that share a scale; None for one by output channel.
      seed: of the draw.
    """
    random = np.random.default_rng(seed)
    width, size = config.width, config.head
    table = config.vocabulary, width
    made: dict[str, Any] = {
        "model.embed_tokens.weight": _floats(random, table),
        "model.norm.weight": np.ones(width, ml_dtypes.bfloat16),
        "lm_head.weight": _floats(random, table),
    }
    shapes = {
        "self_attn.q_proj": (config.heads * size, width),
        "self_attn.k_proj": (config.kv_heads * size, width),
        "self_attn.v_proj": (config.kv_heads * size, width),
        "self_attn.o_proj": (width, config.heads * size),
        "mlp.gate_proj": (config.hidden, width),
        "mlp.up_proj": (config.hidden, width),
        "mlp.down_proj": (width, config.hidden),
    }
    for number in range(config.layers):
        layer = f"model.layers.{number}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{layer}.{norm}.weight"] = np.ones(width, ml_dtypes.bfloat16)
        for name, shape in shapes.items():
            made[f"{layer}.{name}.weight"] = _codes(random, shape, block)
    return made


def _floats(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Normal numbers, of which rows repeat after a while: drawing takes longer than writing."""
    some = random.standard_normal((min(shape[0], 4096), shape[1]), np.float32) * shape[1] ** -0.5
    return np.resize(some.astype(ml_dtypes.bfloat16), shape)


def _codes(random: np.random.Generator, shape: tuple[int, int], block: int | None) -> jaxfp8.QArray:
    """All codes but those of NaN, with scales that keep the size of what is multiplied."""
    codes = random.integers(0, 256, shape, np.uint8) & 0xF7
    values = codes.view(ml_dtypes.float8_e4m3fn)
    rms = float(np.sqrt(np.mean(values[:16].astype(np.float32) ** 2)))
    counts = (shape[0], 1) if block is None else tuple(-(-n // block) for n in shape)
    scale = np.full(counts, shape[1] ** -0.5 / rms, np.float32)
    tiles = None if block is None else (block, block)
    return jaxfp8.QArray(values, scale, tiles=tiles)  # type: ignore[arg-type]


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
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
