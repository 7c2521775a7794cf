"""The tables of docs/measurements.md, and the tool that makes them of docs/measurements/*.json."""

import importlib.util
import json
import pathlib

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


def test_tables_of_the_page_are_those_of_the_data():
    folder = ROOT / "docs"
    page = (folder / "measurements.md").read_text()
    assert tool.page_of(page, folder / "measurements") == page


def test_a_changed_figure_changes_the_page(tmp_path):
    folder = ROOT / "docs"
    page = (folder / "measurements.md").read_text()
    for path in (folder / "measurements").glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text().replace("0.000290", "0.000280"))
    assert tool.page_of(page, tmp_path) != page


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


def test_data_without_a_place_in_the_page_is_an_error(tmp_path):
    (tmp_path / "lost.json").write_text("{}")
    with pytest.raises(ValueError, match="lost"):
        tool.page_of("no markers", tmp_path)
