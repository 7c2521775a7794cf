#!/bin/bash
# The scale of a block of zeros in an MX format. jax 0.12.0.1 rounds 0 to NaN in float8_e8m0fnu, and
# so the block becomes NaN. torch 2.13.0 rounds it to 2^-127. Of -1 JAX makes NaN, and torch 1. Both
# round 3 up to 4, where the MX specification takes the power of two below the largest value.
set -euo pipefail
folder=$(mktemp -d)
. "$(dirname "$0")/environment"
packages jax==0.12.0.1 torch==2.13.0
python - <<'PY'
import jax.numpy as jnp, numpy as np, torch

x = np.array([0.0, 1.0, 3.0, -1.0], np.float32)
by_jax = np.asarray(jnp.asarray(x).astype(jnp.float8_e8m0fnu).astype(jnp.float32))
by_torch = torch.from_numpy(x).to(torch.float8_e8m0fnu).float().numpy()
print("jax  ", by_jax)
print("torch", by_torch)
np.testing.assert_array_equal(by_jax, np.array([np.nan, 1, 4, np.nan], np.float32))
np.testing.assert_array_equal(by_torch, np.array([2.0**-127, 1, 4, 1], np.float32))
PY
