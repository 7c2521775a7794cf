"""Programs on meshes beside JAX's persistent cache; prints what the cache says of each."""

import json
import sys

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxfp8

NUMBERS = (((1,), (0,)), ((), ()))
EVENTS = {"/jax/compilation_cache/cache_hits": "hit", "/jax/compilation_cache/cache_misses": "miss"}


def trained(x, w):
    y = jaxfp8.fp8_dot_general(x, w, NUMBERS, recipe=jaxfp8.CurrentScaling())
    return jnp.sum(y**2)


def asked():
    """A call of JAX's own that XLA asks how to split."""

    def product(x, w):
        return x @ w

    call = custom_partitioning(product)

    def partition(mesh, operands, result):
        return mesh, product, result.sharding, tuple(a.sharding for a in operands)

    call.def_partition(partition, sharding_rule="i k, k j -> i j")
    return lambda x, w: jnp.sum(call(x, w))


def run(folder):
    """Compiles each program, with and without JAX's flag for calls that XLA asks how to split."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    said, said_of = [], {}
    jax.monitoring.register_event_listener(lambda event, **_: said.append(EVENTS.get(event, "")))
    auto, explicit = AxisType.Auto, AxisType.Explicit
    programs = {
        "explicit axes": (jax.grad(trained, (0, 1)), explicit, False),
        "automatic axes, flag": (jax.grad(trained, (0, 1)), auto, True),
        "automatic axes, no flag": (trained, auto, False),
        "JAX's own, no flag": (asked(), auto, False),
    }
    for name, (function, kind, flag) in programs.items():
        jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", flag)
        with jax.set_mesh(jax.make_mesh((2, 2), ("d", "m"), axis_types=(kind, kind))):
            x = jax.device_put(jnp.ones((16, 64)), P("d", None))
            w = jax.device_put(jnp.ones((64, 32)), P(None, "m"))
            lowered = jax.jit(function).lower(x, w)
            said.clear()
            lowered.compile()
            said_of[name] = [word for word in said if word]
    print(json.dumps(said_of))


run(sys.argv[1])
