"""Small random checkpoints of the families, and the decoder in float64 by numpy."""

import json

import jax.numpy as jnp
import mixtures
import numpy as np

import jaxfp8
from llama.config import parse

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 39,
}
FAMILIES = {
    "llama 3": LLAMA
    | {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": 5, "head_dim": 16},
    "qwen 2": LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen 3": LLAMA
    | {
        "model_type": "qwen3",
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mixtral": LLAMA | {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen 3 moe": LLAMA
    | {
        "model_type": "qwen3_moe",
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": False,
    },
    "qwen 2 moe": LLAMA
    | {
        "model_type": "qwen2_moe",
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "dots 1": LLAMA
    | {
        "model_type": "dots1",
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
    },
}
FAMILIES["deepseek 3"] = FAMILIES["dots 1"] | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
}


def floats(said, seed=0):
    """Random float32 tensors with the names and shapes of Hugging Face."""
    config, random = parse(said), np.random.default_rng(seed)
    tensors = {}

    def matrix(name, rows, columns, bias=False):
        tensors[f"{name}.weight"] = random.normal(size=(rows, columns)) * columns**-0.5
        if bias:
            tensors[f"{name}.bias"] = random.normal(size=rows) * 0.2

    def gain(name, size):
        tensors[f"{name}.weight"] = random.uniform(0.5, 1.5, size)

    matrix("model.embed_tokens", config.vocabulary, config.width)
    for number in range(config.layers):
        layer = f"model.layers.{number}"
        gain(f"{layer}.input_layernorm", config.width)
        gain(f"{layer}.post_attention_layernorm", config.width)
        if config.latent:
            latent_matrices(config, f"{layer}.self_attn", matrix, gain)
        for name, heads in (
            ()
            if config.latent
            else (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads))
        ):
            size = heads * config.head
            matrix(f"{layer}.self_attn.{name}_proj", size, config.width, config.qkv_bias)
        mixed = config.heads * (config.latent.value if config.latent else config.head)
        matrix(f"{layer}.self_attn.o_proj", config.width, mixed)
        if config.qk_norm:
            gain(f"{layer}.self_attn.q_norm", config.head)
            gain(f"{layer}.self_attn.k_norm", config.head)
        for start, hidden, (gate, up, down) in networks(config, number):
            matrix(f"{start}.{gate}", hidden, config.width)
            matrix(f"{start}.{up}", hidden, config.width)
            matrix(f"{start}.{down}", config.width, hidden)
        mixture = config.experts(number)
        if mixture:
            matrix(f"{layer}.{inner(config)}.gate", mixture.experts, config.width)
        if mixture and mixture.shared_gate:
            matrix(f"{layer}.mlp.shared_expert_gate", 1, config.width)
        if mixture and mixture.sigmoid:
            bias = random.normal(size=mixture.experts) * 0.1
            tensors[f"{layer}.{inner(config)}.gate.e_score_correction_bias"] = bias
    gain("model.norm", config.width)
    if not config.tied:
        matrix("lm_head", config.vocabulary, config.width)
    return {name: jnp.asarray(w, jnp.float32) for name, w in tensors.items()}


def latent_matrices(config, start, matrix, gain):
    latent = config.latent
    matrix(f"{start}.q_a_proj", latent.q_rank, config.width)
    gain(f"{start}.q_a_layernorm", latent.q_rank)
    matrix(f"{start}.q_b_proj", config.heads * config.head, latent.q_rank)
    matrix(f"{start}.kv_a_proj_with_mqa", latent.kv_rank + latent.rotated, config.width)
    gain(f"{start}.kv_a_layernorm", latent.kv_rank)
    matrix(f"{start}.kv_b_proj", config.heads * (latent.plain + latent.value), latent.kv_rank)


def inner(config):
    return "block_sparse_moe" if config.family == "mixtral" else "mlp"


def networks(config, number):
    """The feed-forward networks of a layer, their sizes, and what their parts are called."""
    layer, mixture = f"model.layers.{number}", config.experts(number)
    names = (
        ("w1", "w3", "w2") if config.family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    )
    if not mixture:
        return [(f"{layer}.mlp", config.hidden, names)]
    start = f"{layer}.{inner(config)}"
    own = [(f"{start}.experts.{i}", mixture.hidden, names) for i in range(mixture.experts)]
    shared = "shared_expert" if mixture.shared_gate else "shared_experts"
    return own + [(f"{start}.{shared}", mixture.shared, names)] * bool(mixture.shared)


def is_linear(name):
    """Whether a published checkpoint has this tensor in 8 bits: no norm, no router."""
    is_weight = "layers" in name and name.endswith(".weight")
    return is_weight and "norm" not in name and not name.endswith("gate.weight")


FORMATS = {
    "channel": lambda w: jaxfp8.quantize(w, channelwise_axes=(0,)),
    "block": lambda w: jaxfp8.quantize(w, tiled_axes={0: 16, 1: 16}),
    "int8": lambda w: jaxfp8.quantize(w, jnp.int8, channelwise_axes=(0,)),
    "tensor": jaxfp8.quantize,
}


def write(folder, said, format=None):
    """A checkpoint of a family in a format; what its tensors stand for in float64."""
    tensors = floats(said)
    if format is not None:
        kind = FORMATS[format]
        tensors = {n: kind(w) if is_linear(n) else w for n, w in tensors.items()}
    jaxfp8.checkpoint.save(folder, tensors, config=said)
    wide = {
        n: jaxfp8.dequantize(w) if isinstance(w, jaxfp8.QArray) else w for n, w in tensors.items()
    }
    assert json.loads((folder / "config.json").read_text())["model_type"] == said["model_type"]
    return {name: np.asarray(w, np.float64) for name, w in wide.items()}


# The decoder once more, in float64, one text at a time, without a cache.


def logits(said, tensors, ids):
    """Logits [S, vocabulary] after each token of a text."""
    config = parse(said)
    x = tensors["model.embed_tokens.weight"][ids]
    for number in range(config.layers):
        layer = f"model.layers.{number}"
        x = x + attention(
            config,
            tensors,
            f"{layer}.self_attn",
            norm(config, tensors, f"{layer}.input_layernorm", x),
        )
        y = norm(config, tensors, f"{layer}.post_attention_layernorm", x)
        x = x + feed_forward(config, tensors, number, y)
    head = "model.embed_tokens" if config.tied else "lm_head"
    return norm(config, tensors, "model.norm", x) @ tensors[f"{head}.weight"].T


def norm(config, tensors, name, x):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + config.eps) * tensors[f"{name}.weight"]


