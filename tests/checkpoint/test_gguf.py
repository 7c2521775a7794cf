"""GGUF: the values and names of each tensor, and what is refused."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint.gguf_files import LLAMA, W, alternated, blocks, metadata_of, values, written
from jax.sharding import NamedSharding, PartitionSpec

import jaxfp8
from jaxfp8 import __main__, checkpoint
from jaxfp8.checkpoint import CheckpointError, _gguf_header
from jaxfp8.checkpoint._gguf import GgufFile

R = np.random.default_rng(0)


def exact(q):
    """A loaded tensor in float64."""
    if not isinstance(q, jaxfp8.QArray):
        return np.asarray(q, np.float64)
    scale = np.repeat(np.asarray(q.scale, np.float64), 32, -1)
    return np.asarray(q.qvalue, np.float64) * scale


def test_q8_0_is_codes_and_float16_scales_of_32(tmp_path):
    raw = blocks(W)
    q = checkpoint.load(written(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": raw}))[
        "model.layers.0.mlp.up_proj.weight"
    ]
    assert (q.qvalue.dtype, q.scale.dtype, q.scale.shape) == (np.int8, np.float16, (64, 3))
    np.testing.assert_array_equal(exact(q), values(raw))
    assert q.tile_sizes == (1, 32)


NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.3.attn_norm": "model.layers.3.input_layernorm",
    "blk.3.attn_q": "model.layers.3.self_attn.q_proj",
    "blk.3.attn_k": "model.layers.3.self_attn.k_proj",
    "blk.3.attn_v": "model.layers.3.self_attn.v_proj",
    "blk.3.attn_output": "model.layers.3.self_attn.o_proj",
    "blk.3.ffn_norm": "model.layers.3.post_attention_layernorm",
    "blk.3.ffn_gate": "model.layers.3.mlp.gate_proj",
    "blk.3.ffn_down": "model.layers.3.mlp.down_proj",
    "rope_freqs": "rope_freqs",
}


def test_names_are_those_of_hugging_face(tmp_path):
    tensors = {f"{name}.weight": W for name in NAMES}
    loaded = checkpoint.load(written(tmp_path / "m.gguf", tensors))
    assert list(loaded) == [f"{name}.weight" for name in NAMES.values()]


@pytest.mark.parametrize("kind", ["Q8_0", "float32", "bfloat16", "bias"])
def test_rows_of_queries_and_keys_are_put_back(tmp_path, kind):
    plain = {"Q8_0": blocks(W), "bias": W[:, 0].copy()}.get(kind)
    plain = W.astype(getattr(ml_dtypes, kind, np.float32)) if plain is None else plain
    end = "bias" if kind == "bias" else "weight"
    tensors = {f"blk.0.attn_{n}.{end}": alternated(plain, h) for n, h in (("q", 4), ("k", 2))}
    loaded = checkpoint.load(
        written(tmp_path / "m.gguf", {**tensors, f"blk.0.attn_v.{end}": plain})
    )
    want = values(plain) if kind == "Q8_0" else plain.astype(np.float64)
    for name in "qkv":
        got = exact(loaded[f"model.layers.0.self_attn.{name}_proj.{end}"])
        np.testing.assert_array_equal(got, want)


def test_rows_of_qwen_are_in_order(tmp_path):
    metadata = {"general.architecture": "qwen2", "qwen2.attention.head_count": 4}
    path = written(tmp_path / "m.gguf", {"blk.0.attn_q.weight": blocks(W)}, metadata)
    got = checkpoint.load(path)["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(exact(got), values(blocks(W)))


@pytest.mark.parametrize(
    ("arch", "start", "ends"),
    [
        ("llama", "block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}),
        ("qwen3moe", "mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
    ],
    ids=["Mixtral", "Qwen3-MoE"],
)
@pytest.mark.parametrize("form", ["stacked", "apart"])
def test_experts_are_apart(tmp_path, arch, start, ends, form):
    stack = {n: R.normal(size=(3, 8, 64)).astype(np.float32) for n in ends}
    tensors = {f"blk.1.ffn_{n}_exps.weight": blocks(w) for n, w in stack.items()}
    if form == "apart":  # as older files of Mixtral have them
        tensors = {
            f"blk.1.ffn_{n}.{i}.weight": blocks(w[i]) for n, w in stack.items() for i in range(3)
        }
    tensors["blk.1.ffn_gate_inp.weight"] = W[:3]
    metadata = {"general.architecture": arch, f"{arch}.expert_count": 3}
    loaded = checkpoint.load(written(tmp_path / "m.gguf", tensors, metadata))
    layer = f"model.layers.1.{start}"
    assert loaded[f"{layer}.gate.weight"].shape == (3, 96)
    assert len(loaded) == 10
    for name, end in ends.items():
        for i in range(3):
            got = exact(loaded[f"{layer}.experts.{i}.{end}.weight"])
            np.testing.assert_array_equal(got, values(blocks(stack[name][i])))


def test_another_family_keeps_its_names(tmp_path):
    stack = R.normal(size=(2, 8, 64)).astype(np.float32)
    tensors = {"blk.0.attn_q.weight": blocks(W), "blk.0.ffn_up_exps.weight": blocks(stack)}
    path = written(tmp_path / "m.gguf", tensors, {"general.architecture": "gemma3"})
    loaded = checkpoint.load(path)
    assert list(loaded) == list(tensors)
    np.testing.assert_array_equal(exact(loaded["blk.0.attn_q.weight"]), values(blocks(W)))
    np.testing.assert_array_equal(exact(loaded["blk.0.ffn_up_exps.weight"]), values(blocks(stack)))
    with checkpoint.open(path) as opened:
        assert opened.config() == {}
    assert checkpoint.inspect(path).format == "GGUF of gemma3, with the names and rows of the file"
    with pytest.raises(CheckpointError, match="servers need Hugging Face's names"):
        checkpoint.convert(path, tmp_path / "new")


@pytest.mark.parametrize("rows", [1, 5, 512])
@pytest.mark.parametrize("spec", [("x", None), (None, "x"), ("x", "y")], ids=str)
def test_devices_read_their_slices(tmp_path, monkeypatch, spec, rows):
    monkeypatch.setattr("jaxfp8.checkpoint._gguf.PART_BYTES", rows * 102)
    tensors = {"blk.0.attn_q.weight": blocks(W), "blk.0.attn_v.weight": blocks(W)}
    tensors["blk.0.attn_k.weight"] = W
    path = written(tmp_path / "m.gguf", tensors)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    whole, parts = checkpoint.load(path), checkpoint.load(path, sharding=sharding)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_array_equal(a, b)
    assert parts["model.layers.0.self_attn.q_proj.weight"].qvalue.sharding.spec == sharding.spec


def test_a_tensor_is_read_once(tmp_path, monkeypatch):
    path = written(tmp_path / "m.gguf", {"blk.0.attn_q.weight": blocks(W)})
    read, plain = [], GgufFile._read_into
    monkeypatch.setattr(
        GgufFile, "_read_into", lambda f, e, s, t: (read.append(t.size), plain(f, e, s, t))[1]
    )
    checkpoint.load(path)
    assert sum(read) == blocks(W).size


@pytest.mark.parametrize("scale", [np.float16, np.float32])
@pytest.mark.parametrize("m", [1, 3, 17])
def test_products_are_those_of_the_values(tmp_path, m, scale):
    q = checkpoint.load(written(tmp_path / "m.gguf", {"output.weight": blocks(W)}))[
        "lm_head.weight"
    ]
    q = jaxfp8.QArray(q.qvalue, q.scale.astype(scale))
    x = R.normal(size=(m, 96)).astype(np.float32)
    with jaxfp8.strict():
        y = jaxfp8.einsum("mk,nk->mn", jnp.asarray(x), q)
    np.testing.assert_allclose(y, x.astype(np.float64) @ values(blocks(W)).T, rtol=1e-5, atol=1e-5)


def test_parts_of_a_model_are_one(tmp_path):
    names = [f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    written(
        tmp_path / names[0], {"blk.0.attn_q.weight": alternated(W, 4)}, {**LLAMA, "split.count": 2}
    )
    written(tmp_path / names[1], {"blk.1.attn_q.weight": alternated(W, 4)}, {"split.no": 1})
    for path in (tmp_path, tmp_path / names[0], tmp_path / names[1]):
        loaded = checkpoint.load(path)
        assert len(loaded) == 2
        np.testing.assert_array_equal(loaded["model.layers.1.self_attn.q_proj.weight"], W)
    (tmp_path / names[1]).unlink()
    with pytest.raises(CheckpointError, match=f"{names[1]} is not there; fetch it too"):
        checkpoint.load(tmp_path / names[0])


def test_parts_under_each_others_names_are_refused(tmp_path):
    heads = {"blk.0.attn_q.weight": alternated(W, 4)}
    said = {0: {**LLAMA, "split.count": 2, "split.no": 0}, 1: {"split.count": 2, "split.no": 1}}
    written(tmp_path / "m-00002-of-00002.gguf", {"output.weight": W}, said[0])
    written(tmp_path / "m-00001-of-00002.gguf", heads, said[1])
    with pytest.raises(CheckpointError, match="it is part 1 of its model"):
        checkpoint.load(tmp_path)


def test_a_folder_of_several_models_names_them(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        written(tmp_path / name, {"output.weight": W})
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf, but one model"):
        checkpoint.load(tmp_path)
    (tmp_path / "b.gguf").unlink()
    assert list(checkpoint.load(tmp_path)) == ["lm_head.weight"]


def test_other_types_are_named(tmp_path, capsys):
    tensors = {
        "blk.0.attn_v.weight": (12, (2, 256), bytes(2 * 144)),
        "blk.0.ffn_up.weight": (14, (2, 256), bytes(2 * 210)),
        "output_norm.weight": W[0],
    }
    path = written(tmp_path / "m.gguf", tensors)
    with pytest.raises(CheckpointError, match=r"is GGML_TYPE_Q4_K\[2,256\], but .*Q8_0"):
        checkpoint.load(path)
    assert __main__.main(["inspect", str(path)]) == 1
    out = capsys.readouterr().out
    assert "GGML_TYPE_Q4_K[2,256]" in out and "GGML_TYPE_Q6_K[2,256]" in out


def test_inspect_says_what_it_is(tmp_path):
    path = written(tmp_path / "m.gguf", {"output.weight": blocks(W), "output_norm.weight": W[0]})
    found = checkpoint.inspect(path)
    assert found.format == "GGUF of llama" and not found.problems
    row = found.rows[0]
    assert (row.stored, row.loads, row.scale) == ("Q8_0[64,96]", "QArray", "block 1x32, float16")
    assert found.nbytes == blocks(W).size + W[0].nbytes


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def factors(size, theta, factor):
    """Llama 3's, pair by pair: short waves stay, long ones are stretched, a ramp is between."""
    found = []
    for pair in range(size // 2):
        wave = 2 * np.pi * theta ** (2 * pair / size)
        smooth = (8192 / wave - 1) / (4 - 1)
        found.append(1 / ((1 - min(max(smooth, 0), 1)) / factor + min(max(smooth, 0), 1)))
    return np.array(found, np.float32)


def test_config_is_that_of_hugging_face(tmp_path):
    said = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 96,
        "intermediate_size": 224,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    }
    tensors = {"token_embd.weight": W, "rope_freqs.weight": factors(128, 500000.0, 8.0)}
    path = written(tmp_path / "m.gguf", tensors, metadata_of("llama", said))
    with checkpoint.open(path) as opened:
        assert opened.config() == {
            **said,
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 64,
            "tie_word_embeddings": True,
            "eos_token_id": 39,
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
        }
    tensors["rope_freqs.weight"] = factors(128, 500000.0, 8.0)[::-1].copy()
    path = written(tmp_path / "m.gguf", tensors, metadata_of("llama", said))
    with (
        checkpoint.open(path) as opened,
        pytest.raises(CheckpointError, match=r"'rope_freqs.weight' has other factors"),
    ):
        opened.config()


