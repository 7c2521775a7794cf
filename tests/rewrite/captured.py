"""One check for code that is captured as it stands: how many calls, nothing unexplained, values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rewrite.support import count, float64, relative_l2

import jaxfp8


def check(
    fun: Callable[..., Any], *args: Any, calls: int, others: int = 0, within: float | None = None
) -> None:
    """`fun` becomes `calls` scaled dots, beside `others` that have nothing to do with 8 bit.

    Values are as near float64 as before or, where `fun` quantizes what it computes (a rounding that
    falls the other way is a step of a whole code), within `within` of the values before.
    """
    report = jaxfp8.explain(fun)(*args)
    assert not report.missed, str(report)
    assert (len(report.matched), report.others) == (calls, others), str(report)
    assert count(jaxfp8.rewrite(fun), *args) == calls
    check_values(jaxfp8.rewrite(fun), fun, *args, within=within)


def check_values(
    got: Callable[..., Any], want: Callable[..., Any], *args: Any, within: float | None = None
) -> None:
    """The two functions agree: see `check`."""
    plain = jax.tree.leaves(jax.jit(want)(*args))
    rewritten = jax.tree.leaves(got(*args))
    exact = plain if within is not None else float64(want, *args)
    for leaf, was, near in zip(rewritten, plain, exact, strict=True):
        assert (leaf.shape, leaf.dtype) == (was.shape, was.dtype)
        bound = within if within is not None else 1.05 * relative_l2(was, near) + 1e-7
        assert relative_l2(leaf, np.asarray(near)) <= bound
