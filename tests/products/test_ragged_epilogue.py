"""Epilogues of groups: bias, residual, activation, gate, weights of rows, 8-bit output, amax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8._call.ops import ragged_lowering

ROWS, DEPTH, COLUMNS = 11, 20, 8
SIZES = jnp.array([4, 0, 5], jnp.int32)  # two rows are of no group
STATIC = ("activation", "gated", "return_amax", "preferred_element_type")
CURVES = {
    "relu": lambda y: np.maximum(y, 0),
    "silu": lambda y: y / (1 + np.exp(-y)),
    None: lambda y: y,
}
_dot = jax.jit(jaxfp8.ragged_dot, static_argnames=STATIC)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Case:
    """Operands, and their sums in float64; masked ones have rows for each group."""

    def __init__(self, masked=False, dtype=jnp.float8_e4m3fn):
        self.w = jaxfp8.quantize(normal(3, DEPTH, COLUMNS), dtype, channelwise_axes=(0, 2))
        wide = np.asarray(jaxfp8.dequantize(self.w), np.float64)
        self.x = normal(*(3,) * masked, ROWS, DEPTH, seed=1)
        if masked:
            self.group = np.where(np.arange(ROWS) < np.asarray(SIZES)[:, None], [[0], [1], [2]], -1)
        else:
            self.group = np.array([0] * 4 + [2] * 5 + [-1] * 2)
        inside = (self.group >= 0)[..., None]
        self.sums = np.where(inside, self.x @ wide if masked else self.rows_of(wide), 0)

    def rows_of(self, wide):
        return np.einsum("mk,mkn->mn", self.x.astype(np.float64), wide[self.group])

    def biased(self, bias):
        return self.sums + np.where((self.group >= 0)[..., None], bias[self.group], 0)

    def dot(self, **more):
        return _dot(self.x, self.w, SIZES, **more)


near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
BIAS, HALF = normal(3, COLUMNS, seed=2), COLUMNS // 2


@pytest.mark.filterwarnings("error::jaxfp8.FallbackWarning")
@pytest.mark.parametrize("masked", [False, True], ids=["rows", "masked"])
@pytest.mark.parametrize("activation", CURVES)
def test_the_equation(activation, masked):
    case = Case(masked)
    residual = normal(*case.sums.shape, seed=3).astype(jnp.bfloat16)
    out, amax = case.dot(bias=BIAS, residual=residual, activation=activation, return_amax=True)
    want = CURVES[activation](case.biased(BIAS) + residual.astype(np.float64))
    near(out, want)
    near(amax, abs(want).max())


@pytest.mark.parametrize("masked", [False, True], ids=["rows", "masked"])
def test_a_gate_and_weights_of_rows(masked):
    case = Case(masked)
    weights = normal(*case.group.shape, seed=4)
    out, amax = case.dot(
        bias=BIAS, activation="silu", gated=True, row_weights=weights, return_amax=True
    )
    z = case.biased(BIAS)
    want = CURVES["silu"](z[..., :HALF]) * z[..., HALF:] * weights[..., None]
    near(out, want)
    near(amax, abs(want).max())


# Rows in floats and in 8 bits, with scales of their own, of blocks, or of all.
LEFT = {
    "floats": jnp.asarray,
    "by row": lambda x: jaxfp8.quantize(x, channelwise_axes=range(x.ndim - 1)),
    "by tensor": jaxfp8.quantize,
    "by block": lambda x: jaxfp8.quantize(x, tiled_axes={x.ndim - 2: 4, x.ndim - 1: 5}),
    "zero points": lambda x: jaxfp8.quantize(
        x, jnp.int8, zero_point=True, tiled_axes={x.ndim - 2: 3}
    ),
    "K first": lambda x: jaxfp8.quantize(x.swapaxes(-1, -2), tiled_axes={x.ndim - 1: 4}).mT,
}


@pytest.mark.filterwarnings("error::jaxfp8.FallbackWarning")
@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("masked", [False, True], ids=["rows", "masked"])
def test_weights_of_rows_are_a_scale_of_the_rows(masked, left):
    """The output is rounded once, and the maximum is that of weighted rows."""
    case = Case(masked)
    x = LEFT[left](case.x)
    case.x = np.asarray(x if left == "floats" else jaxfp8.dequantize(x))
    wide = np.asarray(jaxfp8.dequantize(case.w), np.float64)
    sums = case.x @ wide if masked else case.rows_of(wide)
    weights = normal(*case.group.shape, seed=4)
    settings = {"row_weights": weights, "return_amax": True}
    out, amax = _dot(x, case.w, SIZES, preferred_element_type=jnp.bfloat16, **settings)
    want = np.where((case.group >= 0)[..., None], sums * weights[..., None], 0)
    near(out, want, rtol=2**-7)
    near(amax, abs(want).max())


def test_weights_of_rows_leave_no_pass_behind_the_call():
    case, weights = Case(), normal(ROWS, seed=4)
    dot = functools.partial(jaxfp8.ragged_dot, preferred_element_type=jnp.bfloat16)
    text = jax.jit(dot).lower(case.x, case.w, SIZES, row_weights=weights).as_text()
    (call,) = [line for line in text.splitlines() if "@jaxfp8_ragged_dot" in line]
    assert call.endswith("-> tensor<11x8xbf16>")


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.int8], ids=["e4m3", "int8"])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_an_output_of_8_bits(gated, dtype):
    case = Case()
    settings = {"bias": BIAS, "activation": "relu", "gated": gated}
    wide = case.dot(**settings)
    q, amax = case.dot(**settings, preferred_element_type=dtype, out_scale=0.25, return_amax=True)
    want = jaxfp8.QArray(jaxfp8.quantize(wide, dtype, scale=0.25).qvalue, jnp.full((1, 1), 0.25))
    np.testing.assert_array_equal(q.qvalue, want.qvalue)
    assert q.scale.shape == (1, 1) and amax == abs(wide).max()


def test_a_scale_for_each_row_of_the_output():
    case, scale = Case(), np.linspace(0.5, 2, ROWS, dtype=np.float32)[:, None]
    q = case.dot(preferred_element_type=jnp.int8, out_scale=scale)
    np.testing.assert_array_equal(q.qvalue, np.clip(np.round(case.sums / scale), -128, 127))


@pytest.mark.parametrize("shape", [(COLUMNS,), (3, 1), (1, COLUMNS), (1, 1)], ids=str)
def test_a_bias_may_be_shared(shape):
    case, bias = Case(), normal(*shape, seed=5)
    near(case.dot(bias=bias), case.biased(np.broadcast_to(bias, (3, COLUMNS))))


@pytest.mark.parametrize("at", [1, 5], ids=["first group", "last group"])
def test_a_nan_reaches_the_amax_and_its_row_alone(at):
    case = Case()
    case.x[at, 2] = np.nan
    out, amax = case.dot(bias=BIAS, activation="silu", return_amax=True)
    assert np.isnan(amax) and np.isnan(out).any(1).tolist() == [row == at for row in range(ROWS)]


def test_rows_of_no_group_are_divided_by_their_scale():
    scale = np.ones((ROWS, 1), np.float32)
    scale[-1] = np.nan
    q = Case().dot(preferred_element_type=jnp.float8_e4m3fn, out_scale=scale)
    values = np.asarray(q.qvalue, np.float32)
    assert np.isnan(values[-1]).all() and not values[-2].any()


def test_nothing_of_no_group():
    y, amax = _dot(Case().x, Case().w, SIZES * 0, bias=BIAS, return_amax=True)
    assert not y.any() and amax == 0


@pytest.mark.filterwarnings("ignore:.*there is nothing to multiply")
def test_no_groups():
    x, w = normal(ROWS, DEPTH), jaxfp8.quantize(normal(0, DEPTH, COLUMNS))
    y = jaxfp8.ragged_dot(x, w, jnp.zeros(0, jnp.int32), bias=normal(0, COLUMNS))
    assert y.shape == (ROWS, COLUMNS) and not y.any()


@pytest.mark.filterwarnings("error::jaxfp8.FallbackWarning")
def test_bias_and_weights_have_gradients_without_a_fallback():
    case, weights = Case(), normal(ROWS, seed=4)

    def exact(bias, weights):
        inside = jnp.asarray(case.group >= 0)[:, None]
        z = case.sums.astype(np.float32) + jnp.where(inside, bias[case.group], 0)
        return jax.nn.silu(z[:, :HALF]) * z[:, HALF:] * weights[:, None]

    def dot(bias, weights):
        settings = {"activation": "silu", "gated": True, "row_weights": weights}
        return jaxfp8.ragged_dot(case.x, case.w, SIZES, bias=bias, **settings)

    ours, theirs = (
        jax.jit(jax.grad(lambda b, w, f=f: (f(b, w) ** 2).sum(), (0, 1)))(BIAS, weights)
        for f in (dot, exact)
    )
    for mine, other in zip(ours, theirs, strict=True):
        near(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::jaxfp8.FallbackWarning")
def test_vmap_computes_each():
    case, biases = Case(), normal(2, 3, COLUMNS, seed=6)
    out, amax = jax.jit(
        jax.vmap(lambda b: jaxfp8.ragged_dot(case.x, case.w, SIZES, bias=b, return_amax=True))
    )(biases)
    for one, most, bias in zip(out, amax, biases, strict=True):
        near(one, case.biased(bias))
        near(most, abs(case.biased(bias)).max())


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("axes", [("a", None), (None, "a")], ids=["rows", "columns"])
def test_on_a_mesh(axes, kind):
    """The rows, or the columns and the gate's halves, of four devices."""
    kinds = (getattr(jax.sharding.AxisType, kind),)
    mesh = jax.make_mesh((4,), ("a",), axis_types=kinds, devices=jax.devices()[:4])
    case, (rows, columns) = Case(), axes
    x, group = np.concatenate([case.x, case.x[:1]]), np.append(case.group, -1)
    weights = normal(12, seed=4)
    with jax.set_mesh(mesh):
        put = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))  # noqa: E731
        w = jaxfp8.QArray(put(case.w.qvalue, None, None, columns), put(case.w.scale))
        y, amax = _dot(
            put(x, rows),
            w,
            put(SIZES),
            bias=put(BIAS, None, columns),
            activation="silu",
            gated=True,
            row_weights=put(weights, rows),
            return_amax=True,
        )
        y, amax = np.asarray(y), np.asarray(amax)
    z = np.concatenate([case.biased(BIAS), np.zeros((1, COLUMNS))])
    assert (group[9:] < 0).all()
    want = CURVES["silu"](z[:, :HALF]) * z[:, HALF:] * weights[:, None]
    near(y, want)
    near(amax, abs(want).max())


