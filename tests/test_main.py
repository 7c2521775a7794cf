"""The command line."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from checkpoint import files

from jaxfp8 import __main__, checkpoint

MODULE = """
    import jax, jax.numpy as jnp

    def forward(x, w, scale):
        return x @ (w.astype(x.dtype) * scale)

    def arguments():
        x = jax.ShapeDtypeStruct((4, 64), jnp.bfloat16)
        w = jax.ShapeDtypeStruct((64, 32), jnp.float8_e4m3fn)
        return x, w, jnp.ones((1, 32), jnp.bfloat16)

    def curved(x, w, scale):
        return x @ jnp.sin(w.astype(x.dtype))

    def too_few():
        return arguments()[:2]

    def one_array():
        return jnp.ones(3)

    constant = 3
"""


def run_main(cwd: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "jaxfp8", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_model.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "broken.py").write_text("import no_such_module_at_all\n")
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "--shape", "64x64"),
        ("explain", "m:f", "--arg", "m:a"),
        ("inspect", ".", "--js", "x"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_an_option_has_one_spelling(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        __main__.main(arguments)
    assert stopped.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.slow
def test_explain_prints_the_report_with_the_users_line(folder):
    done = run_main(folder, "explain", "my_model:forward", "--args", "my_model:arguments")
    assert done.returncode == 0, done.stderr
    assert "my_model.py:5" in done.stdout


def test_explain_says_what_computing_in_int8_costs(folder, monkeypatch, capsys):
    monkeypatch.syspath_prepend(folder)
    call = ["explain", "my_model:forward", "--args", "my_model:arguments"]
    assert __main__.main(call) == 0 and "rounded once" not in capsys.readouterr().out
    assert __main__.main([*call, "--compute", "int8"]) == 0
    assert "rounded once" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("function", "flags", "code"),
    [("forward", ["--strict"], 0), ("curved", ["--strict"], 1), ("curved", [], 0)],
    ids=["nothing missed", "a miss", "a miss without --strict"],
)
def test_strict_explain_fails_where_a_product_is_missed(
    folder, monkeypatch, capsys, function, flags, code
):
    monkeypatch.syspath_prepend(folder)
    command = ["explain", f"my_model:{function}", "--args", "my_model:arguments"]
    assert __main__.main([*command, *flags]) == code
    assert "1 dots on 8-bit data" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["my_model.forward"], "not of the form MODULE:FUNCTION"),
        (["no_such_model:forward"], "no module 'no_such_model'"),
        (["my_model:backward"], "there is no 'backward'"),
        (
            ["./my_model.py:forward"],
            "'./my_model.py' is no name of a module; one is written my_model",
        ),
        (["my_model.py:forward"], "a file my_model.py is the module my_model"),
        (["my_model:constant"], "is a int, but a function is needed"),
        (["my_model:forward", "--args", "my_model:one_array"], "a tuple of arguments is needed"),
    ],
    ids=["form", "module", "name", "path", "file", "kind", "arguments"],
)
def test_explain_says_what_was_mistyped(folder, monkeypatch, capsys, arguments, expected):
    monkeypatch.syspath_prepend(folder)
    assert __main__.main(["explain", *arguments]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["my_model:forward"], "missing a required argument: 'x'; give --args"),
        (
            ["my_model:forward", "--args", "my_model:too_few"],
            "missing a required argument: 'scale'; my_model:too_few has to return a tuple",
        ),
        (["my_model:forward", "--args", "my_model:forward"], "a function of no arguments"),
        (
            ["my_model:forward", "--args", "my_model:arguments", "--json", "no/such/folder.json"],
            "--json no/such/folder.json: there is no folder",
        ),
        (
            ["my_model:forward", "--args", "my_model:arguments", "--target", "abacus"],
            "--target is 'abacus', but needs to be one of cpu, cuda",
        ),
        (
            ["my_model:forward", "--args", "my_model:arguments", "--target", "cuda:hopper"],
            "--target is 'cuda:hopper'; write a number after the colon",
        ),
    ],
    ids=["none", "too few", "wants some", "folder", "target", "capability"],
)
def test_explain_says_which_arguments_are_wrong(folder, monkeypatch, capsys, arguments, expected):
    monkeypatch.syspath_prepend(folder)
    assert __main__.main(["explain", *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_explain_writes_json_and_html(folder, monkeypatch, capsys):
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    command = ["explain", "my_model:forward", "--args", "my_model:arguments"]
    assert __main__.main([*command, "--json", "report.json", "--html", "report.html"]) == 0
    assert json.loads(pathlib.Path("report.json").read_text())["totals"]["matched"] == 1
    assert "my_model.py:5" in pathlib.Path("report.html").read_text()
    assert sorted(p.name for p in folder.glob("*report*")) == ["report.html", "report.json"]


def test_file_stays_whole_when_writing_is_cut_short(folder, monkeypatch, capsys):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    pathlib.Path("report.json").write_text("before")
    monkeypatch.setattr(os, "fsync", full)
    command = ["explain", "my_model:forward", "--args", "my_model:arguments"]
    assert __main__.main([*command, "--json", "report.json"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert pathlib.Path("report.json").read_text() == "before"
    assert [p.name for p in folder.glob("*report*")] == ["report.json"]


def test_explain_shows_an_error_inside_the_users_module(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        __main__.main(["explain", "broken:forward"])


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as stopped:
        __main__.main(["--help"])
    assert stopped.value.code == 0
    assert {"doctor", "explain"} <= set(capsys.readouterr().out.split())


def test_version_is_that_of_the_installed_package(capsys):
    with pytest.raises(SystemExit) as stopped:
        __main__.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.split()[1][0].isdigit()


FLOATS = {
    "up.weight": np.ones((8, 4), np.float32),
    "up.bias": np.ones(8, np.float32),
    "embed.weight": np.ones((3, 4), np.float32),
}


@pytest.fixture
def checkpoints(tmp_path, monkeypatch):
    """A folder with a float checkpoint, an empty folder and a text."""
    files.folder(tmp_path / "float", FLOATS)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("no model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def code_of(arguments):
    """The exit code, also of what argparse refuses."""
    try:
        return __main__.main(arguments)
    except SystemExit as stopped:
        return stopped.code


NEW = ["quantize", "float", "new", "--recipe"]
# name: arguments, exit code, a part of the sentence
REFUSED = {
    "a path that is not there": (["inspect", "nothing"], 1, "there is no such path"),
    "no path": (["inspect", ""], 2, "a path is needed"),
    "an empty folder": (["inspect", "empty"], 1, "the folder is empty"),
    "a text": (["inspect", "text"], 1, "the file is a text"),
    "a device": (["inspect", "/dev/null"], 1, "that is no regular file"),
    "a file for a folder": (["inspect", "float", "--json", "empty"], 2, "--json empty: that is a"),
    "no source": (
        ["quantize", "nothing", "new", "--recipe", "INT8_DYNAMIC"],
        1,
        "there is no such path",
    ),
    "the source again": (
        ["quantize", "float", "float", "--recipe", "INT8_DYNAMIC"],
        1,
        "the source lies",
    ),
    "a folder around": (
        ["quantize", "float", ".", "--recipe", "INT8_DYNAMIC"],
        1,
        "the source lies there",
    ),
    "a taken file": (
        ["quantize", "float", "text", "--recipe", "INT8_DYNAMIC"],
        1,
        "or pass --overwrite.",
    ),
    "below a file": (
        ["quantize", "float", "text/x", "--recipe", "INT8_DYNAMIC"],
        1,
        "Not a directory",
    ),
    "a recipe in floats": ([*NEW, "INT8_SPLIT"], 2, "invalid choice: 'INT8_SPLIT'"),
    "a pattern of nothing": (
        [*NEW, "INT8_DYNAMIC", "--only", "upp.weight"],
        2,
        "--only 'upp.weight' matches no tensor; weights are named 'up.weight'",
    ),
    "a pattern of a bias": (
        [*NEW, "INT8_DYNAMIC", "--only", ".*bias"],
        2,
        "it is not named weight",
    ),
    "an empty pattern": ([*NEW, "INT8_DYNAMIC", "--only", ""], 2, "--only: '' matches every name"),
    "no pattern": (
        [*NEW, "INT8_DYNAMIC", "--only", "("],
        2,
        "--only: '(' is no regular expression",
    ),
    "sizes past the memory": (
        ["compare", "--shapes", "99999999x99999999x99999999", "--no-time", "--only", "INT8"],
        1,
        "give smaller sizes",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_done_is_said_in_one_sentence(checkpoints, capsys, case):
    arguments, code, sentence = case
    assert code_of(arguments) == code
    error = capsys.readouterr().err
    assert sentence in error and "`overwrite" not in error and "`where`" not in error
    assert not (checkpoints / "new").exists()


def test_a_model_with_no_weight_to_quantize_is_refused(checkpoints, capsys):
    files.folder(checkpoints / "kernels", {"up.kernel": FLOATS["up.weight"]})
    files.folder(checkpoints / "kept", {"embed.weight": FLOATS["embed.weight"]})
    for source, sentence in (("kernels", "name another checkpoint"), ("kept", "with --only")):
        assert code_of(["quantize", source, "new", "--recipe", "INT8_DYNAMIC"]) == 2
        assert sentence in capsys.readouterr().err


def test_overwrite_replaces_what_is_there(checkpoints):
    (checkpoints / "new").mkdir()
    (checkpoints / "new" / "old").write_text("")
    assert code_of([*NEW, "INT8_DYNAMIC", "--overwrite", "--json", "report.json"]) == 0
    assert not (checkpoints / "new" / "old").exists()
    assert "where" not in (checkpoints / "report.json").read_text()


def test_a_disk_that_is_full_is_said_in_one_sentence(checkpoints, monkeypatch, capsys):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert code_of([*NEW, "INT8_DYNAMIC"]) == 1
    assert "new cannot be written: No space left on device" in capsys.readouterr().err


def test_an_interrupt_ends_with_a_sentence(checkpoints, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "quantize", interrupted)
    assert code_of([*NEW, "INT8_DYNAMIC"]) == 130
    assert capsys.readouterr().err == (
        "jaxfp8 quantize: stopped; the same command goes on from here\n"
    )


@pytest.mark.parametrize("buffering", [-1, 1], ids=["at the end", "line by line"])
@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["inspect", "float"], 0), (["inspect", "nothing"], 1), (["bench", "--list"], 0), (["-h"], 0)],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_reader_that_leaves_is_no_error(
    checkpoints, monkeypatch, capsys, arguments, code, buffering
):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=buffering) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert code_of(arguments) == code
    assert "Error" not in capsys.readouterr().err


def test_a_miss_is_reported_though_nobody_reads(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert code_of(["explain", "my_model:curved", "--args", "my_model:arguments", "--strict"])
