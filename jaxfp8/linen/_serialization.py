"""A `QArray` in Flax's state dictionaries and msgpack files. A prepared one cannot be saved."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import serialization

from jaxfp8._value.errors import message
from jaxfp8._value.prepared import PreparedArray
from jaxfp8._value.qarray import QArray
from jaxfp8._value.transposed import TransposedArray


def _to_state_dict(q: QArray) -> dict[str, Any]:
    return {name: serialization.to_state_dict(leaf) for name, leaf in _leaves(q).items()}


def _from_state_dict(q: QArray, state: Any) -> QArray:
    """`q` with the arrays of a state dictionary and its own tiles."""
    leaves = _leaves(q)
    if not isinstance(state, dict) or set(state) != set(leaves):
        got = f"has {sorted(state)}" if isinstance(state, dict) else f"is {type(state).__name__}"
        needs = f"the target, {q}, has {sorted(leaves)}"
        remedy = "restore into variables that were made by the recipe of those saved"
        raise ValueError(message("flax.serialization", "state of a QArray", got, needs, remedy))
    restored = {
        name: serialization.from_state_dict(leaf, state[name], name=name)
        for name, leaf in leaves.items()
    }
    return dataclasses.replace(q, **restored)


def _view_of_state(view: TransposedArray, state: Any) -> TransposedArray:
    """A view, in its order, of the stored arrays of a state dictionary."""
    return dataclasses.replace(view, stored=_from_state_dict(view.stored, state))


def _leaves(q: QArray) -> dict[str, Any]:
    leaves = {"qvalue": q.qvalue, "scale": q.scale, "zero_point": q.zero_point}
    return {name: leaf for name, leaf in leaves.items() if leaf is not None}


def _refuse(p: PreparedArray, *_: Any) -> Any:
    needs = "checkpoints hold weights as they were"
    remedy = (
        "save the variables before `prepare`, or `unprepare()` of it, and prepare what was loaded"
    )
    raise TypeError(message("flax.serialization", "state", f"is {p}", needs, remedy))


def register() -> None:
    """Tells Flax about `QArray`, once."""
    serialization.register_serialization_state(PreparedArray, _refuse, _refuse, override=True)
    serialization.register_serialization_state(
        TransposedArray, lambda view: _to_state_dict(view.stored), _view_of_state, override=True
    )
    serialization.register_serialization_state(
        QArray, _to_state_dict, _from_state_dict, override=True
    )
