"""Tensors of a checkpoint in a model of nnx: read as they lie, refused where they do not fit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxfp8
import jaxfp8.nnx

E4M3 = jnp.float8_e4m3fn
RNGS = functools.partial(nnx.Rngs, 0)


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(50, 32, rngs=rngs)
        self.norm = nnx.RMSNorm(32, rngs=rngs)
        self.up = nnx.Linear(32, 48, rngs=rngs)
        self.heads = nnx.LinearGeneral(48, (4, 8), use_bias=False, rngs=rngs)
        self.out = nnx.LinearGeneral((4, 8), 32, axis=(-2, -1), use_bias=False, rngs=rngs)
        self.experts = nnx.Einsum("td,edf->tef", (2, 32, 8), rngs=rngs)

    def __call__(self, ids):
        x = self.norm(self.embed(ids))
        x = x + self.out(self.heads(nnx.silu(self.up(x))))
        return self.experts(x), self.embed.attend(x)


MAPPING = {"experts/kernel": ["experts.0.weight", "experts.1.weight"]}
IDS = jnp.arange(6)


def tensors(kind=lambda w: jaxfp8.quantize(w, channelwise_axes=(0,))):
    """As a checkpoint has them: [N, K], embeddings and vectors in floats."""
    matrices = {
        "up.weight": normal(48, 32, seed=1),
        "heads.weight": normal(32, 48, seed=2),
        "out.weight": normal(32, 32, seed=3),
        "experts.0.weight": normal(8, 32, seed=4),
        "experts.1.weight": normal(8, 32, seed=5),
    }
    others = {"embed.weight": normal(50, 32), "norm.weight": jnp.ones(32), "up.bias": jnp.ones(48)}
    return {**{name: kind(w) for name, w in matrices.items()}, **others}


def shapes():
    return nnx.eval_shape(lambda: Model(nnx.Rngs(0)))


def reference(given):
    """The model in floats, from what the tensors stand for."""
    wide = {
        k: jaxfp8.dequantize(v) if isinstance(v, jaxfp8.QArray) else v for k, v in given.items()
    }
    model = Model(nnx.Rngs(1))
    model.embed.embedding.set_value(wide["embed.weight"])
    model.up.kernel.set_value(wide["up.weight"].T)
    model.up.bias.set_value(wide["up.bias"])
    model.heads.kernel.set_value(wide["heads.weight"].T.reshape(48, 4, 8))
    model.out.kernel.set_value(wide["out.weight"].T.reshape(4, 8, 32))
    experts = [wide[f"experts.{i}.weight"].T for i in range(2)]
    model.experts.kernel.set_value(jnp.stack(experts))
    return model


run = nnx.jit(lambda model, ids: model(ids))


@pytest.mark.slow
def test_a_model_of_shapes_computes_with_the_weights_of_the_checkpoint():
    given, model = tensors(), shapes()
    for name in ("out.weight", "up.weight"):
        wide = jaxfp8.dequantize(given[name])
        given[name] = jaxfp8.quantize(wide, jnp.int8, channelwise_axes=(0,), zero_point=True)
    changes = jaxfp8.nnx.load(model, given, MAPPING)
    assert [row.after for row in changes.changed] == [
        "float8_e4m3fn",
        "float8_e4m3fn",
        "int8",
        "int8",
    ]
    for got, want in zip(run(model, IDS), run(reference(given), IDS), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_codes_are_the_arrays_of_the_checkpoint_and_are_not_copied():
    given, model = tensors(), shapes()
    jaxfp8.nnx.load(model, given, MAPPING)
    lies = model.up.weight.stored.qvalue
    assert lies.unsafe_buffer_pointer() == given["up.weight"].qvalue.unsafe_buffer_pointer()
    assert model.up.weight.shape == (32, 48) and model.experts.weight.shape == (2, 32, 8)


def test_float_tensors_fill_the_layers_of_flax():
    given, model = tensors(lambda w: w.astype(jnp.bfloat16)), Model(nnx.Rngs(7))
    changes = jaxfp8.nnx.load(model, given, MAPPING)
    assert not changes.changed and type(model.up) is nnx.Linear
    assert changes.left[1].reason == "its tensor is bfloat16"
    for got, want in zip(run(model, IDS), run(reference(given), IDS), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_blocks_with_partial_edges_stay_what_they_are():
    q = jaxfp8.quantize(normal(48, 32), tiled_axes={0: 32, 1: 20})
    model = nnx.eval_shape(lambda: nnx.Sequential(nnx.Linear(32, 48, rngs=nnx.Rngs(0))))
    jaxfp8.nnx.load(model, {"layers.0.weight": q, "layers.0.bias": jnp.zeros(48)})
    layer, x = model.layers[0], normal(3, 32, seed=1)
    assert layer.recipe.weight.granularity == (20, 32) and layer.recipe.activation is None
    np.testing.assert_allclose(layer(x), x @ jaxfp8.dequantize(q).T, rtol=1e-5, atol=1e-5)


def test_an_open_checkpoint_is_read_tensor_by_tensor(tmp_path):
    given = tensors()
    jaxfp8.checkpoint.save(tmp_path / "model", given)
    model = shapes()
    with jaxfp8.checkpoint.open(tmp_path / "model") as checkpoint:
        changes = jaxfp8.nnx.load(model, checkpoint, MAPPING)
    assert len(changes.changed) == 4
    np.testing.assert_array_equal(model.up.weight.stored.qvalue, given["up.weight"].qvalue)


def test_report_lists_what_stays_in_floats_with_its_bytes():
    class Routed(nnx.Module):
        def __init__(self, rngs):
            self.gate = nnx.Linear(32, 4, use_bias=False, rngs=rngs)
            self.experts = nnx.Param(jnp.zeros((4, 32, 128)))
            self.conv = nnx.Conv(32, 32, 3, use_bias=False, rngs=rngs)

    model = nnx.eval_shape(lambda: Routed(nnx.Rngs(0)))
    gate = jaxfp8.quantize(normal(4, 32), channelwise_axes=(0,))
    held = {"gate.weight": gate, "experts": normal(4, 32, 128), "conv.weight": normal(3, 32, 32)}
    changes = jaxfp8.nnx.load(model, held)
    assert {row.path: row.bytes_after for row in changes.left} == {
        "conv/kernel": 3 * 32 * 32 * 4,
        "experts": 64 * 1024,
    }
    assert "conv/kernel" in str(changes) and "64.0 KiB" in str(changes)


def test_static_scales_of_inputs_go_to_their_layers():
    model = nnx.eval_shape(
        lambda: nnx.Sequential(nnx.Linear(32, 8, use_bias=False, rngs=nnx.Rngs(0)))
    )
    held = {
        "layers.0.weight": jaxfp8.quantize(normal(8, 32)),
        "layers.0.input_scale": jnp.full(1, 0.5),
    }
    changes = jaxfp8.nnx.load(model, held, recipe=jaxfp8.FP8_STATIC)
    assert model.layers[0].input_scale[...] == 0.5 and model.layers[0].recipe is jaxfp8.FP8_STATIC
    assert not changes.left_scales


def test_a_path_is_refused_with_the_way_to_open_it(tmp_path):
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    for path in (tmp_path, str(tmp_path)):
        with pytest.raises(TypeError, match=r"a mapping from names.*`jaxfp8.checkpoint.open`"):
            jaxfp8.nnx.load(model, path)


def test_a_layer_in_8_bits_keeps_its_recipe_and_one_of_its_own_product_is_refused():
    q = jaxfp8.quantize(normal(48, 32), channelwise_axes=(0,))
    held = {"layers.0.weight": q, "layers.0.bias": jnp.zeros(48)}
    own = jaxfp8.nnx.Linear(32, 48, recipe=jaxfp8.FP8_DYNAMIC, rngs=nnx.Rngs(0))
    jaxfp8.nnx.load(nnx.Sequential(own), held)
    assert own.recipe is jaxfp8.FP8_DYNAMIC and own.weight.stored.shape == (48, 32)
    with pytest.raises(TypeError, match=r"`layers.0.weight` is float32.*is in 8 bits"):
        jaxfp8.nnx.load(nnx.Sequential(own), {**held, "layers.0.weight": normal(48, 32)})
    other = nnx.Linear(32, 48, dot_general=lambda *a, **k: 0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="cannot be in 8 bits: it has a `dot_general` of its own"):
        jaxfp8.nnx.load(nnx.Sequential(other), held)
    with pytest.raises(ValueError, match="is itself a Linear"):
        jaxfp8.nnx.load(nnx.Linear(32, 48, rngs=nnx.Rngs(0)), {"weight": q, "bias": jnp.zeros(48)})


def test_arrays_keep_their_shardings():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    q = jaxfp8.quantize(normal(48, 32), channelwise_axes=(0,))
    rows = NamedSharding(mesh, PartitionSpec("x", None))
    model = nnx.eval_shape(lambda: nnx.Sequential(nnx.Linear(32, 48, rngs=nnx.Rngs(0))))
    held = {"layers.0.weight": jax.device_put(q, rows), "layers.0.bias": jnp.zeros(48)}
    jaxfp8.nnx.load(model, held)
    assert model.layers[0].kernel.get_value().sharding == rows
    x = normal(2, 32, seed=1)
    np.testing.assert_allclose(run(model, x), x @ jaxfp8.dequantize(q).T, rtol=1e-5, atol=1e-5)


def test_names_of_mesh_axes_go_with_their_axes():
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("k", "n"))
    mesh = jax.make_mesh((2, 2), ("k", "n"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        linear = lambda: nnx.Linear(32, 48, kernel_init=init, rngs=nnx.Rngs(0))  # noqa: E731
        model = nnx.eval_shape(lambda: nnx.Sequential(linear()))
    q = jaxfp8.quantize(normal(48, 32), channelwise_axes=(0,))
    jaxfp8.nnx.load(model, {"layers.0.weight": q, "layers.0.bias": jnp.zeros(48)})
    layer = model.layers[0]
    assert layer.kernel.get_metadata()["out_sharding"] == ("n", "k")
    assert layer.kernel_scale.get_metadata()["out_sharding"] == ("n", None)
    assert layer.to_float().kernel.get_metadata()["out_sharding"] == ("k", "n")


# Assignment


def test_a_weight_may_be_assigned_as_it_lies():
    q = jaxfp8.quantize(normal(24, 40), jnp.int8, channelwise_axes=(0,))
    layer, x = jaxfp8.nnx.Linear(40, 24, rngs=nnx.Rngs(0)), normal(3, 40, seed=1)
    layer.weight = q.T
    assert layer.recipe is jaxfp8.INT8_W8A16 and layer.weight.stored.shape == (24, 40)
    np.testing.assert_array_equal(nnx.jit(lambda layer, x: layer(x))(layer, x), x @ q.T)
    np.testing.assert_array_equal(layer.to_float().kernel[...], jaxfp8.dequantize(q).T)


def test_a_loaded_layer_is_prepared_and_unprepared_bit_for_bit():
    q, x = jaxfp8.quantize(normal(64, 40), channelwise_axes=(0,)), normal(3, 40, seed=1)
    layer = jaxfp8.nnx.Linear(40, 64, rngs=nnx.Rngs(0))
    layer.weight = q.T
    before = layer(x)
    layer.prepare()
    np.testing.assert_allclose(layer(x), before, rtol=1e-5, atol=1e-5)
    layer.unprepare()
    np.testing.assert_array_equal(layer.weight.stored.qvalue, q.qvalue)


# Fused weights


class Fused(nnx.Module):
    def __init__(self, rngs):
        self.qkv = nnx.Linear(32, 96, rngs=rngs)

    def __call__(self, x):
        return self.qkv(x)


PARTS = {"q": 64, "k": 16, "v": 16}
NAMES = {
    "qkv/kernel": [f"{name}.weight" for name in PARTS],
    "qkv/bias": [f"{name}.bias" for name in PARTS],
}


def parts(kind):
    weights = {f"{name}.weight": kind(normal(n, 32, seed=n)) for name, n in PARTS.items()}
    return {**weights, **{f"{name}.bias": jnp.full(n, n / 8) for name, n in PARTS.items()}}


@pytest.mark.parametrize(
    "kind",
    [
        lambda w: w,
        jaxfp8.quantize,
        lambda w: jaxfp8.quantize(w, channelwise_axes=(0,)),
        lambda w: jaxfp8.quantize(w.T, channelwise_axes=(1,)).T,
    ],
    ids=["floats", "tensor", "channel", "views"],
)
def test_parts_of_a_fused_layer_become_one_weight(kind):
    given = parts(kind)
    model, x = nnx.eval_shape(lambda: Fused(nnx.Rngs(0))), normal(5, 32)
    jaxfp8.nnx.load(model, given, NAMES)
    wide = [w if isinstance(w, jax.Array) else jaxfp8.dequantize(w) for w in given.values()]
    exact = x @ jnp.concatenate(wide[:3]).T + jnp.concatenate(wide[3:])
    np.testing.assert_allclose(model(x), exact, rtol=1e-4, atol=1e-4)
    if not isinstance(given["q.weight"], jax.Array):
        assert model.qkv.recipe is jaxfp8.FP8_W8A16  # with a scale per channel


@pytest.mark.parametrize(
    "kind",
    [
        jaxfp8.quantize,
        lambda w: jaxfp8.quantize(w, channelwise_axes=(0,)),
        lambda w: jaxfp8.quantize(w, tiled_axes={0: 16, 1: 16}),
    ],
    ids=["tensor", "channel", "blocks"],
)
def test_a_fused_weight_is_cut_for_the_layers_of_its_parts(kind):
    fused, ends = kind(normal(96, 32)), {"q": (0, 64), "k": (64, 80), "v": (80, 96)}
    given = {f"{name}.weight": fused[start:stop] for name, (start, stop) in ends.items()}
    rows = {name: stop - start for name, (start, stop) in ends.items()}

    def parts_of_32():
        made = {n: nnx.Linear(32, r, use_bias=False, rngs=RNGS()) for n, r in rows.items()}
        return nnx.Dict(made)

    model = nnx.eval_shape(parts_of_32)
    jaxfp8.nnx.load(model, given)
    x = normal(5, 32, seed=1)
    got = jnp.concatenate([model[name](x) for name in ends], axis=1)
    np.testing.assert_allclose(got, x @ jaxfp8.dequantize(fused).T, rtol=1e-4, atol=1e-4)
    again = nnx.eval_shape(lambda: Fused(nnx.Rngs(0)))
    given |= {f"{name}.bias": jnp.zeros(count) for name, count in rows.items()}
    jaxfp8.nnx.load(again, given, NAMES)
    np.testing.assert_allclose(again(x), got, rtol=1e-4, atol=1e-4)


def test_parts_with_static_scales_share_the_largest():
    given = parts(jaxfp8.quantize)
    given |= {f"{name}.input_scale": jnp.float32(n) for name, n in PARTS.items()}
    names = NAMES | {"qkv/input_scale": [f"{name}.input_scale" for name in PARTS]}
    model = nnx.eval_shape(lambda: Fused(nnx.Rngs(0)))
    jaxfp8.nnx.load(model, given, names, recipe=jaxfp8.FP8_STATIC)
    assert model.qkv.input_scale[...] == 64


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"k.weight": normal(16, 32)}, "`qkv/kernel` is made of 2 kinds of tensors"),
        (
            {"k.weight": jaxfp8.quantize(normal(16, 32), jnp.int8)},
            "`qkv/kernel` hold codes of float8_e4m3fn and int8",
        ),
        (
            {"k.weight": jaxfp8.quantize(normal(16, 31))},
            r"`q.weight, k.weight, v.weight` have shapes .*\(16, 31\).*along N of \[N, K\]",
        ),
        (
            {"k.weight": jaxfp8.quantize(normal(8, 32))},
            r"`q.weight, k.weight, v.weight` has shape \(88, 32\).* needs \(96, 32\)",
        ),
    ],
    ids=["floats", "codes", "depth", "rows"],
)
def test_parts_that_do_not_fit_are_refused(change, reason):
    model = nnx.eval_shape(lambda: Fused(nnx.Rngs(0)))
    with pytest.raises(ValueError, match=reason):
        jaxfp8.nnx.load(model, parts(jaxfp8.quantize) | change, NAMES)
    assert type(model.qkv) is nnx.Linear


def test_layers_of_several_granularities_are_stacked():
    """Of one layer the zero points may all have been 0, and were left out."""
    given = tensors()
    given["experts.0.weight"] = jaxfp8.quantize(normal(8, 32), jnp.int8)
    given["experts.1.weight"] = jaxfp8.quantize(
        normal(8, 32, seed=1), jnp.int8, channelwise_axes=(0,), zero_point=True
    )
    model = shapes()
    jaxfp8.nnx.load(model, given, MAPPING)
    for layer in range(2):
        exact = jaxfp8.dequantize(given[f"experts.{layer}.weight"])
        got = jaxfp8.dequantize(model.experts.weight[layer])
        np.testing.assert_array_equal(got, exact.T)


# What is refused


def without(name):
    return {key: value for key, value in tensors().items() if key != name}


REFUSED = {
    "no tensor": (
        lambda: without("up.weight"),
        ValueError,
        r"no tensor fills up/kernel \(from up.weight\).*name them in `mapping`",
    ),
    "left over": (
        lambda: {**tensors(), "rotary.inv_freq": jnp.ones(4), "lm_head.weight": jnp.ones(4)},
        ValueError,
        "no parameter takes rotary.inv_freq, lm_head.weight.*`ignore`",
    ),
    "other size": (
        lambda: {**tensors(), "up.weight": jaxfp8.quantize(normal(48, 33))},
        ValueError,
        r"tensor `up.weight` has shape \(48, 33\).*of shape \(32, 48\) needs \(48, 32\)",
    ),
    "already [K, N]": (
        lambda: {**tensors(), "up.weight": jaxfp8.quantize(normal(32, 48))},
        ValueError,
        r"a weight is \[N, K\].*pass `.mT` of it",
    ),
    "8 bits for a norm": (
        lambda: {**tensors(), "norm.weight": jaxfp8.quantize(jnp.ones(32))},
        TypeError,
        "`norm/scale` is no weight of a layer that has an 8-bit twin",
    ),
    "tiles along heads": (
        lambda: {**tensors(), "heads.weight": jaxfp8.quantize(normal(32, 48), tiled_axes={0: 16})},
        ValueError,
        r"tensor `heads.weight` has tiles of 16 along an axis of 32",
    ),
    "unlike experts": (
        lambda: {**tensors(), "experts.1.weight": normal(8, 32)},
        ValueError,
        "`experts/kernel` is made of 2 kinds of tensors",
    ),
    "no array": (lambda: {**tensors(), "norm.weight": "ones"}, TypeError, "is of type str"),
    "bare codes": (
        lambda: {**tensors(), "up.weight": jnp.ones((48, 32), jnp.float8_e4m3fn)},
        TypeError,
        "`up.weight` is float8_e4m3fn, but `up/kernel` is float32; .*a QArray with their scale",
    ),
    "integers": (
        lambda: {**tensors(), "norm.weight": jnp.ones(32, jnp.int32)},
        TypeError,
        "`norm.weight` is int32, but `norm/scale` is float32",
    ),
    "a folder": (lambda: "folder", TypeError, "`tensors` is of type str.*checkpoint.open"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(case):
    make, error, reason = REFUSED[case]
    model = shapes()
    with pytest.raises(error, match=reason):
        jaxfp8.nnx.load(model, make(), MAPPING)
    assert type(model.up) is nnx.Linear
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(nnx.state(model)))


def test_what_is_left_over_or_kept_may_be_chosen():
    model = Model(nnx.Rngs(0))
    bias = model.up.bias[...]
    held = {**without("up.bias"), "rotary.inv_freq": jnp.ones(4)}
    jaxfp8.nnx.load(model, held, MAPPING, ignore="rotary", keep="up/bias")
    np.testing.assert_array_equal(model.up.bias[...], bias)


@pytest.mark.parametrize(
    ("value", "error", "reason"),
    [
        (lambda: jnp.ones((40, 24)), TypeError, "a QArray is needed.*quantize_weight"),
        (lambda: jaxfp8.quantize(normal(24, 40)), ValueError, "assign `q.mT`"),
        (lambda: jaxfp8.quantize(normal(40, 25)), ValueError, r"\(40, 24\) is needed"),
    ],
    ids=["floats", "not transposed", "other size"],
)
def test_assignment_of_another_weight_is_refused(value, error, reason):
    layer = jaxfp8.nnx.Linear(40, 24, rngs=nnx.Rngs(0))
    with pytest.raises(error, match=reason):
        layer.weight = value()
