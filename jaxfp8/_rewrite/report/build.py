"""Makes the report: from the dots that a walk saw to rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxfp8._call.gpu import asked
from jaxfp8._call.library import targets
from jaxfp8._call.ops import int8_form, lowering, ragged_call, routes, slower
from jaxfp8._call.ops.ragged_reference import RaggedSpec
from jaxfp8._rewrite.ir import granularity, source
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.scaled import Known, Scaled
from jaxfp8._rewrite.ir.sites import Captured, DotSite, Seen
from jaxfp8._rewrite.report import second_rounding
from jaxfp8._rewrite.report.model import EncodedValue, FloatAttention, Operand, Site
from jaxfp8._rewrite.report.report import Report
from jaxfp8._rewrite.rules import unserved
from jaxfp8._value import dtypes
from jaxfp8._value.spec import OperandSpec, ScaledDotSpec, Shape


def report_of(fun: Callable[..., Any], seen: Seen) -> Report:
    """The report on the dots of a function."""
    name = getattr(fun, "__name__", type(fun).__name__)
    rows = tuple(map(_row, seen.sites))
    calls = tuple(map(_call_row, seen.calls))
    return Report(
        name=name,
        sites=rows,
        others=seen.others,
        calls=calls,
        encodings=tuple(_encoding(op, *made) for op, made in seen.encoded.items()),
        attentions=tuple(
            FloatAttention(**_located(op), dtype=dtype.name, shape=shape)
            for op, (dtype, shape) in seen.attended.items()
        ),
    )


def _encoding(op: Op, producer: str, scales: int) -> EncodedValue:
    """A value that is made and encoded in one call."""
    dtype, shape = op.outputs[0].dtype.name, op.outputs[0].shape
    return EncodedValue(**_located(op), producer=producer, dtype=dtype, shape=shape, scales=scales)


def _located(op: Op) -> dict[str, Any]:
    """The place of an op in the user's code."""
    place = source.place(op)
    return {"file": place.file, "line": place.line, "function": place.function}


def _row(site: DotSite) -> Site:
    place = source.place(site.op)
    spec = None if site.captured is None else site.captured.spec
    is_product = spec is not None or site.terms > 0
    ended_by, ended_at = ("", "") if is_product else _end(site, place)
    return Site(
        **dataclasses.asdict(place),
        path=source.path(site.op),
        lhs=_operand(site, 0),
        rhs=_operand(site, 1),
        dims=unserved.sizes_of(site),
        rewritten=is_product,
        reason=site.reason,
        remedy=site.remedy,
        ended_by=ended_by,
        ended_at=ended_at,
        epilogue=_what_it_computes(site),
        widened_bytes=sum(_widened(*given) for given in site.given),
        out_dtype=site.op.outputs[0].dtype.name if spec is None else spec.epilogue.out_dtype,
        note=_notes(site),
        **_on_platforms(spec, cuda=_certain_path(site)),
    )


def _call_row(op: Op) -> Site:
    """The row of a scaled or ragged dot that the function holds already."""
    spec: ScaledDotSpec | RaggedSpec = op.params["spec"]
    return Site(
        **dataclasses.asdict(source.place(op)),
        path=source.path(op),
        lhs=_operand_of(spec.lhs),
        rhs=_operand_of(spec.rhs),
        dims=_dims(spec),
        rewritten=False,
        already=True,
        epilogue=_epilogue(spec),
        out_dtype=spec.epilogue.out_dtype,
        note=_notes_of(op),
        **_platforms_of(op),
    )


def _dims(spec: ScaledDotSpec | RaggedSpec) -> tuple[int, int, int, int]:
    """Batch, M, N and K; rows in groups have no batch."""
    if isinstance(spec, RaggedSpec):
        groups = 1 if spec.grouping == "rows" else spec.groups
        return groups, spec.rows, spec.columns, spec.lhs.depth
    return (
        math.prod(spec.batch_shape),
        math.prod(spec.lhs.sizes(spec.lhs.free)),
        math.prod(spec.rhs.sizes(spec.rhs.free)),
        spec.contracting_size,
    )


