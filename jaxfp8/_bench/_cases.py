"""All cases by platform: the table of docs/measured_*.md, and products of any shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

from jaxfp8._bench import _gpu_codes, _gpu_groups, _gpu_layers, _peaks, _step
from jaxfp8._bench._case import Case
from jaxfp8._bench._decoder import MODELS
from jaxfp8._bench._products import Shape, product

Named = Iterator[tuple[str, Callable[[], Case]]]

# Kinds of products for any shape.
_KINDS = {
    "cpu": ("w8a16 e4m3", "w8a16 int8", "w8a32 e4m3", "int8"),
    "cuda": ("w8a16 e4m3", "w8a16 int8", "fp8 channel", "dynamic e4m3", "int8"),
}
_SIDE = 4096
_WEIGHTS = (14336, 4096), (28672, 8192)  # N and K
_SQUARE = 8192, 8192
# Products of DeepSeek-V3.
_BLOCKS = (7168, 16384), (4096, 7168), (24576, 1536), (7168, 2048), (2112, 7168)


def shaped(platform: str, shapes: Iterable[Shape]) -> Named:
    """Each kind of product for each M, N, K."""
    for shape in shapes:
        for kind in _KINDS[platform]:
            yield _product(platform, kind, shape)


def steps(
    platform: str, kind: str, models: str, rows: Iterable[int], layers: int, cache: int
) -> Named:
    """A whole step of each decoder, with commas between, for each number of rows."""
    for model in (name.strip() for name in models.split(",")):
        if model not in MODELS:
            raise ValueError(f"--step: {model!r} is no decoder; --shapes takes {', '.join(MODELS)}")
        for m in rows:
            step = _step.Step(kind, model, m, layers, cache, platform)
            yield step.name, functools.partial(_step.case, step)


def table(platform: str, side: int = _SIDE) -> Named:
    """The standard table; on a CPU N = K = `side` unless a case's name says more."""
    return _on_cpu(side) if platform == "cpu" else _on_gpu()


def _on_cpu(side: int) -> Named:
    for kind, rows in {
        "w8a16 e4m3": (1, 16, 64, 256, 1024),
        "int8": (1, 16, 64, 256),
        "zero points int8": (1, 256),
        "zero points w8a32 uint8": (1, 256),
        "blocks e4m3": (1, 256),
        "dynamic e4m3": (256,),
        "dynamic int8": (256,),
    }.items():
        for m in rows:
            yield _product("cpu", kind, (m, side, side))
    # The words of GPT-2, and other sizes that are no multiple of a vector.
    for kind in ("w8a16 e4m3", "int8"):
        for shape in ((17, side, side), (16, side * 12 + 1105, side), (16, side, side + 4)):
            yield _product("cpu", kind, shape)
    long = 1, side * 7 // 2, side
    name = f"w8a16 e4m3 from memory {'x'.join(map(str, long))}"
    yield name, functools.partial(product, "w8a16 e4m3", long, from_memory=True)


def _on_gpu() -> Named:
    yield "copy", _copy
    for m in (1, 4, 16, 64, 128, 256, 1024, 4096):
        for n, k in _WEIGHTS:
            yield _product("cuda", "w8a16 e4m3", (m, n, k))
    yield _product("cuda", "w8a16 int8", (1, *_WEIGHTS[0]))
    for shape in ((8192, *_SQUARE), (4096, 12288, 4096)):
        for kind in ("fp8 tensor", "fp8 channel"):
            yield _product("cuda", kind, shape)
    for n, k in _BLOCKS:
        for kind in ("fp8 block", "fp8 tensor"):
            yield _product("cuda", kind, (4096, n, k))
    for m in (512, 8192):
        yield _product("cuda", "dynamic e4m3", (m, *_SQUARE))
    for kind in ("int8", "zero points int8"):
        yield _product("cuda", kind, (4096, *_SQUARE))
    for n, k in ((4096, 4096), (4096, 14336)):
        for m in (1, 16, 32, 64, 512, 4096):
            yield _product("cuda", "imma", (m, n, k))
    yield from _gpu_codes.table()
    yield from _gpu_groups.table()
    yield from _gpu_layers.table()


def _product(platform: str, kind: str, shape: Shape) -> tuple[str, Callable[[], Case]]:
    name = f"{kind} {'x'.join(map(str, shape))}"
    return name, functools.partial(product, kind, shape, platform)


def _copy() -> Case:
    """A device-to-device copy: bytes read and bytes written."""
    copy = _peaks.copy()
    return Case(name="copy", contenders={"copy": copy}, bytes=1.0)
