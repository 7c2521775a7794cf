"""`--devices N`: whole programs on 1, 2, 4 ... N devices, in 8 bits and in bfloat16.

The mesh has two automatic axes. Axis d splits texts and, for training, weights (FSDP); axis m
splits the columns, then the rows of each pair of layers. Experts are split by `shard_map` over d:
devices gather tokens, or exchange rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfp8
from jaxfp8._bench import _decoder, _hlo, _step
from jaxfp8._bench._case import Case
from jaxfp8._bench._decoder import Sizes
from jaxfp8._bench._gpu_codes import bf16
from jaxfp8._bench._measure import Contender, Missing, attempt

FLOATS = "XLA bf16"
_WHOLE = P()
# The split of a weight [N, K]: first layers of a pair, then second ones.
_SPLITS = {name: P("m", "d") for name in ("query", "key", "value", "gate", "up")}
_SPLITS |= {name: P("d", "m") for name in ("out", "down")}
_HEADS = P(None, "m", None, None)  # of a cache
_TEXTS = P("d", None, None)
_TRAINED = ("jaxfp8 delayed", FLOATS)
# Of experts whose devices exchange rows: a usual factor of the even share.
_CAPACITY = 1.25


class Amounts(NamedTuple):
    """Sizes of all programs.

    Decoders are keys of `_decoder.MODELS`. Texts and tokens of training are those of each device.
    """

    model: str
    layers: int
    rows: tuple[int, ...]  # of decode
    cache: int
    prefill: int
    trained: str
    depth: int
    texts: int
    length: int
    # Experts [width, hidden], each token in `top_k` of them; tokens of decode and of training.
    width: int
    hidden: int
    experts: int
    top_k: int
    tokens: tuple[int, int]


# The experts have the sizes of DeepSeek-V2-Lite.
AMOUNTS = {
    "llama3-70b": Amounts(
        model="llama3-70b",
        layers=8,
        rows=(1, 16, 64),
        cache=1024,
        prefill=4096,
        trained="gpt-1.3b",
        depth=24,
        texts=4,
        length=2048,
        width=2048,
        hidden=1408,
        experts=64,
        top_k=6,
        tokens=(64, 8192),
    ),
    "tiny": Amounts("tiny-8", 1, (2,), 4, 8, "tiny-8", 2, 2, 16, 64, 32, 8, 2, (16, 64)),
}
# What is timed on one mesh: a name, a step of given, weights and state, and these three, placed.
_Form = tuple[str, Callable[..., Any], Any, Any, Any]
_Forms = Callable[[Mesh], Iterator[_Form]]


def cases(
    platform: str, devices: list[int], amounts: Amounts, rows: Sequence[int] | None
) -> Iterator[tuple[str, Callable[[], Case]]]:
    """All programs on each number of devices; `rows` are other numbers of rows of decode."""
    served = functools.partial(_served, platform, amounts)
    what = f"{amounts.model}, {amounts.layers} layers"
    programs: dict[str, tuple[Callable[[], _Forms], bool]] = {}  # and whether its work grows
    for m in rows or amounts.rows:
        made = functools.partial(served, "decode", m)
        programs[f"decode {what}, M = {m}, cache {amounts.cache}"] = made, False
    programs[f"prefill {what}, M = {amounts.prefill}"] = (
        functools.partial(served, "prefill", amounts.prefill),
        False,
    )
    what = f"{amounts.trained}, {amounts.depth} layers"
    what += f", {amounts.texts} x {amounts.length} tokens a device"
    for name, split in (("fsdp", 1), ("fsdp x tensor", 2)):
        programs[f"train {name} {what}"] = functools.partial(_training, amounts, split), True
    what = f"{amounts.experts} experts of {amounts.width} x {amounts.hidden}"
    few, many = amounts.tokens
    programs[f"experts decode, {what}, M = {few}"] = functools.partial(_experts, amounts), False
    made = functools.partial(_trained_experts, amounts)
    programs[f"experts train, {what}, {many} tokens a device"] = made, True
    for name, (make, grows) in programs.items():
        full = f"scale {name}"
        yield full, functools.partial(_case, full, platform, devices, make, grows)


def counts(devices: int, quick: bool) -> list[int]:
    """The powers of two up to `devices`, which is one; with `quick` the first and the last."""
    return sorted({1, devices}) if quick else [1 << i for i in range(devices.bit_length())]


def named(form: str, devices: int) -> str:
    """The name of a contender."""
    return f"{form} x{devices}"


def _case(
    name: str, platform: str, devices: list[int], make: Callable[[], _Forms], grows: bool
) -> Case:
    """All forms on all numbers of devices; if the work grows with these, a unit is one's share."""
    forms, on_cpu = make(), platform == "cpu"
    placed = {
        named(form, number): (step, data, number)
        for number in devices
        for form, step, *data in forms(_mesh(platform, number))
    }
    # XLA times kernels to choose among them, so nothing else may run beside the compiler.
    jax.block_until_ready([data for _, data, _ in placed.values()])
    lowered = (
        attempt(functools.partial(_lowered, step, *data)) for step, data, _ in placed.values()
    )
    with ThreadPoolExecutor() as pool:  # compiles a program while the next ones are traced
        programs = dict(
            zip(placed, pool.map(functools.partial(_compiled, on_cpu), lowered), strict=True)
        )
    made: dict[str, Contender | Missing] = {}
    sent: dict[str, Mapping[str, int]] = {}
    for form, program in programs.items():
        if isinstance(program, Missing):
            made[form] = program
            continue
        _, data, number = placed[form]
        one = _step.compiled(program, *data)
        sent[form] = _sent(one.program, on_cpu) if number > 1 else {}
        if on_cpu:
            one = _alone(one)
        profiled = one.program if sent[form] else ""  # it shows time in collectives
        made[form] = dataclasses.replace(one, units=number if grows else 1, program=profiled)
    return Case(name=name, contenders=made, sent=sent)


