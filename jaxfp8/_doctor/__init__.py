"""`doctor`: the installation, its kernels, and commands to repair them.

Each check returns findings. A finding with a remedy means something is broken.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Callable, Iterable

import jax

from jaxfp8._call.gpu import asked
from jaxfp8._call.library import ffi, strictness
from jaxfp8._call.ops import lowering, routes
from jaxfp8._doctor import _products, _remedies
from jaxfp8._value import errors
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec

PACKAGES = ("jaxfp8", "jax", "jaxlib", "numpy", "ml_dtypes", "flax")

# The simplest product: a platform without it has no kernels.
_SIDE = OperandSpec.unscaled("int8", (1, 1), contracting=(1,))
_SAMPLE = ScaledDotSpec(lhs=_SIDE, rhs=_SIDE, epilogue=EpilogueSpec(out_dtype="int32"))

# The GPU of the reported routes on a machine without one.
_TYPICAL_GPU = 90


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    name: str  # the subject of the check
    text: str
    remedy: str | None = None  # the command or advice to repair it; None if nothing is broken


def run() -> int:
    """Print the report; returns 0 if all is well and 1 if something is broken."""
    findings = []
    for title, look in SECTIONS.items():
        print(f"\n{title}")
        for finding in look():
            findings.append(finding)
            mark = "-" if finding.remedy is None else "✗"
            print(f"  {mark} {finding.name:<23} {finding.text}")
    remedies = list(dict.fromkeys(f.remedy for f in findings if f.remedy is not None))
    print("\nEverything works." if not remedies else "\nTo mend that:")
    for remedy in remedies:
        print(f"  {remedy}")
    return 1 if remedies else 0


def versions() -> Iterable[Finding]:
    """The interpreter and the relevant packages."""
    system = f"{platform.system()} {platform.machine()}"
    yield Finding(name="python", text=f"{platform.python_version()} on {system}, {sys.executable}")
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            yield Finding(name=name, text="not installed (optional)")
        else:
            yield Finding(name=name, text=version_of(name))


def library() -> Iterable[Finding]:
    """The kernel library: its path, and whether it fits this jaxlib."""
    path = ffi.library_path("cpu")
    yield Finding(name="library", text=str(path) if path else "not found")
    built, running = ffi.built_api_version("cpu"), ffi.running_api_version()
    yield Finding(name="FFI API built for", text=_dotted(built))
    yield Finding(name="FFI API running", text=_dotted(running))
    reason = ffi.why_unavailable("cpu")
    if reason is not None:
        too_new = built is not None and running is not None and built > running
        remedy = _remedies.update_jax() if too_new else _remedies.reinstall("cpu")
        # Behind the semicolon is advice to run the doctor.
        yield Finding(name="cpu kernels", text=reason.partition(";")[0], remedy=remedy)


def processor() -> Iterable[Finding]:
    """The processor's features, and the kernels they select."""
    if ffi.why_unavailable("cpu") is not None:
        yield Finding(name="features", text="unknown without the library")
        return
    yield Finding(name="features", text=ffi.cpu_features())
    yield Finding(name="kernels", text=", ".join(ffi.available_kernels()))


def graphics() -> Iterable[Finding]:
    """The library for NVIDIA GPUs, the cuBLASLt it uses, and the path typical products take."""
    path, here = ffi.library_path("cuda"), ffi.has_backend("cuda")
    if path is None:
        text = "not part of this installation; only a machine with an NVIDIA GPU needs it"
        yield Finding(
            name="cuda library", text=text, remedy=_remedies.reinstall("cuda") if here else None
        )
        return
    reason = ffi.why_unavailable("cuda")
    if reason is not None:
        text = reason.partition(";")[0]
        yield Finding(
            name="cuda library", text=text, remedy=_remedies.reinstall("cuda") if here else None
        )
        return
    yield Finding(name="cuda library", text=f"{path}, for {ffi.cuda_architectures()}")
    library, version = ffi.cublaslt()
    text = f"{library}, version {version}" if version else library.partition(";")[0]
    missing = here and not version
    yield Finding(
        name="cuBLASLt", text=text, remedy=_remedies.install_cublaslt() if missing else None
    )
    yield from _paths(ffi.compute_capability() or _TYPICAL_GPU, version or asked.CUBLASLT)


