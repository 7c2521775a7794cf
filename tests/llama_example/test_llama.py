"""The decoder of examples/llama: against float64, between its forms, alone and in batches."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint import files, gguf_files
from llama_example.llama_checkpoints import FAMILIES, LLAMA, floats, is_linear, logits, write

import jaxfp8
from llama import invent, load, serve
from llama.config import parse
from llama.generate import main

IDS = [1, 2, 3, 4, 5, 6, 7, 8, 9]
F32 = {"dtype": jnp.float32}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(serve, "STEP", 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama in FP8."""
    path = tmp_path_factory.mktemp("llama") / "model"
    write(path, FAMILIES["llama 3"] | {"num_hidden_layers": 1}, "channel")
    return path


@pytest.fixture(scope="module")
def fp8(folder):
    """It, served in float32 with a cache in FP8."""
    return serve.server(load.model(folder, **F32)[0], cache="fp8", prefill_in_8_bits=False)


def first(server, prompts):
    """Logits after prompts."""
    ids, lengths = serve.pad(prompts)
    return server.prefill(server.params, ids, lengths, server.empty(len(prompts), ids.shape[1]))[0]


def off(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


CASES = [
    *zip(
        FAMILIES,
        ["tensor", "block", "int8", None, "channel", "block", "channel", "channel", "block"],
        strict=True,
    )
]


@pytest.mark.parametrize(("family", "format"), CASES)
def test_logits_are_those_of_the_decoder_in_float64(tmp_path, family, format):
    layers = 2 if family in ("llama 3", "dots 1", "deepseek 3") else 1
    said = FAMILIES[family] | {"num_hidden_layers": layers}
    exact = logits(said, write(tmp_path / "m", said, format), IDS)[-1]
    model, changes = load.model(tmp_path / "m", **F32)
    assert bool(changes.changed) == (format is not None)
    got = first(serve.server(model, cache="f32", prefill_in_8_bits=False), [IDS])
    np.testing.assert_allclose(got[0], exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "format"), [("qwen 2", "block"), ("qwen 2 moe", "channel"), ("deepseek 3", "block")]
)
@pytest.mark.slow
def test_plain_functions_with_a_scan_are_the_same_decoder(tmp_path, family, format):
    exact = logits(FAMILIES[family], write(tmp_path / "m", FAMILIES[family], format), IDS)[-1]
    made = load.functions(tmp_path / "m", cache="f32", prefill_in_8_bits=False, **F32)
    np.testing.assert_allclose(first(made, [IDS])[0], exact, rtol=1e-5, atol=1e-5)


GGUF = {
    "llama": LLAMA | {"intermediate_size": 64},
    "qwen 2": FAMILIES["qwen 2"] | {"intermediate_size": 64},
    "mixtral": FAMILIES["mixtral"] | {"intermediate_size": 64},
    "qwen 3 moe": FAMILIES["qwen 3 moe"] | {"moe_intermediate_size": 32, "norm_topk_prob": True},
}


@pytest.mark.parametrize("family", GGUF)
def test_a_gguf_file_is_the_same_decoder(tmp_path, family):
    said = GGUF[family] | {"num_hidden_layers": 1}
    data, exact = gguf_files.model(said, floats(said))
    (tmp_path / "m.gguf").write_bytes(data)
    model, changes = load.model(tmp_path / "m.gguf", **F32)
    assert len(changes.changed) == len([n for n in exact if gguf_files.is_8_bit(n)]) - (
        0 if not said.get("num_experts", said.get("num_local_experts")) else 3 * 3 - 2
    )
    want = logits(said, exact, IDS)[-1]
    got = first(serve.server(model, cache="f32", prefill_in_8_bits=False), [IDS])
    np.testing.assert_allclose(got[0], want, rtol=1e-4, atol=1e-4)
    if family == "llama":
        made = load.functions(tmp_path, cache="f32", prefill_in_8_bits=False, **F32)
        np.testing.assert_allclose(first(made, [IDS])[0], want, rtol=1e-4, atol=1e-4)
        close = first(serve.server(model, cache="f32"), [IDS])[0]  # inputs in 8 bits too
        assert 0 < off(close, want) < 0.05


# Configurations of real models, with other sizes.
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "decoder_sparse_step": 1,
    "eos_token_id": 39,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 160,
    "initializer_range": 0.02,
    "intermediate_size": 384,
    "max_position_embeddings": 40960,
    "max_window_layers": 1,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 144,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 40,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 39,
    "head_dim": None,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "num_local_experts": 3,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 40,
}


