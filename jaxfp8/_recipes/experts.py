"""Mixtures of experts: routing, rows sorted by expert, and the weighted sum back in tokens.

    logits [T, E] --route--> weights, experts [T, k] --sort--> rows [T k, D], sizes [E]
    y [T, D]  <--sum over k of weight * row--  network(rows, sizes)

Shapes are static, and no token is dropped: group sizes alone depend on data. Devices that exchange
rows have a capacity, and drop what exceeds it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from numbers import Real
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
# Modes of a gather: every index is a row, or one behind the last row gives zeros.
_INSIDE, _FILL = "promise_in_bounds", "fill"
_PERMUTES: dict[str, Any] = {"mode": _INSIDE, "unique_indices": True}


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
    x: jax.Array, routed: Routed, experts: int, network: Network, spread: Spread
) -> jax.Array:
    """The weighted sum of the experts' outputs for each token.

    Args:
      x: tokens [..., D].
      routed: the choice of experts, with the same leading axes.
      experts: number of experts.
      network: computes rows sorted by expert, given the number of rows of each.
      spread: how devices share tokens and experts.
    """
    width, top_k = x.shape[-1], routed.experts.shape[-1]
    rows, chosen = x.reshape(-1, width), routed.experts.reshape(-1, top_k)
    weights, own = routed.weights.reshape(-1, top_k), spread.own(experts)
    if spread.axis_name is None:
        y = _sum(weights, _computed(rows, chosen, own, network))
    elif spread.capacity_factor is None:
        weights, chosen = spread.send(weights), spread.send(chosen)
        chosen = chosen - jax.lax.axis_index(spread.axis_name) * own
        elsewhere = (chosen < 0) | (chosen >= own)
        chosen, weights = jnp.where(elsewhere, own, chosen), jnp.where(elsewhere, 0, weights)
        y = spread.give_back(
            _sum(weights, _computed(spread.send_tokens(rows), chosen, own, network))
        )
    else:
        sources, slots = spread.slots(chosen, own)
        numbers = (chosen % own).reshape(-1).at[sources].get(mode=_FILL, fill_value=own)
        rows = spread.send_tokens(_taken(top_k, _FILL, rows, sources, slots))
        y = _computed(rows, spread.send(numbers)[:, None], own, network)[:, 0]
        y = _taken(1, _FILL, spread.give_back(y), slots, sources)
        y = _sum(weights, y.reshape(*chosen.shape, y.shape[-1]))
    return y.reshape(*x.shape[:-1], y.shape[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """How devices share tokens and experts.

    Attributes:
      operation: the layer, for errors.
      axis_name: a manual mesh axis that splits both; None for one device.
      capacity_factor: None if each device gathers all tokens, computes its own experts, and the
        sums are scattered. Or rows go to the device of their expert and return: each pair of
        devices has slots for so many times the even share of rows.
      recipe: of the first product. If it rounds each token by itself, tokens travel in 8 bits.
    """

    operation: str
    axis_name: str | None = None
    capacity_factor: float | None = None
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        """Refuses a capacity that is no positive number, or without an axis."""
        factor = self.capacity_factor
        if factor is None:
            return
        is_number = isinstance(factor, Real) and not isinstance(factor, bool)
        if not is_number or not 0 < factor < math.inf:
            needs = "a finite number above 0 is needed"
            self._refuse(needs, "give a multiple of the even share, such as 1.5, or None to gather")
        if self.axis_name is None:
            needs = "devices exchange rows along a mesh axis"
            self._refuse(needs, "give `axis_name` inside `jax.shard_map`, or None on one device")

    def _refuse(self, needs: str, remedy: str) -> None:
        got = f"is {shown(self.capacity_factor)}"
        raise ValueError(message(self.operation, "`capacity_factor`", got, needs, remedy))

    def own(self, experts: int) -> int:
        """Number of experts on this device.

        Raises:
          ValueError: the devices cannot have the same number.
        """
        if self.axis_name is None:
            return experts
        devices = jax.lax.axis_size(self.axis_name)
        if experts % devices:
            needs = f"a multiple of the {devices} devices of axis `{self.axis_name}` is needed"
            remedy = "split experts over another axis, or keep all of them on each device"
            got = f"is {experts}"
            raise ValueError(message(self.operation, "`num_experts`", got, needs, remedy))
        return experts // devices

    def send(self, x: jax.Array) -> jax.Array:
        """The leading axis of all devices, or the parts of it that are for this one."""
        if self.capacity_factor is None:
            return jax.lax.all_gather(x, self.axis_name, tiled=True)
        return self._exchange(x)

    def give_back(self, y: jax.Array) -> jax.Array:
        """The transpose of `send`."""
        if self.capacity_factor is None:
            return jax.lax.psum_scatter(y, self.axis_name, tiled=True)
        return self._exchange(y)

    def _exchange(self, x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, self.axis_name, 0, 0, tiled=True)

    def send_tokens(self, x: jax.Array) -> jax.Array:
        """`send` for tokens [T, D], as codes and scales if the recipe has scales for each."""
        return _in_8_bits(self, x) if _rounds_tokens(self.recipe, x) else self.send(x)

    def slots(self, chosen: jax.Array, own: int) -> tuple[jax.Array, jax.Array]:
        """Which rows go to which device: rows of earlier tokens first.

        Args:
          chosen: experts [T, k].
          own: number of experts on each device.

        Returns:
          The row in each slot [devices * capacity], T k if it is empty; and the slot of each row
          [T k], devices * capacity if it is dropped.
        """
        assert self.axis_name is not None and self.capacity_factor is not None
        devices, (tokens, top_k) = jax.lax.axis_size(self.axis_name), chosen.shape
        most = tokens * min(top_k, own)  # experts of one token differ
        capacity = math.ceil(min(float(self.capacity_factor) * chosen.size / devices, most))
        goal = (chosen // own).reshape(-1)
        order, sizes = jnp.argsort(goal, stable=True), jnp.bincount(goal, length=devices)
        goal = goal[order]
        place = jnp.arange(order.size, dtype=order.dtype) - (jnp.cumsum(sizes) - sizes)[goal]
        slot = jnp.where(place < capacity, goal * capacity + place, devices * capacity)
        slots = jnp.zeros_like(order).at[order].set(slot.astype(order.dtype), **_PERMUTES)
        sources = jnp.full(devices * capacity, order.size, order.dtype)
        return sources.at[slot].set(order, mode="drop"), slots

    def dropped(self, chosen: jax.Array, experts: int) -> jax.Array:
        """Number of rows of this device's tokens without a slot."""
        if self.capacity_factor is None:
            return jnp.zeros((), jnp.int32)
        chosen = chosen.reshape(-1, chosen.shape[-1])
        sources, slots = self.slots(chosen, self.own(experts))
        return (slots == sources.size).sum(dtype=jnp.int32)


