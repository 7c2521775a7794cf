"""`jaxfp8.linen.MoE`: values, gradients, 8 bits, reports, load, FP8 training, scan, meshes."""

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
    arguments,
    experts_are_in_8_bits,
    linen_layer,
    named,
    near,
    nnx_layer,
    plain,
    published,
    tokens,
)
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxfp8
import jaxfp8.linen


def quantized(settings, recipe):
    """A function of tokens, the changes, and the parameters that it stands for."""
    model, variables, params = linen_layer(settings)
    if recipe is None:
        return functools.partial(model.apply, variables), None, params
    model = jaxfp8.linen.MoE(HIDDEN, **arguments(settings), recipe=recipe)
    variables, changes = jaxfp8.linen.quantize(model, variables, tokens(16))
    own = {n: leaf["kernel"] for n, leaf in variables["params"].items() if n in NAMES}
    held = {n: jaxfp8.dequantize(w) for n, w in own.items() if isinstance(w, jaxfp8.QArray)}
    return functools.partial(model.apply, variables), changes, params | held


@pytest.mark.parametrize("settings", [DEEPSEEK, BIASED], ids=["deepseek", "biased"])
def test_values_are_those_of_all_experts_weighted(settings):
    model, variables, params = linen_layer(settings)
    x = tokens(19)
    exact = mixtures.dense(params, x, settings)
    np.testing.assert_allclose(jax.jit(model.apply)(variables, x), exact, rtol=2e-5, atol=2e-5)


def test_linen_and_nnx_have_the_same_parameters():
    for settings in (DEEPSEEK, BIASED):
        model, _ = nnx_layer(settings)
        _, variables, _ = linen_layer(settings)
        ours = nnx.to_flat_state(nnx.state(model.moe, nnx.Param))
        theirs = jax.tree_util.tree_leaves_with_path(variables["params"])
        shapes = {"/".join(key.key for key in path): leaf.shape for path, leaf in theirs}
        assert {"/".join(path): v.shape for path, v in ours} == shapes


def test_gradients_are_those_of_all_experts_weighted():
    model, _, params = linen_layer(MIXTRAL)
    x, dy = tokens(11), tokens(11, seed=2)

    @jax.checkpoint
    def ours(params, x):
        kernels = {name: {"kernel": w} for name, w in params.items()}
        return model.apply({"params": kernels}, x)

    got, want = (
        jax.jit(lambda p, x, dy, f=f: jax.vjp(f, p, x)[1](dy))(params, x, dy)
        for f in (ours, lambda p, x: plain(p, x, MIXTRAL))
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.filterwarnings("ignore::jaxfp8.FallbackWarning")
def test_vmap_is_a_batch():
    """In floats JAX's `ragged_dot` has no rule for rows alone."""
    run = quantized(MIXTRAL, jaxfp8.INT8_W8A16)[0]
    x = tokens(12).reshape(3, 4, WIDTH)
    np.testing.assert_allclose(jax.jit(jax.vmap(run))(x), jax.jit(run)(x), rtol=1e-5, atol=1e-6)


def test_names_of_mesh_axes_stay_with_experts_in_8_bits():
    init = nn.initializers.lecun_normal(batch_axis=(0,))
    split = {"experts_init": nn.with_partitioning(init, ("e", None, None))}
    floats = jaxfp8.linen.MoE(HIDDEN, **MIXTRAL, **split)
    model, x = floats.copy(recipe=jaxfp8.FP8_W8A16), tokens(3)
    variables, _ = jaxfp8.linen.quantize(model, floats.init(jax.random.key(0), x), x)
    specs = nn.get_partition_spec(variables)["params"]["up"]["kernel"]
    assert specs.qvalue == specs.scale == P("e", None, None)


RECIPES = [jaxfp8.FP8_W8A16, jaxfp8.FP8_STATIC, jaxfp8.FP8_BLOCK, jaxfp8.INT8_ASYMMETRIC]


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_experts_are_in_8_bits_and_the_router_is_not(recipe):
    experts_are_in_8_bits(recipe, *quantized(DEEPSEEK, recipe))


def test_biases_stay_in_floats():
    run, _, params = quantized(BIASED, jaxfp8.INT8_W8A16)
    near(jax.jit(run)(tokens(16)), mixtures.dense(params, tokens(16), BIASED), 2e-6)


@pytest.mark.parametrize("name", ["ragged_dot_cls", "dot_general_cls"])
def test_a_product_of_floats_beside_a_recipe_is_refused(name):
    own = {name: jaxfp8.linen.Fp8RaggedDot, "recipe": jaxfp8.FP8_W8A16}
    model = jaxfp8.linen.MoE(HIDDEN, **MIXTRAL, **own)
    with pytest.raises(ValueError, match=f"`{name}` is given beside the recipe FP8_W8A16"):
        model.init(jax.random.key(0), tokens(3))


def test_wrong_tokens_and_sizes_are_refused():
    model, variables, _ = linen_layer(MIXTRAL)
    with pytest.raises(TypeError, match=r"`inputs` .*int32"):
        model.apply(variables, jnp.ones((3, WIDTH), jnp.int32))
    with pytest.raises(ValueError, match=r"`hidden_features` is 0, .*at least 1"):
        jaxfp8.linen.MoE(0, **MIXTRAL).init(jax.random.key(0), tokens(3))


def test_recipes_that_groups_lack_are_refused():
    with pytest.raises(ValueError, match=r"`recipe` is .*without `terms` and `compute`"):
        quantized(MIXTRAL, jaxfp8.FP8_AS_INT8)


def test_reports_have_a_row_for_each_product():
    model, variables, _ = linen_layer(DEEPSEEK)
    report = jaxfp8.linen.report(model, variables, tokens(16), recipe=jaxfp8.FP8_DYNAMIC)
    rows = {row.path.rpartition("/")[2]: row for row in report.rows}
    assert set(rows) == {"up", "down", "shared_up", "shared_down"}
    assert all(20 < row.sqnr < 40 and row.weight and row.activation for row in rows.values())


def test_prepare_leaves_experts():
    model = jaxfp8.linen.MoE(HIDDEN, **MIXTRAL, recipe=jaxfp8.INT8_DYNAMIC)
    x = tokens(3)
    _, changes = jaxfp8.linen.prepare(model, model.init(jax.random.key(0), x), x)
    reasons = {row.reason for row in changes.rows}
    assert reasons == {"products of groups take no prepared weight"}


def test_load_joins_gate_and_up_of_each_expert():
    tensors, mapping = published()
    layer = jaxfp8.linen.MoE(HIDDEN, 2, 1, recipe=jaxfp8.FP8_W8A16)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), tokens(3))
    names = {path.removeprefix("moe/"): name for path, name in mapping.items()}
    up = jaxfp8.linen.load(shapes, tensors, names)["params"]["up"]["kernel"]
    for number, ours in enumerate(jaxfp8.dequantize(up)):
        both = [jaxfp8.dequantize(tensors[f"{number}.{kind}"]).T for kind in ("gate", "up")]
        np.testing.assert_array_equal(ours, np.concatenate(both, 1))


