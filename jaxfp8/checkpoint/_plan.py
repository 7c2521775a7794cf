"""From tensors to arrays: groups the tensors of each weight, and finds contradictions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import jax
import numpy as np

from jaxfp8._value import dtypes
from jaxfp8._value.qarray import QArray
from jaxfp8._value.scales import granularity
from jaxfp8._value.spec import Shape
from jaxfp8.checkpoint import _dtypes, _names
from jaxfp8.checkpoint._errors import CheckpointError
from jaxfp8.checkpoint._formats import Format, Scheme
from jaxfp8.checkpoint._header import Entry

_FNUZ = ("F8_E4M3FNUZ", "F8_E5M2FNUZ")
_WIDE = ("F64", "F32", "F16", "BF16")
_FP8 = ("F8_E4M3", "F8_E5M2", *_FNUZ)
_RAW = "read its bytes with `jaxfp8.checkpoint.open(path).raw(name)`"
_BLOCK = (128, 128)
_MX_GROUP = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One array: a tensor of a file, maybe seen with another dtype or shape of equal size.

    Attributes:
      entry: the tensor.
      dtype: the dtype of its values.
      shape: the shape of the array.
    """

    entry: Entry
    dtype: np.dtype
    shape: Shape

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype alone."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """The entry of a checkpoint under one name: an array, or a weight with its scale.

    Attributes:
      name: its name.
      value: the values.
      scale, zero_point: for a weight in 8 bits; else None.
      tiles: as a `QArray` states them.
      granularity: of the scale, in words; "" for an array.
      activations: the checkpoint's treatment of the layer's input, in words.
      reason: why an array is no 8-bit weight; "" for an 8-bit weight.
    """

    name: str
    value: Part
    scale: Part | None = None
    zero_point: Part | None = None
    tiles: tuple[int | None, ...] | None = None
    granularity: str = ""
    activations: str = ""
    reason: str = ""

    @property
    def parts(self) -> tuple[Part, ...]:
        """All arrays of it."""
        return tuple(p for p in (self.value, self.scale, self.zero_point) if p is not None)

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return sum(part.entry.nbytes for part in self.parts)

    def struct(self) -> jax.ShapeDtypeStruct | QArray:
        """Shapes and dtypes alone."""
        if self.scale is None:
            return self.value.struct
        zero = None if self.zero_point is None else self.zero_point.struct
        leaves: tuple = self.value.struct, self.scale.struct, zero
        return QArray(*leaves, tiles=self.tiles)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a checkpoint becomes arrays.

    Attributes:
      items: all entries by name.
      problems: contradictions; a checkpoint with any is not loaded.
    """

    items: dict[str, Item]
    problems: tuple[CheckpointError, ...]


def plan(entries: dict[str, Entry], form: Format, is_zero: Callable[[Entry], bool]) -> Plan:
    """Puts weights, scales and zero points together.

    Args:
      entries: all tensors by name.
      form: their configuration.
      is_zero: whether all values of a tensor are 0. Such zero points are left out: they change no
        value, and each product would subtract them. The files alone decide, so every host of a
        cluster does the same.
    """
    items: dict[str, Item] = {}
    problems: list[CheckpointError] = []
    used: set[str] = set()
    for entry in entries.values():
        try:
            if _is_weight(entry, entries, form):
                item = _weight(entry, entries, form, is_zero)
                used |= {part.entry.name for part in item.parts}
                used |= {*_names.first(_names.zero_points(item.name), entries)}
                _add(items, item)
        except CheckpointError as error:
            problems.append(error)
            used |= {entry.name, *_names.scales(_names.weight_name(entry.name))}
    for entry in entries.values():
        try:
            if entry.name not in used and not _names.is_marker(entry.name):
                _add(items, _array(entry, entries, form))
        except CheckpointError as error:
            problems.append(error)
    order = {name: place for place, name in enumerate(entries)}
    ordered = sorted(items.values(), key=lambda item: order[item.value.entry.name])
    return Plan(items={item.name: item for item in ordered}, problems=tuple(problems))


def _add(items: dict[str, Item], item: Item) -> None:
    if item.name in items:
        other = items[item.name].value.entry.name
        entry = item.value.entry
        found, needs = f"would be loaded as {item.name!r}", f"so would {other!r}"
        raise CheckpointError(entry.file, entry.name, found, needs, "remove one of them")
    items[item.name] = item


def _is_weight(entry: Entry, entries: dict[str, Entry], form: Format) -> bool:
    """Whether a tensor has to be a weight in 8 bits: by its dtype, its scale or the config."""
    if _names.is_marker(entry.name) or _names.is_for_a_weight(entry.name):
        return False
    if entry.code in _FP8:
        return True
    if entry.code not in ("I8", "U8"):
        return False
    name = _names.weight_name(entry.name)
    if _names.first(_names.scales(name), entries):
        return True
    # A table of bytes or a mask needs no scale; the weight of a layer named in the config does.
    module = _names.module_of(name)
    scheme = form.scheme(module) if _names.last(name) == "weight" else None
    return scheme is not None and scheme.kind != "" and form.skips(module) is None


