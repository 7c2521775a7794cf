"""Primitives outside `jit`: a kernel runs compiled or not at all."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.extend.core import Primitive

from jaxfp8._call.library.strictness import is_strict


def run_compiled(primitive: Primitive) -> None:
    """Compiles a primitive bound outside `jit`, also under `jax.disable_jit`.

    Programs are cached by its parameters and by `jaxfp8.strict()`, because both change compilation.
    """

    @functools.lru_cache(maxsize=1024)
    def jitted(strict: bool, **params: Any) -> Any:
        del strict
        return jax.jit(functools.partial(primitive.bind, **params))

    @primitive.def_impl
    def run(*operands: jax.Array, **params: Any) -> list[jax.Array]:
        with jax.disable_jit(False):
            return jitted(is_strict(), **params)(*operands)
