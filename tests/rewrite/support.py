"""What the tests of the rewrite share: counting calls, a float64 oracle, arrays to start from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxfp8._call.ops.dot import scaled_dot_p
from jaxfp8._value import compat, dtypes
from jaxfp8._value.spec import ScaledDotSpec

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


# For a test that means to leave a function as it is, of which `rewrite` warns.
left_alone = pytest.mark.filterwarnings(
    "ignore:.*8-bit dots of .* is rewritten:jaxfp8.FallbackWarning"
)


def count(fun: Callable[..., Any], *args: Any, name: str = "scaled_dot") -> int:
    """How many equations of a primitive stand in a function, at any depth but in one another."""
    return _count(compat.open_jaxpr(jax.make_jaxpr(fun)(*args)), name)


def _count(jaxpr: Any, name: str) -> int:
    others = [eqn for eqn in jaxpr.eqns if eqn.primitive.name != name]
    inside = (_count(inner, name) for eqn in others for inner in compat.subjaxprs(eqn))
    return len(jaxpr.eqns) - len(others) + sum(inside)


def specs(fun: Callable[..., Any], *args: Any) -> list[ScaledDotSpec]:
    """The problems of the scaled dots that stand in a function, at any depth."""
    return _specs(compat.open_jaxpr(jax.make_jaxpr(fun)(*args)))


def _specs(jaxpr: Any) -> list[ScaledDotSpec]:
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is scaled_dot_p:
            found.append(eqn.params["spec"])
        else:
            found += [spec for inner in compat.subjaxprs(eqn) for spec in _specs(inner)]
    return found


def float64(fun: Callable[..., Any], *args: Any) -> list[np.ndarray]:
    """The function in float64: every float dtype wider than 8 bits widened, nothing rounded."""
    jaxpr = jax.make_jaxpr(fun)(*args)
    with jax.enable_x64(True):
        leaves = [_widen(x) for x in jax.tree.leaves(args)]
        consts = [_widen(c) for c in compat.consts_of(jaxpr)]
        outs = jax.jit(functools.partial(_evaluate, compat.open_jaxpr(jaxpr)))(consts, leaves)
    return [np.asarray(out) for out in outs]


def _widen(array: Any) -> Any:
    array = np.asarray(array)
    return array.astype(np.float64) if array.dtype in dtypes.WIDE_FLOAT else array


def _evaluate(jaxpr: Any, consts: list[Any], args: list[Any]) -> list[Any]:
    env: dict[Any, Any] = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True)
    )

    def read(atom: Any) -> Any:
        if not compat.is_literal(atom):
            return env[atom]
        return _widen(np.asarray(atom.val, atom.aval.dtype))

    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        inner = next((eqn.params[k] for k in ("call_jaxpr", "jaxpr") if k in eqn.params), None)
        loop = _LOOPS.get(eqn.primitive.name)
        if loop is not None:
            outs = loop(eqn.params, inputs)
        elif inner is not None:
            outs = _closed(inner, inputs)
        else:
            outs = _bind(eqn, inputs)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _closed(jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
    consts = [_widen(c) for c in compat.consts_of(jaxpr)]
    return _evaluate(compat.open_jaxpr(jaxpr), consts, list(inputs))


def _scan(params: dict[str, Any], inputs: list[Any]) -> list[Any]:
    n_consts, n_carry = compat.scan_counts(params)
    consts, state = inputs[:n_consts], inputs[n_consts : n_consts + n_carry]

    def body(state: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = _closed(params["jaxpr"], [*consts, *state, *slices])
        return outs[:n_carry], outs[n_carry:]

    stacks = inputs[n_consts + n_carry :]
    options = {"length": params["length"], "reverse": params["reverse"]}
    state, stacked = lax.scan(body, list(map(jnp.asarray, state)), stacks, **options)
    return [*state, *stacked]


def _while(params: dict[str, Any], inputs: list[Any]) -> list[Any]:
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, consts = inputs[:n_cond], inputs[n_cond : n_cond + n_body]
    return lax.while_loop(
        lambda state: _closed(params["cond_jaxpr"], [*cond_consts, *state])[0],
        lambda state: _closed(params["body_jaxpr"], [*consts, *state]),
        list(map(jnp.asarray, inputs[n_cond + n_body :])),
    )


def _cond(params: dict[str, Any], inputs: list[Any]) -> list[Any]:
    branches = [functools.partial(_closed, branch) for branch in params["branches"]]
    return lax.switch(inputs[0], [lambda *xs, f=f: f(xs) for f in branches], *inputs[1:])


_LOOPS = {"scan": _scan, "while": _while, "cond": _cond}


def _bind(eqn: Any, inputs: list[Any]) -> list[Any]:
    params = dict(eqn.params)
    for name in ("new_dtype", "preferred_element_type"):
        if params.get(name) is not None and np.dtype(params[name]) in dtypes.WIDE_FLOAT:
            params[name] = np.dtype(np.float64)
    if eqn.primitive.name == "dot_general":
        wide = np.float64 if params["preferred_element_type"] == np.float64 else None
        inputs = [jnp.asarray(x).astype(wide or x.dtype) for x in inputs]
    out = eqn.primitive.bind(*inputs, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def relative_l2(got: Any, want: np.ndarray) -> float:
    """Relative L2 distance from the float64 value."""
    error = np.linalg.norm(np.asarray(got).astype(np.float64) - np.asarray(want).astype(np.float64))
    norm = np.linalg.norm(np.asarray(want).astype(np.float64))
    return float(error / norm) if norm else float(error)


class Data:
    """Small arrays, the same in every test: x [M, K], q [K, N] and what goes with them."""

    m, k, n = 5, 32, 24

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)

    # Cast by numpy: a cast by JAX compiles a program for each shape and dtype.
    def normal(self, *shape: int, dtype: Any = F32) -> jax.Array:
        return jnp.asarray(self.rng.normal(size=shape).astype(np.float32).astype(dtype))

    def scale(self, *shape: int, dtype: Any = F32) -> jax.Array:
        values = self.rng.uniform(0.25, 2.0, size=shape).astype(np.float32)
        return jnp.asarray(values.astype(BF16).astype(dtype))  # exact in all that programs cast to

    def bits8(self, *shape: int, dtype: Any = E4M3) -> jax.Array:
        if dtypes.is_int8(dtype):
            low, high = dtypes.finite_range(dtype)
            integers = self.rng.integers(int(low), int(high) + 1, size=shape)
            return jnp.asarray(integers.astype(dtype))
        return self.normal(*shape, dtype=dtype)
