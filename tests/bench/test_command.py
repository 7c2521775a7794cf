"""`python -m jaxfp8 bench` from end to end, on small sizes."""

import json
import subprocess
import sys

import numpy as np
import pytest

from jaxfp8 import __main__
from jaxfp8._bench import _cases, _peers, _plot, _run
from jaxfp8._bench._measure import Missing

TINY = ["--shapes", "64x48", "--rows", "1,3", "--quick", "--only", "int8"]


@pytest.fixture(autouse=True)
def matplotlib():
    """For `--plot`; imported when a test runs, since each process of a run imports this file."""
    pytest.importorskip("matplotlib")


def bench(*arguments: str) -> int:
    return __main__.main(["bench", *arguments])


def test_it_measures_and_writes_what_it_says(tmp_path, short, capsys):
    record, page = tmp_path / "run.json", tmp_path / "run.html"
    assert bench(*TINY, "--json", str(record), "--plot", str(page)) == 0
    assert "XLA, same expression" in capsys.readouterr().out
    assert "<svg" in page.read_text() and "int8 3x64x48" in page.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.html", "run.json"]
    check_record(json.loads(record.read_text()))


def check_record(run):
    """The fields that docs/benchmark.md lists."""
    assert run["schema"] == 1
    assert set(run) == {"schema", "machine", "settings", "cases"}
    assert {"time", "processor", "features", "threads", "packages"} <= set(run["machine"])
    assert run["settings"] == {"shapes": "64x48", "rows": "1,3", "only": ["int8"], "quick": True}
    assert [case["name"] for case in run["cases"]][-1] == "int8 3x64x48"
    for case in run["cases"]:
        fields = {"name", "flops", "bytes", "limit", "peaks", "contenders", "profiles"}
        assert set(case) == fields and case["profiles"] == []
        assert case["limit"] in case["peaks"]
        assert all(peak > 0 for peak in case["peaks"].values())
        ours, *others = case["contenders"]
        assert ours["name"] == "jaxfp8" and ours["times_ours"] == 1
        assert all("missing" in other or other["seconds"] > 0 for other in others)


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_it_draws(suffix):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    assert len(_plot.drawn(f"run{suffix}", "title", figure, "")) > 500


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--shapes", "64"], "'64' is none of models (llama3-8b, minilm) and sizes"),
        (["--shapes", "64x0"], "'64x0' is none of models"),
        (["--shapes", "64x64", "--rows", "1,x"], "'1,x' is not a list of rows"),
        (["--rows", "1"], "--rows goes with --shapes"),
        (["--rows", "1", "--shapes", "5x64x48"], "'5x64x48' has rows of its own"),
        (["--only", "int8", "--only", "int7"], "--only int7: none of"),
        (["--plot", "run.jpg"], "has to end with one of .png, .svg, .pdf, .html"),
        (["--json", "no/such/run.json"], "there is no folder"),
        (["--json", "."], "--json .: that is a folder"),
        (["--threads", "0"], "--threads 0: this process may use 1 to"),
        (["--platform", "cuda"], "--platform cuda: JAX has no such device here"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_says_what_to_give(capsys, arguments, expected):
    assert bench(*arguments) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("shapes", ["table", "llama3-8b"])
def test_it_lists_the_cases_without_the_device(capsys, platform, shapes):
    assert bench("--list", "--platform", platform, "--shapes", shapes) == 0
    assert len(capsys.readouterr().out.splitlines()) > 20


def test_a_shape_may_have_its_own_rows(capsys):
    assert bench("--list", "--shapes", "5x64x48,32x16", "--rows", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[-1] for line in lines} == {"5x64x48", "2x32x16"}


def test_shapes_of_a_model_and_others_go_together(capsys):
    assert bench("--list", "--shapes", "minilm,32x16", "--rows", "2", "--only", "int8 2x") == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"int8 2x384x384", "int8 2x32x16"} <= set(lines)


