"""Called functions: jit, composite, custom rules, remat, shard_map."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_batching import custom_vmap

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir.graph import Array, Op, Params, Value
from jaxfp8._rewrite.regions import exits
from jaxfp8._rewrite.regions.borders import Border, Inside
from jaxfp8._rewrite.regions.registry import extra_outputs, new_op, rebuilt, region, walk_inside
from jaxfp8._rewrite.rules.registry import lost
from jaxfp8._value import compat

JITS = ("jit", "pjit")
# From a function of arrays to another one.
Change = Callable[[Callable[..., Any]], Callable[..., Any]]


@region(*JITS)
def jit(walk: Context, op: Op) -> Sequence[Value] | None:
    """A jitted function is inlined, unless it donates, shards or has compiler options.

    Then it is rebuilt with all its parameters.
    """
    if asks_for_nothing(op.params):
        return walk_inside(walk, op, op.params["jaxpr"], op.inputs)
    border = Border(walk, op.inputs)
    ended = lost(op, "takes dequantized values, and donates or shards", "dequantize inside it")
    args = [border.enter_plain(value, ended) for value in op.inputs]
    outputs = walk_inside(border.inner, op, op.params["jaxpr"], args)
    return rebuilt_jit(walk, op, border.settle(outputs, keep=args))


def rebuilt_jit(walk: Context, op: Op, inside: Inside) -> Sequence[Value] | None:
    """The outputs of a jit with its own parameters and another inside, if that changed."""

    def run(*arrays: Array) -> Sequence[Array]:
        jaxpr = jax.make_jaxpr(lambda *xs: inside.program.run(xs))(*arrays)
        return op.equation.primitive.bind(*arrays, **{**op.params, "jaxpr": jaxpr})

    return rebuilt(walk, op, inside, run)


def asks_for_nothing(params: Params) -> bool:
    """Whether a jit states no sharding, layout, donation or compiler option."""
    shardings = (*params["in_shardings"], *params["out_shardings"])
    layouts = (*params["in_layouts"], *params["out_layouts"])
    return (
        not any(params["donated_invars"])
        and not params["compiler_options_kvs"]
        and all(layout is None for layout in layouts)
        and all(compat.is_unspecified(sharding) for sharding in shardings)
    )


@region("custom_jvp_call", "custom_vjp_call", "ruled_call", "closed_call", "core_call")
def call(walk: Context, op: Op) -> Sequence[Value] | None:
    """A function is inlined: its derivative rule is that of the rewritten function as a whole."""
    return walk_inside(walk, op, op.params["call_jaxpr"], op.inputs)


@region("remat_opt")
def optimised_forward(walk: Context, op: Op) -> Sequence[Value]:
    """The forward half of a `custom_vjp` with `optimize_remat` is inlined.

    Where its residuals are unread, JAX would compute the function itself in its place.
    """
    return walk_inside(walk, op, op.params["fwd_jaxpr"], op.inputs)


@region("composite")
def composite(walk: Context, op: Op) -> Sequence[Value] | None:
    """A function with a name for other compilers is inlined.

    JAX knows no effects of a composite, so one with effects is left as it is.
    """
    jaxpr = op.params["call_jaxpr" if "call_jaxpr" in op.params else "jaxpr"]  # from JAX 0.12 on
    if compat.has_effects(compat.open_jaxpr(jaxpr)):
        return None
    return walk_inside(walk, op, jaxpr, op.inputs)


@region("custom_vmap_call")
def custom_batching(walk: Context, op: Op) -> Sequence[Value] | None:
    """A function with a rule for vmap is rebuilt, and its rule stays as written."""
    return with_rule_for_vmap(walk, op, lambda rule: rule)


def with_rule_for_vmap(walk: Context, op: Op, change: Change) -> Sequence[Value] | None:
    """A function with a rule for vmap is rebuilt; its rule takes the inputs as written.

    Those are therefore inputs of the rebuilt function, too. XLA drops unread ones. An input that
    is returned as it came, as residuals are, stays that value outside, with its facts.

    Args:
      walk, op: as for every region.
      change: makes another function of arrays from the rule.
    """
    border = Border(walk, op.inputs)
    args = [border.enter(value) for value in op.inputs]
    outputs = walk_inside(border.inner, op, op.params["call"], args)
    passed = dict(zip(args, op.inputs, strict=True))
    inside = border.settle(outputs)
    if not inside.changed:
        return None
    reads = list(dict.fromkeys((*op.inputs, *(value for value, _ in inside.sources))))
    places = [reads.index(value) for value, _ in inside.sources]
    given = [reads.index(value) for value in op.inputs]

    def run(*arrays: Array) -> Sequence[Array]:
        function = custom_vmap(lambda *xs: inside.program.run([xs[i] for i in places]))
        function.def_vmap(functools.partial(_vmap_by_rule, op, given, change))
        return function(*arrays)

    made = new_op(walk, op, reads, run).outputs
    return [passed.get(inner, value) for inner, value in zip(outputs, made, strict=True)]


def _vmap_by_rule(
    op: Op,
    given: Sequence[int],
    change: Change,
    size: int,
    batched: Sequence[bool],
    *arrays: Array,
) -> tuple[Any, Any]:
    """The outputs of a function by its own rule for vmap, and whether each is batched."""
    tree = op.params["in_tree"]
    flags = jax.tree.unflatten(tree, [batched[i] for i in given])
    out_batched: list[bool] = []

    def rule(*inputs: Array) -> list[Array]:
        args = jax.tree.unflatten(tree, inputs)
        outputs, out_batched[:] = map(jax.tree.leaves, op.params["rule"](size, list(flags), *args))
        return outputs

    return change(rule)(*(arrays[i] for i in given)), out_batched


@region("rewritten_linear")
def rewritten(walk: Context, op: Op) -> Sequence[Value]:
    """The second half of a rewritten derivative is inlined."""
    return walk_inside(walk, op, op.params["linear"].jaxpr, op.inputs)


@region("remat2", "checkpoint", "remat")
def remat(walk: Context, op: Op) -> Sequence[Value] | None:
    """A rematerialised function is rebuilt with its own policy."""
    border = Border(walk, op.inputs)
    args = [border.enter(value) for value in op.inputs]
    outputs = walk_inside(border.inner, op, op.params["jaxpr"], args)
    leaving = exits.exits(border, outputs)
    inside = border.settle([*outputs, *extra_outputs(leaving)])

    def run(*arrays: Array) -> Sequence[Array]:
        closed, consts = compat.hoisted(lambda *xs: inside.program.run(xs), arrays)
        params = {**op.params, "jaxpr": compat.open_jaxpr(closed)}
        return op.equation.primitive.bind(*consts, *arrays, **params)

    return rebuilt(walk, op, inside, run, leaving)


@region("shard_map")
def shard_map(walk: Context, op: Op) -> Sequence[Value] | None:
    """8-bit data is sharded like the wide value, and scales along their varying axes."""
    params, jaxpr = op.params, op.params["jaxpr"]
    border = Border(walk, op.inputs)
    rows = zip(op.inputs, compat.open_jaxpr(jaxpr).invars, params["in_specs"], strict=True)
    args = [border.enter_shards(value, v.aval.shape, spec) for value, v, spec in rows]
    outputs = walk_inside(border.inner, op, jaxpr, args)
    leaving = exits.shard_exits(border, outputs, params["out_specs"], params["mesh"])
    inside = border.settle([*outputs, *extra_outputs(leaving)])
    out_specs = (*params["out_specs"], *(exit_.spec for exit_ in leaving for _ in exit_.extra))
    axes = params["manual_axes" if "manual_axes" in params else "newly_manual_axes"]

    def run(*arrays: Array) -> Sequence[Array]:
        mapped = jax.shard_map(
            lambda *xs: tuple(inside.program.run(xs)),
            mesh=params["mesh"],
            in_specs=tuple(how for _, how in inside.sources),
            out_specs=out_specs,
            axis_names=axes,
            check_vma=params["check_vma"],
        )
        return mapped(*arrays)

    return rebuilt(walk, op, inside, run, leaving)
