"""Derivatives of a rewritten function are those of the function, custom rules included."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from rewrite.support import E4M3, F32, Data, count

import jaxfp8

pytestmark = pytest.mark.same_bits


def _args() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    data = Data()
    return data.normal(5, 32), data.bits8(32, 24), data.scale(24), data.normal(24)


def plain(x: Any, q: Any, s: Any, b: Any) -> Any:
    return jnp.sum(jnp.sin(x @ (q.astype(F32) * s) + b))


def with_gelu(x: Any, q: Any, s: Any, b: Any) -> Any:
    return jnp.sum(jax.nn.gelu(x @ (q.astype(F32) * s) + b) ** 2)


def with_relu(x: Any, q: Any, s: Any, b: Any) -> Any:
    return jnp.sum(jax.nn.relu(x @ (q.astype(F32) * s) + b) ** 2)


def straight_through(x: Any, q: Any, s: Any, b: Any) -> Any:
    """Fake quantization of the activations; the gradient skips it by stop_gradient."""
    coarse = jnp.clip(x * 4.0, -448, 448).astype(E4M3).astype(F32) / 4.0
    x = x + jax.lax.stop_gradient(coarse - x)
    return jnp.sum(jnp.cos(x @ (q.astype(F32) * s) + b))


def fake_quantized(x: Any, q: Any, s: Any, b: Any) -> Any:
    """Clip and convert with the true gradient, which is zero beyond the clip."""
    coarse = jnp.clip(x, -0.5, 0.5).astype(E4M3).astype(F32)
    return jnp.sum(coarse @ (q.astype(F32) * s) + b)


@jax.custom_vjp
def scaled_gradient(x: Any) -> Any:
    """The identity, with a gradient 7 times too large: inlining it would lose the 7."""
    return x


scaled_gradient.defvjp(lambda x: (x, None), lambda _, ct: (7.0 * ct,))


def with_custom_vjp(x: Any, q: Any, s: Any, b: Any) -> Any:
    return jnp.sum(jnp.sin(scaled_gradient(x) @ (q.astype(F32) * s) + b))


@jax.custom_vjp
def dequantize(q: Any, s: Any) -> Any:
    return q.astype(F32) * s


dequantize.defvjp(
    lambda q, s: (q.astype(F32) * s, (q, s)),
    lambda res, ct: (jnp.zeros_like(res[0]), 3.0 * jnp.sum(ct * res[0].astype(F32), axis=0)),
)


def dequantized_in_custom_vjp(x: Any, q: Any, s: Any, b: Any) -> Any:
    return jnp.sum(jnp.sin(x @ dequantize(q, s) + b))


@jax.custom_jvp
def odd_tangent(x: Any) -> Any:
    return x


odd_tangent.defjvp(lambda p, t: (p[0], 5.0 * t[0]))


def with_custom_jvp(x: Any, q: Any, s: Any, b: Any) -> Any:
    return jnp.sum(jnp.sin(odd_tangent(x @ (q.astype(F32) * s)) + b))


def straight_through_weight(x: Any, q: Any, s: Any, b: Any) -> Any:
    """A weight quantized on the way forward; the gradient does as if it were not."""
    w = jnp.sin(jnp.arange(768.0).reshape(32, 24)) * s
    coarse = jnp.clip(w * 99, -448, 448).astype(E4M3).astype(F32) / 99
    return jnp.sum(jnp.cos(x @ (w + jax.lax.stop_gradient(coarse - w)) + b))


FUNCTIONS = [
    straight_through_weight,
    plain,
    with_gelu,
    with_relu,
    straight_through,
    fake_quantized,
    with_custom_vjp,
    dequantized_in_custom_vjp,
    with_custom_jvp,
]
FORWARD = [f for f in FUNCTIONS if f not in (with_custom_vjp, dequantized_in_custom_vjp)]
every = pytest.mark.parametrize("fun", FUNCTIONS, ids=lambda f: f.__name__)
forward = pytest.mark.parametrize("fun", FORWARD, ids=lambda f: f.__name__)


@functools.cache
def _gradient(fun: Callable[..., Any]) -> Any:
    """The value and the gradient of a function, which several tests compare with."""
    return jax.jit(jax.value_and_grad(fun, (0, 2, 3)))(*_args())


def _same(got: Any, want: Any) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-4, atol=2e-4 * float(np.max(np.abs(w)) + 1e-3))
        assert np.any(np.asarray(w) != 0)


@every
def test_gradient_equals_that_of_the_function(fun: Callable[..., Any]) -> None:
    args = _args()
    _same(jax.grad(jaxfp8.rewrite(fun), (0, 2, 3))(*args), _gradient(fun)[1])


@every
def test_gradient_under_jit_equals_that_of_the_function(fun: Callable[..., Any]) -> None:
    args = _args()
    _same(jax.jit(jax.grad(jaxfp8.rewrite(fun)))(*args), _gradient(fun)[1][0])


@every
def test_rewrite_of_the_gradient_equals_the_gradient(fun: Callable[..., Any]) -> None:
    args = _args()
    gradient = jax.value_and_grad(fun, (0, 2, 3))
    _same(jaxfp8.rewrite(gradient)(*args), _gradient(fun))


@every
def test_rewrite_of_the_gradient_captures_forward_and_backward(fun: Callable[..., Any]) -> None:
    assert count(jaxfp8.rewrite(jax.grad(fun)), *_args()) == (1 if fun is fake_quantized else 2)


@every
def test_gradient_of_the_rewrite_captures_forward_and_backward(fun: Callable[..., Any]) -> None:
    assert count(jax.jit(jax.grad(jaxfp8.rewrite(fun))), *_args()) >= 2


@forward
def test_jvp_equals_that_of_the_function(fun: Callable[..., Any]) -> None:
    x, q, s, b = _args()

    def along(f: Callable[..., Any]) -> Any:
        return jax.jvp(lambda x, s: f(x, q, s, b), (x, s), (jnp.cos(x), s))

    _same(along(jaxfp8.rewrite(fun)), jax.jit(lambda: along(fun))())


@forward
def test_linearize_equals_that_of_the_function(fun: Callable[..., Any]) -> None:
    x, q, s, b = _args()

    def along(f: Callable[..., Any]) -> Any:
        value, linear = jax.linearize(lambda x: f(x, q, s, b), x)
        return value, linear(jnp.cos(x))

    _same(along(jaxfp8.rewrite(fun)), jax.jit(lambda: along(fun))())


@pytest.mark.parametrize("fun", [plain, with_gelu, with_custom_jvp], ids=lambda f: f.__name__)
def test_hessian_vector_product_equals_that_of_the_function(fun: Callable[..., Any]) -> None:
    x, q, s, b = _args()

    def product(f: Callable[..., Any]) -> Any:
        gradient = jax.grad(lambda x: f(x, q, s, b))
        return jax.jvp(gradient, (x,), (jnp.cos(x),))[1]

    _same(product(jaxfp8.rewrite(fun)), jax.jit(lambda: product(fun))())


@pytest.mark.parametrize("fun", [plain, with_custom_vjp], ids=lambda f: f.__name__)
def test_gradient_of_the_gradient_equals_that_of_the_function(fun: Callable[..., Any]) -> None:
    x, q, s, b = _args()

    def second(f: Callable[..., Any]) -> Any:
        gradient = jax.grad(lambda x: f(x, q, s, b))
        return jax.grad(lambda x: jnp.sum(jnp.sin(gradient(x))))(x)

    _same(second(jaxfp8.rewrite(fun)), jax.jit(lambda: second(fun))())


@every
def test_vmap_of_the_gradient_equals_that_of_the_function(fun: Callable[..., Any]) -> None:
    x, q, s, b = _args()
    many = jnp.stack([x, 2 * x, -x])

    def mapped(f: Callable[..., Any]) -> Any:
        return jax.vmap(jax.grad(f), (0, None, None, None))(many, q, s, b)

    _same(mapped(jaxfp8.rewrite(fun)), jax.jit(lambda: mapped(fun))())


def test_gradient_reaches_arrays_that_the_function_closes_over() -> None:
    x, q, s, b = _args()

    def loss(rewrite: Callable[..., Any], s: Any) -> Any:
        return rewrite(lambda x: plain(x, q, s, b))(x)

    got = jax.grad(lambda s: loss(jaxfp8.rewrite, s))(s)
    _same(got, jax.grad(lambda s: loss(lambda f: f, s))(s))


@pytest.mark.parametrize("of_x", [jnp.sin, scaled_gradient], ids=["plain", "custom vjp"])
def test_an_output_that_the_loss_leaves_out_adds_nothing_to_its_gradient(of_x: Any) -> None:
    x, q, s, _ = _args()

    def f(x: Any, s: Any) -> Any:
        y = of_x(x) @ (q.astype(F32) * s)
        return jnp.sum(jnp.sin(y)), jnp.sum(y)

    got, want = (jax.grad(lambda *a, g=g: g(*a)[0], (0, 1))(x, s) for g in (jaxfp8.rewrite(f), f))
    _same(got, want)


def test_derivative_of_an_integer_output_is_none_of_ours() -> None:
    x, q, s, _ = _args()

    def f(x: Any) -> Any:
        y = x @ (q.astype(F32) * s)
        return jnp.sum(y), jnp.argmax(y)

    got = jax.value_and_grad(jaxfp8.rewrite(f), has_aux=True)(x)
    want = jax.value_and_grad(f, has_aux=True)(x)
    _same(got[1], want[1])
    assert int(got[0][1]) == int(want[0][1])


# JAX has forward mode alone for what computes values and tangents together


@jax.custom_batching.custom_vmap
def batched_by_hand(x: Any) -> Any:
    return jnp.sin(x)


@batched_by_hand.def_vmap
def _(size: int, batched: list[bool], x: Any) -> Any:
    return jnp.sin(x), batched[0]


def beside(x: Any, q: Any, s: Any, b: Any) -> Any:
    y = batched_by_hand(x) @ (q.astype(F32) * s) + b
    return jnp.tanh(y), jnp.argmax(y)


def jitted(x: Any, q: Any, s: Any, b: Any) -> Any:
    return jax.jit(beside)(x, q, s, b)


def scanned(x: Any, q: Any, s: Any, b: Any) -> Any:
    def step(total: Any, row: Any) -> Any:
        y, best = beside(row, q, s, b)
        return total + y, best

    return jax.lax.scan(step, jnp.zeros(24), x)


def batched(x: Any, q: Any, s: Any, b: Any) -> Any:
    return jax.vmap(beside, (0, None, None, None))(x, q, s, b)


def in_pallas(x: Any, q: Any, s: Any, b: Any) -> Any:
    def kernel(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = jnp.sin(x_ref[...])

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas.pallas_call(kernel, shape, interpret=True)(x) @ (q.astype(F32) * s) + b


TOGETHER = [beside, jitted, scanned, batched, in_pallas]
together = pytest.mark.parametrize("fun", TOGETHER, ids=lambda f: f.__name__)


def tangents(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The value of a function and its derivative along the cosine of its first argument."""

    def of(x: Any, *others: Any) -> Any:
        outputs, moved = jax.jvp(lambda x: fun(x, *others), (x,), (jnp.cos(x),))
        floats = [t for t in jax.tree.leaves(moved) if t.dtype == F32]
        return outputs, floats

    return of


