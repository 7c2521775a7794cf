"""From floats to 8 bits on the disk: the numbers of `jaxfp8.quantize`, in little memory."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8 import __main__, checkpoint
from jaxfp8.checkpoint import _quantize

W = jax.random.normal(jax.random.key(0), (300, 200))
RECIPES = [
    jaxfp8.FP8_W8A16,
    jaxfp8.INT8_W8A16,
    jaxfp8.FP8_STATIC,
    jaxfp8.FP8_DYNAMIC,
    jaxfp8.FP8_BLOCK,
    jaxfp8.INT8_DYNAMIC,
    jaxfp8.Recipe(name="zero points", weight=jaxfp8.Quantization(dtype=jnp.int8, symmetric=False)),
    jaxfp8.Recipe(
        name="int8 tensor", weight=jaxfp8.Quantization(dtype=jnp.int8, granularity="tensor")
    ),
]


@pytest.fixture
def source(tmp_path):
    tree = {
        "layers.0.up.weight": W,
        "layers.1.up.weight": (W * 3).astype(jnp.bfloat16),
        "layers.0.norm.weight": jnp.ones(200),
        "embed_tokens.weight": W[:7],
    }
    checkpoint.save(tmp_path / "float", tree, config={"model_type": "tiny"})
    (tmp_path / "float" / "tokenizer.json").write_text("{}")
    return tmp_path / "float"


@pytest.mark.parametrize("rows", [1 << 22, 200 * 4 * 37], ids=["at once", "in chunks"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_codes_and_scales_are_those_of_quantize(source, tmp_path, monkeypatch, recipe, rows):
    monkeypatch.setattr(_quantize, "_CHUNK_BYTES", rows)
    checkpoint.quantize(source, tmp_path / "new", recipe)
    loaded = checkpoint.load(tmp_path / "new")
    for name, w in checkpoint.load(source).items():
        if "up" not in name:
            assert loaded[name].dtype == w.dtype
            continue
        q = recipe.quantize_weight(w, contracting=(1,))
        got = loaded[name]
        assert np.asarray(got.qvalue).tobytes() == np.asarray(q.qvalue).tobytes()
        assert np.asarray(got.scale).tobytes() == np.asarray(q.scale).tobytes()
        assert got.tile_sizes == q.tile_sizes
        assert (got.zero_point is None) == (q.zero_point is None)
        np.testing.assert_array_equal(jaxfp8.dequantize(got), jaxfp8.dequantize(q))


@pytest.mark.parametrize(
    ("recipe", "form"),
    [(jaxfp8.INT8_W8A16, "pack"), (jaxfp8.INT8_DYNAMIC, "int"), (jaxfp8.FP8_W8A16, "float")],
    ids=lambda x: getattr(x, "name", x),
)
def test_int8_beside_floats_is_in_words(source, tmp_path, recipe, form):
    """Servers take it in no other form."""
    checkpoint.quantize(source, tmp_path / "new", recipe)
    config = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    assert config["format"] == f"{form}-quantized"


def test_report_has_the_error_of_each_weight(source, tmp_path):
    report = checkpoint.quantize(source, tmp_path / "new", jaxfp8.FP8_DYNAMIC)
    q = jaxfp8.quantize(W, channelwise_axes=(0,))
    exact = np.asarray(W, np.float64)
    noise = np.sum((np.asarray(jaxfp8.dequantize(q), np.float64) - exact) ** 2)
    row = next(row for row in report.rows if row.path == "layers.0.up.weight")
    assert row.sqnr == pytest.approx(10 * np.log10(np.sum(exact**2) / noise), abs=1e-9)
    assert {row.path for row in report.left} == {"embed_tokens.weight"} and report.others == 1
    assert json.loads(report.to_json())["rows"][0]["recipe"] == "FP8_DYNAMIC"
    assert "SQNR dB" in str(report) and report.changed[0].sqnr <= report.changed[1].sqnr


def test_other_files_are_copied_and_the_config_kept(source, tmp_path):
    checkpoint.quantize(source, tmp_path / "new", jaxfp8.FP8_BLOCK)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["model_type"] == "tiny"
    assert config["quantization_config"]["ignore"] == ["embed_tokens"]
    assert sorted(os.listdir(tmp_path / "new")) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_where_chooses_the_weights(source, tmp_path):
    def second(name, shape):
        return "layers.1" in name

    report = checkpoint.quantize(source, tmp_path / "new", jaxfp8.INT8_DYNAMIC, where=second)
    assert [row.path for row in report.changed] == ["layers.1.up.weight"]


# Weights of many families by their own names: their kind and their rows, or None for a layer's.
FAMILIES = {
    "lm_head": ("a head", 64),
    "model.embed_tokens": ("a table", 64),
    "transformer.wte": ("a table", 64),
    "decoder.block.0.layer.0.SelfAttention.relative_attention_bias": ("a table", 32),
    "tok_emb": ("a table", 64),
    "shared": ("a table", 64),
    "model.layers.0.mlp.gate": ("a router", 8),
    "model.layers.0.block_sparse_moe.gate": ("a router", 8),
    "model.layers.0.feed_forward.router": ("a router", 8),
    "model.layers.0.mlp.router.linear": ("a router", 8),
    "model.layers.0.mlp.gate.wg": ("a router", 8),
    "model.layers.0.mlp.shared_expert_gate": ("a router or a gate", 1),
    "model.layers.0.mlp.switch": ("a gate: it has one row", 1),
    "model.layers.0.moe.choose": ("a router: it has a row for each of the 3 experts", 3),
    "model.layers.1.shared_head.head": ("a head", 64),
    "score": ("a head", 8),
    "classifier.dense": ("a head", 32),
    "output": ("a head", 60),
    "token_embd": ("a table", 64),
    "blk.0.ffn_gate_inp": ("a router", 8),
    "to_tokens": ("a head: it has a row for each of the 64 tokens", 64),
    "model.layers.0.moe.experts.0.up": (None, 3),
    "model.layers.0.moe.experts.1.up": (None, 32),
    "model.layers.0.moe.experts.2.up": (None, 32),
    "model.layers.0.mlp.gate_proj": (None, 64),
    "model.layers.0.mlp.gate_up_proj": (None, 64),
    "model.layers.0.mlp.shared_expert.gate_proj": (None, 64),
    "model.layers.0.self_attn.g_proj": (None, 32),
    "model.layers.0.self_attn.kv_b_proj": (None, 64),
    "transformer.h.0.attn.c_attn": (None, 96),
    "encoder.layer.0.attention.output": (None, 32),
    "model.layers.0.linear_attn.in_proj_qkvz": (None, 64),
}


def test_routers_gates_heads_and_tables_stay_in_floats(tmp_path):
    tree = {f"{name}.weight": jnp.ones((rows, 32)) for name, (_, rows) in FAMILIES.items()}
    checkpoint.save(tmp_path / "float", tree)
    report = checkpoint.quantize(tmp_path / "float", tmp_path / "new", jaxfp8.FP8_DYNAMIC)
    reasons = {row.path.removesuffix(".weight"): row.reason for row in report.rows}
    for name, (kind, _) in FAMILIES.items():
        assert reasons[name].startswith(kind or "") and bool(reasons[name]) == bool(kind), name
    loaded = checkpoint.load(tmp_path / "new")
    assert len([q for q in loaded.values() if isinstance(q, jaxfp8.QArray)]) == 11
    (row,) = checkpoint.quantize(
        tmp_path / "float", tmp_path / "one", jaxfp8.FP8_DYNAMIC, where=r"^lm_head"
    ).changed
    assert row.path == "lm_head.weight"


def test_a_stack_of_experts_says_why_it_stays(tmp_path):
    tree = {"up.weight": jnp.ones((8, 4)), "mlp.experts.gate_up_proj": jnp.ones((2, 4, 8))}
    checkpoint.save(tmp_path / "float", tree)
    report = checkpoint.quantize(tmp_path / "float", tmp_path / "new", jaxfp8.FP8_DYNAMIC)
    (left,) = report.left
    assert left.reason == "it is a stack of 2 experts; servers read them in 8 bits one by one"


def test_a_run_that_was_cut_off_goes_on(source, tmp_path, monkeypatch):
    whole = checkpoint.quantize(source, tmp_path / "whole", jaxfp8.FP8_BLOCK)
    plain, made = _quantize._Job._tensor, []

    def dies(job, descriptor, file, entry, entries):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(entry.name)
        return plain(job, descriptor, file, entry, entries)

    monkeypatch.setattr(_quantize._Job, "_tensor", dies)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.quantize(source, tmp_path / "new", jaxfp8.FP8_BLOCK)
    assert not (tmp_path / "new").exists()
    again = []
    monkeypatch.setattr(
        _quantize._Job,
        "_tensor",
        lambda j, d, f, e, s: (again.append(e.name), plain(j, d, f, e, s))[1],
    )
    report = checkpoint.quantize(source, tmp_path / "new", jaxfp8.FP8_BLOCK)
    assert len(again) == 2 and not set(again) & set(made)
    assert report.rows == whole.rows
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "new" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_work_of_another_recipe_is_not_continued(source, tmp_path, monkeypatch):
    def dies(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_quantize._Job, "_tensor", dies)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.quantize(source, tmp_path / "new", jaxfp8.FP8_BLOCK)
    with pytest.raises(checkpoint.CheckpointError, match="unfinished work of another"):
        checkpoint.quantize(source, tmp_path / "new", jaxfp8.INT8_DYNAMIC)


def test_source_in_8_bits_is_refused(source, tmp_path):
    checkpoint.quantize(source, tmp_path / "new", jaxfp8.FP8_BLOCK)
    with pytest.raises(checkpoint.CheckpointError, match="a source is in floats"):
        checkpoint.quantize(tmp_path / "new", tmp_path / "again", jaxfp8.FP8_BLOCK)


def test_command_quantizes_and_inspects(source, tmp_path, capsys):
    new = str(tmp_path / "new")
    assert __main__.main(["quantize", str(source), new, "--recipe", "FP8_BLOCK"]) == 0
    assert "2 of 3 weights changed" in capsys.readouterr().out
    assert __main__.main(["inspect", new]) == 0
    assert "compressed-tensors, float-quantized" in capsys.readouterr().out


@pytest.mark.slow
def test_memory_is_that_of_a_part_of_the_largest_tensor(tmp_path):
    size = 64 << 20
    checkpoint.save(
        tmp_path / "float", {"up.weight": np.ones((4096, size // 4096 // 4), np.float32)}
    )
    code = f"""
import pathlib, re, jax.numpy as jnp, jaxfp8
from jaxfp8 import checkpoint
checkpoint.save({str(tmp_path / "s")!r}, {{"up.weight": jnp.ones((2048, 4096), jnp.float32)}})
checkpoint.quantize({str(tmp_path / "s")!r}, {str(tmp_path / "t")!r}, jaxfp8.FP8_BLOCK)
peak = lambda: 1024 * int(
    re.search("VmHWM: *\\t* *([0-9]+)", pathlib.Path("/proc/self/status").read_text())[1]
)
before = peak()
checkpoint.quantize({str(tmp_path / "float")!r}, {str(tmp_path / "new")!r}, jaxfp8.FP8_BLOCK)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1.1 * size, done.stdout
