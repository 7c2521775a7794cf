"""A figure of matplotlib as a file; as a page, with tables below it."""

from __future__ import annotations

import html
import importlib.util
import io
import pathlib
from typing import Any

from jaxfp8._value import tables

SUFFIXES = (".png", ".svg", ".pdf", ".html")


def why_not(path: str) -> str | None:
    """Why a plot cannot be drawn into a file of this name, or None if it can."""
    suffix = pathlib.Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        return f"--plot {path}: the name has to end with one of {', '.join(SUFFIXES)}"
    if importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install matplotlib, or pip install 'jaxfp8[bench]'"
    return None


def drawn(path: str, title: str, figure: Any, body: str) -> bytes:
    """A figure of matplotlib as a file of this name; a page has a text below it."""
    suffix = pathlib.Path(path).suffix.lower()[1:]
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg" if suffix == "html" else suffix, dpi=120)
    if suffix != "html":
        return buffer.getvalue()
    svg = buffer.getvalue().decode()
    style = "<style>svg { max-width: 100%; height: auto }</style>"
    text = f"{style}\n{svg[svg.index('<svg') :]}\n<pre>{html.escape(body)}</pre>"
    return tables.page(title, text).encode()
