"""`rewrite` and `explain`: trace a function, decide, and call the result, which is cached."""

from __future__ import annotations

import collections
import dataclasses
import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._call.library.targets import Target, deciding_for
from jaxfp8._ops.int8_compute import check_compute
from jaxfp8._rewrite.derive import derivatives, halves
from jaxfp8._rewrite.plan.arguments import Arguments, split
from jaxfp8._rewrite.plan.decide import Decision, decide
from jaxfp8._rewrite.plan.trace import Trace, collector_paused, trace
from jaxfp8._rewrite.report.build import report_of
from jaxfp8._rewrite.report.report import Report
from jaxfp8._value.errors import FallbackWarning, level_of_user, shown

# Each value of a static argument has a trace of its own, as in jax.jit.
_MOST_TRACES = 256


@dataclasses.dataclass(frozen=True, eq=False)
class Rewritten:
    """The rewrite of a function for some arguments."""

    trace: Trace  # the function as it was traced
    # The rewritten function, from constants and flat arrays to flat arrays; None where no dot was
    # captured.
    call: Callable[..., Any] | None = None
    consts: tuple[Any, ...] = ()  # the constants of the trace

    def __call__(self, arguments: Arguments) -> Any:
        assert self.call is not None
        return self.trace.restore(self.call(*self.consts, *arguments.arrays))


