"""A derivative in two halves, and the residuals between them: 8-bit data, not its wide copy.

The first half computes outputs and residuals. The second half reads the residuals, and is linear in
tangents or cotangents. Each half is rewritten by itself.

A residual may be dequantized 8-bit data. Passed as it is, it takes memory at full width, and the
second half does not see the 8-bit data. The 8-bit data and the scales are passed instead. The
second half begins by dequantizing them, and its rewrite captures this.

A stand-in is passed too: an array of zeros without a reader. Its tangent is the tangent of the
residual. A second derivative then follows the function as written, with every `stop_gradient` and
custom rule, and nothing is differentiated through 8-bit data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxfp8._call.library.targets import Target, deciding_for
from jaxfp8._rewrite.derive import derivatives
from jaxfp8._rewrite.derive.derivatives import Flat, Halves, Remake, is_traced
from jaxfp8._rewrite.derive.linear import Bound
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.emit import Program
from jaxfp8._rewrite.ir.graph import Value
from jaxfp8._rewrite.ir.scaled import Parts
from jaxfp8._rewrite.plan.decide import settler
from jaxfp8._rewrite.plan.trace import collector_paused
from jaxfp8._rewrite.plan.walk import Walk
from jaxfp8._value import compat, dtypes

Rewrite = Callable[..., Callable[..., Any]]


def rewriting(rewrite: Rewrite, compute: str | None = None, target: Target | None = None) -> Remake:
    """Rewrites the functions of a derivative by `rewrite`, decided for `target`.

    `compute` is for the products of the function. Those of tangents and cotangents are computed as
    they are stored, unless JAX cannot split the derivative.
    """
    of_linear = None if compute is None else rewriting(rewrite, target=target)

    def split(
        first: Callable[..., tuple[Any, Any]],
        second: Callable[..., Any],
        primals: Sequence[Any],
        is_linear: bool,
    ) -> Halves:
        jaxpr, *form = _trace(first, primals)
        # Without tracers there is no further derivative, and no stand-in is needed.
        with deciding_for(target):
            half = _First(jaxpr, *form, stand_in=is_traced(primals), compute=compute)
        call = jax.jit(half.call(remake))
        consts = compat.consts_of(jaxpr)

        def forward(*primals: Any) -> tuple[Any, list[Any]]:
            return half.divided(call(*consts, *primals))

        def backward(passed: Sequence[Any], *moving: Any) -> Any:
            return second(half.residuals(passed), *moving)

        linear = _linear(backward, of_linear or remake) if is_linear else rewrite(backward)
        return Halves(forward, linear)

    join = rewrite if compute is None else functools.partial(rewrite, compute=compute)
    remake = Remake(split, join=join, target=target)
    return remake


class _First:
    """The first half as one program.

    Its outputs are the function's, then the residuals, then the 8-bit data and the scales of
    dequantized residuals. In place of such a residual is a stand-in, or None if none is needed.
    """

    def __init__(
        self,
        jaxpr: Any,
        out_tree: Any,
        number: int,
        residual_tree: Any,
        *,
        stand_in: bool,
        compute: str | None,
    ) -> None:
        self.jaxpr = compat.open_jaxpr(jaxpr)
        self.out_tree, self.number, self.residual_tree = out_tree, number, residual_tree
        self.stand_in, self.compute = stand_in, compute
        self.parts: dict[int, Parts] = {}
        self.program = self._decided(jaxpr)

    @collector_paused()
    def _decided(self, jaxpr: Any) -> Program | None:
        """The rewritten program; None if nothing changed."""
        walk = Walk(settler(self.compute))
        inputs = graph.inputs_of(jaxpr)
        outputs = walk.program(jaxpr, inputs)
        for i, value in list(enumerate(outputs))[self.number :]:
            if (parts := _smaller(walk, value)) is not None:
                self.parts[i] = parts
        whole = [v for i, v in enumerate(outputs) if i not in self.parts]
        program = walk.settle([*whole, *(v for p in self.parts.values() for v in p.values)], inputs)
        changed = bool(self.parts) or walk.seen.changed_since()
        return program if changed else None

    def call(self, remake: Remake) -> Flat:
        """The half, with the derivatives of the function as written."""
        if self.program is None:
            inputs = [*self.jaxpr.constvars, *self.jaxpr.invars]
            return lambda *arrays: derivatives.evaluate(
                self.jaxpr, dict(zip(inputs, arrays, strict=True))
            )
        if not self.stand_in:
            return self.run
        every = range(len(self.program.inputs))
        extra = sum(len(p.values) for p in self.parts.values())
        return derivatives.differentiable(
            self.run, self.jaxpr, every, remake, frozenset(self.parts), extra
        )

    def run(self, *arrays: Any) -> list[Any]:
        """The rewritten program."""
        assert self.program is not None
        results = iter(self.program.run(arrays))
        outputs = [
            self._stand_in(v) if i in self.parts else next(results)
            for i, v in enumerate(self.jaxpr.outvars)
        ]
        return [*outputs, *results]

    def _stand_in(self, variable: Any) -> Any:
        return compat.zeros(variable.aval) if self.stand_in else None

    def divided(self, arrays: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The outputs of the function, and the inputs of the second half."""
        outputs, passed = arrays[: self.number], list(arrays[self.number :])
        return jax.tree.unflatten(self.out_tree, outputs), passed

    def residuals(self, passed: Sequence[Any]) -> Any:
        """The residuals, made again from the inputs of the second half."""
        outvars = self.jaxpr.outvars[self.number :]
        leaves, rest = list(passed[: len(outvars)]), iter(passed[len(outvars) :])
        for i, parts in self.parts.items():
            at, aval = i - self.number, outvars[i - self.number].aval
            wide = compat.laid_out_like(parts.dequantized(rest), aval)
            leaves[at] = wide if leaves[at] is None else _moving_like(wide, leaves[at])
        return jax.tree.unflatten(self.residual_tree, leaves)


