"""The README's examples run, as they stand."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LONGEST = 10


def blocks():
    """(line, code) of each Python block in the README."""
    text = (ROOT / "README.md").read_text()
    return [(text[: m.start(1)].count("\n"), m.group(1)) for m in BLOCK.finditer(text)]


def line_of(block):
    return f"line {block[0]}"


def test_readme_has_an_example_per_entry_point():
    code = "".join(text for _, text in blocks())
    for name in ("rewrite", "quantize", "matmul", "explain", "strict"):
        assert f"jaxfp8.{name}" in code


@pytest.mark.parametrize("block", blocks(), ids=line_of)
def test_example_runs(block):
    line, code = block
    # Empty lines on top make a traceback point into the README.
    exec(compile("\n" * line + code, ROOT / "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("block", blocks(), ids=line_of)
def test_example_is_short(block):
    statements = [text for text in block[1].splitlines() if text and "import" not in text]
    assert len(statements) <= LONGEST


def test_every_file_the_readme_links_to_exists():
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert not [link for link in links if not (ROOT / link).exists()]
