"""Several GPUs: operands spread over a mesh, and devices that work at the same time."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfp8

M, K, N = 64, 256, 128
NUMBERS = (((1,), (0,)), ((), ()))
KINDS = ("weight-only", "fp8", "int8", "asymmetric")
# How x [M, K] and w [K, N] lie on the mesh.
SPREADS = {
    "rows": (P("d", None), P()),
    "columns": (P(), P(None, "d")),
    "depth": (P(None, "d"), P("d", None)),
    "nothing": (P(), P()),
}

each_kind = pytest.mark.parametrize("kind", KINDS)
each_spread = pytest.mark.parametrize("spread", SPREADS)


@pytest.fixture(autouse=True)
def two(gpu):
    """Skips where there are fewer."""
    if len(jax.devices("cuda")) < 2:
        pytest.skip("needs two NVIDIA GPUs")


@pytest.fixture(params=["auto", "explicit"])
def mesh(request):
    """Two GPUs, along an axis that XLA or the types of arrays split."""
    kind = AxisType.Auto if request.param == "auto" else AxisType.Explicit
    return jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices()[:2])


@pytest.fixture
def auto_mesh():
    """Two GPUs for shard_map, which takes arrays from one device only along automatic axes."""
    return jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


def normal(seed: int, *shape: int, dtype=jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def operands(kind: str, seed: int = 0):
    """Activations [M, K], as they are or quantized, and a weight [K, N]."""
    x, w = normal(seed, M, K), normal(100 + seed, K, N) / 16
    dtype = jnp.float8_e4m3fn if kind in ("weight-only", "fp8") else jnp.int8
    w = jaxfp8.quantize(w, dtype, channelwise_axes=(1,))
    if kind == "weight-only":
        return x, w
    zero = True if kind == "asymmetric" else None
    return jaxfp8.quantize(x, dtype, channelwise_axes=(0,), zero_point=zero), w


def layer(x, w, bias, out_sharding=None):
    """A product with what follows it."""
    what = {"activation": "silu", "preferred_element_type": jnp.float32}
    return jaxfp8.matmul(x, w, bias=bias, out_sharding=out_sharding, **what)


def specs_of(x, spec):
    """The partition of each leaf: an axis of size 1 is whole everywhere."""

    def of_leaf(leaf):
        axes = (*spec, None, None, None)[: leaf.ndim]
        return P(*(None if n == 1 else a for n, a in zip(leaf.shape, axes, strict=True)))

    return jax.tree.map(of_leaf, x)


def spread_out(mesh, x, spec):
    """An array or a `QArray` on the mesh."""

    def put(leaf, spec):
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(put, x, specs_of(x, spec))


def close(got, want, tolerance=1e-3):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


@each_kind
@each_spread
def test_a_program_on_a_mesh(mesh, spread, kind):
    x, w = operands(kind)
    bias = normal(3, N, dtype=jnp.float32)
    want = jax.jit(layer)(x, w, bias)
    specs = SPREADS[spread]
    x, w = spread_out(mesh, x, specs[0]), spread_out(mesh, w, specs[1])
    whole = NamedSharding(mesh, P(None, None)) if spread == "depth" else None
    close(jax.jit(lambda x, w, bias: layer(x, w, bias, whole))(x, w, bias), want)


@each_kind
@pytest.mark.parametrize("spread", ["rows", "columns"])
def test_inside_shard_map_each_device_has_its_own_product(auto_mesh, spread, kind):
    x, w = operands(kind)
    bias = normal(3, N, dtype=jnp.float32)
    in_specs = [specs_of(part, spec) for part, spec in zip((x, w), SPREADS[spread], strict=True)]
    out = P("d", None) if spread == "rows" else P(None, "d")
    local = jax.shard_map(
        layer,
        mesh=auto_mesh,
        in_specs=(*in_specs, P("d") if spread == "columns" else P()),
        out_specs=out,
    )
    with jaxfp8.strict():
        got = jax.jit(local)(x, w, bias)
    close(got, jax.jit(layer)(x, w, bias))


@pytest.mark.parametrize("kind", ["weight-only", "fp8", "int8"])
def test_sums_over_shards_come_before_what_follows_the_product(auto_mesh, kind):
    x, w = operands(kind)
    bias = normal(3, N, dtype=jnp.float32)
    in_specs = [specs_of(part, spec) for part, spec in zip((x, w), SPREADS["depth"], strict=True)]

    def local(x, w, bias):
        part = jaxfp8.matmul(x, w, preferred_element_type=jnp.float32)
        return jax.nn.silu(jax.lax.psum(part, "d") + bias)

    program = jax.shard_map(local, mesh=auto_mesh, in_specs=(*in_specs, P()), out_specs=P())
    close(jax.jit(program)(x, w, bias), jax.jit(layer)(x, w, bias))


@each_kind
def test_two_devices_at_once(kind):
    problems = [(operands(kind, seed), jax.devices()[seed % 2]) for seed in range(6)]
    placed = [jax.device_put((*p, jnp.zeros(N)), device) for p, device in problems]
    bias = jnp.zeros(N)
    want = [
        np.asarray(jax.jit(layer)(*jax.device_put((*p, bias), jax.devices()[0])))
        for p, _ in problems
    ]

    def repeat(i):
        return [np.asarray(jax.jit(layer)(*placed[i])) for _ in range(20)]

    with ThreadPoolExecutor(6) as pool:
        for i, results in enumerate(pool.map(repeat, range(6))):
            for result in results:
                np.testing.assert_array_equal(result, want[i])


@pytest.mark.parametrize("axes", [{}, {"channelwise_axes": (0,)}, {"tiled_axes": {0: 128, 1: 128}}])
@pytest.mark.parametrize("spec", [P("d", None), P(None, "d")], ids=str)
def test_quantizing_a_sharded_array(mesh, spec, axes):
    x = normal(5, 256, 512)
    want = jaxfp8.quantize(x, **axes)
    sharded = jax.device_put(x, NamedSharding(mesh, spec))
    got = jax.jit(lambda x: jaxfp8.quantize(x, **axes))(sharded)
    jax.tree.map(np.testing.assert_array_equal, _bytes(got), _bytes(want))


def _bytes(q):
    return np.asarray(q.qvalue).view(np.uint8), np.asarray(q.scale)


@pytest.mark.parametrize("spread", ["rows", "columns", "nothing"])
def test_a_scan_over_layers(mesh, spread):
    stack = jaxfp8.quantize(normal(6, 5, K, K) / 16, channelwise_axes=(0, 2))
    x = normal(7, M, K)

    of_x, of_w = SPREADS[spread]

    def model(x, stack, place=lambda y: y):
        def step(x, w):
            return place(jnp.tanh(jaxfp8.matmul(x, w))), None

        return jax.lax.scan(step, x, stack)[0]

    def on_mesh(x, stack):
        carried = NamedSharding(mesh, P(*(*of_x, None, None)[:2]))  # a carry keeps its type
        explicit = AxisType.Explicit in mesh.axis_types
        return model(x, stack, lambda y: jax.reshard(y, carried) if explicit else y)

    want = jax.jit(model)(x, stack)
    got = jax.jit(on_mesh)(spread_out(mesh, x, of_x), spread_out(mesh, stack, (None, *of_w)))
    close(got, want, 1e-2)


@pytest.mark.parametrize("recipe", [jaxfp8.DelayedScaling(), jaxfp8.CurrentScaling()], ids=type)
@pytest.mark.parametrize("mapped", [False, True], ids=["jit", "shard_map"])
def test_a_training_step_on_half_the_batch_each(mesh, mapped, recipe):
    x, g, w = normal(8, M, K), normal(9, M, N), normal(10, K, N, dtype=jnp.float32) / 16
    delayed = isinstance(recipe, jaxfp8.DelayedScaling)
    state = jaxfp8.ScalingState.init(recipe) if delayed else None

    def gradients(x, g, w, state, total=lambda y: y):
        def loss(w, state):
            y = jaxfp8.fp8_dot_general(x, w, NUMBERS, state, recipe=recipe)
            return total(jnp.sum(y.astype(jnp.float32) * g))

        return jax.grad(loss, (0, 1))(w, state)

    want = jax.jit(gradients)(x, g, w, state)
    if mapped:

        def local(*args):
            return gradients(*args, total=lambda y: jax.lax.psum(y, "d"))

        rows = P("d", None)
        program = jax.shard_map(local, mesh=mesh, in_specs=(rows, rows, P(), P()), out_specs=P())
    else:
        program = gradients
    rows = NamedSharding(mesh, P("d", None))
    got = jax.jit(program)(jax.device_put(x, rows), jax.device_put(g, rows), w, state)
    close(got, want, 0.1)  # each shard may have a scale of its own
    if delayed:
        assert got[1].input.amax_history[0] == want[1].input.amax_history[0]


@pytest.mark.parametrize("recipe", [jaxfp8.FP8_W8A16, jaxfp8.FP8_DYNAMIC], ids=lambda r: r.name)
@pytest.mark.parametrize("capacity", [None, 2], ids=["gathered", "exchanged"])
def test_experts_of_two_devices(auto_mesh, recipe, capacity):
    pytest.importorskip("flax")
    import jaxfp8.linen

    layer, x = jaxfp8.linen.MoE(256, 8, 2, dtype=jnp.bfloat16, recipe=recipe), normal(11, M, K)
    variables = layer.init(jax.random.key(12), x)
    split = layer.copy(axis_name="d", capacity_factor=capacity)
    specs = {"params": {"router": P(), "up": P("d"), "down": P("d")}}
    shares = {"in_specs": (specs, P("d")), "out_specs": P("d")}
    program = jax.jit(jax.shard_map(split.apply, mesh=auto_mesh, **shares))
    close(program(variables, x), jax.jit(layer.apply)(variables, x), 5e-3)