class Rewriter:
    """The rewrites of one function, by what their traces depend on.

    Args:
      fun: the function.
      strict: raise if a dot on 8-bit data is not captured.
      warns: warn if no dot on 8-bit data is captured. The user did not ask for the halves of a
        derivative, so these do not warn.
      compute: in what products are computed, as by `compute` of `dot_general`.
      target: the machine for which it is decided; None is the one at hand.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        *,
        strict: bool = False,
        warns: bool = False,
        compute: str | None = None,
        target: Target | None = None,
    ) -> None:
        self.fun, self.strict, self.warns = fun, strict, warns
        self.compute, self.target = compute, target
        self._told: set[str] = set()
        self._cache: collections.OrderedDict[Hashable, Rewritten] = collections.OrderedDict()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = split(args, kwargs)
        version = self.find(arguments)
        return self.fun(*args, **kwargs) if version.call is None else version(arguments)

    def find(self, arguments: Arguments) -> Rewritten:
        """The rewrite for these arguments, made at the first call of their kind."""
        try:
            key = arguments.key()
            version = self._cache.get(key)
        except TypeError:  # a leaf that is neither an array nor hashable: traced at each call
            return self._build(arguments)
        if version is None:
            version = self._build(arguments)
            if version.trace.is_cacheable:
                self._cache[key] = version
                if len(self._cache) > _MOST_TRACES:
                    self._cache.popitem(last=False)
        elif len(self._cache) > 1:
            self._cache.move_to_end(key)
        return version

    def _build(self, arguments: Arguments) -> Rewritten:
        traced = trace(self.fun, arguments)
        with deciding_for(self.target):
            decision = decide(traced.jaxpr, self.compute)
            self._check_misses(decision)
        if not decision.changed:
            return Rewritten(traced)
        return rewritten_of(self.fun, traced, decision, self.compute, self.target)

    def _check_misses(self, decision: Decision) -> None:
        """Raise or warn where dots are missed, as the user asked."""
        sites = decision.seen.sites
        if self.strict and any(not site.changed for site in sites):
            _refuse_misses(report_of(self.fun, decision.seen))
        if self.warns and sites and not decision.seen.is_captured and not decision.seen.calls:
            self._warn(report_of(self.fun, decision.seen))

    def _warn(self, report: Report) -> None:
        """Warns that no dot was captured, once for each text."""
        text = (
            f"`jaxfp8.rewrite`: none of the {len(report.sites)} 8-bit dots of `{report.name}` is "
            f"rewritten, so it is called as it is; {_first_miss(report)}"
        )
        if text not in self._told:
            self._told.add(text)
            warnings.warn(text, FallbackWarning, stacklevel=level_of_user())


def rewritten_of(
    fun: Callable[..., Any],
    traced: Trace,
    decision: Decision,
    compute: str | None = None,
    target: Target | None = None,
) -> Rewritten:
    """The rewritten function on flat arrays, with the derivatives of the original."""
    used = traced.used()

    @collector_paused()
    def run(*arrays: Any) -> list[Any]:
        return decision.program.run(arrays, used)

    name = getattr(fun, "__name__", "rewritten")
    run.__name__ = run.__qualname__ = name
    remake = halves.rewriting(functools.partial(Rewriter, target=target), compute, target)
    of_used = derivatives.differentiable(run, traced.jaxpr, used, remake)

    def call(*arrays: Any) -> Sequence[Any]:
        return of_used(*[arrays[i] for i in used])

    ops, consts = decision.program.ops, tuple(map(_on_device, traced.consts))
    if len(ops) == 1 and ops[0][0].name in ("jit", "pjit"):
        # The function is one jit, which may donate and shard. A jit around it would hide that.
        return Rewritten(traced, call, consts)
    # JAX keeps a trace as long as the traced function lives. `of_used` would live for ever, because
    # its traces refer to it for their derivatives. So `call` is what is jitted.
    call.__name__ = call.__qualname__ = name
    return Rewritten(traced, jax.jit(call), consts)


def _on_device(const: Any) -> Any:
    """A constant as a JAX array, so that no call has to convert it from NumPy."""
    if not isinstance(const, np.ndarray):
        return const
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        return jnp.asarray(const)


def _refuse_misses(report: Report) -> None:
    raise ValueError(
        f"`jaxfp8.rewrite`: strict, but {len(report.missed)} of {len(report.sites)} 8-bit dots of "
        f"`{report.name}` cannot be rewritten; {_first_miss(report)}"
    )


def _first_miss(report: Report) -> str:
    """The first miss, and how to see them all."""
    first = report.missed[0]
    ended = f" (at {first.ended_at})" if first.ended_at != first.where else ""
    return (
        f"the first, at {first.where}: {first.reason}{ended}; {first.remedy}. "
        f"`print(jaxfp8.explain({report.name})(...))` lists them all."
    )


def _check_callable(operation: str, fun: Any) -> None:
    if not callable(fun):
        raise TypeError(
            f"`jaxfp8.{operation}`: `fun` is {shown(fun)}; it needs to be a function: "
            f"`jaxfp8.{operation}(f)(x)`."
        )


def _check_target(operation: str, target: Any) -> None:
    if target is not None and not isinstance(target, Target):
        raise TypeError(
            f"`jaxfp8.{operation}`: `target` is {shown(target)}, but needs to be a "
            '`jaxfp8.Target`; use `jaxfp8.Target("cuda", 90)` for an H100.'
        )


def rewrite(
    fun: Callable[..., Any],
    *,
    strict: bool = False,
    compute: str | None = None,
    target: Target | None = None,
) -> Callable[..., Any]:
    """Makes the dequantize-matmul patterns of a function into products of the 8-bit data itself.

    An operand of a `dot_general` in `fun` may be, algebraically, an 8-bit array times scales:
    `q.astype(dtype) * scale`, in whatever order and shape. Then the dot and its scales become one
    scaled dot, with the bias, residual, activation and 8-bit output that follow it. On an NVIDIA
    GPU attention of a decoding step is one call, also over a bfloat16 cache. Everything else is
    left as it is. If nothing is captured, `fun` itself is called. Derivatives are those of `fun`,
    custom rules included, and are rewritten in turn.

    Args:
      fun: any function of pytrees of arrays, jitted or not. As with `jax.jit`, it is traced once
        for each combination of shapes, dtypes and values of arguments that are not arrays.
      strict: raise if a dot of 8-bit or dequantized data stays as written, also where XLA's
        program is faster.
      compute: None multiplies 8-bit data as it is stored. "int8" rounds FP8 and float operands of
        captured dots once more, as by `compute` of `jaxfp8.dot_general`; products of the backward
        pass are not. `explain` says what that costs.
      target: the machine for which dots are chosen, such as `jaxfp8.Target("cuda", 90)`; None is
        the one at hand. The program is right on every machine. Compiling it still asks for the
        kernels of the machine that it is compiled on.

    Returns:
      A function with the signature of `fun`, for use inside and outside `jit`, `grad`, `vmap`.

    Warns:
      FallbackWarning: when traced, if 8-bit data reaches dots and none of them is rewritten. It
        says why for the first. There is no warning about a function without 8-bit data.

    Raises:
      TypeError: if `fun` is no function, or `target` no `Target`.
      ValueError: `compute` is unknown. When called, if `strict` and a dot is missed: which one, and
        why.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8
      >>> def f(x, q, scale):
      ...     return x @ (q.astype(jnp.float32) * scale)
      >>> x, q = jnp.ones((2, 3)), jnp.ones((3, 4), jnp.float8_e4m3fn)
      >>> float(jaxfp8.rewrite(f)(x, q, jnp.full((4,), 0.5))[0, 0])
      1.5
    """
    _check_callable("rewrite", fun)
    check_compute("jaxfp8.rewrite", compute)
    _check_target("rewrite", target)
    rewriter = Rewriter(fun, strict=strict, warns=True, compute=compute, target=target)

    @functools.wraps(fun)
    def rewritten(*args: Any, **kwargs: Any) -> Any:
        return rewriter(*args, **kwargs)

    return rewritten


def explain(
    fun: Callable[..., Any], *, compute: str | None = None, target: Target | None = None
) -> Callable[..., Report]:
    """Says for every dot in a function whether `rewrite` captures it, and why not.

    Args:
      fun: the function, as given to `rewrite`.
      compute: as given to `rewrite`. With "int8", a row says what the second rounding costs.
      target: the machine to explain for, such as `jaxfp8.Target("cuda", 90)`; None is the one at
        hand. Nothing of it is needed here, but the CUDA library names kernels and says where 8
        bits lose. Without the library these are left open.

    Returns:
      A function of the same arguments (`jax.ShapeDtypeStruct` in place of arrays will do) that
      returns a `Report`; nothing of `fun` is executed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8
      >>> f = lambda x, q: x @ (q.astype(jnp.float32) * 0.5)
      >>> report = jaxfp8.explain(f)(jnp.ones((2, 3)), jnp.ones((3, 4), jnp.float8_e4m3fn))
      >>> len(report.matched), len(report.missed)
      (1, 0)
    """
    _check_callable("explain", fun)
    check_compute("jaxfp8.explain", compute)
    _check_target("explain", target)

    @functools.wraps(fun)
    def explained(*args: Any, **kwargs: Any) -> Report:
        arguments = split(args, kwargs)
        traced = trace(fun, arguments)
        with deciding_for(target):
            decision = decide(traced.jaxpr, compute)
            return report_of(fun, decision.seen)

    return explained
