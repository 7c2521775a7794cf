"""Layers of experts whose first product has the gate inside, as on a GPU with such a kernel.

The programs run on the CPU, where the gate is behind the call, in float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfp8
import jaxfp8.linen
import jaxfp8.nnx
from jaxfp8._call.ops import ragged_call, ragged_lowering
from jaxfp8._rewrite.ir import graph

WIDTH, HIDDEN, EXPERTS = 32, 48, 4
SIZES = {"num_experts": EXPERTS, "top_k": 2}


@pytest.fixture(name="hopper")
def _hopper(monkeypatch):
    monkeypatch.setattr(ragged_call.targets, "platform", lambda: "cuda")
    monkeypatch.setattr(ragged_call.targets, "compute_capability", lambda: 90)
    monkeypatch.setattr(ragged_lowering, "why_not", lambda *_: None)
    monkeypatch.setattr(ragged_lowering.ffi, "register_if_it_runs_here", lambda *_: None)
    monkeypatch.setattr(jax, "device_count", lambda: 1)


class Block(nnx.Module):
    def __init__(self, **settings):
        self.moe = jaxfp8.nnx.MoE(WIDTH, HIDDEN, **SIZES, **settings, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.moe(x)


def of_nnx(recipe, **settings):
    model = Block(**settings)
    jaxfp8.nnx.quantize(model, recipe, sample=(tokens(16),))
    return lambda x: model(x)


def of_linen(recipe, **settings):
    floats = jaxfp8.linen.MoE(HIDDEN, **SIZES, **settings)
    model = jaxfp8.linen.MoE(HIDDEN, **SIZES, **settings, recipe=recipe)
    variables = floats.init(jax.random.key(0), tokens(16))
    variables, _ = jaxfp8.linen.quantize(model, variables, tokens(16))
    return lambda x: model.apply(variables, x)


layers = pytest.mark.parametrize("layer", [of_nnx, of_linen])


def tokens(count, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(1), (count, WIDTH), dtype)


def gates(f, x):
    """The gates in the products of a program."""
    every = graph.equations(jax.make_jaxpr(lambda x: f(x))(x).jaxpr)
    calls = [eqn for eqn in every if eqn.primitive.name == "ragged_dot"]
    return [eqn.params["spec"] for eqn in calls if eqn.params["spec"].gated]


def distance(one, other):
    one, other = (np.asarray(y, np.float64) for y in (one, other))
    return np.linalg.norm(one - other) / np.linalg.norm(other)


@layers
@pytest.mark.parametrize("recipe", [jaxfp8.FP8_W8A16, jaxfp8.INT8_W8A16], ids=lambda r: r.name)
def test_few_tokens_have_the_gate_in_the_call(layer, recipe, request):
    settings = {"dtype": jnp.bfloat16, "use_bias": True}
    f, x = layer(recipe, **settings), tokens(7)
    assert not gates(f, x)
    apart = jax.jit(lambda x: f(x))(x)
    request.getfixturevalue("hopper")
    (spec,) = gates(f, x)
    assert spec.epilogue.activation == "silu" and spec.out_shape == (14, HIDDEN)
    assert spec.epilogue.bias is not None and spec.out_dtype == "bfloat16"
    together = jax.jit(lambda x: f(x))(x)
    assert together.dtype == jnp.bfloat16 and distance(together, apart) < 2**-7


@layers
def test_tokens_have_gradients(layer, request):
    f, x = layer(jaxfp8.FP8_W8A16, dtype=jnp.bfloat16), tokens(7)

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(f(x).astype(jnp.float32) ** 2))(x)

    apart = jax.jit(lambda x: gradient(x))(x)
    request.getfixturevalue("hopper")
    assert len(gates(gradient, x)) == 1
    assert distance(jax.jit(lambda x: gradient(x))(x), apart) < 0.02


@layers
def test_a_program_for_a_gpu_has_the_gate_in_its_call(layer, hopper):
    f = layer(jaxfp8.FP8_W8A16, dtype=jnp.bfloat16)
    traced = jax.jit(lambda x: f(x)).trace(tokens(7))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    lines = [line for line in text.splitlines() if "@jaxfp8_ragged_dot" in line]
    assert ["gated = true" in line for line in lines] == [True, False]
    assert lines[0].endswith(f"-> tensor<14x{HIDDEN}xbf16>")


class Curve:
    """One that no dictionary can look up."""

    __hash__ = None

    def __call__(self, x):
        return jnp.sin(x)


CURVE = functools.partial(jax.nn.gelu, approximate=False)
OTHERS = {
    "more tokens": ({}, jaxfp8.FP8_W8A16, tokens(40)),
    "float32": ({"dtype": jnp.float32}, jaxfp8.FP8_W8A16, tokens(7, jnp.float32)),
    "8-bit rows": ({}, jaxfp8.FP8_DYNAMIC, tokens(7)),
    "another curve": ({"activation": CURVE}, jaxfp8.FP8_W8A16, tokens(7)),
    "no hash": ({"activation": Curve()}, jaxfp8.FP8_W8A16, tokens(7)),
    "no gate": ({"gated": False}, jaxfp8.FP8_W8A16, tokens(7)),
    "glu": ({"glu": lambda y: y[..., :HIDDEN] + y[..., HIDDEN:]}, jaxfp8.FP8_W8A16, tokens(7)),
}


@layers
@pytest.mark.parametrize("name", OTHERS)
def test_others_keep_their_program(layer, name, request):
    settings, recipe, x = OTHERS[name]
    f = layer(recipe, **{"dtype": jnp.bfloat16, **settings})
    before = str(jax.make_jaxpr(lambda x: f(x))(x))
    request.getfixturevalue("hopper")
    assert str(jax.make_jaxpr(lambda x: f(x))(x)) == before


@layers
def test_several_devices_keep_their_program(layer, hopper, monkeypatch):
    """There the gate would be behind the call, and sums in float32 in front of it."""
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert not gates(layer(jaxfp8.FP8_W8A16, dtype=jnp.bfloat16), tokens(7))


def test_reports_measure_the_products(hopper):
    """Of a layer in floats, beside its twin in 8 bits."""
    settings, x = {"dtype": jnp.bfloat16}, tokens(7)
    model, recipe = jaxfp8.linen.MoE(HIDDEN, **SIZES, **settings), jaxfp8.FP8_W8A16
    variables = model.init(jax.random.key(0), x)
    reports = [
        jaxfp8.nnx.report(Block(**settings), x, recipe=recipe),
        jaxfp8.linen.report(model, variables, x, recipe=recipe),
        jaxfp8.linen.report(
            model.copy(recipe=recipe), quantized(model, variables, recipe), x, reference=variables
        ),
    ]
    for report in reports:
        assert {row.path.rpartition("/")[2] for row in report.rows} >= {"up", "down"}


def quantized(model, variables, recipe):
    return jaxfp8.linen.quantize(model.copy(recipe=recipe), variables, tokens(16))[0]
