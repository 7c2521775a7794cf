"""The head of examples/llama in 8 bits: its values, its bytes, and the command."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llama_example.llama_checkpoints import LLAMA, logits, write

import jaxfp8
from llama import invent, load, measure, serve
from llama.generate import main

IDS = [1, 2, 3, 4, 5, 6, 7, 8, 9]
SAID = {
    "own": LLAMA | {"num_hidden_layers": 1},
    "tied": LLAMA | {"num_hidden_layers": 1, "tie_word_embeddings": True},
}
IN_8_BITS = {"dtype": jnp.float32, "head_in_8_bits": True}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(serve, "STEP", 16)


def first(server):
    """Logits after a prompt."""
    ids, lengths = serve.pad([IDS])
    return server.prefill(server.params, ids, lengths, server.empty(1, ids.shape[1]))[0][0]


def narrow(said, tensors):
    """The same decoder with its head as FP8 with a scale for each token holds it."""
    table = "model.embed_tokens" if said["tie_word_embeddings"] else "lm_head"
    head = jnp.asarray(tensors[f"{table}.weight"], jnp.float32)
    held = jaxfp8.dequantize(jaxfp8.quantize(head, channelwise_axes=(0,)))
    own = tensors | {"lm_head.weight": np.asarray(held, np.float64)}
    return said | {"tie_word_embeddings": False}, own


@pytest.mark.parametrize("kind", SAID)
def test_logits_are_those_of_the_rounded_head_in_float64(tmp_path, kind):
    tensors = write(tmp_path / "m", SAID[kind], "channel")
    exact = logits(SAID[kind], tensors, IDS)[-1]
    said, own = narrow(SAID[kind], tensors)
    want = logits(said, own, IDS)[-1]
    assert 0.01 < np.linalg.norm(want - exact) / np.linalg.norm(exact) < 0.04
    model, _ = load.model(tmp_path / "m", **IN_8_BITS)
    made = serve.server(model, cache="f32", prefill_in_8_bits=False)
    np.testing.assert_allclose(first(made), want, rtol=1e-5, atol=1e-5)
    made = load.functions(tmp_path / "m", cache="f32", prefill_in_8_bits=False, **IN_8_BITS)
    np.testing.assert_allclose(first(made), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", SAID)
def test_the_head_alone_changes_and_the_table_of_tokens_stays(tmp_path, kind):
    tensors = write(tmp_path / "m", SAID[kind], "channel")
    model, changes = load.model(tmp_path / "m", **IN_8_BITS)
    assert len(changes.changed) == 7 + 1
    table = model.model.embed_tokens.embedding.get_value()
    np.testing.assert_array_equal(table, tensors["model.embed_tokens.weight"].astype(np.float32))
    assert model.lm_head.weight.scale.shape == (40, 1)


def test_a_head_in_8_bits_already_stays(tmp_path):
    tensors = write(tmp_path / "m", SAID["own"])
    held = jaxfp8.quantize(jnp.float32(tensors["lm_head.weight"]), tiled_axes={0: 8, 1: 8})
    tensors = {n: jnp.float32(w) for n, w in tensors.items()} | {"lm_head.weight": held}
    jaxfp8.checkpoint.save(tmp_path / "n", tensors, config=SAID["own"])
    model, _ = load.model(tmp_path / "n", **IN_8_BITS)
    assert model.lm_head.weight.scale.shape == held.scale.shape


@pytest.mark.parametrize("kind", SAID)
def test_both_programs_multiply_floats_by_the_codes_of_the_head(tmp_path, kind):
    write(tmp_path / "m", SAID[kind], "channel")
    made = serve.server(load.model(tmp_path / "m", **IN_8_BITS)[0])
    ids, lengths = serve.pad([IDS])
    text = made.prefill.lower(made.params, ids, lengths, made.empty(1, 32)).as_text()
    assert "-> tensor<1x40xf32>" in text and "tensor<1x32xf8E4M3FN>" not in text
    args = jnp.zeros(1, jnp.int32), jnp.array([3]), made.empty(1, 32), jax.random.key(0)
    text = made.decode.lower(made.params, *args).as_text()
    assert text.count("stablehlo.custom_call @jaxfp8") >= 8 + 2
    assert "stablehlo.dot_general" not in text


def test_a_mesh_splits_the_head_by_tokens(tmp_path):
    write(tmp_path / "m", SAID["tied"], "channel")
    model, _ = load.model(tmp_path / "m", over=load.mesh(2), **IN_8_BITS)
    codes = model.lm_head.weight.qvalue
    assert codes.sharding.shard_shape(codes.shape) == (20, 32)
    alone, _ = load.model(tmp_path / "m", **IN_8_BITS)
    both = [first(serve.server(m, cache="f32", prefill_in_8_bits=False)) for m in (model, alone)]
    np.testing.assert_allclose(*both, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", [["--report"], ["--functions"]], ids=["nnx", "functions"])
def test_command_generates_with_the_head_in_8_bits(tmp_path, capsys, form):
    write(tmp_path / "m", SAID["tied"], "channel")
    arguments = [str(tmp_path / "m"), "--ids", "1,2,3", "--tokens", "2", "--head", "W8A16"]
    assert main([*arguments, *form]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()[-1].split(",")) == 2
    assert ("8 of 9 weights changed" in out) == (form == ["--report"])


# Bytes and speed


@pytest.mark.parametrize("form", [[], ["--functions"]], ids=["nnx", "functions"])
@pytest.mark.parametrize("kind", SAID)
def test_measured_bytes_are_those_that_a_token_reads(monkeypatch, capsys, kind, form):
    monkeypatch.setitem(invent.SIZES, "small", SAID[kind])
    monkeypatch.setattr(measure, "copy_rate", lambda: 1e9)
    steps = ["--tokens", "2", "--length", "32", "--texts", "2", "--repeat", "1", *form]
    assert measure.main(steps) == 0
    lines = [line.rsplit(maxsplit=7) for line in capsys.readouterr().out.splitlines()]
    layer = 32 * (2 * 32 + 2 * 16 + 3 * 48) + 4 * (2 * 32 + 2 * 16 + 2 * 48 + 32) + 2 * 2 * 32
    cache = 31 * 2 * 2 * (8 + 4)  # of 31 tokens for each of 2 heads
    for line, head in zip(lines[1:], (40 * 32 * 2, 40 * (32 + 4)), strict=True):
        read = (layer + 2 * 32 + head) / 2 + cache
        assert float(line[5]) == pytest.approx(read / 2**20, abs=0.006)
        share = float(line[5]) * 2**20 * float(line[4]) / 1e9
        assert line[0] in ("bf16 head", "W8A16 head") and share < 1 and line[6].endswith("%")


@pytest.mark.parametrize(
    ("kind", "held", "looked_up"),
    [("own", False, 5120), ("own", True, 5120), ("tied", False, 0), ("tied", True, 5120)],
)
def test_a_step_looks_up_rows_of_a_table_that_is_no_head(tmp_path, kind, held, looked_up):
    write(tmp_path / "m", SAID[kind], "channel")
    settings = {"dtype": jnp.float32, "head_in_8_bits": held}
    layers = serve.server(load.model(tmp_path / "m", **settings)[0])
    loop = load.functions(tmp_path / "m", **settings)
    assert layers.looked_up == loop.looked_up == looked_up
    assert layers.nbytes == loop.nbytes  # a table that is the head, too, counts once
