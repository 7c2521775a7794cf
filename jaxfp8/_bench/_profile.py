"""One unit of a contender's work, kernel by kernel, as JAX's profiler records it."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxfp8._bench._hlo import moved
from jaxfp8._bench._measure import Contender, Missing

# Recorded calls; the one of median length is shown.
_CALLS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One launch.

    Attributes:
      name: of the kernel.
      start, seconds: start after the first launch of its call, and duration.
      op: its instruction in the program; "" if the trace does not say.
      nbytes: bytes read and written by the instruction, for its longest kernel; None if unknown.
    """

    name: str
    start: float
    seconds: float
    op: str = ""
    nbytes: int | None = None

    @property
    def end(self) -> float:
        """When it was done."""
        return self.start + self.seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """The launches of one kernel.

    Attributes:
      name: of the kernel, without XLA's number.
      launches: how many.
      seconds: their total time.
      gaps: idle time of the device before them.
      nbytes: bytes read and written; None if unknown for one of them.
    """

    name: str
    launches: int
    seconds: float
    gaps: float
    nbytes: int | None


@dataclasses.dataclass(frozen=True)
class Profile:
    """The kernels of one call, in the order of their starts."""

    kernels: tuple[Kernel, ...]

    @property
    def span(self) -> float:
        """From the first start to the last end."""
        return max(kernel.end for kernel in self.kernels)

    @property
    def gaps(self) -> tuple[float, ...]:
        """Before each kernel, for how long none had run."""
        return tuple(_gaps(self.kernels))

    def groups(self) -> list[Group]:
        """The kernels by name, the longest first."""
        found: dict[str, list[tuple[Kernel, float]]] = {}
        for kernel, gap in zip(self.kernels, self.gaps, strict=True):
            found.setdefault(stem(kernel.name), []).append((kernel, gap))
        groups = [
            Group(
                name=name,
                launches=len(launches),
                seconds=sum(kernel.seconds for kernel, _ in launches),
                gaps=sum(gap for _, gap in launches),
                nbytes=_total([kernel.nbytes for kernel, _ in launches]),
            )
            for name, launches in found.items()
        ]
        return sorted(groups, key=lambda group: -group.seconds)


def _total(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def stem(name: str) -> str:
    """The name of a kernel without its parameters and XLA's numbers.

    >>> stem("loop_convert_fusion_12"), stem("void run<(Tile)8>(float*)"), stem("dot.3")
    ('loop_convert_fusion', 'run<(Tile)8>', 'dot')
    """
    bare = name.removeprefix("void ")
    while bare.endswith(")") and (start := _opening(bare)) > 0:
        bare = bare[:start]
    return re.sub(r"([._]\d+)+$", "", bare) or name


def _opening(text: str) -> int:
    """Index of the opening parenthesis for a closing one at the end of the text; -1 without one."""
    depth = 0
    for place in reversed(range(len(text))):
        depth += (text[place] == ")") - (text[place] == "(")
        if depth == 0:
            return place
    return -1


def profile(contender: Contender) -> Profile | Missing:
    """The kernels of one call; or why they are not known."""
    reader = getattr(jax.profiler, "ProfileData", None)
    if reader is None:
        return Missing("this release of JAX cannot read its own traces (jax.profiler.ProfileData)")
    result = contender.enqueue()
    contender.wait(result)
    on_cpu = all(leaf.device.platform == "cpu" for leaf in jax.tree.leaves(result))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(_CALLS):
                contender.seconds(1)
        files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        if not files:
            return Missing("the profiler wrote no trace")
        with warnings.catch_warnings():
            # Its types warn at creation. The warning ends the process if warnings are errors.
            warnings.simplefilter("ignore", DeprecationWarning)
            kernels = list(_kernels(reader.from_file(str(files[0])), on_cpu))
    found = of_calls(kernels, _CALLS)
    text = contender.program()
    return found if isinstance(found, Missing) or text is None else with_bytes(found, moved(text))


def with_bytes(profile: Profile, known: Mapping[str, int]) -> Profile:
    """The same with bytes: those of an instruction count for the longest of its kernels.

    If a trace names no instructions, the names of XLA's own kernels are used.
    """
    by_name = {_as_symbol(name): nbytes for name, nbytes in known.items()}
    kernels: list[Kernel] = []
    for name, alike in itertools.groupby(profile.kernels, key=lambda k: _as_symbol(k.op or k.name)):
        launches = list(alike)
        longest = max(range(len(launches)), key=lambda i: launches[i].seconds)
        for i, kernel in enumerate(launches):
            nbytes = None if name not in by_name else by_name[name] if i == longest else 0
            kernels.append(dataclasses.replace(kernel, nbytes=nbytes))
    return Profile(tuple(kernels))


def _as_symbol(name: str) -> str:
    """The name of an instruction as a kernel's name."""
    return re.sub(r"[.-]", "_", name)


def _kernels(data: Any, on_cpu: bool) -> Iterator[Kernel]:
    """Launches on the streams of GPUs; or the named steps of programs on the CPU."""
    for plane in data.planes:
        if plane.name.startswith("/device:GPU") == on_cpu:
            continue
        for line in plane.lines:
            if not on_cpu and not line.name.startswith("Stream"):
                continue  # lines derived from the streams
            for event in line.events:
                op = next((str(value) for key, value in event.stats if key == "hlo_op"), "")
                if not on_cpu or op:
                    start, seconds = event.start_ns * 1e-9, event.duration_ns * 1e-9
                    yield Kernel(name=event.name, start=start, seconds=seconds, op=op)


def of_calls(kernels: Sequence[Kernel], calls: int) -> Profile | Missing:
    """The call of median length, among calls with the same kernels."""
    if not kernels:
        return Missing(
            "the profiler recorded no kernel; on an NVIDIA GPU it needs CUPTI "
            "(pip install nvidia-cuda-cupti), which no other profiler may be using"
        )
    if len(kernels) < calls:
        return Missing(f"the profiler recorded {len(kernels)} kernels of {calls} calls")
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    parts = [_from_zero(part) for part in _split(ordered, calls)]
    return sorted(parts, key=lambda part: part.span)[calls // 2]


def _split(ordered: Sequence[Kernel], calls: int) -> Iterator[Sequence[Kernel]]:
    """Each call's kernels: as many for each or, if impossible, between long gaps.

    A call is waited for before the next, so the longest gaps are between calls.
    """
    each, rest = divmod(len(ordered), calls)
    borders = [each * call for call in range(1, calls)]
    if rest:
        gaps = _gaps(ordered)
        borders = sorted(sorted(range(1, len(gaps)), key=gaps.__getitem__)[-(calls - 1) :])
    for start, end in itertools.pairwise([0, *borders, len(ordered)]):
        yield ordered[start:end]


def _gaps(ordered: Sequence[Kernel]) -> list[float]:
    """Before each kernel, for how long none had run."""
    done, idle = ordered[0].start, []
    for kernel in ordered:
        idle.append(max(0.0, kernel.start - done))
        done = max(done, kernel.end)
    return idle


def _from_zero(kernels: Sequence[Kernel]) -> Profile:
    first = kernels[0].start
    moved = (dataclasses.replace(kernel, start=kernel.start - first) for kernel in kernels)
    return Profile(tuple(moved))
