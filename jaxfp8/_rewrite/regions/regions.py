"""Equations that hold other equations: entered, and rebuilt with what was found inside.

A region rule takes the walk, the equation, its inputs and its callers, and returns the outputs, or
None to leave the equation as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir import graph
from jaxfp8._rewrite.ir.facts import Lost
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.regions import exits, opaque
from jaxfp8._rewrite.regions.borders import Border, Inside
from jaxfp8._rewrite.regions.exits import Exit
from jaxfp8._value import compat

Callers = tuple[Any, ...]
Region = Callable[["Context", Any, list[Value], Callers], Sequence[Value] | None]
REGIONS: dict[str, Region] = {}
JITS = ("jit", "pjit")


def region(*names: str) -> Callable[[Region], Region]:
    """Register a region for primitives."""

    def register(function: Region) -> Region:
        REGIONS.update(dict.fromkeys(names, function))
        return function

    return register


def _walk_inside(
    walk: Context, jaxpr: Any, inputs: Sequence[Value], callers: Callers
) -> list[Value]:
    """Walk an inner jaxpr on given values."""
    consts = [graph.constant(c) for c in compat.consts_of(jaxpr)]
    return walk.jaxpr(compat.open_jaxpr(jaxpr), consts, inputs, callers)


@region(*JITS)
def jit(walk: Context, eqn: Any, inputs: list[Value], callers: Callers) -> Sequence[Value] | None:
    """A jitted function that asks for nothing but compilation is entered as if written in place.

    One that donates or shards is rebuilt with all its own parameters.
    """
    if asks_for_nothing(eqn.params):
        return _walk_inside(walk, eqn.params["jaxpr"], inputs, (*callers, eqn))
    border = Border(walk, inputs)
    lose = _loser(
        eqn, callers, "takes dequantised values, and donates or shards", "dequantise inside it"
    )
    args = [border.enter_plain(value, lose) for value in inputs]
    outputs = _walk_inside(border.inner, eqn.params["jaxpr"], args, (*callers, eqn))
    inside = border.settle(outputs, keep=args)

    def run(*arrays: Any) -> Sequence[Any]:
        jaxpr = jax.make_jaxpr(lambda *xs: inside.program.run(xs))(*arrays)
        return eqn.primitive.bind(*arrays, **{**eqn.params, "jaxpr": jaxpr})

    return _op(walk, eqn, inside, run, callers).outputs if inside.changed else None


def asks_for_nothing(params: dict[str, Any]) -> bool:
    """Whether a jit states no sharding, layout, donation or compiler option."""
    shardings = (*params["in_shardings"], *params["out_shardings"])
    layouts = (*params["in_layouts"], *params["out_layouts"])
    return (
        not any(params["donated_invars"])
        and not params["compiler_options_kvs"]
        and all(layout is None for layout in layouts)
        and all(compat.is_unspecified(sharding) for sharding in shardings)
    )


@region("custom_jvp_call", "custom_vjp_call", "closed_call", "core_call")
def call(walk: Context, eqn: Any, inputs: list[Value], callers: Callers) -> Sequence[Value] | None:
    """A call whose derivative rule is kept elsewhere: only its value is computed here."""
    return _walk_inside(walk, eqn.params["call_jaxpr"], inputs, (*callers, eqn))


@region("rewritten_linear")
def rewritten(walk: Context, eqn: Any, inputs: list[Value], callers: Callers) -> Sequence[Value]:
    """Half of a derivative that was rewritten before: as if written in place."""
    return _walk_inside(walk, eqn.params["linear"].jaxpr, inputs, (*callers, eqn))


@region("remat2", "checkpoint", "remat")
def remat(walk: Context, eqn: Any, inputs: list[Value], callers: Callers) -> Sequence[Value] | None:
    """A rematerialised function, rebuilt with its own policy."""
    border = Border(walk, inputs)
    args = [border.enter(value) for value in inputs]
    outputs = _walk_inside(border.inner, eqn.params["jaxpr"], args, (*callers, eqn))
    leaving = exits.exits(border, outputs)
    inside = border.settle([*outputs, *_extra(leaving)])

    def run(*arrays: Any) -> Sequence[Any]:
        closed, consts = compat.hoisted(lambda *xs: inside.program.run(xs), arrays)
        jaxpr = compat.open_jaxpr(closed)
        return eqn.primitive.bind(*consts, *arrays, **{**eqn.params, "jaxpr": jaxpr})

    return _rebuilt(walk, eqn, inside, run, callers, leaving)


@region("scan")
def scan(walk: Context, eqn: Any, inputs: list[Value], callers: Callers) -> Sequence[Value] | None:
    """A scan: constants enter whole, stacks slice by slice; what the body only hands on, whole."""
    params, jaxpr = eqn.params, eqn.params["jaxpr"]
    n_consts, n_carry = compat.scan_counts(params)
    first = n_consts + n_carry
    border = Border(walk, inputs)
    carry = inputs[n_consts:first]
    handed_on = _handed_on(jaxpr, n_consts, n_carry)
    carried = _carried(border, carry, handed_on, eqn, callers)
    args = [border.enter(v) for v in inputs[:n_consts]] + carried
    args += [border.enter_slices(v) for v in inputs[first:]]
    outputs = _walk_inside(border.inner, jaxpr, args, (*callers, eqn))
    changing = [i for i in range(n_carry) if not handed_on[i]]
    leaving = exits.exits(border, outputs[n_carry:], params["length"])
    inside = border.settle(
        [outputs[i] for i in changing] + list(outputs[n_carry:]) + _extra(leaving),
        keep=[carried[i] for i in changing],
    )
    options = {
        k: params[k] for k in ("reverse", "length", "unroll", "_split_transpose") if k in params
    }

    def run(*arrays: Any) -> Sequence[Any]:
        rows = list(zip(arrays, inside.sources, strict=True))
        init = [x for x, (_, how) in rows if how == "carry"]
        stacks = [x for x, (_, how) in rows if how == "slice"]

        def body(state: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            feed = {"carry": iter(state), "slice": iter(slices)}
            xs = [next(feed[how]) if how in feed else x for x, (_, how) in rows]
            outs = inside.program.run(xs)
            return outs[: len(changing)], outs[len(changing) :]

        state, stacked = lax.scan(body, init, stacks, **options)
        return [*state, *stacked]

    return _loop(walk, eqn, inside, run, carry, changing, callers, leaving)


def _handed_on(jaxpr: Any, first: int, number: int) -> list[bool]:
    """For each carried value, whether the body returns it as it came."""
    opened = compat.open_jaxpr(jaxpr)
    arguments = opened.invars[first : first + number]
    return [a is b for a, b in zip(arguments, opened.outvars[:number], strict=True)]


def _carried(
    border: Border,
    carry: Sequence[Value],
    handed_on: Sequence[bool],
    eqn: Any,
    callers: Callers,
) -> list[Value]:
    """Carried values inside; one that never changes keeps what is known about it."""
    lose = _loser(
        eqn,
        callers,
        "carries dequantised values from turn to turn, and changes them",
        "carry the 8-bit array, and dequantise it in the body",
    )
    pairs = zip(carry, handed_on, strict=True)
    return [border.enter(v) if same else border.enter_plain(v, lose) for v, same in pairs]


def _loser(eqn: Any, callers: Callers, reason: str, remedy: str) -> Callable[[], Lost]:
    """The loss of a fact at a region."""
    return lambda: Lost(eqn, f"`{eqn.primitive.name}` {reason}", remedy, callers)


def _loop(
    walk: Context,
    eqn: Any,
    inside: Inside,
    run: Callable[..., Sequence[Any]],
    carry: Sequence[Value],
    changing: Sequence[int],
    callers: Callers,
    leaving: Sequence[Exit] = (),
) -> Sequence[Value] | None:
    """The outputs of a rebuilt loop: carried values that never change are their inputs."""
    if not inside.changed and not _is_known(leaving):
        return None
    op = _op(walk, eqn, inside, run, callers)
    outputs = list(op.outputs)
    kept = [outputs[i] for i in changing] + outputs[len(carry) :]
    op.outputs = tuple(kept)
    for i, value in enumerate(kept):
        value.index = i
    _tell(walk, op, kept[len(changing) :], leaving)
    result = iter(kept)
    return [
        next(result) if i in changing or i >= len(carry) else carry[i] for i in range(len(outputs))
    ]


def _extra(leaving: Sequence[Exit]) -> list[Value]:
    """What a region gives out for the sake of facts."""
    return [value for exit_ in leaving for value in exit_.extra]


def _is_known(leaving: Sequence[Exit]) -> bool:
    """Whether any output is known to be dequantised 8-bit data."""
    return any(exit_.fact is not None for exit_ in leaving)


def _tell(walk: Context, op: Op, outputs: Sequence[Value], leaving: Sequence[Exit]) -> None:
    """Add the extra outputs to a rebuilt region, and state the facts about the others."""
    for value, exit_ in zip(outputs, leaving, strict=True):
        given: dict[Value, Value] = {}
        for part in exit_.extra:
            given[part] = Value(exit_.shape(part), part.dtype, op, len(op.outputs))
            op.outputs += (given[part],)
        fact = exit_.outside(given.__getitem__)
        if fact is not None:
            walk.facts[value] = fact


@region("while")
def while_(
    walk: Context, eqn: Any, inputs: list[Value], callers: Callers
) -> Sequence[Value] | None:
    """A while loop; its condition is left as it is."""
    opaque.look_into_condition(walk, eqn, inputs, callers)
    params = eqn.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_jaxpr, body_jaxpr = params["cond_jaxpr"], params["body_jaxpr"]
    first = n_cond + n_body
    border = Border(walk, inputs)
    cond_consts = [border.enter(v, facts=False) for v in inputs[:n_cond]]
    consts = [border.enter(v) for v in inputs[n_cond:first]]
    carry = inputs[first:]
    handed_on = _handed_on(body_jaxpr, n_body, len(carry))
    carried = _carried(border, carry, handed_on, eqn, callers)
    outputs = _walk_inside(border.inner, body_jaxpr, consts + carried, (*callers, eqn))
    changing = [i for i in range(len(carry)) if not handed_on[i]]
    fixed = [carried[i] for i in range(len(carry)) if handed_on[i]]
    wanted = [v for v in cond_consts + fixed if v.literal is None]
    keep = wanted + [carried[i] for i in changing]
    inside = border.settle([outputs[i] for i in changing], keep=keep)

    def run(*arrays: Any) -> Sequence[Any]:
        env = dict(zip(inside.program.inputs, arrays, strict=True))
        states = [carried[i] for i in changing]

        def at(values: Sequence[Value], state: Sequence[Any]) -> list[Any]:
            now = {**env, **dict(zip(states, state, strict=True))}
            return [now[v] if v.literal is None else v.literal for v in values]

        def condition(*state: Any) -> list[Any]:
            consts = compat.consts_of(cond_jaxpr)
            opened = compat.open_jaxpr(cond_jaxpr)
            return jax.core.eval_jaxpr(opened, consts, *at(cond_consts + carried, state))

        def body(*state: Any) -> list[Any]:
            return inside.program.run(at(inside.program.inputs, state))

        return compat.bind_while(eqn, condition, body, [env[v] for v in states])

    return _loop(walk, eqn, inside, run, carry, changing, callers)


@region("cond")
def cond(walk: Context, eqn: Any, inputs: list[Value], callers: Callers) -> Sequence[Value] | None:
    """A choice between branches, each settled alone; all are given what any of them reads."""
    index, *operands = inputs
    borders = [Border(walk, inputs) for _ in eqn.params["branches"]]
    results = [
        _walk_inside(
            border.inner, branch, [border.enter(value) for value in operands], (*callers, eqn)
        )
        for border, branch in zip(borders, eqn.params["branches"], strict=True)
    ]
    leaving = exits.branch_exits(borders, results)
    insides = [
        border.settle([*outputs, *(v for exit_ in own for v in exit_.extra)])
        for border, outputs, own in zip(borders, results, leaving, strict=True)
    ]
    if not any(inside.changed for inside in insides) and not _is_known(leaving[0]):
        return None
    values = list(dict.fromkeys(v for inside in insides for v, _ in inside.sources))
    places = [[values.index(v) for v, _ in inside.sources] for inside in insides]

    def branch_of(inside: Inside, own: list[int]) -> Callable[..., list[Any]]:
        return lambda *arrays: inside.program.run([arrays[i] for i in own])

    branches = [branch_of(i, own) for i, own in zip(insides, places, strict=True)]
    platforms = eqn.params.get("branches_platforms")
    if platforms is not None:  # the platform chooses; a branch need not compile on another one
        run, reads = _by_platform(platforms, branches), values
    else:
        run, reads = _by_index(branches), [index, *values]
    op = graph.equation_op(eqn, reads, callers)
    outputs = _register(walk, op, run)
    _tell(walk, op, outputs, leaving[0])
    return outputs


def _by_index(branches: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """The branch that the first array chooses."""
    return lambda which, *arrays: lax.switch(which, branches, *arrays)


def _by_platform(
    platforms: Sequence[Sequence[str] | None], branches: Sequence[Callable[..., Any]]
) -> Callable[..., Any]:
    """The branch of the platform that the program is lowered for; None is any other platform."""
    pairs = list(zip(platforms, branches, strict=True))
    named = {name: branch for names, branch in pairs for name in names or ()}
    default = next((branch for names, branch in pairs if names is None), None)
    return lambda *arrays: lax.platform_dependent(*arrays, default=default, **named)


def _rebuilt(
    walk: Context,
    eqn: Any,
    inside: Inside,
    run: Callable[..., Sequence[Any]],
    callers: Callers,
    leaving: Sequence[Exit],
) -> Sequence[Value] | None:
    """The outputs of a rebuilt region, or None if nothing inside it changed or is known."""
    if not inside.changed and not _is_known(leaving):
        return None
    op = _op(walk, eqn, inside, run, callers)
    outputs = op.outputs
    _tell(walk, op, outputs, leaving)
    return outputs


def _op(
    walk: Context, eqn: Any, inside: Inside, run: Callable[..., Sequence[Any]], callers: Callers
) -> Op:
    op = graph.equation_op(eqn, [value for value, _ in inside.sources], callers)
    _register(walk, op, run)
    return op


def _register(walk: Context, op: Op, run: Callable[..., Sequence[Any]]) -> tuple[Value, ...]:
    """Give a rebuilt region its own way to run, within the equation's context."""

    def within(*arrays: Any) -> Sequence[Any]:
        with graph.context_inside(op):
            return run(*arrays)

    op.run = within
    walk.note(op)
    return op.outputs


