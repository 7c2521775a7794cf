"""Dots that name an algorithm become scaled dots, whose float32 sums are as precise as it asks."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from rewrite.support import BF16, E4M3, F32, Data, count, float64, relative_l2, specs

import jaxfp8

Preset = lax.DotAlgorithmPreset
TAKEN = [preset for preset in Preset if preset is not Preset.F64_F64_F64]
OWN = [
    lax.DotAlgorithm(E4M3, E4M3, F32, allow_imprecise_accumulation=True),
    lax.DotAlgorithm(F32, F32, F32),
]
FAST = [
    Preset.DEFAULT,
    Preset.ANY_F8_ANY_F8_F32_FAST_ACCUM,
    Preset.ANY_F8_ANY_F8_ANY_FAST_ACCUM,
    OWN[0],
]


@pytest.mark.parametrize("algorithm", [*TAKEN, *OWN], ids=[*map(str, TAKEN), "fast", "exact"])
def test_algorithm_that_sums_in_float32_or_less_is_taken(algorithm: Any) -> None:
    def f(x: Any, q: Any, s: Any, precision: Any = algorithm) -> Any:
        return lax.dot(x, q.astype(F32) * s, precision=precision)

    data = Data()
    args = data.normal(5, 32), data.bits8(32, 24), data.scale(24)
    (exact,) = float64(lambda *args: f(*args, precision=None), *args)
    assert relative_l2(jaxfp8.rewrite(f)(*args), exact) < 1e-6
    (spec,) = specs(jaxfp8.rewrite(f), *args)
    assert spec.precision == ("default" if algorithm in FAST else "highest")


def attention(q: Any, k: Any, v: Any, k_scale: Any, v_scale: Any) -> Any:
    k, v = k.astype(q.dtype) * k_scale, v.astype(q.dtype) * v_scale
    return jax.nn.dot_product_attention(q, k, v)


def _keys_and_values(dtype: Any) -> tuple[jax.Array, ...]:
    data = Data()
    codes = [data.bits8(2, 16, 2, 8) for _ in "kv"]
    scales = [data.scale(2, 1, 2, 1).astype(dtype) for _ in "kv"]
    return (data.normal(2, 6, 4, 8, dtype=dtype), *codes, *scales)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_attention_reads_8_bit_keys_and_values(dtype: Any) -> None:
    args = _keys_and_values(dtype)
    assert count(jaxfp8.rewrite(attention, strict=True), *args) == 2
    (exact,) = float64(attention, *args)
    plain = relative_l2(jax.jit(attention)(*args), exact)
    assert relative_l2(jaxfp8.rewrite(attention)(*args), exact) <= 1.05 * plain + 1e-7


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_gradient_of_attention_is_that_of_the_function(dtype: Any) -> None:
    q, k, v, *scales = _keys_and_values(dtype)

    def gradients(fun: Any) -> Any:
        def loss(q: Any, *scales: Any) -> Any:
            return (fun(q, k, v, *scales).astype(F32) ** 2).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(q, *scales)

    for got, want in zip(gradients(jaxfp8.rewrite(attention)), gradients(attention), strict=True):
        bound = 1e-5 if dtype == F32 else 0.02
        assert relative_l2(got, np.asarray(want)) < bound
