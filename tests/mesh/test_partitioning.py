"""Products on a mesh, under plain jit: what each device computes, what is sent, and the numbers."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from mesh.automatic import MATRIX, QW, P, W, X, mesh_of, normal, put
from mesh.traffic import sent_by, total

import jaxfp8
import jaxfp8.nnx
import oracle
import specs
from jaxfp8._call.ops.dot import scaled_dot, scaled_dot_p
from jaxfp8._value.qarray import QArray

BLOCKS = jaxfp8.quantize(W, tiled_axes={0: 32, 1: 16})


def sharded(q: QArray, *spec) -> QArray:
    """A `QArray` of which the scale is sharded as the values are, where it has several tiles."""
    pairs = zip(spec, q.scale.shape, strict=True)
    of_scale = [entry if size > 1 else None for entry, size in pairs]
    return QArray(put(q.qvalue, *spec), put(q.scale, *of_scale), tiles=q.tiles)


def compiled(function, *args) -> str:
    return jax.jit(function).lower(*args).compile().as_text()


def ran(function, *args):
    """The optimised HLO of a jitted function, and its results; compiled once."""
    program = jax.jit(function).lower(*args).compile()
    return program.as_text(), program(*args)


def collectives(text: str) -> set[str]:
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return set(re.findall(rf"({names})(?:-start)?\(", text))


def local_shapes(text: str) -> list[str]:
    """The type of the first result of each product."""
    return re.findall(r"= \(?(\w+\[[\d,]*\])[^=]* custom-call\([^\n]*\"jaxfp8_scaled_dot", text)


LAYOUTS = {
    "rows": (("x", None), (None, None), "f32[4,64]"),
    "columns": ((None, None), (None, "y"), "f32[8,32]"),
    "both": (("x", None), (None, "y"), "f32[4,32]"),
    "rows twice": ((("x", "y"), None), (None, None), "f32[2,64]"),
    "columns twice": ((None, None), (None, ("y", "x")), "f32[8,16]"),
}


@pytest.mark.parametrize("weight", [QW, BLOCKS], ids=["channel", "blocks"])
@pytest.mark.parametrize(("lhs", "rhs", "local"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_device_computes_its_rows_and_columns(weight, lhs, rhs, local) -> None:
    args = put(X, *lhs), sharded(weight, *rhs)
    text, y = ran(jaxfp8.matmul, *args)
    assert not collectives(text)
    assert local_shapes(text) == [local]
    assert y.sharding.is_equivalent_to(NamedSharding(mesh_of(2, 2), P(lhs[0], rhs[1])), 2)
    np.testing.assert_allclose(y, jaxfp8.matmul(X, weight), rtol=1e-4, atol=1e-5)


def test_a_device_computes_what_it_would_alone() -> None:
    got = jax.jit(jaxfp8.matmul)(put(X, "x", None), sharded(QW, None, "y"))
    parts = [
        [
            jaxfp8.matmul(x, QArray(QW.qvalue[:, n : n + 32], QW.scale[:, n : n + 32]))
            for n in (0, 32)
        ]
        for x in (X[:4], X[4:])
    ]
    np.testing.assert_array_equal(got, np.block(parts))


def test_batch_axes() -> None:
    x, w = normal(4, 6, 32), normal(4, 32, 8)
    q = jaxfp8.quantize(w, channelwise_axes=(0, 2))
    args = put(x, "x", None, None), sharded(q, "x", None, "y")
    text, y = ran(jaxfp8.matmul, *args)
    assert not collectives(text)
    assert local_shapes(text) == ["f32[2,6,4]"]
    np.testing.assert_array_equal(y, jaxfp8.matmul(x, q))


def everything(x, w, bias, residual, out_scale):
    """A product with all that may follow the sum."""
    return jaxfp8.matmul(
        x,
        w,
        bias=bias,
        residual=residual,
        activation="silu",
        preferred_element_type=jnp.int8,
        out_scale=out_scale,
        return_amax=True,
    )


@pytest.mark.parametrize("contracted", [None, "x"])
def test_what_follows_the_sum_is_done_once(contracted) -> None:
    bias, residual, scale = normal(64), normal(8, 64, seed=3), jnp.float32(0.25)
    x = put(X, None if contracted else "x", contracted)
    args = x, sharded(QW, contracted, "y"), put(bias, "y"), residual, scale
    text, (got, amax) = ran(everything, *args)
    assert ("all-reduce" in collectives(text)) == bool(contracted)
    want, want_amax = everything(X, QW, *args[2:])
    assert np.max(np.abs(np.asarray(got.qvalue, int) - np.asarray(want.qvalue, int))) <= 1
    np.testing.assert_allclose(amax, want_amax, rtol=1e-5)


def test_an_amax_keeps_nan() -> None:
    x = put(X.at[5, 1].set(jnp.nan), "x", None)
    assert np.isnan(jax.jit(lambda x: jaxfp8.matmul(x, QW, return_amax=True)[1])(x))


@pytest.mark.parametrize("weight", [QW, BLOCKS], ids=["channel", "blocks"])
@pytest.mark.parametrize("spec", [(None, "x"), (None, None), ("y", "x")])
def test_parts_of_a_sum_are_added_up(weight, spec) -> None:
    args = put(X, *spec), sharded(weight, "x", None)
    text, got = ran(jaxfp8.matmul, *args)
    assert collectives(text) == {"all-reduce"}
    assert local_shapes(text) == ["f32[4,64]" if spec[0] else "f32[8,64]"]
    want = jaxfp8.matmul(X, weight)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_int32_sums_are_exact() -> None:
    x, w = (jaxfp8.quantize(a, jnp.int8) for a in (X, W))
    product = functools.partial(jaxfp8.matmul, preferred_element_type=jnp.int32)
    args = put(x.qvalue, None, "x"), put(w.qvalue, "x", None)
    text, y = ran(product, *args)
    assert re.search(r"s32\[8,64\]\S* all-reduce", text)
    np.testing.assert_array_equal(y, product(x.qvalue, w.qvalue))


def test_a_shard_may_cut_tiles() -> None:
    """Four devices along an axis of two tiles, and of one and a half."""
    for columns in (64, 48):
        q = jaxfp8.quantize(W[:, :columns], tiled_axes={1: 32})
        args = put(X, None, None), QArray(put(q.qvalue, None, ("x", "y")), q.scale, tiles=q.tiles)
        program = jax.jit(jaxfp8.matmul).lower(*args).compile()
        assert local_shapes(program.as_text()) == [f"f32[8,{columns // 4}]"]
        assert total(sent_by(program)) <= 4 * q.scale.size
        np.testing.assert_allclose(program(*args), jaxfp8.matmul(X, q), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("zero_point", [False, True], ids=["", "zero points"])
def test_a_sum_over_shards_that_cut_tiles_is_one_all_reduce(zero_point) -> None:
    q = jaxfp8.quantize(W, jnp.int8, tiled_axes={0: 128, 1: 32}, zero_point=zero_point)
    zero = None if q.zero_point is None else put(q.zero_point, None, None)
    codes = put(q.qvalue, ("x", "y"), None)
    args = put(X, None, ("x", "y")), QArray(codes, q.scale, zero, tiles=q.tiles)
    sums, scales = 2 * 2 * X.shape[0] * W.shape[1], 8 * q.scale.size
    program = jax.jit(jaxfp8.matmul).lower(*args).compile()
    assert sums <= total(sent_by(program)) <= sums + scales
    np.testing.assert_allclose(program(*args), jaxfp8.matmul(X, q), rtol=1e-4, atol=1e-4)


def test_the_larger_operand_stays_where_it_is() -> None:
    """One mesh axis splits the rows of one side and the depth of the other."""
    split_weight = put(X, "x", None), sharded(QW, "x", None)
    assert local_shapes(compiled(jaxfp8.matmul, *split_weight)) == ["f32[8,64]"]
    tall = normal(1024, 256)
    split_rows = put(tall, "x", None), sharded(QW, "x", None)
    text, y = ran(jaxfp8.matmul, *split_rows)
    assert local_shapes(text) == ["f32[512,64]"]
    assert "all-reduce" not in collectives(text)
    np.testing.assert_array_equal(y, jaxfp8.matmul(tall, QW))


def test_a_part_of_a_mesh_axis() -> None:
    """A reshape leaves half of a mesh axis on each of two axes."""
    x = put(normal(8, 4, 256), "x", mesh=mesh_of(4))

    def product(x):
        return jaxfp8.matmul(x.reshape(2, 4, 4, 256), QW)

    text, y = ran(product, x)
    assert local_shapes(text) == ["f32[1,2,4,64]"]
    np.testing.assert_array_equal(y, product(jnp.asarray(np.asarray(x))))


# Random problems over random shardings


CASES_PER_TEST = 12


def drawn(rng, monkeypatch):
    """A spec, operands in one place, and the same spread over a mesh at random."""
    monkeypatch.setattr(specs, "SIZES", (0, 1, 2, 4, 6, 8, 16, 64, 128))
    mesh = mesh_of(*((4,), (2, 2))[rng.integers(2)])
    spec = specs.draw_spec(rng)
    operands = specs.draw_operands(rng, spec)
    given = {name: scattered(rng, mesh, x) for name, x in operands.items() if "_sums" not in name}
    sums = {name: put(x, mesh=mesh) for name, x in operands.items() if "_sums" in name}
    return spec, operands, given | sums


def scattered(rng, mesh, x):
    """An array, some of whose axes are split."""
    axes = list(mesh.axis_names)
    spec = []
    for size in x.shape:
        fits = [axis for axis in axes if size % mesh.shape[axis] == 0]
        spec.append(str(rng.choice(fits)) if fits and rng.random() < 0.6 else None)
        axes = [axis for axis in axes if axis != spec[-1]]
    return put(x, *spec, mesh=mesh)


@pytest.mark.parametrize("block", range(5))
def test_random_products_agree_with_float64(block: int, monkeypatch) -> None:
    rng = np.random.default_rng(20_000 + block)
    split = 0
    for _ in range(CASES_PER_TEST):
        spec, operands, args = drawn(rng, monkeypatch)
        program = jax.jit(lambda args, spec=spec: scaled_dot(spec, **args)).lower(args).compile()
        split += spec.out_shape not in map(shape_of, local_shapes(program.as_text()))
        out, amax = program(args)
        oracle.assert_within_bound(spec, operands, np.asarray(out), amax)
    assert split > CASES_PER_TEST / 4  # what this test is about does happen


def shape_of(hlo_type: str) -> tuple[int, ...]:
    return tuple(int(size) for size in re.findall(r"\d+", hlo_type.partition("[")[2]))


# Quantizing


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (("x", None), jnp.float8_e4m3fn),
        ((None, "y"), jnp.int8),
        (("x", "y"), jnp.float8_e4m3fn),
        ((("x", "y"), None), jnp.int8),
    ],
    ids=["rows", "columns", "both", "rows twice"],
)
@pytest.mark.parametrize(
    "tiles",
    [{}, {"channelwise_axes": (0,)}, {"channelwise_axes": (1,)}, {"tiled_axes": {0: 32, 1: 32}}],
    ids=["tensor", "row", "column", "block"],
)
@pytest.mark.same_bits
def test_quantize(tiles, spec, dtype) -> None:
    def quantize(x):
        return jaxfp8.quantize(x, dtype, **tiles)

    text, got = ran(quantize, put(W, *spec))
    assert collectives(text) <= {"all-reduce"}
    want = jax.jit(quantize)(W)
    np.testing.assert_array_equal(got.scale, want.scale)
    np.testing.assert_array_equal(
        np.asarray(got.qvalue).view(np.uint8), np.asarray(want.qvalue).view(np.uint8)
    )


# Transformations


def step(x, w, g, recipe):
    """A product and its gradients, as a layer of FP8 training has them."""

    def loss(x, w):
        y = jaxfp8.fp8_dot_general(x, w, MATRIX, recipe=recipe)
        return jnp.sum(y * g), y

    (_, y), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w)
    return y, *gradients


TRAINING = {
    "data": (("x", None), (None, None)),
    "tensor": ((None, None), (None, "y")),
    "both": (("x", None), (None, "y")),
}


@pytest.mark.same_bits  # XLA encodes the short rows of shards
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize(("lhs", "rhs"), TRAINING.values(), ids=TRAINING)
def test_training_gathers_nothing(granularity, lhs, rhs) -> None:
    recipe = jaxfp8.CurrentScaling(granularity=granularity)
    g = normal(8, 64, seed=5)
    args = put(X, *lhs), put(W, *rhs), put(g, lhs[0], rhs[1])
    function = functools.partial(step, recipe=recipe)
    text, got = ran(function, *args)
    assert collectives(text) == {"all-reduce"}
    want = jax.jit(function)(X, W, g)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_vmap_scan_and_remat() -> None:
    x = normal(8, 4, 64)
    stack = jaxfp8.quantize(normal(3, 64, 64) / 8, channelwise_axes=(0, 2))

    def loss(x, stack):
        @jax.checkpoint
        def layer(carry, w):
            return jnp.tanh(jax.vmap(jaxfp8.matmul, (0, None))(carry, w)), None

        return jnp.sum(jax.lax.scan(layer, x, stack)[0] ** 2)

    grad = jax.value_and_grad(loss)
    (text, got), want = ran(grad, put(x, "x"), stack), jax.jit(grad)(x, stack)
    assert "all-gather" not in collectives(text)
    assert set(local_shapes(text)) == {"f32[4,4,64]"}
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


def test_rewritten_products() -> None:
    def f(x, codes, scale):
        return jax.nn.relu(x @ (codes.astype(jnp.float32) * scale))

    args = put(X, "x", None), put(QW.qvalue, None, "y"), put(QW.scale, None, "y")
    text, y = ran(jaxfp8.rewrite(f), *args)
    assert not collectives(text)
    assert local_shapes(text) == ["f32[4,32]"]
    np.testing.assert_allclose(y, f(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [None, 1], ids=["per row", "per tensor"])
def test_an_activation_that_the_function_quantizes_stays_in_rows(size) -> None:
    def product(x, w, scale):
        amax = jnp.max(jnp.abs(x), axis=-1 if size is None else None, keepdims=True)
        step = amax / 127.0
        codes = jnp.clip(jnp.round(x / step), -127, 127).astype(jnp.int8)
        return jax.lax.dot(codes, w, preferred_element_type=jnp.int32) * step * scale

    q = jaxfp8.quantize(W, jnp.int8, channelwise_axes=(1,))
    text, y = ran(jaxfp8.rewrite(product), put(X, "x"), q.qvalue, q.scale)
    assert "jaxfp8_amax" in text and "jaxfp8_quantize" in text
    assert size or "all-gather" not in collectives(text)  # of one scale the maxima are sent
    np.testing.assert_allclose(y, product(X, q.qvalue, q.scale), rtol=1e-6)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_an_activation_that_is_split_along_k_sends_maxima_and_sums_alone(kind) -> None:
    """A layer that ends a pair of tensor parallel layers; a row with NaN keeps it."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    q = jaxfp8.quantize(W, jnp.int8, channelwise_axes=(1,))

    def product(x, w, scale):
        step = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127.0
        codes = jnp.clip(jnp.round(x / step), -127, 127).astype(jnp.int8)
        return jnp.dot(codes, w, preferred_element_type=jnp.int32, out_sharding=out) * step * scale

    out = P(None, None) if kind is jax.sharding.AxisType.Explicit else None
    with jax.set_mesh(mesh):
        x, w = put(X.at[3, 7].set(jnp.nan), None, "x", mesh=mesh), put(q.qvalue, "x", mesh=mesh)
        args = x, w, put(q.scale, mesh=mesh)
        program = jax.jit(jaxfp8.rewrite(product)).lower(*args).compile()
        found, y = sent_by(program), np.asarray(program(*args))
    assert {one.kind for one in found} == {"all-gather", "all-reduce"}
    assert max(one.bytes for one in found if one.kind == "all-gather") <= 4 * X.shape[0] * 4
    assert np.isnan(y[3]).all()
    step = np.abs(X).max(-1, keepdims=True) / np.float32(127)
    want = np.round(np.asarray(X) / step) @ np.asarray(q.qvalue, np.float32) * step * q.scale
    np.testing.assert_allclose(np.delete(y, 3, 0), np.delete(want, 3, 0), rtol=1e-5, atol=1e-5)


