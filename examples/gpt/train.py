"""Training: one recipe, AdamW, a curve of losses, checkpoints that a run resumes from."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
from flax.training.train_state import TrainState

import jaxfp8
import jaxfp8.linen
from gpt import mesh, text
from gpt.model import GPT, Config

RECIPES: dict[str, Any] = {
    "bf16": None,
    "delayed": jaxfp8.DelayedScaling(),
    "current": jaxfp8.CurrentScaling(),
    "row": jaxfp8.CurrentScaling(granularity="channel"),
    "block": jaxfp8.CurrentScaling(granularity="block"),
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
      seed: of the initial weights.
      mesh: the devices, as `mesh.make` reads them; "" for one.
    """

    recipe: str
    config: Config = Config()  # noqa: RUF009 - frozen
    steps: int = 500
    batch: int = 8
    rate: float = 1e-3
    seed: int = 0
    mesh: str = ""


# What a state holds besides arrays is the same object for the same run: it is compiled once.
@functools.lru_cache
def model_of(run: Run) -> GPT:
    """The model of a run: Flax's layers, and in them the recipe's product."""
    recipe, devices = RECIPES[run.recipe], mesh.make(run.mesh)
    product = recipe and functools.partial(jaxfp8.linen.Fp8DirectDotGeneralOp, recipe=recipe)
    dense = functools.partial(nn.Dense, dtype=jnp.bfloat16, dot_general_cls=product)
    embed = functools.partial(
        nn.Embed,
        dtype=jnp.bfloat16,
        embedding_init=nn.initializers.normal(0.02),
        promote_dtype=functools.partial(mesh.of_table, devices),
    )
    attention: Literal["xla", "cudnn"] = "cudnn" if jax.default_backend() == "gpu" else "xla"
    config = dataclasses.replace(
        run.config,
        dense=dense,
        embed=embed,
        policy=jaxfp8.codes_saveable,  # saves nothing in bfloat16
        place=functools.partial(jax.lax.with_sharding_constraint, shardings=mesh.of_texts(devices)),
        attention=attention,
    )
    return GPT(config)


@functools.lru_cache
def optimiser_of(run: Run) -> optax.GradientTransformation:
    """AdamW with clipped gradients, warmed up and then on a cosine."""
    warmup = min(50, max(run.steps // 10, 1))
    steps = max(run.steps, warmup + 1)
    schedule = optax.warmup_cosine_decay_schedule(0, run.rate, warmup, steps, run.rate / 10)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))


def first_state(run: Run) -> TrainState:
    """The state before the first step; each device of a mesh makes its own part."""
    make = functools.partial(_first_state, run)
    return jax.jit(make, out_shardings=_shardings(run))()


@functools.lru_cache
def _shardings(run: Run) -> Any:
    """Where the state of a run lies."""
    return mesh.of_state(mesh.make(run.mesh), jax.eval_shape(lambda: _first_state(run)))