@pytest.mark.parametrize(
    ("said", "scaling"),
    [
        ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),  # llama.cpp's default
        ({"type": "yarn", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}),
        ({"type": "none", "factor": 4.0}, None),
        ({"factor": 1.0}, None),
        ({}, None),
    ],
    ids=str,
)
def test_positions_are_scaled_as_in_the_file(tmp_path, said, scaling):
    metadata = LLAMA | {f"llama.rope.scaling.{key}": value for key, value in said.items()}
    with checkpoint.open(written(tmp_path / "m.gguf", {"output.weight": W}, metadata)) as opened:
        assert opened.config().get("rope_scaling") == scaling


def test_integers_are_arrays(tmp_path):
    numbers = np.arange(8, dtype=np.int32)
    path = written(tmp_path / "m.gguf", {"output_norm.bias": (26, (8,), numbers.tobytes())})
    np.testing.assert_array_equal(checkpoint.load(path)["model.norm.bias"], numbers)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("feed_forward_length", [1, 2], r"feed_forward_length is \[1, 2\]"),
        ("rope.dimension_count", 12, "rope.dimension_count = 12, but config.json has no words"),
        ("logit_scale", 0.5, "logit_scale = 0.5, but config.json has no words"),
    ],
    ids=["layers of several sizes", "rotated in part", "scaled logits"],
)
def test_what_config_has_no_words_for_is_refused(tmp_path, key, value, text):
    sizes = {"llama.embedding_length": 96, "llama.rope.dimension_count": 24, f"llama.{key}": value}
    path = written(tmp_path / "m.gguf", {"output.weight": W}, {**LLAMA, **sizes})
    with checkpoint.open(path) as opened, pytest.raises(CheckpointError, match=text):
        opened.config()


