"""Results in words and numbers."""

from __future__ import annotations

import itertools
import platform
import unicodedata
from collections.abc import Collection, Sequence
from importlib import metadata

import jax
import numpy as np

from minilm.job import Check, Result, cosines, left_to_xla
from minilm.measure import Measured
from minilm.quantize import WEIGHT_MATRICES, matrix_bytes, table_bytes
from minilm.text import MAX_TOKENS

HEADS = ("program", "ms per sentence", "speed", "weights", "mean cosine", "kernels")
# They decode 8-bit codes to float32 and multiply there.
_IN_FLOAT32 = {"avx2_f32", "avx512_f32", "avx512_vbmi", "scalar_f32"}


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


def megabytes(size: int) -> str:
    """As `10.7 MB`."""
    return f"{size / 1e6:.1f} MB"


def programs(result: Result) -> list[tuple[str, ...]]:
    """A row of `HEADS` for each program, the fastest first."""
    base = result.measured[0]
    return [
        (
            m.program.name,
            f"{1e3 * m.seconds / result.rows:.2f}",
            f"{base.seconds / m.seconds:.2f}x",
            megabytes(matrix_bytes(m.program.params)),
            f"{cosines(m.embeddings, base.embeddings).mean():.5f}",
            ", ".join(m.kernels) or "XLA's",
        )
        for m in sorted(result.measured, key=lambda m: m.seconds)
    ]


def about_programs(result: Result) -> list[str]:
    """What the rows are, and which recipes do not pay here."""
    plain = result.measured[0].program.params
    return [
        f"{result.rows} sentences in one batch; median, programs in turn; speed and cosine are "
        "against float32",
        f"weights: {WEIGHT_MATRICES} matrices with their scales; embedding tables "
        f"({megabytes(table_bytes(plain))}) stay in float32",
        *slower(result.measured),
    ]


def slower(measured: Sequence[Measured]) -> list[str]:
    """A line on each reason for which recipes are no faster than float32."""
    base, *others = measured
    recipes: dict[str, list[str]] = {}
    for m in others:
        if m.program.by == "jaxfp8" and m.seconds >= base.seconds:
            recipes.setdefault(_why_slower(m.kernels), []).append(m.program.recipe)
    return [f"no faster here: {', '.join(names)}: {why}" for why, names in recipes.items()]


def _why_slower(kernels: Collection[str]) -> str:
    names = ", ".join(kernels)
    if not kernels:
        return "no kernel ran, and XLA widens the weights; `python -m jaxfp8 doctor` says more"
    if _IN_FLOAT32.issuperset(kernels):
        return (
            f"no 16-bit or FP8 multiply on this CPU: {names} decodes the codes to float32, so "
            "only memory is saved"
        )
    return f"at this size {names} gains less than the conversions around it cost"


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


def lowest_and_mean(values: np.ndarray) -> str:
    """As `lowest 0.99800, mean 0.99850`."""
    return f"lowest {values.min():.5f}, mean {values.mean():.5f}"


def about_recipe(result: Result) -> list[str]:
    """What the recipe costs, and what became of the matrix products."""
    report = result.report
    widened = f"; {megabytes(report.widened_bytes)} no longer widened in each call"
    left = len(left_to_xla(report))
    return [
        f"{result.recipe}, all sentences: cosine to float32 {lowest_and_mean(result.to_f32)}",
        f"{len(report.matched)} of {len(report.sites)} products with 8-bit weights rewritten; "
        f"{f'XLA is faster for {left}; ' if left else ''}"
        f"{report.others} others have no 8-bit operand (attention)"
        f"{widened if report.widened_bytes else ''}",
        *cuts(result),
    ]
