"""Checkpoints as others write them, byte by byte, without the code under test."""

import json
import struct

import ml_dtypes
import numpy as np

CODES = {
    np.dtype(np.float32): "F32",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.float16): "F16",
    np.dtype(np.float64): "F64",
    np.dtype(np.int64): "I64",
    np.dtype(np.int32): "I32",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2",
    np.dtype(ml_dtypes.float8_e4m3fnuz): "F8_E4M3FNUZ",
    np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
}
E4M3 = ml_dtypes.float8_e4m3fn
BNB = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["head"]}


def file_bytes(tensors, metadata=None):
    """A safetensors file."""
    header, data = {}, b""
    for name, array in tensors.items():
        array = np.asarray(array)
        start = len(data)
        data += array.tobytes()
        header[name] = {
            "dtype": CODES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [start, len(data)],
        }
    return with_header(header | ({"__metadata__": metadata} if metadata else {}), data)


def with_header(header, data):
    """A file of this header, which may lie, and this data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def folder(path, tensors, quantization=None, files=1):
    """A folder with a config, and several files with an index where that is asked for."""
    path.mkdir(exist_ok=True)
    if quantization is not None:
        config = {"model_type": "any", "quantization_config": quantization}
        (path / "config.json").write_text(json.dumps(config))
    if files == 1:
        (path / "model.safetensors").write_bytes(file_bytes(tensors))
        return path
    weight_map = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = {k: tensors[k] for k in list(tensors)[number::files]}
        weight_map |= dict.fromkeys(part, name)
        (path / name).write_bytes(file_bytes(part))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def codes(shape, dtype=E4M3, seed=0):
    """Values that are finite in every 8-bit dtype."""
    values = np.random.default_rng(seed).integers(-100, 100, shape)
    return values.astype(dtype)


def scales(shape, dtype=np.float32, seed=1):
    return np.random.default_rng(seed).uniform(0.01, 0.1, shape).astype(dtype)


def spread(scale, shape, block):
    """A scale of blocks with an entry for each value, in float64."""
    scale = np.asarray(scale).astype(np.float64)
    for axis, (n, size) in enumerate(zip(shape, block, strict=True)):
        scale = np.repeat(scale, size, axis=axis)[(slice(None),) * axis + (slice(n),)]
    return scale


def compressed(strategy, kind="float", form=None, targets=("Linear",), **weights):
    """The quantization_config of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors",
        "format": form or f"{kind}-quantized",
        "config_groups": {
            "group_0": {
                "targets": list(targets),
                "weights": {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True}
                | weights,
                "input_activations": {"num_bits": 8, "dynamic": True, "strategy": "token"},
            }
        },
        "ignore": ["lm_head"],
    }


def packed(q, axis=-1):
    """Four codes to a word along an axis, lowest byte first, code + 128."""
    q = np.swapaxes(np.asarray(q, np.int64) + 128, axis, -1)
    q = np.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, -q.shape[-1] % 4)])
    words = (q.reshape(*q.shape[:-1], -1, 4) << np.arange(0, 32, 8)).sum(-1)
    return np.swapaxes(words.astype(np.uint32).view(np.int32), axis, -1).copy()


def words(q, **others):
    """The tensors of packed codes."""
    shape = np.asarray(q.shape, np.int64)
    return {"l.weight_packed": packed(q), "l.weight_shape": shape, **others}


def modelopt(algorithm, **more):
    """The quantization_config of ModelOpt."""
    return {"quant_method": "modelopt", "quant_algo": algorithm, **more}
