"""Measures the error of each layer in 8 bits, while a model runs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._ops import int8_compute
from jaxfp8._ops.quantize import dequantize
from jaxfp8._recipes.accuracy_report import LayerError, OperandError, SecondRounding
from jaxfp8._recipes.recipes import Recipe, TrainingRecipe
from jaxfp8._recipes.scaling import Scaling
from jaxfp8._recipes.training_codes import forward_codes
from jaxfp8._value.accuracy import Error, pooled
from jaxfp8._value.dtypes import finite_range, is_float8
from jaxfp8._value.prepared import EightBitArray, PreparedArray, is_held, stored
from jaxfp8._value.qarray import QArray, scale_and_zero_point
from jaxfp8._value.spec import DimensionNumbers, Shape
from jaxfp8._value.tiles import map_tiles
from jaxfp8._value.transposed import TransposedArray

Pair = tuple[Any, Any]  # an operand in floats, and as the product takes it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer, as its row names it; the fields are those of `LayerError`."""

    path: str
    kind: str
    recipe: str
    shape: Shape


def operands(
    recipe: Recipe | TrainingRecipe,
    numbers: DimensionNumbers,
    x: jax.Array,
    wide: Any,
    held: Any,
    *,
    scale: Any = None,
    state: tuple[Scaling | None, Scaling | None] = (None, None),
) -> dict[str, Any]:
    """Both operands of the product of a layer, in floats and as the product takes them.

    Args:
      recipe: for inference or for training.
      numbers: dimension numbers of activations and weight.
      x: the activations in floats.
      wide: the weight in floats; None if that is unknown.
      held: the weight as the layer holds it.
      scale: of the activations of a static recipe.
      state: delayed scalings of activations and weight.

    Returns:
      The arguments `weight`, `activation` and `second` of `Recorder.layer`.
    """
    (axes, contracting), (batch, shared) = numbers
    second = None
    if isinstance(recipe, Recipe):
        narrow: Any = recipe.quantize_activation(x, axes, batch, scale=scale)
        second = _second_rounding(recipe, held, tuple(contracting))
    else:
        narrow = forward_codes(recipe, x, state[0], tuple(axes), tuple(batch))
        held = forward_codes(recipe, wide, state[1], tuple(contracting), tuple(shared))
    weight = None if wide is None else (wide, held)
    return {"weight": weight, "activation": (x, narrow), "second": second}


def _second_rounding(
    recipe: Recipe, weight: Any, contracting: Shape
) -> tuple[EightBitArray, Shape] | None:
    """An FP8 weight rounded once more, to int8, and the contracted axes of its product.

    None if the recipe multiplies it as stored.
    """
    if recipe.compute is None or not isinstance(weight, EightBitArray):
        return None
    codes = stored(weight.packed if isinstance(weight, PreparedArray) else weight)
    return (weight, contracting) if is_float8(codes.qvalue.dtype) else None


class Recorder:
    """Collects errors of layers while a model runs, traced or not, in loops or under vmap.

    Args:
      done: called with the path of each layer when its first call is measured.
    """

    def __init__(self, done: Callable[[str], None] = lambda path: None) -> None:
        self._seen: dict[Layer, list[Any]] = {}
        self._done, self._begun = done, set[str]()

    def layer(
        self,
        layer: Layer,
        *,
        exact: jax.Array,
        got: jax.Array,
        weight: Pair | None = None,
        activation: Pair | None = None,
        second: tuple[Any, Shape] | None = None,
    ) -> None:
        """Note one call of a layer.

        Args:
          layer: the recorded layer.
          exact, got: output of the float layer and of the 8-bit one, on one input.
          weight, activation: the float operand and what the product takes in its place; None, or
            a pair without an 8-bit array, where it is not in 8 bits.
          second: an FP8 weight that is rounded once more, and the axes that its product sums over.
        """
        sums = _call_sums(exact, got, second, weight=weight, activation=activation)
        jax.debug.callback(functools.partial(self._note, layer), sums)
        self._tell(layer)

    def layer_of(self, layer: Layer, **operands: Any) -> jax.Array:
        """As `layer`, noted when the returned value, `exact`, is computed.

        For places without separate callbacks: linen's scan lets only its outputs depend on its
        inputs.
        """

        def note(sums: Any) -> np.ndarray:
            self._note(layer, sums)
            return np.zeros((), np.float32)

        sums, exact = _call_sums(**operands), operands["exact"]
        zero = jax.ShapeDtypeStruct((), jnp.float32)
        noted = jax.pure_callback(note, zero, sums, vmap_method="sequential")
        self._tell(layer)
        return exact + noted.astype(exact.dtype)

    def rows(self) -> list[LayerError]:
        """A row for each layer; call it after the model has run."""
        jax.effects_barrier()
        return [_row(layer, calls) for layer, calls in self._seen.items()]

    def _note(self, layer: Layer, sums: Any) -> None:
        self._seen.setdefault(layer, []).append(jax.tree.map(float, sums))

    def _tell(self, layer: Layer) -> None:
        if layer.path not in self._begun:
            self._begun.add(layer.path)
            self._done(layer.path)


def _call_sums(
    exact: jax.Array,
    got: jax.Array,
    second: tuple[Any, Shape] | None = None,
    **operands: Pair | None,
) -> dict[str, Any]:
    """The sums of one call."""
    sums = {"output": _error_sums(exact, got)}
    if second is not None:
        sums["second"] = _second_sums(*second)
    for name, pair in operands.items():
        if pair is not None and is_held(pair[1]):
            sums[name] = _operand_sums(*_as_stored(*pair))
    return sums


