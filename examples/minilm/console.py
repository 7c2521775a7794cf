"""The results in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import rich.box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from minilm import words
from minilm.job import Result

MOST_IN_MATRIX = 8


def show(result: Result, console: Console) -> None:
    """Print everything."""
    console.print(Text(words.machine(), style="dim"))
    for part in (
        similarities(result, console.width),
        quality(result),
        sizes(result),
        speeds(result),
    ):
        console.print()
        console.print(part)
    console.print()
    console.print(rewriting(result))
    console.print()
    console.print(checks(result))


def similarities(result: Result, width: int) -> Table:
    """The full matrix where it fits, else the nearest neighbour of each sentence."""
    if len(result.sentences) <= MOST_IN_MATRIX:
        return matrix(result, max(12, width - 9 * len(result.sentences) - 8))
    return nearest(result, max(12, (width - 29) // 2))


def matrix(result: Result, width: int) -> Table:
    """Cosine of each pair; labels of `width` columns."""
    table = _table("Similarity")
    _add_number(table, "", 2)
    table.add_column("sentence", no_wrap=True)
    for number in range(len(result.sentences)):
        _add_number(table, str(number + 1), 6)
    for number, (sentence, row) in enumerate(zip(result.sentences, result.similarity, strict=True)):
        values = (f"{value:.3f}" for value in row)
        table.add_row(str(number + 1), Text(words.label(sentence.text, width)), *values)
    return table


def nearest(result: Result, width: int) -> Table:
    """The nearest other sentence of each; labels of `width` columns."""
    table = _table("Similarity: the nearest other sentence, and how near to float32 each is")
    _add_number(table, "", 2)
    table.add_column("sentence", no_wrap=True)
    table.add_column("nearest", no_wrap=True)
    _add_number(table, "cosine", 6)
    _add_number(table, "to f32", 7)
    labels = [words.label(sentence.text, width) for sentence in result.sentences]
    for number, (at, value) in enumerate(words.neighbours(result.similarity)):
        near = Text(labels[at])
        to_f32 = f"{result.to_f32[number]:.5f}"
        table.add_row(str(number + 1), Text(labels[number]), near, f"{value:.3f}", to_f32)
    return table


def quality(result: Result) -> Text:
    """What 8 bits cost."""
    return Text("\n".join(words.quality(result)))


def sizes(result: Result) -> Table:
    """Bytes of the weights."""
    return _filled("Weights", ("part", "float32", result.recipe, "smaller"), words.sizes(result))


def speeds(result: Result) -> Table:
    """Milliseconds per sentence."""
    heads = ("program", "ms per sentence", "faster")
    return _filled("Time (median, programs in turn)", heads, words.speeds(result))


def rewriting(result: Result) -> Group:
    """What `explain` and the counters say."""
    table = _table("Products (jaxfp8.explain)")
    _add_number(table, "", 2)
    for head in ("left side", "right side", "becomes"):
        table.add_column(head, overflow="fold")
    for row in words.forms(result.report):
        table.add_row(*map(Text, row))
    return Group(table, Text("\n".join(words.rewriting(result))))


def checks(result: Result) -> Text:
    """What was required, and whether it holds."""
    lines = Text()
    for check in result.checks:
        lines.append(words.verdict(check) + "\n", style="green" if check.passed else "bold red")
    return lines


def _filled(title: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = _table(title)
    table.add_column(heads[0])
    for head in heads[1:]:
        _add_number(table, head, 7)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=rich.box.SIMPLE_HEAD, pad_edge=False)


def _add_number(table: Table, head: str, width: int) -> None:
    """A column of numbers, which are never cut off."""
    table.add_column(head, justify="right", no_wrap=True, min_width=width)
