#!/bin/bash
# qwix 0.1.8 with jax 0.12.0.1. Quantizing small float16 values to int8 gives codes of 0: the scale
# 1e-4 / 127 is below what float16 holds exactly, and a scale that rounds to 0 becomes 1. The same
# values in bfloat16 and in float32 give 127.
#
# Seen: codes 0 and scale 1 for float16.
set -euo pipefail
folder=$(mktemp -d)
. "$(dirname "$0")/environment"
packages qwix==0.1.8 jax==0.12.0.1 flax==0.12.12
python - <<'PY'
import jax.numpy as jnp, numpy as np
import qwix

how = {"qtype": jnp.int8, "channelwise_axes": (0,)}
for dtype, expected in ((jnp.float16, 0), (jnp.bfloat16, 127), (jnp.float32, 127)):
    held = qwix.quantize(jnp.full((4, 64), 1e-4, dtype), **how)
    codes = np.unique(np.asarray(held.qvalue))
    print(dtype.__name__, codes, held.scale.ravel()[0])
    assert list(codes) == [expected]
PY
