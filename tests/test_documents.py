"""The examples of the README and of the pages in docs/ run, as they stand."""

import importlib
import pathlib
import re
import sys

import jax.numpy as jnp
import pytest

import jaxfp8

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LONGEST = 10


def blocks(page):
    """(page, line, code) of each Python block of a page."""
    text = page.read_text()
    return [(page, text[: m.start(1)].count("\n"), m.group(1)) for m in BLOCK.finditer(text)]


def place_of(block):
    return f"{block[0].name}:{block[1]}"


def test_readme_has_an_example_per_entry_point():
    code = "".join(text for *_, text in blocks(README))
    for name in ("rewrite", "quantize", "matmul", "explain", "strict"):
        assert f"jaxfp8.{name}" in code


@pytest.mark.parametrize("block", [b for page in PAGES for b in blocks(page)], ids=place_of)
def test_example_runs(block):
    page, line, code = block
    # Empty lines on top make a traceback point into the page.
    exec(compile("\n" * line + code, page, "exec"), {"__name__": page.stem})


@pytest.mark.parametrize("block", blocks(README), ids=place_of)
def test_example_of_the_readme_is_short(block):
    statements = [text for text in block[2].splitlines() if text and "import" not in text]
    assert len(statements) <= LONGEST


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_a_page_links_to_exists(page):
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("script", sorted((ROOT / "findings").glob("*.sh")), ids=lambda p: p.stem)
def test_a_finding_is_on_its_own_and_has_a_row_of_the_table(script):
    text = script.read_text()
    assert "set -euo pipefail" in text and "$(mktemp -d)" in text
    assert re.search(r"^packages (\S+==\S+ ?)+$", text, re.MULTILINE)
    assert f"`{script.stem}`" in (ROOT / "docs" / "real_libraries.md").read_text()


PUBLIC = ("jaxfp8", *(f"jaxfp8.{name}" for name in jaxfp8._ON_DEMAND))


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_those_that_the_page_lists(module):
    page = (ROOT / "docs" / "api_stability.md").read_text()
    (row,) = re.findall(rf"^\| `{module}` \| (.*) \|$", page, re.MULTILINE)
    names = re.findall(r"`(\w+)`", row)
    assert sorted(names) == sorted(importlib.import_module(module).__all__)


def test_reference_has_every_public_name():
    reference = (ROOT / "docs" / "reference" / "jaxfp8.rst").read_text()
    assert not set(jaxfp8.__all__) - set(re.findall(r"\w+", reference))
    pages = {page.stem for page in (ROOT / "docs" / "reference").glob("*.rst")}
    assert pages == {module.rpartition(".")[2] for module in PUBLIC}


def files_on_the_stack(name, action):
    """The files of the package from a call down to its last frame of function `name`."""
    package = str(pathlib.Path(jaxfp8.__file__).parent) + "/"
    found = []

    def look(frame, event, argument):
        if event == "call" and frame.f_code.co_qualname == name:
            found.clear()
            while frame is not None:
                if frame.f_code.co_filename.startswith(package):
                    found.append(frame.f_code.co_filename.removeprefix(package)[: -len(".py")])
                frame = frame.f_back

    sys.setprofile(look)
    try:
        action()
    finally:
        sys.setprofile(None)
    return set(found)


def test_the_way_of_one_weight_names_the_files_that_it_passes():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    import jaxfp8.nnx

    page = (ROOT / "docs" / "design.md").read_text()
    way = page.partition("### The way of one weight")[2].partition("XLA runs the program")[0]
    first, second = way.partition("    layer(x)")[::2]
    model = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
    halves = [
        (first, "_bind", lambda: jaxfp8.nnx.quantize(model, jaxfp8.FP8_W8A16)),
        (second, "lower", lambda: model(jnp.ones((3, 16)))),
    ]
    for text, name, action in halves:
        told = set(re.findall(r"\b_?\w+(?:/\w+)+\b", text))
        assert files_on_the_stack(name, action) == told
