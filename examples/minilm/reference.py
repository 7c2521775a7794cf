"""The same encoder and the same recipes in plain numpy: what the demo's embeddings must be.

Written apart from `model` and without JAX. One sentence at a time, so that there is neither
padding nor a mask; FP8 and bfloat16 values are rounded by `ml_dtypes`, everything else
is float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
from scipy.special import erf

HEADS = 12
LAYERS = 6
# How much worse, in steps, a choice may round and still be one: sums in float32 shift a scaled
# value by some thousandths of a step, after a few layers by hundredths.
TIE = 0.1


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Values rounded to bfloat16, as float64."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def to_8_bit(x: np.ndarray, axis: int, recipe: str, run: np.ndarray | None = None) -> np.ndarray:
    """Values rounded to 8 bit with one scale along `axis`, dequantized to float64.

    `run`: the 8-bit values of the run that is checked; ties are rounded as they were there.
    """
    largest = 127 if recipe == "INT8_DYNAMIC" else 448
    scale = np.maximum(np.abs(x).max(axis, keepdims=True), 1e-12) / largest
    scale = to_bfloat16(scale) if recipe == "FP8_W8A16" else scale
    scaled = np.clip(x / scale, -largest, largest)
    rounded = _round(scaled, recipe)
    return scale * (rounded if run is None else _follow_ties(scaled, rounded, run, recipe))


def _round(scaled: np.ndarray, recipe: str) -> np.ndarray:
    if recipe == "INT8_DYNAMIC":
        return np.rint(scaled)
    return scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def _follow_ties(
    scaled: np.ndarray, rounded: np.ndarray, run: np.ndarray, recipe: str
) -> np.ndarray:
    """`run` where it rounds `scaled` as well as `rounded` does, up to `TIE` of a step; else that.

    A value next to the middle of two 8-bit neighbours goes up or down by the last bit of a
    float32 sum, and one such choice alters the inputs of all later ones: two right runs of a
    recipe with 8-bit activations part to a cosine of 0.997 or so. Only choices are followed: a
    value that is off by more is rounded here by itself, and tells in the embedding.
    """
    run = run.astype(np.float64)
    step = 1 if recipe == "INT8_DYNAMIC" else np.maximum(np.abs(scaled) / 8, 2.0**-9)
    worse_by = np.abs(scaled - run) - np.abs(scaled - rounded)
    return np.where(worse_by <= TIE * step, run, rounded)


class Reference:
    """The encoder with its matrices quantized once; `recipe` may also be "f32"."""

    def __init__(self, tensors: dict[str, np.ndarray], recipe: str) -> None:
        """Take the checkpoint's tensors by name, and quantize the matrices [out, in] among them."""
        self._recipe = recipe
        self._tensors = {name: self._weight(name, value) for name, value in tensors.items()}

    def __call__(self, ids: Sequence[int], codes: Sequence[np.ndarray] = ()) -> np.ndarray:
        """The unit-length embedding, float64 [384], of a sentence given as token ids.

        `codes`: the 8-bit activations [T, in] of the run that is checked, one array for each
        linear layer, whose choices at ties are followed; without it all are made here.
        """
        self._codes = iter(codes)
        x = self._embed(np.asarray(ids))
        for i in range(LAYERS):
            x = self._layer(f"encoder.layer.{i}.", x)
        mean = x.mean(0)
        return mean / np.sqrt((mean * mean).sum())

    def _weight(self, name: str, value: np.ndarray) -> np.ndarray:
        if not name.startswith("encoder.") or value.ndim != 2:
            return value
        wide = value.astype(np.float64)
        return wide if self._recipe == "f32" else to_8_bit(wide, 1, self._recipe)

    def _activation(self, x: np.ndarray) -> np.ndarray:
        if self._recipe == "f32":
            return x
        if self._recipe == "FP8_W8A16":
            return to_bfloat16(x)
        return to_8_bit(x, 1, self._recipe, next(self._codes, None))

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        weight, bias = self._tensors[name + ".weight"], self._tensors[name + ".bias"]
        return self._activation(x) @ weight.T + bias

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        mean, variance = x.mean(1, keepdims=True), x.var(1, keepdims=True)
        normal = (x - mean) / np.sqrt(variance + 1e-12)
        return normal * self._tensors[name + ".weight"] + self._tensors[name + ".bias"]

    def _embed(self, ids: np.ndarray) -> np.ndarray:
        words = self._tensors["embeddings.word_embeddings.weight"][ids]
        positions = self._tensors["embeddings.position_embeddings.weight"][: len(ids)]
        types = self._tensors["embeddings.token_type_embeddings.weight"][0]
        return self._norm("embeddings.LayerNorm", np.float64(words) + positions + types)

    def _layer(self, name: str, x: np.ndarray) -> np.ndarray:
        mixed = self._attention(name + "attention.self.", x)
        x = x + self._linear(name + "attention.output.dense", mixed)
        x = self._norm(name + "attention.output.LayerNorm", x)
        hidden = self._linear(name + "intermediate.dense", x)
        hidden = hidden * (1 + erf(hidden / np.sqrt(2))) / 2
        return self._norm(
            name + "output.LayerNorm", x + self._linear(name + "output.dense", hidden)
        )

    def _attention(self, name: str, x: np.ndarray) -> np.ndarray:
        parts = (self._linear(name + part, x) for part in ("query", "key", "value"))
        query, key, value = (np.split(part, HEADS, axis=1) for part in parts)
        return np.hstack([_attend(*head) for head in zip(query, key, value, strict=True)])


def _attend(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """One head: each token's mix of the values."""
    scores = query @ key.T / np.sqrt(query.shape[1])
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights @ value / weights.sum(1, keepdims=True)
