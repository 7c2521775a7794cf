"""One weight in 8 bits: its codes, scale and zero point, checked against the configuration."""

from __future__ import annotations

import functools
from typing import NoReturn

import numpy as np

from jaxfp8._value import dtypes
from jaxfp8._value.spec import Shape
from jaxfp8.checkpoint import _dtypes, _names
from jaxfp8.checkpoint._errors import CheckpointError
from jaxfp8.checkpoint._folder import Folder
from jaxfp8.checkpoint._grain import EXPONENTS, FP8, Grain, grain
from jaxfp8.checkpoint._header import Entry
from jaxfp8.checkpoint._items import Item, Layout, Part
from jaxfp8.checkpoint._names import Kind
from jaxfp8.checkpoint._scheme import Format, Scheme

# The tensors of a weight by role.
Group = dict[str, list[tuple[Kind, Entry]]]

INTS = ("I8", "U8")
EIGHT_BIT = (*FP8, *INTS)
# Roles of tensors that a weight needs alone.
OWN = (_names.SHAPE, _names.ORDER, _names.LAYOUT, _names.ZERO_POINT)
AGAIN = "fetch all files again"
RAW = "read its bytes with `jaxfp8.checkpoint.open(path).raw(name)`"
RENAME = f"rename it if codes times scale are the weight, or {RAW}"
OTHER_WRITER = "load an FP8 or int8 version by another program, such as llm-compressor"
_UNSCALED = f"load it with `unscaled=True` if its values are meant as they are, or {RAW}"
# The roles of most groups: nothing else is to check.
_PAIR = (_names.CODES, _names.SCALE)
_FLOAT32 = np.dtype(np.float32)
_SCALES = ("F32", "F16", "BF16", *EXPONENTS)
_CODES_OF = {"float": FP8, "int": INTS, "": EIGHT_BIT}


def item(
    name: str,
    codes: tuple[Kind, Entry],
    group: Group,
    form: Format,
    folder: Folder,
    unscaled: bool,
    like: str | None,
) -> Item:
    """The weight of a group.

    Args:
      name: its name.
      codes: the tensor of its codes.
      group: all its tensors.
      form: the configuration.
      folder: the open files.
      unscaled: whether codes without a scale are values.
      like: a tensor that looks like the scale; None if the scale is known, or there is none.

    Raises:
      CheckpointError: the tensors contradict each other or the configuration.
    """
    kind, entry = codes
    value = _value(kind, entry, group, folder)
    scale = _scale(entry, name, group)
    if scale is None and unscaled and like is None and entry.code in FP8:
        return _unscaled(name, value)
    forms = _forms(value, name, form, scale is not None)
    if scale is None:
        _refuse_misfit(value, forms, group)
        refuse_bare(entry, name, like, folder)
    fit = _fit(forms, _code(value), value.shape, scale[1].code, scale[1].shape)
    if fit is None:
        _refuse_misfit(value, forms, group)
        _refuse_scale(value, scale[1], forms)
    scheme, found = fit
    if value.dtype not in dtypes.EIGHT_BIT:
        needs = f"{dtypes.names(dtypes.EIGHT_BIT)} is needed"
        remedy = "convert the checkpoint to float8_e4m3fn"
        _refuse(entry, f"has dtype {value.dtype.name}", needs, remedy)
    if entry.code == "U8" and not scheme.kind and _names.ZERO_POINT not in group:
        needs = "unsigned codes have a zero point, and bytes may be FP8"
        _refuse(entry, f"is {entry} without a zero point", needs, f"its meaning is unknown: {RAW}")
    zero = None
    if len(group) > len(_PAIR) or scheme.static or scheme.ordered or scheme.zero_point:
        _check_static(entry, name, scheme, group)
        _check_layout(group, folder)
        _check_order(value, scheme, found, group, folder)
        zero = _zero_point(value, scheme, scale[1], found.shape, group, folder)
    part = Part(scale[1], found.dtype, found.shape, scale[0].decode)
    writer = scale[0].writer or kind.writer
    inputs = (scheme.activations, scheme.inputs)
    layout = Layout(value, part, zero, found.tiles, found.words, *inputs, writer=writer)
    return layout.item(name)


