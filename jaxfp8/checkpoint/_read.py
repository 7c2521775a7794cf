"""From the bytes of a file to arrays on devices. Each device reads only its own slice."""

from __future__ import annotations

import collections
import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from jaxfp8._value import dtypes
from jaxfp8._value.checks import as_dtype
from jaxfp8._value.qarray import QArray
from jaxfp8._value.spec import Shape
from jaxfp8.checkpoint import _decode
from jaxfp8.checkpoint._errors import CheckpointError
from jaxfp8.checkpoint._file import File
from jaxfp8.checkpoint._items import Item, Part

Struct = jax.ShapeDtypeStruct
Shardings = Sharding | Mapping[str, Sharding] | Callable[[str, Struct], Sharding | None] | None
# FP8 too: of arrays without a scale.
_FLOATS = (*dtypes.WIDE_FLOAT, np.dtype(np.float64), *dtypes.FLOAT8)
_NARROW = {np.dtype(np.int64): np.dtype(np.int32), np.dtype(np.uint64): np.dtype(np.uint32)}


class Transfers:
    """Arrays in transfer to devices; until they arrive, the host holds their bytes too.

    Threads may share one. It keeps no array alive.

    Args:
      room: the most bytes under way. A larger array is transferred alone.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._lock = threading.Lock()
        self._under_way: collections.deque[tuple[list[weakref.ref[Any]], int]] = collections.deque()

    def wait_for(self, nbytes: int) -> None:
        """Wait, oldest first, until there is room for so many bytes."""
        while oldest := self._oldest_in_the_way(nbytes):
            jax.block_until_ready(_not_there(oldest))

    def add(self, value: jax.Array | QArray, nbytes: int) -> None:
        """Note an array just made from bytes of the host."""
        with self._lock:
            self._under_way.append(([weakref.ref(x) for x in jax.tree.leaves(value)], nbytes))

    def _oldest_in_the_way(self, nbytes: int) -> list[weakref.ref[Any]] | None:
        """Drops finished transfers; takes out and returns the oldest one if there is no room."""
        with self._lock:
            left = [entry for entry in self._under_way if _not_there(entry[0])]
            self._under_way = collections.deque(left)
            if sum(size for _, size in left) + nbytes <= self._room or not left:
                return None
            return self._under_way.popleft()[0]


def _not_there(leaves: Sequence[weakref.ref[Any]]) -> list[jax.Array]:
    """The arrays still alive and in transfer."""
    kept = [leaf for ref in leaves if (leaf := ref()) is not None and not leaf.is_deleted()]
    return [leaf for leaf in kept if not leaf.is_ready()]


def read(
    files: Mapping[str, File],
    item: Item,
    shardings: Shardings,
    dtype: DTypeLike | None,
    transfers: Transfers,
) -> jax.Array | QArray:
    """One array, or one weight with its scale; its bytes may still be on their way to the devices.

    Args:
      files: the open files by path.
      item: the array or weight to read.
      shardings: as `load` takes them.
      dtype: of floats outside 8-bit weights; None keeps the dtype of the file.
      transfers: the arrays read before.

    Raises:
      CheckpointError: the file was cut short, a scale is not finite, or integers do not fit.
    """
    transfers.wait_for(item.nbytes)
    made = _made(files, item, shardings, dtype)
    transfers.add(made, item.nbytes)
    return made


def _made(
    files: Mapping[str, File], item: Item, shardings: Shardings, dtype: DTypeLike | None
) -> jax.Array | QArray:
    sharding = sharding_of(shardings, item)
    value = _array(files, item.value, sharding, _target(item, dtype))
    if item.scale is None:
        return value
    small: list[Any] = [
        None if part is None else _array(files, part, _follow(sharding, item.value.shape, part))
        for part in (item.scale, item.zero_point)
    ]
    return QArray(value, *small, tiles=item.layout.tiles)


def check_scale(part: Part, values: np.ndarray) -> None:
    """Refuses a NaN or infinite scale.

    Raises:
      CheckpointError: there is one.
    """
    wide = values.astype(np.float32)
    if not np.isfinite(wide).all():
        bad = int(wide.size - np.isfinite(wide).sum())
        got, needs = f"is a scale with {bad} entries that are not finite", "a scale is finite"
        entry = part.entry
        raise CheckpointError(entry.file, entry.name, got, needs, "fetch the file again")


def sharding_of(shardings: Shardings, item: Item) -> Sharding:
    """The sharding of an item's values; by default the default device."""
    found: Any = shardings
    if isinstance(shardings, Mapping):
        found = shardings.get(item.name)
    elif callable(shardings) and not isinstance(shardings, Sharding):
        found = shardings(item.name, item.value.struct)
    if found is None:
        return SingleDeviceSharding(jnp.zeros(()).device)
    if isinstance(shardings, Sharding) and isinstance(found, NamedSharding):
        # One sharding for all: a vector has fewer axes than it names.
        spec = PartitionSpec(*tuple(found.spec)[: len(item.value.shape)])
        return NamedSharding(found.mesh, spec, memory_kind=found.memory_kind)
    return found