def published(path, said):
    """A folder as Qwen and Mixtral's quantizers write it, and what it stands for in float64."""
    blocks, tensors, exact = said is QWEN3_MOE, {}, {}
    for name, w in floats(said).items():
        kept = not is_linear(name)
        q = jaxfp8.quantize(w, tiled_axes={0: 128, 1: 128} if blocks and not kept else {})
        exact[name] = np.asarray(w if kept else jaxfp8.dequantize(q), np.float64)
        if kept:
            tensors[name] = np.asarray(w)
            continue
        tensors[name] = np.asarray(q.qvalue)
        if blocks:
            tensors[f"{name}_scale_inv"] = np.asarray(q.scale)
        else:
            tensors[f"{name}_scale"] = np.asarray(q.scale).reshape(())
            tensors[name.replace("weight", "input_scale")] = np.float32(0.1)
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic" if blocks else "static"}
    if blocks:
        gates = [f"model.layers.{i}.mlp.gate" for i in range(said["num_hidden_layers"])]
        fp8 |= {"fmt": "e4m3", "weight_block_size": [128, 128]}
        fp8["modules_to_not_convert"] = ["lm_head", *gates]
    else:
        fp8 |= {"ignored_layers": ["lm_head", "model.layers.0.block_sparse_moe.gate"]}
    files.folder(path, tensors, files=2)
    (path / "config.json").write_text(json.dumps({**said, "quantization_config": fp8}))
    return exact


@pytest.mark.parametrize("said", [QWEN3_MOE, MIXTRAL], ids=lambda said: said["model_type"])
def test_a_folder_as_published_is_the_same_decoder(tmp_path, capsys, said):
    want = logits(said, published(tmp_path / "m", said), IDS)[-1]
    model, changes = load.model(tmp_path / "m", **F32)
    assert len(changes.changed) == 4 + 2  # gate and up are one weight
    got = first(serve.server(model, cache="f32", prefill_in_8_bits=False), [IDS])
    np.testing.assert_allclose(got[0], want, rtol=1e-4, atol=1e-4)
    assert main([str(tmp_path / "m"), "--ids", "1,2,3", "--tokens", "2"]) == 0
    assert len(capsys.readouterr().out.split(",")) == 2


def test_decoding_token_by_token_gives_what_prefill_gives(folder):
    """Prefill attends to keys as they come, decode to those in the cache."""
    made = serve.server(load.model(folder, **F32)[0], cache="f32", prefill_in_8_bits=False)
    ids, lengths = serve.pad([IDS[:1]])
    key, cache = jax.random.key(0), made.empty(1, 32)
    got, cache = made.prefill(made.params, ids, lengths, cache)
    for place, token in enumerate(IDS[1:]):
        token, position = jnp.array([token], jnp.int32), jnp.array([place + 1])
        _, _, cache, got = made.decode(made.params, token, position, cache, key, logits=True)
    np.testing.assert_allclose(got, first(made, [IDS]), rtol=1e-4, atol=1e-4)


def test_decoding_from_an_fp8_cache_is_close_to_floats(folder, fp8):
    made = serve.server(load.model(folder, **F32)[0], cache="f32", prefill_in_8_bits=False)
    ids, lengths = serve.pad([IDS])
    key, logits = jax.random.key(0), []
    for server in (fp8, made):
        _, cache = server.prefill(server.params, ids, lengths, server.empty(1, ids.shape[1]))
        token = jnp.array([7], jnp.int32)
        place = jnp.array([len(IDS)])  # donated
        found = server.decode(server.params, token, place, cache, key, logits=True)
        logits.append(found[-1])
    assert 0 < off(*logits) < 0.03


@pytest.mark.slow
def test_a_batch_of_different_lengths_is_its_texts_alone(fp8):
    prompts = [IDS, IDS[3:5]]
    together = np.stack([*serve.generate(fp8, prompts, 5)], 1)
    for row, prompt in zip(together, prompts, strict=True):
        alone = np.stack([*serve.generate(fp8, [prompt], 5)], 1)[0]
        np.testing.assert_array_equal(row[: len(alone)], alone)


def test_8_bits_everywhere_stay_close_and_are_half_the_bytes(folder, fp8):
    wide, _ = load.model(folder, wide=True, **F32)
    exact = first(serve.server(wide, cache="f32"), [IDS])
    assert off(first(fp8, [IDS]), exact) < 0.03  # keys and values in FP8
    all_8_bits = serve.server(load.model(folder, **F32)[0], cache="fp8")
    assert 0 < off(first(all_8_bits, [IDS]), exact) < 0.08
    size = sum(x.nbytes for x in jax.tree.leaves(fp8.empty(3, 64)))
    assert size == 2 * 3 * 2 * 64 * (8 + 4)  # for each of 2 heads 8 codes, and a scale


def test_products_with_weights_and_with_the_cache_are_kernel_calls(fp8):
    args = (jnp.zeros(1, jnp.int32), jnp.array([3]), fp8.empty(1, 32), jax.random.key(0))
    text = fp8.decode.lower(fp8.params, *args).as_text()
    assert text.count("stablehlo.custom_call @jaxfp8") >= 7 + 2
    assert text.count("stablehlo.dot_general") == 1  # the head, which is in floats


