"""The cases of FP8 training's encodings: alone, and fused behind the operation before."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8
from jaxfp8._bench import _decoder
from jaxfp8._bench._case import Case
from jaxfp8._bench._gpu_operands import copies, normal
from jaxfp8._bench._measure import Contender, over_copies
from jaxfp8._bench._problems import E4M3
from jaxfp8._call.ops.produce_call import quantize_produced
from jaxfp8._call.ops.quantize_call import encode
from jaxfp8._call.reference.produce_reference import NormForm, ProduceSpec

_WIDTH, _HIDDEN = 4096, 14336  # of Llama-3-8B
_BF16 = np.dtype(jnp.bfloat16)
_FORM = NormForm(has_gain=True, rounded_first=True)


def table() -> Iterator[tuple[str, Callable[[], Case]]]:
    """The figures of docs/measurements.md."""
    for scales in (1, 3):
        yield f"encode rmsnorm x{scales} 8192", functools.partial(_rms, 8192, scales)
    yield "encode residual rmsnorm x3 8192", functools.partial(_residual, 8192, 3)
    yield "encode silu gate 8192", functools.partial(_gate, 8192)
    yield "encode weight 14336", functools.partial(_weight, _HIDDEN)
    yield "encode training step 8192", functools.partial(_step, 8192)


def _spec(scales: int = 1, **more: Any) -> ProduceSpec:
    return ProduceSpec(
        dtype=np.dtype(E4M3), row_dtype=_BF16, scales=scales, transpose_from=1, **more
    )


def _scales(count: int) -> list[jax.Array]:
    return [jnp.full((1, 1), 0.01 + i / 1000, jnp.float32) for i in range(count)]


def _encoded(y: jax.Array, *scales: jax.Array) -> list[Any]:
    """By one call for each scale, as `DelayedScaling` does it."""
    found = [encode(y, E4M3, scale.reshape(()), 1) for scale in scales]
    return [(one.codes, one.transposed, one.amax) for one in found]


def _normed(x: jax.Array, gain: jax.Array, *scales: jax.Array) -> list[jax.Array]:
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
    spec = _spec(norm=_FORM, scales=len(scales))
    return quantize_produced(x, inverse, gain, *scales, spec=spec)


def _case(name: str, ours: Any, xla: Any, operands: list[tuple], nbytes: float) -> Case:
    contenders = {
        "one call": over_copies(ours, operands),
        "xla, then encode": over_copies(xla, operands),
    }
    return Case(name=name, contenders=contenders, bytes=nbytes)


def _rms(m: int, scales: int) -> Case:
    """RMSNorm, its sums by XLA, and codes in both layouts for each scale."""
    size = 1.0 * m * _WIDTH
    gain, given = 1 + normal(7, _WIDTH) / 8, _scales(scales)
    operands = [
        (normal(i, m, _WIDTH), gain, *given) for i in range(copies((2 + 2 * scales) * size))
    ]
    return _case(
        f"RMSNorm, {scales} x FP8 codes in both layouts {m} x {_WIDTH}",
        _normed,
        lambda x, gain, *scales: _encoded(_decoder.normed(x, gain), *scales),
        operands,
        (2 + 2 * scales) * size,
    )


def _residual(m: int, scales: int) -> Case:
    """The same behind a residual sum, as in a decoder layer."""
    size = 1.0 * m * _WIDTH
    gain, given = 1 + normal(7, _WIDTH) / 8, _scales(scales)
    count = copies((6 + 2 * scales) * size)
    operands = [
        (normal(2 * i, m, _WIDTH), normal(2 * i + 1, m, _WIDTH), gain, *given) for i in range(count)
    ]
    return _case(
        f"sum, RMSNorm, {scales} x FP8 codes in both layouts {m} x {_WIDTH}",
        lambda x, y, *others: (x + y, _normed(x + y, *others)),
        lambda x, y, gain, *scales: (x + y, _encoded(_decoder.normed(x + y, gain), *scales)),
        operands,
        (6 + 2 * scales) * size,
    )


def _gate(m: int) -> Case:
    size = 1.0 * m * _HIDDEN
    spec, given = _spec(activation="silu", has_factor=True), _scales(1)
    operands = [
        (normal(2 * i, m, _HIDDEN), normal(2 * i + 1, m, _HIDDEN), *given) for i in range(2)
    ]
    return _case(
        f"silu(a) b, FP8 codes in both layouts {m} x {_HIDDEN}",
        functools.partial(quantize_produced, spec=spec),
        lambda a, b, scale: _encoded(jax.nn.silu(a) * b, scale),
        operands,
        6 * size,
    )


def _weight(n: int) -> Case:
    """A master weight in float32; FP8 training rounds it to bfloat16 first."""
    size = 1.0 * n * _WIDTH
    given = _scales(1)
    operands = [(normal(i, _WIDTH, n).astype(jnp.float32), *given) for i in range(2)]
    return _case(
        f"float32 weight, FP8 codes in both layouts {_WIDTH} x {n}",
        functools.partial(quantize_produced, spec=_spec()),
        lambda w, scale: _encoded(w.astype(jnp.bfloat16), scale),
        operands,
        6 * size,
    )


def _step(m: int) -> Case:
    """Gradients of a decoder layer without attention, as written and rewritten."""
    recipe = jaxfp8.DelayedScaling(amax_history_length=16)
    names = {"q": (_WIDTH, _WIDTH), "k": (_WIDTH, 1024), "v": (_WIDTH, 1024), "o": (_WIDTH, _WIDTH)}
    names |= {"gate": (_WIDTH, _HIDDEN), "up": (_WIDTH, _HIDDEN), "down": (_HIDDEN, _WIDTH)}
    weights = {
        name: normal(i, *shape).astype(jnp.float32) / np.sqrt(shape[0])
        for i, (name, shape) in enumerate(names.items())
    }
    states = {name: jaxfp8.ScalingState.init(recipe) for name in names}
    gains = [1 + normal(7 + i, _WIDTH) / 8 for i in range(2)]
    x = normal(9, m, _WIDTH)

    def layer(weights: Any, states: Any, gains: Any, x: jax.Array) -> jax.Array:
        def dot(name: str, y: jax.Array) -> jax.Array:
            w = weights[name].astype(jnp.bfloat16)
            return jaxfp8.fp8_dot_general(
                y, w, (((1,), (0,)), ((), ())), states[name], recipe=recipe
            )

        y = _decoder.normed(x, gains[0])
        few = dot("k", y) * dot("v", y)
        x = x + dot("o", dot("q", y) * jnp.tile(few, (1, _WIDTH // few.shape[1])))
        y = _decoder.normed(x, gains[1])
        x = x + dot("down", jax.nn.silu(dot("gate", y)) * dot("up", y))
        return jnp.square(x.astype(jnp.float32)).mean()

    step = jax.grad(layer, (0, 1, 2, 3))

    def timed(step: Any) -> Contender:
        jitted = jax.jit(step)
        return Contender(lambda: jitted(weights, states, gains, x), units=1)

    contenders = {"rewritten": timed(jaxfp8.rewrite(step)), "as written": timed(step)}
    flops = 6.0 * m * sum(a * b for a, b in names.values())
    return Case(
        name=f"gradients of a layer without attention, M = {m}", contenders=contenders, flops=flops
    )