def _paths(capability: int, cublaslt_version: int) -> Iterable[Finding]:
    """The path of each kind of product, with its sizes."""
    taken: dict[str, list[str]] = {}
    for kind in _products.KINDS:
        problem = _products.problem(kind, "cuda", capability)
        path = routes.path_on(problem.spec, capability, cublaslt_version)
        taken.setdefault(kind.name, []).append(f"{problem.sizes}: {path or 'no kernel'}")
    for name, texts in taken.items():
        yield Finding(name=f"{name} on sm_{capability}", text="; ".join(texts))


def devices() -> Iterable[Finding]:
    """JAX's devices, and the kernels for scaled dots on them."""
    try:
        known = jax.devices()
    except RuntimeError as error:
        yield Finding(name="devices", text=_first_clause(error), remedy=_remedies.update_jax())
        return
    for device in known:
        reason = lowering.why_not(_SAMPLE, device.platform)
        text = "own kernels" if reason is None else f"the reference, through XLA: {reason}"
        yield Finding(name=str(device), text=f"{device.device_kind}: {text}")


def smoke() -> Iterable[Finding]:
    """Products on the kernels of the CPU and of a GPU, if there is one, against float64."""
    for where in filter(ffi.has_backend, ffi.PLATFORMS):
        reason = lowering.why_not(_SAMPLE, where)
        if reason is None:
            yield from (_product(where, kind) for kind in _products.KINDS)
        else:  # a section above has the remedy, if there is one
            text = f"no kernel computes them: {reason.partition(';')[0]}"
            yield Finding(name=f"products on {where}", text=text)


def _product(where: str, kind: _products.Kind) -> Finding:
    problem = _products.problem(kind, where, ffi.compute_capability())
    name = f"{kind.name} on {where}"
    try:
        with jax.default_device(jax.devices(where)[0]), strictness.strict():
            outcome = _products.multiply(problem, where)
    except (RuntimeError, errors.UnsupportedError) as error:
        text = f"{problem.sizes}: {_first_clause(error)}"
        return Finding(name=name, text=text, remedy=_remedies.reinstall(where))
    wrong, text = _judged(outcome)
    remedy = _remedies.reinstall(where) if wrong else None
    return Finding(name=name, text=f"{problem.sizes}: {text}", remedy=remedy)


def _judged(outcome: _products.Outcome) -> tuple[bool, str]:
    """Whether a product is broken, and its outcome in words."""
    if not outcome.ran:
        return True, "computed, but by no kernel"
    ran = ", ".join(outcome.ran)
    if not outcome.excess <= 0:
        return True, f"wrong by {outcome.excess:.3g} more than the bound, on {ran}"
    return False, f"right, computed by {ran}"


def counters() -> Iterable[Finding]:
    """The runs of each kernel in this process."""
    for where in ffi.PLATFORMS:
        for name, calls in ffi.kernel_calls(where).items():
            yield Finding(name=name, text=f"{calls} calls")


SECTIONS: dict[str, Callable[[], Iterable[Finding]]] = {
    "Versions": versions,
    "Library": library,
    "Processor": processor,
    "NVIDIA GPUs": graphics,
    "Devices": devices,
    "Products, checked against float64": smoke,
    "Kernel calls in this process": counters,
}


def version_of(name: str) -> str:
    """The installed version of an importable package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        spec = importlib.util.find_spec(name)
        return f"not installed, but importable from {spec.origin if spec else '?'}"


def _dotted(version: tuple[int, int] | None) -> str:
    return "unknown" if version is None else ".".join(map(str, version))


def _first_clause(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].partition(";")[0]
