#!/bin/bash
# jax 0.12.0.1, torch 2.13.0 on a CPU and onnxruntime 1.32.0 agree on every float8 value in range.
# Beyond it each does something else, so a file or an exported model changes there without a word.
#
# Seen: 1e4 in e4m3fn is NaN in JAX, and 448 in the others. Infinity is NaN, 448 and 448. In e5m2 1e6
# is infinity in JAX and in torch, and 57344 in onnxruntime, and so is infinity itself.
set -euo pipefail
folder=$(mktemp -d)
. "$(dirname "$0")/environment"
packages jax==0.12.0.1 torch==2.13.0 onnxruntime==1.32.0 onnx==1.23.2
python - <<'PY'
import jax.numpy as jnp, numpy as np, onnx, onnxruntime, torch
from onnx import TensorProto, helper


def by_jax(x, name):
    return np.asarray(jnp.asarray(x).astype(name).astype(jnp.float32))


def by_torch(x, name):
    return torch.from_numpy(x).to(getattr(torch, name)).float().numpy()


def by_onnx(x, name):
    to = {"float8_e4m3fn": TensorProto.FLOAT8E4M3FN, "float8_e5m2": TensorProto.FLOAT8E5M2}[name]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None]) for n in "xz"]
    nodes = [helper.make_node("Cast", ["x"], ["y"], to=to)]
    nodes += [helper.make_node("Cast", ["y"], ["z"], to=TensorProto.FLOAT)]
    graph = helper.make_graph(nodes, "cast", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


rng = np.random.default_rng(0)
inside = np.clip(rng.normal(size=100000) * 2.0 ** rng.integers(-14, 9, 100000), -448, 448)
inside, beyond = inside.astype(np.float32), np.array([1e4, 1e6, np.inf], np.float32)
expected = {
    "float8_e4m3fn": ([np.nan] * 3, [448] * 3, [448] * 3),
    "float8_e5m2": ([10240, np.inf, np.inf], [10240, np.inf, np.inf], [10240, 57344, 57344]),
}
for name, values in expected.items():
    assert (by_jax(inside, name) == by_torch(inside, name)).all()
    assert (by_jax(inside, name) == by_onnx(inside, name)).all()
    for cast, value in zip((by_jax, by_torch, by_onnx), values):
        print(name, cast.__name__, cast(beyond, name))
        np.testing.assert_array_equal(cast(beyond, name), np.array(value, np.float32))
PY
