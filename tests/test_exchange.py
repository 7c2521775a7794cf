"""Experts on several devices that exchange rows: values, gradients, bytes, capacities, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_layers import (
    DEEPSEEK,
    DELAYED,
    HIDDEN,
    MIXTRAL,
    WIDTH,
    auto_mesh,
    linen_layer,
    named,
    near,
    tokens,
)
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from mesh.traffic import sent

import jaxfp8
import jaxfp8.linen
import jaxfp8.nnx
from jaxfp8._recipes import experts

# The even share, times the number of devices: no row can be dropped.
ALL = 4
TOKEN_RECIPES = [
    jaxfp8.FP8_DYNAMIC,
    jaxfp8.FP8_BLOCK,
    jaxfp8.INT8_DYNAMIC,
    jaxfp8.INT8_ASYMMETRIC,
]


def exchanged(model, factor=ALL, mesh=None, method=None):
    """The layer on devices, as a function of variables and tokens."""
    model = model.copy(axis_name="x", capacity_factor=factor)

    def run(variables, x):
        specs = dict.fromkeys(variables, P())
        own = lambda leaf: P("x") if leaf.shape[:1] == (model.num_experts,) else P()  # noqa: E731
        params = variables["params"]
        specs["params"] = {
            name: jax.tree.map(own, held) if name in ("up", "down") else P()
            for name, held in params.items()
        }
        local = functools.partial(model.apply, method=method)
        split = {"in_specs": (specs, P("x")), "out_specs": P("x")}
        return jax.shard_map(local, mesh=mesh or auto_mesh(), **split)(variables, x)

    return run


def with_gradients(run, variables, x):
    """The sum of squares, with gradients of variables and tokens."""
    loss = lambda variables, x: (run(variables, x) ** 2).sum()  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, (0, 1)))(variables, x)


def close(got, want, bound=1e-4):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=bound, atol=bound), got, want)


def only(variables, expert):
    """Variables whose router gives one expert all tokens that are positive."""
    kernel = jnp.zeros_like(variables["params"]["router"]["kernel"]).at[:, expert].set(1)
    return {**variables, "params": {**variables["params"], "router": {"kernel": kernel}}}


@pytest.mark.parametrize("settings", [MIXTRAL, DEEPSEEK], ids=["mixtral", "deepseek"])
@pytest.mark.parametrize("count", [4, 24])  # one token for each device leaves experts empty
def test_values_and_gradients_are_those_of_one_device(settings, count):
    model, variables, _ = linen_layer(settings)
    x = tokens(count)
    got = with_gradients(exchanged(model), variables, x)
    close(got, with_gradients(model.apply, variables, x))


def test_all_tokens_may_choose_one_expert():
    model, variables, _ = linen_layer({"num_experts": 8, "top_k": 1})
    variables, x = only(variables, 5), abs(tokens(24))
    close(
        with_gradients(exchanged(model), variables, x),
        with_gradients(model.apply, variables, x),
    )


def test_empty_slots_are_rows_of_no_expert():
    model, variables, _ = linen_layer({"num_experts": 8, "top_k": 1})
    x = tokens(24)
    goal = model.apply(variables, x, method="route").experts[:, 0] // 2
    spread = experts.Spread(operation="layer", axis_name="x", capacity_factor=ALL)

    def run(x):
        rows = lambda x, sizes: jnp.full_like(x, sizes.sum())  # noqa: E731
        routed = model.apply(variables, x, method="route")
        return experts.mixture(x, routed, 8, rows, spread)

    y = jax.jit(jax.shard_map(run, mesh=auto_mesh(), in_specs=P("x"), out_specs=P("x")))(x)
    close(y[:, 0], jnp.bincount(goal, length=4)[goal])


def test_one_device_exchanges_with_itself():
    model, variables, _ = linen_layer(MIXTRAL)
    mesh, x = jax.make_mesh((1,), ("x",), (AxisType.Auto,), devices=jax.devices()[:1]), tokens(9)
    run = jax.jit(exchanged(model, 1, mesh))
    close(run(variables, x.reshape(3, 3, WIDTH)), model.apply(variables, x.reshape(3, 3, WIDTH)))


@pytest.mark.filterwarnings("ignore::jaxfp8.FallbackWarning")
@pytest.mark.parametrize("recipe", [jaxfp8.FP8_W8A16, jaxfp8.FP8_STATIC, *TOKEN_RECIPES], ids=named)
def test_values_in_8_bits_are_those_of_one_device(recipe):
    floats, variables, _ = linen_layer(MIXTRAL)
    model, x = floats.copy(recipe=recipe), tokens(16)
    variables, _ = jaxfp8.linen.quantize(model, variables, x)
    close(jax.jit(exchanged(model))(variables, x), jax.jit(model.apply)(variables, x), 1e-5)


def test_gradients_pass_tokens_in_8_bits():
    floats, variables, _ = linen_layer(MIXTRAL)
    model, x = floats.copy(recipe=jaxfp8.INT8_DYNAMIC), tokens(16)
    variables, _ = jaxfp8.linen.quantize(model, variables, x)
    got, want = (
        jax.jit(jax.grad(lambda x, run=run: (run(variables, x) ** 2).sum()))(x)
        for run in (exchanged(model), model.apply)
    )
    close(got, want)


def test_it_trains_in_fp8():
    product = functools.partial(jaxfp8.linen.Fp8RaggedDot, recipe=DELAYED)
    model, alone, _ = linen_layer(MIXTRAL, ragged_dot_cls=product)
    spread, x = alone, tokens(24)
    for _ in range(2):  # the second step has scales of the first
        one, gradients = with_gradients(model.apply, alone, x)
        four, mine = with_gradients(exchanged(model), spread, x)
        (gradients, state), (mine, own) = map(jaxfp8.linen.split_state, (gradients[0], mine[0]))
        near((four, mine, own), (one, gradients, state), 1e-4)
        alone, spread = {**alone, **state}, {**spread, **own}


# What is sent


def bytes_sent(model, variables, factor, x):
    """Bytes of the collectives of a forward pass; a float counts as two bytes."""
    return sum(one.bytes for one in sent(exchanged(model, factor), variables, x))


def test_bytes_are_those_of_the_slots():
    floats, variables, _ = linen_layer({"num_experts": 8, "top_k": 1}, dtype=jnp.bfloat16)
    x, found = tokens(64, dtype=jnp.bfloat16), {}
    for recipe in (None, jaxfp8.FP8_DYNAMIC):
        model = floats.copy(recipe=recipe)
        held = variables if recipe is None else jaxfp8.linen.quantize(model, variables, x)[0]
        found[recipe] = bytes_sent(model, held, 1.5, x)
    slots = 4 * 6  # four devices, and 1.5 of the 4 rows that are the even share
    assert found[None] == slots * (2 * WIDTH + 2 * WIDTH + 4)  # tokens, results, experts
    assert found[jaxfp8.FP8_DYNAMIC] == slots * (WIDTH + 2 + 2 * WIDTH + 4)
    most = bytes_sent(floats, variables, 1e308, x)
    assert most == 4 * 16 * (2 * WIDTH + 2 * WIDTH + 4)  # all tokens of a device
    gathered = bytes_sent(floats, variables, None, x)
    assert found[None] < gathered / 2


# What does not fit


@pytest.mark.parametrize("factor", [0.01, 0.5, 1.0])
def test_rows_of_later_tokens_are_dropped_and_count_as_nothing(factor):
    settings = {"num_experts": 8, "top_k": 3, "renormalize": False}
    model, variables, _ = linen_layer(settings)
    x = tokens(24)
    routed = model.apply(variables, x, method="route")
    capacity, kept = int(np.ceil(factor * 6 * 3 / 4)), np.zeros((24, 3), bool)
    for device in range(4):
        rows = range(6 * device, 6 * device + 6)
        seen = np.zeros(4, int)
        for token in rows:
            for number, expert in enumerate(routed.experts[token]):
                kept[token, number] = seen[expert // 2] < capacity
                seen[expert // 2] += 1

    def masked(variables, x):
        chosen = model.apply(variables, x, method="route")
        chosen = experts.Routed(chosen.weights * kept, chosen.experts, chosen.scores)
        up, down = (variables["params"][name]["kernel"] for name in ("up", "down"))

        def network(rows, sizes):
            gate, other = jnp.split(jax.lax.ragged_dot(rows, up, sizes), 2, -1)
            return jax.lax.ragged_dot(jax.nn.silu(gate) * other, down, sizes)

        return experts.mixture(x, chosen, 8, network, experts.Spread(operation="layer"))

    count = jax.jit(exchanged(model, factor, method=lambda self, x: self.dropped(x)[None]))(
        variables, x
    )
    np.testing.assert_array_equal(count, (~kept).reshape(4, -1).sum(1))
    assert count.sum() > 0
    got = with_gradients(exchanged(model, factor), variables, x)
    close(got, with_gradients(masked, variables, x))


def test_nothing_is_dropped_where_all_tokens_are_gathered():
    model, variables, _ = linen_layer(MIXTRAL)
    assert model.apply(variables, tokens(5), method="dropped") == 0


@pytest.mark.filterwarnings("ignore::jaxfp8.FallbackWarning")
@pytest.mark.parametrize("recipe", [None, jaxfp8.FP8_DYNAMIC], ids=named)
@pytest.mark.parametrize("factor", [0.5, ALL])
def test_nan_stays_with_its_token(recipe, factor):
    model, variables, _ = linen_layer(MIXTRAL)
    model, x = model.copy(recipe=recipe), tokens(16)
    if recipe is not None:
        variables, _ = jaxfp8.linen.quantize(model, variables, x)
    run = jax.jit(exchanged(model, factor))
    y = np.asarray(run(variables, x.at[8].set(jnp.nan)))  # the first token of its device
    assert np.isnan(y[8]).all() and np.isfinite(np.delete(y, 8, 0)).all()


# nnx, and wrong arguments


def test_nnx_exchanges_and_counts_too():
    model = jaxfp8.nnx.MoE(
        WIDTH, HIDDEN, **MIXTRAL, axis_name="x", capacity_factor=0.5, rngs=nnx.Rngs(0)
    )
    graph, state = nnx.split(model)
    twin = jaxfp8.linen.MoE(HIDDEN, **MIXTRAL)
    params = nnx.to_pure_dict(state)
    specs = {name: P("x") if name in ("up", "down") else P() for name in params}

    def run(params, x):
        own = jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(own, params)
        moe = nnx.merge(graph, own)
        return moe(x), moe.dropped(x)[None]

    split = {"in_specs": (specs, P("x")), "out_specs": P("x")}
    x = tokens(16)
    y, dropped = jax.jit(jax.shard_map(run, mesh=auto_mesh(), **split))(params, x)
    close(y, jax.jit(exchanged(twin, 0.5))({"params": params}, x), 1e-6)
    assert dropped.shape == (4,) and dropped.sum() > 0


@pytest.mark.parametrize(
    ("axis_name", "factor", "reason"),
    [
        ("x", 0, "is 0, but a finite number above 0 is needed; .*or None to gather"),
        ("x", -1.5, r"is -1\.5, but a finite number above 0"),
        ("x", float("nan"), "is nan, but a finite number above 0"),
        ("x", float("inf"), "is inf, but a finite number above 0"),
        ("x", True, "is True, but a finite number above 0"),
        ("x", "2", "is '2', but a finite number above 0"),
        (None, 1.5, r"is 1\.5, but devices exchange rows along a mesh axis; give `axis_name`"),
    ],
)
@pytest.mark.parametrize("package", ["nnx", "linen"])
def test_wrong_capacities_are_refused(package, axis_name, factor, reason):
    given = {**MIXTRAL, "axis_name": axis_name, "capacity_factor": factor}
    with pytest.raises(ValueError, match=rf"jaxfp8\.{package}\.MoE.*`capacity_factor` {reason}"):
        if package == "nnx":
            jaxfp8.nnx.MoE(WIDTH, HIDDEN, **given, rngs=nnx.Rngs(0))
        else:
            jaxfp8.linen.MoE(HIDDEN, **given).init(jax.random.key(0), tokens(1))