def _target(item: Item, dtype: DTypeLike | None) -> np.dtype:
    """The dtype of the loaded array: its own, another float, or JAX's without x64."""
    own = item.value.dtype
    if dtype is not None and item.scale is None and own in _FLOATS:
        return as_dtype("jaxfp8.checkpoint.load", "dtype", dtype, dtypes.WIDE_FLOAT)
    if jax.config.read("jax_enable_x64"):
        return own
    if own == np.float64:
        entry = item.value.entry
        needs, remedy = "JAX has float32 without x64", "pass `dtype`, or enable x64"
        raise CheckpointError(entry.file, entry.name, f"is {entry}", needs, remedy)
    return _NARROW.get(own, own)


def _array(
    files: Mapping[str, File], part: Part, sharding: Sharding, dtype: np.dtype | None = None
) -> jax.Array:
    target = dtype or part.dtype
    is_scale = dtype is None and target in dtypes.SCALE
    file, seen = files[part.entry.file], dict[Any, np.ndarray]()

    def slice_of(index: Any) -> np.ndarray:
        key = tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))
        if key not in seen:  # devices with the same slice share one read
            seen[key] = convert(index)
        return seen[key]

    def convert(index: tuple[slice, ...]) -> np.ndarray:
        values = _decode.values(file, part, index)
        if is_scale:
            check_scale(part, values)
        return values if target == part.dtype else _cast(part, values, target)

    shape = part.shape
    return jax.make_array_from_callback(shape, sharding, slice_of, dtype=target)


def _cast(part: Part, values: np.ndarray, target: np.dtype) -> np.ndarray:
    """Floats rounded; integers as they are, or refused."""
    if np.issubdtype(part.dtype, np.integer) and values.size:
        info = np.iinfo(target)
        if values.min() < info.min or values.max() > info.max:
            entry = part.entry
            got, needs = f"is {entry} with numbers past {target.name}", "64 bits are needed"
            raise CheckpointError(entry.file, entry.name, got, needs, "enable x64 in JAX")
    return values.astype(target)


def _follow(sharding: Sharding, shape: Shape, part: Part) -> Sharding:
    """The sharding of a scale: split like the values if its entries divide, else whole."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = tuple(sharding.spec) + (None,) * (len(shape) - len(sharding.spec))
    names = [
        name if count > 1 and count % _parts(sharding, name) == 0 else None
        for count, name in zip(part.shape, spec, strict=False)
    ]
    mesh = sharding.mesh
    return NamedSharding(mesh, PartitionSpec(*names), memory_kind=sharding.memory_kind)


def _parts(sharding: NamedSharding, name: Any) -> int:
    """Into how many parts an entry of a PartitionSpec cuts an axis."""
    names = name if isinstance(name, tuple) else (name,)
    return math.prod(sharding.mesh.shape[axis] for axis in names if axis is not None)