def test_the_report_says_why_xla_computes_an_epilogue():
    case = Case()
    dot = functools.partial(jaxfp8.ragged_dot, activation="silu")
    row = jaxfp8.explain(dot)(case.x, case.w, SIZES, bias=BIAS).calls[0]
    assert "bias, silu" in row.epilogue and "XLA computes" not in row.note
    gated = jaxfp8.explain(functools.partial(dot, gated=True))(case.x, case.w, SIZES).calls[0]
    assert "gate" in gated.epilogue and "the epilogue: the call has no gate" in gated.note
    weights = np.ones(ROWS, np.float32)
    weighted = jaxfp8.explain(dot)(case.x, case.w, SIZES, row_weights=weights).calls[0]
    assert "the epilogue: the call has weights of rows right behind the sums" in weighted.note
    alone = jaxfp8.explain(jaxfp8.ragged_dot)(case.x, case.w, SIZES, row_weights=weights).calls[0]
    assert "row weights" in alone.epilogue and "XLA computes" not in alone.note


@pytest.fixture(name="call_on_gpu")
def _call_on_gpu(monkeypatch):
    """The call, as text, of a program for a GPU that has every kernel."""
    monkeypatch.setattr(ragged_lowering, "why_not", lambda *_: None)
    monkeypatch.setattr(ragged_lowering.ffi, "register_if_it_runs_here", lambda *_: None)

    def lowered(case, operands, **settings):
        dot = functools.partial(jaxfp8.ragged_dot, **settings)
        traced = jax.jit(dot).trace(case.x.astype(jnp.bfloat16), case.w, SIZES, **operands)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        (call,) = [line for line in text.splitlines() if "@jaxfp8_ragged_dot" in line]
        return call

    return lowered


