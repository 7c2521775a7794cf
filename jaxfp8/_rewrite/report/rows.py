"""The rows as they are printed: equal ones together, in words that fit a column."""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Iterator

from jaxfp8._rewrite.report.model import Findings, Operand, Site
from jaxfp8._value import tables

_SHORT = {"bfloat16": "bf16", "float32": "f32", "float16": "f16", "float64": "f64"}
_SHORT |= {"float8_e4m3fn": "f8_e4m3fn", "float8_e5m2": "f8_e5m2"}
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_AT_RUN_TIME = "chosen at run time, for the GPU found"
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """The equal dots of one line of code, such as those of the layers of an unrolled model.

    Attributes:
      count: how many they are.
      rewritten: whether they became scaled dots.
      already: whether the function holds them as scaled dots.
      where: "file:line", relative to the working directory where that is shorter.
      function, path, library: around that line; digits in which the paths differ are "*".
      operands: the two, as "f8_e4m3fn[64,32] per axis 1".
      sizes: "batch 2, M 4, N 32, K 64".
      outcome: what they became, or why not.
      ended: "file:line" of the operation that ended the fact, if it is another line.
      remedy: what to change.
      note: what its scales cost.
      mesh: how it is split over a mesh, and what it sends.
      kernels: "cpu: avx512_bf16" for each platform.
      quantized: on a GPU, what becomes of each operand that the function quantises itself.
      saved: how much is, or would be, no longer widened.
    """

    count: int
    rewritten: bool
    already: bool
    where: str
    function: str
    path: str
    library: str
    operands: tuple[str, str]
    sizes: str
    outcome: str
    ended: str
    remedy: str
    note: str
    mesh: str
    kernels: tuple[str, ...]
    quantized: tuple[str, ...]
    saved: str


def rows(report: Findings) -> list[Row]:
    """The rows of a report, equal ones together, in the order of their first ones."""
    groups: dict[object, list[Site]] = {}
    for site in (*report.sites, *report.calls):
        alike = dataclasses.replace(
            site, path=tables.numberless(site.path), platforms={}, kernels={}
        )
        key = (*vars(alike).values(),)[:-2]
        groups.setdefault((key, tuple(_kernels(site))), []).append(site)
    return [_row(sites) for sites in groups.values()]


def _row(sites: list[Site]) -> Row:
    site, paths = sites[0], {s.path for s in sites}
    return Row(
        count=len(sites),
        rewritten=site.rewritten,
        already=site.already,
        where=relative(site.where),
        function=site.function,
        path=tables.starred(paths),
        library=_INSTALLED.sub("", site.library),
        operands=(_operand(site.lhs), _operand(site.rhs)),
        sizes=_sizes(site.dims),
        outcome=_outcome(site),
        ended=relative(site.ended_at) if site.ended_at != site.where else "",
        remedy=site.remedy,
        note=site.note,
        mesh=site.mesh,
        kernels=tuple(_kernels(site)),
        quantized=tuple(_quantized(site)),
        saved=size(sum(s.widened_bytes for s in sites)),
    )


def _outcome(site: Site) -> str:
    epilogue = shortened(site.epilogue)
    if site.already:
        return f"already a kernel call: {epilogue}"
    return epilogue if site.rewritten else site.reason


def _operand(operand: Operand) -> str:
    shape = ",".join(map(str, operand.shape))
    zero = ", zero point" if operand.zero_point else ""
    scale = f" {operand.scale}{zero}" if operand.eight_bit else ""
    return f"{shortened(operand.dtype)}[{shape}]{scale}"


def _sizes(dims: tuple[int, int, int, int]) -> str:
    batch, *matrix = ("?" if n < 0 else str(n) for n in dims)
    before = "" if batch == "1" else f"batch {batch}, "
    return before + ", ".join(f"{name} {n}" for name, n in zip("MNK", matrix, strict=True))


def _kernels(site: Site) -> list[str]:
    """For each platform its kernel, in words. The footer says why there is none."""
    return [
        f"{name}: " + ("no kernel" if why else site.kernels.get(name) or _AT_RUN_TIME)
        for name, why in site.platforms.items()
    ]


def _quantized(site: Site) -> Iterator[str]:
    for side, operand in (("left", site.lhs), ("right", site.rhs)):
        if operand.quantized == "one call" and operand.producer:
            yield f"{side} quantised in one call with {operand.producer}"
        elif operand.producer:
            yield f"{side} quantised as written: {operand.producer}"


def shortened(text: str) -> str:
    """Text with dtypes as a printed jaxpr has them."""
    return re.sub(r"[a-z0-9_]+", lambda m: _SHORT.get(m[0], m[0]), text)


def relative(where: str) -> str:
    """A path relative to the working directory, if that is shorter."""
    try:
        seen = os.path.relpath(where)
    except ValueError:  # another drive
        return where
    return min(seen, where, key=len)


def size(number: float) -> str:
    """A number of bytes in the largest unit that is not larger than it."""
    power = 0
    while number >= 1024 and power < len(_UNITS) - 1:
        number, power = number / 1024, power + 1
    return f"{number:.1f} {_UNITS[power]}" if power else f"{number:.0f} {_UNITS[0]}"


def headline(report: Findings) -> str:
    """Totals in a sentence."""
    saved = size(report.widened_bytes)
    already = f"; {report.scaled} already scaled dots" if report.scaled else ""
    return (
        f"{report.name}: {len(report.matched)} of {len(report.sites)} dots on 8-bit data "
        f"rewritten, {saved} no longer widened; {report.others} other dots{already}"
    )


def footer(report: Findings) -> list[str]:
    """FP8 stacks, encodings, and by platform and reason why scaled dots have no kernel."""
    counted = {**_stacks(report), **_encodings(report)}
    lines = [f"{count} x {line}" if count > 1 else line for line, count in counted.items()]
    calls = (*report.matched, *report.calls)
    for platform in dict.fromkeys(p for site in calls for p in site.platforms):
        whys = [site.platforms.get(platform) for site in calls]
        counts = {why: whys.count(why) for why in whys if why is not None}
        lines += [f"on {platform}, {n} without a kernel: {why}" for why, n in counts.items()]
    return lines


def _encodings(report: Findings) -> Counter[str]:
    """What is made and encoded in one call, with the number of equal lines."""
    lines = []
    for one in report.encodings:
        array = f"{shortened(one.dtype)}[{','.join(map(str, one.shape))}]"
        scales = f" for {one.scales} scales" if one.scales > 1 else ""
        lines.append(
            f"{relative(one.where)}: {array} encoded{scales} in one call with {one.producer}"
        )
    return Counter(lines)


def _stacks(report: Findings) -> Counter[str]:
    """What becomes of each FP8 stack on the CPU, with the number of equal lines."""
    lines = []
    for stack in report.stacks:
        shape = ",".join(map(str, stack.shape))
        array = f"{shortened(stack.dtype)}[{shape}]"
        wide, at = size(stack.widened_bytes), f"{relative(stack.where)} {stack.operation}"
        made = f"in bytes; as written, XLA on the CPU makes {wide} of float16"
        left = f"XLA on the CPU makes {wide} of float16 -> {stack.remedy}"
        lines.append(f"{at}: {array} {made if stack.in_bytes else left}")
    return Counter(lines)
