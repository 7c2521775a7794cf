"""A report as HTML: a fragment for notebooks, and a page. Neither loads anything."""

from __future__ import annotations

from html import escape

from jaxfp8._rewrite.report import rows as _report_rows
from jaxfp8._rewrite.report.model import Findings
from jaxfp8._rewrite.report.rows import Line, Row
from jaxfp8._value import tables

_STYLE = """
.jaxfp8 { --ink: #1c2430; --dim: #667085; --line: #d9dee7; --card: #f5f7fa; --good: #067647;
  --good-card: #e7f6ee; --bad: #b42318; --bad-card: #fdeceb; --note: #93540a;
  color: var(--ink); font: 14px/1.45 system-ui, sans-serif; max-width: 1200px; }
@media (prefers-color-scheme: dark) {
  .jaxfp8 { --ink: #e6eaf0; --dim: #98a2b3; --line: #38414f; --card: #202733; --good: #6ce9a6;
    --good-card: #143526; --bad: #fda29b; --bad-card: #40201e; --note: #fec84b; } }
.jaxfp8 h1 { font-size: 20px; margin: 0 0 12px; }
.jaxfp8 h1 code { font-size: inherit; }
.jaxfp8 .totals { display: flex; flex-wrap: wrap; gap: 8px; margin: 0 0 16px; padding: 0; }
.jaxfp8 .totals div { background: var(--card); border-radius: 8px; padding: 8px 14px; }
.jaxfp8 .totals b { display: block; font-size: 18px; }
.jaxfp8 .wide { overflow-x: auto; }
.jaxfp8 table { border-collapse: collapse; width: 100%; background: none; color: inherit; }
.jaxfp8 th, .jaxfp8 td { text-align: left; vertical-align: top; padding: 8px 16px 8px 0;
  border: 0; border-bottom: 1px solid var(--line); background: none; }
.jaxfp8 th { color: var(--dim); font-weight: 500; }
.jaxfp8 td div { overflow-wrap: break-word; }
.jaxfp8 .whole { white-space: nowrap; }
.jaxfp8 code { font: 12.5px/1.45 ui-monospace, monospace; background: none; color: inherit; }
.jaxfp8 .dim { color: var(--dim); }
.jaxfp8 .note { color: var(--note); }
.jaxfp8 .status { border-radius: 6px; padding: 2px 8px; font-size: 12.5px; white-space: nowrap; }
.jaxfp8 .rewritten, .jaxfp8 .already { color: var(--good); background: var(--good-card); }
.jaxfp8 .missed { color: var(--bad); background: var(--bad-card); }
"""
_PAGE_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0; background: Canvas; }
main { padding: 24px; margin: 0 auto; max-width: 1200px; }
"""
# Kinds of lines that are code, and the styles of others.
_CODE = ("where", "function", "path", "ended")
_CLASSES = {"library": "dim", "detail": "dim", "note": "note", "remedy": "note"}


def page(report: Findings) -> str:
    """The report as a page."""
    title = escape(f"jaxfp8: {report.name}")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_PAGE_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{fragment(report)}\n</main>\n</body>\n</html>\n"
    )


def fragment(report: Findings) -> str:
    """The report as one element with its own style."""
    rows = "\n".join(_row(row) for row in _report_rows.rows(report))
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in _report_rows.HEAD)
    table = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
    notes = "".join(f'<p class="note">{escape(line)}</p>' for line in _report_rows.footer(report))
    return (
        f'<div class="jaxfp8">\n<style>{_STYLE}</style>\n'
        f"<h1>{_code(report.name)}</h1>\n{_totals(report)}\n"
        + (f'<div class="wide">{table}</div>\n' if rows else "")
        + f"{notes}</div>"
    )


def _totals(report: Findings) -> str:
    tiles = {
        "dots on 8-bit data": str(len(report.sites)),
        "rewritten": str(len(report.matched)),
        "missed": str(len(report.missed)),
        "no longer widened": tables.size(report.widened_bytes),
        "other dots": str(report.others),
    }
    if report.scaled:
        tiles["scaled dots already"] = str(report.scaled)
    cards = (f"<div><b>{escape(n)}</b>{escape(name)}</div>" for name, n in tiles.items())
    return f'<div class="totals">{"".join(cards)}</div>'


def _row(row: Row) -> str:
    count = f'<div class="dim">{row.count} alike</div>' if row.count > 1 else ""
    operands = "".join(map(_operand, row.operands))
    cells = (
        f'<span class="status {row.status}">{row.status}</span>{count}',
        "".join(map(_line, row.place)),
        f'{operands}<div class="dim">{escape(row.sizes)}</div>',
        "".join(map(_line, row.outcome)),
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _operand(operand: str) -> str:
    """An operand, which is broken only between its array and its scale."""
    array, _, scale = operand.partition(" ")
    parts = (f'<span class="whole">{_code(part)}</span>' for part in (array, scale) if part)
    return f"<div>{' '.join(parts)}</div>"


def _line(line: Line) -> str:
    """A line of text; what is between backticks is code."""
    pieces = [""] + [line.text] if line.kind in _CODE else line.text.split("`")
    before = "\N{RIGHTWARDS ARROW} " if line.kind == "remedy" else line.before
    parts = [_code(part) if i % 2 else escape(part) for i, part in enumerate(pieces)]
    style = f' class="{_CLASSES[line.kind]}"' if line.kind in _CLASSES else ""
    return f"<div{style}>{before}{''.join(parts)}</div>"


def _code(text: str) -> str:
    """Code, which may be broken after a slash."""
    return f"<code>{escape(text).replace('/', '/<wbr>')}</code>"