def test_a_program_for_a_gpu_has_a_gate_behind_its_call(call_on_gpu):
    call = call_on_gpu(Case(), {"bias": BIAS}, activation="silu", gated=True)
    assert call.endswith("-> tensor<11x8xf32>") and 'activation = "none"' in call


def test_a_program_for_a_gpu_has_weights_of_rows_behind_its_call(call_on_gpu):
    call = call_on_gpu(Case(), {"bias": BIAS, "row_weights": np.ones(ROWS, np.float32)})
    assert call.endswith("-> tensor<11x8xf32>") and "bias = false" in call


@pytest.mark.parametrize("masked", [False, True], ids=["rows", "masked"])
def test_a_program_for_a_gpu_has_weights_alone_as_a_scale_of_rows(masked, call_on_gpu):
    case, rows = Case(masked), 3 * ROWS if masked else ROWS
    call = call_on_gpu(case, {"row_weights": np.ones(case.group.shape, np.float32)})
    assert f"tensor<3xi32>, tensor<{rows}x1xf32>" in call and "lhs_scale = true" in call
    assert call.endswith("8xbf16>")


@pytest.mark.parametrize("masked", [False, True], ids=["rows", "masked"])
def test_a_program_for_a_gpu_has_the_epilogue_in_its_call(masked, call_on_gpu):
    """A bias for each group, and the planes of the output as matrices of all rows."""
    case, rows = Case(masked), 3 * ROWS if masked else ROWS
    operands = {"bias": BIAS, "residual": normal(*case.sums.shape).astype(jnp.bfloat16)}
    call = call_on_gpu(case, operands, activation="silu")
    assert f"tensor<{rows}x8xbf16>, tensor<3x8xf32>) -> tensor<" in call
    assert call.endswith("8xbf16>") and 'activation = "silu"' in call
    assert "bias = true" in call and "residual = true" in call and "out_scale = false" in call


