"""Products with zero points whose sums over the contracted axis come with the operands."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.products import HOPPER, INT8, check, draw, matrices, run, with_zeros

import jaxfp8
import specs

KERNELS = [pytest.param("sm90_gemm", marks=HOPPER), "cublaslt_int8"]
SIDES = ("lhs", "rhs")


def with_sums(spec, operands, sides=SIDES):
    """The same product, given the sums of some sides."""
    made = {side: dataclasses.replace(getattr(spec, side), sums=True) for side in sides}
    sums = {f"{side}_sums": specs.sums_of(made[side], operands[side]) for side in sides}
    return dataclasses.replace(spec, **made), operands | sums


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("zeros", ["lhs", "rhs", "lhs rhs"])
@pytest.mark.parametrize("size", [(1, 130, 16), (67, 401, 131), (300, 1040, 392)], ids=str)
@pytest.mark.parametrize("pair", [(a, b) for a in INT8 for b in INT8], ids=str)
def test_sums_change_no_bit(pair, size, zeros, kernel):
    m, k, n = size
    scales = {"lhs_tiles": (1, k), "rhs_tiles": (1, k)}
    spec = with_zeros(matrices(*pair, m, k, n, rhs_first=False, **scales), zeros)
    operands = draw(1, spec)
    want = run(spec, operands, kernel)[0]
    for sides in (SIDES, ("lhs",), ("rhs",)):
        given = with_sums(spec, operands, sides)
        assert check(*given, kernel) == kernel
        np.testing.assert_array_equal(run(*given, kernel)[0], want)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("lhs_first", [True, False], ids=["KM", "MK"])
@pytest.mark.parametrize("rhs_first", [True, False], ids=["KN", "NK"])
def test_sums_of_any_layout_in_batches(rhs_first, lhs_first, kernel):
    spec = matrices(
        *("int8", "uint8", 130, 264, 72),
        batch=3,
        lhs_first=lhs_first,
        rhs_first=rhs_first,
        lhs_tiles=(1, 264),
        rhs_tiles=(72, 264),
        zero_points=True,
    )
    operands = draw(2, spec)
    check(*with_sums(spec, operands), kernel)
    shared = dataclasses.replace(spec.rhs, shape=(1, *spec.rhs.shape[1:]))
    shared = dataclasses.replace(spec, rhs=shared)
    assert check(*with_sums(shared, draw(3, shared)), kernel) == kernel


@pytest.mark.parametrize("kernel", KERNELS)
def test_sums_are_read_and_not_made(kernel):
    """Sums that are off by one show in the result, times the zero point of the other side."""
    spec = matrices("int8", "int8", 70, 256, 136, rhs_first=False, zero_points=True)
    spec, operands = with_sums(spec, draw(4, spec))
    exact = run(spec, operands, kernel)[0].astype(np.int64)
    for side, other in (SIDES, SIDES[::-1]):
        moved = operands | {f"{side}_sums": operands[f"{side}_sums"] + 1}
        step = int(operands[f"{other}_zero_point"].item())
        np.testing.assert_array_equal(run(spec, moved, kernel)[0], exact - step)


@pytest.mark.parametrize("recipe", ["INT8_ASYMMETRIC", "INT8_DYNAMIC", "FP8_DYNAMIC"])
@pytest.mark.parametrize("view", [False, True], ids=["KN", "NK"])
@pytest.mark.parametrize("rows", [3, 200])
def test_a_prepared_weight_changes_no_bit(rows, view, recipe):
    recipe = getattr(jaxfp8, recipe)
    x = jax.random.normal(jax.random.key(0), (rows, 384), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (384, 272))
    q = recipe.quantize_weight(w.T, (1,)).T if view else recipe.quantize_weight(w, (0,))
    p = jaxfp8.prepare(q)
    if view and recipe is jaxfp8.FP8_DYNAMIC:
        assert p is q
        return
    assert p.turned is not view
    assert (p.sums is None) is (recipe is jaxfp8.FP8_DYNAMIC)
    product = jax.jit(lambda x, w: recipe_product(x, w, recipe))
    np.testing.assert_array_equal(product(x, p), product(x, q))


def recipe_product(x, w, recipe):
    return jaxfp8.recipe_dot_general(x, w, (((1,), (0,)), ((), ())), recipe)
