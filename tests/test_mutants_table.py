"""The table of tools/mutants.py fits the sources."""

import importlib.util
import pathlib
import sys

import pytest

pytestmark = pytest.mark.any_jax

TOOLS = pathlib.Path(__file__).parent.parent / "tools"


def load():
    """The tool, as a module."""
    sys.path.insert(0, str(TOOLS))
    try:
        spec = importlib.util.spec_from_file_location("mutants", TOOLS / "mutants.py")
        module = sys.modules["mutants"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(TOOLS))
    return module


tool = load()
TABLE = tool.read_table()


def test_there_are_mutants_of_both_suites_and_each_has_an_id_of_its_own():
    ids = [mutant.id for mutant in TABLE.mutants]
    assert len(ids) == len(set(ids)) >= 40
    assert {mutant.suite for mutant in TABLE.mutants} == set(tool.SUITES)


@pytest.mark.parametrize("mutant", TABLE.mutants, ids=lambda m: m.id)
def test_the_text_of_a_mutant_occurs_once_and_is_changed(mutant):
    assert mutant.applied(tool.ROOT) != (tool.ROOT / mutant.file).read_text()


@pytest.mark.parametrize("mutant", TABLE.mutants, ids=lambda m: m.id)
def test_the_tests_of_a_mutant_are_commands_on_files_that_exist(mutant):
    assert mutant.tests
    for command in mutant.tests:
        runner, *words = command.split()
        assert runner in ("pytest", "check")
        assert all((tool.ROOT / word).exists() for word in words if word.startswith("tests/"))


def test_a_text_that_is_gone_is_an_error_that_names_the_mutant(tmp_path):
    mutant = TABLE.mutants[0]
    with pytest.raises(ValueError, match=f"`{mutant.id}`: its text occurs 0 times"):
        mutant.applied(tmp_path)
