#!/bin/bash
# jax 0.12.0.1, on a CPU. A NaN in the weights of one group of `jax.lax.ragged_dot` makes the rows of
# all groups NaN. An infinity in the activations stays in its row.
#
# Seen: [nan nan nan nan nan nan], where the groups without a NaN have sums of 4.
set -euo pipefail
folder=$(mktemp -d)
. "$(dirname "$0")/environment"
packages jax==0.12.0.1
python - <<'PY'
import jax, jax.numpy as jnp, numpy as np

weights = jnp.ones((3, 4, 5)).at[1].set(jnp.nan)
sizes = jnp.array([2, 2, 2])
y = np.asarray(jax.lax.ragged_dot(jnp.ones((6, 4)), weights, sizes)[:, 0])
print(y)
assert np.isnan(y).all()
x = jnp.ones((6, 4)).at[2].set(jnp.inf)
y = np.asarray(jax.lax.ragged_dot(x, jnp.ones((3, 4, 5)), sizes)[:, 0])
print(y)
assert list(y) == [4, 4, np.inf, 4, 4, 4]
PY
