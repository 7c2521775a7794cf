"""What a rewrite is traced on, what it returns, and what `strict` accepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewrite.support import BF16, F32, Data

import jaxfp8


def product(x: Any, q: Any) -> Any:
    return x @ (q.astype(F32) * 0.25)


def _args() -> tuple[jax.Array, jax.Array]:
    data = Data()
    return data.normal(5, 32), data.bits8(32, 24)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_weak_type_of_an_output_is_kept(dtype: Any) -> None:
    def f(x: Any, q: Any, a: Any) -> Any:
        return product(x, q), a * 2, x.astype(dtype) * 2

    weak = jnp.asarray(1.0)
    assert weak.weak_type
    outs = jaxfp8.rewrite(f)(*_args(), weak)
    assert [out.weak_type for out in outs] == [o.weak_type for o in f(*_args(), weak)]


def test_zero_and_minus_zero_are_traced_apart() -> None:
    rewritten = jaxfp8.rewrite(lambda x, q, a: product(x, q) * np.copysign(1.0, a))
    plus, minus = (rewritten(*_args(), a) for a in (0.0, -0.0))
    np.testing.assert_array_equal(plus, -minus)


def test_nan_as_an_argument_is_traced_once() -> None:
    traces: list[float] = []

    def f(x: Any, q: Any, a: float) -> Any:
        traces.append(a)
        return product(x, q)

    rewritten = jaxfp8.rewrite(f)
    for _ in range(3):
        rewritten(*_args(), float("nan"))
    assert len(traces) == 1


def test_traces_kept_for_values_of_a_number_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxfp8._rewrite.engine._MOST_TRACES", 2)
    traces: list[int] = []

    def f(x: Any, q: Any, n: int) -> Any:
        traces.append(n)
        return product(x, q) * n

    rewritten = jaxfp8.rewrite(f)
    for n in (1, 2, 1, 3, 4, 1):
        rewritten(*_args(), n)
    assert traces == [1, 2, 3, 4, 1]


def test_strings_and_enums_in_the_output_are_kept() -> None:
    def f(x: Any, q: Any) -> Any:
        return {"a": "name", "b": product(x, q), "c": [F32, 3]}

    out = jaxfp8.rewrite(f)(*_args())
    assert (out["a"], out["c"][0], int(out["c"][1])) == ("name", F32, 3)
    np.testing.assert_allclose(out["b"], product(*_args()), rtol=1e-5, atol=1e-5)


def test_output_of_another_class_is_named_in_the_error() -> None:
    class Box:
        pass

    def boxed(x: Any, q: Any) -> Any:
        return product(x, q), Box()

    with pytest.raises(TypeError, match=r"`boxed` returns a Box.*register the class"):
        jaxfp8.rewrite(boxed)(*_args())


@pytest.mark.parametrize(
    "fun",
    [lambda x, q: (product(x, q), x)[1], lambda x, q: product(x[:0], q)],
    ids=["unused", "empty"],
)
def test_strict_accepts_a_dot_that_computes_nothing(fun: Callable[..., Any]) -> None:
    jaxfp8.rewrite(fun, strict=True)(*_args())
