"""One call of a contender, kernel by kernel, as JAX's profiler records it."""

from __future__ import annotations

import itertools
import pathlib
import re
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxfp8._bench._hlo import moved
from jaxfp8._bench._measure import Contender, Missing

# Recorded calls, and the pause between two. It is longer than any gap inside of a call.
_CALLS, _PAUSE_SECONDS = 5, 0.05
_AS_SYMBOL = str.maketrans(".-", "__")  # the name of an instruction as a kernel's name


class Kernel(NamedTuple):
    """One launch: its start after the first of its call, its duration, and the idle time before."""

    name: str
    start: float
    seconds: float
    gap: float = 0.0
    op: str = ""  # the instruction of the program; "" if the trace does not say
    bytes: int | None = None  # of the instruction, for its longest kernel; None if unknown


Kernels = tuple[Kernel, ...]  # of one call, in the order of their starts


class Group(NamedTuple):
    """Launches together: their number and sums."""

    name: str
    launches: int
    seconds: float
    gaps: float
    bytes: int | None


def whole(kernels: Sequence[Kernel]) -> Group:
    """A whole call; its time has the gaps, too."""
    end = max(kernel.start + kernel.seconds for kernel in kernels)
    return _group("whole, under the profiler", kernels)._replace(seconds=end)


def groups(kernels: Sequence[Kernel]) -> list[Group]:
    """Kernels by name, without XLA's numbers, the longest first."""
    named: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        named.setdefault(re.sub(r"([._]\d+)+$", "", kernel.name), []).append(kernel)
    return sorted(itertools.starmap(_group, named.items()), key=lambda group: -group.seconds)


def _group(name: str, kernels: Sequence[Kernel]) -> Group:
    sizes = [kernel.bytes for kernel in kernels if kernel.bytes is not None]
    total = sum(sizes) if len(sizes) == len(kernels) else None
    seconds, gaps = sum(k.seconds for k in kernels), sum(k.gap for k in kernels)
    return Group(name, len(kernels), seconds, gaps, total)


def profile(contender: Contender) -> Kernels | Missing:
    """The kernels of one call; or why they are unknown."""
    leaves = jax.tree.leaves(jax.block_until_ready(contender.enqueue()))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(_CALLS):
                time.sleep(_PAUSE_SECONDS)
                contender.seconds(1)
        files = [str(path) for path in pathlib.Path(folder).rglob("*.xplane.pb")]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # its types warn at creation
            traces = map(jax.profiler.ProfileData.from_file, files)
            on_cpu = {device.platform for device in leaves[0].devices()} == {"cpu"}
            kernels = [kernel for trace in traces for kernel in launches(trace, on_cpu)]
    return of_calls(kernels, _CALLS, moved(contender.program))


def launches(trace: Any, on_cpu: bool) -> Iterator[Kernel]:
    """Those on the streams of GPUs; or the named steps of programs on the CPU."""
    planes = (p for p in trace.planes if p.name.startswith("/device:GPU") != on_cpu)
    for line in (line for plane in planes for line in plane.lines):
        if not on_cpu and not line.name.startswith("Stream"):
            continue  # lines derived from the streams
        for event in line.events:
            op = next((str(value) for key, value in event.stats if key == "hlo_op"), "")
            if op or not on_cpu:
                yield Kernel(event.name, event.start_ns * 1e-9, event.duration_ns * 1e-9, op=op)


def of_calls(kernels: Sequence[Kernel], calls: int, known: Mapping[str, int]) -> Kernels | Missing:
    """The call of median length, between the longest gaps, with known bytes of instructions."""
    if len(kernels) < calls:
        return Missing(
            f"the profiler recorded {len(kernels)} kernels of {calls} calls; on an NVIDIA GPU it "
            "needs CUPTI (pip install nvidia-cuda-cupti), which no other profiler may be using"
        )
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    ends = itertools.accumulate((kernel.start + kernel.seconds for kernel in ordered), max)
    gaps = [max(0.0, k.start - end) for k, end in zip(ordered[1:], ends, strict=False)]
    longest = sorted(range(len(gaps)), key=lambda i: -gaps[i])[: calls - 1]
    for i, gap in enumerate(gaps):
        ordered[i + 1] = ordered[i + 1]._replace(gap=0.0 if i in longest else gap)
    borders = itertools.pairwise([0, *sorted(i + 1 for i in longest), len(ordered)])
    parts = [_call(ordered[start:end], known) for start, end in borders]
    return sorted(parts, key=lambda part: whole(part).seconds)[calls // 2]


def _call(kernels: Sequence[Kernel], known: Mapping[str, int]) -> Kernels:
    """The kernels of a call from time 0; the longest of an instruction has its bytes.

    If a trace names no instruction of the program, the names of XLA's own kernels are used.
    """
    call = [kernel._replace(start=kernel.start - kernels[0].start) for kernel in kernels]
    sizes = {name.translate(_AS_SYMBOL): size for name, size in known.items()}
    for i in sorted(range(len(call)), key=lambda i: -call[i].seconds):
        names = (text.translate(_AS_SYMBOL) for text in (call[i].op, call[i].name))
        if name := next((name for name in names if name in sizes), None):
            call[i] = call[i]._replace(bytes=sizes[name])
            sizes[name] = 0
    return tuple(call)
