"""The dtypes of safetensors, as numpy and JAX have them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

# In the order of a file's layout: wide ones first, to align each tensor.
BY_CODE: dict[str, np.dtype] = {
    "C64": np.dtype(np.complex64),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(jnp.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(jnp.float8_e5m2fnuz),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
FLOATS = ("F64", "F32", "F16", "BF16")
# compressed-tensors packs four int8 codes in an int32, each with this bit flipped: that adds 128.
IN_A_WORD, SIGN = 4, 0x80
CODES = {dtype: code for code, dtype in BY_CODE.items()}
# ggml's types that no array holds, as entries of GGUF files have them: "GGML_TYPE_Q4_K".
GGML = "GGML_TYPE_"
# Several values share one byte or three. Their size is known, so a file with them can be read. No
# array of JAX or numpy holds them.
BITS_OF_PACKED = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


_BITS = {code: 8 * dtype.itemsize for code, dtype in BY_CODE.items()} | BITS_OF_PACKED


def why_not(code: str) -> tuple[str, str]:
    """Why no array holds a tensor of this dtype, and the way to one."""
    if code == f"{GGML}Q8_0":
        return "vectors are read as floats", "make the file with `llama-quantize`: it keeps them so"
    remedy = "convert it"
    if code.startswith(GGML):
        remedy = "fetch the model's Q8_0, F16 or BF16 file, or make one with `llama-quantize`"
    return "no array of JAX holds it", remedy


def bits(code: str) -> int | None:
    """Size of one value, or None if the code is unknown."""
    return _BITS.get(code)
