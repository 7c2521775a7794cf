"""Values that are produced and encoded: their specs and operands, and the codes of float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import produced_rows as rows

from jaxfp8._call.reference.produce_reference import NormForm, ProduceSpec, quantized_values

NORMS = {
    "rms": NormForm(),
    "rms, rounded, gain": NormForm(has_gain=True, rounded_first=True),
    "rms, gain": NormForm(has_gain=True),
    "layer": NormForm(centred=True, has_gain=True, has_shift=True),
    "layer, rounded": NormForm(
        centred=True, has_gain=True, has_shift=True, rounded_first=True, rounded_second=True
    ),
}


def spec(dtype="float8_e4m3fn", narrow="bfloat16", **more) -> ProduceSpec:
    """In both layouts, with two scales."""
    fields = {"transpose_from": 1, "scales": 2, **more}
    return ProduceSpec(dtype=np.dtype(dtype), row_dtype=np.dtype(jnp.dtype(narrow)), **fields)


def operands(spec: ProduceSpec, shape: tuple[int, int], vector="float32", seed: int = 0) -> list:
    """With NaN, infinities and values that saturate."""
    wide = spec.norm is None and not spec.has_factor and spec.activation == "none"
    x = rows.matrix(*shape, np.float32 if wide else spec.row_dtype, seed)
    x[0, :3], x[-1, -1] = [np.nan, np.inf, -np.inf], 1e4
    others = [rows.matrix(*shape, spec.row_dtype, seed + 1)] if spec.has_factor else []
    if spec.norm is not None:
        known = np.where(np.isfinite(x.astype(np.float32)), x, 0).astype(np.float32)
        mean = known.mean(-1, keepdims=True) if spec.norm.centred else np.float32(0)
        inverse = 1 / np.sqrt(np.square(known - mean).mean(-1, keepdims=True) + 1e-5)
        others = [inverse.astype(np.float32), *[mean] * spec.norm.centred]
        others += rows.vectors(spec.norm, shape[1], jnp.dtype(vector))
    scales = [np.full((1, 1), 0.01 * (i + 1), np.float32) for i in range(spec.scales)]
    return [jnp.asarray(v) for v in (x, *others, *scales)]


def defined(spec: ProduceSpec, arrays: list) -> list[np.ndarray]:
    """The results by definition, op by op: XLA fuses nothing."""
    with jax.disable_jit():
        return [np.asarray(y) for y in quantized_values(*arrays, spec=spec)]


def assert_encoded(spec: ProduceSpec, arrays: list, found: list, most: float = 0.0) -> None:
    """Codes and amaxes are those of the definition; of codes up to a part are their neighbours."""
    wanted = defined(spec, arrays)
    *codes, amax = map(np.asarray, found)
    np.testing.assert_allclose(amax, wanted[-1], rtol=2.0**-7 if most else 0)
    assert amax.shape == (1, 1)
    for one, other in zip(codes, wanted[:-1], strict=True):
        assert one.shape == other.shape
        wide, exact = one.astype(np.float32), other.astype(np.float32)
        np.testing.assert_array_equal(np.isnan(wide), np.isnan(exact))
        differ = ~np.isnan(wide) & (wide != exact)
        assert differ.mean() <= most
        np.testing.assert_allclose(wide[differ], exact[differ], rtol=0.3, atol=2.0**-8)
    if spec.transpose_from is not None:
        for one, other in zip(codes[::2], codes[1::2], strict=True):
            np.testing.assert_array_equal(one.view(np.uint8).T, other.view(np.uint8))
