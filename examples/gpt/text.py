"""Real text that every Python has: the sources of its standard library, as bytes."""

from __future__ import annotations

import pathlib
import sysconfig

import numpy as np

VOCABULARY = 256
VALIDATION = 0.05


def load(most: int = 8_000_000) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation text, uint8, of at most `most` bytes: the top-level modules in order.

    Every twentieth part of each file is for validation.
    """
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    training, validation, total = [], [], 0
    for file in files:
        content = np.frombuffer(file.read_bytes(), np.uint8)
        border = int(len(content) * (1 - VALIDATION))
        training.append(content[:border])
        validation.append(content[border:])
        total += len(content)
        if total > most:
            break
    return np.concatenate(training), np.concatenate(validation)


def batch(text: np.ndarray, size: int, length: int, seed: int) -> np.ndarray:
    """Random windows, int32 [size, length + 1]: the same for the same seed.

    The seed is a number of the step, so that a run that is resumed sees what it would have seen.
    """
    starts = np.random.default_rng(seed).integers(0, len(text) - length - 1, size)
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
