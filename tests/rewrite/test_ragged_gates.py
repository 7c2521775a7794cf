"""A gate behind a product of groups: inside its call for few rows on a GPU, else as written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfp8
from jaxfp8._rewrite.ir import graph

GROUPS, ROWS, DEPTH, HALF = 3, 11, 32, 48
SIZES = jnp.array([4, 0, 5])  # two rows are of no group
HOPPER = jaxfp8.Target("cuda", 90)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


Q = jaxfp8.quantize(normal(GROUPS, DEPTH, 2 * HALF), channelwise_axes=(0, 2))
X = jnp.asarray(normal(ROWS, DEPTH, seed=1), jnp.bfloat16)
WIDE = np.asarray(jaxfp8.dequantize(Q), np.float64)
GROUP_OF_ROW = np.array([0] * 4 + [2] * 5 + [0] * 2)
SUMS = np.einsum("mk,mkn->mn", np.asarray(X, np.float64), WIDE[GROUP_OF_ROW])
SUMS[9:] = 0


def product(x, scale, codes=Q.qvalue, **more):
    return lax.ragged_dot(x, codes.astype(x.dtype) * scale.astype(x.dtype), SIZES, **more)


def by(act, cut=lambda y: jnp.split(y, 2, -1)):
    def f(x, scale):
        gate, up = cut(product(x, scale))
        return act(gate) * up

    return f


def in_float32(x, scale):
    gate, up = jnp.split(product(x, scale, preferred_element_type=jnp.float32), 2, -1)
    return (jax.nn.silu(gate) * up).astype(x.dtype)


def up_first(x, scale):
    gate, up = jnp.split(product(x, scale), 2, -1)
    return up * jax.nn.silu(gate)


def silu(z):
    return z / (1 + np.exp(-z))


def gelu(z):
    return z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))


HALVES = slice(HALF), slice(HALF, None)


def slices(y):
    return y[:, :HALF], y[:, HALF:]


GATES = {
    "silu": (by(jax.nn.silu), silu),
    "slices": (by(jax.nn.silu, slices), silu),
    "up first": (up_first, silu),
    "x sigmoid(x)": (by(lambda g: g * jax.nn.sigmoid(g)), silu),
    "gelu": (by(jax.nn.gelu), gelu),
    "relu": (by(lambda g: jnp.maximum(g, 0)), lambda z: np.maximum(z, 0)),
    "none": (by(lambda g: g), lambda z: z),
    "float32": (in_float32, silu),
    "jitted": (jax.jit(by(jax.nn.silu)), silu),
}


def calls(f, *args):
    every = graph.equations(jax.make_jaxpr(f)(*args).jaxpr)
    return [eqn for eqn in every if eqn.primitive.name == "ragged_dot"]


@pytest.mark.parametrize("name", GATES)
def test_a_gate_of_few_rows_is_inside_on_a_gpu(name):
    f, definition = GATES[name]
    (row,) = jaxfp8.explain(f, target=HOPPER)(X, Q.scale).sites
    words = row.epilogue.replace("gelu_tanh", "gelu").replace("scale, gate", "scale, none, gate")
    assert words == f"scale, {curve_of(name)}, gate -> bfloat16"
    assert row.note == "" and row.kernels["cuda"] == "sm80_w8a16"
    rewritten = jaxfp8.rewrite(f, target=HOPPER)
    (call,) = calls(rewritten, X, Q.scale)
    assert call.params["spec"].gated and call.outvars[0].aval.shape == (ROWS, HALF)
    names = {eqn.primitive.name for eqn in graph.equations(jax.make_jaxpr(rewritten)(X, Q.scale))}
    assert not {"split", "logistic", "slice"} & names
    y = np.asarray(rewritten(X, Q.scale), np.float64)
    want = definition(SUMS[:, :HALF]) * SUMS[:, HALF:]
    assert np.linalg.norm(y - want) < 2**-8 * np.linalg.norm(want)
    assert not y[9:].any()


def curve_of(name):
    return name if name in ("gelu", "relu", "none") else "silu"


def many(x, scale):
    return by(jax.nn.silu)(jnp.tile(x, (3, 1)), scale)


def read_twice(x, scale):
    y = product(x, scale)
    gate, up = jnp.split(y, 2, -1)
    return jax.nn.silu(gate) * up, y


def read_half(x, scale):
    gate, up = jnp.split(product(x, scale), 2, -1)
    return jax.nn.silu(gate) * up + up


def halves_of_8(x, scale):
    gate, up = jnp.split(product(x, scale[..., :16], Q.qvalue[..., :16]), 2, -1)
    return jax.nn.silu(gate) * up


KEPT = {
    "many rows": (many, "up to 16 rows, or 10 a group"),
    "the product has another reader": (read_twice, ""),
    "a half has another reader": (read_half, ""),
    "halves the other way round": (by(jax.nn.silu, lambda y: slices(y)[::-1]), ""),
    "alternating columns": (by(jax.nn.silu, lambda y: (y[:, ::2], y[:, 1::2])), ""),
    "other parts": (by(jax.nn.silu, lambda y: (y[:, :HALF], y[:, 24 : 24 + HALF])), ""),
    "one half": (by(jax.nn.silu, lambda y: (y[:, :HALF], y[:, :HALF])), ""),
    "no activation that a kernel has": (by(jnp.sin), ""),
    "halves of 8 columns": (halves_of_8, "begins at a multiple of 16"),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_gates_are_left_as_written(name):
    f, reason = KEPT[name]
    (row,) = jaxfp8.explain(f, target=HOPPER)(X, Q.scale).sites
    assert row.epilogue == "scale -> bfloat16"
    assert row.note.startswith("XLA computes the gate behind it") == bool(reason)
    assert reason in row.note
    ours, theirs = jaxfp8.rewrite(f, target=HOPPER)(X, Q.scale), f(X, Q.scale)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        off = np.asarray(mine, np.float64) - np.asarray(other, np.float64)
        assert np.linalg.norm(off) < 2**-6 * np.linalg.norm(np.asarray(other, np.float64))


def test_two_weights_stay_two_calls():
    def f(x, scale):
        parts = [product(x, scale[..., part], Q.qvalue[..., part]) for part in HALVES]
        return jax.nn.silu(parts[0]) * parts[1]

    rows = jaxfp8.explain(f, target=HOPPER)(X, Q.scale).sites
    assert [row.epilogue for row in rows] == ["scale, silu -> bfloat16", "scale -> bfloat16"]
    assert all("gate and up are two weights; hold them as one" in row.note for row in rows)
    assert len(calls(jaxfp8.rewrite(f, target=HOPPER), X, Q.scale)) == 2


def test_a_call_that_the_function_holds_keeps_its_gate_behind():
    def f(x):
        gate, up = jnp.split(jaxfp8.ragged_dot(x, Q, SIZES), 2, -1)
        return jax.nn.silu(gate) * up

    assert not calls(jaxfp8.rewrite(f, target=HOPPER), X)[0].params["spec"].gated


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (jaxfp8.Target("cpu"), "its halves are other columns"),
        (jaxfp8.Target("cuda", 80), "from compute capability 9.0 on"),
    ],
    ids=["cpu", "Ampere"],
)
def test_elsewhere_the_program_stays_as_it_is(target, reason):
    f = by(jax.nn.silu)
    (row,) = jaxfp8.explain(f, target=target)(X, Q.scale).sites
    assert row.epilogue == "scale -> bfloat16" and reason in row.note
    (call,) = calls(jaxfp8.rewrite(f, target=target), X, Q.scale)
    assert not call.params["spec"].gated


@pytest.mark.parametrize("outside", [True, False], ids=["rewrite(grad)", "grad(rewrite)"])
def test_gradients_are_those_of_the_program(outside):
    f = by(jax.nn.silu)

    def gradients(f):
        return jax.grad(lambda x: jnp.sum(f(x, Q.scale).astype(jnp.float32) ** 2))

    rewrite = lambda f: jaxfp8.rewrite(f, target=HOPPER)  # noqa: E731
    ours = rewrite(gradients(f)) if outside else gradients(rewrite(f))
    mine, other = (np.asarray(g(X), np.float64) for g in (ours, gradients(f)))
    assert np.linalg.norm(mine - other) < 0.02 * np.linalg.norm(other)


def test_a_loop_over_layers_has_a_gate_in_each_turn():
    codes, scales = jnp.stack([Q.qvalue] * 2), jnp.stack([Q.scale, 2 * Q.scale])

    def f(x, codes, scales):
        def turn(x, layer):
            gate, up = jnp.split(product(x, layer[1], layer[0]), 2, -1)
            return x, jax.nn.silu(gate) * up

        return lax.scan(turn, x, (codes, scales))[1]

    rewritten = jaxfp8.rewrite(f, target=HOPPER)
    (call,) = calls(rewritten, X, codes, scales)
    assert call.params["spec"].gated
    mine, other = (np.asarray(g(X, codes, scales), np.float64) for g in (rewritten, f))
    assert np.linalg.norm(mine - other) < 2**-6 * np.linalg.norm(other)
