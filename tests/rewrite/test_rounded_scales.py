"""A scale that the function rounds is rounded in the product too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from rewrite.scales import (
    FORMS,
    MOVES,
    arguments,
    arguments_of_two_scales,
    close,
    exact,
)
from rewrite.support import F32, Data, count

import jaxfp8


@pytest.mark.parametrize("is_computed", [False, True])
@pytest.mark.parametrize("move", MOVES)
def test_a_scale_that_the_function_rounds_is_rounded_by_the_call(
    move: str, is_computed: bool
) -> None:
    def scale_of(s: Any) -> Any:
        return MOVES[move]((s * 3 if is_computed else s).astype(jnp.bfloat16))

    def model(x: Any, q: Any, s: Any) -> Any:
        wide = q.astype(jnp.bfloat16) * scale_of(s)
        return jax.lax.dot(x, wide, preferred_element_type=F32)

    x, q, s = arguments()
    args = x.astype(jnp.bfloat16), q, s.reshape(FORMS.get(move, (24,)))
    text = jax.jit(jaxfp8.rewrite(model)).trace(*args).lower().as_text()
    assert "rhs_scale_rounded = true" in text
    assert "stablehlo.convert" not in text
    close(jaxfp8.rewrite(model)(*args), exact(*args[:2], scale_of(args[2])))


# Scales of rows of codes, as functions write them, in bfloat16.
SCALES = {
    "cast of a view": lambda s: s[:, None].astype(jnp.bfloat16),
    "view of a cast": lambda s: s.astype(jnp.bfloat16)[:, None],
    "stretched": lambda s: jnp.broadcast_to(s[:, None], (6, 32)).astype(jnp.bfloat16),
    "repeated": lambda s: jnp.repeat(s[::2, None], 2, axis=0).astype(jnp.bfloat16),
    "times a number": lambda s: s[:, None].astype(jnp.bfloat16) * jnp.bfloat16(1.6),
    "by a number": lambda s: s[:, None].astype(jnp.bfloat16) / 7,
    "a number by it": lambda s: 7 / s[:, None].astype(jnp.bfloat16),
    "times another": lambda s: (
        s[:, None].astype(jnp.bfloat16) * s[::-1].astype(jnp.bfloat16)[:, None]
    ),
    "float16": lambda s: s[:, None].astype(jnp.float16).astype(jnp.bfloat16),
    "and back": lambda s: s[:, None].astype(jnp.bfloat16).astype(F32),
}


@pytest.mark.parametrize("form", SCALES)
def test_codes_suit_the_scale_as_it_was_rounded(form: str) -> None:
    """Whatever view is between the rounding and the product, and whichever comes first."""

    def model(a: Any, q: Any, s: Any) -> Any:
        scale = SCALES[form](s)
        return jax.lax.dot(
            a.astype(scale.dtype) * scale, q.astype(scale.dtype), preferred_element_type=F32
        )

    data = Data()
    a, q = data.bits8(6, 32, dtype=jnp.int8), data.bits8(32, 24, dtype=jnp.int8)
    s = jnp.asarray([1.0039, 1.0117, 1.0195, 1.0273, 1.0352, 1.043], F32)
    assert count(jaxfp8.rewrite(model), a, q, s) == 1
    scale = np.asarray(jnp.broadcast_to(SCALES[form](s), (6, 32)), np.float64)
    want = (np.asarray(a, np.float64) * scale) @ np.asarray(q, np.float64)
    close(jaxfp8.rewrite(model)(a, q, s), want)


@pytest.mark.parametrize(
    "ones", [lambda s: jnp.ones((1, 24), s.dtype) * s, lambda s: jnp.ones((1, 24), s.dtype) / s]
)
def test_a_scale_times_a_constant_inside_shard_map(ones: Any) -> None:
    """The constant is the same on all devices, the scale is not."""

    def model(x: Any, q: Any, s: Any) -> Any:
        return x @ (q.astype(jnp.bfloat16) * ones(s[None].astype(jnp.bfloat16)))

    x, q, s = arguments()
    mesh = jax.make_mesh((1,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    columns = P(None, "b")
    mapped = jax.shard_map(model, mesh=mesh, in_specs=(P(), columns, P("b")), out_specs=columns)
    args = x.astype(jnp.bfloat16), q, s
    assert count(jaxfp8.rewrite(mapped), *args) == 1
    close(jaxfp8.rewrite(mapped)(*args), jax.jit(mapped)(*args), 2**-7)


@pytest.mark.parametrize(
    "more",
    [
        lambda wide, scale: -(wide * scale),
        lambda wide, scale: wide * scale * jnp.bfloat16(0.5),
        lambda wide, scale: wide * scale * jnp.arange(1, 6, dtype=jnp.bfloat16)[:, None],
        lambda wide, scale: wide / scale,
    ],
)
def test_a_scale_of_several_is_rounded_as_the_function_says(more: Any) -> None:
    """XLA would leave out the rounding of arithmetic if the rewrite widened its result."""

    def model(a: Any, q: Any, s: Any, u: Any) -> Any:
        wide = more(a.astype(jnp.bfloat16), s * u)
        return jax.lax.dot(wide, q.astype(jnp.bfloat16), preferred_element_type=F32)

    a, q, s, u = arguments_of_two_scales()
    assert count(jaxfp8.rewrite(model), a, q, s, u) == 1
    ones = np.asarray(more(jnp.ones((5, 1), F32), (s * u).astype(F32)), np.float64)
    want = (np.asarray(a, np.float64) * ones) @ np.asarray(q, np.float64)
    close(jaxfp8.rewrite(model)(a, q, s, u), want)


def _repeated(s: Any, u: Any, times: int) -> Any:
    return jnp.broadcast_to(s, (5, times)) * u


@pytest.mark.parametrize(
    "spread",
    [
        lambda s, u: jnp.broadcast_to(s * u, (5, 32)),
        lambda s, u: jnp.repeat(s * u, 32, axis=1),
        lambda s, u: jnp.repeat(s * u, np.full(1, 32), axis=1, total_repeat_length=32),
        lambda s, u: jax.lax.stop_gradient(jnp.broadcast_to(s * u, (5, 32))),
        lambda s, u: jax.lax.optimization_barrier(_repeated(s, u, 32)),
        lambda s, u: _repeated(s, u, 64)[:, 32:],
        lambda s, u: _repeated(s, u, 32)[:, ::-1],
        lambda s, u: jnp.split(_repeated(s, u, 64), 2, axis=1)[1],
        lambda s, u: jnp.take(_repeated(s, u, 3), jnp.arange(32) // 11, axis=1),
        lambda s, u: jax.lax.dynamic_slice(_repeated(s, u, 64), (0, jnp.asarray(3)), (5, 32)),
        lambda s, u: jnp.concatenate([_repeated(s, u, 12), _repeated(s, u, 20)], axis=1),
    ],
)
@pytest.mark.parametrize("region", [False, True])
def test_a_scale_that_is_widened_where_it_is_spread_is_rounded_before(
    spread: Any, region: bool
) -> None:
    """XLA does not look through it, so it leaves the rounding in the function as written."""

    def product(a: Any, q: Any, scale: Any) -> Any:
        return (a.astype(F32) * scale.astype(F32)) @ q.astype(F32)

    def model(a: Any, q: Any, s: Any, u: Any) -> Any:
        return (jax.checkpoint(product) if region else product)(a, q, spread(s, u))

    args = arguments_of_two_scales()
    a, q, s, u = args
    assert count(jaxfp8.rewrite(model), *args) == 1
    want = np.asarray(a, np.float64) * np.asarray(spread(s, u), np.float64)
    close(jax.jit(jaxfp8.rewrite(model))(*args), want @ np.asarray(q, np.float64))


@pytest.mark.parametrize("region", ["checkpoint", "cond", "donate", "scan", "carry", "shard_map"])
def test_a_scale_that_is_computed_before_a_region_is_rounded_as_written(region: str) -> None:
    """The region is a program of its own, to which the result of arithmetic looks like an input."""

    def product(a: Any, q: Any, scale: Any) -> Any:
        wide = -(a.astype(jnp.bfloat16) * scale)
        return jax.lax.dot(wide, q.astype(jnp.bfloat16), preferred_element_type=F32)

    def model(a: Any, q: Any, s: Any, u: Any) -> Any:
        match region:
            case "checkpoint":
                return jax.checkpoint(product)(a, q, s * u)
            case "donate":
                return jax.jit(product, donate_argnums=(0,))(a * 1, q, s * u)
            case "scan":
                stack = jnp.stack([s * u, s * u])
                return jax.lax.scan(lambda c, t: (c, product(a, q, t)), 0, stack, unroll=2)[1][0]
            case "carry":
                double = jnp.bfloat16(2)
                step = lambda c, _: (c * double, product(a, q, c))  # noqa: E731
                return jax.lax.scan(step, s * u, length=2, unroll=2)[1][0]
            case "shard_map":
                mesh = jax.make_mesh((1,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
                specs = (P("b"), P(), P("b"))
                sharded = jax.shard_map(product, mesh=mesh, in_specs=specs, out_specs=P("b"))
                return sharded(a, q, s * u)
        zeros = jnp.zeros((a.shape[0], q.shape[1]))
        return jax.lax.cond(jnp.asarray(True), product, lambda *_: zeros, a, q, s * u)

    args = arguments_of_two_scales()
    a, q, s, u = args
    assert count(jaxfp8.rewrite(model), *args) == 1
    want = -np.asarray(a, np.float64) * np.asarray(s * u, np.float64)
    close(jax.jit(jaxfp8.rewrite(model))(*args), want @ np.asarray(q, np.float64))


@pytest.mark.parametrize("of", ["rows", "columns"])
def test_derivatives_and_batches_see_the_scale_as_it_was_rounded(of: str) -> None:
    def model(x: Any, q: Any, s: Any) -> Any:
        y = x @ q.astype(F32)
        return y * (s[:, None] if of == "rows" else s).astype(jnp.bfloat16).astype(F32)

    x, q, s = arguments()
    s = (s + 1.0039)[: x.shape[0] if of == "rows" else q.shape[1]]
    rewritten = jaxfp8.rewrite(model)
    text = jax.jit(rewritten).trace(x, q, s).lower().as_text()
    assert f"{'lhs' if of == 'rows' else 'rhs'}_scale_rounded = true" in text
    dy = Data().normal(5, 24)
    for way in (
        lambda f: jax.vjp(lambda x: f(x, q, s), x)[1](dy)[0],
        lambda f: jax.jvp(lambda x: f(x, q, s), (x,), (x,))[1],
        lambda f: jax.vmap(f, (0, None, None))(jnp.stack([x, 2 * x]), q, s),
        lambda f: jax.vmap(f, (None, None, 0))(x, q, jnp.stack([s, 2 * s])),
    ):
        close(way(rewritten), way(jax.jit(model)))


@pytest.mark.parametrize("scaled", ["behind the product", "in front of it"])
def test_the_gradient_of_a_scale_that_the_function_rounds(scaled: str) -> None:
    def loss(s: Any, x: Any, q: Any) -> Any:
        scale = s.astype(jnp.bfloat16)
        wide = q.astype(jnp.bfloat16)
        y = x @ (wide * scale) if scaled == "in front of it" else (x @ wide) * scale
        return (y.astype(F32) ** 2).sum()

    x, q, s = arguments()
    x = x.astype(jnp.bfloat16)
    got = jax.grad(jaxfp8.rewrite(loss))(s, x, q)
    assert got.dtype == F32
    sums = np.asarray(x, np.float64) @ np.asarray(q, np.float64)
    close(got, 2 * (sums**2).sum(0) * np.asarray(s, np.float64), 2**-6)
