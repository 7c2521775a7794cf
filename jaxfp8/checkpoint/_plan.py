"""From tensors to arrays: groups the tensors of each weight, and finds contradictions."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jaxfp8.checkpoint import _collector, _dtypes, _names, _weight
from jaxfp8.checkpoint._errors import CheckpointError
from jaxfp8.checkpoint._folder import Folder
from jaxfp8.checkpoint._header import Entry
from jaxfp8.checkpoint._items import Item, Layout, Part
from jaxfp8.checkpoint._names import Kind
from jaxfp8.checkpoint._scheme import Format
from jaxfp8.checkpoint._weight import AGAIN, FP8, INTS, RAW, Group

# Words of several codes. A weight of such words has a scale; an index or a position has none.
_WORDS = ("I16", "U16", "I32", "U32", "I64", "U64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a checkpoint becomes arrays.

    Attributes:
      items: all entries by name.
      problems: contradictions; a checkpoint with any is not loaded.
      unread: the tensors without an item, because of these.
    """

    items: dict[str, Item]
    problems: tuple[CheckpointError, ...]
    unread: tuple[Entry, ...]


def plan(folder: Folder, form: Format, *, unscaled: bool = False) -> Plan:
    """Puts weights, scales and zero points together.

    Args:
      folder: the open files. The values of some small tensors are read. Zero points that are all 0
        are left out: they change no value, and each product would subtract them. The files alone
        decide, so every host of a cluster does the same.
      form: the configuration.
      unscaled: whether FP8 tensors without a scale are read as they are.
    """
    planning = _Planning(folder, form, unscaled)
    problems: list[CheckpointError] = []
    suspects: list[Entry] = []
    with _collector.paused():
        for name, tensors in _grouped(folder.entries).items():
            try:
                planning.add(name, tensors)
            except CheckpointError as error:
                problems.append(error)
                suspects += [entry for _, entry in tensors]
    items = planning.items
    read = {e.name for item in items.values() for e in item.entries} if suspects else ()
    unread = tuple(entry for entry in suspects if entry.name not in read)
    return Plan(items=items, problems=tuple(problems), unread=unread)


def _grouped(entries: Mapping[str, Entry]) -> dict[str, list[tuple[Kind, Entry]]]:
    """The tensors of each weight by its name."""
    groups: dict[str, list[tuple[Kind, Entry]]] = collections.defaultdict(list)
    kind_of = _names.kind
    for name, entry in entries.items():
        start = name.rfind(".") + 1
        kind = kind_of(last := name[start:])
        if kind.weight == last:
            weight = name
        else:
            weight = _names.module_of(name) if kind.weight is None else name[:start] + kind.weight
            short = weight.removesuffix("_weight")  # ModelOpt's "experts.up_proj_weight_scale"
            weight = short if weight not in entries and short in entries else weight
        groups[weight].append((kind, entry))
    return groups


def _by_role(tensors: list[tuple[Kind, Entry]]) -> Group:
    group: Group = collections.defaultdict(list)
    for one in tensors:
        group[one[0].role].append(one)
    return dict(group)


