"""Weights that are split over devices are gathered as codes, and amaxes by one sum a step."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfp8

COLLECTIVE = re.compile(r" = (?P<result>\(.*?\)|\S+) (?P<kind>all-gather|all-reduce)(-start)?\(")
ARRAY = re.compile(r"([a-z]\w+)\[([\d,]*)\]")
NUMBERS = (((1,), (0,)), ((), ()))
DELAYED = jaxfp8.DelayedScaling(amax_history_length=4)
LAYERS, SIZE, ROWS = 2, 64, 32
SPLIT, WHOLE = P("fsdp", None), P()


def loss(multiply, weights, states, x):
    for w, state in zip(weights, states, strict=True):
        x = jnp.tanh(multiply(x, w.astype(x.dtype), NUMBERS, state, recipe=DELAYED))
    return x.astype(jnp.float32).sum()


def arrays(mesh):
    """Weights, states and activations on a mesh."""
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    weights = [jax.random.normal(key, (SIZE, SIZE)) / 8 for key in keys[1:]]
    states = [jaxfp8.ScalingState.init(DELAYED) for _ in weights]
    x = jax.random.normal(keys[0], (ROWS, SIZE), jnp.bfloat16)
    places = [NamedSharding(mesh, spec) for spec in (SPLIT, WHOLE, SPLIT)]
    return [jax.device_put(tree, at) for tree, at in zip((weights, states, x), places, strict=True)]


def automatic(mesh):
    """The gradients of weights lie as the weights do."""

    def gradients(*args):
        found, states = jax.grad(functools.partial(loss, jaxfp8.fp8_dot_general), (0, 1))(*args)
        return jax.lax.with_sharding_constraint(found, NamedSharding(mesh, SPLIT)), states

    return gradients


def explicit(mesh):
    multiply = functools.partial(jaxfp8.fp8_dot_general, out_sharding=SPLIT)
    return jax.grad(functools.partial(loss, multiply), (0, 1))


def manual(mesh):
    """Each device encodes its part, and gathers codes. Gradients are reduced in bfloat16."""

    def multiply(x, w, numbers, state, *, recipe):
        codes = jaxfp8.encode_weight(w, numbers, state, recipe=recipe).gathered("fsdp", 0)
        w = jax.lax.all_gather(w, "fsdp", axis=0, tiled=True)  # for its gradient: not read
        return jaxfp8.fp8_dot_general(x, w, numbers, state, recipe=recipe, rhs_codes=codes)

    @jax.shard_map(mesh=mesh, in_specs=(SPLIT, WHOLE, SPLIT), out_specs=WHOLE)
    def total(weights, states, x):
        return jax.lax.psum(loss(multiply, weights, states, x), "fsdp")

    return jax.grad(total, (0, 1))


@pytest.mark.parametrize("kind", [automatic, explicit, manual], ids=lambda kind: kind.__name__)
def test_weights_are_gathered_as_codes_and_amaxes_together(kind):
    axis = AxisType.Explicit if kind is explicit else AxisType.Auto
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(axis,))
    with jax.set_mesh(mesh):
        args = arrays(mesh)
        program = jax.jit(kind(mesh)).lower(*args).compile()
        found, states = program(*args)
    sent = [m for line in program.as_text().splitlines() if (m := COLLECTIVE.search(line))]
    gathered = [ARRAY.findall(m["result"]) for m in sent if m["kind"] == "all-gather"]
    assert gathered and all(dtype == "u8" for (dtype, _), *_ in gathered)
    amaxes = [m["result"] for m in sent if m["kind"] == "all-reduce"]
    sizes = [math.prod(map(int, filter(None, s.split(",")))) for _, s in ARRAY.findall(amaxes[0])]
    assert len(amaxes) == 1 and sum(sizes) <= 3 * LAYERS + 1
    weights, first, x = jax.device_get(args)
    one_device = functools.partial(loss, jaxfp8.fp8_dot_general)
    want, new = jax.jit(jax.grad(one_device, (0, 1)))(weights, first, x)
    for got, other in zip(found, want, strict=True):
        assert np.linalg.norm(got - other) < 0.02 * np.linalg.norm(other)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-2)
    jax.tree.map(close, states, new)


def gathered_in_blocks(size, devices=2):
    """A weight [size, 8] in blocks, encoded in shards and gathered."""
    recipe = jaxfp8.CurrentScaling(granularity="block")
    mesh = jax.make_mesh((devices,), ("fsdp",), axis_types=(AxisType.Auto,))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=SPLIT, out_specs=WHOLE, check_vma=False)
    def gathered(w):
        return jaxfp8.encode_weight(w, NUMBERS, recipe=recipe).gathered("fsdp", 0)

    return jax.eval_shape(gathered, jnp.ones((size, 8)))


@pytest.mark.parametrize("size", [448, 384])
def test_a_tile_that_a_shard_would_cut_is_refused(size):
    says = f"axis 0 has {size // 2} values in each shard, but tiles of 128.*split another axis"
    with pytest.raises(ValueError, match=says):
        gathered_in_blocks(size)


@pytest.mark.parametrize(("size", "scales"), [(128, 2), (512, 4)])
def test_tiles_that_divide_a_shard_are_gathered(size, scales):
    assert gathered_in_blocks(size).forward.scale.shape == (scales, 1)


@pytest.mark.parametrize("checked", [True, False])
def test_each_device_has_the_amax_of_all_shards(checked):
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (SPLIT, WHOLE), "out_specs": P("fsdp"), "check_vma": checked}

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, **specs)
    def amaxes(w, state):
        codes = jaxfp8.encode_weight(w, NUMBERS, state, recipe=DELAYED).gathered("fsdp", 0)
        return codes.scaling.amax_history[:1]

    w = jnp.arange(1.0, 9.0).reshape(8, 1)
    got = amaxes(w, jaxfp8.ScalingState.init(DELAYED))
    np.testing.assert_array_equal(got, [8, 8, 8, 8])


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_a_product_takes_gathered_codes(granularity):
    recipe = jaxfp8.CurrentScaling(granularity=granularity)
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(WHOLE, SPLIT), out_specs=P("fsdp"))
    def product(x, part):
        codes = jaxfp8.encode_weight(part, NUMBERS, recipe=recipe).gathered("fsdp", 0)
        w = jax.lax.all_gather(part, "fsdp", axis=0, tiled=True)
        return jaxfp8.fp8_dot_general(x, w, NUMBERS, recipe=recipe, rhs_codes=codes)

    x, w = (jax.random.normal(jax.random.key(0), shape) for shape in ((4, 64), (64, 8)))
    want = jnp.concatenate([x @ w] * 2)
    assert np.linalg.norm(product(x, w) - want) < 0.08 * np.linalg.norm(want)