@pytest.mark.slow
def test_one_that_fails_is_a_line_and_the_run_goes_on(tmp_path, short, monkeypatch, capsys):
    """And what was measured before a later case fails is in the file."""

    def broken():
        raise ValueError("no such product")

    cases = dict(list(_cases.shaped("cpu", [(1, 16, 16)]))[-1:]) | {"broken": broken}
    monkeypatch.setattr(_cases, "table", lambda platform: cases.items())
    record = tmp_path / "run.json"
    assert bench("--quick", "--json", str(record)) == 1
    assert "jaxfp8: ValueError: no such product" in capsys.readouterr().out
    done, failed = json.loads(record.read_text())["cases"]
    assert "seconds" in done["contenders"][0]
    assert failed["contenders"] == [{"name": "jaxfp8", "missing": "ValueError: no such product"}]


def test_an_interrupted_run_keeps_what_it_has(tmp_path, short, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    cases = dict(list(_cases.shaped("cpu", [(1, 16, 16)]))[-1:]) | {"long": interrupted}
    monkeypatch.setattr(_cases, "table", lambda platform: cases.items())
    record = tmp_path / "run.json"
    assert bench("--quick", "--json", str(record)) == 130
    assert len(json.loads(record.read_text())["cases"]) == 1


def test_an_interrupt_before_the_measuring_is_no_traceback(monkeypatch):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxfp8._bench._cli.plan", interrupted)
    assert bench() == 130


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch, capsys):
    record = tmp_path / "run.json"
    record.write_text("before")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert _run.fails_to_write(str(record), "after")
    assert record.read_text() == "before" and len(list(tmp_path.iterdir())) == 1
    assert "No space left on device" in capsys.readouterr().err


def test_a_missing_peer_says_how_to_install_it_and_into_a_pipe_a_row_is_a_line(
    short, monkeypatch, capsys
):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("jaxfp8._bench._peers.importlib.util.find_spec", lambda name: None)
    assert bench(*TINY) == 0
    shown = capsys.readouterr().out
    assert "contender" in shown
    assert "oneDNN int8: PyTorch is not installed: pip install torch" in shown


@pytest.mark.parametrize("saturates", [False, True])
def test_a_peer_whose_sums_saturate_is_not_timed(monkeypatch, saturates):
    """Seen without PyTorch, too: something stands in for its product."""

    def product(x, w, *scales):
        left, right = (x.astype(np.int32) + 128).reshape(len(x), -1, 2), w[0].astype(np.int32)
        pairs = (left * right.reshape(-1, 2)).sum(axis=2)
        sums = (np.minimum(pairs, 2**15 - 1) if saturates else pairs).sum(axis=1)
        return lambda: sums - 128 * right.sum()

    monkeypatch.setattr(_peers, "_int8_product", product)
    monkeypatch.setattr(_peers.importlib.util, "find_spec", lambda name: object())
    _peers._saturates.cache_clear()
    x = np.ones((16, 64), np.int8)
    contender = _peers.linear_int8(x, x, 1.0, np.ones(16), np.zeros(16))
    _peers._saturates.cache_clear()
    assert isinstance(contender, Missing) == saturates
    assert not saturates or "saturate at 16 bits" in contender.reason


def test_without_matplotlib_a_plot_is_refused_before_measuring(monkeypatch, capsys):
    monkeypatch.setattr(_plot.importlib.util, "find_spec", lambda name: None)
    assert bench("--plot", "run.png") == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.slow
def test_a_weight_that_cannot_be_prepared_is_no_failure(short, capsys):
    assert bench("--shapes", "1x63x16", "--quick", "--only", "w8a32") == 0
    assert "jaxfp8 prepared: it has 63 columns" in capsys.readouterr().out


def test_the_command_works_in_a_process_of_its_own():
    command = [sys.executable, "-m", "jaxfp8", "bench", "--list", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "w8a16 e4m3 1x4096x4096" in done.stdout
