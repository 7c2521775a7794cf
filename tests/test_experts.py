"""Layers of experts in nnx and linen: values, gradients, transformations, 8 bits, training."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import mixtures
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxfp8
import jaxfp8.linen
import jaxfp8.nnx

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
}
NAMES = ("router", "up", "down", "shared_up", "shared_down")
WIDTH, HIDDEN = 10, 6
DEEPSEEK = {
    "num_experts": 8,
    "top_k": 3,
    "score": "sigmoid",
    "num_groups": 4,
    "top_groups": 2,
    "scale": 2.5,
    "shared_features": 5,
    "use_selection_bias": True,
}
SETTINGS = {
    "mixtral": {"num_experts": 4, "top_k": 2},
    "qwen": {"num_experts": 7, "top_k": 3, "renormalize": False},
    "deepseek 3": DEEPSEEK,
    "deepseek 2": {"num_experts": 6, "top_k": 2, "num_groups": 3, "top_groups": 1, "scale": 16.0},
    "gelu": {"num_experts": 16, "top_k": 1, "activation": "gelu", "gated": False},
    "relu": {"num_experts": 3, "top_k": 3, "activation": "relu"},
    "one": {"num_experts": 1, "top_k": 1},
}
MIXTRAL = SETTINGS["mixtral"]
SOME = [None, jaxfp8.FP8_W8A16, jaxfp8.INT8_DYNAMIC]


def named(recipe):
    return "floats" if recipe is None else recipe.name


def arguments(settings):
    activation = ACTIVATIONS[settings.get("activation", "silu")]
    return {**settings, "activation": activation}


class Block(nnx.Module):
    """A model around the layer: its layers are replaced, not itself."""

    def __init__(self, settings, rngs, **more):
        self.moe = jaxfp8.nnx.MoE(WIDTH, HIDDEN, **arguments(settings), **more, rngs=rngs)

    def __call__(self, x):
        return self.moe(x)


def nnx_layer(settings, **more):
    """A model, and its parameters by name."""
    model = Block(settings, nnx.Rngs(0), **more)
    if model.moe.selection_bias is not None:
        model.moe.selection_bias[...] = biases(settings)
    layers = {name: getattr(model.moe, name) for name in NAMES}
    params = {name: layer.kernel[...] for name, layer in layers.items() if layer is not None}
    if model.moe.selection_bias is not None:
        params["selection_bias"] = biases(settings)
    return model, params


def linen_layer(settings, **more):
    """A model, its variables, and its parameters by name."""
    model = jaxfp8.linen.MoE(HIDDEN, **arguments(settings), **more)
    variables = model.init(jax.random.key(0), jnp.ones((1, WIDTH)))
    own = dict(variables["params"])
    if "selection_bias" in own:
        own["selection_bias"] = biases(settings)
    params = {name: leaf["kernel"] if name in NAMES else leaf for name, leaf in own.items()}
    return model, {**variables, "params": own}, params


def biases(settings):
    return jax.random.normal(jax.random.key(9), (settings["num_experts"],)) * 0.3


def layer(framework, settings, **more):
    """A function of tokens, and the parameters."""
    if framework == "nnx":
        return nnx_layer(settings, **more)
    model, variables, params = linen_layer(settings, **more)
    return functools.partial(model.apply, variables), params


def tokens(count, seed=1, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), (count, WIDTH), dtype)


both = pytest.mark.parametrize("framework", ["nnx", "linen"])


@both
@pytest.mark.parametrize("name", SETTINGS)
def test_values_are_those_of_all_experts_weighted(framework, name):
    run, params = layer(framework, SETTINGS[name])
    for count in (1, 19):  # one token leaves most experts empty
        x = tokens(count, seed=count)
        exact = mixtures.dense(params, x, SETTINGS[name])
        np.testing.assert_allclose(jax.jit(run)(x), exact, rtol=2e-5, atol=2e-5)


@both
def test_leading_axes_and_no_tokens(framework):
    run, _ = layer(framework, DEEPSEEK)
    run, x = jax.jit(run), tokens(12)
    np.testing.assert_allclose(run(x.reshape(3, 4, WIDTH)), run(x).reshape(3, 4, WIDTH), 1e-5, 1e-6)
    assert run(x[:0]).shape == (0, WIDTH)


@both
def test_bfloat16_stays_bfloat16(framework):
    run, params = layer(framework, MIXTRAL, dtype=jnp.bfloat16)
    x = tokens(20)
    y = jax.jit(run)(x.astype(jnp.bfloat16))
    exact = mixtures.dense(params, x.astype(jnp.bfloat16), MIXTRAL)
    assert y.dtype == jnp.bfloat16
    assert np.linalg.norm(np.asarray(y, np.float64) - exact) < 0.02 * np.linalg.norm(exact)


@both
@pytest.mark.parametrize("recipe", SOME, ids=named)
def test_nan_stays_with_its_token(framework, recipe):
    run, x = jax.jit(quantized(framework, MIXTRAL, recipe)[0]), tokens(9)
    for bad in (jnp.nan, jnp.inf):
        y = np.asarray(run(x.at[4].set(bad)))
        others = [np.delete(rows, 4, 0) for rows in (y, run(x))]
        np.testing.assert_allclose(*others, rtol=1e-5, atol=1e-6)
        assert np.isnan(y[4]).all()


def test_nan_of_an_expert_stays_with_its_tokens():
    model, _, _ = quantized("nnx", MIXTRAL, jaxfp8.FP8_W8A16)
    x, call = tokens(30), nnx.jit(lambda model, x: model(x))
    want, chosen = call(model, x), model.moe.route(x).experts
    scale = model.moe.down.kernel_scale
    scale[...] = scale[...].at[2].set(jnp.nan)
    of_two = np.asarray((chosen == 2).any(-1))
    y = np.asarray(call(model, x))
    assert of_two.any() and np.isnan(y[of_two]).all()
    np.testing.assert_array_equal(y[~of_two], want[~of_two])


def plain(params, x, settings):
    """Every expert on every token, in JAX."""
    scores = jax.nn.softmax(x @ params["router"])
    best, chosen = jax.lax.top_k(scores, settings["top_k"])
    best = best / best.sum(-1, keepdims=True)
    weights = jnp.einsum("tk,tke->te", best, jax.nn.one_hot(chosen, settings["num_experts"]))
    gate, up = jnp.split(jnp.einsum("td,edf->tef", x, params["up"]), 2, -1)
    return jnp.einsum("te,tef,efd->td", weights, jax.nn.silu(gate) * up, params["down"])


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["", "remat"])
def test_gradients_are_those_of_all_experts_weighted(wrap):
    model, _, params = linen_layer(MIXTRAL)
    x, dy = tokens(11), tokens(11, seed=2)

    def ours(params, x):
        kernels = {name: {"kernel": w} for name, w in params.items()}
        return model.apply({"params": kernels}, x)

    want = jax.vjp(lambda p, x: plain(p, x, MIXTRAL), params, x)[1](dy)
    got = jax.jit(lambda p, x, dy: jax.vjp(wrap(ours), p, x)[1](dy))(params, x, dy)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


def test_the_selection_bias_has_no_gradient():
    model, _ = nnx_layer(DEEPSEEK)
    gradients = nnx.jit(nnx.grad(lambda model: model(tokens(5)).sum()))(model)
    assert not gradients["moe"]["selection_bias"][...].any()
    assert gradients["moe"]["router"]["kernel"][...].any()


@pytest.mark.filterwarnings("ignore::jaxfp8.FallbackWarning")
@both
def test_vmap_is_a_batch(framework):
    """In floats JAX's `ragged_dot` has no rule for rows alone."""
    run = quantized(framework, MIXTRAL, jaxfp8.INT8_W8A16)[0]
    x = tokens(12).reshape(3, 4, WIDTH)
    np.testing.assert_allclose(jax.jit(jax.vmap(run))(x), jax.jit(run)(x), rtol=1e-5, atol=1e-6)


