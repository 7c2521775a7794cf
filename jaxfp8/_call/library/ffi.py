"""Finds, loads and registers the kernel libraries.

The rest of the package calls `why_unavailable(platform)` to ask whether a library can be used, and
`ensure_registered(platform)` before its use. A missing or unfit library is a `LibraryError`, and
JAX goes on working. Nothing is registered before its version is known to fit: a handler of a newer
version makes XLA refuse the whole backend.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.resources
import pathlib
import re
import struct
import threading
from typing import Any

import jax

from jaxfp8._call.library import abi
from jaxfp8._value import errors
from jaxfp8._value.spec import ScaledDotSpec

TARGET = "jaxfp8_scaled_dot"
JOINT_TARGET = "jaxfp8_joint_dots"
ATTENTION_TARGET = "jaxfp8_attention"
QUANTIZE_TARGET = "jaxfp8_quantize"
AMAX_TARGET = "jaxfp8_amax"
ROWS_TARGET = "jaxfp8_quantize_rows"
RAGGED_TARGET = "jaxfp8_ragged_dot"
ENCODE_TARGET = "jaxfp8_encode"

# The custom calls of each platform. A handler in C has the name of its call.
TARGETS: dict[str, tuple[str, ...]] = {
    "cpu": (TARGET, QUANTIZE_TARGET, AMAX_TARGET, RAGGED_TARGET),
    "cuda": (
        TARGET,
        JOINT_TARGET,
        ATTENTION_TARGET,
        QUANTIZE_TARGET,
        ROWS_TARGET,
        ENCODE_TARGET,
        RAGGED_TARGET,
    ),
}

# XLA accepts any name here, but finds handlers only under its own names.
_XLA_NAMES = {"cpu": "cpu", "cuda": "CUDA"}
PLATFORMS = tuple(_XLA_NAMES)  # those with a library

_LOCK = threading.RLock()
_REGISTERED: set[str] = set()
_API_LINE = re.compile(r"^#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", re.MULTILINE)
_OLDEST_JAX = "0.10.0"
_ELF_BYTES = 64  # of the header of a 64-bit ELF file


def library_path(platform: str = "cpu") -> pathlib.Path | None:
    """The path of the installed library of `platform`, or None."""
    name = f"libjaxfp8_{platform}.so"
    # The package may have two folders: the sources, and their build.
    places = [pathlib.Path(str(importlib.resources.files("jaxfp8").joinpath("_lib", name)))]
    # In a checkout Python imports the sources, but the library is in pip's folder.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed = importlib.metadata.distribution("jaxfp8")
        places.append(pathlib.Path(str(installed.locate_file(f"jaxfp8/_lib/{name}"))))
    return next((place for place in places if place.is_file()), None)


def why_unavailable(platform: str) -> str | None:
    """Says why the library of `platform` cannot be used in this process, or None if it can."""
    found = _found(platform)
    return found if isinstance(found, str) else None


def library_or_none(platform: str) -> ctypes.CDLL | None:
    """The library of `platform`, loaded and checked; None if it cannot be used."""
    found = _found(platform)
    return None if isinstance(found, str) else found


def ensure_registered(platform: str) -> None:
    """Registers the custom calls of `platform` with XLA, once; or raises `LibraryError`."""
    with _LOCK:
        if platform in _REGISTERED:
            return
        library = _library(platform)
        if has_backend(platform):  # a lowering for export elsewhere needs no handler
            _register(platform, library)


def register_ahead() -> None:
    """Registers fitting libraries before there is a backend; it starts none.

    An exported program names its custom calls, and XLA looks for them before any code of this
    package runs. A backend fails if it refuses a handler. So an unfit library waits for its first
    use.
    """
    if running_api_version() is None:
        return
    for platform in PLATFORMS:
        with _LOCK, contextlib.suppress(errors.LibraryError):
            if platform not in _REGISTERED:
                _register(platform, _library(platform))


def _register(platform: str, library: ctypes.CDLL) -> None:
    missing = [target for target in TARGETS[platform] if not hasattr(library, target)]
    if missing:
        raise _refused(platform, f"has no `{missing[0]}`: it was built from older sources")
    for target in TARGETS[platform]:
        handler = jax.ffi.pycapsule(getattr(library, target))
        try:
            jax.ffi.register_ffi_target(target, handler, platform=_XLA_NAMES[platform])
        except (RuntimeError, ValueError) as error:
            raise _refused(platform, f"is refused by XLA: {error}") from error
    _REGISTERED.add(platform)


def register_if_it_runs_here(platform: str) -> None:
    """`ensure_registered` if there is such a device: other programs need no handler here."""
    if has_backend(platform):
        ensure_registered(platform)


def register_targets(platform: str = "cpu") -> None:
    """Registers the custom calls with XLA, for use through `jax.ffi.ffi_call`.

    Importing this package does so if the library fits; this function says why if it does not.
    `docs/custom_call.md` describes the calls.

    Args:
      platform: "cpu" or "cuda".

    Raises:
      LibraryError: the library is missing, cannot be loaded or does not fit this jaxlib.

    Example:
      >>> import jaxfp8
      >>> jaxfp8.ffi.register_targets()
    """
    ensure_registered(platform)


def reset() -> None:
    """Forgets the loaded libraries; the next use looks for them again."""
    with _LOCK:
        _found.cache_clear()


def _ask(platform: str, function: str, *arguments: Any) -> Any:
    """What a function of a platform's library returns; None without the library."""
    library = library_or_none(platform)
    return library and getattr(library, f"jaxfp8_{platform}_{function}")(*arguments)