def _alone(one: Contender) -> Contender:
    """A contender on a CPU: its devices share the cores, so a profile could not tell them apart.

    Each call is waited for. Calls in flight take threads of XLA from one another, and a collective
    waits in vain for the thread of another device.
    """
    enqueue = one.enqueue
    wait = lambda: jax.block_until_ready(enqueue())  # noqa: E731
    return dataclasses.replace(one, enqueue=wait, program="")


def _lowered(step: Callable[..., Any], given: Any, weights: Any, state: Any) -> Any:
    """A step that adds as bfloat16 does; the next state lies as the one before."""
    out = None, jax.tree.map(lambda leaf: leaf.sharding, state)
    with jaxfp8.sums_over_devices(jnp.bfloat16):
        return jax.jit(step, donate_argnums=2, out_shardings=out).lower(given, weights, state)


def _compiled(on_cpu: bool, lowered: Any) -> Any:
    """The program, on a CPU without optimisation: it is there for its bytes."""
    if isinstance(lowered, Missing):
        return lowered
    options = {"xla_backend_optimization_level": 0} if on_cpu else None
    return attempt(functools.partial(lowered.compile, compiler_options=options))


def _mesh(platform: str, devices: int) -> Mesh:
    chosen = jax.devices(platform)[:devices]
    return jax.make_mesh((devices, 1), ("d", "m"), (AxisType.Auto,) * 2, devices=chosen)


def _tensor(mesh: Mesh, parts: int) -> Mesh:
    """The same devices, at most so many of them along m."""
    parts = min(parts, mesh.size)
    return Mesh(mesh.devices.reshape(-1, parts), mesh.axis_names, axis_types=mesh.axis_types)


def _sent(program: str, on_cpu: bool) -> Mapping[str, int]:
    """Bytes by collective. XLA widens bfloat16 on a CPU, so there a float counts two bytes."""
    total: Counter[str] = Counter()
    for kind, size in _hlo.sent(program, 2 if on_cpu else None):
        total[kind] += size
    return dict(total)


