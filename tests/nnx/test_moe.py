"""`jaxfp8.nnx.MoE`: values, 8 bits, reports, load, FP8 training, scan, meshes."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import mixtures
import numpy as np
import pytest
from expert_layers import (
    BIASED,
    DEEPSEEK,
    HIDDEN,
    MIXTRAL,
    NAMES,
    TRAINING,
    WIDTH,
    Block,
    auto_mesh,
    experts_are_in_8_bits,
    named,
    near,
    nnx_layer,
    plain,
    published,
    tokens,
)
from flax import nnx
from jax.sharding import PartitionSpec as P
from mesh.traffic import sent

import jaxfp8
import jaxfp8.nnx
from jaxfp8._recipes.recipe_ragged import recipe_ragged_dot

RECIPES = [
    jaxfp8.FP8_W8A16,
    jaxfp8.INT8_W8A16,
    jaxfp8.FP8_DYNAMIC,
    jaxfp8.FP8_STATIC,
    jaxfp8.FP8_BLOCK,
    jaxfp8.INT8_DYNAMIC,
    jaxfp8.INT8_ASYMMETRIC,
]


def quantized(settings, recipe):
    """A model in 8 bits, the changes, and the parameters that it stands for."""
    model, params = nnx_layer(settings)
    if recipe is None:
        return model, None, params
    changes = jaxfp8.nnx.quantize(model, recipe, sample=(tokens(16),))
    held = {n: getattr(model.moe, n) for n in NAMES}
    held = {n: m.weight for n, m in held.items() if isinstance(m, jaxfp8.nnx.EightBitLayer)}
    return model, changes, params | {n: jaxfp8.dequantize(w) for n, w in held.items()}


@pytest.mark.parametrize("settings", [DEEPSEEK, BIASED], ids=["deepseek", "biased"])
def test_values_are_those_of_all_experts_weighted(settings):
    model, params = nnx_layer(settings)
    x = tokens(19)
    exact = mixtures.dense(params, x, settings)
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(model, x), exact, rtol=2e-5, atol=2e-5)


def test_bfloat16_stays_bfloat16():
    model, params = nnx_layer(MIXTRAL, dtype=jnp.bfloat16)
    x = tokens(20, dtype=jnp.bfloat16)
    y = nnx.jit(lambda model, x: model(x))(model, x)
    exact = mixtures.dense(params, x, MIXTRAL)
    assert y.dtype == jnp.bfloat16
    assert np.linalg.norm(np.asarray(y, np.float64) - exact) < 0.02 * np.linalg.norm(exact)


@pytest.mark.parametrize("recipe", [None, jaxfp8.INT8_DYNAMIC], ids=named)
def test_nan_stays_with_its_token(recipe):
    run, x = jax.jit(quantized(MIXTRAL, recipe)[0]), tokens(9)
    for bad in (jnp.nan, jnp.inf):
        y = np.asarray(run(x.at[4].set(bad)))
        others = [np.delete(rows, 4, 0) for rows in (y, run(x))]
        np.testing.assert_allclose(*others, rtol=1e-5, atol=1e-6)
        assert np.isnan(y[4]).all()


def test_nan_of_an_expert_stays_with_its_tokens():
    model, _, _ = quantized(MIXTRAL, jaxfp8.FP8_W8A16)
    x, call = tokens(30), nnx.jit(lambda model, x: model(x))
    want, chosen = call(model, x), model.moe.route(x).experts
    scale = model.moe.down.kernel_scale
    scale[...] = scale[...].at[2].set(jnp.nan)
    of_two = np.asarray((chosen == 2).any(-1))
    y = np.asarray(call(model, x))
    assert of_two.any() and np.isnan(y[of_two]).all()
    np.testing.assert_array_equal(y[~of_two], want[~of_two])


def test_the_selection_bias_has_no_gradient():
    model, _ = nnx_layer(DEEPSEEK)
    gradients = nnx.jit(nnx.grad(lambda model: model(tokens(5)).sum()))(model)
    assert not gradients["moe"]["selection_bias"][...].any()
    assert gradients["moe"]["router"]["kernel"][...].any()


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_experts_are_in_8_bits_and_the_router_is_not(recipe):
    experts_are_in_8_bits(recipe, *quantized(DEEPSEEK, recipe))


@pytest.mark.parametrize("recipe", [jaxfp8.FP8_W8A16, jaxfp8.INT8_DYNAMIC], ids=named)
def test_biases_stay_in_floats_and_have_gradients(recipe):
    model, changes, params = quantized(BIASED, recipe)
    x = tokens(16)
    assert len(changes.changed) == 4 and len(changes.left) == 2
    exact, y = mixtures.dense(params, x, BIASED), jax.jit(model)(x)
    near(y, exact, 2e-6 if recipe.activation is None else 0.06)
    gradients = nnx.jit(nnx.grad(lambda model: model(x).sum()))(model)["moe"]
    weights = (
        jnp.zeros((16, 5))
        .at[jnp.arange(16)[:, None], model.moe.route(x).experts]
        .set(model.moe.route(x).weights)
    )
    want = jnp.broadcast_to(weights.sum(0)[:, None], (5, WIDTH))
    np.testing.assert_allclose(gradients["down"]["bias"][...], want, rtol=1e-4)
    assert gradients["up"]["bias"][...].any() and gradients["router"]["bias"][...].any()


def test_gradients_of_biases_in_bfloat16_are_sums_of_all_rows():
    layer = jaxfp8.nnx.GroupedLinear(2, 1, 1, dtype=jnp.bfloat16, use_bias=True, rngs=nnx.Rngs(0))
    x, sizes, w = jnp.ones((4096, 1), jnp.bfloat16), jnp.array([3000, 1096]), jnp.ones((2, 1, 1))

    def eight(bias):
        return recipe_ragged_dot(x, w, sizes, jaxfp8.FP8_W8A16, bias=bias).sum(dtype=jnp.float32)

    of_floats = nnx.grad(lambda layer: layer(x, sizes).sum(dtype=jnp.float32))(layer)["bias"][...]
    for found in (of_floats, jax.grad(eight)(jnp.zeros((2, 1), jnp.bfloat16))):
        np.testing.assert_allclose(np.float32(found[:, 0]), sizes, rtol=2**-8)


@pytest.mark.parametrize("recipe", [jaxfp8.FP8_AS_INT8, jaxfp8.INT8_SPLIT], ids=named)
def test_recipes_that_groups_lack_are_refused(recipe):
    with pytest.raises(ValueError, match=r"`recipe` is .*without `terms` and `compute`"):
        quantized(MIXTRAL, recipe)


@pytest.mark.parametrize("recipe", [jaxfp8.FP8_W8A16, jaxfp8.FP8_DYNAMIC], ids=named)
def test_gradients_pass_experts_in_8_bits_without_a_fallback(recipe):
    run, _, params = quantized(MIXTRAL, recipe)
    x = tokens(16)
    with jaxfp8.strict():
        got = jax.jit(jax.grad(lambda x: (run(x) ** 2).sum()))(x)
    want = jax.jit(jax.grad(lambda x: (plain(params, x, MIXTRAL) ** 2).sum()))(x)
    bound = 1e-5 if recipe.activation is None else 0.1
    assert np.linalg.norm(got - want) < bound * np.linalg.norm(want)


def test_reports_have_a_row_for_each_product():
    report = jaxfp8.nnx.report(nnx_layer(DEEPSEEK)[0], tokens(16), recipe=jaxfp8.FP8_DYNAMIC)
    rows = {row.path.rpartition("/")[2]: row for row in report.rows}
    assert set(rows) == {"up", "down", "shared_up", "shared_down"}
    assert all(20 < row.sqnr < 40 and row.weight and row.activation for row in rows.values())


def test_explain_has_a_row_for_each_product():
    run, _, _ = quantized(DEEPSEEK, jaxfp8.FP8_W8A16)
    report = jaxfp8.explain(run)(jax.ShapeDtypeStruct((16, WIDTH), jnp.float32))
    rows = {row.path.rpartition("/")[2]: row for row in report.calls}
    assert {name: row.dims for name, row in rows.items()} == {
        "up": (1, 48, 2 * HIDDEN, WIDTH),
        "down": (1, 48, WIDTH, HIDDEN),
        "shared_up": (1, 16, 10, WIDTH),
        "shared_down": (1, 16, WIDTH, 5),
    }
    assert all(row.already and row.kernels["cpu"] for row in rows.values())


def test_prepare_leaves_experts():
    model, _, _ = quantized(MIXTRAL, jaxfp8.INT8_DYNAMIC)
    reasons = {row.reason for row in jaxfp8.nnx.prepare(model).rows}
    assert reasons == {"products of groups take no prepared weight"}


def test_dequantize_gives_the_layers_of_floats_back():
    model, _, params = quantized(BIASED, jaxfp8.FP8_W8A16)
    jaxfp8.nnx.dequantize(model)
    assert type(model.moe.up) is jaxfp8.nnx.GroupedLinear
    np.testing.assert_array_equal(model.moe.up.kernel[...], params["up"])
    np.testing.assert_array_equal(model.moe.up.bias[...], params["up_bias"])


def test_load_joins_gate_and_up_of_each_expert():
    tensors, mapping = published()
    model = nnx.eval_shape(lambda: Block({"num_experts": 2, "top_k": 1}, nnx.Rngs(0)))
    jaxfp8.nnx.load(model, tensors, mapping)
    for number in range(2):
        both = [jaxfp8.dequantize(tensors[f"{number}.{kind}"]).T for kind in ("gate", "up")]
        ours = jaxfp8.dequantize(model.moe.up.weight)[number]
        np.testing.assert_array_equal(ours, np.concatenate(both, 1))


def test_a_list_for_each_expert_is_needed():
    tensors, mapping = published()
    names = {**mapping, "moe/up/kernel": [["0.gate", "0.up", "1.gate", "1.up"]]}
    model = nnx.eval_shape(lambda: Block({"num_experts": 2, "top_k": 1}, nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"names 1 lists.*a list for each index"):
        jaxfp8.nnx.load(model, tensors, names)


def test_names_of_mesh_axes_stay_with_experts_in_8_bits():
    init = nn.initializers.lecun_normal(batch_axis=(0,))
    metadata = nnx.with_partitioning(init, ("e", None, None), eager_sharding=False)
    ours, _ = nnx_layer(MIXTRAL, experts_init=metadata)
    jaxfp8.nnx.quantize(ours, jaxfp8.FP8_W8A16)
    assert ours.moe.up.kernel.get_metadata()["out_sharding"] == ("e", None, None)


@pytest.mark.parametrize("name", TRAINING)
def test_it_trains_in_fp8(name):
    model, _ = nnx_layer(DEEPSEEK)
    x = tokens(24)
    step = nnx.jit(nnx.grad(lambda model: (model(x) ** 2).sum()))
    want = step(model)
    changes = jaxfp8.nnx.fp8_training(model, TRAINING[name])
    assert len(changes.changed) == 4
    for _ in range(2):
        got = step(model)
    near(got, want, 0.2)
    if name == "delayed":
        amax = model.moe.up.ragged_dot.input_amax_history[...]
        np.testing.assert_allclose(amax[0], jnp.abs(x).max())
    else:
        assert {row.path for row in jaxfp8.nnx.report(model, x).rows} >= {"moe/up", "moe/down"}
    jaxfp8.nnx.dequantize(model)
    near(step(model), want, 1e-6)


def test_scan_over_layers_of_experts():
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def stack(rngs):
        return Block(MIXTRAL, rngs)

    def run(model, x, remat=False):
        def one(x, block):
            return x + block(x)

        axes = {"in_axes": (nnx.Carry, 0), "out_axes": nnx.Carry}
        return nnx.scan(nnx.remat(one) if remat else one, **axes)(x, model.block)

    class Stack(nnx.Module):
        def __init__(self):
            self.block = stack(nnx.Rngs(0))

    model, x = Stack(), tokens(6)
    names = ("router", "up", "down")
    kernels = {name: getattr(model.block.moe, name).kernel[...] for name in names}

    def exact(kernels, x):
        for number in range(2):
            own = {name: w[number] for name, w in kernels.items()}
            x = x + mixtures.dense(own, x, MIXTRAL)
        return x

    call = nnx.jit(run)
    step = nnx.jit(nnx.grad(lambda model: run(model, x, remat=True).sum()))
    np.testing.assert_allclose(call(model, x), exact(kernels, x), rtol=1e-5, atol=1e-5)
    gradients = step(model)
    jaxfp8.nnx.fp8_training(model, jaxfp8.CurrentScaling())
    near(step(model), gradients, 0.3)
    jaxfp8.nnx.dequantize(model)
    jaxfp8.nnx.quantize(model, jaxfp8.FP8_W8A16)
    assert model.block.moe.up.weight.shape == (2, 4, WIDTH, 2 * HIDDEN)
    for name in ("up", "down"):
        kernels[name] = jaxfp8.dequantize(getattr(model.block.moe, name).weight)
    np.testing.assert_allclose(call(model, x), exact(kernels, x), rtol=1e-5, atol=1e-5)


# On a mesh


def split(model, mesh):
    """A program that splits tokens and experts, and the state of the model split so."""
    graph, state = nnx.split(model)

    def spec(path, _):
        return P("x") if {"up", "down"} & {key for key in path if isinstance(key, str)} else P()

    specs = nnx.from_flat_state([(p, spec(p, v)) for p, v in nnx.to_flat_state(state)])
    pure, specs = nnx.to_pure_dict(state), nnx.to_pure_dict(specs)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs, P("x")), out_specs=P("x"))
    def run(state, x):
        own = nnx.state(nnx.merge(graph, nnx.split(model)[1]))
        nnx.replace_by_pure_dict(own, state)
        return nnx.merge(graph, own)(x)

    return run, pure


@pytest.mark.filterwarnings("ignore::jaxfp8.FallbackWarning")
@pytest.mark.parametrize("recipe", [jaxfp8.FP8_W8A16, jaxfp8.INT8_DYNAMIC], ids=named)
def test_experts_and_tokens_are_split_over_devices(recipe):
    alone, split_up = (nnx_layer(DEEPSEEK, axis_name=name)[0] for name in (None, "x"))
    for model in (alone, split_up):
        jaxfp8.nnx.quantize(model, recipe)
    run, state = split(split_up, auto_mesh())
    x = tokens(24)
    np.testing.assert_allclose(jax.jit(run)(state, x), jax.jit(alone)(x), rtol=1e-5, atol=1e-5)


def test_tokens_travel_in_8_bits_where_the_recipe_rounds_each():
    found = {}
    for recipe in (jaxfp8.FP8_W8A16, jaxfp8.FP8_DYNAMIC):
        model, _ = nnx_layer(MIXTRAL, axis_name="x", dtype=jnp.bfloat16)
        jaxfp8.nnx.quantize(model, recipe)
        run, state = split(model, auto_mesh())
        sends = sent(run, state, tokens(64, dtype=jnp.bfloat16))
        found[recipe.name] = sum(one.bytes for one in sends if one.kind == "all-gather")
    sent_tokens = 64 * 3 // 4  # of four devices each has its own; a float counts as two bytes
    routing = sent_tokens * 2 * (2 + 4)  # weights and experts
    assert found["FP8_W8A16"] >= sent_tokens * WIDTH * 2
    assert found["FP8_DYNAMIC"] <= found["FP8_W8A16"] - sent_tokens * WIDTH + sent_tokens * 2
    assert found["FP8_DYNAMIC"] <= sent_tokens * (WIDTH + 2) + routing


# Wrong arguments


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"top_k": 5}, "`top_k` is 5, .*from 1 to 4"),
        ({"score": "tanh"}, "'softmax' or 'sigmoid'"),
        ({"num_groups": 3}, "groups of 4 experts need equal sizes"),
        ({"num_groups": 4, "top_groups": 1}, "fewer experts than 2"),
        ({"num_experts": 0}, "`num_experts` is 0, .*at least 1"),
        ({"in_features": 0}, "`in_features` is 0, .*at least 1"),
        ({"hidden_features": 2.5}, r"`hidden_features` is 2\.5, .*at least 1"),
        ({"shared_features": -1}, "`shared_features` is -1, .*at least 0"),
        ({"use_shared_gate": True}, "`shared_features` is 0, .*at least 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused(wrong, reason):
    with pytest.raises(ValueError, match=rf"jaxfp8\.nnx\.MoE.*{reason}"):
        sizes = {"in_features": WIDTH, "hidden_features": HIDDEN}
        jaxfp8.nnx.MoE(**{**sizes, **MIXTRAL, **wrong}, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("x", "error", "reason"),
    [
        (jnp.ones((3, WIDTH + 1)), ValueError, r"has shape \(3, 11\).*\[\.\.\., 10\]"),
        (jnp.ones(()), ValueError, "tokens"),
        (jnp.ones((3, WIDTH), jnp.int32), TypeError, "`inputs` .*int32"),
    ],
    ids=["width", "scalar", "dtype"],
)
def test_wrong_tokens_are_refused(x, error, reason):
    with pytest.raises(error, match=rf"jaxfp8\.nnx\.MoE.*{reason}"):
        nnx_layer(MIXTRAL)[0](x)
