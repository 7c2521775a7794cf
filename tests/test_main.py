"""The command line."""

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

    def one_array():
        return jnp.ones(3)

    constant = 3
"""


def run_main(cwd: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "jaxfp8", *arguments]
    wide = dict(os.environ, COLUMNS="200")  # tables break their lines at narrower terminals
    return subprocess.run(command, cwd=cwd, env=wide, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_model.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "broken.py").write_text("import no_such_module_at_all\n")
    return tmp_path


def test_explain_prints_the_report_with_the_users_line(folder):
    done = run_main(folder, "explain", "my_model:forward", "--args", "my_model:arguments")
    assert done.returncode == 0, done.stderr
    assert "my_model.py:5" in done.stdout


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
