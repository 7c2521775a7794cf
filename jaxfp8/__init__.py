"""8-bit matrix products in JAX: a dequantise-matmul pattern becomes one call on the 8-bit data.

See `README.md` for a tour and `docs/design.md` for the map. Importing this package starts no
backend and changes no configuration.
"""

from jaxfp8._errors import FallbackWarning, LibraryError, UnsupportedError
from jaxfp8._ffi import register_ffi_targets
from jaxfp8._lowering import strict
from jaxfp8._ops import dot_general, einsum, matmul
from jaxfp8._qarray import QArray
from jaxfp8._quantize import dequantize, fake_quantize, quantize
from jaxfp8._rewrite import Report, explain, rewrite

__all__ = [
    "FallbackWarning",
    "LibraryError",
    "QArray",
    "Report",
    "UnsupportedError",
    "dequantize",
    "dot_general",
    "einsum",
    "explain",
    "fake_quantize",
    "matmul",
    "quantize",
    "register_ffi_targets",
    "rewrite",
    "strict",
]