@together
def test_jvp_beside_what_has_no_reverse_mode_equals_that_of_the_function(fun: Any) -> None:
    _same(tangents(jaxfp8.rewrite(fun))(*_args()), tangents(fun)(*_args()))


@together
def test_jvp_beside_what_has_no_reverse_mode_captures_value_and_tangent(fun: Any) -> None:
    assert count(tangents(jaxfp8.rewrite(fun)), *_args()) == 2


@together
def test_second_jvp_beside_what_has_no_reverse_mode_equals_that_of_the_function(fun: Any) -> None:
    def twice(fun: Any) -> Any:
        return tangents(lambda *args: tangents(fun)(*args)[1])(*_args())[1]

    _same(twice(jaxfp8.rewrite(fun)), twice(fun))


def test_gradient_of_what_has_no_reverse_mode_is_the_error_of_jax() -> None:
    def loss(fun: Any) -> Any:
        return jax.grad(lambda x: fun(x, *_args()[1:])[0].sum())(_args()[0])

    for fun in (beside, jaxfp8.rewrite(beside)):
        with pytest.raises(ValueError, match="does not support reverse-mode"):
            loss(fun)


@pytest.mark.parametrize("mode", [jax.jvp, jax.vjp], ids=["forward", "reverse"])
def test_second_derivative_of_a_scan_over_rewritten_layers(mode: Callable[..., Any]) -> None:
    data = Data()
    x, q, s = data.normal(4, 8), data.bits8(3, 8, 8, dtype=jnp.int8), data.scale(3, 1, 8) * 0.02

    def layer(x: Any, q: Any, s: Any) -> Any:
        return jnp.tanh(x @ (q.astype(F32) * s))

    def curvature(layer: Callable[..., Any]) -> Any:
        def loss(x: Any, s: Any) -> Any:
            return jnp.sum(jax.lax.scan(lambda x, w: (layer(x, *w), None), x, (q, s))[0] ** 2)

        gradient = jax.grad(loss, (0, 1))
        if mode is jax.jvp:
            return mode(gradient, (x, s), (jnp.cos(x), s))[1]
        return mode(gradient, x, s)[1]((jnp.cos(x), s))

    _same(curvature(jaxfp8.rewrite(layer)), curvature(layer))


