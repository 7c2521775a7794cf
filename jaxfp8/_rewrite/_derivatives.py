"""Derivatives of a rewritten function: those of the function it came from.

The rewritten program is never differentiated itself: inside it, custom rules are inlined and bytes
have no gradient. Its rule is the derivative of the original, in two halves (`_halves`), each
rewritten in turn and wrapped in turn; so straight-through estimators and custom gradients keep
their meaning to any order, and backward products are captured too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

from jaxfp8 import _compat
from jaxfp8._rewrite._cuts import cuts_gradients
from jaxfp8._rewrite._halves import Halves, Rewrite, evaluate

Flat = Callable[..., Sequence[Any]]


def differentiable(
    run: Flat, jaxpr: Any, used: Sequence[int], rewrite: Rewrite, *, may_join: bool = True
) -> Flat:
    """`run` with the derivatives of `jaxpr`, as a function of the inputs that are used.

    The inputs of `jaxpr` are its constants, then its arguments; no other than those at `used` are
    read, by `run` or by an equation. Where JAX cannot compute values before tangents, `rewrite` is
    given both as one function if they `may_join`; else that is JAX's error.
    """
    rules = _Rules(jaxpr, used, rewrite, run, may_join=may_join)
    call = jax.custom_jvp(run)
    call.defjvp(functools.partial(rules.jvp, call), symbolic_zeros=True)
    return call


def _holds(jaxpr: Any, name: str) -> bool:
    """Whether an equation of this primitive stands anywhere in the jaxpr."""
    return any(eqn.primitive.name == name for eqn in jaxpr.eqns) or any(
        _holds(inner, name) for inner in core.subjaxprs(jaxpr)
    )


def _reaches(jaxpr: Any, active: Iterable[Any], name: str) -> bool:
    """Whether an equation of this primitive, or one that holds it, depends on active variables."""
    moving = set(active)
    for eqn in jaxpr.eqns:
        if any(not _compat.is_literal(v) and v in moving for v in eqn.invars):
            if eqn.primitive.name == name:
                return True
            if any(_holds(inner, name) for inner in _compat.subjaxprs(eqn)):
                return True
            moving.update(eqn.outvars)
    return False


class _Rules:
    """The derivative rules of one jaxpr; halves are made once per set of differentiated inputs."""

    def __init__(
        self, jaxpr: Any, used: Sequence[int], rewrite: Rewrite, run: Flat, *, may_join: bool
    ) -> None:
        self.jaxpr, self.rewrite = _compat.open_jaxpr(jaxpr), rewrite
        self.may_join = may_join
        inputs = [*self.jaxpr.constvars, *self.jaxpr.invars]
        self.inputs = [inputs[i] for i in used]
        self.reverse = jax.custom_vjp(run)
        self.reverse.defvjp(self.forward, self.backward, symbolic_zeros=True)
        self.inexact = [_is_inexact(v.aval) for v in self.jaxpr.outvars]
        self._halves: dict[Hashable, Halves] = {}
        self._joined: dict[Hashable, Callable[..., Any]] = {}

    def jvp(self, call: Flat, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        """Forward mode: a linear second half, which reverse mode transposes."""
        active = tuple(i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero))
        if not active:
            return call(*primals), self._tangents([jnp.zeros_like(p) for p in self._floats()])
        if _reaches(self.jaxpr, [self.inputs[i] for i in active], "custom_vjp_call"):
            return self._by_reverse(active, primals, tangents)
        moving = [tangents[i] for i in active]
        halves = self._split(active, primals)
        if halves is None:
            outputs, floats = self._joined[_key("jvp", active, primals)](*primals, *moving)
        else:
            outputs, residuals = halves.first(*primals)
            floats = halves.second(residuals, *moving)
        return outputs, self._tangents(floats)

    def _split(self, active: tuple[int, ...], primals: Sequence[Any]) -> Halves | None:
        """The halves of forward mode; None where JAX has no value without the tangent.

        So are functions with a batching rule of their own (`custom_vmap`), and Pallas kernels.
        """
        key = _key("jvp", active, primals)
        if key in self._joined:
            return None
        try:
            return self._get("jvp", active, primals)
        except ValueError as error:
            if not (self.may_join and _compat.is_inseparable(error)):
                raise
        self._joined[key] = self.rewrite(functools.partial(self._at_once, active, len(primals)))
        return None

    def _at_once(self, active: tuple[int, ...], number: int, *both: Any) -> tuple[Any, Any]:
        """Outputs, and the tangents of those that are floats, from primals and tangents."""
        primals, moving = both[:number], both[number:]
        function = functools.partial(self._of_active, active, primals)
        points = [primals[i] for i in active]
        floats, tangents, others = jax.jvp(function, points, list(moving), has_aux=True)
        return self._merge(floats, others), tangents

    def _by_reverse(
        self, active: tuple[int, ...], primals: Sequence[Any], tangents: Sequence[Any]
    ) -> Any:
        """A rule of the function is for reverse mode alone, and so is this: JAX sees to both."""

        def of_active(*values: Any) -> Sequence[Any]:
            merged = list(primals)
            for i, value in zip(active, values, strict=True):
                merged[i] = value
            return self.reverse(*merged)

        return jax.jvp(of_active, [primals[i] for i in active], [tangents[i] for i in active])

    def forward(self, *primals: Any) -> tuple[Any, Any]:
        """Reverse mode, first half."""
        active = tuple(i for i, p in enumerate(primals) if p.perturbed)
        values = [p.value for p in primals]
        outputs, residuals = self._get("vjp", active, values).first(*values)
        avals = tuple(jax.typeof(v) for v in values)
        return outputs, (residuals, _Static((active, avals)))

    def backward(self, residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        """Reverse mode, second half."""
        passed, static = residuals
        active, avals = static.value
        floats = [_instantiate(c) for c, real in zip(cotangents, self.inexact, strict=True) if real]
        second = self._halves["vjp", active, avals].second
        grads = dict(zip(active, second(passed, *floats), strict=True))
        return tuple(grads.get(i) for i in range(len(avals)))

    def _get(self, kind: str, active: tuple[int, ...], primals: Sequence[Any]) -> Halves:
        key = _key(kind, active, primals)
        if key not in self._halves:
            first = functools.partial(self._first, kind, active)
            second = _apply if kind == "jvp" else _pull_back
            how = {"is_linear": kind == "jvp", "cut": cuts_gradients(self.jaxpr)}
            self._halves[key] = Halves(first, second, primals, self.rewrite, **how)
        return self._halves[key]

    def _first(self, kind: str, active: tuple[int, ...], *primals: Any) -> tuple[Any, Any]:
        """Outputs, and the linear function to apply to tangents or cotangents."""
        function = functools.partial(self._of_active, active, primals)
        points = [primals[i] for i in active]
        if kind == "jvp":
            floats, linear, others = _compat.linearize(function, *points)
        else:
            floats, linear, others = jax.vjp(function, *points, has_aux=True)
        return self._merge(floats, others), linear

    def _of_active(
        self, active: tuple[int, ...], primals: Sequence[Any], *values: Any
    ) -> tuple[list[Any], list[Any]]:
        """The function of its differentiated inputs: float outputs, and the others."""
        merged = list(primals)
        for i, value in zip(active, values, strict=True):
            merged[i] = value
        outs = evaluate(self.jaxpr, dict(zip(self.inputs, merged, strict=True)))
        both = list(zip(outs, self.inexact, strict=True))
        return [o for o, real in both if real], [o for o, real in both if not real]

    def _merge(self, floats: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        real, rest = iter(floats), iter(others)
        return [next(real) if inexact else next(rest) for inexact in self.inexact]

    def _floats(self) -> list[Any]:
        pairs = zip(self.jaxpr.outvars, self.inexact, strict=True)
        return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v, real in pairs if real]

    def _tangents(self, floats: Sequence[Any]) -> list[Any]:
        """Tangents of all outputs; an integer output has one of dtype float0."""
        rest = [
            np.zeros(v.aval.shape, jax.dtypes.float0)
            for v, real in zip(self.jaxpr.outvars, self.inexact, strict=True)
            if not real
        ]
        return self._merge(floats, rest)


def _key(kind: str, active: tuple[int, ...], primals: Sequence[Any]) -> Hashable:
    """What a derivative was traced on."""
    return kind, active, tuple(jax.typeof(p) for p in primals)


def _apply(linear: Callable[..., Any], *tangents: Any) -> Any:
    return linear(*tangents)


def _pull_back(linear: Callable[..., Any], *cotangents: Any) -> Any:
    return linear(list(cotangents))


def _is_inexact(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def _instantiate(cotangent: Any) -> Any:
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


@jax.tree_util.register_static
class _Static:
    """A hashable value that is part of a pytree's structure."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)
