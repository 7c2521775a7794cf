"""Slow calls: an error inside `strict`, a warning outside."""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Hashable, Iterator

from jaxfp8._value import errors

_STRICT = contextvars.ContextVar("jaxfp8_strict", default=False)
# Reasons already warned of.
_WARNED: set[Hashable] = set()


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Within this context, a scaled dot without a kernel is an error.

    Outside it plain XLA computes such a dot, with a `FallbackWarning` once per reason. The same
    holds on a mesh if XLA would gather a call's operands, and would not gather those of float code.
    The context covers calls without `jit`, and functions traced or compiled inside it. A function
    compiled before stays as it is.

    Raises:
      UnsupportedError: from inside the context, with the reason and the remedy.

    Example:
      >>> import jax.numpy as jnp, jaxfp8
      >>> w = jaxfp8.quantize(jnp.ones((8, 4)), channelwise_axes=(1,))
      >>> with jaxfp8.strict():
      ...     y = jaxfp8.matmul(jnp.ones((2, 8)), w)
      >>> float(y[0, 0])
      8.0
    """
    with strict_if(True):
        yield


@contextlib.contextmanager
def strict_if(wanted: bool) -> Iterator[None]:
    """The same, or its opposite; for XLA's callbacks on a thread of its own."""
    token = _STRICT.set(wanted)
    try:
        yield
    finally:
        _STRICT.reset(token)


def is_strict() -> bool:
    """Whether the caller is inside `jaxfp8.strict()`."""
    return _STRICT.get()


def tell_gathered(what: str, reason: str) -> None:
    """Warns of a call with operands gathered by XLA, once per reason; an error in `strict`."""
    text = f"on this mesh XLA gathers operands of {what}: {reason}"
    warn_once(text, "or leave `jaxfp8.strict()` to allow that", reason)


def warn_once(text: str, remedy: str, about: Hashable) -> None:
    """Warns of a slow call, once per key `about`; an error with the remedy in `strict`."""
    if is_strict():
        raise errors.UnsupportedError(f"{text}; {remedy}.")
    if about not in _WARNED:
        _WARNED.add(about)
        warnings.warn(f"{text}.", errors.FallbackWarning, stacklevel=errors.level_of_user())
