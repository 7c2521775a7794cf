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
Layer = tuple[str, str, str, Shape]  # path, kind, recipe and shape of a row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a layer of linen or nnx, in floats and in 8 bits."""

    # path, kind: of the layer.
    path: str
    kind: str
    recipe: Recipe | TrainingRecipe  # for inference or for training
    wide: Any  # the weight in floats
    held: Any = None  # the weight as the layer holds it; not for training
    is_known: bool = True  # whether `wide` was never rounded. If not, its error is not measured
    x: Any = None  # the input in floats
    # Dimension numbers of the product; None if rows of the weight are looked up.
    numbers: DimensionNumbers | None = None
    scale: Any = None  # of the activations of a static recipe
    # Delayed scalings of activations and weight.
    state: tuple[Scaling | None, Scaling | None] = (None, None)

    @property
    def layer(self) -> Layer:
        """The name of its row."""
        recipe = self.recipe
        name = recipe.name if isinstance(recipe, Recipe) else type(recipe).__name__
        return self.path, self.kind, name, tuple(self.wide.shape)

    def operands(self) -> dict[str, Any]:
        """Each operand in floats and in 8 bits; and an FP8 weight that is rounded once more."""
        recipe, held, activation, second = self.recipe, self.held, None, None
        if self.numbers is not None:
            (axes, contracting), (batch, shared) = self.numbers
            if isinstance(recipe, Recipe):
                narrow: Any = recipe.quantize_activation(self.x, axes, batch, scale=self.scale)
                second = _second_rounding(recipe, held, tuple(contracting))
            else:
                of_input, of_weight = self.state
                narrow = forward_codes(recipe, self.x, of_input, tuple(axes), tuple(batch))
                sums = tuple(contracting), tuple(shared)
                held = forward_codes(recipe, self.wide, of_weight, *sums, is_weight=True)
            activation = (self.x, narrow)
        weight = (self.wide, held) if self.is_known else None
        return {"weight": weight, "activation": activation, "second": second}


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

    def layer(self, call: Call, *, exact: jax.Array, got: jax.Array) -> None:
        """Notes one call of a layer; `exact` and `got` are outputs of floats and of 8 bits."""
        sums = _call_sums(exact, got, **call.operands())
        jax.debug.callback(functools.partial(self._note, call.layer), sums)
        self._tell(call.path)

    def layer_of(self, call: Call, *, exact: jax.Array, got: jax.Array) -> jax.Array:
        """As `layer`, noted when the returned value, `exact`, is computed.

        For places without separate callbacks: linen's scan lets only its outputs depend on its
        inputs.
        """
        layer = call.layer

        def note(sums: Any) -> np.ndarray:
            self._note(layer, sums)
            return np.zeros((), np.float32)

        sums = _call_sums(exact, got, **call.operands())
        zero = jax.ShapeDtypeStruct((), jnp.float32)
        noted = jax.pure_callback(note, zero, sums, vmap_method="sequential")
        self._tell(call.path)
        return exact + noted.astype(exact.dtype)

    def rows(self) -> list[LayerError]:
        """A row for each layer; call it after the model has run."""
        jax.effects_barrier()
        return [_row(layer, calls) for layer, calls in self._seen.items()]

    def _note(self, layer: Layer, sums: Any) -> None:
        self._seen.setdefault(layer, []).append(jax.tree.map(float, sums))

    def _tell(self, path: str) -> None:
        if path not in self._begun:
            self._begun.add(path)
            self._done(path)


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
    path, kind, recipe, shape = layer
    return LayerError(
        path=path,
        kind=kind,
        recipe=recipe,
        shape=shape,
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

    totals = tuple(x.astype(jnp.float32) for x in (*sums, *tops))
    zeros = (jnp.float32(0),) * len(totals)
    for axis in reversed(range(totals[0].ndim)):
        totals = tuple(jax.lax.reduce(totals, zeros, joined, (axis,)))
    return totals


def _extremes(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The least and the largest scale; infinity and 0 if there is none."""

    def joined(a: Any, b: Any) -> Any:
        return jax.lax.min(a[0], b[0]), jax.lax.max(a[1], b[1])

    start = (jnp.float32(math.inf), jnp.float32(0))
    low, high = jax.lax.reduce((scale, scale), start, joined, tuple(range(scale.ndim)))
    return low, high