@pytest.mark.parametrize("name", TRAINING)
def test_it_trains_in_fp8(name):
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


def test_scan_over_layers_of_experts():
    class Step(nn.Module):
        recipe: jaxfp8.Recipe | None = None

        @nn.compact
        def __call__(self, x, _):
            layer = jaxfp8.linen.MoE(HIDDEN, **MIXTRAL, recipe=self.recipe, name="moe")
            return x + layer(x), None

    def stack(recipe=None):
        kinds = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return nn.scan(Step, length=2, **kinds)(recipe)

    x = tokens(6)
    variables = stack().init(jax.random.key(0), x, None)
    narrow, _ = jaxfp8.linen.quantize(stack(jaxfp8.INT8_W8A16), variables, x, None)
    held = narrow["params"]["moe"]["up"]["kernel"]
    assert held.shape == (2, 4, WIDTH, 2 * HIDDEN) and held.qvalue.dtype == jnp.int8
    is_held = {"is_leaf": lambda leaf: isinstance(leaf, jaxfp8.QArray)}
    wide = jax.tree.map(
        lambda w: jaxfp8.dequantize(w) if isinstance(w, jaxfp8.QArray) else w, narrow, **is_held
    )
    y, _ = jax.jit(stack().apply)(wide, x, None)
    ours, _ = jax.jit(stack(jaxfp8.INT8_W8A16).apply)(narrow, x, None)
    np.testing.assert_allclose(ours, y, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::jaxfp8.FallbackWarning")
@pytest.mark.parametrize(
    ("recipe", "kind"),
    [(jaxfp8.FP8_W8A16, jax.sharding.AxisType.Auto), (None, jax.sharding.AxisType.Explicit)],
    ids=["8 bits, automatic", "floats, explicit"],
)
def test_tokens_that_the_compiler_splits_give_the_same(recipe, kind):
    run, _, _ = quantized(MIXTRAL, recipe)
    mesh, x = jax.make_mesh((4,), ("x",), axis_types=(kind,)), tokens(16)
    over = jax.device_put(x, jax.NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh):
        split = jax.sharding.auto_axes(run, out_sharding=P("x"))
        y = jax.jit(split if kind == jax.sharding.AxisType.Explicit else run)(over)
    np.testing.assert_allclose(y, jax.jit(run)(x), rtol=1e-5, atol=1e-5)