def test_floats_can_be_quantized(tmp_path):
    path = written(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": W, "output_norm.weight": W[0]})
    checkpoint.quantize(path, tmp_path / "new", jaxfp8.FP8_DYNAMIC)
    got = checkpoint.load(tmp_path / "new")["model.layers.0.mlp.up_proj.weight"]
    want = jaxfp8.quantize(W, channelwise_axes=(0,))
    np.testing.assert_array_equal(np.asarray(got.qvalue), np.asarray(want.qvalue))
    assert json.loads((tmp_path / "new" / "config.json").read_text())["model_type"] == "llama"


def test_factors_of_positions_are_in_the_config_of_a_quantized_model(tmp_path):
    """Models of torch have no place for the tensor. A family without a table keeps it."""
    tensors = {"blk.0.ffn_up.weight": W, "rope_freqs.weight": factors(16, 10000.0, 8.0)}
    said = {"llama.attention.key_length": 16, "llama.rope.freq_base": 10000.0}
    for arch, names in (("llama", 1), ("other", 2)):
        path = written(
            tmp_path / f"{arch}.gguf", tensors, {**LLAMA, **said, "general.architecture": arch}
        )
        report = checkpoint.quantize(path, tmp_path / arch, jaxfp8.FP8_DYNAMIC)
        loaded = checkpoint.load(tmp_path / arch)
        assert len(report.changed) == 1 and len(loaded) == names
        config = json.loads((tmp_path / arch / "config.json").read_text())
        assert (
            ("rope_scaling" in config) == (arch == "llama") == ("rope_freqs.weight" not in loaded)
        )


# The package of llama.cpp


def test_values_and_files_are_those_of_the_gguf_package(tmp_path):
    """Where it is installed; it was with gguf 0.19.0."""
    gguf = pytest.importorskip("gguf", reason="needs `pip install gguf`, llama.cpp's own package")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_token_list(["a", "b"])
    w = np.concatenate([W, [[0.5] * 95 + [127.0]], [[-1.5] * 95 + [127.0]]]).astype(np.float32)
    kinds = gguf.GGMLQuantizationType
    raw = gguf.quants.quantize(w, kinds.Q8_0)
    writer.add_tensor("output.weight", raw, raw_dtype=kinds.Q8_0)
    wide = gguf.quants.quantize(w, kinds.BF16)
    writer.add_tensor("token_embd.weight", wide, raw_dtype=kinds.BF16)
    writer.add_tensor("output_norm.weight", w[0])
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    loaded = checkpoint.load(tmp_path / "m.gguf")
    theirs = gguf.quants.dequantize(raw, kinds.Q8_0).astype(np.float64)
    np.testing.assert_array_equal(exact(loaded["lm_head.weight"]), theirs)
    np.testing.assert_array_equal(blocks(w).reshape(raw.shape), raw)
    np.testing.assert_array_equal(loaded["model.norm.weight"], w[0])
    assert loaded["model.embed_tokens.weight"].dtype == jnp.bfloat16
    sizes = {kind.name: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    ours = {name: size for name, *size in _gguf_header.TYPES.values()}
    assert {n: tuple(s) for n, s in ours.items()} == sizes
