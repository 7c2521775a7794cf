"""`quantize_dots`: an ordinary float program with its dots in 8 bits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from jaxfp8._call.library import strictness
from jaxfp8._ops.quantize import dequantize
from jaxfp8._recipes.recipes import Recipe
from jaxfp8._recipes.rules import Rule
from jaxfp8._recipes.selection import tell
from jaxfp8._rewrite.engine import Rewriter, Rewritten, rewritten_of
from jaxfp8._rewrite.floats import roles
from jaxfp8._rewrite.floats.choosing import Chooser, Where, checked_rules
from jaxfp8._rewrite.floats.rounding import FloatDots, round_dots
from jaxfp8._rewrite.ir.sites import Seen
from jaxfp8._rewrite.plan.arguments import Arguments, split
from jaxfp8._rewrite.plan.decide import decide, why_left_alone
from jaxfp8._rewrite.plan.trace import Trace, trace
from jaxfp8._rewrite.report.build import report_of
from jaxfp8._rewrite.report.report import Report
from jaxfp8._rewrite.rules import unserved
from jaxfp8._value import accuracy, compat, dtypes
from jaxfp8._value.errors import UnsupportedError, message, shown
from jaxfp8._value.prepared import PreparedArray, is_held_or_qwix
from jaxfp8._value.qarray import QArray, adopt

OPERATION = "jaxfp8.quantize_dots"


def quantize_dots(
    fun: Callable[..., Any],
    recipe: Recipe | Rule | Sequence[Any],
    *,
    where: Where = None,
    weights: int | Collection[int] | None = None,
) -> QuantizedDots:
    """An ordinary program with its float dots in 8 bits: rounded as `recipe` says, then multiplied.

    `dot(x, w)` becomes `dot(Q(x), Q(w))`, where `Q` rounds to 8 bits, on the 8-bit data, scales,
    bias and activation in the same call. `fun` is not changed; dots are found inside jit, scan,
    while, cond, remat, custom rules and shard_map, and after vmap.

    A weight is an argument of `fun` or an array it closes over, reached through casts, views and
    scales. It may be 8-bit data. If both operands are, the right one is the weight, unless
    `weights` tells them apart. A dot without a weight, as in attention, stays in floats unless
    `where` chooses it. Then both operands are held as activations.

    Float weights are rounded in every call. With few rows this takes longer than the float product.
    `quantize_weights` rounds them once, ahead: call the function with its result for speed.

    The gradient is straight-through: it differentiates `fun` with rounded operands, and takes each
    rounding as the identity. Hence `dx = dy @ Q(w).T` and `dw = Q(x).T @ dy`, with the rounded
    operands of the forward pass. The true derivative of rounding is 0 almost everywhere, and the
    gradient of the float program belongs to other values than those returned. Custom rules keep
    their meaning.

    Args:
      fun: any function of pytrees of arrays, jitted or not; traced like `jaxfp8.rewrite`'s.
      recipe: such as `jaxfp8.FP8_DYNAMIC`; or rules in order of precedence, whose paths are those
        of named scopes. A dot that no rule names stays as it is.
      where: which dots: a regular expression that is searched in the path and in "file:line
        function", a collection of paths, or a function of the path and the row of the report
        (`.where`, `.lhs`, `.rhs`, `.dims`). By default every dot that has a weight.
      weights: the positional arguments that hold weights; by default any argument may.

    Returns:
      A function with the signature of `fun`, for use inside and outside `jit`, `grad`, `vmap`. Its
      `explain` reports on each dot, its `compare` measures the loss of accuracy, and its
      `quantize_weights` quantizes weights once ahead instead of in every call.

    Warns:
      FallbackWarning: it has dots, and none is in 8 bits; inside `jaxfp8.strict()` an error. Or
      `where` or a rule chooses no dot; the warning lists the dots.

    Raises:
      TypeError: `fun` is no function, or `recipe` is no recipe for inference.
      ValueError: the recipe has static scales of activations, and an ordinary program has no place
        for them; `where` is no regular expression.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8
      >>> f = lambda w, x: jax.nn.relu(x @ w)
      >>> w, x = jnp.eye(8), jnp.arange(8.0)[None]
      >>> g = jaxfp8.quantize_dots(f, jaxfp8.FP8_DYNAMIC)
      >>> w8 = g.quantize_weights(w, x)
      >>> (g(w, x) == g(w8, x)).all(), len(g.explain(w8, x).matched)
      (Array(True, dtype=bool), 1)
    """
    if not callable(fun):
        got, needs = f"is {shown(fun)}", "a function is needed"
        raise TypeError(message(OPERATION, "`fun`", got, needs, "pass `f`, not `f(x)`"))
    chooser = Chooser(OPERATION, fun, checked_rules(recipe, OPERATION), where)
    return QuantizedDots(fun, chooser, _numbers(weights))


class QuantizedDots:
    """A function with its dots in 8 bits; made by `jaxfp8.quantize_dots`."""

    def __init__(
        self, fun: Callable[..., Any], choose: Chooser, weights: tuple[int, ...] | None
    ) -> None:
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._rewriter = _Rewriter(_widened(fun), choose, weights)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function; a `QArray` among the arguments stands for its original array."""
        return self._rewriter(*args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Report:
        """A report on each dot; nothing is executed.

        Args:
          *args, **kwargs: as for the function; `jax.ShapeDtypeStruct`s will do.

        Returns:
          A report like the one of `jaxfp8.explain`: dots in 8 bits first, then the others and the
          reasons.
        """
        arguments = split(args, kwargs)
        rounded, dots = self._rewriter.rounded(arguments)
        decision = decide(rounded.jaxpr)
        seen, left = decision.seen, dots.left
        counted = sum(site.op.name not in unserved.NAMES for site in left)
        both = Seen(
            [*seen.sites, *dots.split, *left],
            max(seen.others - counted, 0),
            seen.calls,
            attended=seen.attended,
        )
        return report_of(self._fun, both)

    def compare(self, *args: Any, **kwargs: Any) -> accuracy.Comparison:
        """The error of the outputs against the original program; runs both.

        Args:
          *args, **kwargs: as for the function. If they hold `QArray`s, the original gets the
            dequantized arrays, and the error does not contain the error of the weights.

        Returns:
          A `Comparison`: `sqnr` in dB, `relative_l2` and `max_abs` over all float outputs, and the
          same for each of them.
        """
        exact = self._rewriter.original(split(args, kwargs))
        return accuracy.compare(exact, self(*args, **kwargs))

    def quantize_weights(self, *args: Any, argnum: int = 0, **kwargs: Any) -> Any:
        """One of the arguments with its weights in 8 bits, to be passed in its place.

        Each weight of a chosen dot in it becomes a `QArray` with the scales for that dot, of the
        array's dtype. Everything else is left as it is.

        Args:
          *args, **kwargs: as for the function; only shapes and dtypes count.
          argnum: the positional argument.

        Returns:
          `args[argnum]` with `QArray`s in it.

        Raises:
          ValueError: there is no such argument, or no chosen dot has a weight in it.
        """
        if not 0 <= argnum < len(args):
            got, needs = f"is {argnum}", f"{len(args)} positional arguments are given"
            remedy = "name one of them"
            raise ValueError(message("quantize_weights", "`argnum`", got, needs, remedy))
        arguments = split(args, kwargs)
        chosen = self._rewriter.weights(arguments)
        positions = _positions(arguments, argnum)
        leaves, tree = jax.tree.flatten(args[argnum], is_leaf=_is_qarray)
        plain = iter(positions)
        new = [_quantized(leaf, plain, chosen) for leaf in leaves]
        if all(a is b for a, b in zip(leaves, new, strict=True)):
            got = f"{argnum} holds no weight that becomes 8-bit data"
            needs = (
                "a chosen dot has to read one of its arrays, and its recipe to hold it in 8 bits"
            )
            remedy = "see `explain` for the dots, and name the argument that holds weights"
            raise ValueError(
                message(f"{OPERATION}: quantize_weights", "argument", got, needs, remedy)
            )
        return jax.tree.unflatten(tree, new)


class _Rewriter(Rewriter):
    """The rewrites of a function with roundings put before its dots."""

    def __init__(
        self, fun: Callable[..., Any], choose: Chooser, weights: tuple[int, ...] | None
    ) -> None:
        super().__init__(fun)
        self.choose, self.argnums = choose, weights
        self.told: set[str] = set()

    def rounded(self, arguments: Arguments) -> tuple[Trace, FloatDots]:
        """The function with roundings, as a trace, and its dots; as written if it is left alone."""
        traced = trace(self.fun, arguments)
        if why_left_alone(compat.open_jaxpr(traced.jaxpr)) is not None:
            return traced, FloatDots()
        program, dots = round_dots(traced.jaxpr, self.choose, self._given(traced, arguments))

        def run(*arrays: Any) -> list[Any]:
            return program.run(arrays)

        jaxpr = jax.make_jaxpr(run)(*traced.consts, *arguments.arrays)
        consts = (*compat.consts_of(jaxpr), *traced.consts)
        return Trace(jaxpr, consts, traced.out_tree, traced.labels), dots

    def original(self, arguments: Arguments) -> Any:
        """The outputs of the original function."""
        traced = trace(self.fun, arguments)
        run = functools.partial(jax.core.eval_jaxpr, compat.open_jaxpr(traced.jaxpr))
        return traced.restore(jax.jit(run)(traced.consts, *arguments.arrays))

    def weights(self, arguments: Arguments) -> dict[int, Any]:
        """How to quantize each weight among the arrays of the arguments, by its position."""
        traced = trace(self.fun, arguments)
        program, dots = round_dots(traced.jaxpr, self.choose, self._given(traced, arguments))
        first = len(traced.consts)
        places = {value: i - first for i, value in enumerate(program.inputs)}
        chosen: dict[int, Any] = {}
        for dot, how in dots.rounded:
            if dot.weight is None or how.operands[dot.weight] is None:
                continue
            role = dot.roles[dot.weight]
            place = places.get(role.source, -1) if role.source is not None else -1
            if place >= 0:
                axes = roles.source_axes(role, *dot.site.axes(dot.weight))
                chosen.setdefault(place, (how.operands[dot.weight], *axes))
        return chosen

    def _given(self, traced: Trace, arguments: Arguments) -> Collection[int] | None:
        """The inputs of the trace to take as possible weights; None for all."""
        if self.argnums is None:
            return None
        first = len(traced.consts)
        positions = [p for n in self.argnums for p in _positions(arguments, n)]
        return {*range(first), *(first + p for p in positions)}

    def _build(self, arguments: Arguments) -> Rewritten:
        rounded, dots = self.rounded(arguments)
        decision = decide(rounded.jaxpr)
        left_alone = why_left_alone(compat.open_jaxpr(rounded.jaxpr))
        seen, unmatched = decision.seen, self.choose.unmatched()
        if seen.is_captured or seen.calls or dots.split:
            self._tell(unmatched)
        else:
            has_dots = seen.sites or seen.others
            why = left_alone if left_alone and has_dots else _why_in_floats(dots)
            self._tell([*unmatched, *self._in_floats(why)], is_error=strictness.is_strict())
        if left_alone is not None:
            return Rewritten(rounded)  # the function is called as it is
        return rewritten_of(self.fun, rounded, decision)

    def _in_floats(self, why: tuple[str, str] | None) -> list[str]:
        """A sentence on a function with dots, none of them in 8 bits."""
        name = getattr(self.fun, "__name__", type(self.fun).__name__)
        return [message(OPERATION, f"`{name}`", "is to be in 8 bits", *why)] if why else []

    def _tell(self, texts: list[str], is_error: bool = False) -> None:
        """Warns of each sentence once; or raises an error with them."""
        if texts and is_error:
            raise UnsupportedError(" ".join(texts))
        tell(*(text for text in texts if text not in self.told))
        self.told.update(texts)


def _why_in_floats(dots: FloatDots) -> tuple[str, str] | None:
    """Why no dot is in 8 bits, with a pointer to more; None if there is no float dot."""
    remedy = "`explain` says why of each"
    if dots.rounded:
        return f"no kernel takes its {len(dots.rounded)} rounded dots", remedy
    left = [site for site in dots.left if all(map(_is_float, site.op.inputs[:2]))]
    return (f"all its dots ({len(left)}) stay as they are", remedy) if left else None


def _is_float(value: Any) -> bool:
    return value.size > 0 and value.dtype in dtypes.WIDE_FLOAT


def _positions(arguments: Arguments, argnum: int) -> list[int]:
    """The positions of the arrays of an argument among all arrays."""
    others = {position for position, _ in arguments.others}
    arrays = [i for i in range(arguments.tree.num_leaves) if i not in others]
    args, _ = jax.tree.unflatten(arguments.tree, range(arguments.tree.num_leaves))
    own = set(jax.tree.leaves(args[argnum])) if argnum < len(args) else set()
    return [place for place, leaf in enumerate(arrays) if leaf in own]


def _quantized(leaf: Any, positions: Any, chosen: dict[int, Any]) -> Any:
    """A leaf of an argument, as a `QArray` if it is the weight of a chosen dot."""
    if _is_qarray(leaf):
        for _ in jax.tree.leaves(leaf):
            next(positions)
        return leaf
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return leaf
    position = next(positions)
    if position not in chosen:
        return leaf
    quantization, contracting, batch = chosen[position]
    kept = dataclasses.replace(quantization, scale_dtype=_scale_dtype(quantization, leaf))
    return kept.quantize(leaf, contracting, batch, operand="weight")


def _scale_dtype(quantization: Any, leaf: Any) -> Any:
    """The dtype of a scale and of its dequantized array; powers of two dequantize to float32."""
    wide = quantization.scale_dtype in dtypes.WIDE_FLOAT
    return leaf.dtype if wide else quantization.scale_dtype


def _is_qarray(leaf: Any) -> bool:
    return isinstance(adopt(leaf), QArray)


def _widened(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function with `QArray`s allowed in its arguments."""

    def widen(leaf: Any) -> Any:
        if isinstance(leaf, PreparedArray):
            needs = "an ordinary program reads weights as they were before that"
            remedy = "pass `unprepare()` of it, or close over it for `jaxfp8.matmul`"
            raise TypeError(message(OPERATION, "an argument", f"holds {leaf}", needs, remedy))
        return dequantize(leaf) if _is_qarray(leaf) else leaf

    @functools.wraps(fun)
    def of_wide(*args: Any, **kwargs: Any) -> Any:
        wide_args, wide_kwargs = jax.tree.map(widen, (args, kwargs), is_leaf=is_held_or_qwix)
        return fun(*wide_args, **wide_kwargs)

    return of_wide


def _numbers(weights: int | Collection[int] | None) -> tuple[int, ...] | None:
    if weights is None or isinstance(weights, int):
        return None if weights is None else (weights,)
    return tuple(weights)
