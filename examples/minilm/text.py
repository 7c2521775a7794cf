"""From sentences to padded batches of token ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tokenizers

# The model was trained on 256 tokens at most (its sentence_bert_config.json says so).
MAX_TOKENS = 256
# Each length is compiled once; few lengths mean little compilation, many mean little padding.
LENGTHS = (16, 64, MAX_TOKENS)
MAX_BATCH = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sentence:
    """A sentence as token ids, unpadded; `cut` if it was over the limit."""

    text: str
    ids: tuple[int, ...]
    cut: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Sentences of one padded length.

    Attributes:
      rows: places of the sentences in the list they came from, by row.
      ids: int32 [B, T], padded with 0.
      mask: bool [B, T], true at tokens.
    """

    rows: tuple[int, ...]
    ids: np.ndarray
    mask: np.ndarray


class Tokenizer:
    """The model's own tokenizer, without the padding and the shorter limit stored in its file."""

    def __init__(self, json: str) -> None:
        """Build it from the contents of `tokenizer.json`."""
        self._tokenizer = tokenizers.Tokenizer.from_str(json)
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(MAX_TOKENS)

    def __call__(self, texts: Sequence[str]) -> list[Sentence]:
        """Token ids of each text; bytes that are no text (from a shell) become a mark."""
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        return [
            Sentence(text=text, ids=tuple(code.ids), cut=bool(code.overflowing))
            for text, code in zip(clean, self._tokenizer.encode_batch(clean), strict=True)
        ]


def make_batches(sentences: Sequence[Sentence]) -> list[Batch]:
    """All sentences, grouped by padded length."""
    out = []
    for length in LENGTHS:
        rows = [i for i, s in enumerate(sentences) if padded_length(len(s.ids)) == length]
        for start in range(0, len(rows), MAX_BATCH):
            out.append(_batch(sentences, tuple(rows[start : start + MAX_BATCH]), length))
    return out


def padded_length(tokens: int) -> int:
    """The smallest of `LENGTHS` that holds `tokens`."""
    return next(length for length in LENGTHS if length >= tokens)


def _batch(sentences: Sequence[Sentence], rows: tuple[int, ...], length: int) -> Batch:
    ids = np.zeros((len(rows), length), np.int32)
    for place, row in zip(ids, rows, strict=True):
        place[: len(sentences[row].ids)] = sentences[row].ids
    lengths = np.array([len(sentences[row].ids) for row in rows])
    return Batch(rows=rows, ids=ids, mask=np.arange(length) < lengths[:, None])
