"""A report as a table, as JSON and as a page."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
from typing import Any

import jax
import jax.export
import pytest
from rewrite.reported import args as _args
from rewrite.reported import mixed
from rewrite.support import F32, Data

import jaxfp8
from jaxfp8._rewrite import Site
from jaxfp8._value import tables


def test_report_as_json_holds_rows_and_totals() -> None:
    loaded = json.loads(jaxfp8.explain(mixed)(*_args()).to_json())
    assert loaded["totals"]["matched"] == 1
    assert [row["rewritten"] for row in loaded["sites"]] == [True, False]


def test_report_as_json_says_its_schema_and_survives_a_round_trip() -> None:
    text = jaxfp8.explain(mixed)(*_args()).to_json()
    loaded = json.loads(text)
    assert loaded["schema"] == "jaxfp8.report/2"
    fields = {"schema", "name", "totals", "sites", "calls", "encodings", "attentions"}
    assert set(loaded) == fields
    assert [row["status"] for row in loaded["sites"]] == ["rewritten", "missed"]
    assert set(loaded["sites"][0]) == {"status", *(f.name for f in dataclasses.fields(Site))}
    assert json.dumps(loaded) == text


def test_report_as_html_is_a_page_that_loads_nothing() -> None:
    page = jaxfp8.explain(mixed)(*_args()).to_html()
    assert page.startswith("<!DOCTYPE html>")
    assert not re.search(r"src=|href=|url\(|@import|<script", page)
    tags = Tags()
    tags.feed(page)
    assert tags.open == []


class Tags(html.parser.HTMLParser):
    """Which tags are open; one that closes another than the last is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        """A tag opens; a few never close."""
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """A tag closes."""
        assert self.open.pop() == tag


def test_rows_that_are_alike_are_printed_once() -> None:
    def f(x: Any, q: Any) -> Any:
        for i in range(3):
            with jax.named_scope(f"layer_{i}"):
                x = x @ q.astype(F32)
        return x

    text = str(jaxfp8.explain(f)(_args()[0], Data().bits8(32, 32)))
    assert "3 of 3 dots" in text
    assert "3 x" in text
    assert "layer_*" in text


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("one two three", 7, ["one two", "three"]),
        ("in models/layers/attention.py:12", 20, ["in models/layers/", "attention.py:12"]),
        ("f8_e4m3fn[14336,4096]", 16, ["f8_e4m3fn[14336,", "4096]"]),
        ("abcdefgh", 3, ["abc", "def", "gh"]),
        ("", 3, [""]),
    ],
    ids=["words", "path", "shape", "no joint", "empty"],
)
def test_long_words_are_broken_at_their_joints(text: str, width: int, lines: list[str]) -> None:
    assert tables.wrap(text, width) == lines


def test_report_as_html_escapes_what_it_shows() -> None:
    report = jaxfp8.explain(lambda x, q: x @ q.astype(F32))(*_args()[:2])
    assert "&lt;lambda&gt;" in report._repr_html_()
    assert "<lambda>" not in report.to_html()


@pytest.mark.parametrize("width", [60, 100, 160])
def test_printed_report_fits_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    table = str(jaxfp8.explain(mixed)(*_args())).splitlines()[1:-1]
    assert max(map(len, table)) <= width
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in table)


def test_piped_report_has_one_whole_line_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    scope = "/".join(["encoder", "block", "attention", "output_projection"] * 3)

    def f(x: Any, q: Any) -> Any:
        with jax.named_scope(scope):
            return x @ q.astype(F32)

    monkeypatch.delenv("COLUMNS", raising=False)
    _, _, row = str(jaxfp8.explain(f)(*_args()[:2])).splitlines()
    assert scope in row
    assert " . f8_e4m3fn[" in row and "saves" in row


def test_report_for_an_unknown_gpu_says_when_its_kernel_is_chosen() -> None:
    text = str(jaxfp8.explain(mixed, target=jaxfp8.Target("cuda"))(*_args()))
    assert "cuda: chosen at run time, for the GPU found" in text
