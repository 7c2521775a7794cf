"""The results as one HTML page that needs nothing beside it."""

from __future__ import annotations

import html
import os
import pathlib
from collections.abc import Iterable, Sequence

from minilm import words
from minilm.files import DemoError
from minilm.job import Result
from minilm.picture import heatmap

STYLE = """
:root { color-scheme: light; --ink: #16202c; --soft: #5d6b7a; --line: #dde4ec; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1000px; padding: 32px 20px 64px; color: var(--ink);
  font: 15px/1.5 system-ui, "Noto Sans", sans-serif; background: #fff; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 18px; margin: 40px 0 8px; }
p { margin: 6px 0; } .soft { color: var(--soft); font-size: 13px; }
.checks { list-style: none; padding: 0; margin: 20px 0 0; }
.checks li { padding: 6px 12px; margin: 4px 0; border-left: 4px solid #2e8b57;
  background: #f2f9f5; }
.checks li.failed { border-color: #c0392b; background: #fdf1ef; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; }
th { color: var(--soft); font-weight: 600; font-size: 13px; }
th, td { padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th.n, td.n { text-align: right; white-space: nowrap; }
svg { width: 100%; height: auto; fill: var(--ink); } svg text { font-family: inherit; }
details { margin-top: 16px; overflow-x: auto; font-size: 13px; } summary { cursor: pointer; }
"""


def check_place(path: pathlib.Path) -> None:
    """That a page can be put at `path`; said before the work, not after it.

    Raises:
      DemoError: it cannot.
    """
    path = path.resolve()
    if not path.parent.is_dir():
        raise DemoError(f"cannot write `{path}`: there is no folder `{path.parent}`; make it first")
    if path.exists() and not path.is_file():
        raise DemoError(f"cannot write `{path}`: it exists and is not a plain file; name another")
    if not os.access(path.parent, os.W_OK):
        raise DemoError(
            f"cannot write into `{path.parent}`: permission denied; name another folder"
        )


def write(result: Result, path: pathlib.Path) -> None:
    """Put the page at `path`, whole or not at all.

    Raises:
      DemoError: it cannot be written there.
    """
    path = path.resolve()
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(page(result), encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise DemoError(f"cannot write `{path}`: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)


def page(result: Result) -> str:
    """The page's source."""
    count = len(result.sentences)
    title = f"all-MiniLM-L6-v2 in 8 bits: {result.recipe}"
    sections = (
        f"<h1>{escape(title)}</h1><p class=soft>{escape(words.machine())}</p>{checks(result)}",
        f"<h2>Similarity of {count} sentences</h2>{picture(result)}",
        f"<h2>Nearest neighbours</h2>{nearest(result)}",
        f"<h2>Time, memory and error</h2>{programs(result)}",
        f"<h2>{escape(result.recipe)}</h2>{paragraphs(words.about_recipe(result))}",
        f"<details><summary>each product</summary>{result.report.to_html()}</details>",
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(sections)}</body></html>\n"
    )


def checks(result: Result) -> str:
    """What was required, and whether it holds."""
    items = (
        f"<li{'' if check.passed else ' class=failed'}>{escape(words.verdict(check))}</li>"
        for check in result.checks
    )
    return f"<ul class=checks>{''.join(items)}</ul>"


def picture(result: Result) -> str:
    """The heatmap, sentences as labels."""
    labels = [words.label(s.text, 38) for s in result.sentences]
    return f"<div class=wide>{heatmap(result.similarity, labels)}</div>"


def nearest(result: Result) -> str:
    """The nearest other sentence of each."""
    labels = [words.label(s.text, 70) for s in result.sentences]
    rows = [
        (f"{number + 1}", labels[number], labels[near], f"{value:.3f}", f"{to_f32:.5f}")
        for number, ((near, value), to_f32) in enumerate(
            zip(words.neighbours(result.similarity), result.to_f32, strict=True)
        )
    ]
    heads = ("", "sentence", "nearest", "cosine", "to float32")
    return table(heads, rows, numbers=(3, 4))


def programs(result: Result) -> str:
    """All programs, the fastest first."""
    rows = table(words.HEADS, words.programs(result), numbers=(1, 2, 3, 4))
    return rows + paragraphs(words.about_programs(result))


def paragraphs(lines: Iterable[str]) -> str:
    """Each line as a paragraph."""
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int]) -> str:
    """A table whose columns `numbers` are set to the right."""
    body = "".join(f"<tr>{_cells('td', row, numbers)}</tr>" for row in rows)
    return f"<div class=wide><table><tr>{_cells('th', heads, numbers)}</tr>{body}</table></div>"


def _cells(tag: str, texts: Sequence[str], numbers: Sequence[int]) -> str:
    return "".join(
        f"<{tag}{' class=n' if column in numbers else ' dir=auto'}>{escape(text)}</{tag}>"
        for column, text in enumerate(texts)
    )


def escape(text: str) -> str:
    """Text that means itself in HTML."""
    return html.escape(text)
