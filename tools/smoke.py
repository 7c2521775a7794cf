"""A user's first steps, on nothing but an installed wheel; exits non-zero if one fails."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8


def main() -> None:
    """An explicit product, a rewritten one, the doctor, and the CUDA lowering if it is built."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(4, 64)), jnp.bfloat16)
    w = jaxfp8.quantize(jnp.asarray(rng.normal(size=(64, 32))), channelwise_axes=(1,))
    expected = np.asarray(x, np.float64) @ np.asarray(jaxfp8.dequantize(w), np.float64)
    with jaxfp8.strict():
        y = jax.jit(jaxfp8.matmul)(x, w)
    check("an explicit product", np.abs(np.asarray(y, np.float64) - expected).max() < 0.2)

    def by_pattern(x: jax.Array, codes: jax.Array, scale: jax.Array) -> jax.Array:
        return x @ (codes.astype(x.dtype) * scale.astype(x.dtype))

    report = jaxfp8.explain(by_pattern)(x, w.qvalue, w.scale)
    check("a rewritten product", len(report.matched) == 1)
    check("a CUDA lowering", "jaxfp8_scaled_dot" in lowered_for_a_gpu())
    command = [sys.executable, "-I", "-m", "jaxfp8", "doctor"]
    check("the doctor", subprocess.run(command, check=False).returncode == 0)


def lowered_for_a_gpu() -> str:
    """A product too large to be left to XLA on any GPU."""
    wide = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    w = jax.eval_shape(lambda x: jaxfp8.quantize(x, channelwise_axes=(1,)), wide)
    traced = jax.jit(jaxfp8.matmul).trace(jax.ShapeDtypeStruct((4, 4096), jnp.bfloat16), w)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def check(what: str, worked: bool) -> None:
    """Report one step; the first failure ends the run."""
    print(f"{what}: {'works' if worked else 'FAILS'}", flush=True)
    if not worked:
        sys.exit(1)


if __name__ == "__main__":
    main()
