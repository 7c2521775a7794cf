"""Products inside what is not entered are rows of the report where 8-bit data reaches them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from rewrite.support import F32, Data

import jaxfp8

_DATA = Data()
X, Q, W = _DATA.normal(8, 32), _DATA.bits8(32, 24), _DATA.normal(32, 24)
MASK = _DATA.bits8(8, 24, dtype=jnp.int8)
OUT = jax.ShapeDtypeStruct((8, 24), F32)

Kernel = Callable[..., None]


def call(kernel: Kernel, *args: Any, shapes: Any = OUT) -> Any:
    return pl.pallas_call(kernel, out_shape=shapes, interpret=True)(*args)


def whole(x_ref: Any, w_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] @ (w_ref[...].astype(F32) * 0.5)  # here


def in_turns(x_ref: Any, w_ref: Any, out_ref: Any) -> None:
    def body(i: Any, total: Any) -> Any:
        w = w_ref[pl.ds(8 * i, 8), :].astype(F32)
        return total + x_ref[:, pl.ds(8 * i, 8)] @ w  # here

    out_ref[...] = lax.fori_loop(0, 4, body, jnp.zeros(OUT.shape, F32))


def through_memory(x_ref: Any, w_ref: Any, out_ref: Any, wide_ref: Any) -> None:
    def body(_: Any, carry: Any) -> Any:
        out_ref[...] = x_ref[...] @ wide_ref[...]  # here
        wide_ref[...] = w_ref[...].astype(F32)
        return carry

    lax.fori_loop(0, 2, body, 0)


def carried(x_ref: Any, w_ref: Any, out_ref: Any) -> None:
    def body(_: Any, carry: Any) -> Any:
        out, w = carry
        return out + x_ref[...] @ w, w_ref[...].astype(F32)  # here

    out_ref[...] = lax.fori_loop(0, 2, body, (jnp.zeros(OUT.shape), jnp.zeros(W.shape)))[0]


KERNELS: dict[Kernel, Any] = {
    whole: OUT,
    in_turns: OUT,
    through_memory: [OUT, jax.ShapeDtypeStruct(W.shape, F32)],
    carried: OUT,
}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__name__)
def test_product_of_8_bit_data_inside_a_kernel_is_a_miss(kernel: Kernel) -> None:
    def f(x: Any, q: Any) -> Any:
        return call(kernel, x, q, shapes=KERNELS[kernel])

    report = jaxfp8.explain(f)(X, Q)
    (site,) = report.missed
    lines, start = inspect.getsourcelines(kernel)
    here = next(i for i, line in enumerate(lines) if line.rstrip().endswith("# here"))
    assert (site.file, site.line) == (__file__, start + here)
    assert site.reason == "it is inside `pallas_call`, which is left as it is"
    assert "a kernel of your own" in site.remedy
    assert report.others == 0
    with pytest.raises(ValueError, match="strict, but 1 of 1 8-bit dots"):
        jaxfp8.rewrite(f, strict=True)(X, Q)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__name__)
def test_product_of_floats_inside_a_kernel_is_another_dot(kernel: Kernel) -> None:
    def f(x: Any, w: Any) -> Any:
        return call(kernel, x, w, shapes=KERNELS[kernel])

    report = jaxfp8.explain(f)(X, W)
    assert (report.sites, report.others) == ((), 1)


def test_mask_of_bytes_does_not_reach_the_product_beside_it() -> None:
    def kernel(x_ref: Any, w_ref: Any, mask_ref: Any, out_ref: Any) -> None:
        out_ref[...] = jnp.where(mask_ref[...] > 0, x_ref[...] @ w_ref[...], 0.0)

    report = jaxfp8.explain(lambda *args: call(kernel, *args))(X, W, MASK)
    assert (report.sites, report.others) == ((), 1)


def test_dequantized_operand_of_a_kernel_is_8_bit_data() -> None:
    report = jaxfp8.explain(lambda x, q: call(whole, x, q.astype(F32) * 0.5))(X, Q)
    assert len(report.missed) == 1