def _first_state(run: Run) -> TrainState:
    model, optimiser = model_of(run), optimiser_of(run)
    tokens = jnp.zeros((1, run.config.length), jnp.int32)
    variables = model.init(jax.random.key(run.seed), tokens)
    # With nothing to overwrite, TrainState wants the parameters on their own.
    params = variables if "_overwrite_with_gradient" in variables else variables["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimiser)
    return state.replace(step=jnp.zeros((), jnp.int32))


def variables_of(params: Any) -> Any:
    """Variables of the model, whichever way TrainState keeps them."""
    return params if "_overwrite_with_gradient" in params else {"params": params}


def loss_of(apply: Callable[..., jax.Array], params: Any, tokens: jax.Array) -> jax.Array:
    """Mean negative log-likelihood of the next token, in nats."""
    logits = apply(variables_of(params), tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@functools.lru_cache
def step_of(run: Run) -> Callable[..., tuple[TrainState, jax.Array]]:
    """The jitted step of a run; the state lies after it where it lay before."""
    return jax.jit(step, donate_argnums=0, out_shardings=(_shardings(run), None))


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
    training, _ = text.load(vocabulary=run.config.vocabulary)
    split, losses = mesh.of_texts(mesh.make(run.mesh)), []
    for number in range(int(state.step), run.steps if until is None else until):
        tokens = text.batch(training, run.batch, run.config.length, seed=number + 1)
        state, loss = step_of(run)(state, jax.device_put(tokens, split))
        losses.append(float(loss))
        if report is not None:
            report(number, losses[-1])
    return state, losses


def evaluate(state: TrainState, run: Run, batches: int = 8) -> float:
    """Mean loss on text that was not trained on."""
    _, validation = text.load(vocabulary=run.config.vocabulary)
    loss = jax.jit(functools.partial(loss_of, state.apply_fn))
    windows = (text.batch(validation, 16, run.config.length, seed=i) for i in range(batches))
    return float(np.mean([loss(state.params, tokens) for tokens in windows]))


def train_with_checkpoints(
    run: Run,
    folder: pathlib.Path,
    report: Callable[[int, float], None] | None = None,
    parts: int = 4,
) -> tuple[TrainState, list[float]]:
    """Trains to the end, from the newest checkpoint in a folder or from the start.

    A run that was killed goes on where its last checkpoint was, on the same mesh or another one.

    Args:
      run: the run; only its mesh may differ from that of the checkpoints.
      folder: of the checkpoints, one folder each, named by their step.
      report: called with the number and the loss of each step.
      parts: how many checkpoints a whole run leaves.

    Returns:
      The last state, and the losses of all steps.

    Raises:
      ValueError: the folder has checkpoints of another run.
    """
    _own(run, folder)
    last = newest(folder)
    state, losses = (first_state(run), []) if last is None else (restore(run, last), _losses(last))
    for part in range(1, parts + 1):
        end = run.steps * part // parts
        if end > len(losses):
            state, more = train(run, state, end, report)
            losses += more
            _keep(state, losses, folder / str(end))
    return state, losses


def why_not_in(run: Run, folder: pathlib.Path) -> str | None:
    """Why the checkpoints of a folder do not belong to a run."""
    facts, file = _facts(run), folder / "run.json"
    there = json.loads(file.read_text()) if file.exists() else facts
    differing = [
        f"{name} {there[name]}, not {facts[name]}" for name in facts if there[name] != facts[name]
    ]
    return f"`--out`: {folder} has a run with {'; '.join(differing)}" if differing else None


def _own(run: Run, folder: pathlib.Path) -> None:
    """Says in a folder whose checkpoints it has; an error if it has those of another run."""
    if wrong := why_not_in(run, folder):
        raise ValueError(wrong)
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / "run.json.new"  # other processes may read the file now
        unfinished.write_text(json.dumps(_facts(run)))
        unfinished.replace(folder / "run.json")


def _facts(run: Run) -> dict[str, Any]:
    """What decides the losses of a run; its mesh moves roundings alone."""
    sizes = ("layers", "width", "heads", "length", "vocabulary")
    names = ("recipe", "steps", "batch", "rate", "seed")
    return {n: getattr(run, n) for n in names} | {n: getattr(run.config, n) for n in sizes}


def newest(folder: pathlib.Path) -> pathlib.Path | None:
    """The checkpoint of the highest step in a folder; None where there is none."""
    steps = [path for path in folder.glob("*") if path.name.isdigit()]
    return max(steps, key=lambda path: int(path.name), default=None)


def _keep(state: TrainState, losses: list[float], folder: pathlib.Path) -> None:
    """Writes a checkpoint; its losses first, so that a checkpoint that is there has them."""
    if jax.process_index() == 0:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.with_suffix(".json").write_text(json.dumps(losses))
    save(state, folder)  # under another name until it is whole


def _losses(folder: pathlib.Path) -> list[float]:
    """The losses of all steps up to a checkpoint."""
    return json.loads(folder.with_suffix(".json").read_text())


def save(state: TrainState, folder: pathlib.Path) -> None:
    """Writes weights, optimiser and scaling states to a folder that must not exist."""
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), _arrays(state))


def restore(run: Run, folder: pathlib.Path) -> TrainState:
    """The state that was saved, ready to continue the same run, on the mesh that it names now."""
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
    fresh = jax.tree.map(place, jax.eval_shape(lambda: _first_state(run)), _shardings(run))
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        arrays = checkpointer.restore(folder.absolute(), _arrays(fresh))
    return fresh.replace(**arrays)


def _arrays(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "params": state.params, "opt_state": state.opt_state}
