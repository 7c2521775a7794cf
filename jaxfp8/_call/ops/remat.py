"""The policies of `jax.checkpoint` see a product on 8-bit data as `jax.lax.dot_general`.

JAX asks a policy about each equation, by its primitive. Policies for products know `dot_general`,
and no other primitive. The rule of our product therefore asks about the equivalent `dot_general`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.ad_checkpoint import Offloadable, Recompute
from jax.extend.core import Primitive
from jax.interpreters import partial_eval

from jaxfp8._value import compat, dtypes
from jaxfp8._value.spec import DimensionNumbers, OperandSpec, ScaledDotSpec, Shape

# The types of both sides, and the parameters of `dot_general`.
Dot = tuple[tuple[Any, Any], dict[str, Any]]
Policy = Callable[..., Any]
# The result of a rule for JAX: the equations of the forward and the backward pass; by output,
# whether the forward pass lacks it and whether the backward pass has it; the passed values.
Split = tuple[Any, Any, list[bool], list[bool], list[Any]]


def count_as_dots(primitive: Primitive, dots: Callable[..., Iterable[Dot]]) -> None:
    """Makes policies decide on the products of an equation of `primitive`.

    `dots` gives these, from the types of the inputs and the parameters. The outputs are kept if the
    policy keeps every product.
    """
    rule = functools.partial(_partial_eval, dots)
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = rule


def dot(lhs: Any, rhs: Any, numbers: DimensionNumbers, out_dtype: Any) -> Dot:
    """A product for a policy, from the types of its sides."""
    return (lhs, rhs), {
        "dimension_numbers": numbers,
        "precision": None,
        "preferred_element_type": np.dtype(out_dtype),
        "out_sharding": None,
    }


def scaled_dot(spec: ScaledDotSpec) -> Dot:
    """A scaled dot for a policy.

    A batch axis of size 1 is left out. If the other side has more, it is a free axis there, as
    after `vmap` of `dot_general`.
    """
    pairs = zip(spec.lhs.batch, spec.rhs.batch, strict=True)
    batch = [(i, j) for i, j in pairs if spec.lhs.shape[i] != 1 and spec.rhs.shape[j] != 1]
    lhs, lhs_axes, lhs_batch = _without_ones(spec.lhs, [i for i, _ in batch])
    rhs, rhs_axes, rhs_batch = _without_ones(spec.rhs, [j for _, j in batch])
    numbers = (lhs_axes, rhs_axes), (lhs_batch, rhs_batch)
    return dot(lhs, rhs, numbers, spec.epilogue.out_dtype)


def _without_ones(side: OperandSpec, batch: Sequence[int]) -> tuple[Any, Shape, Shape]:
    """The type of a side without batch axes of size 1; its contracted axes; those of the batch."""
    ones = [axis for axis in side.batch if side.shape[axis] == 1]
    kept = [axis for axis in range(len(side.shape)) if axis not in ones]
    aval = jax.core.ShapedArray(side.sizes(tuple(kept)), np.dtype(side.dtype))
    return aval, tuple(map(kept.index, side.contracting)), tuple(map(kept.index, batch))


def _partial_eval(
    dots: Callable[..., Iterable[Dot]],
    policy: Policy,
    unknown: Sequence[bool],
    present: Sequence[bool],
    eqn: Any,
) -> Split:
    if any(unknown):
        return unsplit(eqn, present)
    if any(v.aval.dtype in dtypes.FLOAT8 for v in eqn.outvars):
        # JAX rounds saved values by `reduce_precision`: float8_e4m3fn above 240 becomes NaN.
        return _again(eqn, present)
    number = len(eqn.outvars)
    case = _asked(policy, dots(*(v.aval for v in eqn.invars), **eqn.params))
    if isinstance(case, Offloadable):
        return _offloaded(eqn, case)
    if case is Recompute or case is False:
        return _again(eqn, present)
    return eqn, None, [False] * number, [False] * number, []


def _again(eqn: Any, present: Sequence[bool]) -> Split:
    """An equation computed in both passes."""
    number = len(eqn.outvars)
    return eqn, eqn, [False] * number, [True] * number, _absent(eqn, present)


def unsplit(eqn: Any, present: Sequence[bool]) -> Split:
    """An equation for the backward pass alone."""
    number = len(eqn.outvars)
    return None, eqn, [True] * number, [True] * number, _absent(eqn, present)


def _absent(eqn: Any, present: Sequence[bool]) -> list[Any]:
    """The inputs to pass to the backward pass."""
    pairs = zip(eqn.invars, present, strict=True)
    return [v for v, there in pairs if not there and not compat.is_literal(v)]


def _asked(policy: Policy, dots: Iterable[Dot]) -> Any:
    """The policy's answer about products; of several, to compute them again unless all agree."""
    cases = [policy(lax.dot_general_p, *sides, **params) for sides, params in dots]
    return cases[0] if all(case == cases[0] for case in cases) else Recompute


def _offloaded(eqn: Any, case: Offloadable) -> Split:
    """Outputs copied to the memory of `case.dst`, and back for the backward pass."""
    number = len(eqn.outvars)

    def run(*operands: Any) -> list[Any]:
        outs = eqn.primitive.bind(*operands, **eqn.params)
        outs = outs if eqn.primitive.multiple_results else [outs]
        return [*outs, *_copied(*outs, kind=case.dst)]

    with eqn.ctx.manager:
        there = as_equation(run, [v.aval for v in eqn.invars])
        copies = there.outvars[number:]
        back = functools.partial(_copied, kind=case.src)
        here = as_equation(back, [v.aval for v in copies])
    there = there.replace(invars=eqn.invars, outvars=[*eqn.outvars, *copies])
    here = here.replace(invars=copies, outvars=eqn.outvars)
    return there, here, [False] * number, [True] * number, list(copies)


def _copied(*arrays: Any, kind: str) -> list[Any]:
    space = jax.memory.Space.Host if kind == "pinned_host" else jax.memory.Space.Device
    return [jax.device_put(x, space, may_alias=False) for x in arrays]


def as_equation(function: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """One equation to call a function of arrays."""
    (eqn,) = compat.open_jaxpr(jax.make_jaxpr(jax.jit(function))(*avals)).eqns
    return eqn
