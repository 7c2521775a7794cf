"""On a GPU, what FP8 training encodes with a delayed scale is made in the same call."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfp8
import jaxfp8.nnx
from jaxfp8._call.ops.produce_call import quantize_produced_p
from jaxfp8._call.ops.quantize_call import quantize_p
from jaxfp8._recipes import training_codes
from jaxfp8._value import compat

RECIPE = jaxfp8.DelayedScaling(amax_history_length=4)
NUMBERS = (((1,), (0,)), ((), ()))
K = 64
X = jax.random.normal(jax.random.key(0), (32, K), jnp.bfloat16)
W = jax.random.normal(jax.random.key(1), (K, K)) / 8
NARROW = W.astype(jnp.bfloat16)


def state_of(amax):
    """A state that has seen inputs up to `amax`."""
    state = jaxfp8.ScalingState.init(RECIPE)
    history = jnp.full_like(state.input.amax_history, amax)
    return dataclasses.replace(state, input=dataclasses.replace(state.input, amax_history=history))


STATES = [state_of(amax) for amax in (0.5, 2.0, 4.0)]


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """Programs are rewritten as on a GPU; here the calls are computed by definition."""
    monkeypatch.setattr("jaxfp8._rewrite.plan.decide.platform", lambda: "cuda")
    monkeypatch.setattr(training_codes, "_layout_matters", lambda: True)


def dot(y, w, state):
    return jaxfp8.fp8_dot_general(y, w.astype(y.dtype), NUMBERS, state, recipe=RECIPE)


def rms(x):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)


def layer_norm(x):
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
    return (wide * inverse * (1 + W[0]) + W[1]).astype(x.dtype)


def gradients(layer):
    def loss(w, states, x):
        return jnp.square(layer(w, states, x).astype(jnp.float32)).mean()

    return jax.grad(loss, (0, 1, 2))


def found_in(function, *args):
    """The specs of the calls in the rewritten function, and how many encodings are left."""
    specs, left = [], []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive is quantize_produced_p:
                specs.append(eqn.params["spec"])
            elif eqn.primitive is quantize_p:
                left.append(eqn)
            for inner in map(compat.open_jaxpr, compat.subjaxprs(eqn)):
                walk(inner)

    walk(jax.make_jaxpr(jaxfp8.rewrite(function))(*args).jaxpr)
    return specs, len(left)


def assert_close(step, *args):
    for one, other in zip(
        jax.tree.leaves(jax.jit(jaxfp8.rewrite(step))(*args)),
        jax.tree.leaves(jax.jit(step)(*args)),
        strict=True,
    ):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        assert np.linalg.norm(one - other) <= 0.03 * np.linalg.norm(other)


def attention_like(w, states, x):
    y = rms(x)
    q, k, v = (dot(y, NARROW, state) for state in states[:3])
    return q * k + v


def test_products_of_one_norm_share_the_call():
    step = gradients(attention_like)
    specs, _ = found_in(step, W, STATES, X)
    (norm,) = (spec for spec in specs if spec.norm is not None)
    assert (norm.scales, norm.transpose_from, norm.dtype) == (3, 1, np.dtype("float8_e4m3fn"))
    assert_close(step, W, STATES, X)


def test_a_layer_norm_takes_its_means_from_the_program():
    step = gradients(lambda w, states, x: dot(layer_norm(x), NARROW, states[0]))
    specs, left = found_in(step, W, STATES, X)
    (spec,) = specs
    assert (spec.norm.centred, spec.norm.has_gain, spec.norm.has_shift) == (True, True, True)
    assert left == 2  # the weight in bfloat16, and the gradient
    assert_close(step, W, STATES, X)


def swiglu(w, states, x):
    a, b = dot(x, NARROW, states[0]), dot(x, NARROW, states[1])
    return dot(jax.nn.silu(a) * b, NARROW, states[2])


def test_a_gate_is_part_of_the_call_forward_and_backward():
    specs, _ = found_in(gradients(swiglu), W, STATES, X)
    forward, backward = sorted(specs, key=lambda spec: spec.dtype.name)
    assert (forward.activation, forward.has_factor) == ("silu", True)
    assert backward.dtype == np.dtype("float8_e5m2")
    assert_close(gradients(swiglu), W, STATES, X)


def test_a_rounded_weight_keeps_every_bit_of_the_step():
    step = gradients(lambda w, states, x: dot(x, w, states[0]))
    (spec,), _ = found_in(step, W, STATES, X)
    assert (spec.norm, spec.activation, spec.has_factor) == (None, "none", False)
    assert spec.row_dtype == jnp.bfloat16
    for one, other in zip(
        jax.tree.leaves(jax.jit(jaxfp8.rewrite(step))(W, STATES, X)),
        jax.tree.leaves(jax.jit(step)(W, STATES, X)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def read_again(w, states, x):
    y = rms(x)
    return dot(y, NARROW, states[0]) + y


OTHERS = {
    "something else reads it": read_again,
    "nothing makes it": lambda w, states, x: dot(x, NARROW, states[0]),
    "another operation makes it": lambda w, states, x: dot(jnp.sin(x), NARROW, states[0]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_no_call_makes_stays_as_written(name):
    step = gradients(OTHERS[name])
    assert found_in(step, W, STATES, X)[0] == []
    assert jaxfp8.explain(step)(W, STATES, X).encodings == ()


def test_current_scaling_stays_as_written():
    def layer(w, states, x):
        y = rms(x)
        return jaxfp8.fp8_dot_general(y, w.astype(y.dtype), NUMBERS, recipe=jaxfp8.CurrentScaling())

    assert found_in(gradients(layer), W, STATES, X)[0] == []


def rms_without_a_mean(x):
    """As Flax has it: a mean of 0 is taken away, which JAX moves out of a loop's body."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
    return ((wide - jnp.zeros((len(x), 1))) * inverse).astype(x.dtype)


