"""The results in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minilm import words
from minilm.job import Result

MOST_IN_MATRIX = 8


def show(result: Result, console: Console) -> None:
    """Print the programs, what the fastest recipe costs, and a few similarities."""
    console.print(Text(words.machine(), style="dim"))
    console.print(programs(result))
    for line in (*words.about_programs(result), "", *words.about_recipe(result)):
        console.print(Text(line))
    if len(result.sentences) <= MOST_IN_MATRIX:
        width = max(12, console.width - 9 * len(result.sentences) - 8)
        console.print(matrix(result, width))
    console.print()
    console.print(checks(result), end="")


def programs(result: Result) -> Table:
    """All programs, the fastest first."""
    rows = [tuple(map(Text, row)) for row in words.programs(result)]
    table = _table("all-MiniLM-L6-v2, the fastest program first", words.HEADS, texts=(0, 5))
    for number, row in enumerate(rows):
        table.add_row(*row, style="bold green" if number == 0 else "")
    return table


def matrix(result: Result, width: int) -> Table:
    """Cosine of each pair; labels of at most `width` columns."""
    numbers = [str(number + 1) for number in range(len(result.sentences))]
    table = _table("Similarity", ("", "sentence", *numbers), texts=(1,))
    for number, sentence, row in zip(numbers, result.sentences, result.similarity, strict=True):
        values = (f"{value:.3f}" for value in row)
        table.add_row(number, Text(words.label(sentence.text, width)), *values)
    return table


def checks(result: Result) -> Text:
    """What was required, and whether it holds."""
    lines = Text()
    for check in result.checks:
        lines.append(words.verdict(check) + "\n", style="green" if check.passed else "bold red")
    return lines


def _table(title: str, heads: Sequence[str], texts: Sequence[int]) -> Table:
    """A table of numbers, which are never cut off, save in the columns `texts`."""
    table = Table(title=title, title_justify="left", box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for column, head in enumerate(heads):
        table.add_column(head, justify="left" if column in texts else "right", no_wrap=True)
    return table
