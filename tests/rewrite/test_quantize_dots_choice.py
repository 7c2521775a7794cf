"""Which dots quantize_dots rounds: by path, rule and weight; and what it says of the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewrite.float_programs import (
    PARAMS,
    W,
    X,
    close,
    expected,
    normal,
    two_dots,
)

import jaxfp8


@pytest.mark.parametrize(
    "where",
    ["^down", lambda path, dot: path == "down", lambda path, dot: dot.dims[3] == 24],
    ids=["pattern", "path", "sizes"],
)
def test_where_chooses(where):
    report = jaxfp8.quantize_dots(two_dots, jaxfp8.INT8_DYNAMIC, where=where).explain(PARAMS, X)
    assert [site.path for site in report.matched] == ["down"]
    assert [(site.path, site.reason) for site in report.missed] == [
        ("up", "`where` does not choose it")
    ]


def regions(ws, x):
    def layer(h, w):
        with jax.named_scope("layer"):
            return jnp.tanh(h @ w)

    with jax.named_scope("model"):
        x = jax.lax.scan(lambda h, w: (layer(h, w), None), x, ws)[0]
        x = jax.lax.cond(x.sum() > 0, jax.checkpoint(layer), layer, x, ws[0])
        return jax.lax.fori_loop(0, 2, lambda i, h: jax.jit(layer)(h, ws[i]), x)


def test_paths_in_regions_are_those_that_choose_and_those_of_the_function():
    ws, x = normal(2, 24, 24) / 5, normal(6, 24)
    report = jaxfp8.quantize_dots(regions, jaxfp8.INT8_DYNAMIC).explain(ws, x)
    assert {site.path for site in report.matched} == {"model/layer"}
    narrow = jaxfp8.quantize(ws, channelwise_axes=(0, 2))
    rewritten = jaxfp8.explain(lambda q, x: regions(jaxfp8.dequantize(q), x))(narrow, x)
    assert {site.path for site in rewritten.matched} == {"model/layer"}
    chosen = jaxfp8.quantize_dots(regions, jaxfp8.INT8_DYNAMIC, where="^model/layer$")
    assert len(chosen.explain(ws, x).matched) == len(report.matched)


def test_choosing_nothing_is_told():
    g = jaxfp8.quantize_dots(two_dots, jaxfp8.INT8_DYNAMIC, where="no such place")
    with (
        pytest.warns(jaxfp8.FallbackWarning, match=r"'no such place' matches none of 2 dots"),
        pytest.warns(jaxfp8.FallbackWarning, match=r"`two_dots` .* all its dots \(2\) stay"),
    ):
        np.testing.assert_array_equal(g(PARAMS, X), two_dots(PARAMS, X))
    g(PARAMS, X[:1])  # once
    with jaxfp8.strict(), pytest.raises(jaxfp8.UnsupportedError, match="stay as they are"):
        jaxfp8.quantize_dots(two_dots, jaxfp8.INT8_DYNAMIC, where="no such place")(PARAMS, X)


def test_convolutions_are_told():
    def fun(w, x):
        return jax.lax.conv(x.reshape(1, 2, 8, 9), w.reshape(16, 2, 4, 3), (1, 1), "SAME")

    w, x = normal(24, 16), normal(6, 24)
    report = jaxfp8.quantize_dots(fun, jaxfp8.INT8_DYNAMIC).explain(w, x)
    assert (len(report.missed), report.others) == (1, 0)
    with pytest.warns(jaxfp8.FallbackWarning, match=r"all its dots \(1\) stay as they are"):
        jaxfp8.quantize_dots(fun, jaxfp8.INT8_DYNAMIC)(w, x)
    with jaxfp8.strict(), pytest.raises(jaxfp8.UnsupportedError, match="stay as they are"):
        jaxfp8.quantize_dots(fun, jaxfp8.INT8_DYNAMIC)(w, x)


def test_dots_that_no_kernel_takes_are_told():
    precision = jax.lax.DotAlgorithmPreset.F64_F64_F64
    g = jaxfp8.quantize_dots(
        lambda w, x: jax.lax.dot(x, w, precision=precision), jaxfp8.INT8_DYNAMIC
    )
    with pytest.warns(jaxfp8.FallbackWarning, match="no kernel takes its 1 rounded dots"):
        g(W, X)


@pytest.mark.parametrize(
    ("fun", "where"),
    [
        (lambda x: x[:0] @ x.T, "no such place"),
        (
            lambda x: jnp.sign(x).astype(jnp.int32) @ jnp.ones((X.shape[1], 3), jnp.int32),
            "no such place",
        ),
        (lambda x: jaxfp8.matmul(x, jaxfp8.quantize(W)) @ jnp.ones((W.shape[1], 2)), None),
    ],
    ids=["empty", "integers", "a kernel call"],
)
def test_what_is_in_8_bits_or_cannot_be_is_no_reason_to_warn(fun, where):
    jaxfp8.quantize_dots(fun, jaxfp8.INT8_DYNAMIC, where=where)(X)


def test_a_function_without_dots_is_no_reason_to_warn():
    np.testing.assert_array_equal(jaxfp8.quantize_dots(jnp.sin, jaxfp8.INT8_DYNAMIC)(X), jnp.sin(X))


def test_a_prepared_weight_is_refused():
    g = jaxfp8.quantize_dots(lambda w, x: x @ w, jaxfp8.INT8_W8A16)
    w = jaxfp8.prepare(jaxfp8.quantize(normal(8, 64), jnp.int8, channelwise_axes=(1,)))
    for call in (g, g.explain, g.compare):
        with pytest.raises(TypeError, match=r"holds PreparedArray.*pass `unprepare\(\)` of it"):
            call(w, normal(2, 8))
    close(g(w.unprepare(), normal(2, 8)), normal(2, 8) @ jaxfp8.dequantize(w))


def test_rules_choose_by_the_path_of_named_scopes():
    rules = [jaxfp8.Rule(where="down", recipe=None), jaxfp8.INT8_DYNAMIC]
    report = jaxfp8.quantize_dots(two_dots, rules).explain(PARAMS, X)
    assert [site.path for site in report.matched] == ["up"]


def attention(params, x):
    h = jnp.tanh(x @ params)
    return jax.nn.softmax(h @ h.T) @ h


def test_dot_of_activations_is_left_unless_chosen():
    plain = jaxfp8.quantize_dots(attention, jaxfp8.FP8_DYNAMIC)
    chosen = jaxfp8.quantize_dots(attention, jaxfp8.FP8_DYNAMIC, where=lambda path, dot: True)
    assert [len(g.explain(W, X).matched) for g in (plain, chosen)] == [1, 3]
    assert "neither operand is a weight" in plain.explain(W, X).missed[0].reason
    h = expected(X, W, jaxfp8.FP8_DYNAMIC)
    assert chosen(W, X).shape == h.shape


def test_recipe_of_weights_leaves_dots_of_activations():
    g = jaxfp8.quantize_dots(attention, jaxfp8.FP8_W8A16, where=lambda path, dot: True)
    assert "holds weights only" in g.explain(W, X).missed[0].reason


@pytest.mark.parametrize("weights", [0, (0,)])
@pytest.mark.same_bits
def test_argument_says_which_operand_is_the_weight(weights):
    def f(w, x):
        return w.T @ x.T

    g = jaxfp8.quantize_dots(f, jaxfp8.FP8_W8A16, weights=weights)
    close(g(W, X), expected(X, W, jaxfp8.FP8_W8A16).T)


@pytest.mark.same_bits
def test_weight_on_the_left_is_found_by_where_it_comes_from():
    g = jaxfp8.quantize_dots(lambda w, x: w.T @ jnp.tanh(x).T, jaxfp8.FP8_W8A16)
    close(g(W, X), expected(jnp.tanh(X), W, jaxfp8.FP8_W8A16).T)


@pytest.mark.same_bits
def test_normalised_activations_are_no_weight():
    def f(gain, w, x):
        return w.T @ (gain[:, None] * jnp.tanh(x).T)

    g = jaxfp8.quantize_dots(f, jaxfp8.FP8_W8A16)
    gain = jnp.ones(40)
    for x in (X, X[:1]):
        close(g(gain, W, x), expected(jnp.tanh(x), W, jaxfp8.FP8_W8A16).T)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: (lambda x: x.astype(jnp.int32) @ x.astype(jnp.int32).T, X), "an operand is int32"),
        (lambda: (lambda x: x[:0] @ W, X), "an operand is empty"),
    ],
    ids=["dtype", "empty"],
)
def test_dot_that_cannot_be_in_8_bits_says_why(make, reason):
    f, x = make()
    (site,) = jaxfp8.quantize_dots(f, jaxfp8.INT8_DYNAMIC).explain(x).missed
    assert reason in site.reason