# Weights


def _weight(
    entry: Entry, entries: dict[str, Entry], form: Format, is_zero: Callable[[Entry], bool]
) -> Item:
    name = _names.weight_name(entry.name)
    scheme = _scheme(entry, name, form)
    scale = _one(entry, _names.scales(name), entries, "scale")
    zero = _one(entry, _names.zero_points(name), entries, "zero point")
    if scale is None:
        needs = f"a scale is needed, named {' or '.join(map(repr, _names.scales(name)[:3]))}"
        raise CheckpointError(entry.file, entry.name, f"is {entry} without a scale", needs, _RAW)
    if scheme.static and not _names.first(_names.input_scales(name), entries):
        needs = f"the config says static activations, so {_names.input_scales(name)[0]!r} is needed"
        remedy = "fetch all files again, or set the config's activations to dynamic"
        raise CheckpointError(entry.file, entry.name, "has no input scale", needs, remedy)
    dtype = _dtypes.BY_CODE[entry.code]
    if dtype not in dtypes.EIGHT_BIT:
        needs = f"{dtypes.names(dtypes.EIGHT_BIT)} is needed"
        remedy = "convert the checkpoint to float8_e4m3fn"
        raise CheckpointError(entry.file, entry.name, f"has dtype {dtype.name}", needs, remedy)
    tiles, shape, words = _tiles(entry, scale, scheme)
    return Item(
        name=name,
        value=Part(entry=entry, dtype=dtype, shape=entry.shape),
        scale=Part(entry=scale, dtype=_scale_dtype(entry, scale, scheme, shape), shape=shape),
        zero_point=None
        if zero is not None and is_zero(zero)
        else _zero_point(entry, zero, scheme, scale, shape),
        tiles=tiles,
        granularity=words,
        activations=scheme.activations,
    )


def _scheme(entry: Entry, name: str, form: Format) -> Scheme:
    """The scheme of a weight in the config."""
    module = _names.module_of(name)
    skipped = form.skips(module)
    if skipped is not None:
        needs = f"the config's {form.skip_key!r} has {skipped!r}, which leaves it in floats"
        remedy = "remove the entry, if the weight is meant to be in 8 bits"
        raise CheckpointError(entry.file, entry.name, f"is {entry}", needs, remedy)
    scheme = form.scheme(module)
    if scheme is None:
        needs = "no group of the config is for its module"
        raise CheckpointError(entry.file, entry.name, f"is {entry}", needs, "add it to the config")
    expected = {"float": _FP8, "int": ("I8", "U8"), "": (*_FP8, "I8", "U8")}[scheme.kind]
    if entry.code not in expected:
        needs = f"the config says {scheme.kind}, which is {' or '.join(expected[:2])}"
        remedy = f"its meaning is unknown: {_RAW}"
        raise CheckpointError(entry.file, entry.name, f"is {entry}", needs, remedy)
    return scheme


def _one(entry: Entry, names: list[str], entries: dict[str, Entry], what: str) -> Entry | None:
    """The scale or zero point of a weight; there is one at most."""
    found = _names.first(names, entries)
    if len(found) > 1:
        got = f"has the {what}s {' and '.join(map(repr, found))}"
        raise CheckpointError(entry.file, entry.name, got, "one is needed", "remove the other")
    return entries[found[0]] if found else None


