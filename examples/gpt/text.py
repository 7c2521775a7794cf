"""Real text that every Python has: the sources of its standard library, as bytes or words."""

from __future__ import annotations

import collections
import functools
import pathlib
import re
import sysconfig

import numpy as np

VOCABULARY = 256
VALIDATION = 0.05
_WORD = re.compile(rb" ?\w+|\s+|[^\w\s]")


@functools.lru_cache
def load(most: int = 8_000_000, vocabulary: int = VOCABULARY) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation tokens of at most `most` bytes: the top-level modules in order.

    Every twentieth part of each file is for validation. A token is a byte; of a larger vocabulary
    the others are the words that are commonest in the text.
    """
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    training, validation, total = [], [], 0
    for file in files:
        content = file.read_bytes()
        border = int(len(content) * (1 - VALIDATION))
        training.append(content[:border])
        validation.append(content[border:])
        total += len(content)
        if total > most:
            break
    parts = b"".join(training), b"".join(validation)
    if vocabulary == VOCABULARY:
        return np.frombuffer(parts[0], np.uint8), np.frombuffer(parts[1], np.uint8)
    counts = collections.Counter(_WORD.findall(parts[0])).most_common(vocabulary - VOCABULARY)
    known = {word: VOCABULARY + number for number, (word, _) in enumerate(counts)}
    return _tokens(parts[0], known), _tokens(parts[1], known)


def _tokens(text: bytes, known: dict[bytes, int]) -> np.ndarray:
    """A token for each known word, and for each byte of the others."""
    found: list[int] = []
    for word in _WORD.findall(text):
        found.extend([known[word]] if word in known else word)
    return np.array(found, np.int32)


def batch(text: np.ndarray, size: int, length: int, seed: int) -> np.ndarray:
    """Random windows, int32 [size, length + 1]: the same for the same seed.

    The seed is a number of the step, so that a run that is resumed sees what it would have seen.
    """
    starts = np.random.default_rng(seed).integers(0, len(text) - length - 1, size)
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
