"""Results in words and numbers, as both the terminal and the page show them."""

from __future__ import annotations

import itertools
import platform
import unicodedata
from collections import Counter
from importlib import metadata

import jax
import numpy as np

import jaxfp8
from minilm.job import Check, Result, cosines
from minilm.quantise import WEIGHT_MATRICES
from minilm.text import MAX_TOKENS

PARTS = {
    "matrices": f"{WEIGHT_MATRICES} weight matrices with their scales",
    "tables": "embedding tables, left in float32",
    "rest": "biases and norms, left in float32",
    "total": "all",
}


def label(text: str, width: int) -> str:
    """A sentence on one line of at most `width` columns, without control characters."""
    shown = "".join(" " if unicodedata.category(c).startswith("C") else c for c in text)
    line = " ".join(shown.split()) or "(empty)"
    return line if columns(line) <= width else _cut(line, width - 1) + "…"


def columns(text: str) -> int:
    """Width in columns; Chinese characters and emoji take two, combining marks none."""
    return sum(_columns(c) for c in text)


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _cut(text: str, width: int) -> str:
    ends = itertools.accumulate(_columns(c) for c in text)
    return "".join(c for c, end in zip(text, ends, strict=True) if end <= width).rstrip()


def neighbours(similarity: np.ndarray) -> list[tuple[int, float]]:
    """For each row the nearest other one, and how near; itself if it is the only one."""
    others = similarity - 4 * np.eye(len(similarity)) * (len(similarity) > 1)
    nearest = others.argmax(1)
    return [(int(i), float(similarity[row, i])) for row, i in enumerate(nearest)]


def megabytes(size: int) -> str:
    """As `10.7 MB`."""
    return f"{size / 1e6:.1f} MB"


def sizes(result: Result) -> list[tuple[str, str, str, str]]:
    """Rows of: part, before, after, by what factor smaller."""
    before, after = result.sizes
    return [
        (words, megabytes(before[part]), megabytes(after[part]), _factor(before[part], after[part]))
        for part, words in PARTS.items()
    ]


def speeds(result: Result) -> list[tuple[str, str, str]]:
    """Rows of: program, milliseconds per sentence, by what factor faster than float32."""
    base = next(iter(result.milliseconds.values()))
    return [(name, f"{ms:.2f}", _factor(base, ms)) for name, ms in result.milliseconds.items()]


def _factor(before: float, after: float) -> str:
    return f"{before / after:.2f}x"


def verdict(check: Check) -> str:
    """A check as a line."""
    sign = "ok" if check.passed else "FAILED"
    line = f"{sign}: {check.claim}: {check.value:.5g}, at least {check.least:g} needed"
    return line if check.passed or not check.hint else f"{line}; {check.hint}"


def machine() -> str:
    """What it ran on."""
    device = jax.devices()[0]
    versions = " ".join(f"{name} {metadata.version(name)}" for name in ("jaxfp8", "jax", "jaxlib"))
    return f"{versions}, {platform.python_implementation()} {platform.python_version()}, {device}"


def cuts(result: Result) -> list[str]:
    """A line if sentences were longer than the model takes."""
    count = sum(sentence.cut for sentence in result.sentences)
    return [f"longer than {MAX_TOKENS} tokens, and cut there: {count}"] if count else []


def quality(result: Result) -> list[str]:
    """What 8 bits cost, against float32."""
    by_itself = cosines(result.alone, result.f32)
    apart = cosines(result.alone, result.embeddings)
    return [
        f"cosine to the float32 embeddings: {lowest_and_mean(result.to_f32)}",
        f"the same of a numpy model of {result.recipe}: {lowest_and_mean(by_itself)}",
        f"between the two, each with its own choices at ties: {lowest_and_mean(apart)}",
        *cuts(result),
    ]


def lowest_and_mean(values: np.ndarray) -> str:
    """As `lowest 0.99800, mean 0.99850`."""
    return f"lowest {values.min():.5f}, mean {values.mean():.5f}"


def rewriting(result: Result) -> list[str]:
    """What became of the matrix products, and which kernels ran."""
    report = result.report
    calls = (f"{name} {count}" for name, count in result.kernel_calls.items())
    return [
        f"{len(report.matched)} of {len(report.sites)} products with 8-bit weights rewritten; "
        f"{report.others} others have no 8-bit operand (attention)",
        f"operands no longer widened: {megabytes(report.widened_bytes)} in each call",
        f"calls by kernel in one pass over the sentences: {', '.join(calls) or 'none'}",
    ]


def forms(report: jaxfp8.Report) -> list[tuple[str, str, str, str]]:
    """Rows of: how many products, left side, right side, and what these become or why not."""
    counts = Counter(
        (str(site.lhs), str(site.rhs), site.epilogue if site.rewritten else f"left: {site.reason}")
        for site in report.sites
    )
    return [(str(count), *form) for form, count in counts.items()]