def kernel_calls(platform: str = "cpu") -> dict[str, int]:
    """The calls of each kernel in this process, by name; {} without a library.

    A CUDA graph counts once, when it is captured. A GPU's product left to XLA is not counted;
    `explain` names its kernel "xla".
    """
    names = kernels(platform)
    return {name: _ask(platform, "kernel_calls", i) for i, name in enumerate(names)}


def reset_kernel_calls(platform: str = "cpu") -> None:
    """Sets every count of `kernel_calls` to 0."""
    _ask(platform, "reset_counters")


def kernels(platform: str) -> tuple[str, ...]:
    """Names of the kernels in a platform's library; () without a library."""
    number = _ask(platform, "kernel_count") or 0
    return tuple(_ask(platform, "kernel_name", i).decode() for i in range(number))


def available_kernels() -> tuple[str, ...]:
    """The kernels this CPU can run, best first; () without a library."""
    pairs = enumerate(kernels("cpu"))
    return tuple(name for i, name in pairs if _ask("cpu", "kernel_available", i))


def cpu_features() -> str:
    """The instruction sets detected by the library, separated by spaces."""
    names = _ask("cpu", "features")
    return "" if names is None else names.decode() or "none beyond the portable ones"


def peak_products(kind: str, rounds: int) -> int:
    """Runs a loop of products ("f32", "bf16", "int8" or "avx2") and returns its operations.

    0 if the CPU has no instruction of this kind.
    """
    return _library("cpu").jaxfp8_cpu_peak_products(kind.encode(), rounds)


def peak_read(address: int, size: int) -> int:
    """Reads `size` bytes of memory and returns a value made from them."""
    return _library("cpu").jaxfp8_cpu_peak_read(address, size)


def cuda_architectures() -> str:
    """The architectures of the CUDA library, such as 90a-real;80-virtual; "" without it."""
    return (_ask("cuda", "architectures") or b"").decode()


def cublaslt() -> tuple[str, int]:
    """Path and version of cuBLASLt, such as 130100; or the reason why there is none, and 0."""
    library = library_or_none("cuda")
    if library is None:
        return why_unavailable("cuda") or "", 0
    text = ctypes.create_string_buffer(4096)
    version = library.jaxfp8_cuda_cublaslt(text, len(text))
    return text.value.decode(), version


