#!/bin/bash
# flax 0.12.12 with jax 0.12.0.1. The FP8 ops of Flax scale by the history of earlier steps, and begin
# with the scale 1. So the first step clips activations at 448, without a word; the second is right.
#
# Seen: 7168 and then 16000, for 16 activations of 1000 times weights of 1.
set -euo pipefail
folder=$(mktemp -d)
. "$(dirname "$0")/environment"
packages flax==0.12.12 jax==0.12.0.1
python - <<'PY'
import flax.linen as nn, jax, jax.numpy as jnp
from flax.linen import fp8_ops

STATE = "_overwrite_with_gradient"
x = jnp.full((8, 16), 1000.0)
for op in (fp8_ops.Fp8DotGeneralOp, fp8_ops.Fp8DirectDotGeneralOp):
    layer = nn.Dense(8, use_bias=False, dot_general_cls=op, kernel_init=nn.initializers.ones)
    variables = layer.init(jax.random.key(0), x)
    steps = []
    for _ in range(2):
        steps.append(float(layer.apply(variables, x)[0, 0]))
        gradient = jax.grad(lambda v: layer.apply(v, x).sum())(variables)
        variables = {**variables, STATE: gradient[STATE]}
    print(op.__name__, steps)
    assert steps[0] == 16 * 448 and abs(steps[1] - 16000) < 1
PY
