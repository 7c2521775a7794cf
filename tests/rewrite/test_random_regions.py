"""Whatever regions a weight goes through, value and derivatives of any order are the function's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewrite.random_regions import REGIONS, VIEWS, Program, arguments, in_region, make

import jaxfp8


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--programs")))


def _everything(program: Program, fun: Callable[..., Any]) -> dict[str, Any]:
    """The value of a function and all its derivatives that JAX has."""
    x, s, q = program.args
    directions = jnp.cos(jnp.arange(1.0, x.size + 1)).reshape(x.shape), jnp.sin(1 + s * 99)
    many = jnp.stack([x, 0.5 * x, -x])
    of = lambda x, s: fun(x, s, q)  # noqa: E731
    found = {"value": of(x, s), "vmap": jax.vmap(of, (0, None))(many, s)}
    if program.has_forward:
        found["jvp"] = jax.jvp(of, (x, s), directions)[1]
    if program.has_reverse:
        gradient = jax.grad(of, (0, 1))
        found["gradient"] = gradient(x, s)
        found["vmap of the gradient"] = jax.vmap(gradient, (0, None))(many, s)
        along = lambda x, s: sum(map(jnp.vdot, gradient(x, s), directions))  # noqa: E731
        found["reverse over reverse"] = jax.grad(along, (0, 1))(x, s)
        if program.has_forward:
            found["forward over reverse"] = jax.jvp(gradient, (x, s), directions)[1]
    return found


def _same(program: Program) -> None:
    fun = program.fun
    got = jax.jit(lambda: _everything(program, jaxfp8.rewrite(fun)))()
    want = jax.jit(lambda: _everything(program, fun))()
    for name, expected in want.items():
        for g, w in zip(jax.tree.leaves(got[name]), jax.tree.leaves(expected), strict=True):
            scale = float(jnp.max(jnp.abs(w)))
            np.testing.assert_allclose(g, w, rtol=1e-3, atol=1e-4 * scale + 1e-6, err_msg=name)


# Each region with each view would be 56 programs; each region meets all views in some order.
PAIRS = [
    (region, view)
    for i, region in enumerate(REGIONS)
    for j, view in enumerate(VIEWS)
    if region != "while" and (i + j) % 4 == 0
]


@pytest.mark.parametrize(("region", "view"), PAIRS)
def test_a_weight_that_leaves_a_region_through_a_view(region: str, view: str) -> None:
    args = arguments(np.random.default_rng(0))
    _same(Program(in_region(region, view), args, has_reverse=True, has_forward=True))


def test_random_programs_with_regions(seed: int) -> None:
    _same(make(seed))