def keep_plans(path: str | pathlib.Path | None) -> None:
    """Stores the fastest cuBLASLt algorithm of each product in a file, and reads it there.

    The first call of a product on a device times the algorithms proposed by the library. That takes
    some tens of milliseconds, and the choice may differ from run to run. A product in the file is
    not timed: every process with this file uses the same algorithm.

    Args:
      path: the file, existing or not; None stops storing.

    Raises:
      LibraryError: there is no CUDA library.
      OSError: the file cannot be read or written.
    """
    text = ctypes.create_string_buffer(4096)
    name = "" if path is None else str(path)
    if not _library("cuda").jaxfp8_cuda_set_plan_file(name.encode(), text, len(text)):
        raise OSError(f"`jaxfp8.ffi.keep_plans`: {text.value.decode()}")


def allow_timing(allowed: bool) -> None:
    """Allows or forbids new plans on a GPU to time candidates; by default they may.

    Raises:
      LibraryError: there is no CUDA library.
    """
    _library("cuda").jaxfp8_cuda_allow_timing(allowed)


def compute_capability() -> int | None:
    """10 * major + minor of the least capable NVIDIA GPU in use; None without one."""
    if not has_backend("cuda"):
        return None
    return min(round(10 * float(device.compute_capability)) for device in jax.devices("cuda"))


def cpu_paths(spec: ScaledDotSpec) -> dict[str, str] | str:
    """The kernels of the CPU library for a problem on this CPU, as `cuda_paths` lists paths."""
    return _paths("cpu", abi.Spec.of(spec))


def cuda_paths(
    spec: ScaledDotSpec, compute_capability: int, cublaslt_version: int, kernel: str = ""
) -> dict[str, str] | str:
    """The paths of the CUDA library for a canonical problem, best first; needs no GPU.

    Each path has the reason against it, or "" if it can compute the problem. A call takes the first
    path without a reason. If no path can, or without the library, the result is one sentence.
    `kernel="int8"` asks for the paths that compute FP8 in int8.
    """
    return _paths("cuda", abi.Spec.of(spec, kernel), compute_capability, cublaslt_version)


def _paths(platform: str, *asked: Any) -> dict[str, str] | str:
    library = library_or_none(platform)
    if library is None:
        return why_unavailable(platform) or ""
    status, text = abi.call(library, f"jaxfp8_{platform}_route", *asked)
    if status:
        return text
    return {name: why for name, _, why in (line.partition(": ") for line in text.splitlines())}


def built_api_version(platform: str = "cpu") -> tuple[int, int] | None:
    """The version (major, minor) of XLA's FFI the library was built for, if it can be loaded."""
    path = library_path(platform)
    if path is None:
        return None
    try:
        return _built_for(_load(path, platform))
    except errors.LibraryError:
        return None


def running_api_version() -> tuple[int, int] | None:
    """The version (major, minor) of the FFI of the jaxlib in use.

    JAX has no function for it. It is read from jaxlib's headers.
    """
    header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    if not header.is_file():
        return None
    found = dict(_API_LINE.findall(header.read_text()))
    return (int(found["MAJOR"]), int(found["MINOR"])) if len(found) == 2 else None


@functools.cache
def _found(platform: str) -> ctypes.CDLL | str:
    """The library of `platform`, loaded and checked, or why it cannot be used."""
    with _LOCK:
        try:
            path = library_path(platform)
            if path is None:
                raise _refused(platform, "is not installed")
            library = _load(path, platform)
            _check_version(library, platform)
        except errors.LibraryError as error:
            return str(error).rstrip(".")
        return library


def _library(platform: str) -> ctypes.CDLL:
    found = _found(platform)
    if isinstance(found, str):
        raise errors.LibraryError(f"{found}.")
    return found