@pytest.mark.parametrize("masked", [False, True], ids=["rows", "masked"])
@pytest.mark.parametrize(
    ("scale", "shape"),
    [((), "1x1"), ((COLUMNS,), "1x8"), ((ROWS, 1), "{}x1")],
    ids=["tensor", "columns", "rows"],
)
def test_a_program_for_a_gpu_has_an_8_bit_output_in_its_call(scale, shape, masked, call_on_gpu):
    shape = shape.format(3 * ROWS if masked else ROWS)
    call = call_on_gpu(
        Case(masked),
        {"out_scale": np.ones(scale, np.float32)},
        preferred_element_type=jnp.float8_e4m3fn,
        return_amax=True,
    )
    assert f"tensor<{shape}xf32>) -> (tensor<" in call and 'out_dtype = "float8_e4m3fn"' in call
    assert call.endswith("8xui8>, tensor<1x1xf32>)") and "amax = true" in call


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"activation": "tanh"}, ValueError, "`activation` is 'tanh'"),
        ({"bias": normal(2, COLUMNS)}, ValueError, r"`bias` has shape \(2, 8\).*\(3, 8\)"),
        ({"bias": np.ones(COLUMNS, int)}, TypeError, "`bias` is a int"),
        ({"row_weights": normal(4)}, ValueError, r"`row_weights` has shape \(4,\)"),
        ({"out_scale": 1.0}, ValueError, "`out_scale` is given for an output of float32"),
        ({"preferred_element_type": jnp.int8}, ValueError, "`out_scale` is missing"),
        ({"gated": True, "residual": normal(ROWS, 1)}, ValueError, "a gated output takes none"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_epilogues_are_named(settings, error, match):
    with pytest.raises(error, match=match):
        jaxfp8.ragged_dot(Case().x, Case().w, SIZES, **settings)


def test_odd_columns_have_no_halves():
    with pytest.raises(ValueError, match="7 columns have no halves"):
        jaxfp8.ragged_dot(Case().x, Case().w[..., :7], SIZES, gated=True)


@pytest.mark.parametrize("settings", [{"activation": "relu"}, {"gated": True}], ids=str)
def test_groups_along_k_are_sums_alone(settings):
    q = jaxfp8.quantize(normal(6, 4))
    with pytest.raises(ValueError, match="groups along the contracted axis are sums alone"):
        jaxfp8.ragged_dot(q.T, q, jnp.array([2, 4]), **settings)