def _rounds_tokens(recipe: Recipe | None, x: jax.Array) -> bool:
    """Whether an input has scales of its own for each token."""
    how = None if recipe is None else recipe.activation
    return how is not None and not how.static and how.tiles((1, x.shape[-1]), (1,)).get(0) == 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_8_bits(spread: Spread, x: jax.Array) -> jax.Array:
    """`send` of tokens, which travel as codes and scales; gradients return as they are.

    The product rounds them again. That changes no code of float32 tokens.
    """
    assert spread.recipe is not None and spread.recipe.activation is not None
    codes = spread.recipe.activation.quantize(x, (1,))
    return dequantize(jax.tree.map(functools.partial(dtypes.moved, spread.send), codes), x.dtype)


def _send(spread: Spread, x: jax.Array) -> tuple[jax.Array, None]:
    return _in_8_bits(spread, x), None


def _send_back(spread: Spread, _: None, dy: jax.Array) -> tuple[jax.Array]:
    return (spread.give_back(dy),)


_in_8_bits.defvjp(_send, _send_back)


def _computed(x: jax.Array, chosen: jax.Array, experts: int, network: Network) -> jax.Array:
    """Rows [T, D] through the experts [T, k], as [T, k, D].

    The index `experts` means no expert on this device; such rows give 0.
    """
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    numbers = jnp.arange(order.size, dtype=order.dtype)
    places = jnp.zeros_like(order).at[order].set(numbers, **_PERMUTES)  # the inverse of `order`
    sizes = jnp.bincount(flat, length=experts).astype(jnp.int32)
    y = network(_taken(chosen.shape[1], _INSIDE, x, order, places), sizes)
    back = _taken(1, _INSIDE, y, places, order).reshape(*chosen.shape, y.shape[-1])
    # Rows of nobody may hold anything, and zero times NaN is NaN.
    return jnp.where((chosen < experts)[..., None], back, jnp.zeros((), y.dtype))


def _sum(weights: jax.Array, y: jax.Array) -> jax.Array:
    """The sum over k of weights [T, k] times rows [T, k, D]."""
    total = jnp.einsum("tk,tkd->td", weights, y, preferred_element_type=jnp.float32)
    return total.astype(y.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _taken(top_k: int, mode: str, x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Rows, each `top_k` times, in an order with a known inverse.

    The gradient gathers, too. That of plain indexing would add into rows, one by one on a GPU.
    """
    del inverse
    return _rows(mode, x, order // top_k)


def _rows(mode: str, x: jax.Array, numbers: jax.Array) -> jax.Array:
    return x.at[numbers].get(mode=mode, fill_value=0 if mode == _FILL else None)


def _take(
    top_k: int, mode: str, x: jax.Array, order: jax.Array, inverse: jax.Array
) -> tuple[Any, jax.Array]:
    return _taken(top_k, mode, x, order, inverse), inverse


def _give_back(
    top_k: int, mode: str, inverse: jax.Array, dy: jax.Array
) -> tuple[jax.Array, None, None]:
    rows = _rows(mode, dy, inverse)
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
