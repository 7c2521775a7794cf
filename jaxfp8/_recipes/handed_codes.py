"""An optimiser that hands over the codes of the weights that it has updated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

Optimiser = TypeVar("Optimiser", bound=Any)


class HandedCodes(NamedTuple):
    """The state of `with_codes`.

    Attributes:
      inner: the state of the optimiser.
      codes: those of the weights after the update, for the next step.
    """

    inner: Any
    codes: Any


def with_codes(optimiser: Optimiser, encode: Callable[..., Any]) -> Optimiser:
    """The optimiser, with the codes of the updated weights in its state.

    codes = encode(weights + updates). The next step reads them as `state.codes` and encodes
    nothing. Its numbers are those of a step that encodes its weights. Inside one `jax.jit` the
    sum is that of `optax.apply_updates`, so it is computed and stored once.

    Args:
      optimiser: an `optax.GradientTransformation`.
      encode: a function of weights, such as one that calls `encode_weight` on each. It gets the
        keywords of `update` too, such as the next scales of `DelayedScaling`; it needs defaults
        for them, since `init` has none.

    Returns:
      An `optax.GradientTransformation`; its state is a `HandedCodes`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8, optax
      >>> numbers, recipe = (((1,), (0,)), ((), ())), jaxfp8.CurrentScaling()
      >>> encode = lambda w: jaxfp8.encode_weight(w, numbers, recipe=recipe)
      >>> optimiser = jaxfp8.with_codes(optax.sgd(0.1), encode)
      >>> @jax.jit
      ... def step(w, state, x):
      ...     def loss(w):
      ...         more = {"recipe": recipe, "rhs_codes": state.codes}
      ...         return jnp.sum(jaxfp8.fp8_dot_general(x, w, numbers, **more) ** 2)
      ...
      ...     updates, state = optimiser.update(jax.grad(loss)(w), state, w)
      ...     return optax.apply_updates(w, updates), state
      >>> w, x = jnp.full((32, 16), 0.01), jnp.ones((8, 32))
      >>> w, state = step(w, optimiser.init(w), x)
      >>> bool(jnp.all(state.codes.forward.values == encode(w).forward.values))
      True
    """

    def init(weights: Any) -> HandedCodes:
        return HandedCodes(optimiser.init(weights), encode(weights))

    def update(gradients: Any, state: HandedCodes, weights: Any, **scales: Any) -> Any:
        import optax  # noqa: PLC0415 (whoever has an optimiser has it)

        updates, inner = optimiser.update(gradients, state.inner, weights)
        return updates, HandedCodes(inner, encode(optax.apply_updates(weights, updates), **scales))

    made: Optimiser = optimiser._replace(init=init, update=update)
    return made
