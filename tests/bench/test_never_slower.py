"""`bench --never-slower`: the functions are those that are meant, and the verdict is true."""

import json
import types

import jax
import numpy as np
import pytest

import jaxfp8
from jaxfp8 import __main__
from jaxfp8._bench import _decoder, _promise, _written
from jaxfp8._bench._case import Case, Measured
from jaxfp8._bench._measure import Timing
from jaxfp8._bench._products import KINDS
from jaxfp8._bench._written import REWRITTEN, WRITTEN, Drawn

pytestmark = pytest.mark.any_jax

DRAWN = Drawn(
    kind="dense", rows=5, n=128, k=256, dtype="e4m3", scales="channel", x="bf16",
    is_transposed=False, epilogue="",
)  # fmt: skip
ROUNDED = 0.02  # a share of the norm: weights are rounded to 16 bits by one of both


def changed(**fields):
    return DRAWN._replace(**fields)


@pytest.mark.parametrize(
    "one",
    [
        *(changed(scales=scales) for scales in _written._SCALES if scales != "zero points"),
        changed(dtype="uint8", scales="zero points", is_transposed=True),
        *(changed(x=x, is_transposed=True) for x in _written._X),
        changed(x="rows", dtype="int8"),
        *(changed(kind=kind, epilogue="bias gelu") for kind in ("batched", "experts")),
        changed(kind="experts", is_transposed=True, epilogue="residual"),
    ],
    ids=lambda one: one.name,
)
def test_a_product_is_captured_and_computes_the_same(one):
    case = _written._product("cpu", one)
    ours, written = (
        np.asarray(case.contenders[name].enqueue(), np.float64) for name in (REWRITTEN, WRITTEN)
    )
    assert np.linalg.norm(ours - written) <= ROUNDED * np.linalg.norm(written)
    assert case.note.startswith("1 of 1 dots: ")


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_draws_are_many_and_have_every_form(platform):
    drawn = _written._drawn(platform, 0)
    assert len({one.name for one in drawn}) == len(drawn) >= 150
    assert drawn == _written._drawn(platform, 0) != _written._drawn(platform, 1)
    for field, forms in (
        ("scales", _written._SCALES),
        ("dtype", _written._DTYPES),
        ("x", _written._X),
        ("kind", ("dense", "batched", "experts")),
        ("is_transposed", (False, True)),
    ):
        assert {getattr(one, field) for one in drawn} == set(forms), field
    assert all(one.dtype in ("int8", "uint8") for one in drawn if one.scales == "zero points")
    assert len(list(_written.cases(platform, 0))) >= 150 + 20


def measured(ours, written, spread=0.0):
    timings = {
        REWRITTEN: Timing(median=ours, spread=spread),
        WRITTEN: Timing(median=written, spread=spread),
    }
    return Measured(case=Case(name="one", contenders={}), timings=timings, peaks={})


@pytest.mark.parametrize(
    ("ours", "written", "spread", "slower"),
    [(1.04, 1.0, 0.0, False), (1.06, 1.0, 0.0, True), (1.06, 1.0, 0.01, False), (0.5, 1, 0, False)],
)
def test_slower_is_beyond_both_spreads(ours, written, spread, slower):
    assert _promise.is_slower(measured(ours, written, spread)) == slower


def test_only_what_is_slower_twice_counts(monkeypatch):
    results = [measured(2.0, 1.0), measured(1.0, 1.0)]
    monkeypatch.setattr(_promise, "timed", lambda name, make, rounds: results.pop(0))
    assert not _promise.is_slower(_promise.twice("one", None, 4))
    assert not results


@pytest.mark.parametrize(("seconds", "code"), [((1.0, 1.0), 0), ((2.0, 1.0), 1)])
def test_the_command_fails_if_a_function_becomes_slower(
    seconds, code, monkeypatch, tmp_path, capsys
):
    make = types.SimpleNamespace(cases=lambda platform, seed: [("one", None)])
    monkeypatch.setattr(_written, "cases", make.cases)
    monkeypatch.setattr(_promise, "timed", lambda name, make, rounds: measured(*seconds))
    path = tmp_path / "run.json"
    assert __main__.main(["bench", "--never-slower", "--json", str(path)]) == code
    shown, (case,) = capsys.readouterr().out, json.loads(path.read_text())["cases"]
    assert case["speedup"] == seconds[1] / seconds[0] and case["is_slower"] == bool(code)
    assert ("SLOWER" in shown) == bool(code) and "geometric mean" in shown


def test_sizes_are_its_own(capsys):
    assert __main__.main(["bench", "--never-slower", "--step", "decode"]) == 2
    assert "--seed draws others" in capsys.readouterr().err


TINY = _decoder.MODELS["tiny"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: _written._decoding("cpu", "one", TINY, KINDS["w8a16 e4m3"], 3, 5),
        lambda: _written._decoding("cpu", "one", TINY, KINDS["dynamic int8"], 7, 0),
        lambda: _written._training("cpu", "one", TINY, jaxfp8.DelayedScaling()),
    ],
    ids=["decode", "prefill", "train"],
)
@pytest.mark.slow
def test_a_program_computes_the_same(make):
    ours, written = (make().contenders[name].enqueue() for name in (REWRITTEN, WRITTEN))
    for a, b in zip(*map(jax.tree.leaves, (ours, written)), strict=True):
        a, b = (np.asarray(leaf, np.float64) for leaf in (a, b))
        assert np.linalg.norm(a - b) <= 0.05 * np.linalg.norm(b)


def test_a_gpu_has_the_products_of_jax_in_blocks_of_32():
    names = dict(_written.cases("cuda", 0))
    assert {"minilm w8a16 e4m3, 1 texts", "scaled_matmul 4096x4096x4096"} <= set(names)