def test_names_of_mesh_axes_stay_with_experts_in_8_bits():
    init = nn.initializers.lecun_normal(batch_axis=(0,))
    split = {"experts_init": nn.with_partitioning(init, ("e", None, None))}
    floats = jaxfp8.linen.MoE(HIDDEN, **MIXTRAL, **split)
    model = floats.copy(recipe=jaxfp8.FP8_W8A16)
    x = tokens(3)
    variables, _ = jaxfp8.linen.quantize(model, floats.init(jax.random.key(0), x), x)
    specs = nn.get_partition_spec(variables)["params"]["up"]["kernel"]
    assert specs.qvalue == specs.scale == P("e", None, None)
    metadata = nnx.with_partitioning(init, ("e", None, None), eager_sharding=False)
    ours, _ = nnx_layer(MIXTRAL, experts_init=metadata)
    jaxfp8.nnx.quantize(ours, jaxfp8.FP8_W8A16)
    kept = ours.moe.up.kernel.get_metadata()
    assert kept["out_sharding"] == ("e", None, None)


# In 8 bits


def quantized(framework, settings, recipe, sample=None):
    """A function of tokens, the changes, and the parameters that it stands for."""
    x = tokens(16) if sample is None else sample
    if framework == "nnx":
        model, params = nnx_layer(settings)
        if recipe is None:
            return model, None, params
        changes = jaxfp8.nnx.quantize(model, recipe, sample=(x,))
        run, held = model, {n: getattr(model.moe, n) for n in NAMES}
        held = {n: m.weight for n, m in held.items() if isinstance(m, jaxfp8.nnx.EightBitLayer)}
    else:
        _, variables, params = linen_layer(settings)
        model = jaxfp8.linen.MoE(HIDDEN, **arguments(settings), recipe=recipe)
        if recipe is None:
            return functools.partial(model.apply, variables), None, params
        variables, changes = jaxfp8.linen.quantize(model, variables, x)
        run = functools.partial(model.apply, variables)
        own = {n: leaf["kernel"] for n, leaf in variables["params"].items() if n in NAMES}
        held = {n: w for n, w in own.items() if isinstance(w, jaxfp8.QArray)}
    return run, changes, params | {n: jaxfp8.dequantize(w) for n, w in held.items()}


