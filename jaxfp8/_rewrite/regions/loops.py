"""Loops: scan and while."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._rewrite.context import Context
from jaxfp8._rewrite.ir.graph import Array, Op, Value
from jaxfp8._rewrite.regions import exits, opaque
from jaxfp8._rewrite.regions.borders import Border, How, Inside
from jaxfp8._rewrite.regions.exits import Exit
from jaxfp8._rewrite.regions.registry import (
    Run,
    extra_outputs,
    is_known,
    new_op,
    region,
    state_facts,
    walk_inside,
)
from jaxfp8._rewrite.rules.registry import lost
from jaxfp8._value import compat, dtypes, picking


@dataclasses.dataclass(frozen=True, eq=False)
class Carry:
    """The carried values of a loop, before it and inside it.

    A value returned unchanged by the body is a constant of the loop, and its facts stay true.
    """

    # outer, inner: the values before the loop, and inside.
    outer: Sequence[Value]
    inner: Sequence[Value]
    changing: Sequence[int]  # whether each of them changes

    def those_that_change(self, values: Sequence[Value]) -> list[Value]:
        """The items of `values` for the changing carried values."""
        return [values[i] for i in self.changing]

    def constants(self) -> list[Value]:
        """The inner values of the constants."""
        return [value for i, value in enumerate(self.inner) if i not in self.changing]


def _carry(border: Border, op: Op, jaxpr: object, first: int, outer: Sequence[Value]) -> Carry:
    """The carried values of a loop: the arguments of its body from `first` on."""
    opened = compat.open_jaxpr(jaxpr)
    arguments, results = opened.invars[first : first + len(outer)], opened.outvars[: len(outer)]
    pairs = enumerate(zip(arguments, results, strict=True))
    changing = [i for i, (given, returned) in pairs if given is not returned]
    ended = lost(
        op,
        "carries dequantized values from one iteration to the next, and changes them",
        "carry the 8-bit array, and dequantize it in the body",
    )
    inner = [
        border.enter_plain(value, ended) if i in changing else border.enter(value)
        for i, value in enumerate(outer)
    ]
    return Carry(outer, inner, changing)


@region("scan")
def scan(walk: Context, op: Op) -> Sequence[Value] | None:
    """Constants enter whole, and stacks slice by slice."""
    params, jaxpr = op.params, op.params["jaxpr"]
    n_consts, n_carry = compat.scan_counts(params)
    first = n_consts + n_carry
    border = Border(walk, op.inputs)
    carry = _carry(border, op, jaxpr, n_consts, op.inputs[n_consts:first])
    consts = [border.enter(v) for v in op.inputs[:n_consts]]
    slices = [border.enter_slices(v) for v in op.inputs[first:]]
    outputs = walk_inside(border.inner, op, jaxpr, [*consts, *carry.inner, *slices])
    state, stacked = carry.those_that_change(outputs), outputs[n_carry:]
    leaving = exits.exits(border, stacked, params["length"])
    inside = border.settle(
        [*state, *stacked, *extra_outputs(leaving)], keep=carry.those_that_change(carry.inner)
    )
    inside = _in_bytes(walk, op, inside, len(state))
    run = _run_scan(op, inside, len(state), in_bytes=op in walk.seen.picks)
    return _rebuilt_loop(walk, op, inside, run, carry, leaving)


# The inputs of a scan's body in one turn: the turn's number, if needed, and the slices.
Turn = tuple[Array | None, list[Array]]


def _in_bytes(walk: Context, op: Op, inside: Inside, n_state: int) -> Inside:
    """The body with whole FP8 stacks as inputs; it picks its slices as bytes.

    Stacked results leave as bytes, too (`_run_scan`).
    """
    sources = tuple(
        (value, "pick" if how == "slice" and value.dtype in dtypes.FLOAT8 else how)
        for value, how in inside.sources
    )
    results = inside.program.outputs[n_state:]
    has_stacks = any(how == "pick" for _, how in sources)
    has_stacks |= any(value.dtype in dtypes.FLOAT8 for value in results)
    if not (has_stacks and op.params["length"] and walk.picks_bytes):
        return inside
    walk.seen.picks.add(op)
    return dataclasses.replace(inside, sources=sources, changed=True)


def _run_scan(op: Op, inside: Inside, n_state: int, *, in_bytes: bool) -> Run:
    """Runs a rebuilt scan on its inputs; `in_bytes` stacks FP8 results as bytes."""
    names = ("reverse", "length", "unroll", "_split_transpose")
    options = {name: op.params[name] for name in names if name in op.params}
    given = [value.dtype for value in inside.program.outputs[n_state:]]
    held = [
        dtypes.storage(dtype) if dtype in dtypes.FLOAT8 and in_bytes else dtype for dtype in given
    ]

    def run(*arrays: Array) -> Sequence[Array]:
        rows = list(zip(arrays, inside.sources, strict=True))
        init = [x for x, (_, how) in rows if how == "carry"]
        stacks = [x for x, (_, how) in rows if how == "slice"]
        picked = [x for x, (_, how) in rows if how == "pick"]
        places = jnp.arange(op.params["length"], dtype=np.int32) if picked else None

        def body(state: list[Array], at: Turn) -> tuple[list[Array], list[Array]]:
            place, slices = at
            feed: dict[How, Iterator[Array]] = {
                "carry": iter(state),
                "slice": iter(slices),
                "pick": (picking.layer(x, place) for x in picked),
            }
            xs = [next(feed[how]) if how in feed else x for x, (_, how) in rows]
            outs = inside.program.run(xs)
            return outs[:n_state], list(map(dtypes.bits_as, outs[n_state:], held))

        state, stacked = lax.scan(body, init, (places, stacks), **options)
        return [*state, *map(dtypes.bits_as, stacked, given)]

    return run


@region("while")
def while_(walk: Context, op: Op) -> Sequence[Value] | None:
    """The body is rebuilt; the condition is left as it is."""
    opaque.look_into_condition(walk, op)
    params = op.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    first = n_cond + n_body
    border = Border(walk, op.inputs)
    cond_consts = [border.enter(v, facts=False) for v in op.inputs[:n_cond]]
    consts = [border.enter(v) for v in op.inputs[n_cond:first]]
    carry = _carry(border, op, params["body_jaxpr"], n_body, op.inputs[first:])
    outputs = walk_inside(border.inner, op, params["body_jaxpr"], [*consts, *carry.inner])
    states = carry.those_that_change(carry.inner)
    of_condition = [v for v in [*cond_consts, *carry.constants()] if v.literal is None]
    inside = border.settle(carry.those_that_change(outputs), keep=[*of_condition, *states])
    run = _run_while(op, inside, [*cond_consts, *carry.inner], states)
    return _rebuilt_loop(walk, op, inside, run, carry)


def _run_while(
    op: Op, inside: Inside, of_condition: Sequence[Value], states: Sequence[Value]
) -> Run:
    """Runs a rebuilt while loop on its inputs.

    The condition gets the inner values `of_condition`; `states` are the changing ones.
    """
    condition_jaxpr = op.params["cond_jaxpr"]

    def run(*arrays: Array) -> Sequence[Array]:
        env = dict(zip(inside.program.inputs, arrays, strict=True))

        def at(values: Sequence[Value], state: Sequence[Array]) -> list[Array]:
            now = {**env, **dict(zip(states, state, strict=True))}
            return [now[v] if v.literal is None else v.literal for v in values]

        def condition(*state: Array) -> list[Array]:
            consts, opened = compat.consts_of(condition_jaxpr), compat.open_jaxpr(condition_jaxpr)
            return jax.core.eval_jaxpr(opened, consts, *at(of_condition, state))

        def body(*state: Array) -> list[Array]:
            return inside.program.run(at(inside.program.inputs, state))

        return compat.bind_while(op.equation, condition, body, [env[v] for v in states])

    return run


def _rebuilt_loop(
    walk: Context, op: Op, inside: Inside, run: Run, carry: Carry, leaving: Sequence[Exit] = ()
) -> Sequence[Value] | None:
    """The outputs of a rebuilt loop: an unchanged carried value is its input."""
    if not inside.changed and not is_known(leaving):
        return None
    new = new_op(walk, op, [value for value, _ in inside.sources], run)
    stacked = new.outputs[len(carry.outer) :]
    kept = [*carry.those_that_change(new.outputs), *stacked]
    new.outputs = tuple(kept)
    for i, value in enumerate(kept):
        value.index = i
    state_facts(walk, new, leaving, len(carry.changing))
    final = list(carry.outer)
    for i, value in zip(carry.changing, kept, strict=False):
        final[i] = value
    return [*final, *stacked]
