"""`python -m jaxfp8 compare`: its figures, its bounds, its files, and what it refuses."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8 import __main__
from jaxfp8._bench._measure import Timing
from jaxfp8._bench._ways import WAYS, Way
from jaxfp8._bench.compare import data as drawing
from jaxfp8._bench.compare import options, result
from jaxfp8._bench.compare.result import Compared, Result
from jaxfp8._value.accuracy import Error

pytestmark = pytest.mark.any_jax

ODD = (17, 19, 131)
BY_NAME = {way.name: way for way in WAYS}


def compare(*arguments):
    return __main__.main(["compare", *arguments])


@pytest.mark.parametrize("distribution", drawing.DISTRIBUTIONS)
@pytest.mark.slow
def test_every_way_stays_within_its_bounds(distribution):
    data = drawing.drawn(distribution, ODD)
    compared = result.compared(data, WAYS, "cpu", rounds=0, verify=True)
    assert not compared.missing and len(compared.results) == len(WAYS)
    assert [(r.way, r.check) for r in compared.results if not r.check.passed] == []


def test_errors_are_against_float64():
    data = drawing.drawn("normal", ODD)
    (one,) = result.compared(data, [BY_NAME["INT8 channel"]], "cpu", 0, False).results
    x = jaxfp8.quantize(data.x, jnp.int8, channelwise_axes=(0,))
    w = jaxfp8.quantize(data.w, jnp.int8, channelwise_axes=(1,))
    off = np.asarray(jaxfp8.matmul(x, w), np.float64) - data.exact()
    want = np.linalg.norm(off) / np.linalg.norm(data.exact())
    assert one.error.relative_l2 == pytest.approx(want, rel=1e-6)
    assert one.error.max_abs == pytest.approx(np.abs(off).max(), rel=1e-6)
    assert one.error.sqnr == pytest.approx(-20 * np.log10(want), abs=1e-4)
    m, n, k = ODD
    assert one.bytes == m * k + k * n + 4 * (m + n + m * n)


def test_more_bits_and_finer_scales_have_smaller_errors():
    data = drawing.drawn("outliers", (32, 48, 1024))
    names = ["float32", "bfloat16", "INT8 3 terms", "INT8 2 terms", "INT8 tensor"]
    names += [
        "INT8 tensor x, channel w",
        "INT8 channel",
        "INT8 groups of 128",
        "FP8 channel",
        "FP8_AS_INT8",
    ]
    ways = [BY_NAME[name] for name in names]
    results = result.compared(data, ways, "cpu", 0, False).results
    error = {r.way: r.error.relative_l2 for r in results}
    assert error["INT8 3 terms"] < 1e-5 < error["INT8 2 terms"] < error["bfloat16"]
    grains = [error[f"INT8 {name}"] for name in ("groups of 128", "channel", "tensor x, channel w")]
    assert grains == sorted(grains) and grains[-1] < error["INT8 tensor"]
    assert error["FP8 channel"] < error["FP8_AS_INT8"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrong(Way):
    """A way whose product, or whose weight, is a little too large."""

    product: float = 1.0
    weight: float = 1.0

    def hold_w(self, w, axis=0):
        q = super().hold_w(w, axis)
        return dataclasses.replace(q, scale=q.scale * self.weight)

    def multiply(self, x, w, axis=0, **more):
        return super().multiply(x, w, axis, **more) * self.product


@pytest.mark.parametrize(
    ("wrong", "what"),
    [({"product": 1.001}, "product at"), ({"weight": 1.02}, "operand w at"), ({}, None)],
    ids=["product", "operand", "neither"],
)
@pytest.mark.parametrize("name", ["FP8 channel", "INT8 channel", "FP8_AS_INT8"])
def test_a_way_that_leaves_its_bound_is_named(monkeypatch, capsys, name, wrong, what):
    way = Wrong(name=name, recipe=BY_NAME[name].recipe, **wrong)
    monkeypatch.setattr(options, "WAYS", (way,))
    code = compare("--shapes", "9x24x96", "--verify", "--no-time")
    shown = capsys.readouterr().out
    assert code == (what is not None)
    assert (f"✗ {name}, 9x24x96 normal: {what}" if what else "1 of 1 within") in shown


def test_nan_is_past_every_bound(monkeypatch, capsys):
    way = Wrong(name="NaN", recipe=jaxfp8.INT8_DYNAMIC, product=float("nan"))
    monkeypatch.setattr(options, "WAYS", (way,))
    assert compare("--shapes", "4x8x16", "--verify", "--no-time") == 1
    assert "0 of 1 within their bounds" in capsys.readouterr().out


@pytest.mark.slow
def test_it_measures_and_writes_what_it_says(tmp_path, short, capsys):
    pytest.importorskip("matplotlib")
    record, page = tmp_path / "run.json", tmp_path / "run.html"
    files = ["--json", str(record), "--plot", str(page)]
    only = ["--only", "FP8 tensor", "--only", "INT8 channel", "--only", "MX"]
    assert compare("--shapes", "3x32x64", *only, *files, "--time", "--verify") == 0
    shown = capsys.readouterr().out
    assert "INT8 channel" in shown and "±" in shown and "3 of 3 within their bounds" in shown
    assert "<svg" in page.read_text() and "3x32x64 normal" in page.read_text()
    run = json.loads(record.read_text())
    assert run["schema"] == "jaxfp8.compare/1" and run["settings"]["shapes"] == "3x32x64"
    (product,) = run["products"]
    assert (product["m"], product["n"], product["k"]) == (3, 32, 64)
    assert {way["name"] for way in product["ways"]} == {
        "FP8 tensor",
        "INT8 channel",
        "MX blocks of 32",
    }
    for way in product["ways"]:
        assert set(way["times"]) == set(result.STAGES) and way["check"]["passed"]
        for time in way["times"].values():
            assert time["gops"] == pytest.approx(2 * 3 * 32 * 64 / time["seconds"] / 1e9)
    assert any(way["on_front"] for way in product["ways"])


def timed(name, error, seconds):
    stages = {result.LAYER: Timing(median=seconds, spread=0.0)}
    error = Error(signal=1.0, noise=error**2, max_abs=0.0)
    return Result(way=name, error=error, bytes=1, check=None, timings=stages)


def test_the_front_holds_what_nothing_else_beats_in_both():
    results = [
        timed("exact", 1e-7, 9.0),
        timed("fast", 1e-2, 1.0),
        timed("between", 1e-3, 3.0),
        timed("beaten", 2e-2, 2.0),
        timed("equal", 1e-2, 1.0),
        Result(way="untimed", error=results_error(), bytes=1, check=None),
    ]
    compared = Compared(name="", shape=(1, 1, 1), results=results, missing={})
    assert compared.front == {"exact", "fast", "between", "equal"}


def results_error():
    return Error(signal=1.0, noise=0.0, max_abs=0.0)


def test_a_way_that_fails_is_a_line_and_the_others_go_on(monkeypatch, capsys):
    class Broken(Way):
        def multiply(self, x, w, axis=0, **more):
            raise ValueError("it is broken")

    broken = Broken(name="broken", recipe=jaxfp8.INT8_DYNAMIC)
    monkeypatch.setattr(options, "WAYS", (broken, BY_NAME["INT8 channel"]))
    assert compare("--shapes", "4x8x16", "--no-time") == 1
    shown = capsys.readouterr().out
    assert "broken: ValueError: it is broken" in shown and "INT8 channel" in shown


@pytest.mark.slow
def test_matrices_come_from_files(tmp_path, capsys):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "w.npy", rng.standard_normal((24, 16)))
    np.save(tmp_path / "x.npy", rng.standard_normal((5, 24)).astype(np.float16))
    quick = ["--no-time", "--only", "INT8 channel"]
    w, both = str(tmp_path / "w.npy"), f"{tmp_path / 'x.npy'},{tmp_path / 'w.npy'}"
    assert compare("--data", w, "--rows", "3,7", *quick) == 0
    shown = capsys.readouterr().out
    assert "3x16x24" in shown and "7x16x24" in shown
    assert compare("--data", both, *quick) == 0
    assert "5x16x24" in capsys.readouterr().out


def test_list_prints_the_names(capsys):
    assert compare("--list", "--only", "FP8") == 0
    assert "FP8_AS_INT8" in capsys.readouterr().out.splitlines()


def test_distributions_are_what_their_names_say():
    shape = (256, 256, 256)
    normal, outliers, lognormal = (drawing.drawn(name, shape).x for name in drawing.DISTRIBUTIONS)
    assert np.abs(normal).max() < 6 < np.abs(outliers).max()
    assert np.mean(np.abs(outliers) > 6) == pytest.approx(1e-3 * 0.76, rel=0.3)
    assert np.std(np.log(np.abs(lognormal))) == pytest.approx(1, rel=0.05)
    assert np.std(drawing.drawn("normal", shape).w) == pytest.approx(1 / 16, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--shapes", "64x0x64"], "'64x0x64' is none of models"),
        (["--shapes", "gpt-9"], "'gpt-9' is none of models (llama3-8b, minilm) and sizes"),
        (["--data", "uniform"], "--data uniform: that is none of normal, outliers, lognormal"),
        (["--data", "no.npy"], "--data no.npy: it cannot be read"),
        (["--data", "no.npy", "--shapes", "1x2x3"], "a file has sizes of its own"),
        (["--rows", "4", "--shapes", "1x2x3"], "--rows goes with models and NxK"),
        (["--only", "INT9"], "--only INT9: none of 17 ways has that in its name"),
        (["--time", "--no-time"], "give one of them"),
        (["--no-time", "--plot", "x.png"], "leave --no-time out"),
        (["--plot", "x.jpg"], "has to end with one of"),
        (["--platform", "cuda"], "--platform cuda: JAX has no such device here"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options_say_what_to_give_instead(capsys, arguments, expected):
    pytest.importorskip("matplotlib")
    assert compare(*arguments) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.ones((2, 2), np.int32), "it holds int32[2, 2]; a matrix of floats is needed"),
        (np.ones(3), "it holds float64[3]"),
        (np.array([[1.0, np.nan]]), "it holds NaN or infinities"),
    ],
    ids=["integers", "a vector", "NaN"],
)
def test_files_of_other_things_are_refused(tmp_path, capsys, array, expected):
    np.save(tmp_path / "w.npy", array)
    assert compare("--data", str(tmp_path / "w.npy")) == 2
    assert expected in capsys.readouterr().err


def test_matrices_that_do_not_fit_are_refused(tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.ones((2, 3)))
    assert compare("--data", f"{tmp_path / 'x.npy'},{tmp_path / 'x.npy'}") == 2
    assert "they need to be [M, K] and [K, N]" in capsys.readouterr().err
