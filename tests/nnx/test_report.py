"""The report on accuracy: its numbers, its order, its suggestion."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfp8
import jaxfp8.nnx

X = jax.random.normal(jax.random.key(0), (32, 64))


class Model(nnx.Module):
    """Three layers, of which one has an input of outliers that make the rest of it vanish."""

    def __init__(self, rngs):
        self.first = nnx.Linear(64, 64, rngs=rngs)
        self.bad = nnx.Linear(64, 64, rngs=rngs)
        self.last = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        outliers = jnp.zeros(64).at[0].set(3e3)
        return self.last(jnp.tanh(self.bad(x + outliers)))


def model():
    made = Model(nnx.Rngs(0))
    made.bad.kernel[...] = made.bad.kernel[...].at[0].set(0)
    return made


def decibels(exact, got):
    exact, got = np.asarray(exact, np.float64), np.asarray(got, np.float64)
    return 20 * np.log10(np.linalg.norm(exact) / np.linalg.norm(got - exact))


def test_numbers_are_those_of_the_layer_on_its_own_input():
    made = model()
    rows = {row.path: row for row in jaxfp8.nnx.report(made, X, recipe=jaxfp8.INT8_DYNAMIC).rows}
    row, twin = rows["first"], jaxfp8.nnx.Linear.of(made.first, jaxfp8.INT8_DYNAMIC)
    assert row.sqnr == pytest.approx(decibels(made.first(X), twin(X)), abs=0.01)
    assert (row.kind, row.recipe, row.calls) == ("Linear", "INT8_DYNAMIC", 1)
    kernel = made.first.kernel[...]
    assert row.weight.error.sqnr == pytest.approx(
        decibels(kernel, jaxfp8.dequantize(twin.weight)), abs=0.01
    )
    assert row.activation.amax == pytest.approx(float(jnp.abs(X).max()))
    scales = jnp.abs(X).max(1) / 127
    assert row.activation.scale == pytest.approx((float(scales.min()), float(scales.max())))


def test_values_that_vanish_are_counted():
    rows = {row.path: row for row in jaxfp8.nnx.report(model(), X, recipe=jaxfp8.INT8_DYNAMIC).rows}
    assert rows["first"].activation.underflowed < 0.02
    assert rows["bad"].activation.underflowed > 0.95
    assert rows["bad"].activation.saturated == 0


def test_worst_comes_first_and_is_suggested_to_stay_wide():
    report = jaxfp8.nnx.report(model(), X, recipe=jaxfp8.INT8_DYNAMIC)
    assert report.rows[0].path == "bad"
    assert report.keep_wide == ("bad",)
    assert [row.sqnr for row in report.rows] == sorted(row.sqnr for row in report.rows)


def test_what_is_suggested_helps():
    made = model()
    report = jaxfp8.nnx.report(made, X, recipe=jaxfp8.INT8_DYNAMIC)
    kept = jaxfp8.nnx.report(
        made, X, recipe=jaxfp8.INT8_DYNAMIC, where=lambda path, layer: path not in report.keep_wide
    )
    assert kept.total.sqnr > report.total.sqnr + 10


def test_model_is_not_changed():
    made = model()
    jaxfp8.nnx.report(made, X, recipe=jaxfp8.FP8_DYNAMIC)
    assert type(made.first) is nnx.Linear


def test_eight_bit_model_against_its_reference_says_the_same():
    made, narrow = model(), model()
    jaxfp8.nnx.quantize(narrow, jaxfp8.FP8_DYNAMIC)
    before = jaxfp8.nnx.report(made, X, recipe=jaxfp8.FP8_DYNAMIC)
    after = jaxfp8.nnx.report(narrow, X, reference=made)
    assert [row.path for row in after.rows] == [row.path for row in before.rows]
    for a, b in zip(before.rows, after.rows, strict=True):
        assert a.sqnr == pytest.approx(b.sqnr, abs=0.01)


def test_eight_bit_model_alone_tells_of_its_activations():
    narrow = model()
    jaxfp8.nnx.quantize(narrow, jaxfp8.INT8_DYNAMIC, where="first|last")
    with pytest.warns(UserWarning, match="rounding of weights is not in this report"):
        report = jaxfp8.nnx.report(narrow, X)
    assert {row.path for row in report.rows} == {"first", "last"}
    assert all(row.weight is None and row.activation is not None for row in report.rows)
    assert str(report).startswith("outputs, without the rounding of weights (give `reference`")


def test_weights_alone_are_not_said_to_be_free():
    narrow = model()
    jaxfp8.nnx.quantize(narrow, jaxfp8.FP8_W8A16)
    with pytest.raises(ValueError, match=r"rounds nothing else.* give `reference`"):
        jaxfp8.nnx.report(narrow, X)
    whole = jaxfp8.nnx.report(narrow, X, reference=model())
    assert whole.total.sqnr == pytest.approx(decibels(model()(X), narrow(X)), abs=0.01)
    assert whole.weights is None  # it is all of the error


def test_the_whole_error_stands_before_its_parts():
    narrow, wide = model(), model()
    jaxfp8.nnx.quantize(narrow, jaxfp8.INT8_DYNAMIC)
    report = jaxfp8.nnx.report(narrow, X, reference=model())
    jaxfp8.nnx.quantize(wide, jaxfp8.INT8_DYNAMIC)
    jaxfp8.nnx.dequantize(wide)
    exact, between, got = model()(X), wide(X), narrow(X)
    assert report.total.sqnr == pytest.approx(decibels(exact, got), abs=0.01)
    assert report.weights.sqnr == pytest.approx(decibels(exact, between), abs=0.01)
    assert report.activations.sqnr == pytest.approx(decibels(between, got), abs=0.01)
    title, weights, activations, *_ = str(report).splitlines()
    assert title == f"outputs: {report.total}"
    assert weights == f"  of rounding weights alone: {report.weights}"
    assert activations == f"  of rounding activations alone: {report.activations}"


def test_errors_against_a_reference_are_those_of_the_weights_that_the_model_has():
    narrow = model()
    jaxfp8.nnx.quantize(narrow, jaxfp8.FP8_W8A16)
    narrow.first.kernel_scale[...] *= 1.5
    report = jaxfp8.nnx.report(narrow, X, reference=model())
    row = {row.path: row for row in report.rows}["first"]
    assert row.sqnr == pytest.approx(decibels(model().first(X), narrow.first(X)), abs=0.01)


def test_a_reference_without_a_layer_is_refused():
    narrow = model()
    jaxfp8.nnx.quantize(narrow, jaxfp8.INT8_DYNAMIC)
    other = nnx.Sequential(nnx.Linear(64, 8, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"has no float layer .* at bad, first, last"):
        jaxfp8.nnx.report(narrow, X, reference=other)


def test_static_scales_that_are_too_small_saturate():
    made = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
    narrow = nnx.clone(made)
    jaxfp8.nnx.quantize(narrow, jaxfp8.FP8_STATIC, sample=(X / 2,))
    (row,) = jaxfp8.nnx.report(narrow, X, reference=made).rows
    share = float((jnp.abs(X) > jnp.abs(X).max() / 2 * (1 + 1 / 32)).mean())
    assert row.activation.saturated == pytest.approx(share)


class Stacked(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return nnx.Linear(64, 64, rngs=rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer, x):
            return jnp.tanh(layer(x))

        return run(self.layers, x)


def test_layers_of_a_scan_are_one_row_of_several_calls():
    (row,) = jaxfp8.nnx.report(Stacked(nnx.Rngs(0)), X, recipe=jaxfp8.INT8_DYNAMIC).rows
    assert (row.path, row.calls) == ("layers", 3)
    assert 35 < row.sqnr < 45


def test_tied_embedding_is_one_row():
    class Tied(nnx.Module):
        def __init__(self):
            self.table = nnx.Embed(30, 16, rngs=nnx.Rngs(0))

        def __call__(self, ids):
            return self.table.attend(self.table(ids))

    sample = jnp.arange(5)
    (row,) = jaxfp8.nnx.report(Tied(), sample, recipe=jaxfp8.INT8_DYNAMIC, where="table").rows
    assert row.calls == 2 and row.activation is not None


def test_report_prints_and_is_json():
    report = jaxfp8.nnx.report(model(), X, recipe=jaxfp8.INT8_DYNAMIC)
    assert "better kept wide: bad" in str(report)
    whole = json.loads(report.to_json())
    assert whole["keep_wide"] == ["bad"] and whole["rows"][0]["path"] == "bad"
    assert report.to_html().count("<tr>") == 4


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: jaxfp8.nnx.report(3, X), TypeError, "`model` is of type int"),
        (
            lambda: jaxfp8.nnx.report(jaxfp8.nnx.quantize(model(), jaxfp8.INT8_DYNAMIC), X),
            TypeError,
            "is of type Changes.* changed in place",
        ),
        (lambda: jaxfp8.nnx.report(model(), X), ValueError, "has no layer to compare"),
        (
            lambda: jaxfp8.nnx.report(model(), X, recipe=jaxfp8.INT8_DYNAMIC, reference=model()),
            ValueError,
            "are both given",
        ),
    ],
)
def test_wrong_use_says_what_to_do(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_a_report_against_a_reference_leaves_the_model_as_it_is():
    class Normed(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.norm(self.dense(x))

    model, reference = Normed(), Normed()
    jaxfp8.nnx.quantize(model, jaxfp8.INT8_DYNAMIC)
    before = np.asarray(model.norm.mean[...])
    jaxfp8.nnx.report(model, jnp.ones((4, 8)), reference=reference)
    np.testing.assert_array_equal(model.norm.mean[...], before)


TRAINING = {"delayed": jaxfp8.DelayedScaling(amax_history_length=4)}
TRAINING |= {
    "current": jaxfp8.CurrentScaling(),
    "row": jaxfp8.CurrentScaling(granularity="channel"),
}


def trained(recipe):
    made = model()
    jaxfp8.nnx.fp8_training(made, recipe)
    made(X)  # a step of the history
    return made


@pytest.mark.parametrize("recipe", TRAINING.values(), ids=TRAINING)
def test_fp8_training_is_compared_with_floats_and_left_alone(recipe):
    made, before = trained(recipe), nnx.state(trained(recipe))
    report = jaxfp8.nnx.report(made, X)
    row = {row.path: row for row in report.rows}["first"]
    got = nnx.clone(made).first(X)
    assert row.sqnr == pytest.approx(decibels(model().first(X), got), abs=0.01)
    assert (row.kind, row.recipe, report.note) == ("Linear", type(recipe).__name__, "")
    assert 25 < row.activation.error.sqnr < 40 and 25 < row.weight.error.sqnr < 40
    assert report.total.sqnr == pytest.approx(decibels(model()(X), nnx.clone(made)(X)), abs=0.01)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, nnx.state(made), before))


def test_a_recipe_is_compared_with_floats_though_the_model_trains_in_fp8():
    want = jaxfp8.nnx.report(model(), X, recipe=jaxfp8.INT8_DYNAMIC)
    got = jaxfp8.nnx.report(trained(jaxfp8.CurrentScaling()), X, recipe=jaxfp8.INT8_DYNAMIC)
    assert [row.sqnr for row in got.rows] == pytest.approx([row.sqnr for row in want.rows])
    assert got.total.sqnr == pytest.approx(want.total.sqnr)


def test_a_second_rounding_is_measured_and_lossy_lines_are_named():
    made = model()
    kernel = made.last.kernel[...]
    made.last.kernel[...] = kernel.at[0, 2].set(100 * jnp.abs(kernel).max())
    report = jaxfp8.nnx.report(made, X, recipe=jaxfp8.FP8_AS_INT8)
    rows = {row.path: row for row in report.rows}
    held = jaxfp8.dequantize(jaxfp8.FP8_W8A16.quantize_weight(made.first.kernel[...], (0,)))
    once_more = jaxfp8.dequantize(jaxfp8.quantize(held, jnp.int8, channelwise_axes=(1,)))
    second = rows["first"].second
    assert second.error.sqnr == pytest.approx(decibels(held, once_more), abs=0.05)
    assert (second.lines, second.lossy_lines) == (64, 0)
    assert (rows["last"].second.lines, rows["last"].second.lossy_lines) == (8, 1)
    assert "last: int8 sets more than 10% of the values to 0 in 1 of 8 lines" in str(report)
    eight_bit = nnx.clone(made)
    jaxfp8.nnx.quantize(eight_bit, jaxfp8.FP8_AS_INT8)
    with pytest.warns(UserWarning, match="rounding of weights"):
        alone = {row.path: row for row in jaxfp8.nnx.report(eight_bit, X).rows}
    assert alone["first"].second == second and alone["first"].weight is None
    assert jaxfp8.nnx.report(made, X, recipe=jaxfp8.FP8_DYNAMIC).rows[0].second is None


def test_alike_layers_are_one_line_with_the_least_and_the_largest_figure(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    made = nnx.Sequential(*(nnx.Linear(64, 64, rngs=nnx.Rngs(seed)) for seed in range(3)))
    report = jaxfp8.nnx.report(made, X, recipe=jaxfp8.INT8_DYNAMIC)
    (line,) = [line for line in str(report).splitlines() if "3 x Linear" in line]
    decibels = sorted(row.sqnr for row in report.rows)
    assert "layers/*" in line and f"{decibels[0]:.1f}..{decibels[-1]:.1f}" in line
    assert len(report.rows) == 3 and {row.shape for row in report.rows} == {(64, 64)}


def test_layers_that_are_better_kept_wide_have_a_line_of_their_own(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    made = nnx.Sequential(*(nnx.Linear(64, 64, rngs=nnx.Rngs(seed)) for seed in range(3)))
    made.layers[0].kernel[...] = made.layers[0].kernel[...].at[0].set(0)
    report = jaxfp8.nnx.report(made, X.at[:, 0].set(3e3), recipe=jaxfp8.INT8_DYNAMIC)
    assert report.keep_wide == ("layers/0",)
    assert "2 x Linear" in str(report) and "3 x Linear" not in str(report)


def test_a_layer_is_measured_with_few_programs(caplog):
    made, x = nnx.Sequential(nnx.Linear(37, 29, rngs=nnx.Rngs(0))), jnp.ones((3, 37))
    with jax.log_compiles(), caplog.at_level("WARNING", "jax"):
        jaxfp8.nnx.report(made, x, recipe=jaxfp8.INT8_DYNAMIC)
    compiled = [record for record in caplog.records if record.message.startswith("Compiling")]
    assert 0 < len(compiled) < 25
