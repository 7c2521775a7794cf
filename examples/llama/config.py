"""Sizes of a decoder, from the config.json of Hugging Face."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jaxfp8

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "dots1",
    "deepseek_v3",
)
_QWEN2 = ("qwen2", "qwen2_moe")
# Names of the hidden size of a dense layer, and of an expert.
_DENSE, _EXPERT = "intermediate_size", "moe_intermediate_size"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions.

    Attributes:
      theta: base of the wavelengths.
      kind: "default", "linear", "llama3" or "yarn": how they are stretched.
      factor: by how much.
      original: length of context that the model was first trained with.
      low, high: of "llama3": wavelengths longer than original / low are stretched, those shorter
        than original / high are not. Of "yarn": `beta_slow` and `beta_fast`.
      attention: by what "yarn" multiplies queries and keys; None for its own choice.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original: int = 8192
    low: float = 1.0
    high: float = 4.0
    attention: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """Experts in place of the feed-forward network.

    Attributes:
      experts, per_token: number of experts, and of those of a token.
      hidden, shared: hidden sizes of an expert, and of all shared ones together.
      shared_gate: whether a gate multiplies the shared expert.
      dense: how many first layers are dense.
      sigmoid: whether scores are sigmoids, chosen with a bias, or a softmax.
      renormalise: whether the weights of the experts of a token add up to 1.
      scale: a factor of these weights.
      groups, top_groups: number of groups of experts, and of those a token chooses from.
    """

    experts: int
    per_token: int
    hidden: int
    shared: int = 0
    shared_gate: bool = False
    dense: int = 0
    sigmoid: bool = False
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `jaxfp8.nnx.MoE`, and of `jaxfp8.linen.MoE`."""
        return {
            "num_experts": self.experts,
            "top_k": self.per_token,
            "score": "sigmoid" if self.sigmoid else "softmax",
            "renormalize": self.renormalise,
            "scale": self.scale,
            "num_groups": self.groups,
            "top_groups": self.top_groups,
            "use_selection_bias": self.sigmoid,
            "shared_features": self.shared,
            "use_shared_gate": self.shared_gate,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Attention through a vector of low rank, as in DeepSeek-V3.

    Attributes:
      q_rank, kv_rank: sizes of the vectors that queries, and keys and values, are made of; q_rank
        may be None.
      plain, rotated: sizes of the parts of a head's query and key without and with positions.
      value: size of a head's value.
    """

    q_rank: int | None
    kv_rank: int
    plain: int
    rotated: int
    value: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a decoder.

    Attributes:
      family: model_type of config.json.
      layers, width, hidden, vocabulary: of the network.
      heads, kv_heads, head: number of heads of queries, of keys and values, and their size.
      latent: low ranks of attention, or None.
      sharpness: a factor of attention's scores, beside 1 / sqrt(head).
      eps: of RMSNorm.
      rope: rotary positions.
      window: how many tokens back attention sees, or None.
      tied: whether the head is the table of tokens.
      qkv_bias, out_bias: whether projections of attention have a bias.
      qk_norm: whether queries and keys are normalised.
      mixture: experts; None for a dense network.
      end: ids of tokens that end a text.
    """

    family: str = "llama"
    layers: int
    width: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head: int
    latent: Latent | None = None
    sharpness: float = 1.0
    eps: float = 1e-5
    rope: Rope = Rope()
    window: int | None = None
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    mixture: Mixture | None = None
    end: tuple[int, ...] = ()

    def experts(self, layer: int) -> Mixture | None:
        """The experts of a layer; None if it is dense."""
        is_dense = self.mixture is None or layer < self.mixture.dense
        return None if is_dense else self.mixture


def read(folder: str | os.PathLike[str]) -> Config:
    """The configuration of a folder as it was downloaded, or of a GGUF file.

    Raises:
      ValueError: config.json is missing or broken, or as of `parse`.
    """
    path = pathlib.Path(folder) / "config.json"
    if not path.is_file() and is_gguf(folder):
        with jaxfp8.checkpoint.open(folder) as tensors:
            return parse(tensors.config())
    if not path.is_file():
        raise ValueError(f"{path} is missing; give the folder as it was downloaded")
    try:
        said = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); fetch it again") from error
    try:
        return parse(said)
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}; fetch it again") from error


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a GGUF file, or a folder of one."""
    place = pathlib.Path(path)
    return place.suffix == ".gguf" or any(place.glob("*.gguf"))


def parse(said: Mapping[str, Any]) -> Config:
    """The same from what config.json says.

    Raises:
      ValueError: it is of another family, or says what this decoder does not compute.
    """
    family = said.get("model_type", "llama")
    if family not in FAMILIES:
        raise ValueError(f"config.json: model_type {family!r} is not one of {', '.join(FAMILIES)}")
    if said.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act {said['hidden_act']!r}, but silu is computed")
    if family in ("qwen2_moe", "qwen3_moe") and (
        said.get("mlp_only_layers") or said.get("decoder_sparse_step", 1) != 1
    ):
        raise ValueError("config.json: some layers are dense; experts in every layer are needed")
    heads, width = said["num_attention_heads"], said["hidden_size"]
    latent = _latent(said) if family == "deepseek_v3" else None
    head = said.get("head_dim") or (128 if family == "qwen3" else width // heads)
    return Config(
        family=family,
        layers=said["num_hidden_layers"],
        width=width,
        hidden=said.get(_DENSE) or said[_EXPERT],
        vocabulary=said["vocab_size"],
        heads=heads,
        kv_heads=said.get("num_key_value_heads") or heads,
        head=head if latent is None else latent.plain + latent.rotated,
        latent=latent,
        sharpness=_sharpness(said) if latent is not None else 1.0,
        eps=said.get("rms_norm_eps", 1e-5),
        rope=_rope(said),
        window=said.get("sliding_window") if _uses_window(said) else None,
        tied=said.get("tie_word_embeddings", False),
        qkv_bias=family in _QWEN2 or said.get("attention_bias", False),
        out_bias=family not in _QWEN2 and said.get("attention_bias", False),
        qk_norm=family in ("qwen3", "qwen3_moe", "dots1"),
        mixture=_mixture(family, said),
        end=_ends(said.get("eos_token_id")),
    )


def _latent(said: Mapping[str, Any]) -> Latent:
    return Latent(
        q_rank=said.get("q_lora_rank"),
        kv_rank=said["kv_lora_rank"],
        plain=said["qk_nope_head_dim"],
        rotated=said["qk_rope_head_dim"],
        value=said["v_head_dim"],
    )


def _sharpness(said: Mapping[str, Any]) -> float:
    """DeepSeek's part of YaRN that is in the scores."""
    scaling = said.get("rope_parameters") or said.get("rope_scaling") or {}
    return _mscale(scaling, "mscale_all_dim") ** 2