def _operand_of(side: OperandSpec) -> Operand:
    """An operand of a scaled dot that the function holds already."""
    eight_bit = dtypes.is_eight_bit(side.dtype)
    tiles, *axes = _scale_of(side)
    return Operand(
        dtype=side.dtype,
        shape=side.shape,
        scale=granularity.words(tiles, *axes) if eight_bit else "none",
        zero_point=side.zero_point,
        eight_bit=eight_bit,
        contracted=side.contracting,
        tiles=tiles,
    )


def _scale_of(side: OperandSpec) -> tuple[Shape | None, Shape, Shape]:
    """The tiles of the scale, the shape of the operand and its contracting axes."""
    return side.tiles if side.scale else None, side.shape, side.contracting


def _notes_of(op: Op) -> str:
    """What the scales of a call cost, a second rounding, and an epilogue outside of the call."""
    spec: ScaledDotSpec | RaggedSpec = op.params["spec"]
    sides = {"left": spec.lhs, "right": spec.rhs}
    notes = [
        granularity.note(name, *_scale_of(side), eight_bit=dtypes.is_eight_bit(side.dtype))
        for name, side in sides.items()
    ]
    notes += [second_rounding.of_call(op), _epilogue_behind(spec)]
    if not op.params.get("kernel"):
        notes.append(_only_saves_memory(spec))
    return "; ".join(filter(None, notes))


def _only_saves_memory(spec: ScaledDotSpec | RaggedSpec) -> str:
    """Whether a call is no faster than XLA's program on the target, and why; "" if it is."""
    if isinstance(spec, RaggedSpec):
        return ""
    return slower.only_saves_memory(spec, targets.platform())


def _epilogue_behind(spec: ScaledDotSpec | RaggedSpec) -> str:
    """Why XLA computes the epilogue of groups behind their call; "" if the call can have it."""
    if not isinstance(spec, RaggedSpec):
        return ""
    reason = ragged_call.why_behind(spec)
    return f"XLA computes the epilogue: {reason}" if reason is not None else ""


def _what_it_computes(site: DotSite) -> str:
    """What became of a dot, in the words of the table; "" for a missed one."""
    if site.terms:
        return f"int8 in {site.terms} terms -> {site.op.outputs[0].dtype}"
    return "" if site.captured is None else _epilogue(site.captured.spec)


def _notes(site: DotSite) -> str:
    """What the scales of a captured dot cost, by the axes of its operands; a second rounding."""
    if site.captured is None:
        return ""
    notes = []
    for i, name in enumerate(("left", "right")):
        side, shape = site.captured.sides[i], site.given[i][0].shape
        axes = _tiles_given(site, site.captured, i), shape, site.contracting(i)
        notes.append(granularity.note(name, *axes, eight_bit=side.scaled is not None))
        notes.append(granularity.note_of_multiplied(name) if side.multiplied else "")
    notes += [second_rounding.of_site(site), site.attention]
    if not site.joined and site.captured.compute is None:
        notes.append(_only_saves_memory(site.captured.spec))
    if site.multiplied:
        notes.append("one launch with another of its input, and the product of both outputs")
    elif site.joined:
        notes.append(f"one launch with {site.joined - 1} more of its input")
    return "; ".join(filter(None, notes))


def _end(site: DotSite, place: source.Place) -> tuple[str, str]:
    """The operation that ended the fact of a missed dot, and its "file:line"."""
    if site.blame is None:
        return site.op.name, f"{place.file}:{place.line}"
    there = source.place(site.blame)
    return site.blame.equation.primitive.name, f"{there.file}:{there.line}"


def _platforms_of(op: Op) -> dict[str, Any]:
    """The same as `_on_platforms` of a scaled dot that the function holds already."""
    spec: ScaledDotSpec = op.params["spec"]
    if op.params.get("kernel") != int8_form.IN_INT8:
        return _on_platforms(spec)
    path = int8_form.PATH if int8_form.in_one_call(spec) else ""
    return _on_platforms(int8_form.narrowed(spec), cuda=path)


