"""The tables of the pages, and the tool that makes them of data."""

import importlib.util
import json
import pathlib
import shlex

import pytest

from jaxfp8 import __main__
from jaxfp8._bench import _record
from jaxfp8._bench._case import Case, Measured
from jaxfp8._bench._measure import Timing

pytestmark = pytest.mark.any_jax

ROOT = pathlib.Path(__file__).parent.parent


def load():
    """The tool, as a module."""
    path = ROOT / "tools" / "measurement_tables.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load()


FOLDER = ROOT / "docs"
RECORDS = sorted((FOLDER / "measurements").glob("*.json"))
# What a command of a measurement begins with: a checkout or an installed package runs it.
COMMANDS = ("python -m jaxfp8 ", "python examples/", "make ")


@pytest.mark.parametrize("page", sorted(FOLDER.glob("*.md")), ids=lambda page: page.name)
def test_tables_of_a_page_are_those_of_the_data(page):
    assert tool.page_of(page.read_text(), FOLDER) == page.read_text()


def test_a_changed_figure_changes_the_page(tmp_path):
    (tmp_path / "measurements").mkdir()
    data = (FOLDER / "measurements" / "zen5.json").read_text()
    text = "<!-- measured: zen5 -->\n<!-- end of measured -->"
    copy = tmp_path / "measurements" / "zen5.json"
    pages = []
    for figure in ("0.000233", "0.000323"):
        copy.write_text(data.replace("0.000233", figure))
        pages.append(tool.page_of(text, tmp_path))
    assert pages[0] != pages[1]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_measurement_names_a_command_that_a_checkout_has(path):
    command = json.loads(path.read_text())["source"]["command"]
    assert command.startswith(COMMANDS)
    words = shlex.split(command)
    if words[:3] == ["python", "-m", "jaxfp8"]:
        __main__._parser().parse_args(words[3:])
    elif words[0] == "python":
        assert (ROOT / words[1]).exists()
    else:
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()


def test_a_record_of_the_benchmark_makes_a_table(tmp_path):
    timings = {
        "jaxfp8": Timing(median=1.23456e-3, spread=0.01),
        "XLA": Timing(median=0.0125, spread=0.02),
    }
    case = Case(name="int8 1x2x3", contenders={}, flops=4e9, product="int8")
    done = [Measured(case=case, timings=timings, peaks={"int8": 5e12})]
    options = __main__._parser().parse_args(["bench", "--list"])
    record = json.loads(options.plan(options).text(_record.machine("cpu"), done))
    record["source"] = {"commit": "abc1234", "command": "python -m jaxfp8 bench"}
    (tmp_path / "run.json").write_text(json.dumps(record))
    shown = tool.shown(tool.read(tmp_path / "run.json"), "data")
    assert "| int8 1x2x3 | 1.23 | 12.5 | 10.1x | 3.24 TOP/s |" in shown
    assert "abc1234" in shown and record["machine"]["time"][:10] in shown


@pytest.mark.parametrize(
    "written, cell", [("0.290e-3", "0.290"), ("0.0835", "83.5"), ("1e-3", "1")]
)
def test_a_figure_keeps_the_digits_that_were_recorded(written, cell):
    figure = json.loads(written, parse_float=tool.Decimal)
    assert tool.cell(figure, "seconds", "ms", "FLOP/s") == cell


def test_data_without_a_place_in_a_page_is_found(tmp_path):
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "lost.json").write_text("{}")
    assert tool.missing(["no markers"], tmp_path) == ["tables/lost"]
    assert not tool.missing(["<!-- table: lost -->\n<!-- end of table -->"], tmp_path)


def test_a_table_shows_its_columns_and_keeps_notes_in_the_data():
    rows = [{"a": 1, "b": "x", "notes": "long"}, {"a": 2, "shown": False}]
    text = tool.plain_table({"columns": ["a", "b"], "more": "Notes", "rows": rows}, "data")
    assert text == "| a | b |\n|---|---|\n| 1 | x |\n\nNotes: data."
