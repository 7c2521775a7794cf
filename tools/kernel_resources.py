"""Resources of each CUDA kernel: registers, declared shared memory and spills, as a table.

    cmake -S ffi -B build/resources -DJAXFP8_CUDA=ON -DJAXFP8_CUDA_RESOURCES=ON
    cmake --build build/resources > build/resources.log 2>&1
    python tools/kernel_resources.py build/resources.log --only imma

Reads the output of `ptxas -v`. Shared memory is the declared part, without a launch's dynamic part.
Exits with 1 if a shown kernel spills, or if there is none.
"""

import argparse
import dataclasses
import pathlib
import re
import shutil
import subprocess
import sys

_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel as compiled for one architecture; sizes in bytes."""

    name: str
    architecture: str
    registers: int
    shared: int
    stack: int
    spills: int


def kernels_of(log: str) -> list[Kernel]:
    """The kernels of a build log, in the order of their names."""
    kernels = []
    parts = _ENTRY.split(log)
    for name, architecture, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        spills, used, shared = _SPILLS.search(text), _USED.search(text), _SHARED.search(text)
        if spills is None or used is None:
            continue
        stack, stores, loads = map(int, spills.groups())
        kernels.append(
            Kernel(
                name=name,
                architecture=architecture,
                registers=int(used[1]),
                shared=int(shared[1]) if shared else 0,
                stack=stack,
                spills=stores + loads,
            )
        )
    return sorted(kernels, key=lambda kernel: (kernel.name, kernel.architecture))


def readable(names: list[str]) -> dict[str, str]:
    """Names as C++ has them, without namespaces and arguments; as they are without `c++filt`."""
    if not names or shutil.which("c++filt") is None:
        return {name: name for name in names}
    text = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout
    return {name: _short(line) for name, line in zip(names, text.splitlines(), strict=True)}


def _short(name: str) -> str:
    name = re.sub(r"^void ", "", name)
    name = re.sub(r"\((?:\w+::)*(\w+)\)(\d+)", r"\1 \2", name)  # (jaxfp8::DType)4
    return re.sub(r"(?:\w+::|\(anonymous namespace\)::)+", "", name).split("(")[0]


def table(kernels: list[Kernel]) -> str:
    """One line for each kernel."""
    names = readable([kernel.name for kernel in kernels])
    rows: list[tuple[str, ...]] = [("kernel", "for", "registers", "shared", "stack", "spills")]
    rows += [
        (names[k.name], k.architecture, *map(str, (k.registers, k.shared, k.stack, k.spills)))
        for k in kernels
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=pathlib.Path, help="what a build printed")
    parser.add_argument("--only", default="", help="a part of the mangled name")
    given = parser.parse_args()
    every = kernels_of(given.log.read_text())
    shown = [k for k in every if given.only in k.name]
    print(table(shown))
    return 0 if shown and not any(k.spills for k in shown) else 1


if __name__ == "__main__":
    sys.exit(main())