def test_a_mesh_gives_what_one_device_gives(folder, fp8):
    over = load.mesh(2)
    model, _ = load.model(folder, over=over, **F32)
    kernel = model.model.layers[0].mlp.down_proj.kernel.get_value()
    assert kernel.sharding.shard_shape(kernel.shape) == (32, 24)
    made = serve.server(model, cache="fp8", prefill_in_8_bits=False)
    np.testing.assert_allclose(first(made, [IDS]), first(fp8, [IDS]), rtol=1e-4, atol=1e-4)


def test_a_text_ends_at_its_end(fp8):
    (token,) = serve.generate(fp8, [IDS], 1)
    ended = serve.dataclasses.replace(
        fp8, config=serve.dataclasses.replace(fp8.config, end=(int(token[0]),))
    )
    assert len([*serve.generate(ended, [IDS], 5)]) == 1


def test_tokens_of_one_program_are_those_of_a_program_for_each(fp8):
    each, together = ([*serve.generate(fp8, [IDS], 5, chunk=n)] for n in (1, 3))
    np.testing.assert_array_equal(together, each)


def test_a_greedy_program_sorts_nothing(fp8):
    args = jnp.zeros(1, jnp.int32), jnp.array([3]), fp8.empty(1, 32), jax.random.key(0)
    text = fp8.decode_chunk.lower(fp8.params, *args, number=4).as_text()
    assert text.count("stablehlo.while") == 1 and "stablehlo.sort" not in text


# Configurations and the command


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not one of llama"),
        ({"hidden_act": "gelu"}, "silu is computed"),
        ({"rope_scaling": {"type": "dynamic"}}, "'dynamic', but linear"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "experts in every layer"),
    ],
    ids=["family", "activation", "rope", "dense layers"],
)
def test_a_configuration_of_something_else_is_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        parse(LLAMA | change)


@pytest.mark.slow
def test_command_generates_and_compares(folder, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(["a", "b", "c", *map(str, range(37))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    assert main([str(folder), "b c a", "--tokens", "3", "--compare", "--report"]) == 0
    (folder / "tokenizer.json").unlink()
    out = capsys.readouterr().out
    assert "loaded in " in out
    assert "7 of 9 weights changed" in out and "\nb c a " in out
    rows = {line[:12].strip(): line[12:].split() for line in out.splitlines()[-2:]}
    assert [*rows] == ["8 bits", "bfloat16"]
    # The last columns: a copy is measured on a GPU alone, and bfloat16 is compared with itself.
    assert rows["bfloat16"][-2:] == ["-", "0.0%"] and 0 < float(rows["8 bits"][-1][:-1]) < 10


@pytest.mark.parametrize("block", [None, 16], ids=["channel", "block"])
def test_an_invented_checkpoint_loads_and_has_the_bytes_of_its_codes(tmp_path, monkeypatch, block):
    small = LLAMA | {"num_hidden_layers": 1}
    monkeypatch.setitem(invent.SIZES, "small", small)
    blocks = [] if block is None else ["--block", str(block)]
    assert invent.main([str(tmp_path / "m"), *blocks]) == 0
    model, changes = load.model(tmp_path / "m")
    assert len(changes.changed) == 7 and len(changes.left) == 2
    values = jaxfp8.dequantize(model.model.layers[0].mlp.up_proj.weight)
    assert jnp.isfinite(values).all() and 0.1 < jnp.std(values) < 0.3


@pytest.mark.parametrize("family", ["mixtral", "qwen 3 moe", "deepseek 3"])
@pytest.mark.slow
def test_an_invented_mixture_of_experts_generates(tmp_path, monkeypatch, capsys, family):
    monkeypatch.setitem(invent.SIZES, "small", FAMILIES[family])
    assert invent.main([str(tmp_path / "m")]) == 0
    assert main([str(tmp_path / "m"), "--ids", "1,2", "--tokens", "2", "--compare"]) == 0
    assert "\nbfloat16 " in capsys.readouterr().out


def test_command_says_what_is_missing(folder, capsys):
    assert main([str(folder), "a text"]) == 1
    assert "tokenizer.json is missing; give token ids with --ids" in capsys.readouterr().err
    assert main([str(folder), "--ids", "1,x"]) == 1
    for ids in ("1,100000000", "-1"):
        assert main([str(folder), f"--ids={ids}"]) == 1
        assert "is no token; ids are 0 to" in capsys.readouterr().err
    assert main([str(folder / "nothing"), "--ids", "1"]) == 1
    assert "config.json is missing; give the folder" in capsys.readouterr().err


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path, family):
    """Where they are installed; they were with transformers 4.56.2, mixtures with 5.24.0."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    write(tmp_path / "m", FAMILIES[family])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    exact = theirs(torch.tensor([IDS])).logits[0, -1].detach().numpy()
    model, _ = load.model(tmp_path / "m", **F32)
    got = first(serve.server(model, cache="f32", prefill_in_8_bits=False), [IDS])
    np.testing.assert_allclose(got[0], exact, rtol=1e-4, atol=1e-4)
