"""The report: one row for each dot that 8-bit data reached, and what became of it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxfp8._call import lowering, routes
from jaxfp8._rewrite.ir import granularity, source
from jaxfp8._rewrite.ir.facts import Lost, Scaled
from jaxfp8._rewrite.ir.graph import Op, Value
from jaxfp8._rewrite.ir.sites import Seen
from jaxfp8._rewrite.ir.sites import Site as DotSite
from jaxfp8._rewrite.report import html, split, text
from jaxfp8._rewrite.rules import masks, unserved
from jaxfp8._value import dtypes
from jaxfp8._value.spec import OperandSpec, ScaledDotSpec, Shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
    """One operand of a dot, as the report tells it.

    Attributes:
      dtype: dtype of the 8-bit data, or of the array where there is none.
      shape: shape of the operand as the dot has it; a symbolic size is a string.
      scale: what scales the data: "none", "per tensor", "per axis 0", "per contracted axis 1",
        "blocks 128x128", ...
      zero_point: whether it has a zero point.
      eight_bit: whether it is 8-bit data.
      quantized: where a rewritten dot's operand is quantised by the function itself, "one call" if
        that is computed so, else "as written"; otherwise "".
    """

    dtype: str
    shape: tuple[int | str, ...]
    scale: str
    zero_point: bool
    eight_bit: bool
    quantized: str = ""

    def __str__(self) -> str:
        zero = ", zero point" if self.zero_point else ""
        made = f", quantised in {self.quantized}" if self.quantized == "one call" else ""
        scale = f" ({self.scale}{zero}{made})" if self.eight_bit else ""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{scale}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """One dot of the function.

    Attributes:
      file, line, function: the innermost frame of the user's own code.
      library: the innermost frame outside JAX, as "file:line function", where it is another.
      path: name stack of the equation, such as a module path; may be "".
      lhs, rhs: the operands.
      dims: sizes (batch, M, N, K); -1 for a symbolic one.
      rewritten: whether it became a scaled dot.
      already: whether it is one as it stands, and so a call of a kernel.
      reason: why not; "" for a rewritten one.
      remedy: what to change; "" for a rewritten one.
      note: what a rewritten one, or a call, pays for scales along a contracted axis; else "".
      mesh: how a rewritten one, or a call, is split over a mesh of explicit axes, and what it
        sends; "" elsewhere, where XLA decides.
      ended_by: the operation that stands between the 8-bit data and a scaled dot, as JAX names it;
        "dot_general" where it is the dot itself; "" for a rewritten one.
      ended_at: "file:line" of that operation; "" for a rewritten one.
      epilogue: what the scaled dot absorbed, such as "scale, bias, relu -> bfloat16".
      widened_bytes: size of the arrays that the function as written makes of the 8-bit data for
        this dot; a loop makes them in each turn, and one that something else reads is still made.
      platforms: for each platform, None where a kernel takes it, or why none does; {} for a missed
        one.
      kernels: for each platform on which a kernel takes it, the name of that kernel, as the
        platform's library tells; "" where only the device can tell.
    """

    file: str
    line: int
    function: str
    library: str
    path: str
    lhs: Operand
    rhs: Operand
    dims: tuple[int, int, int, int]
    rewritten: bool
    already: bool = False
    reason: str
    remedy: str
    ended_by: str
    ended_at: str
    epilogue: str
    note: str = ""
    mesh: str = ""
    widened_bytes: int
    platforms: dict[str, str | None]
    kernels: dict[str, str]

    @property
    def where(self) -> str:
        """The place in the user's code, as "file:line"."""
        return f"{self.file}:{self.line}"

    @property
    def status(self) -> str:
        """One of "rewritten", "missed" and "already"."""
        if self.already:
            return "already"
        return "rewritten" if self.rewritten else "missed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What `rewrite` does to a function, dot by dot.

    It prints as a table that fits the terminal, and shows itself in notebooks.

    Attributes:
      name: name of the function.
      sites: one row for each dot that 8-bit data reached, in order.
      others: how many dots never had anything to do with 8-bit data.
      calls: a row for each scaled dot that is one already, as those of `jaxfp8.matmul` are.
    """

    name: str
    sites: tuple[Site, ...]
    others: int
    calls: tuple[Site, ...] = ()

    @property
    def scaled(self) -> int:
        """How many are scaled dots already."""
        return len(self.calls)

    @property
    def matched(self) -> tuple[Site, ...]:
        """The dots that become scaled dots."""
        return tuple(site for site in self.sites if site.rewritten)

    @property
    def missed(self) -> tuple[Site, ...]:
        """The dots that stay as they are, though 8-bit data reached them."""
        return tuple(site for site in self.sites if not site.rewritten)

    @property
    def widened_bytes(self) -> int:
        """Bytes of wide arrays that the rewritten dots no longer read."""
        return sum(site.widened_bytes for site in self.matched)

    @property
    def totals(self) -> dict[str, int]:
        """Numbers of dots, by what becomes of them, and bytes."""
        return {
            "matched": len(self.matched),
            "missed": len(self.missed),
            "others": self.others,
            "scaled": self.scaled,
            "widened_bytes": self.widened_bytes,
            "still_widened_bytes": sum(site.widened_bytes for site in self.missed),
        }

    def to_json(self, indent: int | None = None) -> str:
        """The rows and totals as JSON; docs/rewrite.md describes the fields."""
        rows, calls = (
            [{"status": s.status, **dataclasses.asdict(s)} for s in sites]
            for sites in (self.sites, self.calls)
        )
        named = {"schema": SCHEMA, "name": self.name, "totals": self.totals}
        whole = {**named, "sites": rows, "calls": calls}
        return json.dumps(whole, indent=indent, allow_nan=False)

    def to_html(self) -> str:
        """The rows and totals as an HTML page of its own, which loads nothing."""
        return html.page(self)

    def _repr_html_(self) -> str:
        return html.fragment(self)

    def __rich_console__(self, console: Any, options: Any) -> Any:
        yield text.renderable(self, options.max_width)

    def __str__(self) -> str:
        return text.text(self)


# The fields of `to_json`: a new one keeps the number, a changed or missing one does not.
SCHEMA = "jaxfp8.report/1"


def report(fun: Callable[..., Any], seen: Seen) -> Report:
    """The report on the dots that a decision saw."""
    name = getattr(fun, "__name__", type(fun).__name__)
    rows, calls = tuple(map(_row, seen.sites)), tuple(map(_call_row, seen.calls))
    return Report(name=name, sites=rows, others=seen.others, calls=calls)


def _row(site: DotSite) -> Site:
    place = source.place(site.op.eqn, site.op.callers)
    call = site.call
    ended_by, ended_at = _end(site, place) if call is None else ("", "")
    return Site(
        file=place.file,
        line=place.line,
        function=place.function,
        library=place.library,
        path=source.path(site.op),
        lhs=_operand(site, 0),
        rhs=_operand(site, 1),
        dims=unserved.sizes_of(site),
        rewritten=call is not None,
        reason=site.reason,
        remedy=site.remedy,
        ended_by=ended_by,
        ended_at=ended_at,
        epilogue=_epilogue(call.spec) if call is not None else "",
        widened_bytes=sum(_widened(*given) for given in site.given),
        note=_notes(site) if call is not None else "",
        mesh=split.told(call.spec, site.op.eqn) if call is not None else "",
        **_on_platforms(call.spec if call is not None else None),
    )


def _call_row(op: Op) -> Site:
    """The row of a scaled dot as it stands in the function."""
    place, spec = source.place(op.eqn, op.callers), op.params["spec"]
    return Site(
        file=place.file,
        line=place.line,
        function=place.function,
        library=place.library,
        path=source.path(op),
        lhs=_operand_of(spec.lhs),
        rhs=_operand_of(spec.rhs),
        dims=(
            math.prod(spec.batch_shape),
            math.prod(spec.lhs.sizes(spec.lhs.free)),
            math.prod(spec.rhs.sizes(spec.rhs.free)),
            math.prod(spec.lhs.sizes(spec.lhs.contracting)),
        ),
        rewritten=False,
        already=True,
        reason="",
        remedy="",
        ended_by="",
        ended_at="",
        epilogue=_epilogue(spec),
        widened_bytes=0,
        note=_notes_of(spec),
        mesh=split.told(spec, op.eqn),
        **_on_platforms(spec),
    )


def _operand_of(side: OperandSpec) -> Operand:
    """An operand of a scaled dot as it stands."""
    eight_bit = dtypes.is_eight_bit(side.dtype)
    return Operand(
        dtype=side.dtype,
        shape=side.shape,
        scale=granularity.words(*_scale_of(side)) if eight_bit else "none",
        zero_point=side.zero_point,
        eight_bit=eight_bit,
    )


def _scale_of(side: OperandSpec) -> tuple[Shape | None, Shape, Shape]:
    """Tiles, None without a scale; the shape of the operand; its contracted axes."""
    return side.tiles if side.scale else None, side.shape, side.contracting


def _notes_of(spec: ScaledDotSpec) -> str:
    """What the scales of a call cost."""
    sides = {"left": spec.lhs, "right": spec.rhs}
    notes = [
        granularity.note(name, *_scale_of(side), eight_bit=dtypes.is_eight_bit(side.dtype))
        for name, side in sides.items()
    ]
    return "; ".join(filter(None, notes))


def _notes(site: DotSite) -> str:
    """The same by the axes of the operands as the dot has them."""
    notes = []
    for i, name in enumerate(("left", "right")):
        shape, eight_bit = site.given[i][0].shape, (site.lhs, site.rhs)[i].scaled is not None
        axes = _tiles_given(site, i), shape, site.contracting(i)
        notes.append(granularity.note(name, *axes, eight_bit=eight_bit))
    return "; ".join(filter(None, notes))


def _end(site: DotSite, place: source.Place) -> tuple[str, str]:
    """The operation that ended the trail of a missed dot, and its "file:line"."""
    if site.blame is None:
        return site.op.name, f"{place.file}:{place.line}"
    eqn, callers = site.blame
    there = source.place(eqn, callers)
    return eqn.primitive.name, f"{there.file}:{there.line}"


def _on_platforms(spec: ScaledDotSpec | None) -> dict[str, Any]:
    """Why no kernel takes a call, and which does, by platform."""
    if spec is None:
        return {"platforms": {}, "kernels": {}}
    backend = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    names = dict.fromkeys(["cpu", "cuda", backend])
    kernels = {name: routes.kernel_for(spec, name) for name in names}
    return {
        "platforms": {name: lowering.why_not(spec, name) for name in names},
        "kernels": {name: kernel for name, kernel in kernels.items() if kernel is not None},
    }


def _operand(site: DotSite, index: int) -> Operand:
    value, fact = site.given[index]
    if not isinstance(fact, Scaled):
        dtype, scale, zero = value.dtype.name, "none", False
    else:
        tiles = _tiles_found(fact) if site.call is None else _tiles_given(site, index)
        dtype, scale, zero = (
            fact.dtype.name,
            granularity.words(tiles, value.shape, site.contracting(index)),
            fact.zero_point is not None,
        )
    return Operand(
        dtype=dtype,
        shape=tuple(size if isinstance(size, int) else str(size) for size in value.shape),
        scale=scale,
        zero_point=zero,
        eight_bit=isinstance(fact, Scaled),
        quantized=site.quantized[index],
    )


def _tiles_found(fact: Scaled) -> Shape | None:
    """The tiles of the scales that were found before the dot; None without scales."""
    scales = [f.tiles for f in fact.factors if not masks.is_mask(f)]
    return tuple(map(min, zip(*scales, strict=True))) if scales else None


def _tiles_given(site: DotSite, index: int) -> Shape | None:
    """The tiles of the scale that the call gets, by the axes of the operand as the dot has it."""
    side = (site.lhs, site.rhs)[index]
    spec = (site.call.spec.lhs, site.call.spec.rhs)[index]
    if not spec.scale:
        return None
    contracting, batch = (axes[index] for axes in site.numbers)
    own = (*side.contracting, *side.batch, *spec.free)
    free = (a for a in range(len(spec.shape)) if a not in contracting and a not in batch)
    as_given = dict(zip((*contracting, *batch, *free), own, strict=True))
    return tuple(spec.tiles[as_given[axis]] for axis in range(len(spec.shape)))


def _widened(value: Value, fact: Scaled | Lost | None) -> int:
    """Bytes of the wide array that the dot reads where 8-bit data would do."""
    wide = isinstance(fact, Scaled) and value.dtype not in dtypes.EIGHT_BIT
    return value.size * np.dtype(value.dtype).itemsize if wide else 0


def _epilogue(spec: ScaledDotSpec) -> str:
    """What a scaled dot holds beside the product, in words."""
    epilogue = spec.epilogue
    parts = {
        "scale": spec.lhs.scale or spec.rhs.scale,
        "zero point": spec.lhs.zero_point or spec.rhs.zero_point,
        "residual": epilogue.residual is not None,
        "bias": epilogue.bias is not None,
        epilogue.activation: epilogue.activation != "none",
        "amax": epilogue.amax is not None,
        "out scale": epilogue.out_scale is not None,
    }
    return f"{', '.join(p for p, held in parts.items() if held)} -> {epilogue.out_dtype}".lstrip()
