"""The rows as they are printed: equal ones together, in words that fit a column."""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Iterator

from jaxfp8._rewrite.ir.sites import IN_ONE_CALL
from jaxfp8._rewrite.report.model import Findings, Operand, Site
from jaxfp8._value import tables

_SHORT = {"bfloat16": "bf16", "float32": "f32", "float16": "f16", "float64": "f64"}
_SHORT |= {"float8_e4m3fn": "f8_e4m3fn", "float8_e5m2": "f8_e5m2"}
_AT_RUN_TIME = "chosen at run time, for the GPU found"
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")

HEAD = ("", "where", "product", "becomes, or why not")


def rows(report: Findings) -> list[tables.Row]:
    """The rows of a report, equal ones together, in the order of their first ones."""
    groups: dict[object, list[Site]] = {}
    for site in (*report.sites, *report.calls):
        alike = dataclasses.replace(
            site, path=tables.numberless(site.path), platforms={}, kernels={}
        )
        key = (*vars(alike).values(),)[:-2]
        groups.setdefault((key, tuple(_kernels(site))), []).append(site)
    return [_cells(sites) for sites in groups.values()]


def _cells(sites: list[Site]) -> tables.Row:
    """The cells of the equal dots of one line of code, such as those of an unrolled model's layers.

    Digits are "*" if their paths differ in them.
    """
    site, count = sites[0], len(sites)
    status = ["no" if site.status == "missed" else "ok"]
    return [
        [*status, f"{count} x"] if count > 1 else status,
        list(_place(site, tables.starred({s.path for s in sites}))),
        [f"{_operand(site.lhs)} . {_operand(site.rhs)}", _sizes(site.dims)],
        list(_outcome(site, sum(s.widened_bytes for s in sites))),
    ]


def _place(site: Site, path: str) -> Iterator[str]:
    yield relative(site.where)
    if site.function:
        yield f"in {site.function}"
    if path:
        yield path
    if site.library:
        yield f"by {_INSTALLED.sub('', site.library)}"


def _outcome(site: Site, widened_bytes: int) -> Iterator[str]:
    epilogue = shortened(site.epilogue)
    if site.already:
        yield f"already a kernel call: {epilogue}"
    else:
        yield epilogue if site.rewritten else site.reason
    details = [*_kernels(site), *_quantized(site)]
    details += [f"saves {tables.size(widened_bytes)}"] if site.rewritten else []
    yield from details
    if site.ended_at != site.where and site.ended_at:
        yield f"at {relative(site.ended_at)}"
    if site.note:
        yield site.note
    if site.remedy:
        yield f"-> {site.remedy}"


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
            yield f"{side} quantized in one call with {operand.producer}"
        elif operand.producer:
            yield f"{side} quantized as written: {operand.producer}"


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


def headline(report: Findings) -> str:
    """Totals in a sentence."""
    saved = tables.size(report.widened_bytes)
    already = f"; {report.scaled} already scaled dots" if report.scaled else ""
    return (
        f"{report.name}: {len(report.matched)} of {len(report.sites)} dots on 8-bit data "
        f"rewritten, {saved} no longer widened; {report.others} other dots{already}"
    )


def footer(report: Findings) -> list[str]:
    """What is no dot on 8-bit data, and by platform and reason why scaled dots have no kernel."""
    counted = Counter([*_encodings(report), *_attentions(report)])
    lines = [f"{count} x {line}" if count > 1 else line for line, count in counted.items()]
    calls = (*report.matched, *report.calls)
    for platform in dict.fromkeys(p for site in calls for p in site.platforms):
        whys = [site.platforms.get(platform) for site in calls]
        counts = {why: whys.count(why) for why in whys if why is not None}
        lines += [f"on {platform}, {n} without a kernel: {why}" for why, n in counts.items()]
    return lines


def _array(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{shortened(dtype)}[{','.join(map(str, shape))}]"


def _encodings(report: Findings) -> Iterator[str]:
    """The values made and encoded in one call."""
    for one in report.encodings:
        scales = f" for {one.scales} scales" if one.scales > 1 else ""
        encoded = f"{_array(one.dtype, one.shape)} encoded{scales}"
        yield f"{relative(one.where)}: {encoded} in one call with {one.producer}"


def _attentions(report: Findings) -> Iterator[str]:
    """Attention over a float cache in one call."""
    for one in report.attentions:
        array = _array(one.dtype, one.shape)
        yield f"{relative(one.where)}: attention over {array}, {IN_ONE_CALL}"
