"""The report on accuracy of models of linen: the numbers of nnx's, by interception."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
import jaxfp8.linen

X = jax.random.normal(jax.random.key(0), (16, 32))


class Model(nn.Module):
    kind: object = nn.Dense

    @nn.compact
    def __call__(self, x):
        x = nn.relu(self.kind(64, name="up")(x))
        return self.kind(8, name="down")(x)


def eight_bit(features, name):
    return jaxfp8.linen.Dense(features, recipe=jaxfp8.INT8_DYNAMIC, name=name)


VARIABLES = jax.jit(Model().init)(jax.random.key(1), X)


def decibels(exact, got):
    return 20 * np.log10(np.linalg.norm(exact) / np.linalg.norm(got - exact))


def test_numbers_are_those_of_the_layer_on_its_own_input():
    report = jaxfp8.linen.report(Model(), VARIABLES, X, recipe=jaxfp8.INT8_DYNAMIC)
    rows = {row.path: row for row in report.rows}
    params = VARIABLES["params"]["up"]
    twin = jaxfp8.linen.Dense(64, recipe=jaxfp8.INT8_DYNAMIC)
    held, _ = jaxfp8.linen.quantize(twin, {"params": params}, X)
    exact, got = nn.Dense(64).apply({"params": params}, X), twin.apply(held, X)
    assert rows["up"].sqnr == pytest.approx(decibels(exact, got), abs=0.01)
    assert rows["up"].weight.amax == pytest.approx(float(jnp.abs(params["kernel"]).max()))
    assert report.total.sqnr > 30


def test_model_of_8_bit_layers_with_float_variables_says_the_same():
    before = jaxfp8.linen.report(Model(), VARIABLES, X, recipe=jaxfp8.INT8_DYNAMIC)
    after = jaxfp8.linen.report(Model(eight_bit), VARIABLES, X)
    assert [row.path for row in after.rows] == [row.path for row in before.rows]
    assert [row.sqnr for row in after.rows] == pytest.approx([row.sqnr for row in before.rows])
    assert after.total.sqnr == pytest.approx(before.total.sqnr)


def test_eight_bit_variables_tell_of_activations_alone():
    model = Model(eight_bit)
    held, _ = jaxfp8.linen.quantize(model, VARIABLES, X)
    with pytest.warns(UserWarning, match="give `reference`"):
        report = jaxfp8.linen.report(model, held, X)
    assert all(row.weight is None for row in report.rows)
    assert str(report).startswith("outputs, without the rounding of weights (give `reference`")


def test_weights_alone_are_not_said_to_be_free():
    model = Model(functools.partial(jaxfp8.linen.Dense, recipe=jaxfp8.FP8_W8A16))
    held, _ = jaxfp8.linen.quantize(model, VARIABLES, X)
    with pytest.raises(ValueError, match=r"rounds nothing else.* give `reference`"):
        jaxfp8.linen.report(model, held, X)
    report = jaxfp8.linen.report(model, held, X, reference=VARIABLES)
    want = decibels(Model().apply(VARIABLES, X), model.apply(held, X))
    assert report.total.sqnr == pytest.approx(want, abs=0.01)
    before = jaxfp8.linen.report(model, VARIABLES, X)
    assert [row.output for row in report.rows] == [row.output for row in before.rows]


def test_the_whole_error_stands_before_its_parts():
    model = Model(eight_bit)
    held, _ = jaxfp8.linen.quantize(model, VARIABLES, X)
    wide = jax.tree.map(
        lambda q: jaxfp8.dequantize(q) if isinstance(q, jaxfp8.QArray) else q,
        held,
        is_leaf=lambda leaf: isinstance(leaf, jaxfp8.QArray),
    )
    report = jaxfp8.linen.report(model, held, X, reference=VARIABLES)
    exact, between, got = (
        Model().apply(VARIABLES, X),
        Model().apply(wide, X),
        model.apply(held, X),
    )
    assert report.total.sqnr == pytest.approx(decibels(exact, got), abs=0.01)
    assert report.weights.sqnr == pytest.approx(decibels(exact, between), abs=0.01)
    assert report.activations.sqnr == pytest.approx(decibels(between, got), abs=0.01)
    assert str(report).startswith(f"outputs: {report.total}\n  of rounding weights alone:")


def test_errors_against_a_reference_are_those_of_the_scales_that_the_model_has():
    model = Model(functools.partial(jaxfp8.linen.Dense, recipe=jaxfp8.FP8_STATIC))
    held, _ = jaxfp8.linen.quantize(model, VARIABLES, X / 2)
    report = jaxfp8.linen.report(model, held, X, reference=VARIABLES)
    row = {row.path: row for row in report.rows}["up"]
    share = float((jnp.abs(X) > jnp.abs(X).max() / 2 * (1 + 1 / 32)).mean())
    assert row.activation.saturated == pytest.approx(share)


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        (VARIABLES["params"], "has no collection 'params'"),
        ({"params": {"up": VARIABLES["params"]["up"]}}, "has nothing at `down/kernel`"),
    ],
    ids=["parameters alone", "a layer is missing"],
)
def test_a_reference_that_lacks_floats_is_refused(reference, says):
    model = Model(eight_bit)
    held, _ = jaxfp8.linen.quantize(model, VARIABLES, X)
    with pytest.raises(ValueError, match=says):
        jaxfp8.linen.report(model, held, X, reference=reference)


def test_a_recipe_and_a_reference_are_refused_together():
    with pytest.raises(ValueError, match="are both given"):
        jaxfp8.linen.report(Model(), VARIABLES, X, recipe=jaxfp8.INT8_DYNAMIC, reference=VARIABLES)


class Scanned(nn.Module):
    kind: object = nn.Dense

    @nn.compact
    def __call__(self, x):
        kind = self.kind

        class Body(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return jnp.tanh(kind(32, name="dense")(x)), None

        layers = nn.scan(Body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return layers(name="layers")(x, None)[0]


def test_layers_of_a_scan_are_one_row_of_several_calls():
    variables = Scanned().init(jax.random.key(0), X)
    (row,) = jaxfp8.linen.report(Scanned(), variables, X, recipe=jaxfp8.FP8_DYNAMIC).rows
    assert (row.path, row.calls) == ("layers/dense", 3)
    assert 25 < row.sqnr < 35
    narrow = Scanned(functools.partial(jaxfp8.linen.Dense, recipe=jaxfp8.FP8_DYNAMIC))
    held, _ = jaxfp8.linen.quantize(narrow, variables, X)
    (again,) = jaxfp8.linen.report(narrow, held, X, reference=variables).rows
    assert (again.calls, again.sqnr) == (3, pytest.approx(row.sqnr, abs=0.05))


def test_where_and_rules_choose():
    rules = [jaxfp8.Rule(where="up", recipe=None), jaxfp8.INT8_DYNAMIC]
    report = jaxfp8.linen.report(Model(), VARIABLES, X, recipe=rules)
    assert [row.path for row in report.rows] == ["down"]
    report = jaxfp8.linen.report(
        Model(), VARIABLES, X, recipe=jaxfp8.INT8_DYNAMIC, where=lambda path, module: path == "up"
    )
    assert [row.path for row in report.rows] == ["up"]
    report = jaxfp8.linen.report(Model(), VARIABLES, X, recipe=jaxfp8.INT8_DYNAMIC, where="^up")
    assert [row.path for row in report.rows] == ["up"]


def test_nothing_to_compare_is_refused():
    with pytest.raises(ValueError, match="has no layer to compare"):
        jaxfp8.linen.report(Model(), VARIABLES, X)


TRAINING = {
    "delayed": jaxfp8.linen.Fp8DirectDotGeneralOp,
    "current": functools.partial(
        jaxfp8.linen.Fp8DirectDotGeneralOp, recipe=jaxfp8.CurrentScaling()
    ),
    "flax": nn.Fp8DirectDotGeneralOp,
}


def training(cls):
    model = Model(functools.partial(nn.Dense, dot_general_cls=cls))
    return model, {**model.init(jax.random.key(1), X), "params": VARIABLES["params"]}


@pytest.mark.parametrize("cls", TRAINING.values(), ids=TRAINING)
def test_a_recipe_is_compared_with_floats_though_the_model_trains_in_fp8(cls):
    want = jaxfp8.linen.report(Model(), VARIABLES, X, recipe=jaxfp8.INT8_DYNAMIC)
    got = jaxfp8.linen.report(*training(cls), X, recipe=jaxfp8.INT8_DYNAMIC)
    assert [row.sqnr for row in got.rows] == pytest.approx([row.sqnr for row in want.rows])
    assert got.total.sqnr == pytest.approx(want.total.sqnr)


@pytest.mark.parametrize("cls", TRAINING.values(), ids=TRAINING)
def test_fp8_training_is_compared_with_floats(cls):
    model, variables = training(cls)
    report = jaxfp8.linen.report(model, variables, X)
    exact, got = Model().apply(VARIABLES, X), model.apply(variables, X)
    assert report.total.sqnr == pytest.approx(decibels(exact, got), abs=0.01)
    row = {row.path: row for row in report.rows}["up"]
    recipe = "CurrentScaling" if cls is TRAINING["current"] else "DelayedScaling"
    assert (row.kind, row.recipe) == ("Dense", recipe)
    assert 25 < row.sqnr < 35 and 25 < row.weight.error.sqnr < 40
    assert row.activation.amax == pytest.approx(float(jnp.abs(X).max()))


def test_layers_that_where_leaves_out_are_wide_in_the_baseline():
    model, variables = training(TRAINING["current"])
    report = jaxfp8.linen.report(model, variables, X, where=lambda path, module: path == "up")
    assert [row.path for row in report.rows] == ["up"]
    both = jaxfp8.linen.report(model, variables, X)
    assert report.total.sqnr > both.total.sqnr


def test_a_second_rounding_is_measured():
    report = jaxfp8.linen.report(Model(), VARIABLES, X, recipe=jaxfp8.FP8_AS_INT8)
    rows = {row.path: row for row in report.rows}
    w = VARIABLES["params"]["up"]["kernel"]
    held = jaxfp8.dequantize(jaxfp8.FP8_W8A16.quantize_weight(w, (0,)))
    once_more = jaxfp8.dequantize(jaxfp8.quantize(held, jnp.int8, channelwise_axes=(1,)))
    assert rows["up"].second.error.sqnr == pytest.approx(decibels(held, once_more), abs=0.05)
    assert "rounded once more, to int8" in str(report)
