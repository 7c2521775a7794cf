"""The command line."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

from jaxfp8 import __main__

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
        (["my_model:constant"], "is a int, but a function is needed"),
        (["my_model:forward", "--args", "my_model:one_array"], "a tuple of arguments is needed"),
    ],
    ids=["form", "module", "name", "kind", "arguments"],
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
            "no/such/folder.json cannot be written: No such file",
        ),
    ],
    ids=["none", "too few", "wants some", "folder"],
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