def test_layers_with_sharding_annotations() -> None:
    """A column-parallel and a row-parallel layer, and a batch: one all-reduce and no gather."""

    def init(*names):
        return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)

    mesh = mesh_of(2, 2)
    with jax.set_mesh(mesh):
        model = nnx.Sequential(
            nnx.Linear(256, 128, kernel_init=init(None, "y"), rngs=nnx.Rngs(0)),
            nnx.relu,
            nnx.Linear(128, 64, kernel_init=init("y", None), rngs=nnx.Rngs(1)),
        )
        jaxfp8.nnx.quantize(model, jaxfp8.FP8_W8A16)
        graph, state = nnx.split(model)
        run = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
        text = run.lower(state, put(X, "x", None)).compile().as_text()
        got = run(state, put(X, "x", None))
    assert local_shapes(text) == ["f32[4,64]", "f32[4,64]"]
    assert collectives(text) == {"all-reduce"}
    alone = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), state)
    np.testing.assert_allclose(got, nnx.merge(graph, alone)(X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("names", [("x", None), (None, "x")])
def test_weights_that_lie_on_several_devices_are_gathered_as_bytes(names) -> None:
    """Batch and weights split along one mesh axis, as fully sharded training has them."""
    x, w, g = normal(2048, 256), normal(256, 64, seed=1), normal(2048, 64, seed=2)
    function = functools.partial(step, recipe=jaxfp8.CurrentScaling())
    text = compiled(function, put(x, "x"), put(w, *names), put(g, "x"))
    gathered = re.findall(r"= \(?(\w+)\[[\d,]*\]\S* all-gather", text)
    assert gathered
    assert set(gathered) <= {"u8", "f8e4m3fn", "s8"}
    assert "f32[1024,64]" in local_shapes(text)


# What is lowered


def test_one_device_needs_no_rule() -> None:
    text = jax.jit(jaxfp8.matmul).lower(X, QW).as_text()
    assert "CustomSPMDPartitioning" not in text
    assert text.count("custom_call @jaxfp8_scaled_dot") == 1


def test_calls_for_gpus_have_the_rule_too() -> None:
    def product(x):
        return jaxfp8.matmul(jaxfp8.quantize(x), QW)

    text = jax.jit(product).trace(put(X, "x", None)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@CustomSPMDPartitioning") == 2
    assert "custom_call @jaxfp8" not in text


def test_calls_that_differ_only_in_what_they_compute_have_different_text() -> None:
    """The persistent cache may leave the function that splits out of its key."""

    def text(activation):
        x = put(X, "x", None)
        function = jax.jit(lambda x: jaxfp8.matmul(x, QW, activation=activation))
        return re.sub(r'backend_config = "\d+"', "", function.lower(x).as_text())

    assert text("relu") == text("relu")
    assert text("relu") != text("silu")


def test_a_mesh_with_explicit_axes_is_left_to_xla() -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, P("x"))
        jaxpr = jax.make_jaxpr(lambda x: jaxfp8.matmul(x, QW))(x)
        (eqn,) = [e for e in jaxpr.eqns if e.primitive is scaled_dot_p]
        assert not eqn.params["split"]
        np.testing.assert_array_equal(jax.jit(jaxfp8.matmul)(x, QW), jaxfp8.matmul(X, QW))
