"""Mixtures of experts: routing, rows sorted by expert, and the weighted sum back in tokens.

    logits [T, E] --route--> weights, experts [T, k] --sort--> rows [T k, D], sizes [E]
    y [T, D]  <--sum over k of weight * row--  network(rows, sizes)

Shapes are static, and no token is dropped: group sizes alone depend on data.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxfp8._ops.quantize import dequantize
from jaxfp8._recipes.recipes import Recipe
from jaxfp8._value import dtypes
from jaxfp8._value.checks import as_floats, as_index
from jaxfp8._value.errors import message, shown

Network = Callable[[jax.Array, jax.Array], jax.Array]
# Added to a sum of scores, as DeepSeek does: sigmoids may all be zero.
_TINY = 1e-20
_PERMUTES: dict[str, Any] = {"mode": "promise_in_bounds", "unique_indices": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """How tokens choose experts.

    Attributes:
      operation: the layer, for errors.
      num_experts, top_k: number of experts, and number that each token uses.
      score: "softmax" over all experts, or "sigmoid" of each.
      renormalize: whether the weights of a token are divided by their sum.
      scale: a factor of all weights.
      num_groups, top_groups: number of equal groups of experts, and of those a token may choose
        from. A group's score is its largest expert score; with "sigmoid", the sum of its two
        largest.
    """

    operation: str
    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        """Refuses numbers that contradict each other."""
        count, groups = self.num_experts, self.num_groups
        within = {"top_k": count, "num_groups": count, "top_groups": groups}
        for name, most in within.items():
            if not 1 <= (as_index(getattr(self, name)) or 0) <= most:
                self._refuse(name, f"a number from 1 to {most} is needed")
        if self.score not in ("softmax", "sigmoid"):
            self._refuse("score", "'softmax' or 'sigmoid' is needed")
        if count % groups:
            self._refuse("num_groups", f"groups of {count} experts need equal sizes")
        if self.top_groups * (count // groups) < self.top_k:
            self._refuse("top_groups", f"so many groups hold fewer experts than {self.top_k}")

    def _refuse(self, name: str, needs: str) -> None:
        got, remedy = f"is {shown(getattr(self, name))}", "choose another that fits the others"
        raise ValueError(message(self.operation, f"`{name}`", got, needs, remedy))

    def __call__(self, logits: jax.Array, bias: jax.Array | None = None) -> Routed:
        """Chooses experts.

        Args:
          logits: [..., experts].
          bias: [experts], added to scores for the choice alone, not to weights.
        """
        logits = logits.astype(jnp.float32)
        scores = jax.nn.softmax(logits) if self.score == "softmax" else jax.nn.sigmoid(logits)
        choice = scores if bias is None else scores + bias.astype(jnp.float32)
        _, experts = jax.lax.top_k(self._allowed(jax.lax.stop_gradient(choice)), self.top_k)
        weights = jnp.take_along_axis(scores, experts, -1)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdims=True) + _TINY)
        return Routed(weights * self.scale, experts, scores)

    def _allowed(self, choice: jax.Array) -> jax.Array:
        """Scores of the best groups, and minus infinity for the others."""
        if self.top_groups == self.num_groups:
            return choice
        size = self.num_experts // self.num_groups
        grouped = choice.reshape(*choice.shape[:-1], self.num_groups, size)
        best, _ = jax.lax.top_k(grouped, min(2, size) if self.score == "sigmoid" else 1)
        _, groups = jax.lax.top_k(best.sum(-1), self.top_groups)
        allowed = jax.nn.one_hot(groups, self.num_groups, dtype=bool).any(-2)
        return jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(choice.shape)


# The arguments of a layer that are fields of its `Routing`.
SETTINGS = tuple(field.name for field in dataclasses.fields(Routing) if field.name != "operation")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routed:
    """The choice of experts for tokens.

    Attributes:
      weights: float32 [..., top_k].
      experts: their indices, int32 [..., top_k].
      scores: of all experts, float32 [..., experts]; for losses that balance experts.
    """

    weights: jax.Array
    experts: jax.Array
    scores: jax.Array


def mixture(
    x: jax.Array,
    routed: Routed,
    experts: int,
    network: Network,
    axis_name: str | None = None,
    recipe: Recipe | None = None,
) -> jax.Array:
    """The weighted sum of the experts' outputs for each token.

    Args:
      x: tokens [..., D].
      routed: the choice of experts, with the same leading axes.
      experts: number of experts.
      network: computes rows sorted by expert, given the number of rows of each.
      axis_name: a manual mesh axis that splits tokens and experts. Each device gathers all tokens,
        computes its own experts, and the sums are scattered.
      recipe: of the first product. If it rounds each token by itself, tokens travel in 8 bits.
    """
    width, top_k = x.shape[-1], routed.experts.shape[-1]
    rows, chosen = x.reshape(-1, width), routed.experts.reshape(-1, top_k)
    weights, own = routed.weights.reshape(-1, top_k), here(experts, axis_name)
    if axis_name is not None:
        gather = functools.partial(jax.lax.all_gather, axis_name=axis_name, tiled=True)
        weights, chosen = gather(weights), gather(chosen)
        rows = _in_8_bits(recipe, axis_name, rows) if _rounds_tokens(recipe, x) else gather(rows)
        chosen = chosen - jax.lax.axis_index(axis_name) * own
        elsewhere = (chosen < 0) | (chosen >= own)
        chosen, weights = jnp.where(elsewhere, own, chosen), jnp.where(elsewhere, 0, weights)
    y = _mixed(rows, weights, chosen, own, network)
    if axis_name is not None:
        y = jax.lax.psum_scatter(y, axis_name, tiled=True)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _rounds_tokens(recipe: Recipe | None, x: jax.Array) -> bool:
    """Whether an input has scales of its own for each token."""
    how = None if recipe is None else recipe.activation
    return how is not None and not how.static and how.tiles((1, x.shape[-1]), (1,)).get(0) == 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_8_bits(recipe: Recipe, axis_name: str, x: jax.Array) -> jax.Array:
    """Tokens of all devices, which travel as codes and scales; gradients pass as they are.

    The product rounds them again. That changes no code of float32 tokens.
    """
    gather = functools.partial(jax.lax.all_gather, axis_name=axis_name, tiled=True)
    assert recipe.activation is not None
    codes = recipe.activation.quantize(x, (1,))
    return dequantize(jax.tree.map(functools.partial(dtypes.moved, gather), codes), x.dtype)


def _send(recipe: Recipe, axis_name: str, x: jax.Array) -> tuple[jax.Array, None]:
    return _in_8_bits(recipe, axis_name, x), None


def _send_back(recipe: Recipe, axis_name: str, _: None, dy: jax.Array) -> tuple[jax.Array]:
    del recipe
    return (jax.lax.psum_scatter(dy, axis_name, tiled=True),)


_in_8_bits.defvjp(_send, _send_back)


def here(experts: int, axis_name: str | None) -> int:
    """Number of experts on this device.

    Raises:
      ValueError: the devices cannot have the same number.
    """
    if axis_name is None:
        return experts
    devices = jax.lax.axis_size(axis_name)
    if experts % devices:
        needs = f"a multiple of the {devices} devices of axis `{axis_name}` is needed"
        remedy = "split experts over another axis, or keep all of them on each device"
        raise ValueError(message("jaxfp8.MoE", "`num_experts`", f"is {experts}", needs, remedy))
    return experts // devices


def _mixed(
    x: jax.Array, weights: jax.Array, chosen: jax.Array, experts: int, network: Network
) -> jax.Array:
    """Tokens [T, D] through the experts [T, k].

    The index `experts` means no expert on this device; such rows add 0.
    """
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    numbers = jnp.arange(order.size, dtype=order.dtype)
    places = jnp.zeros_like(order).at[order].set(numbers, **_PERMUTES)  # the inverse of `order`
    sizes = jnp.bincount(flat, length=experts).astype(jnp.int32)
    y = network(_taken(chosen.shape[1], x, order, places), sizes)
    back = _taken(1, y, places, order).reshape(*chosen.shape, y.shape[-1])
    # Rows of nobody may hold anything, and zero times NaN is NaN.
    back = jnp.where((chosen < experts)[..., None], back, jnp.zeros((), y.dtype))
    total = jnp.einsum("tk,tkd->td", weights, back, preferred_element_type=jnp.float32)
    return total.astype(y.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _taken(top_k: int, x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Rows, each `top_k` times, in an order with a known inverse.

    The gradient gathers, too. That of plain indexing would add into rows, one by one on a GPU.
    """
    del inverse
    return x.at[order // top_k].get(mode="promise_in_bounds")


def _take(top_k: int, x: jax.Array, order: jax.Array, inverse: jax.Array) -> tuple[Any, jax.Array]:
    return _taken(top_k, x, order, inverse), inverse


def _give_back(top_k: int, inverse: jax.Array, dy: jax.Array) -> tuple[jax.Array, None, None]:
    rows = dy.at[inverse].get(**_PERMUTES)
    return rows.reshape(inverse.size // top_k, top_k, dy.shape[-1]).sum(1), None, None


_taken.defvjp(_take, _give_back)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hidden:
    """From the rows of the first product to those of the second.

    Attributes:
      activation: of a row, or of the gate that is its first half.
      gated: whether a row holds a gate, and a half that it multiplies.
      glu: in place of both, a function of whole rows [..., 2 H].
    """

    activation: Callable[[jax.Array], jax.Array]
    gated: bool
    glu: Callable[[jax.Array], jax.Array] | None = None

    @property
    def width(self) -> int:
        """Columns of the first product for one of the second."""
        return 2 if self.gated or self.glu is not None else 1

    def __call__(self, y: jax.Array) -> jax.Array:
        """Rows [..., width * H] to [..., H]."""
        if self.glu is not None:
            return self.glu(y)
        if not self.gated:
            return self.activation(y)
        gate, up = jnp.split(y, 2, -1)
        return self.activation(gate) * up


def shared(y: jax.Array, gate: jax.Array | None) -> jax.Array:
    """The output of the shared expert, times the sigmoid of its gate [..., 1] if it has one."""
    return y if gate is None else (jax.nn.sigmoid(gate) * y).astype(y.dtype)


def check_sizes(operation: str, least: int = 1, **sizes: Any) -> None:
    """Refuses sizes of a layer that are no integers, or too small."""
    for name, size in sizes.items():
        index = as_index(size)
        if index is None or index < least:
            got, needs = f"is {shown(size)}", f"an integer of at least {least} is needed"
            remedy = "take the size from the model's configuration"
            raise ValueError(message(operation, f"`{name}`", got, needs, remedy))


def as_tokens(operation: str, inputs: ArrayLike, width: int | None = None) -> jax.Array:
    """Tokens [..., D] of floats; an error for others."""
    x = as_floats(operation, "inputs", inputs)
    if x.ndim == 0 or (width is not None and x.shape[-1] != width):
        got, needs = f"has shape {x.shape}", f"tokens [..., {width or 'D'}] are needed"
        remedy = "put features last, and make the layer for as many"
        raise ValueError(message(operation, "`inputs`", got, needs, remedy))
    return x