def _on_a_mesh(kind: Any, layer: Callable[..., Any], x: Any, q: Any, s: Any) -> Any:
    """The Hessian-vector product of a loss, of a layer inside `shard_map` or on explicit axes."""
    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2)
    specs = (spec("a"), spec(None, "b"), spec(None, "b"))
    with jax.set_mesh(mesh):
        x, q, s = (jax.device_put(v, p) for v, p in zip((x, q, s), specs, strict=True))
        if kind is jax.sharding.AxisType.Auto:
            layer = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=spec("a", "b"))

        def along(x: Any, s: Any) -> Any:
            gradient = jax.grad(lambda x, s: jnp.sum(jnp.sin(layer(x, q, s))), (0, 1))
            return jax.jvp(gradient, (x, s), (jnp.cos(x), s))[1]

        return jax.jit(along)(x, s)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_second_derivative_of_layers_rewritten_on_a_mesh(kind: Any) -> None:
    data = Data()
    args = data.normal(4, 8), data.bits8(8, 8, dtype=jnp.int8), data.scale(1, 8) * 0.02

    def layer(x: Any, q: Any, s: Any) -> Any:
        return jnp.tanh(x @ (q.astype(F32) * s))

    _same(_on_a_mesh(kind, jaxfp8.rewrite(layer), *args), _on_a_mesh(kind, layer, *args))


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "fun",
    [
        lambda a, b, w: a @ w + b,
        lambda a, b, w: a @ w - 2 * b[0],
        lambda a, b, w: a @ w + a + b,
    ],
    ids=["residual", "bias", "residual of itself"],
)
def test_a_linear_function_is_transposed_with_what_it_adds(fun: Any, jit: Any) -> None:
    data = Data()
    q, s, x = data.bits8(8, 8, dtype=jnp.int8), data.scale(1, 8), data.normal(4, 8)

    def linear(a: Any, b: Any) -> Any:
        return fun(a, b, q.astype(F32) * s)

    got = jax.linear_transpose(jit(jaxfp8.rewrite(linear)), x, x)(jnp.cos(x))
    _same(got, jax.linear_transpose(linear, x, x)(jnp.cos(x)))


@jax.custom_vjp
def _seven(x: Any) -> Any:
    return x


_seven.defvjp(lambda x: (x, None), lambda _, ct: (7.0 * ct,))


def test_jvp_beside_a_custom_vjp_equals_that_of_the_function() -> None:
    x, q, *_ = _args()

    def along(rewrite: Callable[..., Any]) -> Any:
        f = rewrite(lambda x, q, s: _seven(x) @ (q.astype(F32) * s))
        return jax.jvp(lambda s: f(x, q, s), (jnp.ones(24),), (jnp.arange(24.0),))

    for got, want in zip(along(jaxfp8.rewrite), along(lambda f: f), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_jvp_through_a_custom_vjp_is_refused_as_in_the_function() -> None:
    x, q, *_ = _args()
    f = jaxfp8.rewrite(lambda x: _seven(x) @ (q.astype(F32) * 0.25))
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(f, (x,), (x,))
