"""A function with a dot that is rewritten, one that is missed, and one in floats."""

from __future__ import annotations

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from rewrite.support import F32, Data


def mixed(x: Any, q: Any, s: Any, w: Any) -> Any:
    y = jax.nn.relu(x @ (q.astype(F32) * s))
    z = x @ jnp.sin(q.astype(F32))
    return y + z, x @ w


def args() -> tuple[jax.Array, ...]:
    data = Data()
    return data.normal(5, 32), data.bits8(32, 24), data.scale(24), data.normal(32, 7)