def test_layers_of_a_scan_with_remat_are_captured_in_their_bodies():
    def layers(w, states, x):
        @jax.checkpoint
        def layer(x, both):
            w, state = both
            return x + dot(rms_without_a_mean(x), w, state), None

        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states[:2])
        return jax.lax.scan(layer, x, (jnp.stack([w, w]), stacked))[0]

    specs, _ = found_in(gradients(layers), W, STATES, X)
    assert sum(spec.norm is not None for spec in specs) == 2
    assert_close(gradients(layers), W, STATES, X)


def test_the_report_says_what_is_made_in_the_call():
    report = jaxfp8.explain(gradients(attention_like))(W, STATES, X)
    (one,) = (one for one in report.encodings if one.producer == "RMSNorm")
    assert (one.scales, one.shape, one.dtype) == (3, (32, K), "float8_e4m3fn")
    text = " ".join(str(report).split())
    assert "f8_e4m3fn[32,64] encoded for 3 scales in one call with RMSNorm" in text


def test_layers_of_nnx_are_captured_and_keep_their_state():
    class Block(nnx.Module):
        def __init__(self, rngs):
            options = {"rngs": rngs, "dtype": jnp.bfloat16, "use_bias": False}
            self.norm = nnx.RMSNorm(K, rngs=rngs, dtype=jnp.bfloat16)
            self.up, self.down = (nnx.Linear(K, K, **options) for _ in range(2))

        def __call__(self, x):
            return x + self.down(jax.nn.silu(self.up(self.norm(x))))

    model = Block(nnx.Rngs(0))
    jaxfp8.nnx.fp8_training(model, RECIPE)
    graph, state = nnx.split(model)

    def step(state, x):
        def loss(model):
            return jnp.square(model(x).astype(jnp.float32)).mean()

        model = nnx.merge(graph, state)
        return nnx.grad(loss)(model), nnx.state(model)

    specs, _ = found_in(jaxfp8.rewrite(step), state, X)
    assert len(specs) >= 3  # the norm and two weights
    written, found = jax.jit(step)(state, X), jax.jit(jaxfp8.rewrite(step))(state, X)
    for one, other in zip(*map(jax.tree.leaves, (written, found)), strict=True):
        wide = [np.asarray(x, np.float64) for x in (one, other)]
        assert np.linalg.norm(wide[0] - wide[1]) <= 0.05 * np.linalg.norm(wide[0])
