"""Cotangents of one array in two dtypes: JAX only asserts that there are none, while it traces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jaxfp8._value import compat
from jaxfp8._value.errors import message


@contextlib.contextmanager
def cotangents_of_one_dtype() -> Iterator[None]:
    """Traces a derivative.

    Raises:
      TypeError: cotangents of one array differ in dtype. JAX says so outside a trace.
    """
    try:
        yield
    except AssertionError as error:
        types = compat.mixed_cotangents(error)
        if types is None:
            raise
        first, second = types
        got = f"of shape {first.shape} are {first.dtype} and {second.dtype}"
        needs = "JAX adds cotangents of one dtype only"
        remedy = (
            "have the `custom_vjp` return each cotangent in the dtype of its input, as "
            "`ct.astype(x.dtype)`, or differentiate with respect to floats"
        )
        text = message("jaxfp8.rewrite", "cotangents of one array", got, needs, remedy)
        raise TypeError(text) from error
