"""8-bit products from PyTorch, through the C interface: no JAX, no copies, CPU or CUDA tensors.

    python examples/from_pytorch.py             a weight in FP8 with a scale per output channel
    python examples/from_pytorch.py --cuda      the same on a GPU
    python examples/from_pytorch.py --int8      on a GPU: FP8 as storage, multiplied in int8

`ffi/include/jaxfp8/jaxfp8.h` describes the structures below; the libraries come with the package.
Needs PyTorch (`pip install torch`).
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import pathlib

import torch

NAMES = {
    torch.float8_e4m3fn: b"float8_e4m3fn",
    torch.float8_e5m2: b"float8_e5m2",
    torch.int8: b"int8",
    torch.uint8: b"uint8",
    torch.float32: b"float32",
    torch.bfloat16: b"bfloat16",
    torch.float16: b"float16",
}


class Dims(ctypes.Structure):
    """Sizes or axes."""

    _fields_ = (("rank", ctypes.c_size_t), ("values", ctypes.POINTER(ctypes.c_int64)))


class Side(ctypes.Structure):
    """One side of the product."""

    _fields_ = (
        ("dtype", ctypes.c_char_p),
        *((name, Dims) for name in ("shape", "contracting", "batch", "tiles")),
        ("scale", ctypes.c_int32),
        ("zero_point", ctypes.c_int32),
        ("sums", ctypes.c_int32),
    )


class Epilogue(ctypes.Structure):
    """What follows the sum."""

    _fields_ = (
        *((f"has_{name}", ctypes.c_int32) for name in ("residual", "bias", "out_scale", "amax")),
        *((name, Dims) for name in ("residual", "bias", "out_scale", "amax")),
        *((name, ctypes.c_char_p) for name in ("residual_dtype", "activation", "out_dtype")),
    )


class Spec(ctypes.Structure):
    """The whole problem."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("lhs", Side),
        ("rhs", Side),
        ("epilogue", Epilogue),
        ("precision", ctypes.c_char_p),
        ("kernel", ctypes.c_char_p),
    )


class Buffers(ctypes.Structure):
    """Where the data is."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("lhs", "rhs", "lhs_scale", "lhs_zero_point", "lhs_sums"),
                *("rhs_scale", "rhs_zero_point", "rhs_sums"),
                *("residual", "bias", "out_scale", "out", "amax", "workspace"),
            )
        ),
        ("workspace_bytes", ctypes.c_size_t),
    )


def dims(*sizes: int) -> Dims:
    """Sizes or axes as the interface takes them."""
    return Dims(len(sizes), (ctypes.c_int64 * len(sizes))(*sizes))


@functools.cache
def library(platform: str) -> ctypes.CDLL:
    """The library that came with the package, found without importing it (and JAX)."""
    package = importlib.util.find_spec("jaxfp8")
    if package is None:
        raise ModuleNotFoundError("jaxfp8 is not installed; run `pip install jaxfp8`")
    for folder in package.submodule_search_locations or ():
        path = pathlib.Path(folder, "_lib", f"libjaxfp8_{platform}.so")
        if path.exists():
            return ctypes.CDLL(str(path))
    raise FileNotFoundError(f"this jaxfp8 has no library for {platform!r}")


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    kernel: str = "",
) -> torch.Tensor:
    """`activation(x @ (weight * scale).T + bias)` on the 8-bit weight itself.

    Args:
      x: [M, K], float32, bfloat16 or float16.
      weight: [N, K], FP8 or int8.
      scale: [N, 1], float32.
      bias: [1, N], float32, or None.
      activation: none, relu, gelu_tanh, gelu_erf or silu.
      kernel: the kernel to call; "" lets the library choose.

    Returns:
      [M, N] in the dtype of `x`.
    """
    (m, k), (n, depth) = x.shape, weight.shape
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    left = Side(NAMES[x.dtype], dims(1, m, k), dims(2), dims(0), dims(1, m, k), 0, 0)
    tiles = dims(1, 1, depth)
    right = Side(NAMES[weight.dtype], dims(1, n, depth), dims(2), dims(0), tiles, 1, 0)
    epilogue = Epilogue(
        has_bias=bias is not None,
        bias=dims(1, 1, n) if bias is not None else dims(),
        residual_dtype=b"",
        activation=activation.encode(),
        out_dtype=NAMES[x.dtype],
    )
    spec = Spec(ctypes.sizeof(Spec), left, right, epilogue, b"default", kernel.encode())
    given = {"lhs": x, "rhs": weight, "rhs_scale": scale, "bias": bias, "out": out}
    run(spec, {name: tensor for name, tensor in given.items() if tensor is not None})
    return out


def run(spec: Spec, tensors: dict[str, torch.Tensor]) -> None:
    """Calls the library of the device that the tensors are on."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    buffers = Buffers(struct_size=ctypes.sizeof(Buffers), **addresses)
    message = ctypes.create_string_buffer(4096)
    both = ctypes.byref(spec), ctypes.byref(buffers)
    if tensors["out"].is_cuda:
        workspace = scratch(spec, tensors["out"].device)
        buffers.workspace, buffers.workspace_bytes = workspace.data_ptr(), workspace.numel()
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        call = functools.partial(library("cuda").jaxfp8_cuda_scaled_dot, *both, stream)
    else:
        threads = ctypes.c_int(torch.get_num_threads())
        call = functools.partial(library("cpu").jaxfp8_cpu_scaled_dot, *both, threads)
    if call(message, ctypes.c_size_t(len(message))):
        raise RuntimeError(message.value.decode())


def scratch(spec: Spec, device: torch.device) -> torch.Tensor:
    """As much scratch memory as serves the problem best."""
    size, message = ctypes.c_size_t(), ctypes.create_string_buffer(4096)
    major, minor = torch.cuda.get_device_capability(device)
    problem = ctypes.byref(spec), ctypes.c_int(10 * major + minor)
    ask = functools.partial(library("cuda").jaxfp8_cuda_workspace, *problem, ctypes.byref(size))
    if ask(message, ctypes.c_size_t(len(message))):
        raise RuntimeError(message.value.decode())
    return torch.empty(size.value, dtype=torch.uint8, device=device)


def main() -> None:
    """Quantizes a weight, multiplies by it, and compares with PyTorch on the dequantized one."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", action="store_true", help="on a GPU")
    parser.add_argument("--int8", action="store_true", help="on a GPU, rounded once more to int8")
    options = parser.parse_args()
    device = "cuda" if options.cuda or options.int8 else "cpu"
    torch.manual_seed(0)
    wide = torch.randn(512, 384, device=device) / 384**0.5
    scale = wide.abs().amax(1, keepdim=True) / 448
    weight = (wide / scale).to(torch.float8_e4m3fn)
    x = torch.randn(8, 384, device=device)
    x = x.bfloat16() if options.int8 else x
    bias = torch.randn(1, 512, device=device)
    y = linear(x, weight, scale, bias, "silu", "sm80_imma" if options.int8 else "")
    exact = torch.nn.functional.silu(x.double() @ (weight.double() * scale).T + bias)
    error = float((y - exact).norm() / exact.norm())
    print(f"{tuple(y.shape)} on {y.device}, relative error {error:.1e}")
    if not error < (0.05 if options.int8 else 1e-6):
        raise SystemExit("wrong")


if __name__ == "__main__":
    main()
