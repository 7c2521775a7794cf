"""Rules that primitives share: outside `jit`, under vmap and in derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jaxfp8._call.library.strictness import is_strict


def run_compiled(primitive: Primitive) -> None:
    """Compiles a primitive bound outside `jit`, also under `jax.disable_jit`.

    A kernel runs compiled or not at all. Programs are cached by the parameters and by
    `jaxfp8.strict()`, because both change compilation.
    """

    @functools.lru_cache(maxsize=1024)
    def jitted(strict: bool, **params: Any) -> Any:
        del strict
        return jax.jit(functools.partial(primitive.bind, **params))

    @primitive.def_impl
    def run(*operands: jax.Array, **params: Any) -> list[jax.Array]:
        with jax.disable_jit(False):
            return jitted(is_strict(), **params)(*operands)


def transform_as(primitive: Primitive, function: Callable[..., Any]) -> None:
    """Batches and differentiates a primitive as a function of its operands and parameters."""

    def batch(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        out = jax.vmap(functools.partial(function, **params), axes)(*operands)
        return out, [0] * len(out) if primitive.multiple_results else 0

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        moved = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

        def of_moving(*moving: Any) -> Any:
            given = dict(enumerate(primals)) | dict(zip(moved, moving, strict=True))
            return function(*given.values(), **params)

        return jax.jvp(of_moving, [primals[i] for i in moved], [tangents[i] for i in moved])

    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