RECIPES = [
    jaxfp8.FP8_W8A16,
    jaxfp8.INT8_W8A16,
    jaxfp8.FP8_DYNAMIC,
    jaxfp8.FP8_STATIC,
    jaxfp8.FP8_BLOCK,
    jaxfp8.INT8_DYNAMIC,
    jaxfp8.INT8_ASYMMETRIC,
]


@both
@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_experts_are_in_8_bits_and_the_router_is_not(framework, recipe):
    run, changes, params = quantized(framework, DEEPSEEK, recipe)
    names = {row.path.rpartition("/")[2] for row in changes.changed}
    assert names == {"up", "down", "shared_up", "shared_down"}
    assert [row.reason for row in changes.left] == ["Router is a class of its own"]
    x = tokens(16)
    exact, y = mixtures.dense(params, x, DEEPSEEK), jax.jit(run)(x)
    error = np.linalg.norm(y - exact) / np.linalg.norm(exact)
    assert error < (2e-6 if recipe.activation is None else 0.06)
    assert error > 1e-3 or recipe.activation is None


@both
@pytest.mark.parametrize("recipe", [jaxfp8.FP8_AS_INT8, jaxfp8.INT8_SPLIT], ids=named)
def test_recipes_that_groups_lack_are_refused(framework, recipe):
    with pytest.raises(ValueError, match=r"`recipe` is .*without `terms` and `compute`"):
        quantized(framework, MIXTRAL, recipe)


@pytest.mark.parametrize("recipe", [jaxfp8.FP8_W8A16, jaxfp8.FP8_DYNAMIC], ids=named)
def test_gradients_pass_experts_in_8_bits_without_a_fallback(recipe):
    run, _, params = quantized("nnx", MIXTRAL, recipe)
    x = tokens(16)
    with jaxfp8.strict():
        got = jax.jit(jax.grad(lambda x: (run(x) ** 2).sum()))(x)
    want = jax.jit(jax.grad(lambda x: (plain(params, x, MIXTRAL) ** 2).sum()))(x)
    bound = 1e-5 if recipe.activation is None else 0.1
    assert np.linalg.norm(got - want) < bound * np.linalg.norm(want)


