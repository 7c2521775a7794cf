"""The demo from sentences to a `Result`: what is computed, and what is required of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

import jaxfp8
from minilm.files import ModelFiles
from minilm.measure import (
    Measured,
    Program,
    Track,
    as_written,
    count_calls,
    embed,
    embed_and_compare,
    explain,
    platform,
    race,
    rewritten,
)
from minilm.quantize import WEIGHT_MATRICES, load_params, quantize
from minilm.reference import Reference
from minilm.sentences import ORDINARY, SENTENCES
from minilm.text import Sentence, Tokenizer, make_batches

# By recipe: what 8 bits may cost an ordinary English sentence, the only kind the model reads well.
LEAST_TO_F32 = {"FP8_W8A16": 0.997, "FP8_DYNAMIC": 0.995, "INT8_DYNAMIC": 0.99}
LEAST_TO_NUMPY = 0.9995


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """A number that must not be below another; `hint` says where to look if it is."""

    claim: str
    value: float
    least: float
    hint: str = ""

    @property
    def passed(self) -> bool:
        """Whether it is not; false for NaN."""
        return self.value >= self.least


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What the demo shows.

    Attributes:
      sentences: what was embedded.
      rows: how many of them the measured batch holds.
      measured: all programs on that batch, the one in float32 first.
      recipe: the fastest that was measured with jaxfp8. What follows is of this one.
      embeddings: of the rewritten program, unit length, [S, 384].
      f32: embeddings of the same encoder in float32, [S, 384].
      checks: the numbers that something was required of.
      report: what `jaxfp8.explain` says.
    """

    sentences: list[Sentence]
    rows: int
    measured: list[Measured]
    recipe: str
    embeddings: np.ndarray
    f32: np.ndarray
    checks: list[Check]
    report: jaxfp8.typing.Report

    @property
    def passed(self) -> bool:
        """Whether all checks did."""
        return all(check.passed for check in self.checks)

    @property
    def to_f32(self) -> np.ndarray:
        """Cosine of each embedding to its float32 one, [S]."""
        return cosines(self.embeddings, self.f32)

    @property
    def similarity(self) -> np.ndarray:
        """Cosine of each pair, [S, S]."""
        return self.embeddings @ self.embeddings.T


def do(
    files: ModelFiles, texts: Sequence[str], recipes: Sequence[str], repeat: int, track: Track
) -> Result:
    """Measure all recipes, and check the fastest; neither `texts` nor `recipes` may be empty."""
    sentences = Tokenizer(files.tokenizer)(texts)
    batches = make_batches(sentences)
    largest = max(batches, key=lambda batch: len(batch.rows))
    wide = load_params(files.tensors)
    plain = as_written(wide, "f32")
    contenders = [plain]
    for recipe in recipes:
        narrow = quantize(wide, recipe)
        contenders += [as_written(narrow, recipe), rewritten(narrow, recipe)]
    measured = race(contenders, largest, repeat, track)
    best = fastest(measured)
    reference = Reference(files.tensors, best.recipe)
    f32 = embed(plain, batches, track)
    (embeddings, expected), kernel_calls = count_calls(
        lambda: embed_and_compare(best, batches, sentences, reference, track)
    )
    reports = [explain(best.params, best.recipe, batch) for batch in batches]
    report = reports[batches.index(largest)]
    checks = [check_numpy(embeddings, expected), check_rewritten(report)]
    if has_kernels(report):
        checks.append(check_kernels(kernel_calls, least_calls(reports)))
    if tuple(texts) == SENTENCES:
        checks.append(check_f32(embeddings, f32, best.recipe))
    return Result(
        sentences=sentences,
        rows=len(largest.rows),
        measured=measured,
        recipe=best.recipe,
        embeddings=embeddings,
        f32=f32,
        checks=checks,
        report=report,
    )


def fastest(measured: Sequence[Measured]) -> Program:
    """The fastest of the rewritten programs."""
    ours = [m for m in measured if m.program.by == "jaxfp8"]
    return min(ours, key=lambda m: m.seconds).program


def check_numpy(embeddings: np.ndarray, expected: np.ndarray) -> Check:
    """The program computes what the recipe says."""
    lowest = float(cosines(embeddings, expected).min())
    claim = "lowest cosine to the numpy model, ties rounded alike"
    return Check(claim=claim, value=lowest, least=LEAST_TO_NUMPY)


def check_rewritten(report: jaxfp8.typing.Report) -> Check:
    """Every product with a weight is captured; attention multiplies float by float."""
    claim = "products with weights that are rewritten, or that XLA computes sooner"
    captured = len(report.matched) + len(left_to_xla(report))
    return Check(claim=claim, value=captured, least=WEIGHT_MATRICES)


def left_to_xla(report: jaxfp8.typing.Report) -> list[jaxfp8.typing.Site]:
    """Products that `rewrite` leaves as written, because XLA's program is faster here."""
    return [site for site in report.missed if site.reason.startswith("XLA's program is faster")]


def has_kernels(report: jaxfp8.typing.Report) -> bool:
    """Whether kernels exist for this platform; elsewhere XLA computes the products by design."""
    return all(site.platforms[platform()] is None for site in report.matched)


def least_calls(reports: Sequence[jaxfp8.typing.Report]) -> int:
    """How many kernel calls one pass over the batches has, at least.

    A GPU leaves small products to XLA, joins products of one input, and counts a CUDA graph once.
    """
    matched = [site for report in reports for site in report.matched]
    own = [site for site in matched if site.kernels[platform()] != "xla"]
    return len(own) if platform() == "cpu" else min(len(own), 1)


def check_kernels(kernel_calls: dict[str, int], least: int) -> Check:
    """The rewritten products ran on kernels, and did not fall back to XLA."""
    return Check(
        claim="kernel calls in one pass over the sentences",
        value=sum(kernel_calls.values()),
        least=least,
        hint="`python -m jaxfp8 doctor` says what is wrong with the kernels",
    )


def check_f32(embeddings: np.ndarray, f32: np.ndarray, recipe: str) -> Check:
    """8 bits cost no more than they should, on the shipped ordinary sentences, which come first."""
    lowest = float(cosines(embeddings, f32)[: len(ORDINARY)].min())
    claim = f"lowest cosine to float32 of {len(ORDINARY)} ordinary sentences"
    return Check(claim=claim, value=lowest, least=LEAST_TO_F32[recipe])


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosine of each row of `a` to that of `b`."""
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return (a * b).sum(1) / lengths
