"""A function linear in its last arguments, as one primitive with a transpose of its own.

JAX transposes the second half of a derivative, equation by equation. It must not do so with a
rewritten program: 8-bit values have no cotangent, and custom rules were inlined. The half is
therefore one primitive. Its transpose is the transpose of the function as written, rewritten in
turn. Its derivative in the other arguments also comes from the function as written.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxfp8._call.library.targets import deciding_for
from jaxfp8._rewrite.derive import derivatives, ruled
from jaxfp8._rewrite.derive.derivatives import Flat, Remake
from jaxfp8._rewrite.plan.decide import Decision, decide
from jaxfp8._rewrite.plan.trace import cotangents_of_one_dtype
from jaxfp8._value import compat

linear_p = Primitive("rewritten_linear")
linear_p.multiple_results = True


class Linear(compat.HoldsJaxpr):
    """A function of flat arrays, linear in all after the first `residuals`.

    Args:
      jaxpr: the function as written, an open jaxpr without constants.
      residuals: the number of leading arguments. It need not be linear in these.
      remake: makes the functions of its derivative.
    """

    def __init__(self, jaxpr: Any, residuals: int, remake: Remake) -> None:
        self.original, self.residuals, self.remake = jaxpr, residuals, remake
        self._derived: dict[Hashable, Bound] = {}

    @functools.cached_property
    def decision(self) -> Decision:
        """What becomes of it."""
        with deciding_for(self.remake.target):
            return decide(self.original)

    def evaluate(self, *arrays: Any) -> list[Any]:
        """The function as written."""
        return jax.core.eval_jaxpr(self.original, (), *arrays)

    def run(self, *arrays: Any) -> list[Any]:
        """The rewritten function."""
        return (
            self.decision.program.run(arrays) if self.decision.changed else self.evaluate(*arrays)
        )

    @functools.cached_property
    def jaxpr(self) -> Any:
        """The rewritten function as a closed jaxpr, made when it is lowered or walked."""
        return jax.make_jaxpr(self.run)(*self.avals)

    @functools.cached_property
    def jitted(self) -> Any:
        """The rewritten function, compiled for calls outside `jit`."""
        return jax.jit(self.run)

    @property
    def avals(self) -> list[Any]:
        """The types of the arguments."""
        return [v.aval for v in self.original.invars]

    @functools.cached_property
    def function(self) -> Flat:
        """The rewritten function with derivatives in all its arguments."""
        every = range(len(self.original.invars))
        call = functools.partial(bind, self)
        return derivatives.differentiable(call, self.original, every, self.remake)

    def derived(
        self, key: Hashable, fun: Flat, residuals: Sequence[Any], moving: Sequence[Any]
    ) -> list[Any]:
        """Another function made from this one, on these arrays, traced once for each key."""
        if key not in self._derived:
            self._derived[key] = Bound(fun, residuals, moving, self.remake)
        return self._derived[key](residuals, moving)


class Bound:
    """A `Linear` traced from a function, and its constants."""

    def __init__(
        self, fun: Flat, residuals: Sequence[Any], moving: Sequence[Any], remake: Remake
    ) -> None:
        jaxpr, self.consts = compat.hoisted(fun, [*residuals, *moving])
        self.linear = Linear(jaxpr, len(self.consts) + len(residuals), remake)

    def __call__(self, residuals: Sequence[Any], moving: Sequence[Any]) -> list[Any]:
        return bind(self.linear, *self.consts, *residuals, *moving)


def bind(linear: Linear, *arrays: Any) -> list[Any]:
    """The rewritten function, with the derivatives and the transpose of the function as written."""
    return linear_p.bind(*arrays, linear=linear)


@linear_p.def_impl
def _impl(*arrays: Any, linear: Linear) -> list[Any]:
    return linear.jitted(*arrays)


@linear_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, linear: Linear) -> tuple[list[Any], Any]:
    del avals
    return [v.aval for v in linear.original.outvars], linear.original.effects


def _jvp(primals: Any, tangents: Any, *, linear: Linear) -> tuple[Any, Any]:
    number = linear.residuals
    active = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
    if all(i >= number for i in active):
        moved = [ad.instantiate_zeros(t) for t in tangents[number:]]
        return bind(linear, *primals), bind(linear, *primals[:number], *moved)

    def of_active(*values: Any) -> Sequence[Any]:
        return linear.function(*ruled.merged(primals, active, values))

    return jax.jvp(of_active, [primals[i] for i in active], [tangents[i] for i in active])


def _transpose(cotangents: Sequence[Any], *args: Any, linear: Linear) -> list[Any]:
    is_unknown = tuple(ad.is_undefined_primal(x) for x in args)
    given = tuple(i for i, ct in enumerate(cotangents) if not isinstance(ct, ad.Zero))
    avals = [x.aval for x, unknown in zip(args, is_unknown, strict=True) if unknown]
    if not given:
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in args]
    known = [x for x, unknown in zip(args, is_unknown, strict=True) if not unknown]

    def transposed(*arrays: Any) -> list[Any]:
        def of_unknown(*values: Any) -> list[Any]:
            rest, moving = iter(arrays), iter(values)
            merged = [next(moving) if unknown else next(rest) for unknown in is_unknown]
            outputs = linear.evaluate(*merged)
            return [outputs[i] for i in given]

        with cotangents_of_one_dtype():
            return list(jax.linear_transpose(of_unknown, *avals)([*arrays[len(known) :]]))

    moving = [cotangents[i] for i in given]
    outputs = iter(linear.derived((is_unknown, given), transposed, known, moving))
    return [next(outputs) if unknown else None for unknown in is_unknown]


def _batch(
    axis: Any, args: Sequence[Any], dims: Sequence[int | None], *, linear: Linear
) -> tuple[list[Any], list[int]]:
    dims = tuple(dims)
    mapped = jax.vmap(
        linear.evaluate,
        in_axes=dims,
        axis_name=axis.name,
        axis_size=axis.size,
        spmd_axis_name=axis.spmd_name,
    )
    number = linear.residuals
    key = (dims, axis.name, axis.size, tuple(map(jax.typeof, args)))
    outputs = linear.derived(key, mapped, args[:number], args[number:])
    return outputs, [0] * len(outputs)


def _lower(*arrays: Any, linear: Linear) -> list[Any]:
    return jax.core.eval_jaxpr(
        compat.open_jaxpr(linear.jaxpr), compat.consts_of(linear.jaxpr), *arrays
    )


ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.fancy_primitive_batchers[linear_p] = _batch
mlir.register_lowering(linear_p, mlir.lower_fun(_lower, multiple_results=True))
