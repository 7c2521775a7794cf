"""Layers quantized by AQT are captured unmodified, in training and when serving."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from aqt.jax.v2 import config, utils
from aqt.jax.v2.flax import aqt_flax
from flax import linen as nn
from rewrite.captured import check
from rewrite.support import Data

# Of the library, about JAX.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

KEYS = {"params": jax.random.key(2)}
CONFIGS = {
    "int8": lambda: config.dot_general_make(8, 8),
    "int8 weights": lambda: config.dot_general_make(None, 8),
    "float8": config.config_fwd_fp8,
}
configs = pytest.mark.parametrize("name", CONFIGS)


class Network(nn.Module):
    config: Any
    mode: utils.QuantMode

    @nn.compact
    def __call__(self, x: Any) -> Any:
        how = {
            "rhs_quant_mode": self.mode,
            "rhs_freeze_mode": aqt_flax.FreezerMode.CALIBRATION_AND_VALUE,
        }
        dot = functools.partial(aqt_flax.AqtDotGeneral, self.config, **how)
        x = nn.relu(nn.Dense(32, dot_general_cls=dot)(x))
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (32, 4, 8))
        return aqt_flax.AqtEinsum(self.config, **how)("bd,dhk->bhk", x, kernel)


def _start(name: str) -> tuple[Any, Any, jax.Array]:
    """A network by mode, its variables, and an input."""
    network = functools.partial(Network, CONFIGS[name]())
    x = Data().normal(5, 32)
    return network, network(utils.QuantMode.TRAIN).init(jax.random.key(1), x), x


@configs
def test_serving_is_captured(name: str) -> None:
    network, variables, x = _start(name)
    _, frozen = network(utils.QuantMode.CONVERT).apply(variables, x, mutable=True, rngs=KEYS)
    serve = functools.partial(network(utils.QuantMode.SERVE).apply, rngs=KEYS)
    check(serve, {**variables, "aqt": frozen["aqt"]}, x, calls=2, within=1e-5)


# What the backward pass keeps in 8 bit is the recipe's choice: here both operands, one, none.
@pytest.mark.parametrize(
    ("name", "calls", "others"), [("int8", 5, 0), ("int8 weights", 3, 2), ("float8", 2, 4)]
)
def test_training_is_captured(name: str, calls: int, others: int) -> None:
    network, variables, x = _start(name)
    apply = functools.partial(network(utils.QuantMode.TRAIN).apply, rngs=KEYS)
    gradient = jax.value_and_grad(lambda v, x: jnp.sum(jnp.sin(apply(v, x))))
    check(gradient, variables, x, calls=calls, others=others, within=1e-4)
