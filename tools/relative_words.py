"""Relative words per sentence of comments and docstrings, or of pages.

    python tools/relative_words.py [--worst N] [PATH ...]      jaxfp8 and ffi, or files and folders

`make check` prints it of the sources, `make docs` of the pages, with each page above the aim.

A relative clause makes a reader hold its noun until the clause ends. The count is of which, that,
what, where, whose, who and whom. 0.15 is the aim.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AIM = 0.15
WORDS = re.compile(r"\b(?:which|that|what|where|whose|who|whom)\b", re.IGNORECASE)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
EXAMPLE = re.compile(r"```.*?```|^ *(?:>>>|\.\.\.).*$", re.DOTALL | re.MULTILINE)
END = re.compile(r"(?<=[.!?:;])\s+|\n\s*\n")
C_SUFFIXES = (".h", ".cc", ".cu", ".cuh", ".inc")
# What of a page is no prose: code, tables that are made from data, the address of a link.
NO_PROSE = re.compile(
    r"^```.*?^```$|^<!-- measured.*?^<!-- end of measured -->$|^    [^\n]*$|(?<=\])\([^)\n]*\)",
    re.DOTALL | re.MULTILINE,
)


def python_prose(text: str) -> Iterator[str]:
    """The docstrings of a module, and its comments; lines of comments in a row are one."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield EXAMPLE.sub(" ", docstring)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    yield from joined((t.start[0], t.string) for t in tokens if t.type == tokenize.COMMENT)


def c_prose(text: str) -> Iterator[str]:
    """The comments behind `//`, without drawings."""
    lines = enumerate(text.splitlines())
    comments = ((n, line[line.index("//") :]) for n, line in lines if "//" in line)
    yield from joined(
        (n, line) for n, line in comments if not re.search(r"--[|+>]|\S\s{3,}\S", line)
    )


def page_prose(text: str) -> Iterator[str]:
    """A page by its paragraphs, items of lists, and cells of tables."""
    prose = re.sub(r"``.+?``|`[^`]+`", "code", NO_PROSE.sub(" ", text))
    yield from re.split(r"\n\s*\n|\n(?:\s*[-*] |\|)|\|", prose)


def joined(comments: Iterable[tuple[int, str]]) -> Iterator[str]:
    """Comments of consecutive lines, as one text."""
    block, last = "", -2
    for line, comment in comments:
        if line != last + 1:
            yield block
            block = ""
        block, last = f"{block} {comment.lstrip('#/ ')}", line
    yield block


def sentences(path: Path) -> Iterator[str]:
    """The sentences of a file's prose, of at least three words."""
    prose = {".py": python_prose, ".md": page_prose}.get(path.suffix, c_prose)
    for piece in prose(path.read_text()):
        yield from (" ".join(s.split()) for s in END.split(piece) if len(s.split()) >= 3)


def sources(paths: Iterable[Path]) -> Iterator[Path]:
    """The source files below some paths, tests aside."""
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            tested = file.is_relative_to(ROOT / "ffi" / "tests")
            if file.suffix in (".py", ".md", *C_SUFFIXES) and not tested:
                yield file


def main() -> None:
    """Prints the figure, and the worst sentences if asked."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--worst", type=int, default=0, metavar="N")
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / "jaxfp8", ROOT / "ffi"])
    options = parser.parse_args()
    counts = []
    for file in sources(options.paths):
        counts += [(len(WORDS.findall(s)), s, file) for s in sentences(file)]
    words, total = sum(count for count, _, _ in counts), max(len(counts), 1)
    for count, sentence, file in sorted(counts, key=lambda c: -c[0])[: options.worst]:
        print(f"{count}  {file}: {sentence}")
    print(
        f"relative words in a sentence of prose: {words / total:.2f} (aim {AIM}, {total} sentences)"
    )
    for file in sorted({file for *_, file in counts if file.suffix == ".md"}):
        of_page = [count for count, _, page in counts if page == file]
        if sum(of_page) > AIM * len(of_page):
            print(f"above the aim: {sum(of_page) / len(of_page):.2f}  {file}")


if __name__ == "__main__":
    main()