@region("shard_map")
def shard_map(
    walk: Context, eqn: Any, inputs: list[Value], callers: Callers
) -> Sequence[Value] | None:
    """A function per device: 8-bit data is sharded like the wide value, scales where they vary."""
    params, jaxpr = eqn.params, eqn.params["jaxpr"]
    border = Border(walk, inputs)
    rows = zip(inputs, compat.open_jaxpr(jaxpr).invars, params["in_specs"], strict=True)
    args = [border.enter_shards(value, v.aval.shape, spec) for value, v, spec in rows]
    outputs = _walk_inside(border.inner, jaxpr, args, (*callers, eqn))
    leaving = exits.shard_exits(border, outputs, params["out_specs"], params["mesh"])
    inside = border.settle([*outputs, *_extra(leaving)])
    out_specs = (*params["out_specs"], *(exit_.spec for exit_ in leaving for _ in exit_.extra))
    axes = params.get("manual_axes", params.get("newly_manual_axes"))

    def run(*arrays: Any) -> Sequence[Any]:
        mapped = jax.shard_map(
            lambda *xs: tuple(inside.program.run(xs)),
            mesh=params["mesh"],
            in_specs=tuple(spec for _, spec in inside.sources),
            out_specs=out_specs,
            axis_names=axes,
            check_vma=params["check_vma"],
        )
        return mapped(*arrays)

    return _rebuilt(walk, eqn, inside, run, callers, leaving)
