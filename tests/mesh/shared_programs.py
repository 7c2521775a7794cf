"""Programs that several processes run together, each with its own devices of one mesh."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfp8
from gpt import train
from gpt.model import Config

NUMBERS = (((1,), (0,)), ((), ()))


def run(folder: str | None) -> None:
    """Computes each program on explicit and automatic axes; one process writes what they give."""
    results = {}
    for kind in (AxisType.Explicit, AxisType.Auto):
        with jax.set_mesh(jax.make_mesh((2, 2), ("d", "m"), axis_types=(kind, kind))) as mesh:
            mesh = jax.sharding.get_mesh()
            for name, (function, arguments) in _programs(mesh).items():
                outputs = jax.tree.leaves(jax.jit(function)(*arguments))
                for i, y in enumerate(outputs):
                    whole = multihost_utils.process_allgather(y, tiled=True)
                    results[f"{kind.name} {name} {i}"] = np.asarray(whole, np.float32)
    results["GPT"] = np.asarray(_losses())
    if folder is not None:
        np.savez(pathlib.Path(folder) / "results.npz", **results)


def _losses() -> list[float]:
    """The losses of a few steps of the GPT of the examples."""
    config = Config(layers=2, width=32, heads=2, length=32)
    run = train.Run(recipe="delayed", config=config, steps=4, batch=4, mesh="fsdp=2,model=2")
    return train.train(run, train.first_state(run))[1]


def _programs(mesh: jax.sharding.Mesh) -> dict:
    x = jax.random.normal(jax.random.key(0), (16, 256))
    w = jax.random.normal(jax.random.key(1), (256, 128)) / 16
    q = jaxfp8.quantize(w, jnp.int8, channelwise_axes=(1,))

    def put(array, *spec):
        host = np.asarray(array)
        sharding = NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    columns = jaxfp8.QArray(put(q.qvalue, None, "m"), put(q.scale, None, "m"), tiles=q.tiles)

    def train(x, w):
        recipe = jaxfp8.CurrentScaling()
        return jnp.sum(jaxfp8.fp8_dot_general(x, w, NUMBERS, recipe=recipe) ** 2)

    return {
        "columns": (jaxfp8.matmul, (put(x, "d", None), columns)),
        "rows": (
            lambda x, q: jaxfp8.dot_general(x, q, NUMBERS, out_sharding=P("d", None)),
            (
                put(x, "d", "m"),
                jaxfp8.QArray(put(q.qvalue, "m", None), put(q.scale), tiles=q.tiles),
            ),
        ),
        "training": (jax.value_and_grad(train, (0, 1)), (put(x, "d", None), put(w, None, "m"))),
        "quantize": (lambda x: jaxfp8.quantize(x).scale, (put(x, "d", "m"),)),
    }
