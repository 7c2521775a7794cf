"""The CUDA library called from PyTorch, as its C header has it; needs no JAX to run."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from jaxfp8._call.gpu import asked
from jaxfp8._call.gpu import canonical as _canonical
from jaxfp8._call.library import abi, ffi
from jaxfp8._value import dtypes

torch = pytest.importorskip("torch")

POISON = 0xA5


def tensor(x: np.ndarray):
    """The bytes of an array on the GPU."""
    data = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return torch.from_numpy(data.copy()).cuda()


def poisoned(size: int):
    """Memory that holds no zeros."""
    return torch.full((max(size, 1),), POISON, dtype=torch.uint8, device="cuda")


class Call:
    """A canonical problem with its operands and poisoned results on the GPU."""

    def __init__(self, spec, operands: dict[str, np.ndarray], kernel: str = ""):
        self.spec, self.kernel = spec, kernel
        self.bytes = asked.workspace_bytes(spec, kernel)
        self.held = {name: tensor(x) for name, x in operands.items()}
        itemsize = np.dtype(dtypes.storage(spec.epilogue.out_dtype)).itemsize
        self.held["out"] = poisoned(int(np.prod(spec.out_shape)) * itemsize)
        if spec.epilogue.amax is not None:
            self.held["amax"] = poisoned(int(np.prod(spec.epilogue.amax)) * 4)
        self.held["workspace"] = poisoned(self.bytes)

    def run(self, stream=None) -> tuple[int, str]:
        """Enqueues the call."""
        addresses = {name: x.data_ptr() for name, x in self.held.items()}
        buffers = abi.Buffers.of(self.bytes, **addresses)
        stream = torch.cuda.current_stream() if stream is None else stream
        spec = abi.Spec.of(self.spec, self.kernel)
        given = ctypes.byref(spec), ctypes.byref(buffers), stream.cuda_stream
        return abi.call(ffi._library("cuda"), "jaxfp8_cuda_scaled_dot", *given)

    def results(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Output and amax on the host."""
        torch.cuda.synchronize()
        dtype = dtypes.storage(self.spec.epilogue.out_dtype)
        out = self.held["out"].cpu().numpy()
        out = out[: int(np.prod(self.spec.out_shape)) * np.dtype(dtype).itemsize].view(dtype)
        amax = None
        if "amax" in self.held:
            amax = self.held["amax"].cpu().numpy().view(np.float32)
            amax = amax.reshape(self.spec.epilogue.amax)
        return out.reshape(self.spec.out_shape), amax


def canonical(spec, operands: dict[str, np.ndarray]):
    """A problem and its operands in the form that the CUDA library takes."""
    form = _canonical.canonical(spec)
    named = form.operands({name: np.asarray(x) for name, x in operands.items()})
    return form.spec, {name: np.asarray(x) for name, x in named.items()}
