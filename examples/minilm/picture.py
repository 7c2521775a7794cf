"""The similarities as a picture: an SVG with one coloured cell for each pair."""

from __future__ import annotations

import base64
import html
import struct
import zlib
from collections.abc import Sequence

import numpy as np

# From far to near, at equal distances.
COLOURS = ((247, 251, 255), (198, 219, 239), (107, 174, 214), (33, 113, 181), (8, 48, 107))
SIDE = 640  # of the square, in SVG units
MOST_LABELS = 48  # more would be smaller than can be read
MOST_NUMBERS = 12
LABEL_WIDTH = 300


def heatmap(similarity: np.ndarray, labels: Sequence[str]) -> str:
    """An SVG element; cosines up to 0 have the first of `COLOURS`, 1 has the last."""
    parts = [_cells(similarity)]
    labelled = len(labels) <= MOST_LABELS
    if labelled:
        parts += [_label(text, row, SIDE / len(labels)) for row, text in enumerate(labels)]
    if len(labels) <= MOST_NUMBERS:
        parts += [_number(v, at, SIDE / len(labels)) for at, v in np.ndenumerate(similarity)]
    left = 0 if labelled else LABEL_WIDTH
    width, height = SIDE + LABEL_WIDTH - left, SIDE + 40
    return (
        f'<svg viewBox="{left} 0 {width} {height}" role="img" aria-label="similarity of each pair">'
        f"{''.join(parts)}{_legend()}</svg>"
    )


def _cells(similarity: np.ndarray) -> str:
    picture = base64.b64encode(png(colours(similarity))).decode()
    return (
        f'<image x="{LABEL_WIDTH}" width="{SIDE}" height="{SIDE}" preserveAspectRatio="none"'
        f' style="image-rendering:pixelated" href="data:image/png;base64,{picture}"/>'
    )


def _label(text: str, row: int, cell: float) -> str:
    size = min(14, 0.8 * cell)
    return (
        f'<text x="{LABEL_WIDTH - 8}" y="{(row + 0.5) * cell:.1f}" font-size="{size:.1f}"'
        f' text-anchor="end" dominant-baseline="central" direction="ltr">{html.escape(text)}</text>'
    )


def _number(value: float, at: tuple[int, ...], cell: float) -> str:
    x, y = LABEL_WIDTH + (at[1] + 0.5) * cell, (at[0] + 0.5) * cell
    fill = "#fff" if value > 0.5 else "#123"
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{min(16, 0.3 * cell):.1f}" fill="{fill}"'
        f' text-anchor="middle" dominant-baseline="central">{value:.2f}</text>'
    )


def _legend() -> str:
    ramp = base64.b64encode(png(colours(np.linspace(0, 1, 64)[None]))).decode()
    x, y = LABEL_WIDTH + SIDE - 240, SIDE + 16
    return (
        f'<text x="{x - 8}" y="{y + 6}" font-size="13" text-anchor="end"'
        f' dominant-baseline="central">cosine 0 or less</text>'
        f'<image x="{x}" y="{y}" width="220" height="12" preserveAspectRatio="none"'
        f' href="data:image/png;base64,{ramp}"/>'
        f'<text x="{x + 228}" y="{y + 6}" font-size="13" dominant-baseline="central">1</text>'
    )


def colours(values: np.ndarray) -> np.ndarray:
    """Values from 0 to 1 as RGB, uint8 [..., 3]."""
    places = np.linspace(0, 1, len(COLOURS))
    values = np.nan_to_num(values)
    channels = [np.interp(values, places, channel) for channel in zip(*COLOURS, strict=True)]
    return np.stack(channels, -1).round().astype(np.uint8)


def png(pixels: np.ndarray) -> bytes:
    """A PNG file of RGB pixels, uint8 [height, width, 3]."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # 0: the row is not filtered
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
