"""Mixtures of experts without ragged dots: padded, one-hot, dense and gathered, as models write."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8._rewrite.ir import graph

TEXTS, TOKENS, MODEL, HIDDEN, EXPERTS, CAPACITY, CHOSEN = 2, 6, 16, 24, 4, 3, 2
KEYS = jax.random.split(jax.random.key(0), 8)
X = jax.random.normal(KEYS[0], (TEXTS, TOKENS, MODEL), jnp.bfloat16)
ROWS = X.reshape(-1, MODEL)
UP, DOWN = (
    jax.random.normal(key, shape) / 4
    for key, shape in zip(
        KEYS[1:3], [(EXPERTS, MODEL, HIDDEN), (EXPERTS, HIDDEN, MODEL)], strict=True
    )
)
MASK = jax.random.uniform(KEYS[3], (TEXTS, TOKENS, EXPERTS, CAPACITY)) < 0.2
COMBINE = (MASK * jax.random.uniform(KEYS[4], MASK.shape)).astype(jnp.bfloat16)
ROUTER = jax.nn.softmax(jax.random.normal(KEYS[5], (ROWS.shape[0], EXPERTS), jnp.bfloat16))
CHOICE = jax.lax.top_k(ROUTER, CHOSEN)


def padded(x, up, down):
    """MaxText and GShard: tokens are sent by a mask, up to a capacity."""
    sent = jnp.einsum("BSM,BSEC->EBCM", x, MASK.astype(x.dtype))
    hidden = jax.nn.silu(jnp.einsum("EBCM,EMH->EBCH", sent, up))
    return jnp.einsum("EBCM,BSEC->BSM", jnp.einsum("EBCH,EHM->EBCM", hidden, down), COMBINE)


def every_expert(x, up, down):
    """Each token through each expert, with weights behind the last product."""
    hidden = jax.nn.silu(jnp.einsum("td,edf->tef", x.reshape(-1, MODEL), up))
    return jnp.einsum("te,ted->td", ROUTER, jnp.einsum("tef,efd->ted", hidden, down))


def summed_at_once(x, up, down):
    """Each token through each expert, weights and experts summed in the last product."""
    hidden = jax.nn.silu(jnp.einsum("BSM,EMH->BSEH", x, up))
    return jnp.einsum("tef,efd->td", hidden.reshape(-1, EXPERTS, HIDDEN) * ROUTER[..., None], down)


def gathered(x, up, down, mode=None):
    """Decoding: each token takes the weights of its experts."""
    weights, ids = CHOICE
    own_up, own_down = (jnp.take(w, ids, axis=0, mode=mode) for w in (up, down))
    hidden = jax.nn.silu(jnp.einsum("td,tkdf->tkf", x.reshape(-1, MODEL), own_up))
    return jnp.einsum("tkf,tkfd,tk->td", hidden, own_down, weights)


def mapped(x, up, down):
    """Decoding: written for one token, under `vmap`."""

    def of_token(row, weights, ids):
        return sum(
            weights[i] * (jax.nn.silu(row @ up[ids[i]]) @ down[ids[i]]) for i in range(CHOSEN)
        )

    return jax.vmap(of_token)(x.reshape(-1, MODEL), *CHOICE)


def looped(x, up, down):
    """A scan over experts; each sees all tokens."""
    rows = x.reshape(-1, MODEL)

    def add(total, expert):
        weights, up, down = expert
        return total + weights[:, None] * (jax.nn.silu(rows @ up) @ down), None

    return jax.lax.scan(add, jnp.zeros_like(rows), (ROUTER.T, up, down))[0]


def at_once(w):
    q = jaxfp8.quantize(w, channelwise_axes=(0, 2))
    return (q.qvalue, q.scale.astype(jnp.bfloat16)), lambda q, s: q.astype(s.dtype) * s


def by_expert(w):
    q = jaxfp8.quantize(w, jnp.int8, channelwise_axes=(0,))
    return (q.qvalue, q.scale.astype(jnp.bfloat16)), lambda q, s: q.astype(s.dtype) * s


def in_blocks(w):
    scale = jnp.exp(jax.random.normal(KEYS[6], (EXPERTS, w.shape[1] // 8, w.shape[2] // 8)))

    def wide(q, scale):
        experts, rows, columns = q.shape
        tiles = q.reshape(experts, rows // 8, 8, columns // 8, 8).astype(jnp.float32)
        return (tiles * scale[:, :, None, :, None]).reshape(q.shape).astype(jnp.bfloat16)

    return (w.astype(jnp.float8_e4m3fn), scale), wide


def on_codes(written, hold):
    """The layer on dequantized weights, and its arguments."""
    (up, wide), (down, _) = hold(UP), hold(DOWN)

    def layer(x, up, down):
        return written(x, wide(*up), wide(*down))

    return layer, (X, up, down)


FORMS = [padded, every_expert, summed_at_once, gathered, mapped, looped]


@pytest.mark.parametrize("hold", [at_once, by_expert, in_blocks])
@pytest.mark.parametrize("written", FORMS)
def test_products_with_experts_are_captured(written, hold):
    layer, args = on_codes(written, hold)
    report = jaxfp8.explain(layer)(*args)
    assert report.matched and not report.missed
    ours, theirs = (np.asarray(f(*args), np.float64) for f in (jaxfp8.rewrite(layer), layer))
    assert np.linalg.norm(ours - theirs) < 0.02 * np.linalg.norm(theirs)


@pytest.mark.parametrize("mode", [None, "clip"])
@pytest.mark.parametrize("written", [gathered, mapped])
def test_only_chosen_experts_are_read(written, mode):
    """Codes are gathered. No weight of all experts is made in floats."""
    form = functools.partial(gathered, mode=mode) if written is gathered else written
    layer, args = on_codes(form, at_once)
    jaxpr = jax.make_jaxpr(jaxfp8.rewrite(layer))(*args)
    shapes = {args[1][0].shape, args[2][0].shape}
    values = [v.aval for eqn in graph.equations(jaxpr.jaxpr) for v in eqn.outvars]
    assert not [a for a in values if a.shape in shapes and a.dtype == jnp.bfloat16]


@pytest.mark.parametrize("written", [padded, gathered, mapped])
def test_derivatives_are_those_of_the_layer(written):
    layer, (x, up, down) = on_codes(written, at_once)

    def loss(f, x, scale):
        return jnp.sum(f(x, (up[0], scale), down).astype(jnp.float32) ** 2)

    ours = jax.grad(functools.partial(loss, jaxfp8.rewrite(layer)), (0, 1))(x, up[1])
    theirs = jax.grad(functools.partial(loss, layer), (0, 1))(x, up[1])
    for mine, other in zip(ours, theirs, strict=True):
        mine, other = (np.asarray(g, np.float64) for g in (mine, other))
        assert np.linalg.norm(mine - other) < 0.03 * np.linalg.norm(other)
