"""flax's own FP8 operations are captured unmodified, forward, backward and in a train step."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax.linen import fp8_ops
from flax.training.train_state import TrainState
from rewrite.captured import check, check_values
from rewrite.support import BF16, F32, Data, count

import jaxfp8

pytestmark = [
    pytest.mark.same_bits,
    pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated"),
]

# Each of the three quantizes what it is given, and its gradients as they come.
WITHIN = {F32: 1e-5, BF16: 4e-2}
OPS = [nn.Fp8DotGeneralOp, nn.Fp8DirectDotGeneralOp]


class WithEinsum(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        init = nn.initializers.lecun_normal()
        kernel = self.param("kernel", init, (x.shape[-1], 3, 8)).astype(self.dtype)
        return nn.Fp8Einsum()("...d,dhk->...hk", x.astype(self.dtype), kernel)


def _dense(op: Any, dtype: Any) -> nn.Module:
    return nn.Dense(24, dtype=dtype, dot_general_cls=op)


def _heads(op: Any, dtype: Any) -> nn.Module:
    return nn.DenseGeneral((3, 8), dtype=dtype, dot_general_cls=op)


def _merged_heads(op: Any, dtype: Any) -> nn.Module:
    return nn.DenseGeneral(8, axis=(-2, -1), dtype=dtype, use_bias=False, dot_general_cls=op)


CASES = [
    pytest.param(make(op, dtype), dtype, id=f"{make.__name__} {op.__name__} {jnp.dtype(dtype)}")
    for op in OPS
    for make, dtype in [(_dense, F32), (_dense, BF16), (_heads, BF16), (_merged_heads, F32)]
]
CASES.append(pytest.param(WithEinsum(F32), F32, id="Fp8Einsum"))
every = pytest.mark.parametrize(("layer", "dtype"), CASES)


@functools.cache
def _start(layer: nn.Module) -> tuple[Any, jax.Array]:
    x = Data().normal(2, 4, 32)
    return jax.jit(layer.init)(jax.random.key(1), x), x


def _loss(layer: nn.Module) -> Any:
    return lambda variables, x: jnp.sum(jnp.sin(layer.apply(variables, x).astype(F32)))


@every
def test_forward_pass_of_a_layer_is_one_call(layer: nn.Module, dtype: Any) -> None:
    check(layer.apply, *_start(layer), calls=1, within=WITHIN[dtype])


@every
def test_backward_pass_of_a_layer_is_captured_with_it(layer: nn.Module, dtype: Any) -> None:
    both = jax.value_and_grad(_loss(layer), argnums=(0, 1))
    check(both, *_start(layer), calls=3, within=WITHIN[dtype])


@every
def test_gradient_of_a_rewritten_layer_is_that_of_the_layer(layer: nn.Module, dtype: Any) -> None:
    variables, x = _start(layer)
    loss = _loss(layer)
    got = jax.value_and_grad(jaxfp8.rewrite(loss), argnums=(0, 1))
    assert count(got, variables, x) == 3
    want = jax.value_and_grad(loss, argnums=(0, 1))
    check_values(got, want, variables, x, within=WITHIN[dtype])


class Network(nn.Module):
    op: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Dense(32, dot_general_cls=self.op)(x))
        return nn.Dense(8, dot_general_cls=self.op)(x)


def _train_state(op: Any) -> tuple[TrainState, jax.Array, jax.Array]:
    data, network = Data(), Network(op)
    x, y = data.normal(16, 32), data.normal(16, 8)
    variables = jax.jit(network.init)(jax.random.key(1), x)
    state = TrainState.create(apply_fn=network.apply, params=variables, tx=optax.sgd(0.1))
    return state, x, y


def _step(state: TrainState, x: Any, y: Any, rewrite: Any = lambda f: f) -> Any:
    def loss(variables: Any) -> Any:
        return jnp.mean((state.apply_fn(variables, x) - y) ** 2)

    value, grads = jax.value_and_grad(rewrite(loss))(state.params)
    return value, state.apply_gradients(grads=grads)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_whole_train_step_is_captured(op: Any) -> None:
    check(_step, *_train_state(op), calls=5, within=1e-4)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_train_step_of_a_rewritten_loss_is_captured(op: Any) -> None:
    args = _train_state(op)
    step = jax.jit(lambda *a: _step(*a, rewrite=jaxfp8.rewrite))
    assert count(step, *args) == 5
    check_values(step, _step, *args, within=1e-4)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_amax_history_is_overwritten_as_without_rewrite(op: Any) -> None:
    state, x, y = _train_state(op)
    plain, rewritten = jax.jit(_step), jax.jit(jaxfp8.rewrite(_step))
    mine = theirs = state
    for _ in range(3):
        theirs = plain(theirs, x, y)[1]
        mine = rewritten(mine, x, y)[1]
    collection = fp8_ops.OVERWRITE_WITH_GRADIENT
    want = theirs.params[collection]
    check_values(lambda: mine.params[collection], lambda: want, within=1e-3)
