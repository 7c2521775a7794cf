"""The policies of `jax.checkpoint` save of products on 8-bit data what they save of floats."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recomputed import again, equations, products
from rewrite.support import Data

import jaxfp8
from jaxfp8._call.ops import joint

SAVE = jax.checkpoint_policies
NO_NAME = SAVE.save_only_these_names("a name that nothing has")
POLICIES = {
    "nothing": SAVE.nothing_saveable,
    "dots": SAVE.dots_saveable,
    "dots without batch": SAVE.dots_with_no_batch_dims_saveable,
    "offload": SAVE.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "names": NO_NAME,
    "dots or names": SAVE.save_from_both_policies(SAVE.dots_saveable, NO_NAME),
    "everything": SAVE.everything_saveable,
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)

DATA = Data()
X, WEIGHTS = DATA.normal(2, 4, 16), (DATA.normal(16, 16), DATA.normal(16, 8))
STACKS = DATA.normal(2, 16, 16), DATA.normal(2, 16, 8)


def layers(product, weights):
    """Two layers. The gradient needs both products, but nothing else of the forward pass."""
    first, second = weights
    return lambda x: jnp.sum(jnp.tanh(product(jnp.tanh(product(x, first)), second)))


def dequantized(x, q):
    return x @ (q.qvalue.astype(x.dtype) * q.scale)


def numbers(x, w):
    batch = tuple(range(w.ndim - 2))
    return ((x.ndim - 1,), (w.ndim - 2,)), (batch, batch)


def trained(x, w):
    return jaxfp8.fp8_dot_general(x, w, numbers(x, w), recipe=jaxfp8.CurrentScaling())


def in_floats(weights):
    return layers(jnp.matmul, weights)


def rewritten(weights):
    return jaxfp8.rewrite(layers(dequantized, quantized(weights)))


def quantized(weights):
    each = [(*range(w.ndim - 2), w.ndim - 1) for w in weights]
    return [
        jaxfp8.quantize(w, channelwise_axes=axes) for w, axes in zip(weights, each, strict=True)
    ]


PROGRAMS = {
    "matmul": lambda weights: layers(jaxfp8.matmul, quantized(weights)),
    "rewrite": rewritten,
    "quantize_dots": lambda weights: jaxfp8.quantize_dots(in_floats(weights), jaxfp8.FP8_W8A16),
    "fp8_dot_general": lambda weights: layers(trained, weights),
    "split_dot": lambda weights: layers(
        lambda x, w: jaxfp8.split_dot(x, w, numbers(x, w), terms=2), weights
    ),
}
every_program = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)


@every_policy
@every_program
@pytest.mark.parametrize("weights", [WEIGHTS, STACKS], ids=["matrices", "batched"])
def test_policy_saves_what_it_saves_of_floats(program, policy, weights):
    x = X if weights is STACKS else X[0]
    assert again(program(weights), policy, x) == again(in_floats(weights), policy, x)


@every_program
@pytest.mark.parametrize("size", [1, 2])
def test_vmap_over_inputs_makes_no_batch(program, size):
    """As in JAX: the mapped axis is a free axis of the one operand that has it."""
    fun = jax.vmap(program(WEIGHTS))
    assert again(lambda x: fun(x).sum(), POLICIES["dots without batch"], X[:size]) == (0, 0)


@pytest.mark.parametrize("program", ["matmul", "rewrite", "fp8_dot_general"])
@pytest.mark.parametrize("policy", ["dots", "offload"])
def test_gradient_from_saved_products_is_the_gradient(program, policy):
    fun = PROGRAMS[program](WEIGHTS)
    saved = jax.checkpoint(fun, policy=POLICIES[policy])
    want, got = (jax.jit(jax.grad(f))(X[0]) for f in (fun, saved))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", [jax.grad, jax.jacfwd])
def test_second_derivative_from_saved_products_is_that_of_floats(mode):
    weights = quantized(WEIGHTS)
    saved = jax.checkpoint(jaxfp8.rewrite(layers(dequantized, weights)), policy=SAVE.dots_saveable)
    want, got = (
        jax.jit(mode(lambda x, f=f: jnp.sum(jax.grad(f)(x) ** 2)))(X[0])
        for f in (in_floats([jaxfp8.dequantize(q) for q in weights]), saved)
    )
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * np.abs(want).max())


def scanned(inside, around):
    """Layers of one size in a scan."""
    stack = jaxfp8.quantize(DATA.normal(3, 16, 16), channelwise_axes=(0, 2))

    def layer(x, q):
        return jnp.tanh(dequantized(x, q)), None

    return around(lambda x: jax.lax.scan(inside(layer), x, stack)[0].sum())


def remat(policy):
    return lambda f: jax.checkpoint(f, policy=policy)


@pytest.mark.parametrize("policy", ["nothing", "dots"])
@pytest.mark.parametrize(
    "form",
    [
        lambda policy: scanned(lambda f: remat(policy)(jaxfp8.rewrite(f)), lambda f: f),
        lambda policy: scanned(remat(policy), jaxfp8.rewrite),
        lambda policy: scanned(lambda f: f, lambda f: remat(policy)(jaxfp8.rewrite(f))),
        lambda policy: scanned(lambda f: f, lambda f: jaxfp8.rewrite(remat(policy)(f))),
    ],
    ids=["rewrite in remat in scan", "scan of remat", "remat of scan", "rewrite of remat of scan"],
)
def test_layers_of_a_scan_are_saved_as_those_of_floats(form, policy):
    fun = jax.grad(form(POLICIES[policy]))
    assert products(fun, X[0]) == (3 if policy == "nothing" else 2)


@pytest.mark.filterwarnings("ignore::jaxfp8.FallbackWarning")
@pytest.mark.parametrize(
    ("policy", "rows", "each"), [("nothing", 4, 4), ("dots", 2, 2), ("dots without batch", 2, 4)]
)
def test_ragged_dot_has_a_batch_if_groups_have_rows_of_their_own(policy, rows, each):
    stack = jaxfp8.quantize(DATA.normal(2, 16, 16), channelwise_axes=(0, 2))

    def ragged(x, q):
        return jaxfp8.ragged_dot(x, q, jnp.array([3, 1]))

    saved = jax.checkpoint(layers(ragged, (stack, stack)), policy=POLICIES[policy])
    found = [equations(jax.grad(saved), x).count("ragged_dot") for x in (X[0], X)]
    assert found == [rows, each]


@pytest.mark.cuda_library
def test_joint_products_are_saved_together(monkeypatch):
    monkeypatch.setattr(joint, "runs_here", lambda: True)
    jax.clear_caches()
    x = DATA.normal(3, 256).astype(jnp.bfloat16)
    first, second = quantized([DATA.normal(256, n) for n in (256, 64)])

    @jaxfp8.rewrite
    def both(x):
        return jnp.sum(jnp.tanh(dequantized(x, first))) + jnp.sum(jnp.tanh(dequantized(x, second)))

    joint_calls = {
        name: equations(jax.grad(jax.checkpoint(both, policy=POLICIES[name])), x).count(
            "joint_dots"
        )
        for name in ("nothing", "dots")
    }
    assert joint_calls == {"nothing": 2, "dots": 1}


def test_own_policy_is_told_of_the_product_as_of_a_dot_general():
    told = []

    def policy(primitive, *types, **params):
        if primitive is jax.lax.dot_general_p:
            told.append((tuple(map(str, types)), params["dimension_numbers"]))
        return False

    fun = layers(jaxfp8.matmul, quantized(STACKS))
    jax.make_jaxpr(jax.grad(jax.checkpoint(fun, policy=policy)))(X)
    assert told[0] == (("float32[2,4,16]", "float8_e4m3fn[2,16,16]"), (((2,), (1,)), ((0,), (0,))))


def test_codes_at_the_end_of_the_range_stay_what_they_are():
    """JAX keeps float8_e4m3fn above 240 as NaN, so a product of 8-bit output is computed again."""
    q = jaxfp8.quantize(WEIGHTS[0], channelwise_axes=(1,))

    def product(x):
        y = jaxfp8.matmul(
            x, q, preferred_element_type=jnp.float8_e4m3fn, out_scale=jnp.float32(0.01)
        )
        return y.qvalue.astype(jnp.float32)

    product = jax.checkpoint(product, policy=SAVE.dots_saveable)
    codes, _ = jax.vjp(product, X)
    assert np.isfinite(codes).all() and np.abs(codes).max() > 240