def _value(kind: Kind, entry: Entry, group: Group, folder: Folder) -> Part:
    """The codes."""
    if kind.decode != "packed":
        return Part(entry, _dtypes.BY_CODE[entry.code], entry.shape)
    stated = group.get(_names.SHAPE, ())
    if not stated or stated[0][1].shape != (len(entry.shape),) or not entry.shape:
        needs = f"its shape is needed, named {entry.name.removesuffix('packed') + 'shape'!r}"
        _refuse(entry, f"is {entry}, codes in words", needs, AGAIN)
    shape = tuple(int(n) for n in folder.values(stated[0][1]))
    bits = 32 * entry.shape[-1] // shape[-1] if shape[-1] > 0 else 0
    if shape[:-1] != entry.shape[:-1] or entry.shape[-1] != -(-shape[-1] // _dtypes.IN_A_WORD):
        needs = f"{list(shape)} in 8 bits takes {_dtypes.IN_A_WORD} codes a word"
        remedy = "load a version of the model in 8 bits"
        _refuse(entry, f"is {entry}, about {bits} bits for each of {list(shape)}", needs, remedy)
    return Part(entry, np.dtype(np.int8), shape, kind.decode)


def _scale(entry: Entry, name: str, group: Group) -> tuple[Kind, Entry] | None:
    """The scale of a weight: one at most, of a certain name if there is such a one."""
    if _names.SMOOTHING in group:
        other = group[_names.SMOOTHING][0][1]
        needs = "inputs would have to be multiplied by it before the product"
        remedy = "load an export without SmoothQuant, such as ModelOpt's FP8 or W8A16, or " + RAW
        _refuse(other, f"smooths the input of {name!r}", needs, remedy)
    scales = group.get(_names.SCALE, [])
    if len(scales) == 1 and scales[0][0].certain:
        return scales[0]
    scales = [one for one in scales if serves(one[0], entry)]
    if len(scales) > 1:
        scales = [one for one in scales if one[0].certain] or scales
    return _one(entry, scales, "scale")


def serves(kind: Kind, entry: Entry) -> bool:
    """Whether a scale of that name can be of these codes: some writers have FP8 alone."""
    return kind.certain or kind.writer != "DeepSeek" or entry.code in FP8


def _one(entry: Entry, fitting: list[tuple[Kind, Entry]], what: str) -> tuple[Kind, Entry] | None:
    if len(fitting) > 1:
        names = " and ".join(repr(one.name) for _, one in fitting)
        _refuse(entry, f"has the {what}s {names}", "one is needed", "remove the other")
    return fitting[0] if fitting else None


def _unscaled(name: str, value: Part) -> Item:
    """Codes as values: their scale is 1."""
    one = Part(value.entry, _FLOAT32, (), "one")
    return Layout(value, one, None, None, "none in the file: 1", "not stated").item(name)


def _forms(value: Part, name: str, form: Format, has_scale: bool) -> tuple[Scheme, ...]:
    """The forms of a weight in the config."""
    module, entry = _names.module_of(name), value.entry
    skipped = form.skips(module)
    if skipped is not None:
        needs = f"the config's {form.skip_key!r} has {skipped!r}, which leaves it in floats"
        remedy = "remove the entry, if the weight is meant to be in 8 bits"
        _refuse_wide(entry, needs, remedy, has_scale)
    forms = form.forms(module)
    if not forms:
        needs = "no group of the config is for its module"
        _refuse_wide(entry, needs, "add it to the config", has_scale)
    return forms


def _refuse_wide(entry: Entry, needs: str, remedy: str, has_scale: bool) -> NoReturn:
    """Refuses codes of a module in floats. Without a scale, no other config would do."""
    if not has_scale:
        remedy = _UNSCALED if entry.code in FP8 else f"fetch the file again, or {RAW}"
    _refuse(entry, f"is {entry}" + " without a scale" * (not has_scale), needs, remedy)


@functools.lru_cache(maxsize=1 << 12)
def _fit(
    forms: tuple[Scheme, ...], code: str, shape: Shape, scale_code: str, scale: Shape
) -> tuple[Scheme, Grain] | None:
    """The first form that fits a weight and its scale."""
    for scheme in forms:
        if code in _CODES_OF[scheme.kind]:
            found = grain(shape, code, scale, scale_code, scheme)
            if isinstance(found, Grain):
                return scheme, found
    return None


def _refuse_misfit(value: Part, forms: tuple[Scheme, ...], group: Group) -> None:
    """Refuses codes of a dtype that no form has."""
    code, entry = _code(value), value.entry
    if not any(code in _CODES_OF[scheme.kind] for scheme in forms):
        pairs = code in INTS and any(e.code == "F8_E8M0" for _, e in group.get(_names.SCALE, ()))
        got = f"is {entry}" + (" beside exponents, as pairs of FP4 are" if pairs else "")
        wanted = _CODES_OF[forms[0].kind][:2]
        needs = f"the config says {forms[0].kind}, which is {' or '.join(wanted)}"
        _refuse(entry, got, needs, f"its meaning is unknown: {RAW}")


def _refuse_scale(value: Part, scale: Entry, forms: tuple[Scheme, ...]) -> NoReturn:
    """Refuses a scale that fits no form."""
    if scale.code not in _SCALES:
        needs = f"{dtypes.names(dtypes.SCALE)} is needed"
        _refuse(scale, f"is a scale of dtype {scale.code}", needs, f"convert it, or {RAW}")
    code = _code(value)
    scheme = next(scheme for scheme in forms if code in _CODES_OF[scheme.kind])
    misfit = grain(value.shape, code, scale.shape, scale.code, scheme)
    got = f"is a scale of shape {list(scale.shape)} in {scale.code}"
    remedy = f"fetch it again, mend the config, or {RAW}"
    _refuse(scale, got, f"{value.entry.name!r}, {misfit}", remedy)


def _code(value: Part) -> str:
    """The dtype of codes; those in words are int8."""
    return "I8" if value.decode else value.entry.code


def refuse_bare(entry: Entry, name: str, like: str | None, folder: Folder) -> NoReturn:
    """Refuses codes without a scale."""
    got = f"is {entry} without a scale"
    needs = f"a scale is needed, named {_names.spellings(name)}"
    if like is not None:
        got, remedy = f"{got} of a known name; {like!r} looks like one", RENAME
    elif folder.is_part:
        remedy = "name the folder instead: its scale may lie in another of the model's files"
    else:
        remedy = _UNSCALED if entry.code in FP8 else RAW
    _refuse(entry, got, needs, remedy)


def _check_layout(group: Group, folder: Folder) -> None:
    for _, entry in group.get(_names.LAYOUT, ()):
        if not folder.is_zero(entry):
            needs, remedy = "weights in rows, 0, are read", "save the model again"
            _refuse(entry, "says that codes lie in the order of a kernel", needs, remedy)


def _check_static(entry: Entry, name: str, scheme: Scheme, group: Group) -> None:
    if scheme.static and _names.INPUT_SCALE not in group:
        wanted = f"{name}_input_scale"
        if _names.last(name) == "weight":
            wanted = name.removesuffix("weight") + "input_scale"
        needs = f"the config says static activations, so {wanted!r} is needed"
        remedy = f"{AGAIN}, or set the config's activations to dynamic"
        _refuse(entry, "has no input scale", needs, remedy)


def _check_order(value: Part, scheme: Scheme, found: Grain, group: Group, folder: Folder) -> None:
    """Refuses groups along K of columns that are not neighbours."""
    stated = group.get(_names.ORDER, ())
    if scheme.ordered and not stated:
        needs = "the config says actorder, so the group of each column is needed"
        _refuse(value.entry, "has no weight_g_idx", needs, AGAIN)
    for _, entry in stated:
        order, depth = folder.values(entry).reshape(-1), value.shape[-1]
        count = found.shape[-1] if found.shape else 1
        neighbours = np.arange(depth) // max(-(-depth // count), 1)
        # Writers store -1 for columns in order.
        if not (order == -1).all() and not np.array_equal(order, neighbours):
            needs = "one scale serves neighbouring columns"
            remedy = f"quantize the model without actorder, or with actorder 'weight', or {RAW}"
            _refuse(entry, "puts columns that are no neighbours in one group", needs, remedy)


def _zero_point(
    value: Part,
    scheme: Scheme,
    scale: Entry,
    shape: Shape,
    group: Group,
    folder: Folder,
) -> Part | None:
    stated = _one(value.entry, group.get(_names.ZERO_POINT, []), "zero point")
    if stated is None:
        if scheme.kind == "int" and scheme.zero_point:
            needs = "the config says that weights are not symmetric, so it needs one"
            _refuse(value.entry, "has no zero point", needs, AGAIN)
        return None
    zero, own, decode = stated[1], value.dtype, value.decode
    if not decode and folder.is_zero(zero):
        return None
    if decode and zero.code == "I32" and zero.shape == _packed_rows(scale.shape):
        return Part(zero, own, shape, "packed rows")
    dtype = _dtypes.BY_CODE.get(zero.code)
    if own in dtypes.FLOAT8 or dtype is None or dtype not in (own, dtypes.INT32):
        needs = f"a weight of dtype {own.name} has " + (
            "none" if own in dtypes.FLOAT8 else f"one of dtype {own.name} or int32"
        )
        _refuse(zero, f"is a zero point of dtype {zero.code}", needs, "remove it, or convert it")
    if zero.shape != scale.shape:
        got, needs = f"has shape {list(zero.shape)}", f"its scale has {list(scale.shape)}"
        _refuse(zero, got, needs, "fetch it again")
    return Part(zero, dtype, shape)


def _packed_rows(shape: Shape) -> Shape | None:
    """The shape of zero points [N, G] of which four along N share a word."""
    return (*shape[:-2], -(-shape[-2] // _dtypes.IN_A_WORD), shape[-1]) if len(shape) > 1 else None


def _refuse(entry: Entry, got: str, needs: str, remedy: str) -> NoReturn:
    raise CheckpointError(entry.file, entry.name, got, needs, remedy)
