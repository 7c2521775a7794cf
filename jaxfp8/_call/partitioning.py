"""How a custom call is split over the devices of a mesh, under plain jit.

The axes of operands and results belong to **factors**: the rows of a product are a factor of the
left side, of the output and of the residual. A call on shards is right if every array is split
along its factors alike. So one table says everything: which mesh axes split which factor. It is
made from the shardings that XLA chose for the arrays. XLA moves an array that is split otherwise.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxfp8._value import compat
from jaxfp8._value.spec import is_known

_WHOLE = contextvars.ContextVar("jaxfp8_unpartitioned", default=False)


@contextlib.contextmanager
def unpartitioned() -> Iterator[None]:
    """Within this context, products and quantisations are traced as calls that XLA cannot split.

    On a mesh XLA then gathers their operands. It is for what JAX refuses of a program that holds a
    call with a rule to split it: arguments on several meshes, and lowering for an `AbstractMesh`.
    What was traced before keeps what was decided then.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8
      >>> w = jaxfp8.quantize(jnp.ones((8, 4)))
      >>> mesh = jax.sharding.AbstractMesh((2,), ("x",))
      >>> rows = jax.sharding.NamedSharding(mesh, jax.P("x"))
      >>> x = jax.ShapeDtypeStruct((2, 8), jnp.float32, sharding=rows)
      >>> with jaxfp8.unpartitioned():
      ...     traced = jax.jit(lambda x: jaxfp8.matmul(x, w)).trace(x)
      >>> "jaxfp8_scaled_dot" in traced.lower(lowering_platforms=("cpu",)).as_text()
      True
    """
    token = _WHOLE.set(True)
    try:
        yield
    finally:
        _WHOLE.reset(token)


def is_wanted(arrays: Sequence[Any]) -> bool:
    """Whether a call on these arrays is to be traced with a rule that splits it."""
    wanted = not _WHOLE.get() and compat.may_be_split(arrays)
    return wanted and all(is_known(x.shape) for x in arrays)


Names = tuple[str | None, ...]  # the factor of each axis of an array, None where it is never split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factors:
    """Which axes of a call are split together.

    Attributes:
      operands, results: the factor of each axis of each array.
      pieces: into how many equal parts each factor can be cut.
      behind: how many operands, the last ones, follow the sum, as all results do.
    """

    operands: tuple[Names, ...]
    results: tuple[Names, ...]
    pieces: Mapping[str, int]
    behind: int = 0

    def summed(self, name: str) -> bool:
        """Whether a factor is summed over: no result has it."""
        return not any(name in names for names in self.results)


@dataclasses.dataclass(frozen=True)
class Shards:
    """How a call is split: each device has one part of each factor.

    Attributes:
      mesh: the devices.
      mesh_axes: by factor, the mesh axes that split it.
      scattered: by factor, the mesh axes that split it behind the sum only: a sum over devices
        along such an axis is a reduce-scatter.
    """

    mesh: Mesh
    mesh_axes: Mapping[str, tuple[str, ...]]
    scattered: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @property
    def behind(self) -> Shards:
        """How what follows the sum is split."""
        merged = {name: self.axes(name) for name in self.mesh_axes}
        for name, axes in self.scattered.items():
            merged[name] = (*merged.get(name, ()), *axes)
        return Shards(self.mesh, merged)

    def placements(self, factors: Factors) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """Where the shards of operands and of results lie."""
        first = len(factors.operands) - factors.behind
        sides, others = factors.operands[:first], factors.operands[first:]
        operands = [*map(self.sharding, sides), *map(self.behind.sharding, others)]
        return operands, list(map(self.behind.sharding, factors.results))

    def give(self, name: str, axis: str) -> Shards:
        """The same, and a mesh axis that splits a factor."""
        split = {**self.mesh_axes, name: (*self.axes(name), axis)}
        return dataclasses.replace(self, mesh_axes=split)

    def scatter(self, factors: Factors, axis: str, names: Iterable[str]) -> Shards:
        """The same; if the axis splits a sum, it splits one of some factors behind that."""
        owner = next((name for name, axes in self.mesh_axes.items() if axis in axes), "")
        if not owner or not factors.summed(owner):
            return self
        for name in names:
            parts = self.behind.parts(name) * self.mesh.shape[axis]
            if not factors.summed(name) and factors.pieces[name] % parts == 0:
                own = (*self.scattered.get(name, ()), axis)
                return dataclasses.replace(self, scattered={**self.scattered, name: own})
        return self

    def axes(self, *names: str | None) -> tuple[str, ...]:
        """The mesh axes that split some factors."""
        return tuple(axis for name in names if name for axis in self.mesh_axes.get(name, ()))

    def parts(self, name: str | None) -> int:
        """Into how many parts a factor is split."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes(name))

    def shape(self, shape: tuple[int, ...], names: Names) -> tuple[int, ...]:
        """The shape of one shard of an array."""
        return tuple(size // self.parts(n) for size, n in zip(shape, names, strict=True))

    def sharding(self, names: Names) -> NamedSharding:
        """Where the shards of an array lie."""
        return NamedSharding(self.mesh, PartitionSpec(*(self.axes(n) or None for n in names)))


def partitioned(
    function: Callable[..., Sequence[Any]],
    avals: Sequence[jax.ShapeDtypeStruct],
    factors: Factors,
    on_shards: Callable[[Shards], Callable[..., Sequence[Any]]],
    what: str,
) -> Any:
    """The jaxpr of a call that XLA may split.

    It has to be a parameter of the primitive that is lowered to it. So jit knows that lowering
    needs the devices.

    Args:
      function: the call on whole arrays.
      avals: shapes and dtypes of its operands.
      factors: which axes are split together.
      on_shards: the call on shards, given how it is split.
      what: names all that is computed, for the key of JAX's persistent cache: it holds no function.
    """

    def call(*operands: Any) -> Sequence[Any]:
        return function(*operands)

    def partition(mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        shards = choose_shards(mesh, factors, [*operands, *results])
        placed, results_placed = shards.placements(factors)
        return shards.mesh, _off_mesh(on_shards(shards)), results_placed, tuple(placed)

    splittable = custom_partitioning(call)
    splittable.def_partition(partition, sharding_rule=_rule(factors), decode_shardings=False)

    def marked(*operands: Any) -> Sequence[Any]:
        with set_xla_metadata(jaxfp8=what):
            return splittable(*operands)

    return jax.make_jaxpr(marked)(*avals)


def _off_mesh(function: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """The same function, traced and lowered as if no mesh were set.

    XLA asks for the call on shards while it compiles, maybe inside `jax.set_mesh`. The types of
    arrays would then name that mesh, and JAX would put shardings into reductions over devices.
    """

    def bind(*operands: Any) -> Sequence[Any]:
        return _off_mesh_p.bind(*operands, function=function)

    return bind


_off_mesh_p = core.Primitive("off_mesh")
_off_mesh_p.multiple_results = True


@_off_mesh_p.def_abstract_eval
def _off_mesh_types(*avals: Any, function: Callable[..., Sequence[Any]]) -> list[Any]:
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        outputs = jax.eval_shape(function, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
        return [jax.core.ShapedArray(y.shape, y.dtype) for y in outputs]


def _lower_off_mesh(
    ctx: Any, *operands: Any, function: Callable[..., Sequence[Any]]
) -> Sequence[Any]:
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        types = [jax.core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]
        bare = ctx.replace(avals_in=types)
        return mlir.lower_fun(function, multiple_results=True)(bare, *operands)


_NO_MESH = jax.sharding.AbstractMesh((), ())
mlir.register_lowering(_off_mesh_p, _lower_off_mesh)


def _rule(factors: Factors) -> str:
    """The rule by which Shardy carries shardings across the call, as an einsum of factors.

    Contracted factors are no reduction factors of the rule: the call adds up the parts itself.
    """
    alone = itertools.count()

    def side(arrays: Sequence[Names]) -> str:
        return ", ".join(" ".join(n or f"alone{next(alone)}" for n in names) for names in arrays)

    return f"{side(factors.operands)} -> {side(factors.results)}"


def choose_shards(mesh: Mesh, factors: Factors, arrays: Sequence[Any]) -> Shards:
    """Gives each mesh axis to the factor by which it splits the most bytes already.

    Args:
      mesh: the devices.
      factors: which axes are split together.
      arrays: operands and results, with shape, dtype and the sharding in which XLA has them.
    """
    grid = _grid(mesh)
    votes: dict[str, collections.Counter[str]] = {}
    wanted: dict[str, list[str]] = {}  # by mesh axis the factors of the results that it splits
    number = len(factors.operands)
    for i, (array, names) in enumerate(
        zip(arrays, factors.operands + factors.results, strict=True)
    ):
        size = math.prod(array.shape) * array.dtype.itemsize
        for name, axes in zip(names, _splits(array.sharding, len(array.shape), grid), strict=True):
            if name is not None:
                for axis in axes:
                    votes.setdefault(axis, collections.Counter())[name] += size
                    if i >= number:
                        wanted.setdefault(axis, []).append(name)
    shards = Shards(grid, {})
    for axis, count in votes.items():
        for name, _ in count.most_common():
            if factors.pieces[name] % (shards.parts(name) * grid.shape[axis]) == 0:
                shards = shards.give(name, axis)
                break
    for axis, kept in wanted.items():
        shards = shards.scatter(factors, axis, kept)
    return shards


@functools.lru_cache(maxsize=64)
def _grid(mesh: Mesh) -> Mesh:
    """The devices of a mesh by axes of prime size: XLA may split an array by part of an axis."""
    sizes = [prime for size in mesh.devices.shape for prime in _primes(size)]
    return Mesh(mesh.devices.reshape(sizes), tuple(f"d{i}" for i in range(len(sizes))))


def _primes(number: int) -> list[int]:
    for divisor in range(2, number + 1):
        if number % divisor == 0:
            return [divisor, *_primes(number // divisor)]
    return []


@functools.lru_cache(maxsize=1024)
def _splits(sharding: Sharding, rank: int, mesh: Mesh) -> list[tuple[str, ...]]:
    """The mesh axes that split each axis of an array, outermost first; none where others do."""
    # In an array of so many elements along each axis all shards are equal.
    indices = sharding.devices_indices_map((mesh.size,) * rank)
    result = []
    for axis in range(rank):
        slices = [indices[device][axis].indices(mesh.size) for device in mesh.devices.flat]
        starts = np.reshape([start for start, _, _ in slices], mesh.devices.shape)
        steps = {
            name: int(np.take(starts, 1, i).flat[0] - starts.flat[0])
            for i, name in enumerate(mesh.axis_names)
        }
        split = sorted((name for name in steps if steps[name] > 0), key=lambda n: -steps[n])
        start, stop, _ = slices[0]
        whole = math.prod(mesh.shape[name] for name in split) * (stop - start) == mesh.size
        result.append(tuple(split) if whole else ())
    return result