class _Planning:
    """A plan in the making.

    Attributes:
      items: as in `Plan`.
    """

    def __init__(self, folder: Folder, form: Format, unscaled: bool) -> None:
        self.items: dict[str, Item] = {}
        # By all that the layout of a checked weight depends on.
        self._pairs: dict[tuple[Any, ...], Layout] = {}
        self._folder, self._form, self._unscaled = folder, form, unscaled

    def add(self, name: str, tensors: list[tuple[Kind, Entry]]) -> None:
        """Adds the weight of these tensors, and the others as arrays."""
        if len(tensors) != 2:
            return self._add(name, _by_role(tensors))
        # Thousands of experts are alike: the first one is checked for all.
        (kind, value), (scale_kind, scale) = tensors
        if kind.role == _names.SCALE:
            kind, value, scale_kind, scale = scale_kind, scale, kind, value
        module = _names.module_of(name)
        form = self._form.forms(module), self._form.skips(module) is None
        key = (kind, value[2:4], scale_kind, scale[2:4], *form)
        if (like := self._pairs.get(key)) is not None and name not in self.items:
            self.items[name] = tuple.__new__(Item, (name, like, (value, scale)))
            return
        self._add(name, _by_role(tensors))
        made = self.items.get(name)
        if made is not None and made.entries == (value, scale):
            self._pairs[key] = made.layout

    def _add(self, name: str, group: Group) -> None:
        for kind, entry in group.get(_names.PART_OF_FEWER_BITS, ()):
            _refuse_packed(kind, entry)
        codes = self._codes(name, group)
        used: list[int] = []
        if codes is not None:
            like = self._like_a_scale(codes[1]) if _names.SCALE not in group else None
            item = _weight.item(name, codes, group, self._form, self._folder, self._unscaled, like)
            self._put(item)
            used = [*map(id, item.entries)]
        for role, found in group.items():
            if role == _names.MARK or (used and role in _weight.OWN):
                continue
            for kind, entry in found:
                if id(entry) not in used:
                    self._put(self._array(kind, entry, group))

    def _codes(self, name: str, group: Group) -> tuple[Kind, Entry] | None:
        """The codes of the weight of a group, if it is in 8 bits."""
        codes = None
        for kind, entry in group.get(_names.CODES, ()):
            if entry.code not in _dtypes.FLOATS and self._is_weight(name, group, kind, entry):
                if codes is not None:
                    _refuse_twice(name, entry, codes[1])
                codes = kind, entry
        return codes

    def _put(self, item: Item) -> None:
        if item.name in self.items:
            _refuse_twice(item.name, item.entries[0], self.items[item.name].entries[0])
        self.items[item.name] = item

    def _is_weight(self, name: str, group: Group, kind: Kind, entry: Entry) -> bool:
        """Whether a tensor has to be a weight in 8 bits: by its dtype, its scale or the config."""
        if kind.decode == "packed":
            return entry.code == "I32"
        scales = group.get(_names.SCALE, ())
        if entry.code in FP8:
            is_plain = entry.name in self._folder.arrays
            return bool(scales) or (not is_plain and (len(entry.shape) > 1 or not self._unscaled))
        if entry.code not in INTS:
            return False
        if any(_weight.serves(kind, entry) for kind, _ in scales):
            return True
        if entry.name in self._folder.arrays:
            return False
        # A table of bytes or a mask needs no scale. The weight of a layer does: the config states
        # the form of some and leaves the others in floats, or quantizes the cache alone.
        schemes = self._form.schemes
        return _names.last(name) == "weight" and (not schemes or any(s.kind for s in schemes))

    def _array(self, kind: Kind, entry: Entry, group: Group) -> Item:
        """A tensor other than an 8-bit weight, and the reason."""
        by = f" of {kind.writer}" if kind.writer else ""
        if kind.certain and kind.decode == "packed":
            _refuse_packed(kind, entry)
        if kind.certain and kind.role != _names.CODES:
            needs = f"no 8-bit weight uses it{_neighbour(group)}"
            what = "scale or zero point" if kind.role in _USUAL else kind.role
            got = f"is a {what}{by}"
            raise CheckpointError(entry.file, entry.name, got, needs, f"{AGAIN}, or remove it")
        if entry.code not in _dtypes.BY_CODE:
            why = _dtypes.why_not(entry.code)
            raise CheckpointError(entry.file, entry.name, f"is {entry}", *why)
        is_plain = entry.name in self._folder.arrays
        like = None if is_plain else self._like_a_scale(entry)
        if entry.code in FP8 and not (is_plain or self._unscaled):
            _weight.refuse_bare(entry, entry.name, like, self._folder)
        if like is not None:
            sign = _names.sign(entry.name, like)
            if self._folder.entries[like].code == "F8_E8M0":
                sign = "exponents, as pairs of FP4 have"
            by = f" ({sign})" if sign else ""
            got = f"is {entry}, and {like!r} beside it looks like its scale{by}"
            needs = f"codes are read with their scale alone, named {_names.spellings(entry.name)}"
            raise CheckpointError(entry.file, entry.name, got, needs, _weight.RENAME)
        if (weight := self._changed_by(entry.name)) is not None:
            needs = f"it is unknown how that changes {weight!r} beside it"
            got = f"is {entry}, of an unread format"
            raise CheckpointError(entry.file, entry.name, got, needs, f"{_UNREAD}, or {RAW}")
        part = Part(entry, _dtypes.BY_CODE[entry.code], entry.shape)
        layout = Layout(part, reason=self._why_wide(kind, entry), writer=kind.writer)
        return layout.item(_names.canonical(entry.name))

    def _like_a_scale(self, entry: Entry) -> str | None:
        """A tensor beside codes that looks like their scale."""
        is_codes = entry.code in _weight.EIGHT_BIT
        if not is_codes and not (entry.code in _WORDS and "weight" in _names.last(entry.name)):
            return None
        beside = self._by_module
        modules = (entry.name, f"{entry.name}{_names.OF_QUANTIZER}")
        others = [*beside[_names.module_of(entry.name)]]
        others += (name for module in modules for name in beside.get(module, ()))
        like = _names.looks_like_scale_of
        return next((n for n in others if n != entry.name and like(entry.name, n)), None)

    def _changed_by(self, name: str) -> str | None:
        """The weight in 8 bits that a tensor of unknown meaning may change, if there is one."""
        module, ending = _names.module_of(name), _names.last(name)
        weights = [module]  # "layer.weight.offset"
        if _names.last(module).startswith("weight_"):  # "layer.weight_quantizer._amax"
            weights.append(_names.joined(_names.module_of(module), "weight"))
        if _names.may_change(ending):  # "layer.weight_offset", "experts.up_proj_offset"
            beside = ("weight", ending.rpartition("_")[0])
            weights += [_names.joined(module, last) for last in beside]
        entries = self._folder.entries
        found = (entries[weight] for weight in weights if weight in entries)
        codes = (e.name for e in found if e.code in _weight.EIGHT_BIT)
        return next((n for n in codes if n not in self._folder.arrays), None)

    @functools.cached_property
    def _by_module(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = collections.defaultdict(list)
        for name in self._folder.entries:
            found[_names.module_of(name)].append(name)
        return found

    def _why_wide(self, kind: Kind, entry: Entry) -> str:
        if _names.is_for_cache(entry.name):
            return "a scale of attention or its cache"
        if kind.role in _names.OF_ACTIVATIONS:
            return _names.OF_ACTIVATIONS[kind.role]
        skipped = self._form.skips(_names.module_of(entry.name))
        if skipped is not None:
            return f"the config's {self._form.skip_key!r} has {skipped!r}"
        return "in floats" if entry.code in _dtypes.FLOATS else f"in {entry.code}"


_UNREAD = "remove it from the file if it does not"
_USUAL = (_names.SCALE, _names.ZERO_POINT)


def _refuse_twice(name: str, entry: Entry, other: Entry) -> None:
    got, needs = f"would be loaded as {name!r}", f"so would {other.name!r}"
    raise CheckpointError(entry.file, entry.name, got, needs, "remove one of them")


def _refuse_packed(kind: Kind, entry: Entry) -> None:
    needs, remedy = "codes of 8 bits with plain scales are read", _weight.OTHER_WRITER
    got = "belongs to a packed format" + (f" of {kind.writer}" if kind.writer else "")
    raise CheckpointError(entry.file, entry.name, got, needs, remedy)


def _neighbour(group: Group) -> str:
    return "".join(f" ({e.name!r} is {e})" for _, e in group.get(_names.CODES, ()))
