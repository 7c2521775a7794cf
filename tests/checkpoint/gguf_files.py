"""GGUF files as llama.cpp's writers make them, byte by byte, without the code under test."""

import struct

import ml_dtypes
import numpy as np

KINDS = {
    np.dtype(np.float32): 0,
    np.dtype(np.float16): 1,
    np.dtype(np.float64): 28,
    np.dtype(ml_dtypes.bfloat16): 30,
}
Q8_0 = 8
LLAMA = {
    "general.architecture": "llama",
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
}
W = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)


def blocks(w):
    """[N, K] as Q8_0: a float16 scale and 32 codes by block; halves are rounded away from zero."""
    w = np.asarray(w, np.float32).reshape(*w.shape[:-1], -1, 32)
    exact = np.abs(w).max(-1, keepdims=True) / np.float32(127)
    inverse = np.divide(1, exact, where=exact != 0, out=np.zeros_like(exact))
    steps = w * inverse
    rounded = np.trunc(steps + np.copysign(np.float32(0.5), steps)).astype(np.int8)
    halves = exact.astype(np.float16)
    return np.concatenate([halves.view(np.uint8), rounded.view(np.uint8)], -1)


def values(raw):
    """The values of such blocks, float64 [N, K]."""
    scale = raw[..., :2].copy().view(np.float16).astype(np.float64)
    found = raw[..., 2:].view(np.int8) * scale
    return found.reshape(*found.shape[:-2], -1)


def text(value):
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def typed(value):
    """A value of the metadata with its type."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    inner = typed(value[0])[:4]
    return (
        struct.pack("<I", 9)
        + inner
        + struct.pack("<Q", len(value))
        + b"".join(typed(item)[4:] for item in value)
    )


def file_bytes(metadata, tensors, alignment=32, version=3):
    """A file.

    Args:
      metadata: values by key.
      tensors: float arrays by name; a uint8 array [..., blocks, 34] is in Q8_0, and a tuple of a
        type, a shape and bytes is in that type.
    """
    records, data = b"", b""
    for name, array in tensors.items():
        kind, shape, raw = described(array)
        data += bytes(-len(data) % alignment)
        sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        records += text(name) + struct.pack("<I", len(shape)) + sizes
        records += struct.pack("<IQ", kind, len(data))
        data += raw
    data += bytes(-len(data) % alignment)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(text(key) + typed(value) for key, value in metadata.items()) + records
    return head + bytes(-len(head) % alignment) + data


def written(path, tensors, metadata=LLAMA, **options):
    """The path, with such a file there."""
    path.write_bytes(file_bytes(metadata, tensors, **options))
    return path


def described(array):
    if isinstance(array, tuple):
        return array
    if array.dtype == np.uint8:
        return Q8_0, (*array.shape[:-2], array.shape[-2] * 32), array.tobytes()
    return KINDS[array.dtype], array.shape, array.tobytes()


def alternated(rows, heads):
    """The rows of a query or key as llama.cpp's converter orders them."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
EXPERTS = {
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "w1": "ffn_gate",
    "w3": "ffn_up",
    "w2": "ffn_down",
}


def name_of(name):
    """llama.cpp's name of Hugging Face's, and the number of an expert or None."""
    parts = name.split(".")
    end = parts.pop()
    if parts[:2] != ["model", "layers"]:
        return f"{NAMES['.'.join(parts)]}.{end}", None
    if "experts" in parts:
        return f"blk.{parts[2]}.{EXPERTS[parts[-1]]}_exps.{end}", int(parts[-2])
    return f"blk.{parts[2]}.{NAMES['.'.join(parts[3:])]}.{end}", None


def is_8_bit(name):
    """Whether llama.cpp writes a tensor in Q8_0: no norm, no router, no bias."""
    wide = "norm" in name or name.endswith(".gate.weight")
    return name.endswith("weight") and not wide


def model(said, tensors):
    """A model of Hugging Face as a file in Q8_0, and the values of its tensors in float64.

    Args:
      said: its config.json.
      tensors: its float tensors.
    """
    family = {"mixtral": "llama", "mistral": "llama", "qwen3_moe": "qwen3moe"}
    arch = family.get(said["model_type"], said["model_type"])
    heads = {"q_proj": said["num_attention_heads"], "k_proj": said["num_key_value_heads"]}
    stacks, exact = {}, {}
    for name, array in tensors.items():
        array = np.asarray(array, np.float32)
        raw = blocks(array) if is_8_bit(name) else array
        exact[name] = values(raw) if raw.dtype == np.uint8 else raw.astype(np.float64)
        projection = name.split(".")[-2]
        if arch == "llama" and projection in heads:
            raw = alternated(raw, heads[projection])
        place, expert = name_of(name)
        stacks.setdefault(place, []).append(raw)
        assert expert is None or expert == len(stacks[place]) - 1
    made = {n: np.stack(a) if "_exps" in n else a[0] for n, a in stacks.items()}
    return file_bytes(metadata_of(arch, said), made), exact


def metadata_of(arch, said):
    """The metadata of a model."""
    hidden = said["hidden_size"] // said["num_attention_heads"]
    found = {
        "general.architecture": arch,
        "general.name": "small",
        f"{arch}.block_count": said["num_hidden_layers"],
        f"{arch}.context_length": said.get("max_position_embeddings", 128),
        f"{arch}.embedding_length": said["hidden_size"],
        f"{arch}.feed_forward_length": said["intermediate_size"],
        f"{arch}.attention.head_count": said["num_attention_heads"],
        f"{arch}.attention.head_count_kv": said["num_key_value_heads"],
        f"{arch}.attention.key_length": said.get("head_dim", hidden),
        f"{arch}.attention.value_length": said.get("head_dim", hidden),
        f"{arch}.rope.dimension_count": said.get("head_dim", hidden),
        f"{arch}.attention.layer_norm_rms_epsilon": said["rms_norm_eps"],
        f"{arch}.rope.freq_base": said["rope_theta"],
        "tokenizer.ggml.tokens": ["a", "b", "\u00fc"],
        "tokenizer.ggml.scores": [0.5, 1.5],
        "tokenizer.ggml.eos_token_id": 39,
    }
    experts = said.get("num_experts") or said.get("num_local_experts")
    if experts:
        found[f"{arch}.expert_count"] = experts
        found[f"{arch}.expert_used_count"] = said["num_experts_per_tok"]
    if "moe_intermediate_size" in said:
        found[f"{arch}.expert_feed_forward_length"] = said["moe_intermediate_size"]
    return found