def linear(tensors, name, x):
    return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0)


def latent_attention(config, tensors, name, x):
    """Head by head, as the paper writes it."""
    own, length = config.latent, len(x)
    low = norm(config, tensors, f"{name}.q_a_layernorm", linear(tensors, f"{name}.q_a_proj", x))
    q = linear(tensors, f"{name}.q_b_proj", low).reshape(length, config.heads, -1)
    both = linear(tensors, f"{name}.kv_a_proj_with_mqa", x)
    shared = turned(config, both[:, None, own.kv_rank :])[:, 0]
    low = norm(config, tensors, f"{name}.kv_a_layernorm", both[:, : own.kv_rank])
    kv = linear(tensors, f"{name}.kv_b_proj", low).reshape(length, config.heads, -1)
    stretch = 0.1 * 0.7 * np.log(4.0) + 1  # of the configuration above
    outs = []
    for head in range(config.heads):
        k, v = kv[:, head, : own.plain], kv[:, head, own.plain :]
        positioned = turned(config, q[:, head : head + 1, own.plain :])[:, 0]
        scores = q[:, head, : own.plain] @ k.T + positioned @ shared.T
        scores = scores * stretch**2 / np.sqrt(own.plain + own.rotated)
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        outs.append(share / share.sum(-1, keepdims=True) @ v)
    return linear(tensors, f"{name}.o_proj", np.concatenate(outs, -1))