def _certain_path(site: DotSite) -> str:
    """The path on the GPU here where the spec does not say it; "" elsewhere."""
    if site.joined > 0:
        return asked.WEIGHT_ONLY
    captured = site.captured
    if captured is None or captured.compute is None:
        return ""
    stored = captured.stored
    in_one_call = isinstance(stored, ScaledDotSpec) and int8_form.in_one_call(stored)
    return int8_form.PATH if in_one_call else ""


def _on_platforms(spec: ScaledDotSpec | RaggedSpec | None, *, cuda: str = "") -> dict[str, Any]:
    """For each platform why no kernel takes a call, and which kernel does.

    `cuda` is the path on the GPU here, if that is known already.
    """
    if spec is None:
        return {"platforms": {}, "kernels": {}}
    names = dict.fromkeys(["cpu", "cuda", targets.platform()])
    is_ragged = isinstance(spec, RaggedSpec)
    why_not: Any = ragged_call.why_not if is_ragged else lowering.why_not
    kernel_for: Any = ragged_call.kernel_for if is_ragged else routes.kernel_for
    kernels = {name: kernel_for(spec, name) for name in names} | ({"cuda": cuda} if cuda else {})
    return {
        "platforms": {name: why_not(spec, name) for name in names},
        "kernels": {name: kernel for name, kernel in kernels.items() if kernel is not None},
    }


def _operand(site: DotSite, index: int) -> Operand:
    (value, fact), summed = site.given[index], site.contracting(index)
    tiles: Shape | None = None
    if not isinstance(fact, Scaled):
        dtype, scale, zero = value.dtype.name, "none", False
    else:
        captured = site.captured
        tiles = _tiles_found(fact) if captured is None else _tiles_given(site, captured, index)
        scale = granularity.words(tiles, value.shape, summed)
        dtype, zero = fact.dtype.name, fact.zero_point is not None
    return Operand(
        dtype=dtype,
        shape=tuple(size if isinstance(size, int) else str(size) for size in value.shape),
        scale=scale,
        zero_point=zero,
        eight_bit=isinstance(fact, Scaled),
        quantized=site.quantized[index],
        producer=site.producers[index],
        contracted=summed,
        tiles=tiles,
    )


def _tiles_found(fact: Scaled) -> Shape | None:
    """The finest tiles of the scales before the dot; None without scales."""
    scales = [f.tiles for f in fact.factors if not f.is_mask]
    return tuple(map(min, zip(*scales, strict=True))) if scales else None


def _tiles_given(site: DotSite, captured: Captured, index: int) -> Shape | None:
    """The tiles of the scale that the call gets, by the axes of the operand as the dot has it."""
    side, spec = captured.sides[index], (captured.spec.lhs, captured.spec.rhs)[index]
    if not spec.scale:
        return None
    contracting, batch = (axes[index] for axes in site.numbers)
    own = (*side.contracting, *side.batch, *spec.free)
    free = (a for a in range(len(spec.shape)) if a not in contracting and a not in batch)
    as_given = dict(zip((*contracting, *batch, *free), own, strict=True))
    return tuple(spec.tiles[as_given[axis]] for axis in range(len(spec.shape)))


def _widened(value: Value, fact: Known) -> int:
    """Bytes of the wide array that the dot reads, where it is dequantized 8-bit data."""
    wide = isinstance(fact, Scaled) and value.dtype not in dtypes.EIGHT_BIT
    return value.size * np.dtype(value.dtype).itemsize if wide else 0


def _epilogue(spec: ScaledDotSpec | RaggedSpec) -> str:
    """What a scaled dot computes beside the product, in words."""
    epilogue = spec.epilogue
    parts = {
        "scale": spec.lhs.scale or spec.rhs.scale,
        "zero point": spec.lhs.zero_point or spec.rhs.zero_point,
        "residual": epilogue.residual is not None,
        "bias": epilogue.bias is not None,
        epilogue.activation: epilogue.activation != "none",
        "gate": isinstance(spec, RaggedSpec) and spec.gated,
        "row weights": isinstance(spec, RaggedSpec) and spec.weighted,
        "amax": epilogue.amax is not None,
        "out scale": epilogue.out_scale is not None,
    }
    return f"{', '.join(p for p, held in parts.items() if held)} -> {epilogue.out_dtype}".lstrip()