def _as_stored(x: jax.Array, q: EightBitArray) -> tuple[jax.Array, QArray]:
    """An operand with its axes as the codes lie."""
    if isinstance(q, PreparedArray):
        return _as_stored(x, q.unprepare())
    if isinstance(q, TransposedArray):
        return x.transpose(np.argsort(q.axes).tolist()), q.stored
    return x, q


def _row(layer: Layer, calls: list[Any]) -> LayerError:
    return LayerError(
        **dataclasses.asdict(layer),
        calls=len(calls),
        output=pooled(_error(call["output"]) for call in calls),
        weight=_operand([call["weight"] for call in calls if "weight" in call]),
        activation=_operand([call["activation"] for call in calls if "activation" in call]),
        second=_second([call["second"] for call in calls if "second" in call]),
    )


def _error(sums: tuple[float, float, float]) -> Error:
    signal, noise, largest = sums
    return Error(signal=signal, noise=noise, max_abs=largest)


def _operand(calls: list[Any]) -> OperandError | None:
    """One operand over several calls; None if it never was in 8 bits."""
    if not calls:
        return None
    count, past, lost = (sum(call["shares"][i] for call in calls) for i in range(3))
    return OperandError(
        error=pooled(_error(call["error"]) for call in calls),
        amax=float(np.max([call["amax"] for call in calls])),
        scale=(min(call["scale"][0] for call in calls), max(call["scale"][1] for call in calls)),
        saturated=past / max(count, 1),
        underflowed=lost / max(count, 1),
    )


def _second(calls: list[Any]) -> SecondRounding | None:
    """The second rounding of a weight; all calls have the same."""
    if not calls:
        return None
    error, lines, lossy, worst = calls[0]
    return SecondRounding(
        error=_error(error), lines=int(lines), lossy_lines=int(lossy), worst=worst
    )


# These are jitted: XLA compiles each once for all layers of a shape. As single operations they are
# 35 programs a shape.


@functools.partial(jax.jit, static_argnums=1)
def _second_sums(q: Any, contracting: Shape) -> Any:
    """The errors of an FP8 weight in int8; number of lines, of lossy ones, the largest share."""
    x = dequantize(q, jnp.float32)
    codes, scale = int8_compute.rounded(x, contracting)
    lost = int8_compute.lost(x, contracting)
    lossy = jnp.sum(lost > int8_compute.MANY_LOST)
    error = _error_sums(x, codes.astype(jnp.float32) * scale)
    return error, lost.size, lossy, jnp.max(lost, initial=0)


@jax.jit
def _error_sums(exact: jax.Array, got: jax.Array) -> Any:
    """Signal, noise and largest difference, in float32."""
    exact, got = exact.astype(jnp.float32), got.astype(jnp.float32)
    difference = got - exact
    return _reduced((exact**2, difference**2), (jnp.abs(difference),))


@jax.jit
def _operand_sums(x: jax.Array, q: QArray) -> dict[str, Any]:
    """The same of an operand; number of values, saturated and underflowed ones; amax, scales."""
    x = x.astype(jnp.float32)
    rounded = dequantize(q, jnp.float32)
    scale, zero, tiles = scale_and_zero_point(q)
    low, high = finite_range(q.qvalue.dtype)
    shared = [scale] if zero is None else [scale, zero]

    def is_past(x: jax.Array, scale: jax.Array, zero: Any = 0) -> jax.Array:
        # Half a step past the last code still rounds to it.
        steps = x / jnp.where(scale == 0, 1, scale) + zero
        slack = 0.5 if jnp.issubdtype(q.qvalue.dtype, jnp.integer) else high / 32
        return (steps > high + slack) | (steps < low - slack)

    past, lost = map_tiles(is_past, x, shared, tiles), (x != 0) & (rounded == 0)
    finite = jnp.abs(jnp.where(jnp.isfinite(x), x, 0))
    difference = jnp.abs(rounded - x)
    signal, noise, past, lost, largest, amax = _reduced(
        (x**2, difference**2, past, lost), (difference, finite)
    )
    return {
        "error": (signal, noise, largest),
        "shares": (x.size, past, lost),
        "amax": amax,
        "scale": _extremes(scale.astype(jnp.float32)),
    }


def _reduced(sums: tuple[jax.Array, ...], tops: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Sums of some arrays of one shape, and the largest values of others, none of them negative.

    All in one reduction, since XLA compiles five times faster than for one each. It sums
    one after another, so the last axis goes first: no float32 sum has more terms than an axis.
    """
    count = len(sums)

    def joined(a: Any, b: Any) -> Any:
        added = [jax.lax.add(*pair) for pair in zip(a[:count], b[:count], strict=True)]
        larger = [jax.lax.max(*pair) for pair in zip(a[count:], b[count:], strict=True)]
        return (*added, *larger)

    found = tuple(x.astype(jnp.float32) for x in (*sums, *tops))
    zeros = (jnp.float32(0),) * len(found)
    for axis in reversed(range(found[0].ndim)):
        found = tuple(jax.lax.reduce(found, zeros, joined, (axis,)))
    return found


def _extremes(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The least and the largest scale; infinity and 0 if there is none."""

    def joined(a: Any, b: Any) -> Any:
        return jax.lax.min(a[0], b[0]), jax.lax.max(a[1], b[1])

    start = (jnp.float32(math.inf), jnp.float32(0))
    low, high = jax.lax.reduce((scale, scale), start, joined, tuple(range(scale.ndim)))
    return low, high
