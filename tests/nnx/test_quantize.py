"""A live model of nnx in 8 bits, in place, and back."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxfp8
import jaxfp8.nnx


class Block(nnx.Module):
    def __init__(self, size, rngs):
        self.attention = nnx.MultiHeadAttention(4, size, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(size, rngs=rngs)
        self.up = nnx.Linear(size, 2 * size, rngs=rngs)
        self.down = nnx.Linear(2 * size, size, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, size=16, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.embed = nnx.Embed(60, size, rngs=rngs)
        self.blocks = nnx.List([Block(size, rngs)])
        self.heads = nnx.Dict(a=nnx.Linear(size, 3, rngs=rngs))
        self.up_again = self.blocks[0].up

    def __call__(self, ids):
        x = self.blocks[0](self.embed(ids))
        return self.heads["a"](x), self.embed.attend(x)


run = nnx.jit(lambda model, x: model(x))
IDS = jnp.arange(12).reshape(2, 6)
LAYERS = 6 + 2


@pytest.mark.parametrize(
    ("recipe", "least"),
    [(jaxfp8.FP8_DYNAMIC, 18), (jaxfp8.INT8_DYNAMIC, 30)],
    ids=lambda value: getattr(value, "name", None),
)
def test_model_stays_close_and_shrinks(recipe, least):
    model = Model()
    exact = run(model, IDS)
    changes = jaxfp8.nnx.quantize(model, recipe, where=".")
    assert len(changes.changed) == LAYERS and not changes.left
    assert changes.bytes_saved > 0.5 * sum(row.bytes_before for row in changes.rows)
    for got, want in zip(run(model, IDS), exact, strict=True):
        assert 20 * np.log10(np.linalg.norm(want) / np.linalg.norm(got - want)) > least


@pytest.mark.parametrize("bias", [True, False])
def test_a_model_that_was_cast_computes_in_what_it_was_cast_to(bias):
    model = nnx.Linear(8, 4, use_bias=bias, rngs=nnx.Rngs(0))  # its `param_dtype` is float32
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    x = jnp.ones((2, 8), jnp.bfloat16)
    assert jaxfp8.nnx.Linear.of(model)(x).dtype == model(x).dtype == jnp.bfloat16


def test_strict_promotion_is_no_reason_to_fail():
    model = nnx.Linear(8, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    model.bias[...] = jnp.zeros(4)
    model.kernel = nnx.Param(model.kernel[...].astype(jnp.bfloat16))
    with jax.numpy_dtype_promotion("strict"):
        assert jaxfp8.nnx.Linear.of(model).param_dtype == jnp.float32


def test_weights_are_no_longer_there_in_floats():
    model = Model()
    jaxfp8.nnx.quantize(model, jaxfp8.FP8_W8A16, where=".")
    wide = [v[...] for _, v in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    assert max(x.ndim for x in wide) <= 2 and max(x.size for x in wide) <= 32


def test_bytes_are_those_of_the_variables():
    model = Model()

    def held():
        leaves = jax.tree.leaves(nnx.state(model))
        return sum(x.nbytes for x in leaves if hasattr(x, "nbytes"))

    before = held()
    changes = jaxfp8.nnx.quantize(model, jaxfp8.INT8_DYNAMIC)
    assert before - held() == changes.bytes_saved


def test_shared_layer_is_replaced_by_one():
    model = Model()
    jaxfp8.nnx.quantize(model, jaxfp8.FP8_W8A16)
    assert model.up_again is model.blocks[0].up
    assert isinstance(model.up_again, jaxfp8.nnx.Linear)


def test_bias_is_the_same_variable():
    model = Model()
    bias = model.blocks[0].up.bias
    jaxfp8.nnx.quantize(model, jaxfp8.FP8_W8A16)
    assert model.blocks[0].up.bias is bias


def test_report_has_a_row_per_layer():
    changes = jaxfp8.nnx.quantize(Model(), jaxfp8.FP8_DYNAMIC, where="blocks/0/(up|down)$")
    assert {row.path for row in changes.changed} == {"blocks/0/up", "blocks/0/down"}
    assert len(changes.left) == LAYERS - 2
    assert str(changes).startswith(f"2 of {LAYERS} weights changed")
    assert "`where` does" in changes.to_json()
    assert json.loads(changes.to_json())["bytes_saved"] == changes.bytes_saved
    assert changes.to_html().count("<tr>") == LAYERS + 1


def test_where_may_be_a_function():
    changes = jaxfp8.nnx.quantize(
        Model(), jaxfp8.FP8_W8A16, where=lambda path, layer: isinstance(layer, nnx.Embed)
    )
    assert [row.path for row in changes.changed] == ["embed"]


@pytest.mark.parametrize(
    ("recipe", "where", "is_changed"),
    [
        (jaxfp8.FP8_W8A16, None, False),
        (jaxfp8.FP8_W8A16, "embed", True),
        ([jaxfp8.Rule(where="embed", recipe=jaxfp8.FP8_W8A16)], None, True),
        ([jaxfp8.Rule(where="up", recipe=None), jaxfp8.FP8_W8A16], None, False),
    ],
    ids=["by default", "chosen", "by a rule", "by a rule for the rest"],
)
def test_a_table_stays_in_floats_unless_it_is_chosen(recipe, where, is_changed):
    model = Model()
    changes = jaxfp8.nnx.quantize(model, recipe, where=where)
    assert ("embed" in {row.path for row in changes.changed}) == is_changed
    assert isinstance(model.embed, jaxfp8.nnx.Embed) == is_changed
    reasons = {row.path: row.reason for row in changes.left}
    assert is_changed or "tables stay in floats" in reasons["embed"]


def test_first_rule_that_matches_a_path_counts():
    model = Model()
    rules = [
        jaxfp8.Rule(where="heads/.*", recipe=None),
        jaxfp8.Rule(where=".*/attention/.*", recipe=jaxfp8.FP8_W8A16),
        jaxfp8.INT8_DYNAMIC,
    ]
    changes = jaxfp8.nnx.quantize(model, rules)
    recipes = {row.path: row.recipe for row in changes.rows}
    assert recipes["blocks/0/attention/out"] == "FP8_W8A16"
    assert recipes["blocks/0/up"] == "INT8_DYNAMIC"
    assert recipes["heads/a"] == "" and isinstance(model.heads["a"], nnx.Linear)


def test_rule_of_qwix_says_the_same():
    qwix = pytest.importorskip("qwix")
    model = Model()
    rule = qwix.QuantizationRule(module_path="blocks/.*", weight_qtype=jnp.int8, act_qtype=jnp.int8)
    changes = jaxfp8.nnx.quantize(model, [rule])
    assert {row.path for row in changes.left} == {"embed", "heads/a"}
    up = model.blocks[0].up
    assert up.kernel.dtype == jnp.int8 and up.recipe.activation.dtype == jnp.int8


class Own(nnx.Linear):
    pass


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda rngs: Own(8, 8, rngs=rngs), "Own is a class of its own"),
        (
            lambda rngs: nnx.Linear(8, 8, dot_general=lambda *a, **k: None, rngs=rngs),
            "it has a `dot_general` of its own",
        ),
        (
            lambda rngs: nnx.Linear(8, 8, param_dtype=jnp.complex64, rngs=rngs),
            "its weight is complex64",
        ),
    ],
    ids=["subclass", "dot_general", "dtype"],
)
def test_layer_without_a_twin_is_left_and_says_why(make, reason):
    model = nnx.Sequential(make(nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    left = jaxfp8.nnx.quantize(model, jaxfp8.FP8_W8A16).left
    assert [row.reason for row in left] == [reason]


def test_dequantize_gives_the_layers_of_flax_back():
    model = Model()
    graph = nnx.graphdef(model)
    jaxfp8.nnx.quantize(model, jaxfp8.INT8_DYNAMIC)
    narrow = run(model, IDS)
    jaxfp8.nnx.dequantize(model)
    assert nnx.graphdef(model) == graph
    for got, want in zip(run(model, IDS), narrow, strict=True):  # activations are no longer rounded
        assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)


def test_dequantized_weight_is_what_the_codes_mean():
    model = nnx.Sequential(nnx.Linear(8, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    jaxfp8.nnx.quantize(model, jaxfp8.INT8_DYNAMIC)
    q = model.layers[0].weight
    jaxfp8.nnx.dequantize(model)
    kernel = model.layers[0].kernel
    assert isinstance(kernel, nnx.Param) and kernel.dtype == jnp.bfloat16
    np.testing.assert_array_equal(kernel[...], jaxfp8.dequantize(q, jnp.bfloat16))


# State: transformations, optimisers, shardings


def test_optimizer_trains_what_is_left_in_floats():
    model = Model()
    jaxfp8.nnx.quantize(model, jaxfp8.FP8_DYNAMIC)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    codes, bias = model.blocks[0].up.kernel[...], model.blocks[0].up.bias[...]

    @nnx.jit
    def step(model, optimizer):
        loss, gradients = nnx.value_and_grad(lambda m: (m(IDS)[0] ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    first, second = step(model, optimizer), step(model, optimizer)
    assert second < first
    np.testing.assert_array_equal(model.blocks[0].up.kernel[...], codes)
    assert not np.array_equal(model.blocks[0].up.bias[...], bias)


class Stacked(nnx.Module):
    def __init__(self, size, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return nnx.Linear(size, size, rngs=rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def run(layer, x):
            return jnp.tanh(layer(x))

        return run(self.layers, x)


def test_stacked_layers_run_in_a_scan():
    model = Stacked(16, nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (4, 16))
    jaxfp8.nnx.quantize(model, jaxfp8.INT8_DYNAMIC)
    assert model.layers.kernel_scale.shape == (3, 1, 16)
    y = x
    for i in range(3):
        q = jaxfp8.QArray(model.layers.kernel[...][i], model.layers.kernel_scale[...][i])
        x8 = jaxfp8.INT8_DYNAMIC.quantize_activation(y, (1,))
        y = jnp.tanh(jaxfp8.matmul(x8, q, bias=model.layers.bias[...][i]))
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(model, x), y, rtol=1e-4, atol=1e-5)


def test_state_survives_split_and_merge():
    model = Model()
    jaxfp8.nnx.quantize(model, jaxfp8.FP8_BLOCK)
    graph, state = nnx.split(model)
    again = nnx.merge(graph, jax.tree.map(lambda x: x, state))
    np.testing.assert_array_equal(run(again, IDS)[0], run(model, IDS)[0])


def test_checkpoint_keeps_codes_and_scales(tmp_path):
    import orbax.checkpoint

    model, other = Model(), Model(rngs=nnx.Rngs(1))
    for m in (model, other):
        jaxfp8.nnx.quantize(m, jaxfp8.FP8_W8A16)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.to_pure_dict(nnx.state(model)))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", nnx.to_pure_dict(nnx.state(other)))
    state = nnx.state(other)
    nnx.replace_by_pure_dict(state, restored)
    nnx.update(other, state)
    assert other.blocks[0].up.kernel.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(run(other, IDS)[0], run(model, IDS)[0])


def sharded(size, names):
    mesh = jax.make_mesh((2, 2), ("in", "out"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
    with jax.set_mesh(mesh):
        return nnx.Sequential(nnx.Linear(size, size, kernel_init=init, rngs=nnx.Rngs(0)))


def test_metadata_and_sharding_go_to_codes_and_scales():
    model = sharded(8, ("in", "out"))
    jaxfp8.nnx.quantize(model, jaxfp8.FP8_W8A16)
    layer = model.layers[0]
    assert layer.kernel.get_metadata()["out_sharding"] == ("in", "out")
    assert layer.kernel_scale.get_metadata()["out_sharding"] == (None, "out")
    for variable, spec in ((layer.kernel, ("in", "out")), (layer.kernel_scale, (None, "out"))):
        sharding = variable[...].sharding
        assert isinstance(sharding, NamedSharding)
        assert sharding.spec == PartitionSpec(*spec)
    jaxfp8.nnx.dequantize(model)
    kernel = model.layers[0].kernel
    assert kernel.get_metadata()["out_sharding"] == ("in", "out")
    assert kernel[...].sharding.spec == PartitionSpec("in", "out")


def test_tile_that_a_shard_would_cut_is_refused():
    model = sharded(192, ("in", "out"))
    with pytest.raises(ValueError, match="tiles of 128 have to lie within a shard"):
        jaxfp8.nnx.quantize(model, jaxfp8.FP8_BLOCK)
    assert isinstance(model.layers[0], nnx.Linear)


# Static scales


def test_static_scales_are_those_of_the_sample():
    model = Model()
    exact = run(model, IDS)
    jaxfp8.nnx.quantize(model, jaxfp8.FP8_STATIC, sample=(IDS,))
    up = model.blocks[0].up
    assert up.input_scale.shape == ()
    got = run(model, IDS)
    assert np.linalg.norm(got[0] - exact[0]) < 0.1 * np.linalg.norm(exact[0])


def test_static_recipe_needs_a_sample():
    with pytest.raises(ValueError, match="has a static recipe, but a scale of its input is needed"):
        jaxfp8.nnx.quantize(Model(), jaxfp8.FP8_STATIC)


def test_static_zero_point_is_refused():
    how = jaxfp8.Quantization(dtype=jnp.int8, granularity="tensor", static=True, symmetric=False)
    recipe = jaxfp8.Recipe(name="static", activation=how)
    with pytest.raises(ValueError, match="a static recipe with a zero point"):
        jaxfp8.nnx.quantize(Model(), recipe, sample=(IDS,))


# Wrong use


def eight_bit():
    model = Model()
    jaxfp8.nnx.quantize(model, jaxfp8.FP8_W8A16, where="blocks")
    return model


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: jaxfp8.nnx.quantize(3, jaxfp8.FP8_W8A16), TypeError, "`model` is of type int"),
        (
            lambda: jaxfp8.nnx.quantize(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jaxfp8.FP8_W8A16),
            ValueError,
            "is itself a Linear",
        ),
        (
            lambda: jaxfp8.nnx.quantize(Model(), jaxfp8.DelayedScaling()),
            TypeError,
            "is for training",
        ),
        (
            lambda: jaxfp8.nnx.quantize(eight_bit(), jaxfp8.FP8_W8A16, where="up"),
            ValueError,
            "`blocks/0/up` is in 8 bits already",
        ),
        (
            lambda: jaxfp8.nnx.quantize(Model(), jaxfp8.FP8_W8A16, where="("),
            ValueError,
            "`where` is",
        ),
        (
            lambda: jaxfp8.nnx.quantize(nnx.eval_shape(Model), jaxfp8.FP8_W8A16),
            TypeError,
            "has shapes in place of arrays",
        ),
        (
            lambda: jaxfp8.nnx.Linear.of(nnx.Embed(2, 2, rngs=nnx.Rngs(0)), jaxfp8.FP8_W8A16),
            TypeError,
            "`layer` is of type Embed, but a Linear is needed",
        ),
    ],
)
def test_wrong_use_says_what_to_do(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_quantizing_twice_is_refused_where_nothing_is_left_to_do():
    model = Model()
    jaxfp8.nnx.quantize(model, jaxfp8.FP8_W8A16, where="blocks")
    assert len(jaxfp8.nnx.quantize(model, jaxfp8.FP8_W8A16).changed) == 1
    with pytest.raises(ValueError, match="is in 8 bits already, all"):
        jaxfp8.nnx.quantize(model, jaxfp8.FP8_W8A16)


@pytest.mark.slow
def test_importing_jaxfp8_does_not_import_flax():
    import subprocess
    import sys

    code = "import sys, jaxfp8; sys.exit('flax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_sample_is_a_tuple_of_arguments():
    model = nnx.Sequential(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"`sample` is .*write `sample=\(x,\)`"):
        jaxfp8.nnx.quantize(model, jaxfp8.FP8_STATIC, sample=jnp.ones((1, 8)))
