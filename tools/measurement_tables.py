"""The tables of pages that are made from data: measurements, limits, machines that passed.

python tools/measurement_tables.py            write them between their markers
python tools/measurement_tables.py --check    print differences, and exit with 1; writes nothing

A file of docs/measurements/ is a record of `python -m jaxfp8 bench --json` (docs/benchmark.md lists
the fields) with a `source` added: `commit`, the `command` that measures it, and `date` if the
machine has no `time`. `by` names another program, if the figures are from one. Optional are
`notes`, and for a case `group`, `note` and `unit`. A `title`, a `remark` of the source, and failed
attempts in `tried`, are for readers of the file. Figures keep their digits, at most four; longer
ones are rounded to three.

A file of docs/tables/ has `columns` and `rows`. Other fields of a row are notes for readers of the
file, and a row with `"shown": false` is not in the page.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "docs"
MARKED = re.compile(
    r"(?P<begin><!-- (?P<kind>measured|table): (?P<name>\w+) -->\n)"
    r".*?(?P<end><!-- end of (?:measured|table) -->)",
    re.DOTALL,
)
DATA = {"measured": "measurements", "table": "tables"}
_MOST_DIGITS, _DIGITS = 4, 3
# A table is in microseconds if its shortest time is below this, else in milliseconds.
_MICROSECONDS_BELOW = Decimal("1e-4")
# Fields of a contender in the order of columns, and their headings.
_FIELDS = {
    "seconds": "{name}, {unit}",
    "times_ours": "speed, {name} = 1",
    "speed": "{name}, speed",
    "rate": "{name}, rate",
    "share_of_peak": "{name}, of peak",
    "spread": "{name}, spread",
}
_RATES = {"read": "B/s", "int8": "OP/s", "tokens": "tokens/s"}  # by the limit of the case
Case = dict[str, Any]


def page_of(text: str, folder: Path) -> str:
    """The page with each marked part made anew, from the data below a folder."""

    def made(marked: re.Match[str]) -> str:
        place = f"{DATA[marked['kind']]}/{marked['name']}.json"
        record = read(folder / place)
        link = f"[data]({place})"
        show = shown if marked["kind"] == "measured" else plain_table
        return f"{marked['begin']}\n{show(record, link)}\n\n{marked['end']}"

    return MARKED.sub(made, text)


def missing(texts: Sequence[str], folder: Path) -> list[str]:
    """The files of data without a place in a page."""
    found = {DATA[m["kind"]] + "/" + m["name"] for text in texts for m in MARKED.finditer(text)}
    files = (path for place in DATA.values() for path in (folder / place).glob("*.json"))
    return sorted({f"{path.parent.name}/{path.stem}" for path in files} - found)


def plain_table(record: dict[str, Any], link: str) -> str:
    """The columns of each shown row, and a link to the notes."""
    columns = record["columns"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in record["rows"]:
        if row.get("shown", True):
            lines.append(f"| {' | '.join(str(row.get(column, '')) for column in columns)} |")
    return "\n".join([*lines, "", f"{record['more']}: {link}."])


def read(path: Path) -> dict[str, Any]:
    """A record, with the digits of its figures as written."""
    return json.loads(path.read_text(), parse_float=Decimal, parse_int=Decimal)


def shown(record: dict[str, Any], link: str) -> str:
    """The machine, a table for each group of cases, and the notes."""
    parts = [f"{origin(record)} ({link})"]
    for title, cases in groups(record["cases"]):
        parts += [f"**{title}**"] if title else []
        parts.append("\n".join(table(cases)))
    notes = [*record.get("notes", ()), *_notes_of(record["cases"])]
    parts += ["\n".join(f"- {note}" for note in notes)] if notes else []
    return "\n\n".join(parts)


def origin(record: dict[str, Any]) -> str:
    """Machine, versions, date, commit and command."""
    machine, source = record["machine"], record["source"]
    devices = machine.get("devices", ()) if machine["platform"] != "cpu" else ()
    count = f"{len(devices)} x " if len(devices) > 1 else ""
    threads = f"{machine['threads']} threads" if "threads" in machine and not devices else ""
    versions = ", ".join(f"{name} {v}" for name, v in machine.get("packages", {}).items())
    where = [
        count + devices[0] if devices else "",
        machine.get("processor", ""),
        _listed(machine.get("features", "")),
        threads,
        versions,
    ]
    date = source.get("date") or machine["time"][: len("2026-01-01")]
    run = f"{date}, commit {source['commit']}, `{source['command']}`"
    run += f" (jaxfp8 today; the figures are from {source['by']})" if "by" in source else ""
    return "; ".join([part for part in where if part]) + f". {run}"


def _listed(features: str | Sequence[str]) -> str:
    return features if isinstance(features, str) else " ".join(features)


def groups(cases: Sequence[Case]) -> Iterator[tuple[str, list[Case]]]:
    """Cases of one table: those of a `group`, or with the same first contender."""
    tables: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        group = case.get("group", "")
        first = "" if group else case["contenders"][0]["name"]
        tables.setdefault((group, first), []).append(case)
    return ((group, together) for (group, _), together in tables.items())


def table(cases: Sequence[Case]) -> Iterator[str]:
    """A row for each case, a column for each figure of each contender."""
    columns = list(_columns(cases))
    unit = _unit(cases)
    heads = [_FIELDS[field].format(name=name, unit=unit) for field, name in columns]
    yield " | ".join(["| case", *heads]) + " |"
    yield "|---|" + "---:|" * len(columns)
    for case in cases:
        figures = {c["name"]: c for c in case["contenders"]}
        pairs = [(figures.get(name, {}).get(field), field) for field, name in columns]
        rate = _RATES.get(case.get("limit", ""), "FLOP/s")
        cells = [
            "" if figure is None else cell(figure, field, unit, rate) for figure, field in pairs
        ]
        yield " | ".join([f"| {case['name']}", *cells]) + " |"


def _columns(cases: Sequence[Case]) -> Iterator[tuple[str, str]]:
    """(field, contender) of the figures of a case."""
    names = list(dict.fromkeys(c["name"] for case in cases for c in case["contenders"]))
    there = {
        (field, contender["name"])
        for case in cases
        for place, contender in enumerate(case["contenders"])
        for field, figure in contender.items()
        if figure is not None and (place or field != "times_ours")  # its own speed is 1
    }
    return ((field, name) for field in _FIELDS for name in names if (field, name) in there)


def _unit(cases: Sequence[Case]) -> str:
    """The unit of a table's times: the first case's, if it names one."""
    if "unit" in cases[0]:
        return str(cases[0]["unit"])
    times = [c["seconds"] for case in cases for c in case["contenders"] if "seconds" in c]
    return "µs" if times and min(times) < _MICROSECONDS_BELOW else "ms"


def cell(figure: Decimal, field: str, unit: str, rate: str) -> str:
    """A figure: a time in the unit of its column, a rate with its own."""
    if field == "seconds":
        return digits(figure.scaleb(6 if unit == "µs" else 3))
    if field == "rate":
        power, prefix = next(row for row in _PREFIXES if figure >= Decimal(10) ** row[0])
        return f"{digits(figure.scaleb(-power).normalize())} {prefix}{rate}"
    if field in ("spread", "share_of_peak"):
        return f"{digits(figure.scaleb(2))} %"
    return f"{digits(figure)}x"


_PREFIXES = ((12, "T"), (9, "G"), (0, ""))


def digits(figure: Decimal) -> str:
    """A figure as written, or rounded if it has more digits than were measured."""
    if len(figure.as_tuple().digits) > _MOST_DIGITS:
        figure = Context(prec=_DIGITS).plus(figure)
    return f"{figure:f}"


def _notes_of(cases: Sequence[Case]) -> Iterator[str]:
    for case in cases:
        if "note" in case:
            yield f"{case['name']}: {case['note']}"


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or compare them."""
    before = {path: path.read_text() for path in sorted(FOLDER.glob("*.md"))}
    if lost := missing([*before.values()], FOLDER):
        print(f"docs/{lost[0]}.json has no `<!-- measured: NAME -->` or `<!-- table: NAME -->`.")
        return 1
    after = {path: page_of(text, FOLDER) for path, text in before.items()}
    stale = [path for path in before if before[path] != after[path]]
    for path in stale:
        if arguments == ["--check"]:
            print(
                f"docs/{path.name} differs from its data. Run `python tools/measurement_tables.py`."
            )
        else:
            path.write_text(after[path])
    return int(arguments == ["--check"] and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
