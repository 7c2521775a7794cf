"""`doctor`: what is installed, what runs, and the command that repairs the rest.

Each check returns findings. A finding with a remedy means that something is broken.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import pathlib
import platform
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxfp8._call import ffi, lowering, strictness
from jaxfp8._ops import products, quantize
from jaxfp8._value import errors
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec

PACKAGES = ("jaxfp8", "jax", "jaxlib", "numpy", "ml_dtypes", "flax")

# The simplest product: a platform that refuses it has no kernels.
_SIDE = OperandSpec(
    dtype="int8",
    shape=(1, 1),
    contracting=(1,),
    batch=(),
    tiles=(1, 1),
    scale=False,
    zero_point=False,
)
_SAMPLE = ScaledDotSpec(lhs=_SIDE, rhs=_SIDE, epilogue=EpilogueSpec(out_dtype="int32"))


def _linear(activations: str, weights: str) -> ScaledDotSpec:
    """16 rows times a weight with a scale per output channel, as a GPU's library takes it."""
    lhs = OperandSpec(
        dtype=activations,
        shape=(1, 16, 4096),
        contracting=(2,),
        batch=(0,),
        tiles=(1, 1, 4096),
        scale=activations == weights,
        zero_point=False,
    )
    rhs = dataclasses.replace(lhs, dtype=weights, shape=(1, 4096, 4096), scale=True)
    return ScaledDotSpec(lhs=lhs, rhs=rhs, epilogue=EpilogueSpec(out_dtype="bfloat16"))


_TYPICAL = {
    "W8A16": _linear("bfloat16", "float8_e4m3fn"),
    "FP8": _linear("float8_e4m3fn", "float8_e4m3fn"),
    "INT8": _linear("int8", "int8"),
}
# The GPU that routes are reported for on a machine without one.
_TYPICAL_GPU, _TYPICAL_CUBLASLT = 90, 130000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
      name: the subject of the check.
      text: the result.
      remedy: the command or sentence that repairs it; None if nothing is broken.
    """

    name: str
    text: str
    remedy: str | None = None


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
    """The interpreter and the packages that matter."""
    system = f"{platform.system()} {platform.machine()}"
    yield Finding(name="python", text=f"{platform.python_version()} on {system}, {sys.executable}")
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            yield Finding(name=name, text="not installed (optional)")
        else:
            yield Finding(name=name, text=version_of(name))


def library() -> Iterable[Finding]:
    """The kernel library: where it is, and whether it fits this jaxlib."""
    path = ffi.library_path("cpu")
    yield Finding(name="library", text=str(path) if path else "not found")
    built, running = ffi.built_api_version("cpu"), ffi.running_api_version()
    yield Finding(name="FFI API built for", text=_dotted(built))
    yield Finding(name="FFI API running", text=_dotted(running))
    reason = ffi.why_unavailable("cpu")
    if reason is not None:
        too_new = built is not None and running is not None and built > running
        remedy = _update_jax() if too_new else _reinstall()
        # What follows the semicolon is advice for those who are not yet here.
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
        yield Finding(name="cuda library", text=text, remedy=_build_cuda() if here else None)
        return
    reason = ffi.why_unavailable("cuda")
    if reason is not None:
        text = reason.partition(";")[0]
        yield Finding(name="cuda library", text=text, remedy=_build_cuda() if here else None)
        return
    yield Finding(name="cuda library", text=f"{path}, for {ffi.cuda_architectures()}")
    found, version = ffi.cublaslt()
    text = f"{found}, version {version}" if version else found.partition(";")[0]
    missing = here and not version
    yield Finding(name="cuBLASLt", text=text, remedy=_install_cublaslt() if missing else None)
    capability = ffi.compute_capability() or _TYPICAL_GPU
    for name, spec in _TYPICAL.items():
        paths = ffi.cuda_paths(spec, capability, version or _TYPICAL_CUBLASLT)
        taken = paths if isinstance(paths, str) else next(p for p, why in paths.items() if not why)
        yield Finding(name=f"{name} on sm_{capability}", text=taken)


def devices() -> Iterable[Finding]:
    """The devices JAX sees, and what computes a scaled dot on them."""
    try:
        found = jax.devices()
    except RuntimeError as error:
        yield Finding(name="devices", text=_first_clause(error), remedy=_update_jax())
        return
    for device in found:
        reason = lowering.why_not(_SAMPLE, device.platform)
        text = "own kernels" if reason is None else f"the reference, through XLA: {reason}"
        yield Finding(name=str(device), text=f"{device.device_kind}: {text}")


def smoke() -> Iterable[Finding]:
    """Products on the kernels of the CPU, and of a GPU where there is one, against float64."""
    here = filter(ffi.has_backend, ffi.PLATFORMS)
    for where, kind in itertools.product(here, (jnp.float8_e4m3fn, jnp.int8)):
        yield _product(where, kind)


def _product(where: str, kind: DTypeLike) -> Finding:
    name = f"float32 x {jnp.dtype(kind).name} on {where}"
    before = ffi.kernel_calls(where)
    try:
        with jax.default_device(jax.devices(where)[0]), strictness.strict():
            excess = _excess(kind)
    except (RuntimeError, errors.UnsupportedError) as error:
        return Finding(name=name, text=_first_clause(error), remedy=_reinstall())
    after = ffi.kernel_calls(where)
    return _judge(name, excess, ", ".join(n for n in after if after[n] > before.get(n, 0)))


def _judge(name: str, excess: float, ran: str) -> Finding:
    if not ran:
        return Finding(name=name, text="computed, but by no kernel", remedy=_reinstall())
    if not excess <= 0:
        text = f"wrong by {excess:.3g} more than the bound, on {ran}"
        return Finding(name=name, text=text, remedy=_reinstall())
    return Finding(name=name, text=f"right, computed by {ran}")


def counters() -> Iterable[Finding]:
    """How often each kernel has run in this process."""
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


def _excess(dtype: DTypeLike) -> float:
    """By how much a small product exceeds the bound of docs/design.md; at most 0 if it is right."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 96)).astype(np.float32)
    wide = rng.standard_normal((96, 33)).astype(np.float32)
    w = quantize.quantize(wide, dtype, channelwise_axes=(1,))
    y = np.asarray(jax.jit(products.matmul)(x, w), np.float64)
    exact = np.asarray(w.qvalue).astype(np.float64) * np.asarray(w.scale, np.float64)
    bound = 96 * 2.0**-24 * (np.abs(x) @ np.abs(exact)) + np.spacing(np.abs(y).astype(np.float32))
    return float(np.max(np.abs(y - x.astype(np.float64) @ exact) - bound))


