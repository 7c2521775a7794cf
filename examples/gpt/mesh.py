"""A run on several devices: the mesh, and which of its axes split which arrays.

    data    each device has texts of its own and all weights
    fsdp    each device has texts of its own and keeps a part of each weight
    model   each device computes some of the columns, then some of the rows, of each pair of layers

The axes are automatic: XLA places what a step computes, from where the state and the texts lie. The
model says where its activations lie as well. Without that XLA may split the sums of products,
because weights are split, and send activations instead of weights.
"""

from __future__ import annotations

import math
import re
from typing import Any

import jax
from flax.linen.dtypes import promote_dtype
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "model")

# The end of a path in the state, and how the array there is split; others are whole everywhere.
# Moments of the optimiser end in the same names as what they belong to.
RULES = (
    (r"/(qkv|up)/kernel$", P(None, "fsdp", "model")),
    (r"/(qkv|up)/bias$", P(None, "model")),
    (r"/(out|down)/kernel$", P(None, "model", "fsdp")),
    (r"tokens/embedding$", P("model", "fsdp")),
)


def make(text: str) -> Mesh:
    """The mesh of a text such as `data=2,fsdp=2,model=2`; axes that it does not name have size 1.

    Raises:
      ValueError: an axis is unknown or named twice, a size is no whole number, or there are too few
        devices.
    """
    named: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if name not in AXES or name in named or not size.isdigit() or int(size) < 1:
            raise ValueError(f"`--mesh`: {part!r} is not one of {', '.join(AXES)} = a size, once")
        named[name] = int(size)
    sizes = dict.fromkeys(AXES, 1) | named
    number, there = math.prod(sizes.values()), jax.device_count()
    if number > there:
        raise ValueError(f"`--mesh`: {text} needs {number} devices, but there are {there}")
    kinds = (AxisType.Auto,) * len(AXES)
    shape = tuple(sizes.values())
    return jax.make_mesh(shape, AXES, axis_types=kinds, devices=jax.devices()[:number])


def of_state(mesh: Mesh, state: Any) -> Any:
    """A sharding for each array of a state, or of shapes like one."""

    def place(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = next((spec for end, spec in RULES if re.search(end, name)), P())
        return NamedSharding(mesh, spec if len(spec) <= leaf.ndim else P())

    return jax.tree_util.tree_map_with_path(place, state)


def of_texts(mesh: Mesh) -> NamedSharding:
    """Texts, split over the devices that have texts of their own."""
    return NamedSharding(mesh, P(("data", "fsdp")))


def of_table(
    mesh: Mesh, *args: jax.Array | None, dtype: Any = None, inexact: bool = True
) -> list[Any]:
    """What Flax's `Embed` multiplies, in one dtype; the last is its table, gathered over `fsdp`."""
    *others, table = promote_dtype(*args, dtype=dtype, inexact=inexact)
    return [*others, jax.lax.with_sharding_constraint(table, NamedSharding(mesh, P("model")))]
