#!/bin/bash
# orbax-checkpoint 0.12.8 with jax 0.12.0.1. A restore into a target of another dtype casts without a
# word. Codes lose their scale that way, signed codes wrap in uint8, and floats become NaN in e4m3fn.
#
# Seen: int8 -127 -> uint8 129; float32 1000 -> e4m3fn NaN; e4m3fn codes -> bfloat16. No warning.
set -euo pipefail
folder=$(mktemp -d)
. "$(dirname "$0")/environment"
packages orbax-checkpoint==0.12.8 jax==0.12.0.1
python - <<'PY'
import os, warnings
import jax, jax.numpy as jnp, numpy as np
import orbax.checkpoint as ocp

saved = {
    "codes": jnp.array([1, 448], jnp.float8_e4m3fn),
    "ints": jnp.array([100, -127], jnp.int8),
    "floats": jnp.array([1.0, 1000.0]),
}
checkpointer, path = ocp.StandardCheckpointer(), os.getcwd() + "/checkpoint"
checkpointer.save(path, saved)
checkpointer.wait_until_finished()
dtypes = {"codes": jnp.bfloat16, "ints": jnp.uint8, "floats": jnp.float8_e4m3fn}
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    target = {name: jax.ShapeDtypeStruct((2,), dtype) for name, dtype in dtypes.items()}
    found = checkpointer.restore(path, target)
checkpointer.close()
print(found, [str(w.message) for w in warned])
assert not warned
expected = {"codes": [1, 448], "ints": [100, 129], "floats": [1, np.nan]}
for name, values in expected.items():
    assert found[name].dtype == dtypes[name]
    np.testing.assert_array_equal(np.asarray(found[name], np.float32), values)
PY