def turned(config, x):
    """Neighbours as complex numbers, with YaRN's ratio of factors."""
    waves = np.array([wave(config.rope, x.shape[-1], i) for i in range(x.shape[-1] // 2)])
    ratio = (0.1 * np.log(4.0) + 1) / (0.1 * 0.7 * np.log(4.0) + 1)
    y = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * np.arange(len(x))[:, None] * waves)[:, None]
    return np.stack([y.real, y.imag], -1).reshape(x.shape) * ratio


def attention(config, tensors, name, x):
    if config.latent:
        return latent_attention(config, tensors, name, x)
    length, size = len(x), config.head
    q, k, v = (linear(tensors, f"{name}.{n}_proj", x).reshape(length, -1, size) for n in "qkv")
    if config.qk_norm:
        q = norm(config, tensors, f"{name}.q_norm", q)
        k = norm(config, tensors, f"{name}.k_norm", k)
    q, k = rotated(config, q), rotated(config, k)
    k, v = (np.repeat(a, config.heads // config.kv_heads, 1) for a in (k, v))
    out = np.zeros_like(q)
    for s in range(length):
        first = 0 if config.window is None else max(0, s - config.window + 1)
        scores = np.einsum("hd,thd->ht", q[s], k[first : s + 1]) / np.sqrt(size)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        out[s] = np.einsum("ht,thd->hd", share, v[first : s + 1])
    return linear(tensors, f"{name}.o_proj", out.reshape(length, -1))


def rotated(config, x):
    """By complex numbers; the wavelengths by the formulas of the papers, a pair at a time."""
    half, scale = x.shape[-1] // 2, 1.0
    turns = np.array([wave(config.rope, x.shape[-1], i) for i in range(half)])
    if config.rope.kind == "yarn":
        scale = 0.1 * np.log(config.rope.factor) + 1
    spin = np.exp(1j * np.arange(len(x))[:, None] * turns) * scale
    y = (x[..., :half] + 1j * x[..., half:]) * spin[:, None]
    return np.concatenate([y.real, y.imag], -1)


def wave(rope, size, pair):
    plain = rope.theta ** (-2 * pair / size)
    length = 2 * np.pi / plain
    if rope.kind == "llama3":
        if length < rope.original / rope.high:
            return plain
        if length > rope.original / rope.low:
            return plain / rope.factor
        smooth = (rope.original / length - rope.low) / (rope.high - rope.low)
        return (1 - smooth) * plain / rope.factor + smooth * plain
    if rope.kind == "yarn":

        def find(turns):
            return size * np.log(rope.original / (turns * 2 * np.pi)) / (2 * np.log(rope.theta))

        low, high = max(np.floor(find(rope.high)), 0), min(np.ceil(find(rope.low)), size - 1)
        kept = 1 - min(max((pair - low) / max(high - low, 0.001), 0), 1)
        return plain / rope.factor * (1 - kept) + plain * kept
    return plain


def feed_forward(config, tensors, number, x):
    outs, mixture = [], config.experts(number)
    for start, _, (gate, up, down) in networks(config, number):
        h = linear(tensors, f"{start}.{gate}", x)
        h = h / (1 + np.exp(-h)) * linear(tensors, f"{start}.{up}", x)
        outs.append(linear(tensors, f"{start}.{down}", h))
    if not mixture:
        return outs[0]
    gate = f"model.layers.{number}.{inner(config)}.gate"
    bias = tensors.get(f"{gate}.e_score_correction_bias", 0.0)
    weights = mixtures.choice(linear(tensors, gate, x), mixture.settings, bias)
    y = sum(w[:, None] * out for w, out in zip(weights.T, outs, strict=False))
    if mixture.shared_gate:
        score = linear(tensors, f"model.layers.{number}.mlp.shared_expert_gate", x)
        outs[-1] = outs[-1] / (1 + np.exp(-score))
    return y + outs[-1] if mixture.shared else y
