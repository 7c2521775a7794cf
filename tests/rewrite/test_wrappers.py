"""8-bit data that meets a wrapper on its way to a product is captured, or a row says why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import PartitionSpec
from rewrite.support import F32, Data, count

import jaxfp8

_DATA = Data()
X, Q, S = _DATA.normal(32, 32), _DATA.bits8(32, 32), _DATA.scale(1, 32)

Function = Callable[..., Any]
Wrap = Callable[[Function], Function]


def dequantize(q: Any, scale: Any) -> Any:
    return q.astype(F32) * scale


def product(x: Any, q: Any, scale: Any) -> Any:
    return x @ dequantize(q, scale)


# Wrappers


def like(f: Function, *args: Any) -> Any:
    return jax.eval_shape(f, *args)


def composite(f: Function) -> Function:
    return lax.composite(f, name="my.function")


def batched(f: Function) -> Function:
    wrapped = jax.custom_batching.custom_vmap(f)
    wrapped.def_vmap(lambda size, flags, *args: (jax.vmap(f)(*args), True))
    return wrapped


def derived(f: Function) -> Function:
    wrapped = jax.custom_vjp(f)
    wrapped.defvjp(lambda *args: (f(*args), None), lambda _, ct: (ct, ct, ct))
    return wrapped


def chosen(f: Function) -> Function:
    return lambda *args: lax.cond(args[-1][0, 0] > 0, f, f, *args)


def by_platform(f: Function) -> Function:
    return lambda *args: lax.platform_dependent(*args, cpu=f, default=f)


def looped(f: Function) -> Function:
    def wrapped(*args: Any) -> Any:
        start = 0, jnp.zeros((32, 32))
        return lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, f(*args)), start)[1]

    return wrapped


def mapped(f: Function) -> Function:
    return lambda *args: lax.map(lambda _: f(*args), jnp.arange(1))[0]


def in_shards(f: Function) -> Function:
    def wrapped(*args: Any) -> Any:
        specs, mesh = (PartitionSpec(),) * len(args), jax.make_mesh((1,), ("d",))
        return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(*args)

    return wrapped


def donating(f: Function) -> Function:
    return jax.jit(f, donate_argnums=0)


def partitioned(f: Function) -> Function:
    wrapped = custom_partitioning(f)
    wrapped.def_partition(partition=lambda *_: None, sharding_rule="..., ... -> ...")
    return wrapped


def linear(f: Function) -> Function:
    def wrapped(first: Any, *rest: Any) -> Any:
        call = jax.custom_derivatives.linear_call
        return call(lambda rest, first: f(first, *rest), lambda _, ct: ct, rest, first)

    return wrapped


def solved(f: Function) -> Function:
    def wrapped(*args: Any) -> Any:
        return lax.custom_linear_solve(lambda v: v, jnp.zeros((32, 32)), lambda *_: f(*args))

    return wrapped


def root(f: Function) -> Function:
    def wrapped(*args: Any) -> Any:
        start = jnp.zeros((32, 32))
        return lax.custom_root(lambda y: y, start, lambda *_: f(*args), lambda _, y: y)

    return wrapped


def kernel(f: Function) -> Function:
    def wrapped(*args: Any) -> Any:
        def body(*refs: Any) -> None:
            *given, out = refs
            out[...] = f(*(ref[...] for ref in given))

        return pl.pallas_call(body, out_shape=like(f, *args), interpret=True)(*args)

    return wrapped


def callback(f: Function) -> Function:
    return lambda *args: jax.pure_callback(f, like(f, *args), *args)


def effect(f: Function) -> Function:
    return lambda *args: io_callback(f, like(f, *args), *args)


def foreign(f: Function) -> Function:
    return lambda *args: jax.ffi.ffi_call("nowhere", like(f, *args))(*args)


def exported(f: Function) -> Function:
    def wrapped(*args: Any) -> Any:
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
        return jax.export.export(jax.jit(f))(*types).call(*args)

    return wrapped


CAPTURED = [composite, batched, derived, jax.jit, jax.checkpoint, chosen, by_platform, looped]
CAPTURED += [mapped, in_shards]
LEFT = [donating, partitioned, linear, solved, kernel]
UNSEEN = [callback, effect, foreign, exported]
# A loop and a rule for vmap return floats alone, as a function that donates does.
_RETURNS_FLOATS = (batched, looped)

name = lambda wrap: wrap.__name__  # noqa: E731


@pytest.mark.parametrize("wrap", CAPTURED, ids=name)
def test_product_inside_a_wrapper_is_captured(wrap: Wrap) -> None:
    report = jaxfp8.explain(wrap(product))(X, Q, S)
    assert report.matched and not report.missed


@pytest.mark.parametrize("wrap", CAPTURED, ids=name)
def test_product_behind_a_wrapper_is_captured_or_says_what_the_wrapper_returns(wrap: Wrap) -> None:
    report = jaxfp8.explain(lambda x, q, s: x @ wrap(dequantize)(q, s))(X, Q, S)
    (site,) = report.sites
    assert site.rewritten != (wrap in _RETURNS_FLOATS)
    assert site.rewritten or "returns dequantized values" in site.reason


@pytest.mark.parametrize("wrap", LEFT[1:], ids=name)
def test_product_inside_what_is_not_entered_is_a_row(wrap: Wrap) -> None:
    report = jaxfp8.explain(wrap(product))(X, Q, S)
    assert report.missed and not report.matched
    assert f"it is inside `{report.missed[0].ended_by}`" in report.missed[0].reason


@pytest.mark.parametrize("wrap", [*LEFT, *UNSEEN], ids=name)
def test_trail_that_ends_in_what_is_not_entered_is_a_row(wrap: Wrap) -> None:
    report = jaxfp8.explain(lambda x, q, s: x @ wrap(dequantize)(q, s))(X, Q, S)
    (site,) = [site for site in report.missed if site.ended_by != "dot_general"]
    assert f"`{site.ended_by}`" in site.reason and "dequantize" in site.remedy


@pytest.mark.parametrize(
    "fun",
    [root(product), lambda x, q, s: x @ root(dequantize)(q, s)],
    ids=["inside", "behind"],
)
def test_product_and_a_root_are_captured_or_a_row(fun: Function) -> None:
    assert jaxfp8.explain(fun)(X, Q, S).sites  # JAX 0.12 has a primitive of its own for roots


def test_kernel_that_multiplies_returns_no_dequantized_values() -> None:
    report = jaxfp8.explain(lambda x, q, s: kernel(product)(x, q, s) @ x)(X, Q, S)
    assert (len(report.missed), report.others) == (1, 1)


def test_callback_that_reduces_its_8_bit_data_ends_no_trail() -> None:
    def f(x: Any, q: Any) -> Any:
        return x @ (x * jax.pure_callback(jnp.mean, jax.ShapeDtypeStruct((), F32), q))

    assert jaxfp8.explain(f)(X, Q).sites == ()


def test_scatter_by_8_bit_indices_ends_no_trail() -> None:
    def f(x: Any, codes: Any) -> Any:
        return x @ x.at[codes.astype(jnp.int32)].set(1.0)

    assert jaxfp8.explain(f)(X, Q[0].view(jnp.uint8)).sites == ()


# A composite keeps its name where no 8-bit data goes into it


def composites(f: Function, *args: Any) -> tuple[int, int]:
    """The numbers of composites and of scaled dots in the rewrite of a function."""
    rewritten = jaxfp8.rewrite(f)
    return count(rewritten, *args, name="composite"), count(rewritten, *args)


def _beside(x: Any, q: Any, s: Any) -> Any:
    return product(composite(jnp.tanh)(x), q, s)


def _dequantized(x: Any, q: Any, s: Any) -> Any:
    return x @ composite(dequantize)(q, s)


def _multiplied(x: Any, q: Any, s: Any) -> Any:
    return composite(product)(x, q, s) + 1.0


def _activated(x: Any, q: Any, s: Any) -> Any:
    return composite(jax.nn.relu)(product(x, q, s))


def _nested(x: Any, q: Any, s: Any) -> Any:
    return composite(lambda x, q, s: composite(jnp.tanh)(product(x, q, s)))(x, q, s)


COMPOSITES = {_beside: 1, _dequantized: 0, _multiplied: 0, _activated: 0, _nested: 0}


@pytest.mark.parametrize("fun", COMPOSITES, ids=name)
def test_composite_stays_whole_where_no_8_bit_data_goes_in(fun: Function) -> None:
    assert composites(fun, X, Q, S) == (COMPOSITES[fun], 1)
    got, want = jaxfp8.rewrite(fun)(X, Q, S), jax.jit(fun)(X, Q, S)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


def test_activation_quantized_in_a_composite_is_one_call() -> None:
    def quantize(x: Any, scale: Any) -> Any:
        return jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8)

    def f(x: Any, q: Any, s: Any) -> Any:
        return composite(quantize)(x, 0.05).astype(F32) @ dequantize(q, s)

    int8 = Q.view(jnp.int8)
    (site,) = jaxfp8.explain(f)(X, int8, S).sites
    assert site.lhs.quantized == "one call"
    assert composites(f, X, int8, S) == (0, 1)


def test_dots_of_a_composite_are_rounded() -> None:
    f = jaxfp8.quantize_dots(composite(lambda x, w: x @ w), jaxfp8.FP8_W8A16)
    assert count(f, X, X) == 1


# A rule for vmap is the user's, whatever becomes of the function


@jax.custom_batching.custom_vmap
def doubling(x: Any, w: Any, q: Any, s: Any) -> Any:
    return x @ w + product(x, q, s)


@doubling.def_vmap
def _(size: int, flags: list[bool], x: Any, w: Any, q: Any, s: Any) -> Any:
    assert (size, flags) == (4, [True, False, False, False])
    return 2 * (x @ w + product(x, q, s)), True


def _doubling(x: Any, q: Any, s: Any) -> Any:
    return doubling(x, dequantize(q, s), q, s)


_ROWS = X.reshape(4, 8, 32)


@pytest.mark.parametrize(
    "fun",
    [jaxfp8.rewrite(_doubling), jaxfp8.rewrite(jax.vmap(_doubling, (0, None, None)))],
    ids=["vmap of rewrite", "rewrite of vmap"],
)
def test_rule_for_vmap_is_kept(fun: Function) -> None:
    is_inside = fun.__wrapped__ is _doubling
    mapped = jax.vmap(fun, (0, None, None)) if is_inside else fun
    want = 4 * product(_ROWS, Q, S)
    np.testing.assert_allclose(mapped(_ROWS, Q, S), want, rtol=1e-5, atol=1e-5)
    if is_inside:
        assert count(fun, X, Q, S) == 2
        np.testing.assert_allclose(fun(X, Q, S), 2 * product(X, Q, S), rtol=1e-5, atol=1e-5)