@both
def test_reports_have_a_row_for_each_product(framework):
    x = tokens(16)
    if framework == "nnx":
        report = jaxfp8.nnx.report(nnx_layer(DEEPSEEK)[0], x, recipe=jaxfp8.FP8_DYNAMIC)
    else:
        model, variables, _ = linen_layer(DEEPSEEK)
        report = jaxfp8.linen.report(model, variables, x, recipe=jaxfp8.FP8_DYNAMIC)
    rows = {row.path.rpartition("/")[2]: row for row in report.rows}
    assert set(rows) == {"up", "down", "shared_up", "shared_down"}
    assert all(20 < row.sqnr < 40 and row.weight and row.activation for row in rows.values())


def test_explain_has_a_row_for_each_product():
    run, _, _ = quantized("nnx", DEEPSEEK, jaxfp8.FP8_W8A16)
    report = jaxfp8.explain(run)(jax.ShapeDtypeStruct((16, WIDTH), jnp.float32))
    rows = {row.path.rpartition("/")[2]: row for row in report.calls}
    assert {name: row.dims for name, row in rows.items()} == {
        "up": (1, 48, 2 * HIDDEN, WIDTH),
        "down": (1, 48, WIDTH, HIDDEN),
        "shared_up": (1, 16, 10, WIDTH),
        "shared_down": (1, 16, WIDTH, 5),
    }
    assert all(row.already and row.kernels["cpu"] for row in rows.values())


def test_linen_prepare_and_nnx_prepare_leave_experts():
    model = jaxfp8.linen.MoE(HIDDEN, **MIXTRAL, recipe=jaxfp8.INT8_DYNAMIC)
    x = tokens(3)
    _, changes = jaxfp8.linen.prepare(model, model.init(jax.random.key(0), x), x)
    ours, _, _ = quantized("nnx", MIXTRAL, jaxfp8.INT8_DYNAMIC)
    for rows in (changes.rows, jaxfp8.nnx.prepare(ours).rows):
        assert {row.reason for row in rows} == {"products of groups take no prepared weight"}


def test_dequantize_gives_the_layers_of_floats_back():
    model, _, params = quantized("nnx", DEEPSEEK, jaxfp8.FP8_W8A16)
    jaxfp8.nnx.dequantize(model)
    assert type(model.moe.up) is jaxfp8.nnx.GroupedLinear
    np.testing.assert_array_equal(model.moe.up.kernel[...], params["up"])


def test_linen_and_nnx_have_the_same_parameters():
    model, _ = nnx_layer(DEEPSEEK)
    _, variables, _ = linen_layer(DEEPSEEK)
    ours = {"/".join(p): v.shape for p, v in nnx.to_flat_state(nnx.state(model.moe, nnx.Param))}
    theirs = jax.tree_util.tree_leaves_with_path(variables["params"])
    assert ours == {"/".join(key.key for key in path): leaf.shape for path, leaf in theirs}


def published():
    """The tensors of a layer of experts in 8 bits, [N, K], and names for each parameter."""
    tensors, mapping = {"gate.weight": jnp.ones((2, WIDTH))}, {"moe/router/kernel": "gate.weight"}
    shapes = {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
    for number, (kind, shape) in enumerate([*shapes.items()] * 2):
        w = jax.random.normal(jax.random.key(number), shape)
        tensors[f"{number // 3}.{kind}"] = jaxfp8.quantize(w, channelwise_axes=(0,))
    mapping["moe/up/kernel"] = [[f"{i}.gate", f"{i}.up"] for i in range(2)]
    mapping["moe/down/kernel"] = [f"{i}.down" for i in range(2)]
    return tensors, mapping


def test_load_joins_gate_and_up_of_each_expert():
    tensors, mapping = published()
    model = nnx.eval_shape(lambda: Block({"num_experts": 2, "top_k": 1}, nnx.Rngs(0)))
    jaxfp8.nnx.load(model, tensors, mapping)
    for number in range(2):
        both = [jaxfp8.dequantize(tensors[f"{number}.{kind}"]).T for kind in ("gate", "up")]
        ours = jaxfp8.dequantize(model.moe.up.weight)[number]
        np.testing.assert_array_equal(ours, np.concatenate(both, 1))
    layer = jaxfp8.linen.MoE(HIDDEN, 2, 1, recipe=jaxfp8.FP8_W8A16)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), tokens(3))
    names = {path.removeprefix("moe/"): name for path, name in mapping.items()}
    variables = jaxfp8.linen.load(shapes, tensors, names)
    np.testing.assert_allclose(layer.apply(variables, tokens(3)), model(tokens(3)), 1e-5, 1e-5)