def _scale_dtype(entry: Entry, scale: Entry, scheme: Scheme, shape: Shape) -> np.dtype:
    """The dtype of a scale; exponents of MX are stored as bytes too."""
    dtype = _dtypes.BY_CODE.get(scale.code)
    is_group = shape[-1:] == (-(-entry.shape[-1] // _MX_GROUP),) if entry.shape else False
    if scale.code == "U8" and entry.code in _FP8 and is_group and scheme.block in (None, (1, 32)):
        return dtypes.E8M0
    if dtype is None or dtype not in dtypes.SCALE:
        needs = f"{dtypes.names(dtypes.SCALE)} is needed"
        found = f"is a scale of dtype {scale.code}"
        raise CheckpointError(scale.file, scale.name, found, needs, f"convert it, or {_RAW}")
    return dtype


def _tiles(
    entry: Entry, scale: Entry, scheme: Scheme
) -> tuple[tuple[int | None, ...] | None, Shape, str]:
    """Tiles as a `QArray` states them, the shape of its scale, and both in words."""
    shape = entry.shape
    for words, tiles, counts in _candidates(shape, scale, scheme):
        options = {counts, _squeezed(counts)}
        if math.prod(counts) == 1:
            options |= {(), (1,)}
        if scale.shape in options:
            if math.prod(counts) == 1:
                counts = ()
            named = dict(enumerate(tiles))
            return granularity(shape, named).stated_tiles, counts, words
    wanted = [str(list(counts)) for _, _, counts in _candidates(shape, scale, scheme)]
    what = f"{scheme.granularity or 'any'}{list(scheme.block) if scheme.block else ''}"
    found = f"is a scale of shape {list(scale.shape)}"
    needs = (
        f"{entry.name!r}, {entry}, in granularity {what} needs {' or '.join(wanted) or 'two axes'}"
    )
    raise CheckpointError(
        scale.file, scale.name, found, needs, "fetch it again, or mend the config"
    )


def _candidates(shape: Shape, scale: Entry, scheme: Scheme) -> Iterator[tuple[str, Shape, Shape]]:
    """The possible granularities of a scale: in words, tiles, and shape of the scale."""
    whole = tuple(max(n, 1) for n in shape)
    if scheme.granularity in ("", "tensor"):
        yield "tensor", whole, (1,) * len(shape)
        if len(shape) > 2:  # experts, each with its own
            yield "tensor", (1, *whole[1:]), (shape[0], *(1,) * (len(shape) - 1))
    if len(shape) < 2:
        return
    batch = shape[:-2]
    ones = (1,) * len(batch)
    if scheme.granularity in ("", "channel"):
        yield "channel", (*ones, 1, whole[-1]), (*batch, shape[-2], 1)
        if batch:  # experts as [K, N]
            yield "channel", (*ones, whole[-2], 1), (*batch, 1, shape[-1])
    for block in _blocks(shape, scale, scheme):
        counts = tuple(-(-n // b) for n, b in zip(shape[-2:], block, strict=True))
        yield f"block {block[0]}x{block[1]}", (*ones, *block), (*batch, *counts)


def _blocks(shape: Shape, scale: Entry, scheme: Scheme) -> list[tuple[int, int]]:
    """Possible block sizes of a scale: the config's, else the common ones."""
    if scheme.block is not None:
        return [scheme.block]
    if scheme.granularity:
        return []
    if scale.code in ("F8_E8M0", "U8"):
        return [(1, _MX_GROUP), _BLOCK]
    exact = (
        [
            (shape[-2] // n, shape[-1] // k)
            for n, k in [scale.shape[-2:]]
            if n and k and shape[-2] % n == 0 and shape[-1] % k == 0
        ]
        if len(scale.shape) >= 2
        else []
    )
    return [_BLOCK, *exact]


def _squeezed(counts: Shape) -> Shape:
    """The shape of a scale per channel, without its last axis of size 1."""
    return counts[:-1] if counts[-1:] == (1,) else counts


def _zero_point(
    entry: Entry, zero: Entry | None, scheme: Scheme, scale: Entry, shape: Shape
) -> Part | None:
    if zero is None:
        if scheme.kind == "int" and scheme.zero_point:
            needs = "the config says that weights are not symmetric, so it needs one"
            remedy = "fetch all files again"
            raise CheckpointError(entry.file, entry.name, "has no zero point", needs, remedy)
        return None
    dtype = _dtypes.BY_CODE.get(zero.code)
    own = _dtypes.BY_CODE[entry.code]
    if own in dtypes.FLOAT8 or dtype not in (own, dtypes.INT32):
        needs = f"a weight of dtype {own.name} has " + (
            "none" if own in dtypes.FLOAT8 else f"one of dtype {own.name} or int32"
        )
        found = f"is a zero point of dtype {zero.code}"
        raise CheckpointError(zero.file, zero.name, found, needs, "remove it, or convert it")
    if zero.shape != scale.shape:
        found, needs = f"has shape {list(zero.shape)}", f"its scale has {list(scale.shape)}"
        raise CheckpointError(zero.file, zero.name, found, needs, "fetch it again")
    return Part(entry=zero, dtype=own if dtype is None else dtype, shape=shape)


# Everything else


def _array(entry: Entry, entries: dict[str, Entry], form: Format) -> Item:
    """A tensor other than an 8-bit weight, and the reason."""
    if _names.is_packed(entry.name):
        needs = "weights of 8 bits are read"
        remedy = "load a version of the model in 8 bits"
        raise CheckpointError(entry.file, entry.name, "belongs to a packed format", needs, remedy)
    if _names.is_for_a_weight(entry.name):
        needs = f"no 8-bit weight uses it{_neighbour(entry, entries)}"
        remedy = "fetch all files again, or remove it"
        raise CheckpointError(entry.file, entry.name, "is a scale or zero point", needs, remedy)
    if entry.code not in _dtypes.BY_CODE:
        needs = "no array of JAX holds it"
        raise CheckpointError(entry.file, entry.name, f"is {entry}", needs, "convert it")
    part = Part(entry=entry, dtype=_dtypes.BY_CODE[entry.code], shape=entry.shape)
    return Item(name=_names.canonical(entry.name), value=part, reason=_why_wide(entry, form))


def _neighbour(entry: Entry, entries: dict[str, Entry]) -> str:
    weight = ".".join(filter(None, [_names.module_of(entry.name), "weight"]))
    return f" ({weight!r} is {entries[weight]})" if weight in entries else ""


def _why_wide(entry: Entry, form: Format) -> str:
    if _names.canonical(entry.name) != entry.name or _names.last(entry.name) == "input_scale":
        return "a static scale of activations"
    skipped = form.skips(_names.module_of(entry.name))
    if skipped is not None:
        return f"the config's {form.skip_key!r} has {skipped!r}"
    return "in floats" if entry.code in _WIDE else f"in {entry.code}"