def _smaller(walk: Walk, value: Value) -> Parts | None:
    """The parts of dequantized 8-bit data, if they are smaller than the value."""
    fact = walk.dequantized(value)
    if fact is None or fact.guards or value.dtype not in dtypes.WIDE_FLOAT:
        return None
    parts = Parts(fact, value.dtype)
    return parts if parts.size < value.size * value.dtype.itemsize else None


@jax.custom_jvp
def _moving_like(x: Any, stand_in: Any) -> Any:
    """`x` with the tangent of its stand-in. The tangent of `x` itself is zero."""
    del stand_in
    return x


@_moving_like.defjvp
def _moving_like_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    return _moving_like(*primals), tangents[1]


def _linear(fun: Callable[..., Any], remake: Remake) -> Callable[..., Any]:
    """A function linear in all arguments but the first, rewritten, with a transpose.

    Its first argument is a pytree, and its result a list.
    """
    known: dict[Any, Bound] = {}

    def call(passed: Sequence[Any], *moving: Any) -> Any:
        leaves, tree = jax.tree.flatten(passed)
        key = (tree, *map(jax.typeof, (*leaves, *moving)))
        if key not in known:
            number = len(leaves)

            def flat(*arrays: Any) -> Any:
                return fun(jax.tree.unflatten(tree, arrays[:number]), *arrays[number:])

            known[key] = Bound(flat, leaves, moving, remake)
        return known[key](leaves, moving)

    return call


def _trace(
    first: Callable[..., tuple[Any, Any]], primals: Sequence[Any]
) -> tuple[Any, Any, int, Any]:
    """The jaxpr of the first half; the structure and number of outputs, the one of residuals."""
    trees: list[Any] = []

    def flat(*primals: Any) -> list[Any]:
        outputs, residuals = first(*primals)
        out_leaves, out_tree = jax.tree.flatten(outputs)
        residual_leaves, residual_tree = jax.tree.flatten(residuals)
        trees.append((out_tree, len(out_leaves), residual_tree))
        return out_leaves + residual_leaves

    jaxpr = jax.make_jaxpr(flat)(*primals)
    return (jaxpr, *trees[-1])
