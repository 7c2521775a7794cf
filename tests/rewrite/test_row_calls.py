"""On a GPU, a norm or a gate and the quantization behind it become one call."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import produced_rows as rows
import pytest
import quantized

import jaxfp8
from jaxfp8._call.ops.produce_call import quantize_produced_p
from jaxfp8._call.reference.produce_reference import RowScale
from jaxfp8._value import compat

K = 64
CALL = "custom_call @jaxfp8_quantize_rows"
W = jaxfp8.quantize(jax.random.normal(jax.random.key(1), (K, 32)), channelwise_axes=(1,))
WIDE = jaxfp8.quantize(jax.random.normal(jax.random.key(3), (K, K)), channelwise_axes=(1,))
X = jnp.asarray(rows.matrix(6, K))
GAIN, SHIFT = map(jnp.asarray, rows.vectors(rows.NORMS["layer, rounded"], K, jnp.bfloat16))


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """Programs are rewritten as on a GPU; here the calls are computed by definition."""
    monkeypatch.setattr("jaxfp8._rewrite.plan.decide.platform", lambda: "cuda")


def scale_of(y, highest=448):
    return jnp.maximum(jnp.abs(y).max(-1, keepdims=True), 1e-12) / highest


def quantize(y, scale_of=scale_of):
    y = y.astype(jnp.float32)
    scale = scale_of(y)
    return jnp.clip(y / scale, -448, 448).astype(jnp.float8_e4m3fn), scale


def multiply(codes, scale, w=W):
    total = jnp.matmul(codes, w.qvalue, preferred_element_type=jnp.float32)
    return (total * scale * w.scale).astype(jnp.bfloat16)


def dot(y, w=W):
    return multiply(*quantize(y), w)


def with_codes(y, scale_of=scale_of):
    codes, scale = quantize(y, scale_of)
    return multiply(codes, scale), codes, scale


def mean(x):
    return x.mean(-1, keepdims=True)


def inverse(x):
    return jax.lax.rsqrt(mean(jnp.square(x)) + 1e-5)


def rms(x):
    wide = x.astype(jnp.float32)
    return wide * inverse(wide)


def layer(x, variance=lambda x: mean((x - mean(x)) ** 2)):
    wide = x.astype(jnp.float32)
    return (wide - mean(wide)) * jax.lax.rsqrt(variance(wide) + 1e-5)


def narrow(y):
    return y.astype(jnp.bfloat16)


def by_root(x):
    wide = x.astype(jnp.float32)
    return narrow(wide / jnp.sqrt((wide * wide).sum(-1, keepdims=True) * (1 / K) + 1e-5))


def by_flax(module):
    variables = {"params": {"scale": GAIN.astype(jnp.float32), "bias": SHIFT.astype(jnp.float32)}}
    if isinstance(module, nn.RMSNorm):
        del variables["params"]["bias"]
    return lambda x: module.apply(variables, x)


WIDE_GAIN, WIDE_SHIFT = GAIN.astype(jnp.float32), SHIFT.astype(jnp.float32)
# The norm as a program has it; what it is: centred, gain, shift, rounded first and second.
NORMS = {
    "rms": (lambda x: narrow(rms(x)), "rms"),
    "rms, root as divisor": (by_root, "rms"),
    "rms, narrow gain": (lambda x: narrow(rms(x)) * GAIN, "rms gain first"),
    "rms, wide gain": (lambda x: narrow(rms(x) * WIDE_GAIN), "rms gain"),
    "rms, gain widened": (lambda x: narrow(GAIN.astype(jnp.float32) * rms(x)), "rms gain"),
    "rms, one more": (lambda x: narrow(rms(x) * (1 + WIDE_GAIN)), "rms gain"),
    "rms, rounded before a wide gain": (
        lambda x: narrow(narrow(rms(x)).astype(jnp.float32) * WIDE_GAIN),
        "rms gain first",
    ),
    "layer": (lambda x: narrow(layer(x) * WIDE_GAIN + WIDE_SHIFT), "layer gain shift"),
    "layer, jnp.var": (
        lambda x: narrow(layer(x, lambda x: jnp.var(x, -1, keepdims=True))),
        "layer",
    ),
    "layer, fast variance": (
        lambda x: narrow(layer(x, lambda x: mean(x**2) - mean(x) ** 2) + WIDE_SHIFT),
        "layer shift",
    ),
    "layer, narrow vectors": (
        lambda x: narrow(layer(x)) * GAIN + SHIFT,
        "layer gain shift first second",
    ),
    "flax RMSNorm": (by_flax(nn.RMSNorm(dtype=jnp.bfloat16, epsilon=1e-5)), "rms gain"),
    "flax LayerNorm": (
        by_flax(nn.LayerNorm(dtype=jnp.bfloat16, epsilon=1e-5)),
        "layer gain shift",
    ),
    "flax LayerNorm, slow": (
        by_flax(nn.LayerNorm(dtype=jnp.bfloat16, epsilon=1e-5, use_fast_variance=False)),
        "layer gain shift",
    ),
}


def specs_of(function, *args):
    """The specs of the calls in the rewritten function."""
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive is quantize_produced_p:
                found.append(eqn.params["spec"])
            for inner in map(compat.open_jaxpr, compat.subjaxprs(eqn)):
                walk(inner)

    walk(jax.make_jaxpr(jaxfp8.rewrite(function))(*args).jaxpr)
    return found


def described(norm):
    words = ["layer" if norm.centred else "rms"]
    words += ["gain"] * norm.has_gain + ["shift"] * norm.has_shift
    return " ".join(words + ["first"] * norm.rounded_first + ["second"] * norm.rounded_second)


@pytest.mark.parametrize("rows_of_x", [1, 6, K], ids="{} rows".format)
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_read_however_it_is_spelled(name, rows_of_x):
    norm, wanted = NORMS[name]
    x = jnp.asarray(rows.matrix(rows_of_x, K))
    run = lambda x: with_codes(norm(x))  # noqa: E731
    (spec,) = specs_of(run, x)
    assert described(spec.norm) == wanted
    assert abs(spec.norm.epsilon - 1e-5) < 1e-9
    codes, exact = jax.jit(jaxfp8.rewrite(run))(x)[1], run(x)[1]
    assert np.mean(np.asarray(codes).view(np.uint8) != np.asarray(exact).view(np.uint8)) < 0.06


def test_for_a_gpu_it_is_one_call_and_its_scale_is_read_by_the_product():
    run = jax.jit(jaxfp8.rewrite(lambda x: dot(NORMS["rms, narrow gain"][0](x))))
    text = run.trace(X).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(CALL) == 1
    assert "rsqrt" not in text
    assert "maximum" not in text


def test_products_of_one_input_share_the_call():
    def attention(x):
        y = narrow(rms(x)) * GAIN
        return dot(y), dot(y), dot(y, WIDE)

    text = jax.jit(jaxfp8.rewrite(attention)).trace(X).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(CALL) == 1


GATES = {
    "silu": lambda a, b: jax.nn.silu(a) * b,
    "silu behind": lambda a, b: b * (a * jax.nn.sigmoid(a)),
    "gelu_tanh": lambda a, b: jax.nn.gelu(a) * b,
    "gelu_erf": lambda a, b: jax.nn.gelu(a, approximate=False) * b,
    "relu": lambda a, b: jnp.maximum(a, 0) * b,
    "none": lambda a, b: a * b,
}


@pytest.mark.parametrize("name", GATES)
def test_a_gate_of_inputs_is_part_of_the_call(name):
    (spec,) = specs_of(lambda a, b: dot(GATES[name](a, b)), X, X[::-1])
    assert (spec.norm, spec.has_factor) == (None, True)
    assert spec.activation == name.split()[0]


def test_a_gate_of_products_leaves_the_activation_to_its_product():
    def mlp(x):
        return dot(jax.nn.silu(dot(x, WIDE)) * dot(x, WIDE))

    first, second = specs_of(mlp, X)
    assert (first.has_factor, first.activation) == (False, "none")
    assert (second.has_factor, second.activation) == (True, "none")
    found, written = (np.asarray(jax.jit(f)(X), np.float32) for f in (jaxfp8.rewrite(mlp), mlp))
    assert np.linalg.norm(found - written) < 0.02 * np.linalg.norm(written)


@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "relu"])
def test_an_activation_alone_is_part_of_the_call(name):
    relu = lambda x: jnp.maximum(x, 0)  # noqa: E731
    function = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu, "relu": relu}[name]
    (spec,) = specs_of(lambda x: dot(function(x)), X)
    assert (spec.activation, spec.has_factor) == (name, False)


def test_layers_of_a_scan_are_captured_in_its_body():
    def layers(x):
        return jax.lax.scan(lambda x, gain: (x + dot(narrow(rms(x)) * gain, WIDE), None), x, GAINS)

    text = jax.jit(jaxfp8.rewrite(layers)).trace(X).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(CALL) == 1


GAINS = jnp.stack([GAIN, GAIN])
TINY = float(np.float32(1e-12) * (np.float32(1) / np.float32(448)))
SCALES = {
    "floor": (scale_of, RowScale(amax_floor=float(np.float32(1e-12)), of_zeros=TINY)),
    "floor of the scale": (
        lambda y: jnp.maximum(jnp.abs(y).max(-1, keepdims=True) / 448, 0.5),
        RowScale(scale_floor=0.5, of_zeros=0.5),
    ),
    "bare": (lambda y: jnp.abs(y).max(-1)[:, None] / 448, RowScale()),
    "guard": (
        lambda y: jnp.where(jnp.abs(y).max(-1) == 0, 2.0, jnp.abs(y).max(-1) / 448)[:, None],
        RowScale(of_zeros=2.0),
    ),
    "guard of NaN": (
        lambda y: jnp.where(scale_bare(y) > 0, scale_bare(y), 2.0),
        RowScale(of_zeros=2.0, of_nan=2.0),
    ),
}


def scale_bare(y):
    return jnp.abs(y).max(-1, keepdims=True) / 448


@pytest.mark.parametrize("name", SCALES)
def test_zeros_and_nan_have_the_scale_of_the_program(name):
    function, rule = SCALES[name]
    x = X.at[0].set(0).at[1, 3].set(jnp.nan).at[2, 4].set(jnp.inf)
    run = lambda x: with_codes(x, function)  # noqa: E731
    (spec,) = specs_of(run, x)
    assert spec.rule == rule
    _, codes, scale = jax.jit(jaxfp8.rewrite(run))(x)
    same, exact = jax.jit(lambda x: quantize(x, function))(x)
    np.testing.assert_array_equal(scale, exact)
    quantized.assert_same_codes(codes, same)


def other_axis(x):
    wide = x.astype(jnp.float32)
    return narrow(wide * jax.lax.rsqrt(jnp.square(wide).mean(0, keepdims=True) + 1e-5))


def other_values(x):
    wide = x.astype(jnp.float32)
    return narrow(wide * inverse(wide + 1))


def half_centred(x):
    wide = x.astype(jnp.float32)
    return narrow((wide - mean(wide)) * inverse(wide))


def parts_of_rows(x):
    wide = x.astype(jnp.float32).reshape(-1, 2, K // 2)
    return narrow(wide * inverse(wide)).reshape(x.shape)


def column_means(x):
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1)  # x is square
    return narrow(wide * inverse(wide))


def one_mean(x):
    wide = x.astype(jnp.float32)
    wide = wide - mean(wide.reshape(1, -1))
    return narrow(wide * inverse(wide))


def turned(x):
    """The same numbers in another order: what belongs to a row divides another."""
    side = int(len(x) ** 0.5)
    numbers = x.reshape(side, side)
    return jax.lax.reshape(numbers, (side * side, 1), dimensions=(1, 0))


def inverses_of_other_rows(x):
    wide = x.astype(jnp.float32)
    return narrow(wide * jax.lax.rsqrt(turned(jnp.square(wide).mean(-1)) + 1e-5))


NEAR_MISSES = {
    "inverses of other rows": inverses_of_other_rows,
    "another axis": other_axis,
    "the square of something else": other_values,
    "half a LayerNorm": half_centred,
    "parts of rows": parts_of_rows,
    "means along the other axis": column_means,
    "one mean for all rows": one_mean,
    "another type": lambda x: rms(x).astype(jnp.float16),
    "rounded to another type": lambda x: narrow(rms(x).astype(jnp.float16)),
    "twice": lambda x: narrow(2 * rms(x)),
    "wide": rms,
    "something else": lambda x: jnp.sin(x),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_is_no_norm_stays_as_written(name):
    x = jnp.asarray(rows.matrix(K, K))
    run = lambda x: dot(NEAR_MISSES[name](x))  # noqa: E731
    assert specs_of(run, x) == []
    (row,) = jaxfp8.explain(run)(x).matched
    assert row.lhs.quantized == "as written"
    assert row.lhs.producer


def test_a_gain_in_another_order_keeps_its_order():
    def run(x):
        gain = jax.lax.reshape(GAIN.reshape(8, 8), (K,), dimensions=(1, 0))
        return dot(narrow(rms(x) * gain.astype(jnp.float32)))

    found, written = (np.asarray(jax.jit(f)(X), np.float32) for f in (jaxfp8.rewrite(run), run))
    assert np.linalg.norm(found - written) < 0.02 * np.linalg.norm(written)


def test_scales_of_other_rows_stay_as_written():
    x = jnp.asarray(rows.matrix(K, K))
    run = lambda x: dot_by(x, lambda y: turned(scale_of(y)[:, 0]))  # noqa: E731
    assert specs_of(run, x) == []


def dot_by(x, scale_of):
    return multiply(*quantize(x, scale_of))


def test_differences_from_the_means_of_all_rows_are_no_norm():
    def run(x):
        wide = x.astype(jnp.float32)
        away = wide[:, None, :] - mean(wide).reshape(1, -1, 1)
        return dot(narrow(away * inverse(away)))

    assert all(spec.norm is None or not spec.norm.centred for spec in specs_of(run, X))
    found, written = (np.asarray(jax.jit(f)(X), np.float32) for f in (jaxfp8.rewrite(run), run))
    assert np.linalg.norm(found - written) < 0.02 * np.linalg.norm(written)


def test_codes_clipped_at_minus_127_stay_as_written_where_nan_counts_as_zero():
    w = jaxfp8.quantize(jax.random.normal(jax.random.key(1), (K, 32)), jnp.int8)

    def run(x, guard):
        wide = x.astype(jnp.float32)
        amax = jnp.abs(wide).max(-1, keepdims=True)
        scale = jnp.where(guard(amax), amax / 127, 1)
        codes = jnp.clip(jnp.round(wide / scale), -127, 127).astype(jnp.int8)
        total = jnp.matmul(codes, w.qvalue, preferred_element_type=jnp.int32)
        return (total.astype(jnp.float32) * scale * w.scale).astype(jnp.bfloat16)

    gate = lambda a, b: jax.nn.silu(a) * b  # noqa: E731
    assert specs_of(lambda a, b: run(gate(a, b), lambda amax: amax > 0), X, X[::-1]) == []
    assert len(specs_of(lambda a, b: run(gate(a, b), lambda amax: amax != 0), X, X[::-1])) == 1


def test_rows_that_something_else_reads_stay_as_written():
    def run(x):
        y = narrow(rms(x)) * GAIN
        return dot(y), y.sum()

    assert specs_of(run, X) == []
    (row,) = jaxfp8.explain(run)(X).matched
    assert "something else reads" in row.lhs.producer


def test_maxima_that_something_else_reads_come_from_the_call():
    def run(x):
        y = (narrow(rms(x)) * GAIN).astype(jnp.float32)
        amax = jnp.abs(y).max(-1, keepdims=True)
        return multiply(jnp.clip(y / (amax / 448), -448, 448).astype(jnp.float8_e4m3fn), amax), amax

    assert len(specs_of(run, X)) == 1
    np.testing.assert_allclose(jax.jit(jaxfp8.rewrite(run))(X)[1], run(X)[1], rtol=2**-7)


def test_the_report_names_what_is_part_of_the_call():
    (row,) = jaxfp8.explain(lambda x: dot(narrow(layer(x)) * GAIN))(X).matched
    assert (row.lhs.quantized, row.lhs.producer) == ("one call", "LayerNorm")
    assert "quantized in one call with LayerNorm" in str(row.lhs)


def test_the_report_says_why_there_is_no_call():
    report = jaxfp8.explain(lambda x: dot(jnp.sin(x)))(X)
    assert "left quantized as written: XLA" in str(report)


def test_the_gradient_is_that_of_the_function():
    def loss(x):
        return dot(narrow(rms(x)) * GAIN).astype(jnp.float32).sum()

    found, exact = (np.asarray(jax.grad(f)(X), np.float32) for f in (jaxfp8.rewrite(loss), loss))
    assert np.linalg.norm(found - exact) < 0.05 * np.linalg.norm(exact)


def test_on_a_cpu_nothing_of_it_is_done(monkeypatch):
    monkeypatch.setattr("jaxfp8._rewrite.plan.decide.platform", lambda: "cpu")
    assert specs_of(lambda x: dot(narrow(rms(x))), X) == []
