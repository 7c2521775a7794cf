"""quantize_dots: values against explicit products, regions, gradients, weights ahead, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxfp8

RECIPES = [
    jaxfp8.W8A16,
    jaxfp8.W8A16_INT8,
    jaxfp8.FP8_DYNAMIC,
    jaxfp8.FP8_BLOCK,
    jaxfp8.INT8,
    jaxfp8.INT8_ASYMMETRIC,
]
by_name = functools.partial(pytest.mark.parametrize, "recipe", ids=lambda recipe: recipe.name)


def normal(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


X, W = normal(6, 40), normal(40, 24, seed=1) / 6


def rounded(x, quantization, contracting, batch=()):
    """What 8 bits hold of x, widened."""
    if quantization is None:
        return x
    return jaxfp8.dequantize(quantization.quantize(x, contracting, batch), jnp.float32)


def expected(x, w, recipe):
    """x @ w of rounded operands, in float64."""
    x8, w8 = rounded(x, recipe.activation, (x.ndim - 1,)), rounded(w, recipe.weight, (0,))
    return np.asarray(x8, np.float64) @ np.asarray(w8, np.float64)


def close(got, exact):
    np.testing.assert_allclose(got, exact, rtol=3e-6, atol=3e-6 * np.abs(exact).max())


# Values


@by_name(argvalues=RECIPES)
def test_product_is_that_of_the_rounded_operands(recipe):
    g = jaxfp8.quantize_dots(lambda x, w: x @ w, recipe)
    close(g(X, W), expected(X, W, recipe))
    assert len(g.explain(X, W).matched) == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_output_keeps_its_dtype(dtype):
    g = jaxfp8.quantize_dots(jnp.matmul, jaxfp8.FP8_DYNAMIC)
    y = g(X.astype(dtype), W.astype(dtype))
    exact = expected(X.astype(dtype), W.astype(dtype), jaxfp8.FP8_DYNAMIC)
    assert y.dtype == dtype
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=1e-2, atol=1e-2)


def test_bias_and_activation_are_absorbed():
    def f(x, w, b):
        return jax.nn.gelu(x @ w + b)

    (site,) = jaxfp8.quantize_dots(f, jaxfp8.INT8).explain(X, W, jnp.ones(24)).matched
    assert "bias" in site.epilogue and "gelu" in site.epilogue


def test_labels_and_kwargs_pass():
    def f(x, *, w, scale):
        return {"y": x @ w * scale, "name": "y"}

    out = jaxfp8.quantize_dots(f, jaxfp8.W8A16)(X, w=W, scale=2.0)
    assert out["name"] == "y"
    close(out["y"], 2 * expected(X, W, jaxfp8.W8A16))


# Regions: each is (function of x and w, its rounded meaning written out)

STACK = jnp.stack([normal(24, 24, seed=s) / 5 for s in range(3)])
Y = normal(6, 24)


def layers(x, stack, recipe):
    for w in stack:
        x = jnp.tanh(jnp.asarray(expected(x, w, recipe), jnp.float32))
    return x


def scanned(x, stack):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]


def in_while(x, stack):
    def body(state):
        i, x = state
        return i + 1, jnp.tanh(x @ stack[i])

    return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]


def in_cond(x, stack):
    for w in stack:
        x = jax.lax.cond(x[0, 0] > 1e9, lambda x, w: x, lambda x, w: jnp.tanh(x @ w), x, w)
    return x


def rematerialised(x, stack):
    for w in stack:
        x = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w)
    return x


def jitted(x, stack):
    step = jax.jit(lambda x, w: jnp.tanh(x @ w), donate_argnums=())
    for w in stack:
        x = step(x, w)
    return x


@jax.custom_jvp
def step_jvp(x, w):
    return jnp.tanh(x @ w)


@step_jvp.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    y = jnp.tanh(x @ w)
    return y, 7 * (dx @ w) + x @ dw


@jax.custom_vjp
def step_vjp(x, w):
    return jnp.tanh(x @ w)


step_vjp.defvjp(
    lambda x, w: (jnp.tanh(x @ w), (x, w)),
    lambda saved, ct: (7 * (ct @ saved[1].T), saved[0].T @ ct),
)


def in_custom_jvp(x, stack):
    for w in stack:
        x = step_jvp(x, w)
    return x


def in_custom_vjp(x, stack):
    for w in stack:
        x = step_vjp(x, w)
    return x


def in_shard_map(x, stack):
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(
        scanned, mesh=mesh, in_specs=(P("rows"), P()), out_specs=P("rows"), check_vma=True
    )(x, stack)


REGIONS = [
    scanned,
    in_while,
    in_cond,
    rematerialised,
    jitted,
    in_custom_jvp,
    in_custom_vjp,
    in_shard_map,
]


@pytest.mark.parametrize("region", REGIONS)
def test_dots_inside_a_region_are_rounded(region):
    g = jaxfp8.quantize_dots(region, jaxfp8.FP8_DYNAMIC)
    close(g(Y, STACK), layers(Y, STACK, jaxfp8.FP8_DYNAMIC))
    report = g.explain(Y, STACK)
    assert report.matched and not report.missed


@pytest.mark.parametrize("region", [in_custom_jvp, in_custom_vjp, scanned, rematerialised])
def test_value_is_the_same_under_differentiation(region):
    g = jaxfp8.quantize_dots(region, jaxfp8.FP8_DYNAMIC)
    value, _ = jax.value_and_grad(lambda x: g(x, STACK).sum())(Y)
    close(value, layers(Y, STACK, jaxfp8.FP8_DYNAMIC).sum())


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_vmap_inside_and_outside_agree(axes):
    xs = normal(3, 6, 40) if axes[0] == 0 else X
    ws = jnp.stack([W, 2 * W, -W]) if axes[1] == 0 else W

    def f(x, w):
        return jnp.tanh(x @ w)

    inside = jaxfp8.quantize_dots(jax.vmap(f, axes), jaxfp8.FP8_DYNAMIC)(xs, ws)
    outside = jax.vmap(jaxfp8.quantize_dots(f, jaxfp8.FP8_DYNAMIC), axes)(xs, ws)
    np.testing.assert_allclose(inside, outside, rtol=1e-6, atol=1e-6)


def test_dot_in_the_condition_of_a_loop_stays_as_it_is():
    def f(x, w):
        return jax.lax.while_loop(lambda x: (x @ w).sum() < 10, lambda x: x + x @ w @ w.T, x)

    g = jaxfp8.quantize_dots(f, jaxfp8.FP8_DYNAMIC)
    report = g.explain(X, W)
    assert len(report.matched) == 2
    assert ["condition" in site.reason for site in report.missed] == [True]


def test_convolution_is_reported_as_left():
    def f(kernel, x):
        return jax.lax.conv(x, kernel, (1, 1), "SAME")

    (site,) = (
        jaxfp8.quantize_dots(f, jaxfp8.INT8).explain(normal(3, 2, 3, 3), normal(1, 2, 8, 8)).missed
    )
    assert "no kernel for convolutions" in site.reason and not site.rhs.eight_bit


def test_weight_may_leave_a_region():
    def f(x, stack):
        y, turned = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), w.T), x, stack)
        return y @ turned[0].T

    y = layers(Y, STACK, jaxfp8.FP8_DYNAMIC)
    g = jaxfp8.quantize_dots(f, jaxfp8.FP8_DYNAMIC, where=lambda dot: True)
    close(g(Y, STACK), expected(y, STACK[0], jaxfp8.FP8_DYNAMIC))


def test_jit_that_donates_and_shards_keeps_its_parameters():
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    step = jax.jit(lambda x, w: x @ w, in_shardings=(device, device), donate_argnums=0)
    g = jaxfp8.quantize_dots(lambda x, w: step(x + 0, w), jaxfp8.FP8_DYNAMIC)
    close(g(X, W), expected(X, W, jaxfp8.FP8_DYNAMIC))
    assert "donated_invars=(True, False)" in str(jax.make_jaxpr(g)(X, W))


DONATING = jax.jit(lambda x, w: jnp.tanh(x @ w), donate_argnums=0)


@pytest.mark.parametrize(
    "step",
    [step_jvp, step_vjp, lambda x, w: DONATING(x + 0, w)],
    ids=["custom_jvp", "custom_vjp", "donating"],
)
def test_jitted_function_may_return_more_than_a_function_inside_it(step):
    f = jax.jit(lambda x, w: (step(x, w), x.sum(), x))
    y, total, same = jaxfp8.quantize_dots(f, jaxfp8.FP8_DYNAMIC)(Y, STACK[0])
    close(y, layers(Y, STACK[:1], jaxfp8.FP8_DYNAMIC))
    close(total, Y.sum())
    np.testing.assert_array_equal(same, Y)


def test_function_with_a_mutable_array_is_called_as_it_is():
    def f(x, w):
        total = jax.new_ref(jnp.zeros(()))
        y = x @ w
        total[...] += y.sum()
        return y * total[...]

    g = jaxfp8.quantize_dots(f, jaxfp8.INT8)
    with pytest.warns(jaxfp8.FallbackWarning, match="mutable array"):
        np.testing.assert_array_equal(g(X, W), f(X, W))
    assert not g.explain(X, W).matched


# Gradients


def straight_through(x, w, recipe):
    def round_(value, quantization, contracting):
        if quantization is None:
            return value
        return value + jax.lax.stop_gradient(rounded(value, quantization, contracting) - value)

    return round_(x, recipe.activation, (1,)) @ round_(w, recipe.weight, (0,))


@by_name(argvalues=[jaxfp8.W8A16, jaxfp8.FP8_BLOCK, jaxfp8.INT8_ASYMMETRIC])
def test_gradient_is_straight_through_at_the_rounded_operands(recipe):
    g = jaxfp8.quantize_dots(lambda x, w: jnp.tanh(x @ w), recipe)
    got = jax.grad(lambda x, w: g(x, w).sum(), (0, 1))(X, W)
    exact = jax.grad(lambda x, w: jnp.tanh(straight_through(x, w, recipe)).sum(), (0, 1))(X, W)
    for a, b in zip(got, exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_second_derivative_is_straight_through_too():
    def second(product):
        first = jax.grad(lambda w: (product(X, w) ** 3).sum())
        return jax.grad(lambda w: (first(w) ** 2).sum())(W)

    recipe = jaxfp8.FP8_DYNAMIC
    g = jaxfp8.quantize_dots(lambda x, w: x @ w, recipe)
    exact = functools.partial(straight_through, recipe=recipe)
    got, want = second(g), second(exact)
    assert np.linalg.norm(got - want) <= 1e-4 * np.linalg.norm(want)


def test_forward_mode_agrees_with_reverse_mode():
    g = jaxfp8.quantize_dots(scanned, jaxfp8.FP8_DYNAMIC)
    direction, cotangent = normal(*STACK.shape, seed=5), normal(6, 24, seed=6)
    _, tangent = jax.jvp(lambda s: g(Y, s), (STACK,), (direction,))
    _, pull = jax.vjp(lambda s: g(Y, s), STACK)
    np.testing.assert_allclose(
        jnp.vdot(tangent, cotangent), jnp.vdot(pull(cotangent)[0], direction), rtol=1e-4
    )


@pytest.mark.parametrize("region", [in_custom_jvp, in_custom_vjp])
def test_custom_rule_keeps_its_gradient(region):
    g = jaxfp8.quantize_dots(region, jaxfp8.FP8_DYNAMIC)
    got = jax.grad(lambda x: g(x, STACK[:1]).sum())(Y)
    plain = jax.grad(lambda x: region(x, STACK[:1]).sum())(Y)  # 7 times that of a rule-less one
    np.testing.assert_allclose(got, plain, rtol=1e-5)


def test_products_of_the_backward_pass_are_on_8_bit_data():
    g = jaxfp8.quantize_dots(lambda x, w: x @ w, jaxfp8.FP8_DYNAMIC)
    report = jaxfp8.explain(jax.grad(lambda x, w: g(x, w).sum(), (0, 1)))(X, W)
    assert report.scaled + len(report.matched) >= 2


# Which dots


def two_dots(params, x):
    with jax.named_scope("up"):
        h = jax.nn.relu(x @ params["up"])
    with jax.named_scope("down"):
        return h @ params["down"]


PARAMS = {"up": W, "down": normal(24, 40, seed=3)}


@pytest.mark.parametrize(
    "where",
    ["^down", lambda dot: dot.path == "down", lambda dot: dot.dims[3] == 24],
    ids=["pattern", "path", "sizes"],
)
def test_where_chooses(where):
    report = jaxfp8.quantize_dots(two_dots, jaxfp8.INT8, where=where).explain(PARAMS, X)
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
    report = jaxfp8.quantize_dots(regions, jaxfp8.INT8).explain(ws, x)
    assert {site.path for site in report.matched} == {"model/layer"}
    narrow = jaxfp8.quantize(ws, channelwise_axes=(0, 2))
    rewritten = jaxfp8.explain(lambda q, x: regions(jaxfp8.dequantize(q), x))(narrow, x)
    assert {site.path for site in rewritten.matched} == {"model/layer"}
    chosen = jaxfp8.quantize_dots(regions, jaxfp8.INT8, where="^model/layer$")
    assert len(chosen.explain(ws, x).matched) == len(report.matched)


def test_choosing_nothing_is_told():
    g = jaxfp8.quantize_dots(two_dots, jaxfp8.INT8, where="no such place")
    with pytest.warns(
        jaxfp8.FallbackWarning, match=r"`two_dots` .* all its dots \(2\) stay as they are"
    ):
        np.testing.assert_array_equal(g(PARAMS, X), two_dots(PARAMS, X))
    g(PARAMS, X[:1])  # once
    with jaxfp8.strict(), pytest.raises(jaxfp8.UnsupportedError, match="stay as they are"):
        jaxfp8.quantize_dots(two_dots, jaxfp8.INT8, where="no such place")(PARAMS, X)


@pytest.mark.parametrize(
    "fun",
    [
        lambda w, x: jax.lax.ragged_dot(x, w.reshape(2, 24, 8), jnp.array([2, 4])),
        lambda w, x: jax.lax.conv(x.reshape(1, 2, 8, 9), w.reshape(16, 2, 4, 3), (1, 1), "SAME"),
    ],
    ids=["ragged dot", "convolution"],
)
def test_products_that_have_no_kernel_are_told(fun):
    w, x = normal(24, 16), normal(6, 24)
    report = jaxfp8.quantize_dots(fun, jaxfp8.INT8).explain(w, x)
    assert (len(report.missed), report.others) == (1, 0)
    with pytest.warns(jaxfp8.FallbackWarning, match=r"all its dots \(1\) stay as they are"):
        jaxfp8.quantize_dots(fun, jaxfp8.INT8)(w, x)
    with jaxfp8.strict(), pytest.raises(jaxfp8.UnsupportedError, match="stay as they are"):
        jaxfp8.quantize_dots(fun, jaxfp8.INT8)(w, x)


def test_dots_that_no_kernel_takes_are_told():
    precision = jax.lax.DotAlgorithmPreset.F64_F64_F64
    g = jaxfp8.quantize_dots(lambda w, x: jax.lax.dot(x, w, precision=precision), jaxfp8.INT8)
    with pytest.warns(jaxfp8.FallbackWarning, match="no kernel takes its 1 rounded dots"):
        g(W, X)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: x[:0] @ x.T,
        lambda x: jnp.sign(x).astype(jnp.int32) @ jnp.ones((X.shape[1], 3), jnp.int32),
        lambda x: jaxfp8.matmul(x, jaxfp8.quantize(W)) @ jnp.ones((W.shape[1], 2)),
    ],
    ids=["empty", "integers", "a kernel call"],
)
def test_what_is_in_8_bits_or_cannot_be_is_no_reason_to_warn(fun):
    jaxfp8.quantize_dots(fun, jaxfp8.INT8, where="no such place")(X)


def test_a_function_without_dots_is_no_reason_to_warn():
    np.testing.assert_array_equal(jaxfp8.quantize_dots(jnp.sin, jaxfp8.INT8)(X), jnp.sin(X))


def test_a_prepared_weight_is_refused():
    g = jaxfp8.quantize_dots(lambda w, x: x @ w, jaxfp8.W8A16_INT8)
    w = jaxfp8.prepare(jaxfp8.quantize(normal(8, 64), jnp.int8, channelwise_axes=(1,)))
    for call in (g, g.explain, g.compare):
        with pytest.raises(TypeError, match=r"holds PreparedArray.*pass `restore\(\)` of it"):
            call(w, normal(2, 8))
    close(g(w.restore(), normal(2, 8)), normal(2, 8) @ jaxfp8.dequantize(w))


def test_rules_choose_by_the_path_of_named_scopes():
    rules = [jaxfp8.Rule(where="down", recipe=None), jaxfp8.INT8]
    report = jaxfp8.quantize_dots(two_dots, rules).explain(PARAMS, X)
    assert [site.path for site in report.matched] == ["up"]


def attention(params, x):
    h = jnp.tanh(x @ params)
    return jax.nn.softmax(h @ h.T) @ h


def test_dot_of_activations_is_left_unless_chosen():
    plain = jaxfp8.quantize_dots(attention, jaxfp8.FP8_DYNAMIC)
    chosen = jaxfp8.quantize_dots(attention, jaxfp8.FP8_DYNAMIC, where=lambda dot: True)
    assert [len(g.explain(W, X).matched) for g in (plain, chosen)] == [1, 3]
    assert "neither operand is a weight" in plain.explain(W, X).missed[0].reason
    h = expected(X, W, jaxfp8.FP8_DYNAMIC)
    assert chosen(W, X).shape == h.shape


def test_recipe_of_weights_leaves_dots_of_activations():
    g = jaxfp8.quantize_dots(attention, jaxfp8.W8A16, where=lambda dot: True)
    assert "holds weights only" in g.explain(W, X).missed[0].reason


@pytest.mark.parametrize("weights", [0, (0,)])
def test_argument_says_which_operand_is_the_weight(weights):
    def f(w, x):
        return w.T @ x.T

    g = jaxfp8.quantize_dots(f, jaxfp8.W8A16, weights=weights)
    close(g(W, X), expected(X, W, jaxfp8.W8A16).T)


def test_weight_on_the_left_is_found_by_where_it_comes_from():
    g = jaxfp8.quantize_dots(lambda w, x: w.T @ jnp.tanh(x).T, jaxfp8.W8A16)
    close(g(W, X), expected(jnp.tanh(X), W, jaxfp8.W8A16).T)


def test_normalised_activations_are_no_weight():
    def f(gain, w, x):
        return w.T @ (gain[:, None] * jnp.tanh(x).T)

    g = jaxfp8.quantize_dots(f, jaxfp8.W8A16)
    gain = jnp.ones(40)
    for x in (X, X[:1]):
        close(g(gain, W, x), expected(jnp.tanh(x), W, jaxfp8.W8A16).T)


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
    (site,) = jaxfp8.quantize_dots(f, jaxfp8.INT8).explain(x).missed
    assert reason in site.reason


# Weights ahead


@by_name(argvalues=[jaxfp8.W8A16_INT8, jaxfp8.FP8_DYNAMIC, jaxfp8.FP8_BLOCK])
def test_weights_ahead_give_the_same_numbers(recipe):
    g = jaxfp8.quantize_dots(two_dots, recipe, weights=0)
    narrow = g.quantize_weights(PARAMS, X)
    assert all(isinstance(leaf, jaxfp8.QArray) for leaf in narrow.values())
    np.testing.assert_allclose(g(narrow, X), g(PARAMS, X), rtol=1e-6, atol=1e-6)
    assert len(g.explain(narrow, X).matched) == 2


def einsum_of_heads(w, x):
    return jnp.einsum("btd,hkd->bhtk", x, w)


def through_reshape(w, x):
    return jnp.tanh(x.reshape(-1, 40)) @ w.reshape(15, 40).T


@pytest.mark.parametrize(
    ("f", "shape", "scale"),
    [
        (lambda w, x: x @ w.T, (15, 40), (15, 1)),
        (einsum_of_heads, (3, 5, 40), (3, 5, 1)),
        (through_reshape, (3, 5, 40), (3, 5, 1)),
        (lambda w, x: jax.lax.map(lambda w: x @ w, w), (4, 40, 8), (4, 1, 8)),
        (lambda w, x: x @ w.astype(jnp.bfloat16).astype(jnp.float32), (40, 8), (1, 8)),
    ],
    ids=["transposed", "einsum", "reshaped", "stack", "cast"],
)
def test_weight_ahead_has_scales_along_what_is_not_summed(f, shape, scale):
    g = jaxfp8.quantize_dots(f, jaxfp8.FP8_DYNAMIC, weights=0)
    x = normal(2, 7, 40)
    q = g.quantize_weights(normal(*shape, seed=2), x)
    assert q.scale.shape == scale
    assert not g.explain(q, x).missed


def test_weight_ahead_keeps_the_dtype_of_the_program():
    g = jaxfp8.quantize_dots(lambda w, x: x @ w, jaxfp8.FP8_DYNAMIC)
    x, w = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    q = g.quantize_weights(w, x)
    assert q.dtype == jnp.bfloat16
    assert g(q, x).dtype == jnp.bfloat16


def test_gradient_passes_to_activations_of_weights_ahead():
    g = jaxfp8.quantize_dots(lambda w, x: x @ w, jaxfp8.FP8_DYNAMIC)
    q = g.quantize_weights(W, X)
    got = jax.grad(lambda x: g(q, x).sum())(X)
    close(got, np.ones((6, 24)) @ np.asarray(jaxfp8.dequantize(q), np.float64).T)


def test_only_weights_of_chosen_dots_are_quantised():
    g = jaxfp8.quantize_dots(two_dots, jaxfp8.INT8, where="^up")
    narrow = g.quantize_weights(PARAMS, X)
    assert isinstance(narrow["up"], jaxfp8.QArray)
    assert narrow["down"] is PARAMS["down"]


# The error


def test_error_is_that_of_the_outputs():
    g = jaxfp8.quantize_dots(two_dots, jaxfp8.INT8)
    found, exact, got = g.compare(PARAMS, X), two_dots(PARAMS, X), g(PARAMS, X)
    noise = np.linalg.norm(np.asarray(got - exact, np.float64))
    signal = np.linalg.norm(np.asarray(exact, np.float64))
    assert found.relative_l2 == pytest.approx(noise / signal, rel=1e-3)
    assert found.sqnr == pytest.approx(20 * np.log10(signal / noise), rel=1e-3)
    assert found.max_abs == pytest.approx(float(jnp.abs(got - exact).max()), rel=1e-3)
    assert 30 < found.sqnr < 60


def test_error_names_each_output():
    def f(w, x):
        return {"a": x @ w, "b": x, "n": 3, "label": "c"}

    found = jaxfp8.quantize_dots(f, jaxfp8.INT8).compare(W, X)
    assert [e.name for e in found.outputs] == ["['a']", "['b']"]
    assert found.outputs[1].sqnr == np.inf and "SQNR" in str(found)


# Wrong use


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: jaxfp8.quantize_dots(3, jaxfp8.INT8), TypeError, "`fun` is 3"),
        (lambda: jaxfp8.quantize_dots(two_dots, "int8"), TypeError, "a recipe, a rule"),
        (
            lambda: jaxfp8.quantize_dots(two_dots, jaxfp8.CurrentScaling()),
            TypeError,
            "is for training",
        ),
        (lambda: jaxfp8.quantize_dots(two_dots, jaxfp8.FP8), ValueError, "static scales"),
        (
            lambda: jaxfp8.quantize_dots(two_dots, jaxfp8.INT8, where="("),
            ValueError,
            "`where` is '\\('",
        ),
        (
            lambda: jaxfp8.quantize_dots(two_dots, jaxfp8.INT8).quantize_weights(
                PARAMS, X, argnum=2
            ),
            ValueError,
            "`argnum` is 2",
        ),
        (
            lambda: jaxfp8.quantize_dots(two_dots, jaxfp8.INT8, where="none").quantize_weights(
                PARAMS, X
            ),
            ValueError,
            "holds no weight",
        ),
    ],
)
def test_wrong_use_says_what_to_do(call, error, says):
    with pytest.raises(error, match=says):
        call()
