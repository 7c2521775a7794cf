"""Models quantized by qwix are captured unmodified, on linen and on nnx."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import qwix
from flax import linen as nn
from flax import nnx
from rewrite.captured import check
from rewrite.support import BF16, F32, Data

# Of the library, about JAX.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

# What each recipe quantizes: weights alone, or activations as they come too.
RECIPES: dict[str, dict[str, Any]] = {
    "float8 weights": {"weight_qtype": "float8_e4m3fn"},
    "int8 weights": {"weight_qtype": "int8"},
    "float8": {"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn"},
    "int8": {"weight_qtype": "int8", "act_qtype": "int8"},
    "tiled float8 weights": {"weight_qtype": "float8_e4m3fn", "tile_size": 16},
    "tiled float8": {
        "weight_qtype": "float8_e4m3fn",
        "act_qtype": "float8_e4m3fn",
        "tile_size": 16,
    },
    "tiled int8": {"weight_qtype": "int8", "act_qtype": "int8", "tile_size": 16},
    "tiled int8, zero points": {
        "weight_qtype": "int8",
        "act_qtype": "int8",
        "act_calibration_method": "minmax",
        "tile_size": 16,
    },
}
# One activation rounded the other way, a code of 8 bits apart. qwix puts the largest value of a row
# half-way between two codes, and on JAX 0.12 XLA's fused division takes the other one.
FLIP = 1e-2
recipes = pytest.mark.parametrize("recipe", RECIPES)


class Network(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Dense(48)(x))
        x = nn.Einsum((48, 4, 8), "...d,dhk->...hk")(x)
        return nn.DenseGeneral(16, axis=(-2, -1))(x)


class Block(nn.Module):
    """A small transformer block."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.LayerNorm(dtype=BF16)(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, dtype=BF16)(h, h)
        h = nn.gelu(nn.Dense(64, dtype=BF16)(nn.LayerNorm(dtype=BF16)(x)))
        return x + nn.Dense(32, dtype=BF16)(h)


def _quantized(model: nn.Module, x: Any, recipe: dict[str, Any]) -> tuple[Any, Any]:
    """The apply function of a model quantized after training, and its parameters."""
    rules = [qwix.QuantizationRule(module_path=".*", **recipe)]
    params = model.init(jax.random.key(1), x)["params"]
    quantized = qwix.quantize_model(model, qwix.PtqProvider(rules))
    abstract = jax.eval_shape(quantized.init, jax.random.key(1), x)
    variables = {"params": qwix.quantize_params(params, abstract["params"])}
    return quantized.apply, variables


@recipes
@pytest.mark.same_bits
def test_linen_model_is_captured(recipe: str) -> None:
    x = Data().normal(5, 32)
    # A tile goes along one axis, and the last layer contracts two, of 4 and 8.
    model = nn.Dense(24) if "tiled" in recipe else Network()
    calls = 1 if "tiled" in recipe else 3
    apply, variables = _quantized(model, x, RECIPES[recipe])
    within = FLIP if "act_qtype" in RECIPES[recipe] else None
    check(apply, variables, x, calls=calls, within=within)


@pytest.mark.parametrize(
    ("recipe", "calls", "others"), [("float8 weights", 6, 2), ("float8", 8, 0), ("int8", 8, 0)]
)
@pytest.mark.slow
def test_transformer_block_is_captured(recipe: str, calls: int, others: int) -> None:
    x = Data().normal(2, 5, 32, dtype=BF16)
    apply, variables = _quantized(Block(), x, RECIPES[recipe])
    check(apply, variables, x, calls=calls, others=others, within=3e-2)


@recipes
@pytest.mark.same_bits
def test_nnx_model_is_captured(recipe: str) -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.up = nnx.Linear(32, 48, rngs=rngs)
            self.down = nnx.Linear(48, 32, rngs=rngs)
            self.heads = nnx.Einsum("bd,dhk->bhk", (32, 4, 8), rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.heads(self.down(nnx.gelu(self.up(x))))

    x = Data().normal(5, 32)
    rules = [qwix.QuantizationRule(module_path=".*", **RECIPES[recipe])]
    quantized = qwix.quantize_model(Model(), qwix.PtqProvider(rules), x)
    graph, state = nnx.split(quantized)
    within = FLIP if "act_qtype" in RECIPES[recipe] else None
    check(lambda state, x: nnx.merge(graph, state)(x), state, x, calls=3, within=within)


def _qarrays(tile: int | None = None, **how: Any) -> tuple[Any, Any]:
    data = Data()
    x, w = data.normal(5, 256), data.normal(256, 24)
    lhs_tile, rhs_tile = ({axis: tile} if tile else {} for axis in (1, 0))
    lhs = qwix.quantize(x, channelwise_axes=(0,), tiled_axes=lhs_tile, **how)
    return lhs, qwix.quantize(w, channelwise_axes=(1,), tiled_axes=rhs_tile, **how)


_NUMBERS = (((1,), (0,)), ((), ()))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("tile", [None, 128], ids=["by column", "tiled"])
def test_dot_of_two_qarrays_is_captured(dtype: str, tile: int | None) -> None:
    args = _qarrays(tile, qtype=dtype)
    check(lambda a, b: qwix.dot_general(a, b, _NUMBERS), *args, calls=1)


def test_dequantized_qarray_with_zero_points_is_captured() -> None:
    x = Data().normal(5, 256)
    _, w = _qarrays(qtype="int8", calibration_method="minmax")
    assert w.zero_point is not None
    check(lambda x, w: x @ qwix.dequantize(w), x, w, calls=1)


def test_scan_over_a_stack_of_qarrays_is_captured() -> None:
    data = Data()
    how = {"qtype": "float8_e4m3fn", "channelwise_axes": (0, 2)}
    stack = qwix.quantize(data.normal(3, 32, 32) / 6, **how)

    def layers(x: Any, stack: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jnp.tanh(qwix.dot(x, w)), None), x, stack)[0]

    check(layers, data.normal(5, 32, dtype=F32), stack, calls=1)