def test_a_list_for_each_expert_is_needed():
    tensors, mapping = published()
    names = {**mapping, "moe/up/kernel": [["0.gate", "0.up", "1.gate", "1.up"]]}
    model = nnx.eval_shape(lambda: Block({"num_experts": 2, "top_k": 1}, nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"names 1 lists.*a list for each index"):
        jaxfp8.nnx.load(model, tensors, names)


# In FP8 training

DELAYED = jaxfp8.DelayedScaling(amax_history_length=4)
TRAINING = {"delayed": DELAYED, "current": jaxfp8.CurrentScaling()}


@pytest.mark.parametrize("name", TRAINING)
def test_nnx_trains_in_fp8(name):
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


def near(got, want, bound):
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(mine - other) <= bound * np.linalg.norm(other)


@pytest.mark.parametrize("name", TRAINING)
def test_linen_trains_in_fp8(name):
    recipe, x = TRAINING[name], tokens(24)
    products = {
        "ragged_dot_cls": functools.partial(jaxfp8.linen.Fp8RaggedDot, recipe=recipe),
        "dot_general_cls": functools.partial(jaxfp8.linen.Fp8DirectDotGeneralOp, recipe=recipe),
    }
    floats, _, _ = linen_layer(DEEPSEEK)
    model, variables, _ = linen_layer(DEEPSEEK, **products)

    @jax.jit
    def step(variables):
        return jax.grad(lambda variables: (model.apply(variables, x) ** 2).sum())(variables)

    for _ in range(2):
        gradients, state = jaxfp8.linen.split_state(step(variables))
        variables = {**variables, **state}
    own = {"params": variables["params"]}
    near(gradients, jax.jit(jax.grad(lambda v: (floats.apply(v, x) ** 2).sum()))(own), 0.2)
    if name == "delayed":
        history = state["_overwrite_with_gradient"]["up"]["Fp8RaggedDot_0"]["input_amax_history"]
        np.testing.assert_allclose(history[0], jnp.abs(x).max())
    else:
        report = jaxfp8.linen.report(model, variables, x)
        assert {row.path for row in report.rows} == {"up", "down", "shared_up", "shared_down"}


@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
def test_nnx_scans_over_layers_of_experts(remat):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def stack(rngs):
        return Block(MIXTRAL, rngs)

    def run(model, x):
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
        for number in range(3):
            own = {name: w[number] for name, w in kernels.items()}
            x = x + mixtures.dense(own, x, MIXTRAL)
        return x

    call = nnx.jit(run)
    step = nnx.jit(nnx.grad(lambda model: run(model, x).sum()))
    np.testing.assert_allclose(call(model, x), exact(kernels, x), rtol=1e-5, atol=1e-5)
    gradients = step(model)
    jaxfp8.nnx.fp8_training(model, jaxfp8.CurrentScaling())
    near(step(model), gradients, 0.3)
    jaxfp8.nnx.dequantize(model)
    jaxfp8.nnx.quantize(model, jaxfp8.FP8_W8A16)
    assert model.block.moe.up.weight.shape == (3, 4, WIDTH, 2 * HIDDEN)
    for name in ("up", "down"):
        kernels[name] = jaxfp8.dequantize(getattr(model.block.moe, name).weight)
    np.testing.assert_allclose(call(model, x), exact(kernels, x), rtol=1e-5, atol=1e-5)


def test_linen_scans_over_layers_of_experts():
    class Step(nn.Module):
        recipe: jaxfp8.Recipe | None = None

        @nn.compact
        def __call__(self, x, _):
            layer = jaxfp8.linen.MoE(HIDDEN, **MIXTRAL, recipe=self.recipe, name="moe")
            return x + layer(x), None

    def stack(recipe=None):
        kinds = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return nn.scan(Step, length=3, **kinds)(recipe)

    x = tokens(6)
    variables = stack().init(jax.random.key(0), x, None)
    narrow, _ = jaxfp8.linen.quantize(stack(jaxfp8.INT8_W8A16), variables, x, None)
    held = narrow["params"]["moe"]["up"]["kernel"]
    assert held.shape == (3, 4, WIDTH, 2 * HIDDEN) and held.qvalue.dtype == jnp.int8
    is_held = {"is_leaf": lambda leaf: isinstance(leaf, jaxfp8.QArray)}
    wide = jax.tree.map(
        lambda w: jaxfp8.dequantize(w) if isinstance(w, jaxfp8.QArray) else w, narrow, **is_held
    )
    y, _ = jax.jit(stack().apply)(wide, x, None)
    ours, _ = jax.jit(stack(jaxfp8.INT8_W8A16).apply)(narrow, x, None)
    np.testing.assert_allclose(ours, y, rtol=1e-5, atol=1e-5)


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
@pytest.mark.parametrize("recipe", SOME, ids=named)
def test_experts_and_tokens_are_split_over_devices(recipe):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    alone, split_up = (nnx_layer(DEEPSEEK, axis_name=name)[0] for name in (None, "x"))
    if recipe is not None:
        for model in (alone, split_up):
            jaxfp8.nnx.quantize(model, recipe)
    run, state = split(split_up, mesh)
    x = tokens(24)
    np.testing.assert_allclose(jax.jit(run)(state, x), jax.jit(alone)(x), rtol=1e-5, atol=1e-5)


def test_linen_splits_experts_and_tokens_with_their_gradients():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    model, variables, _ = linen_layer(MIXTRAL)
    specs = {"params": {"router": P(), "up": P("x"), "down": P("x")}}

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs, P("x")), out_specs=P("x"))
    def split(variables, x):
        return model.copy(axis_name="x").apply(variables, x)

    def step(run):
        return jax.jit(jax.value_and_grad(lambda v, x: (run(v, x) ** 2).sum(), (0, 1)))

    x = tokens(8)
    got, want = step(split)(variables, x), step(model.apply)(variables, x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)


