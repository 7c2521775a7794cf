"""Branches: cond and switch, by an index or by the platform."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax import lax

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir.graph import Array, Op, Value
from jaxfp8._rewrite.regions import exits
from jaxfp8._rewrite.regions.borders import Border, Inside
from jaxfp8._rewrite.regions.registry import (
    extra_outputs,
    is_known,
    new_op,
    region,
    state_facts,
    walk_inside,
)

Branch = Callable[..., list[Array]]


@region("cond")
def cond(walk: Context, op: Op) -> Sequence[Value] | None:
    """Each branch is settled alone; every branch gets the inputs of all."""
    index, *operands = op.inputs
    borders = [Border(walk, op.inputs) for _ in op.params["branches"]]
    results = [
        walk_inside(border.inner, op, branch, [border.enter(value) for value in operands])
        for border, branch in zip(borders, op.params["branches"], strict=True)
    ]
    leaving = exits.branch_exits(borders, results)
    insides = [
        border.settle([*outputs, *extra_outputs(own)])
        for border, outputs, own in zip(borders, results, leaving, strict=True)
    ]
    if not any(inside.changed for inside in insides) and not is_known(leaving[0]):
        return None
    reads = list(dict.fromkeys(v for inside in insides for v, _ in inside.sources))
    branches = [_branch(inside, reads) for inside in insides]
    platforms = op.params.get("branches_platforms")
    if platforms is None:
        by_index = lambda which, *arrays: lax.switch(which, branches, *arrays)  # noqa: E731
        new = new_op(walk, op, [index, *reads], by_index)
    else:  # a branch need not compile on another platform than its own
        new = new_op(walk, op, reads, _by_platform(platforms, branches))
    return state_facts(walk, new, leaving[0])


def _branch(inside: Inside, reads: Sequence[Value]) -> Branch:
    """A branch as a function of the inputs of all branches."""
    places = [reads.index(value) for value, _ in inside.sources]
    return lambda *arrays: inside.program.run([arrays[i] for i in places])


def _by_platform(
    platforms: Sequence[Sequence[str] | None], branches: Sequence[Branch]
) -> Callable[..., list[Array]]:
    """The branch for the platform of the lowering; None stands for any other platform."""
    pairs = list(zip(platforms, branches, strict=True))
    named = {name: branch for names, branch in pairs for name in names or ()}
    default = next((branch for names, branch in pairs if names is None), None)
    return lambda *arrays: lax.platform_dependent(*arrays, default=default, **named)