def version_of(name: str) -> str:
    """The installed version of a package that can be imported."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        spec = importlib.util.find_spec(name)
        return f"not installed, but importable from {spec.origin if spec else '?'}"


def _dotted(version: tuple[int, int] | None) -> str:
    return "unknown" if version is None else ".".join(map(str, version))


def _first_clause(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].partition(";")[0]


def _install_cublaslt() -> str:
    return f'{shlex.quote(sys.executable)} -m pip install "jax[cuda13]"'


def _build_cuda() -> str:
    return "JAXFP8_CUDA=1 " + _reinstall()


def _update_jax() -> str:
    return f"{shlex.quote(sys.executable)} -m pip install --upgrade jax jaxlib"


def _reinstall() -> str:
    """The command that builds and installs the library again, from where it was installed."""
    compiler = (
        "" if any(map(shutil.which, ("c++", "g++", "clang++"))) else "apt-get install g++ && "
    )
    pip = f"{shlex.quote(sys.executable)} -m pip install --force-reinstall --no-deps"
    return f"{compiler}{pip} {_origin()}"


def _origin() -> str:
    """The argument of pip that installs this package from its source."""
    try:
        package = importlib.metadata.distribution("jaxfp8")
    except importlib.metadata.PackageNotFoundError:
        return shlex.quote(str(pathlib.Path(__file__).parent.parent))
    came_from = json.loads(package.read_text("direct_url.json") or "{}")
    if "url" not in came_from:
        return f"jaxfp8=={package.version}"
    editable = came_from.get("dir_info", {}).get("editable", False)
    place = came_from["url"].removeprefix("file://")
    return ("--editable " if editable else "") + shlex.quote(place)