@pytest.mark.filterwarnings("ignore::jaxfp8.FallbackWarning")
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
@pytest.mark.parametrize("recipe", SOME[:2], ids=named)
def test_tokens_that_the_compiler_splits_give_the_same(recipe, kind):
    run, _, _ = quantized("linen", MIXTRAL, recipe)
    mesh, x = jax.make_mesh((4,), ("x",), axis_types=(kind,)), tokens(16)
    over = jax.device_put(x, jax.NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh):
        split = jax.sharding.auto_axes(run, out_sharding=P("x"))
        y = jax.jit(split if kind == jax.sharding.AxisType.Explicit else run)(over)
    np.testing.assert_allclose(y, jax.jit(run)(x), rtol=1e-5, atol=1e-5)


# Wrong arguments


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"top_k": 5}, "`top_k` is 5, .*from 1 to 4"),
        ({"score": "tanh"}, "'softmax' or 'sigmoid'"),
        ({"num_groups": 3}, "groups of 4 experts need equal sizes"),
        ({"num_groups": 4, "top_groups": 1}, "fewer experts than 2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused(wrong, reason):
    with pytest.raises(ValueError, match=rf"jaxfp8\.nnx\.MoE.*{reason}"):
        jaxfp8.nnx.MoE(WIDTH, HIDDEN, **{**MIXTRAL, **wrong}, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("experts", [2, 6])
def test_devices_that_do_not_divide_the_experts_are_an_error(experts):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    layer = jaxfp8.linen.MoE(8, num_experts=experts, top_k=1, axis_name="x")
    split = jax.shard_map(
        lambda x: layer.init(jax.random.key(0), x), mesh=mesh, in_specs=P("x"), out_specs=P()
    )
    with pytest.raises(ValueError, match=f"is {experts}, but a multiple of the 4 devices"):
        split(jnp.ones((8, 4)))