def _put(mesh: Mesh, tree: Any, spec: P | Callable[[Any], P]) -> Any:
    """A tree on a mesh; axes that the devices do not divide stay whole."""

    def placed(path: Any, leaf: Any) -> Any:
        entries = spec(path) if callable(spec) else spec
        entries = P(*(None,) * (np.ndim(leaf) - len(entries)), *entries)
        pairs = zip(entries, np.shape(leaf), strict=False)
        fits = (e if e is not None and n % mesh.shape[e] == 0 else None for e, n in pairs)
        return jax.device_put(leaf, NamedSharding(mesh, P(*fits)))

    return jax.tree_util.tree_map_with_path(placed, tree)


def _of_weight(path: Any) -> P:
    """The split of an array of a layer, by the name of its weight."""
    names = (getattr(key, "key", None) for key in path)
    return next((_SPLITS[name] for name in names if name in _SPLITS), _WHOLE)


def _served(platform: str, amounts: Amounts, kind: str, rows: int) -> _Forms:
    """Decode or prefill, tensor parallel."""
    by_token = kind == "decode"
    one = _step.Step(kind, amounts.model, rows, amounts.layers, amounts.cache, platform)
    sizes = _decoder.MODELS[one.model]
    forms = list(_step.inference(one, sizes))
    shape = (rows, 1) if by_token else (1, rows)
    given = bf16(0, *shape, sizes.width), jnp.int32(one.cache - 1 if by_token else 0)

    def on(mesh: Mesh) -> Iterator[_Form]:
        mesh = _tensor(mesh, mesh.size)
        for name, step, weights, caches in forms:
            placed = _put(mesh, weights, _of_weight)
            # Each number of devices has caches of its own: a step overwrites them.
            own = _put(mesh, jax.tree.map(jnp.copy, caches), _HEADS)
            yield name, step, _put(mesh, given, _WHOLE), placed, own

    return on


def _training(amounts: Amounts, parts: int) -> _Forms:
    """Gradients of float32 weights, their layers under a scan, each rematerialised."""
    sizes, depth = _decoder.MODELS[amounts.trained], amounts.depth
    stack = lambda x: jnp.broadcast_to(x, (depth, *jnp.shape(x)))  # noqa: E731
    (layer,) = _decoder.random_layers(sizes, 1, lambda w: w)
    state = jaxfp8.ScalingState.init(jaxfp8.DelayedScaling())
    weights, state = jax.tree.map(stack, (layer, state))

    def on(mesh: Mesh) -> Iterator[_Form]:
        mesh = _tensor(mesh, parts)
        x = bf16(0, amounts.texts * mesh.size, amounts.length, sizes.width)
        placed = _put(mesh, x, _TEXTS), _put(mesh, weights, _of_weight)
        for name in _TRAINED:
            # Each product has arrays of its own: a step overwrites them.
            own = [None if name == FLOATS else jax.tree.map(jnp.copy, state) for _ in sizes.weights]
            scales = dict(zip(sizes.weights, own, strict=True))
            step = functools.partial(_gradients, sizes, _step.DOTS[name], mesh)
            rewritten = step if name == FLOATS else jaxfp8.rewrite(step)
            yield name, rewritten, *placed, _put(mesh, scales, _WHOLE)

    return on


def _gradients(
    sizes: Sizes, product: Any, mesh: Mesh, x: jax.Array, weights: Any, scales: Any
) -> Any:
    """Gradients of the mean square, and the next scales; gradients lie as the weights."""
    texts = NamedSharding(mesh, _TEXTS)
    placed = functools.partial(jax.lax.with_sharding_constraint, shardings=texts)
    run = functools.partial(_step.scanned, jax.checkpoint)
    given = x, jnp.int32(0)
    gradients, scales = _step.gradients(run, sizes, product, given, weights, scales, placed)
    lie = lambda path, g: NamedSharding(mesh, P(None, *_of_weight(path)))  # noqa: E731
    places = jax.tree_util.tree_map_with_path(lie, gradients)
    return jax.lax.with_sharding_constraint(gradients, places), scales


