#!/bin/bash
# ml_dtypes 0.6.0 with numpy 2.5.5 and jax 0.12.0.1. `np.save` writes float8 arrays without a word, and
# `np.load` gives bytes of no type for e4m3fn, and an error for e5m2. `jnp.save` and `jnp.load` mend that
# for bfloat16 alone.
#
# Seen: |V1 for float8_e4m3fn, ValueError for float8_e5m2; bfloat16 from `jnp.load`.
set -euo pipefail
folder=$(mktemp -d)
. "$(dirname "$0")/environment"
packages jax==0.12.0.1 numpy==2.5.5 ml_dtypes==0.6.0
python - <<'PY'
import io
import jax.numpy as jnp, ml_dtypes, numpy as np


def back(x, library):
    file = io.BytesIO()
    library.save(file, x)
    file.seek(0)
    return library.load(file)


e4m3 = np.ones(4, ml_dtypes.float8_e4m3fn)
for library in (np, jnp):
    loaded = back(e4m3, library)
    print(library.__name__, loaded.dtype)
    assert loaded.dtype == np.dtype("V1") and (loaded.view(e4m3.dtype) == e4m3).all()
    try:
        back(np.ones(4, ml_dtypes.float8_e5m2), library)
    except ValueError as error:
        print(library.__name__, error)
    else:
        raise SystemExit("float8_e5m2 loads")
assert back(np.ones(4, ml_dtypes.bfloat16), jnp).dtype == jnp.bfloat16
PY
