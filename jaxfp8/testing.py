"""Assertions for tests of the rewrite and its kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxfp8._call.library.ffi import kernel_calls
from jaxfp8._rewrite import Report, explain

__all__ = ["assert_rewritten", "kernel_calls"]


def assert_rewritten(
    fun: Callable[..., Any], *args: Any, at_least: int = 1, **kwargs: Any
) -> Report:
    """Asserts that `jaxfp8.rewrite(fun)` captures dots when called with these arguments.

    Args:
      fun: the function as it is, not rewritten.
      *args, **kwargs: its arguments, or `jax.ShapeDtypeStruct`s in place of arrays.
      at_least: the least number of captured dots.

    Returns:
      The report, for further checks.

    Raises:
      AssertionError: fewer dots were captured; the message is the report.

    Example:
      >>> import jax.numpy as jnp
      >>> def f(x, q):
      ...     return x @ (q.astype(jnp.float32) * 0.5)
      >>> report = assert_rewritten(f, jnp.ones((2, 3)), jnp.ones((3, 4), jnp.int8))
    """
    report = explain(fun)(*args, **kwargs)
    if len(report.matched) < at_least:
        raise AssertionError(
            f"`jaxfp8.testing.assert_rewritten`: {len(report.matched)} dots of `{report.name}` are "
            f"rewritten, but at least {at_least} should be.\n{report}"
        )
    return report
