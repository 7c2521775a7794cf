"""Products that JAX scales by blocks itself, and the same written out, on float8_e8m0fnu scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from rewrite.support import BF16, E4M3, E5M2, F16, F32, Data, relative_l2, specs

import jaxfp8

E8M0 = jnp.float8_e8m0fnu
BLOCK = 32
M, N, K = 5, 24, 64
BATCHED = (((2,), (2,)), ((0,), (0,)))
MX = [jax.nn.get_scaled_dot_general_config("mxfp8") for _ in range(3)]


def powers(data: Data, *shape: int) -> jax.Array:
    return jnp.asarray(2.0 ** data.rng.integers(-9, -3, size=shape), E8M0)


def blocked(dtype: Any = E4M3, batch: int = 2) -> tuple[jax.Array, ...]:
    """Arguments lhs [B, M, K], rhs [B, N, K] and their scales, for each 32 of K."""
    data = Data()
    sides = [(batch, M), (batch, N)]
    codes = [data.bits8(*side, K, dtype=dtype) for side in sides]
    return *codes, *(powers(data, *side, K // BLOCK) for side in sides)


def _wide(x: Any, scale: Any = None) -> np.ndarray:
    wide = np.asarray(x).astype(np.float64)
    if scale is None:
        return wide
    scale = _wide(scale)
    return wide * np.repeat(scale, wide.shape[-1] // scale.shape[-1], -1)


def exact(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any) -> np.ndarray:
    return np.einsum("bmk,bnk->bmn", _wide(lhs, lhs_scale), _wide(rhs, rhs_scale))


def scaled_matmul(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any, dtype: Any = F32) -> Any:
    return jax.nn.scaled_matmul(lhs, rhs, lhs_scale, rhs_scale, preferred_element_type=dtype)


def scaled_dot(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any, dtype: Any = F32) -> Any:
    scales = {"lhs_scale": lhs_scale, "rhs_scale": rhs_scale}
    return lax.scaled_dot(
        lhs, rhs, **scales, dimension_numbers=BATCHED, preferred_element_type=dtype
    )


FUNCTIONS: list[Callable[..., Any]] = [scaled_matmul, scaled_dot]
functions = pytest.mark.parametrize("fun", FUNCTIONS, ids=lambda f: f.__name__)
_ULPS = {F32: 1e-6, BF16: 4e-3, F16: 5e-4}


@functions
@pytest.mark.parametrize("out", _ULPS, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("dtype", [E4M3, E5M2, jnp.int8], ids=lambda d: np.dtype(d).name)
def test_blocks_of_both_sides_go_into_the_call(fun: Any, dtype: Any, out: Any) -> None:
    args = blocked(dtype)

    def f(*args: Any) -> Any:
        return fun(*args, dtype=out)

    assert len(specs(jaxfp8.rewrite(f, strict=True), *args)) == 1
    (site,) = jaxfp8.explain(f)(*args).matched
    assert (site.lhs.scale, site.rhs.scale) == ("blocks 1x1x32", "blocks 1x1x32")
    assert site.dims == (2, M, N, K)
    assert relative_l2(jaxfp8.rewrite(f)(*args), exact(*args)) < _ULPS[out]


def test_float_side_of_a_scaled_dot_is_rounded_to_bfloat16_as_jax_does() -> None:
    _, rhs, lhs_scale, rhs_scale = blocked()
    lhs = Data(1).normal(2, M, K)

    def f(lhs: Any, rhs: Any, rhs_scale: Any, lhs_scale: Any = None) -> Any:
        return scaled_dot(lhs, rhs, lhs_scale, rhs_scale)

    ones = np.ones_like(lhs_scale)
    for scale, want in ((None, ones), (lhs_scale, lhs_scale)):
        args = lhs, rhs, rhs_scale, *(() if scale is None else (scale,))
        assert len(jaxfp8.explain(f)(*args).matched) == 1
        assert relative_l2(jaxfp8.rewrite(f)(*args), np.asarray(jax.jit(f)(*args))) < 1e-6
        assert relative_l2(f(*args), exact(lhs.astype(BF16), rhs, want, rhs_scale)) < 1e-6


def test_what_follows_a_scaled_product_is_absorbed() -> None:
    args = blocked()

    def f(*args: Any) -> Any:
        return jax.nn.relu(scaled_matmul(*args) + 1.0)

    (site,) = jaxfp8.explain(f)(*args).matched
    assert site.epilogue == "scale, bias, relu -> float32"
    want = np.maximum(exact(*args) + 1, 0)
    assert relative_l2(jaxfp8.rewrite(f)(*args), want) < 1e-6


def _by_reshape(x: Any, q: Any, s: Any) -> Any:
    w = q.astype(BF16).reshape(K // BLOCK, BLOCK, N) * s.astype(BF16)[:, None]
    return x @ w.reshape(K, N).astype(F32)


WRITTEN_OUT: dict[str, Callable[..., Any]] = {
    "reshape": _by_reshape,
    "repeat": lambda x, q, s: x @ (q.astype(F32) * jnp.repeat(s.astype(F32), BLOCK, 0)),
    "repeat codes": lambda x, q, s: x @ (q.astype(F32) * jnp.repeat(s, BLOCK, 0).astype(F32)),
    "index codes": lambda x, q, s: x @ (q.astype(F32) * s[jnp.arange(K) // BLOCK].astype(F32)),
    "shift": lambda x, q, s: (
        x
        @ (
            q.astype(F32).reshape(K // BLOCK, BLOCK, N)
            * lax.bitcast_convert_type(
                lax.bitcast_convert_type(s, jnp.uint8).astype(jnp.uint32) << 23, F32
            )[:, None]
        ).reshape(K, N)
    ),
    "scan": lambda x, q, s: lax.scan(
        lambda c, w: (c, x @ (w[0].astype(F32) * jnp.repeat(w[1], BLOCK, 0).astype(F32))),
        0,
        (q[None], s[None]),
    )[1][0],
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_e8m0_scales_of_blocks_written_out_are_captured(name: str) -> None:
    data = Data()
    x, q, s = data.normal(M, K), data.bits8(K, N), powers(data, K // BLOCK, N)
    f = WRITTEN_OUT[name]
    assert len(specs(jaxfp8.rewrite(f, strict=True), x, q, s)) == 1
    want = exact(x[None], q.T[None], jnp.ones((1, M, 1)), s.T[None])[0]
    assert relative_l2(jaxfp8.rewrite(f)(x, q, s), want) < 1e-6


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("lhs_dtype", [E4M3, BF16], ids=["e4m3", "bfloat16"])
def test_every_code_of_e8m0_is_an_exact_power_of_two(rows: int, lhs_dtype: Any) -> None:
    codes = np.arange(256, dtype=np.uint8)
    scales = jnp.asarray(codes.view(ml_dtypes.float8_e8m0fnu))
    lhs = jnp.full((1, rows, BLOCK), 2.0**-6, lhs_dtype)
    rhs = jnp.ones((1, 256, BLOCK), E4M3)
    out = jaxfp8.rewrite(scaled_dot, strict=True)(lhs, rhs, None, scales[None, :, None])
    want = np.where(codes == 255, np.nan, 2.0 ** (codes.astype(np.float64) - 128))
    np.testing.assert_array_equal(_wide(out), np.broadcast_to(want, (1, rows, 256)))


@functions
def test_scaled_product_lowered_for_a_gpu_holds_its_call(fun: Any) -> None:
    with jaxfp8.strict():
        trace = jax.jit(jaxfp8.rewrite(fun)).trace(*blocked())
        text = trace.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @jaxfp8_scaled_dot") == 1


def _mx(x: Any, w: Any) -> Any:
    return jax.nn.scaled_dot_general(x, w, (((1,), (0,)), ((), ())), configs=MX)


def _floats() -> tuple[jax.Array, jax.Array]:
    data = Data()
    return data.normal(64, 64), data.normal(64, 96)


def test_scaled_dot_general_and_its_backward_products_are_captured() -> None:
    def loss(x: Any, w: Any) -> Any:
        return (_mx(x, w) ** 2).sum()

    args = _floats()
    assert len(jaxfp8.explain(_mx)(*args).matched) == 1
    assert relative_l2(jaxfp8.rewrite(_mx)(*args), _wide(args[0]) @ _wide(args[1])) < 0.05
    both = jax.grad(jaxfp8.rewrite(loss), (0, 1)), jaxfp8.rewrite(jax.grad(loss, (0, 1)))
    assert all(len(specs(f, *args)) == 3 for f in both)
    y = _wide(args[0]) @ _wide(args[1])
    exact_gradients = 2 * y @ _wide(args[1]).T, 2 * _wide(args[0]).T @ y
    for f in both:
        for got, want in zip(f(*args), exact_gradients, strict=True):
            assert relative_l2(got, want) < 0.1


def test_gradient_of_scaled_dot_general_is_that_of_its_custom_rule() -> None:
    """Where the function runs on a CPU, which before JAX 0.12 it does not."""

    def loss(fun: Any) -> Any:
        return jax.jit(jax.grad(lambda x, w: (fun(x, w) ** 2).sum(), (0, 1)))

    try:
        plain = loss(_mx)(*_floats())
    except NotImplementedError as error:
        assert "not found for platform cpu" in str(error)
        pytest.skip("this JAX has no scaled_matmul on a CPU")
    for got, want in zip(loss(jaxfp8.rewrite(_mx))(*_floats()), plain, strict=True):
        assert relative_l2(got, np.asarray(want)) < 1e-5


def _missed(fun: Callable[..., Any], *args: Any) -> Any:
    (site,) = jaxfp8.explain(fun)(*args).sites
    with pytest.raises(ValueError, match="strict, but 1 of 1"):
        jaxfp8.rewrite(fun, strict=True)(*args)
    return site


def test_4_bit_operands_are_a_miss_with_line_and_remedy() -> None:
    def f(a: Any, s: Any) -> Any:
        return jax.nn.scaled_matmul(a, a, s, s)

    data = Data()
    site = _missed(f, data.normal(1, M, K).astype(jnp.float4_e2m1fn), jnp.ones((1, M, 4), E4M3))
    assert site.reason == "`scaled_matmul` is given float4_e2m1fn, which no kernel has"
    assert "float8_e4m3fn" in site.remedy
    assert site.ended_at == f"{__file__}:{f.__code__.co_firstlineno + 1}"


def test_scaled_product_of_floats_is_another_dot() -> None:
    def f(a: Any, s: Any) -> Any:
        return jax.nn.scaled_matmul(a, a, s, s)

    report = jaxfp8.explain(f)(Data().normal(1, M, K), jnp.ones((1, M, 1)))
    assert (report.sites, report.others) == ((), 1)


def test_quantize_dots_leaves_a_scaled_product_to_the_rewrite() -> None:
    args = blocked()

    def f(w: Any, x: Any, *args: Any) -> Any:
        return x @ w, scaled_matmul(*args)

    data = Data()
    g = jaxfp8.quantize_dots(f, jaxfp8.FP8_DYNAMIC, weights=0)
    floats = data.normal(K, N), data.normal(M, K)
    report = g.explain(*floats, *args)
    assert (len(report.matched), len(report.missed)) == (2, 0)
    assert relative_l2(g(*floats, *args)[1], exact(*args)) < 1e-6
