"""Derivatives of a rewritten function are the derivatives of the function as written.

JAX never differentiates the rewritten program: custom rules are inlined in it, and bytes have no
gradient. Its rule is the derivative of the function as written, in two halves (`derive/halves`).
Each half is rewritten and has such a rule in turn. Straight-through estimators and custom gradients
keep their meaning to any order, and backward products are captured too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxfp8._call.library.targets import Target
from jaxfp8._rewrite.derive import ruled
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.plan.trace import cotangents_of_one_dtype
from jaxfp8._value import compat

Flat = Callable[..., Sequence[Any]]
Key = tuple[str, tuple[int, ...], tuple[Any, ...], bool]


@dataclasses.dataclass(frozen=True, eq=False)
class Halves:
    """The two halves of a derivative."""

    first: Callable[..., tuple[Any, Any]]  # from primals to outputs and residuals
    # From residuals and tangents or cotangents to the derivative; linear in the latter.
    second: Callable[..., Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Remake:
    """The rewrite of the functions in a derivative."""

    # Takes the two halves as written, the primals, and whether JAX will transpose the second half;
    # returns the halves to use.
    split: Callable[[Callable[..., Any], Callable[..., Any], Sequence[Any], bool], Halves]
    # Takes a function of primals and tangents that returns outputs and tangents, for what JAX
    # cannot split; returns the one to use. With None, JAX raises its error.
    join: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    target: Target | None = None  # the machine for which the functions are decided


def differentiable(
    run: Flat,
    jaxpr: Any,
    used: Sequence[int],
    remake: Remake,
    stand_ins: Set[int] = frozenset(),
    extra: int = 0,
) -> Flat:
    """`run` with the derivatives of `jaxpr`, as a function of the inputs at positions `used`.

    The inputs of `jaxpr` are its constants, then its arguments. `run` replaces the float outputs in
    `stand_ins` by zeros, which have the derivatives of the outputs. It has `extra` more outputs,
    without derivatives.
    """
    rules = _Rules(jaxpr, used, remake, run, stand_ins, extra)

    def call(*arrays: Any) -> Sequence[Any]:
        return ruled.call(run, functools.partial(rules.jvp, call), arrays)

    return call


def _reaches(jaxpr: graph.Jaxpr, active: Iterable[Any], name: str) -> bool:
    """Whether an equation of this primitive, at any depth, depends on active variables."""
    moving = set(active)
    for eqn in jaxpr.eqns:
        if any(not compat.is_literal(v) and v in moving for v in eqn.invars):
            inner = (e for jaxpr in compat.subjaxprs(eqn) for e in graph.equations(jaxpr))
            if any(e.primitive.name == name for e in (eqn, *inner)):
                return True
            moving.update(eqn.outvars)
    return False


class _Rules:
    """The derivative rules of one jaxpr. `active` inputs are differentiated."""

    def __init__(
        self,
        jaxpr: Any,
        used: Sequence[int],
        remake: Remake,
        run: Flat,
        stand_ins: Set[int],
        extra: int,
    ) -> None:
        self.jaxpr, self.remake = compat.open_jaxpr(jaxpr), remake
        self.run, self.stand_ins, self.extra = run, stand_ins, extra
        inputs = [*self.jaxpr.constvars, *self.jaxpr.invars]
        self.inputs = [inputs[i] for i in used]
        self.reverse = jax.custom_vjp(run)
        self.reverse.defvjp(self.forward, self.backward, symbolic_zeros=True)
        self.inexact = [bool(jnp.issubdtype(v.aval.dtype, jnp.inexact)) for v in self.jaxpr.outvars]
        self._halves: dict[Hashable, Halves] = {}
        self._joined: dict[Hashable, Callable[..., Any]] = {}

    def jvp(self, call: Flat, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        """Forward mode: a linear second half, to be transposed in reverse mode."""
        active = tuple(i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero))
        if not active:
            outputs = call(*primals)
            return outputs, [ruled.still(y) for y in outputs]
        if _reaches(self.jaxpr, [self.inputs[i] for i in active], "custom_vjp_call"):
            return self._by_reverse(active, primals, tangents)
        moving = [tangents[i] for i in active]
        halves = self._split(active, primals)
        if halves is None:
            outputs, floats = self._joined[_key("jvp", active, primals)](*primals, *moving)
        else:
            outputs, residuals = halves.first(*primals)
            floats = halves.second(residuals, *moving)
        others = self._others(primals)
        return [*outputs, *others], [*self._tangents(floats, outputs), *map(ruled.still, others)]

    def _others(self, primals: Sequence[Any]) -> Sequence[Any]:
        """The outputs without a derivative."""
        return self.run(*primals)[len(self.inexact) :] if self.extra else ()

    def _split(self, active: tuple[int, ...], primals: Sequence[Any]) -> Halves | None:
        """The halves of forward mode; None if JAX cannot compute the value without the tangent.

        It cannot for functions with their own batching rule (`custom_vmap`) and for Pallas kernels.
        """
        key = _key("jvp", active, primals)
        if key in self._joined:
            return None
        try:
            return self._get(key, primals)
        except ValueError as error:
            if self.remake.join is None or not compat.is_inseparable(error):
                raise
        self._joined[key] = self.remake.join(functools.partial(self._at_once, active, len(primals)))
        return None

    def _at_once(self, active: tuple[int, ...], number: int, *both: Any) -> tuple[Any, Any]:
        """Outputs, and the tangents of float outputs, from primals and tangents."""
        primals, moving = both[:number], both[number:]
        function = functools.partial(self._of_active, active, primals)
        points = [primals[i] for i in active]
        floats, tangents, others = jax.jvp(function, points, list(moving), has_aux=True)
        return self._outputs(floats, others), tangents

    def _by_reverse(
        self, active: tuple[int, ...], primals: Sequence[Any], tangents: Sequence[Any]
    ) -> Any:
        """For a function with a `custom_vjp`: reverse mode alone. In forward mode JAX raises."""

        def of_active(*values: Any) -> Sequence[Any]:
            return self.reverse(*ruled.merged(primals, active, values))

        return jax.jvp(of_active, [primals[i] for i in active], [tangents[i] for i in active])

    def forward(self, *primals: Any) -> tuple[Any, Any]:
        """Reverse mode, first half."""
        active = tuple(i for i, p in enumerate(primals) if p.perturbed)
        values = [p.value for p in primals]
        key = _key("vjp", active, values)
        outputs, residuals = self._get(key, values).first(*values)
        return [*outputs, *self._others(values)], (residuals, _Static(key))

    def backward(self, residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        """Reverse mode, second half."""
        passed, static = residuals
        key = _, active, avals, _ = static.value
        own = cotangents[: len(self.inexact)]
        floats = [
            jnp.zeros(c.shape, c.dtype) if isinstance(c, SymbolicZero) else c
            for c, real in zip(own, self.inexact, strict=True)
            if real
        ]
        grads = dict(zip(active, self._halves[key].second(passed, *floats), strict=True))
        return tuple(grads.get(i) for i in range(len(avals)))

    def _get(self, key: Key, primals: Sequence[Any]) -> Halves:
        """The halves for these primals."""
        kind, active, *_ = key
        if key not in self._halves:
            first = functools.partial(self._first, kind, active)
            second = _apply if kind == "jvp" else _pull_back
            self._halves[key] = self.remake.split(first, second, primals, kind == "jvp")
        return self._halves[key]

    def _first(self, kind: str, active: tuple[int, ...], *primals: Any) -> tuple[Any, Any]:
        """Outputs, and the linear function to apply to tangents or cotangents."""
        function = functools.partial(self._of_active, active, primals)
        points = [primals[i] for i in active]
        if kind == "jvp":
            floats, linear, others = compat.linearize(function, *points)
        else:
            floats, linear, others = jax.vjp(function, *points, has_aux=True)
        return self._outputs(floats, others), linear

    def _outputs(self, floats: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """All outputs in order, stand-ins among them."""
        outputs = self._merge(floats, others)
        for i in self.stand_ins:
            outputs[i] = compat.zeros(self.jaxpr.outvars[i].aval)
        return outputs

    def _of_active(
        self, active: tuple[int, ...], primals: Sequence[Any], *values: Any
    ) -> tuple[list[Any], list[Any]]:
        """The function of its active inputs: float outputs, and the others."""
        merged = ruled.merged(primals, active, values)
        outs = evaluate(self.jaxpr, dict(zip(self.inputs, merged, strict=True)))
        both = list(zip(outs, self.inexact, strict=True))
        return [o for o, real in both if real], [o for o, real in both if not real]

    def _merge(self, floats: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        real, rest = iter(floats), iter(others)
        return [next(real) if inexact else next(rest) for inexact in self.inexact]

    def _tangents(self, floats: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """The tangents of all outputs, from those of the float outputs."""
        pairs = list(zip(outputs, self.inexact, strict=True))
        types = [jax.typeof(y) for y, real in pairs if real]
        moved = [compat.of_type(t, aval) for t, aval in zip(floats, types, strict=True)]
        return self._merge(moved, [ruled.still(y) for y, real in pairs if not real])


def _key(kind: str, active: tuple[int, ...], primals: Sequence[Any]) -> Key:
    """The cache key of a traced derivative."""
    return kind, active, tuple(jax.typeof(p) for p in primals), is_traced(primals)


def _apply(linear: Callable[..., Any], *tangents: Any) -> Any:
    return linear(*tangents)


def _pull_back(linear: Callable[..., Any], *moving: Any) -> Any:
    with cotangents_of_one_dtype():
        return linear(list(moving))


def is_traced(arrays: Sequence[Any]) -> bool:
    """Whether any of the arrays is a tracer, and might be differentiated again."""
    return any(isinstance(x, jax.core.Tracer) for x in arrays)


def evaluate(jaxpr: graph.Jaxpr, env: dict[Any, Any]) -> list[Any]:
    """The outputs of an open jaxpr, with its inputs in `env`.

    Its equations are evaluated as written, custom rules included.
    """

    def read(atom: Any) -> Any:
        return atom.val if compat.is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        outs = graph.bind(eqn, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


@jax.tree_util.register_static
class _Static:
    """A hashable value as part of a pytree's structure."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)
