"""What tests of scales share: arguments, moves of a scale, products of codes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rewrite.support import F32, Data

MOVES = {
    "as it is": lambda z: z,
    "of a row": lambda z: z,
    "row": lambda z: z[None],
    "reshaped": lambda z: z.reshape(1, -1),
    "transposed": lambda z: z.T,
    "spread": lambda z: jnp.broadcast_to(z, (32, 24)),
    "reversed": lambda z: z[::-1],
}


FORMS = {"of a row": (1, 24), "transposed": (24, 1)}


def arguments() -> tuple[Any, ...]:
    data = Data()
    return data.normal(5, 32), data.bits8(32, 24, dtype=jnp.int8), data.scale(24)


def arguments_of_two_scales() -> tuple[Any, ...]:
    data = Data()
    a, q = data.bits8(5, 32, dtype=jnp.int8), data.bits8(32, 24, dtype=jnp.int8)
    return a, q, jnp.full((5, 1), 1.2421875, jnp.bfloat16), jnp.asarray(1.0078125, jnp.bfloat16)


def close(got: Any, want: Any, rounding: float = 2e-5) -> None:
    most = float(np.max(np.abs(want)))
    np.testing.assert_allclose(got, want, rtol=rounding, atol=rounding * most)


def exact(x: Any, q: Any, scale: Any) -> np.ndarray:
    """The product of dequantized values, in float64."""
    x, q, scale = (np.asarray(array, np.float64) for array in (x, q, scale))
    return x @ (q * scale)


def codes_of(x: Any, scale: Any) -> Any:
    return jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8)


def product_of_codes(codes: Any, scale: Any, q: Any, where: str = "codes") -> Any:
    lhs, rhs = codes.astype(jnp.bfloat16), q.astype(jnp.bfloat16)
    lhs = lhs * scale if where == "codes" else lhs
    rhs = rhs * scale if where == "weight" else rhs
    y = jax.lax.dot(lhs, rhs, preferred_element_type=F32)
    return y * scale if where == "product" else y


def static_arguments() -> tuple[Any, Any, Any]:
    x, q, _ = arguments()
    return x.astype(jnp.bfloat16) * 20, jnp.float32(1.0039), q  # 1.0 in bfloat16
