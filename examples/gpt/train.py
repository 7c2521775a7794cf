"""Training: one recipe, AdamW, a curve of losses, checkpoints that a run resumes from."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
from flax.training.train_state import TrainState

import jaxfp8
import jaxfp8.linen
from gpt import text
from gpt.model import GPT, Config

RECIPES: dict[str, Any] = {
    "bf16": None,
    "delayed": jaxfp8.DelayedScaling(),
    "current": jaxfp8.CurrentScaling(),
    "row": jaxfp8.CurrentScaling(granularity="row"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One training run.

    Attributes:
      recipe: a key of `RECIPES`.
      config: sizes of the model.
      steps: number of steps.
      batch: texts in a step.
      rate: the highest learning rate.
      seed: of the initial weights and the data.
    """

    recipe: str
    config: Config = Config()  # noqa: RUF009 - frozen
    steps: int = 500
    batch: int = 8
    rate: float = 1e-3
    seed: int = 0


# What a state holds besides arrays is the same object for the same run: it is compiled once.
@functools.lru_cache
def model_of(run: Run) -> GPT:
    """The model of a run: Flax's layers, and in them the recipe's product."""
    recipe = RECIPES[run.recipe]
    product = recipe and functools.partial(jaxfp8.linen.Fp8DirectDotGeneralOp, recipe=recipe)
    dense = functools.partial(nn.Dense, dtype=jnp.bfloat16, dot_general_cls=product)
    embed = functools.partial(
        nn.Embed, dtype=jnp.bfloat16, embedding_init=nn.initializers.normal(0.02)
    )
    return GPT(dataclasses.replace(run.config, dense=dense, embed=embed))


@functools.lru_cache
def optimiser_of(run: Run) -> optax.GradientTransformation:
    """AdamW with clipped gradients, warmed up and then on a cosine."""
    warmup = min(50, max(run.steps // 10, 1))
    schedule = optax.warmup_cosine_decay_schedule(0, run.rate, warmup, run.steps, run.rate / 10)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))


def first_state(run: Run) -> TrainState:
    """The state before the first step."""
    model, optimiser = model_of(run), optimiser_of(run)
    tokens = jnp.zeros((1, run.config.length), jnp.int32)
    variables = jax.jit(model.init)(jax.random.key(run.seed), tokens)
    # With nothing to overwrite, TrainState wants the parameters on their own.
    params = variables if "_overwrite_with_gradient" in variables else variables["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimiser)
    return state.replace(step=jnp.zeros((), jnp.int32))


def variables_of(params: Any) -> Any:
    """Variables of the model, whichever way TrainState keeps them."""
    return params if "_overwrite_with_gradient" in params else {"params": params}


def loss_of(apply: Callable[..., jax.Array], params: Any, tokens: jax.Array) -> jax.Array:
    """Mean negative log-likelihood of the next byte, in nats."""
    logits = apply(variables_of(params), tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@functools.partial(jax.jit, donate_argnums=0)
def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    """One step of the optimiser, which also writes the next scaling states."""
    loss, gradients = jax.value_and_grad(functools.partial(loss_of, state.apply_fn))(
        state.params, tokens
    )
    return state.apply_gradients(grads=gradients), loss


def train(
    run: Run,
    state: TrainState,
    until: int | None = None,
    report: Callable[[int, float], None] | None = None,
) -> tuple[TrainState, list[float]]:
    """Trains from where `state` is to step `until` (default: the end); the loss of each step."""
    training, _ = text.load()
    losses = []
    for number in range(int(state.step), run.steps if until is None else until):
        tokens = text.batch(training, run.batch, run.config.length, seed=number + 1)
        state, loss = step(state, tokens)
        losses.append(float(loss))
        if report is not None:
            report(number, losses[-1])
    return state, losses


def evaluate(state: TrainState, run: Run, batches: int = 8) -> float:
    """Mean loss on text that was not trained on."""
    _, validation = text.load()
    loss = jax.jit(functools.partial(loss_of, state.apply_fn))
    windows = (text.batch(validation, 16, run.config.length, seed=i) for i in range(batches))
    return float(np.mean([loss(state.params, tokens) for tokens in windows]))


def save(state: TrainState, folder: pathlib.Path) -> None:
    """Writes weights, optimiser and scaling states to a folder that must not exist."""
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), _arrays(state))


def restore(run: Run, folder: pathlib.Path) -> TrainState:
    """The state that was saved, ready to continue the same run."""
    fresh = jax.eval_shape(lambda: first_state(run))
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        arrays = checkpointer.restore(folder.absolute(), _arrays(fresh))
    return fresh.replace(**arrays)


def _arrays(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "params": state.params, "opt_state": state.opt_state}
