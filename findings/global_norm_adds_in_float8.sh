#!/bin/bash
# optax 0.2.8 with jax 0.12.0.1. `optax.global_norm` of float8 arrays adds the squares in float8, as
# `jnp.sum` does. So gradients in float8 are clipped by a wrong norm.
#
# Seen: 14 for 400 ones, where the norm is 20.
set -euo pipefail
folder=$(mktemp -d)
. "$(dirname "$0")/environment"
packages optax==0.2.8 jax==0.12.0.1
python - <<'PY'
import jax.numpy as jnp, optax

ones = jnp.ones(400, jnp.float8_e4m3fn)
norm, exact = optax.global_norm({"w": ones}), optax.global_norm({"w": ones.astype(jnp.float32)})
print(norm, norm.dtype, exact)
assert norm.dtype == ones.dtype and float(norm) == 14 and float(exact) == 20
PY
