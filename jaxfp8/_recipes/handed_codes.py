"""An optimiser that hands over the codes of the weights that it has updated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class HandedCodes(NamedTuple):
    """The state of `with_codes`.

    Attributes:
      inner: the state of the optimiser.
      codes: those of the weights after the update, for the next step.
    """

    inner: Any
    codes: Any


def with_codes(optimiser: Any, encode: Callable[..., Any]) -> Any:
    """The optimiser, with the codes of the updated weights in its state.

    codes = encode(weights + updates). The next step reads them as `state.codes` and encodes
    nothing. Its numbers are those of a step that encodes its weights. Inside one `jax.jit` the
    sum is that of `optax.apply_updates`, so it is computed and stored once.

    Wrap the whole chain: a transformation behind this one changes the updates after they were
    encoded. After a change of the weights by hand, `state._replace(codes=encode(weights))`.

    Args:
      optimiser: an `optax.GradientTransformation`.
      encode: a function of weights, such as one that calls `encode_weight` on each. If `update`
        gets `scales`, such as the next ones of `DelayedScaling`, it gets them too; it needs a
        default for them, since `init` has none. Other keywords go to the optimiser.

    Returns:
      An `optax.GradientTransformationExtraArgs`; its state is a `HandedCodes`.

    Raises:
      ValueError: `update` was called without the weights.

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
    import optax  # noqa: PLC0415 (whoever has an optimiser has it)

    inner_update = optax.with_extra_args_support(optimiser).update

    def init(params: Any) -> HandedCodes:
        return HandedCodes(optimiser.init(params), encode(params))

    def update(
        updates: Any, state: HandedCodes, params: Any = None, *, scales: Any = None, **more: Any
    ) -> tuple[Any, HandedCodes]:
        if params is None:
            raise ValueError(
                "`with_codes`: `update` got no weights, and their codes are those after the "
                "update; call `optimiser.update(gradients, state, weights)`"
            )
        updates, inner = inner_update(updates, state.inner, params, **more)
        given = {} if scales is None else {"scales": scales}
        return updates, HandedCodes(inner, encode(optax.apply_updates(params, updates), **given))

    return optax.GradientTransformationExtraArgs(init, update)
