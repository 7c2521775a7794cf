"""What holds for the package as a whole."""

import ast
import json
import os
import pathlib
import subprocess
import sys
import tomllib

import pytest

import jaxfp8

ROOT = pathlib.Path(__file__).parent.parent
MODULES = sorted((ROOT / "jaxfp8").rglob("*.py"))
# Not the benchmark: it counts threads as XLA does, from the environment.
LIBRARY = [path for path in MODULES if path.parent.name != "_bench"]
MAX_LINES = 450
MAX_FUNCTION_LINES = 50  # without the docstring

_AFTER_IMPORT = """
import json, sys, jax
before = dict(jax.config.values)
import jaxfp8, jaxfp8.__main__
from jax.extend import backend
changed = [name for name, value in jax.config.values.items() if before.get(name) != value]
heavy = [name for name in ("flax", "orbax", "matplotlib", "torch") if name in sys.modules]
print(json.dumps({"changed": changed, "heavy": heavy}))
"""

_STARTS_NO_BACKEND = """
import jax, jaxfp8
jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend has started
assert len(jax.devices()) == 3
"""


def run_python(code: str, cwd: pathlib.Path) -> str:
    """The output of a program in a fresh interpreter that cannot see the sources' folder."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


_WARNS_AS_IT_STARTS = """
import warnings
def pytest_configure(config):
    warnings.warn("Benchmarks are automatically disabled because xdist plugin is active.")
"""


def length_of(function: ast.FunctionDef) -> int:
    """Lines of a function without its docstring."""
    docstring = ast.get_docstring(function, clean=False)
    return function.end_lineno - function.lineno + 1 - len((docstring or "").splitlines())


def test_import_changes_no_config_and_loads_no_extras(tmp_path):
    seen = json.loads(run_python(_AFTER_IMPORT, tmp_path))
    assert seen == {"changed": [], "heavy": []}


def test_import_starts_no_backend(tmp_path):
    run_python(_STARTS_NO_BACKEND, tmp_path)


@pytest.mark.slow
def test_layers_and_their_framework_are_imported_when_first_used(tmp_path):
    run_python(
        "import sys, jaxfp8; assert 'flax' not in sys.modules; jaxfp8.testing.assert_rewritten; "
        "assert 'flax' not in sys.modules; jaxfp8.linen.Dense, jaxfp8.nnx.Linear",
        tmp_path,
    )


def test_version_is_that_of_the_package():
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert jaxfp8.__version__ == tomllib.load(file)["project"]["version"]


_USES = """
import jax.numpy as jnp
import jaxfp8
reveal_type(jaxfp8.quantize(jnp.ones((2, 2))).qvalue)
reveal_type(jaxfp8.explain(len)("x").missed)
reveal_type(jaxfp8.__version__)
jaxfp8.quantize(1, no_such_option=2)
"""


@pytest.mark.any_jax
def test_a_type_checker_sees_the_types_of_the_package(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "uses.py").write_text(_USES)
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "uses.py"]
    env = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    told = done.stdout
    assert told.count("note: Revealed type") == 3 and '"Any"' not in told, told
    assert 'Unexpected keyword argument "no_such_option"' in told


def test_package_works_from_outside_the_sources(tmp_path):
    found = run_python("import jaxfp8; print(jaxfp8.__name__, jaxfp8.matmul.__name__)", tmp_path)
    assert found.split() == ["jaxfp8", "matmul"]


def test_no_module_reads_the_environment():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in LIBRARY
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
    ]
    assert not found


def test_files_stay_small():
    lines = {path.relative_to(ROOT): path.read_text().count("\n") for path in MODULES}
    assert {path: n for path, n in lines.items() if n > MAX_LINES} == {}


def test_functions_stay_small():
    lengths = {
        f"{path.relative_to(ROOT)}:{node.lineno}": length_of(node)
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize("name", jaxfp8.__all__)
def test_every_public_name_exists_and_is_documented(name):
    assert getattr(jaxfp8, name).__doc__


@pytest.mark.slow
def test_suite_starts_where_pytest_benchmark_warns(tmp_path):
    """An older one does beside pytest-xdist; here a plugin of its name stands in for it."""
    metadata = tmp_path / "stand_in-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: stand-in\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[pytest11]\nbenchmark = stand_in\n")
    (tmp_path / "stand_in.py").write_text(_WARNS_AS_IT_STARTS)
    (tmp_path / "test_nothing.py").write_text("def test_nothing(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-c", ROOT / "pytest.ini", tmp_path]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
