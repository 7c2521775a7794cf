"""How a report prints: a table with rich where it is installed, plain text otherwise, and HTML."""

from __future__ import annotations

import html as _html
import os
import shutil
from typing import TYPE_CHECKING

try:
    import rich.console as rich_console
    import rich.table as rich_table
except ImportError:  # an extra; without it the table is plain text
    rich_console = rich_table = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from jaxfp8._rewrite._report import Report, Site

_HEAD = ("", "where", "lhs", "rhs", "B,M,N,K", "becomes, or why not")


def text(report: Report) -> str:
    """The report as text that fits the terminal."""
    width = shutil.get_terminal_size((100, 24)).columns
    if rich_table is not None and report.sites:
        return _rich(report, width)
    return "\n".join([headline(report), *map(_plain, report.sites), *footer(report)])


def footer(report: Report) -> list[str]:
    """Where the scaled dots have no kernel, and why, a line for each platform."""
    lines = []
    for platform in dict.fromkeys(p for site in report.matched for p in site.platforms):
        whys = [site.platforms.get(platform) for site in report.matched]
        counts = {why: whys.count(why) for why in whys if why is not None}
        lines += [f"on {platform}, {n} without a kernel: {why}" for why, n in counts.items()]
    return lines


def headline(report: Report) -> str:
    """Totals in a sentence."""
    saved = report.widened_bytes / 2**20
    already = f"; {report.scaled} already scaled dots" if report.scaled else ""
    return (
        f"{report.name}: {len(report.matched)} of {len(report.sites)} dots on 8-bit data "
        f"rewritten, {saved:.1f} MiB no longer widened; {report.others} other dots{already}"
    )


def _cells(site: Site) -> tuple[str, ...]:
    sign = "ok" if site.rewritten else "--"
    return (sign, _short(site), str(site.lhs), str(site.rhs), _dims(site), outcome(site))


def outcome(site: Site) -> str:
    """What the dot became, or why it did not."""
    if site.rewritten:
        return site.epilogue
    ended = f" (at {_relative(site.ended_at)})" if site.ended_at else ""
    return f"{site.reason}{ended}; {site.remedy}"


def _dims(site: Site) -> str:
    return ",".join(map(str, site.dims))


def _short(site: Site) -> str:
    return f"{_relative(site.where)} {site.function}"


def _relative(where: str) -> str:
    """A path as seen from here, where that is shorter."""
    try:
        relative = os.path.relpath(where)
    except ValueError:  # another drive
        return where
    return min(relative, where, key=len)


def _plain(site: Site) -> str:
    sign, where, lhs, rhs, dims, result = _cells(site)
    return f"  {sign} {where}\n       {lhs} . {rhs}   B,M,N,K = {dims}\n       {result}"


def _rich(report: Report, width: int) -> str:
    table = rich_table.Table()
    for name in _HEAD:
        table.add_column(name, overflow="fold")
    for site in report.sites:
        table.add_row(*(cell.replace("[", "\\[") for cell in _cells(site)))
    console = rich_console.Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join([headline(report), captured.get().rstrip(), *footer(report)])


def html(report: Report) -> str:
    """The report as an HTML table."""
    head = "".join(f"<th>{_html.escape(name)}</th>" for name in _HEAD)
    rows = [
        "<tr>" + "".join(f"<td>{_html.escape(cell)}</td>" for cell in _cells(site)) + "</tr>"
        for site in report.sites
    ]
    return (
        f"<p>{_html.escape(headline(report))}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        + "".join(f"<p>{_html.escape(line)}</p>" for line in footer(report))
    )
