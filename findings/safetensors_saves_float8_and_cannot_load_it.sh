#!/bin/bash
# safetensors 0.8.0 with jax 0.12.0.1. `safetensors.flax.save` and `safetensors.numpy.save` write
# arrays of float8 under the right names (F8_E4M3, F8_E5M2, F8_E8M0), and the `load` of neither
# module reads them.
#
# Seen: KeyError: 'F8_E4M3' (and the two others), from both modules.
set -euo pipefail
folder=$(mktemp -d)
. "$(dirname "$0")/environment"
packages safetensors==0.8.0 jax==0.12.0.1 flax==0.12.12
python - <<'PY'
import json
import jax.numpy as jnp, numpy as np
import safetensors.flax, safetensors.numpy

for dtype, name in (("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2"), ("float8_e8m0fnu", "F8_E8M0")):
    x = jnp.ones((2, 3), dtype)
    for module, array in ((safetensors.flax, x), (safetensors.numpy, np.asarray(x))):
        data = module.save({"x": array})
        size = int.from_bytes(data[:8], "little")
        assert json.loads(data[8 : 8 + size])["x"]["dtype"] == name
        try:
            module.load(data)
        except KeyError as error:
            print(module.__name__, dtype, "KeyError", error)
            assert error.args == (name,)
        else:
            raise SystemExit(f"{module.__name__} loads {dtype}")
PY