def _layer(amounts: Amounts, **more: Any) -> Any:
    """The layer of experts."""
    import jaxfp8.linen  # noqa: PLC0415 (needs Flax, an extra)

    return jaxfp8.linen.MoE(
        amounts.hidden, amounts.experts, amounts.top_k, dtype=jnp.bfloat16, **more
    )


def _each_way(forms: Iterable[str], mesh: Mesh) -> Iterator[tuple[str, str, float | None]]:
    """Names of forms whose devices gather tokens, then exchange rows; the form; its capacity."""
    for form in forms:
        yield form, form, None
        if mesh.size > 1:
            yield f"{form}, exchanged", form, _CAPACITY


def _split_experts(
    mesh: Mesh, layer: Any, variables: Any, capacity: float | None
) -> tuple[Any, Callable[..., Any]]:
    """Variables on a mesh, and the layer on them: tokens and experts are split over d."""
    specs: dict[str, Any] = dict.fromkeys(variables, _WHOLE)
    specs["params"] = {"router": _WHOLE, "up": P("d"), "down": P("d")}
    own = layer.copy(axis_name="d", capacity_factor=capacity)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs, P("d")), out_specs=P("d"))
    def run(variables: Any, x: jax.Array) -> Any:
        return own.apply(variables, x)

    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.device_put(variables, shardings), run


def _experts(amounts: Amounts) -> _Forms:
    """Tokens of decode through all experts, in 8 bits by `jaxfp8.linen.quantize`."""
    import jaxfp8.linen  # noqa: PLC0415 (needs Flax, an extra)

    x = bf16(0, amounts.tokens[0], amounts.width)
    layer = _layer(amounts, param_dtype=jnp.bfloat16)
    variables = jax.jit(layer.init)(jax.random.key(0), x)
    held = {FLOATS: (layer, variables)}
    for name, recipe in (
        ("jaxfp8 W8A16", jaxfp8.FP8_W8A16),
        ("jaxfp8 FP8 dynamic", jaxfp8.FP8_DYNAMIC),
    ):
        narrow = layer.copy(recipe=recipe)
        held = {name: (narrow, jaxfp8.linen.quantize(narrow, variables, x)[0])} | held

    def on(mesh: Mesh) -> Iterator[_Form]:
        for name, form, capacity in _each_way(held, mesh):
            placed, run = _split_experts(mesh, *held[form], capacity)
            step = lambda x, variables, state, run=run: (run(variables, x), state)  # noqa: E731
            yield name, step, _put(mesh, x, P("d", None)), placed, ()

    return on


def _trained_experts(amounts: Amounts) -> _Forms:
    """Gradients of the mean square of the layer's output."""
    import jaxfp8.linen  # noqa: PLC0415 (needs Flax, an extra)

    layers = {"jaxfp8 delayed": _layer(amounts, ragged_dot_cls=jaxfp8.linen.Fp8RaggedDot)}
    layers[FLOATS] = _layer(amounts)

    x = bf16(0, 8, amounts.width)
    made = {name: jax.jit(layer.init)(jax.random.key(0), x) for name, layer in layers.items()}

    def on(mesh: Mesh) -> Iterator[_Form]:
        x = _put(mesh, bf16(0, amounts.tokens[1] * mesh.size, amounts.width), P("d", None))
        for name, form, capacity in _each_way(layers, mesh):
            variables, run = _split_experts(mesh, layers[form], made[form], capacity)
            weights = variables.pop("params")
            # Each number of devices has scales of its own: a step overwrites them.
            yield (
                name,
                functools.partial(_moved, run),
                x,
                weights,
                jax.tree.map(jnp.copy, variables),
            )

    return on


def _moved(run: Callable[..., Any], x: jax.Array, params: Any, state: Any) -> Any:
    def loss(variables: Any) -> jax.Array:
        return jnp.mean(jnp.square(run(variables, x).astype(jnp.float32)))

    gradients = jax.grad(loss)({**state, "params": params})
    return gradients.pop("params"), gradients
