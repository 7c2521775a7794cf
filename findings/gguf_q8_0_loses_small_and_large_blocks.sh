#!/bin/bash
# gguf 0.19.0. A block of Q8_0 has a float16 scale, its largest magnitude / 127. Below 3.7e-6 the scale
# rounds to 0, and the block becomes zeros. Just above, one step of the scale is all of it: values are
# off by half. From 8.4e6 on the scale is infinity. There is no warning but NumPy's for the last.
#
# Seen: 1e-6 -> 0, 5e-6 -> 7.57e-6, 1e-4 -> 9.84e-5, 9e6 -> inf.
set -euo pipefail
folder=$(mktemp -d)
. "$(dirname "$0")/environment"
packages gguf==0.19.0 numpy==2.5.5
python - <<'PY'
import gguf, numpy as np

kind = gguf.GGMLQuantizationType.Q8_0
expected = {1e-6: 0.0, 5e-6: 7.57e-6, 1e-4: 9.84e-5, 1.0: 1.0, 9e6: np.inf}
for value, seen in expected.items():
    block = np.full((1, 32), value, np.float32)
    back = gguf.quants.dequantize(gguf.quants.quantize(block, kind), kind)
    print(value, back[0, 0])
    np.testing.assert_allclose(back, seen, rtol=1e-3)
PY