def _is_cut_short(path: pathlib.Path) -> bool:
    """Whether an ELF file ends before its section table; linkers write that last.

    The system's loader maps such a file, and the process ends at the first missing page.
    """
    with path.open("rb") as file:
        header = file.read(_ELF_BYTES)
    if len(header) < _ELF_BYTES or not header.startswith(b"\x7fELF"):
        return False  # the loader says so
    (table,) = struct.unpack_from("<Q", header, 0x28)
    size, count = struct.unpack_from("<HH", header, 0x3A)
    return path.stat().st_size < table + size * count


def _load(path: pathlib.Path, platform: str) -> ctypes.CDLL:
    try:
        if _is_cut_short(path):
            raise OSError("its file is cut short")
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
        return _declare(library, platform)
    except (OSError, AttributeError) as error:
        raise _refused(platform, f"cannot be loaded: {error}") from error


# Types of the C functions, as in ffi/include/jaxfp8_cpu.h and jaxfp8_cuda.h.
_OUT = ctypes.POINTER(ctypes.c_int)
_Signatures = dict[str, tuple[type | None, list[type]]]
_OF_BOTH: _Signatures = {
    "jaxfp8_version": (ctypes.c_char_p, []),
    "jaxfp8_ffi_api_version": (None, [_OUT, _OUT]),
    "jaxfp8_{}_kernel_count": (ctypes.c_int, []),
    "jaxfp8_{}_kernel_name": (ctypes.c_char_p, [ctypes.c_int]),
    "jaxfp8_{}_kernel_calls": (ctypes.c_uint64, [ctypes.c_int]),
    "jaxfp8_{}_reset_counters": (None, []),
}
_OF_ONE: dict[str, _Signatures] = {
    "cpu": {
        "jaxfp8_cpu_features": (ctypes.c_char_p, []),
        "jaxfp8_cpu_kernel_available": (ctypes.c_int, [ctypes.c_int]),
        "jaxfp8_cpu_peak_products": (ctypes.c_int64, [ctypes.c_char_p, ctypes.c_int64]),
        "jaxfp8_cpu_peak_read": (ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_size_t]),
    },
    "cuda": {
        "jaxfp8_cuda_architectures": (ctypes.c_char_p, []),
        "jaxfp8_cuda_set_cublaslt": (None, [ctypes.c_char_p]),
        "jaxfp8_cuda_cublaslt": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_size_t]),
        "jaxfp8_cuda_allow_timing": (None, [ctypes.c_int]),
        "jaxfp8_cuda_set_plan_file": (
            ctypes.c_int,
            [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t],
        ),
    },
}


def _declare(library: ctypes.CDLL, platform: str) -> ctypes.CDLL:
    for name, (result, arguments) in (_OF_BOTH | _OF_ONE[platform]).items():
        function = getattr(library, name.format(platform))
        function.restype, function.argtypes = result, arguments
    for name, arguments in abi.SIGNATURES[platform].items():
        function = getattr(library, name)
        function.restype = ctypes.c_int
        function.argtypes = [*arguments, ctypes.c_char_p, ctypes.c_size_t]
    return library


def _built_for(library: ctypes.CDLL) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.jaxfp8_ffi_api_version(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _check_version(library: ctypes.CDLL, platform: str) -> None:
    """Refuses a library for another FFI; minor versions older than jaxlib's are fine."""
    built, running = _built_for(library), running_api_version()
    if running is None or (built[0] == running[0] and built[1] <= running[1]):
        return
    needs = f"is built for XLA FFI {built[0]}.{built[1]}, but jaxlib has {running[0]}.{running[1]}"
    raise _refused(platform, needs, f'pip install --upgrade "jax>={_OLDEST_JAX}"')


def has_backend(platform: str) -> bool:
    """Whether there is a backend of `platform`; starts it if it has not been started."""
    try:
        return bool(jax.devices(platform))
    except RuntimeError:
        return False


def _refused(platform: str, why: str, command: str | None = None) -> errors.LibraryError:
    command = command or "pip install --force-reinstall --no-deps jaxfp8"
    return errors.LibraryError(
        f"the kernel library for {platform!r} {why}; run `{command}` "
        "(in a checkout: `make setup`), or `python -m jaxfp8 doctor` for more."
    )
