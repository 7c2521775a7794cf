"""Times a dequantise-matmul with and without the rewrite: `python examples/compare_with_xla.py`.

Both forms of the same expression take turns; medians of wall time in milliseconds, and their ratio
(above 1, the rewritten one is faster).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8

Form = Callable[..., jax.Array]
ROWS = (1, 16, 256)


def weight_only(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    """A weight of 8 bits under activations of 16 or 32."""
    return x @ (w.astype(x.dtype) * scale.astype(x.dtype))


def integers(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    """8 bits on both sides, scaled after the sum."""
    total = jax.lax.dot(x, w, preferred_element_type=jnp.int32)
    return total.astype(jnp.float32) * scale


def transposed(form: Form) -> Form:
    """The same for a weight that is kept as [N, K]."""
    return lambda x, w, scale: form(x, w.T, scale)


def medians(forms: Sequence[Form], args: Sequence[jax.Array], repeat: int) -> list[float]:
    """Milliseconds of a call of each form, the forms taking turns."""
    taken: list[list[float]] = [[] for _ in forms]
    for form in forms:
        jax.block_until_ready(form(*args))
    for _ in range(repeat):
        for form, times in zip(forms, taken, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(form(*args))
            times.append(time.perf_counter() - start)
    return [1e3 * statistics.median(times) for times in taken]


def main() -> None:
    """Print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096, help="N and K (default: 4096)")
    parser.add_argument("--repeat", type=int, default=15, help="rounds (default: 15)")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    size = options.size
    print(f"jax {jax.__version__}, N = K = {size}, ms")
    print(
        f"{'activations':12}{'weights':18}{'layout':8}{'M':>5}{'XLA':>9}{'jaxfp8':>9}{'ratio':>7}"
    )
    scale = jnp.full((1, size), 0.01)
    for x_dtype, w_dtype, form in (
        ("bfloat16", "float8_e4m3fn", weight_only),
        ("bfloat16", "int8", weight_only),
        ("float32", "float8_e4m3fn", weight_only),
        ("int8", "int8", integers),
    ):
        w = jnp.asarray(rng.integers(-127, 128, (size, size))).astype(w_dtype)
        for layout, function in (("[K,N]", form), ("[N,K]", transposed(form))):
            forms = [jax.jit(function), jax.jit(jaxfp8.rewrite(function))]
            for rows in ROWS:
                x = jnp.asarray(rng.integers(-127, 128, (rows, size))).astype(x_dtype)
                xla, ours = medians(forms, (x, w, scale), options.repeat)
                print(
                    f"{x_dtype:12}{w_dtype:18}{layout:8}{rows:5}{xla:9.2f}{ours:9.2f}"
                    f"{xla / ours:7.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