def _mscale(scaling: Mapping[str, Any], name: str) -> float:
    return 0.1 * scaling.get(name, 0.0) * math.log(scaling.get("factor", 1.0)) + 1


def _mixture(family: str, said: Mapping[str, Any]) -> Mixture | None:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((said[name] for name in names if said.get(name)), 0)
    if not count:
        return None
    hidden = said.get(_EXPERT) or said[_DENSE]
    gated = said.get("shared_expert_intermediate_size") if family == "qwen2_moe" else None
    return Mixture(
        experts=count,
        per_token=said.get("num_experts_per_tok") or 2,
        hidden=hidden,
        shared=gated or (said.get("n_shared_experts") or 0) * hidden,
        shared_gate=gated is not None,
        dense=said.get("first_k_dense_replace") or 0,
        sigmoid=family in ("dots1", "deepseek_v3"),
        renormalise=family == "mixtral" or said.get("norm_topk_prob", family != "qwen2_moe"),
        scale=said.get("routed_scaling_factor") or 1.0,
        groups=said.get("n_group") or 1,
        top_groups=said.get("topk_group") or 1,
    )


def _uses_window(said: Mapping[str, Any]) -> bool:
    """Qwen says whether the window counts; Mistral and Mixtral have one or not."""
    return said.get("use_sliding_window", said.get("model_type") in ("mistral", "mixtral"))


def _ends(said: Any) -> tuple[int, ...]:
    return tuple(said) if isinstance(said, list) else () if said is None else (said,)


def _rope(said: Mapping[str, Any]) -> Rope:
    """From `rope_parameters`, or from `rope_theta` and `rope_scaling` as older files have them."""
    scaling = said.get("rope_parameters") or said.get("rope_scaling") or {}
    theta = scaling.get("rope_theta") or said.get("rope_theta", 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ValueError(
            f"config.json: rope_scaling {kind!r}, but linear, llama3 or yarn is needed"
        )
    low, high = (
        ("beta_slow", "beta_fast") if kind == "yarn" else ("low_freq_factor", "high_freq_factor")
    )
    context = said.get("max_position_embeddings", 8192)
    return Rope(
        theta=float(theta),
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        original=scaling.get("original_max_position_embeddings") or context,
        low=float(scaling.get(low, 1.0)),
        high=float(scaling.get(high, 32.0 if kind == "yarn" else 4.0)),
        attention=_attention_factor(scaling),
    )


def _attention_factor(scaling: Mapping[str, Any]) -> float | None:
    """Of "yarn", if the file says it; DeepSeek's is a ratio."""
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return _mscale(scaling, "mscale") / _mscale(scaling, "mscale_all_dim")
    return scaling.get("attention_factor")
