"""Splitting custom calls over automatic mesh axes: XLA splits, and asks for the call on shards.

It asks while it compiles, through `jax.experimental.custom_partitioning`. JAX gives it the devices
only in a program on one mesh. A call needs only their number and order, so our lowering rule gives
as many stand-ins.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh

from jaxfp8._call.library.strictness import is_strict, strict_if, tell_gathered
from jaxfp8._call.mesh import grid, sums
from jaxfp8._call.mesh.shards import Factors, Names, Parts, Shards
from jaxfp8._value import compat
from jaxfp8._value.spec import is_known
from jaxfp8._value.version import __version__


def is_wanted(arrays: Sequence[Any]) -> bool:
    """Whether to let XLA split a call on these arrays.

    On a mesh without automatic axes there is nothing for XLA to decide.
    """
    if not all(is_known(x.shape) for x in arrays):
        return False
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in arrays)]
    kinds = {kind for mesh in meshes for kind in mesh.axis_types}
    return not kinds or AxisType.Auto in kinds


class _Caller(NamedTuple):
    """The contexts of the caller. XLA asks on a thread of its own, without them."""

    strict: bool
    sums: np.dtype

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The same contexts."""
        with strict_if(self.strict), sums.within(self.sums):
            yield


_UNEQUAL = (
    "shards are of different sizes or cut tiles; let the devices divide the axes of arrays, and "
    "tiles the shards"
)
Table = Callable[..., Parts | None]


def lowering(rule: Callable[..., Any], *tables: Table) -> Callable[..., Any]:
    """The lowering rule of a primitive; its parameter `split` says whether XLA may split it.

    `rule` lowers the call on one device. Each table gives the factors and the call on shards. Later
    tables are used if the first cannot keep XLA's split of the operands.
    """

    def lower(
        ctx: Any, *operands: Any, split: bool, out_sharding: Any = None, **params: Any
    ) -> Any:
        del out_sharding  # has gone into the types of the results
        place = compat.place_of(ctx) if split else None
        if isinstance(place, str):
            tell_gathered(params["spec"].told(ctx.avals_in[0]), place)
        if not isinstance(place, compat.Place):
            return rule(ctx, *operands, **params)
        types = tuple(jax.core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in)
        caller = _Caller(is_strict(), sums.chosen())
        whole = _splittable(tables, types, place, caller, tuple(params.items()))
        call = core.jaxpr_as_fun(whole)
        compass = mlir.lower_fun(lambda: grid.compass(place), multiple_results=True)
        needle = compass(ctx.replace(avals_in=[]))
        told = place.given_to(ctx.replace(avals_in=[*types, *grid.compass_type(place)]))
        return mlir.lower_fun(call, multiple_results=True)(told, *operands, *needle)

    return lower


@functools.lru_cache(maxsize=1024)
def _splittable(
    tables: tuple[Table, ...],
    types: tuple[Any, ...],
    place: compat.Place,
    caller: _Caller,
    params: tuple[tuple[str, Any], ...],
) -> Any:
    """The jaxpr of a call for XLA to split. The last operand is the compass, if there is one.

    The key of JAX's persistent cache holds no Python function. The text of the program therefore
    names the whole computation.
    """
    given = (table(types, split=True, out_sharding=None, **dict(params)) for table in tables)
    parts = [one for one in given if one is not None]
    factors, on_shards = parts[0]
    number = len(factors.operands)

    def whole(*operands: Any) -> Sequence[Any]:
        return on_shards(Shards(_NO_MESH, {}))(*operands[:number])

    def partition(mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        del mesh  # of the process; it may have several
        arrays, compass = operands[:number], operands[number:]
        devices = grid.grid_of(place, compass, [*arrays, *results])
        chosen = [
            (*one, *grid.choose_shards(devices.local, one[0], [*arrays, *results])) for one in parts
        ]
        table, on_its_shards, shards, left = min(chosen, key=lambda one: len(one[3]))
        placed, results_placed = shards.placements(table)
        placed += [array.sharding for array in compass]
        with caller.again():
            if left:
                tell_gathered(dict(params)["spec"].told(types[0]), _UNEQUAL)
            call = _off_mesh(on_its_shards(shards), caller)
        return devices.whole, lambda *local: call(*local[:number]), results_placed, tuple(placed)

    splittable = custom_partitioning(whole)
    splittable.def_partition(
        partition, sharding_rule=_rule(factors, len(place.axes)), decode_shardings=False
    )
    what = repr((__version__, caller, types, params))

    def marked(*operands: Any) -> Sequence[Any]:
        with set_xla_metadata(jaxfp8=what):
            return splittable(*operands)

    with jax.sharding.use_abstract_mesh(_NO_MESH):
        return jax.make_jaxpr(marked)(*types, *grid.compass_type(place))


def _off_mesh(
    function: Callable[..., Sequence[Any]], caller: _Caller
) -> Callable[..., Sequence[Any]]:
    """The same function, traced and lowered as if no mesh were set, in the caller's contexts.

    XLA asks for the call on shards while it compiles, maybe inside `jax.set_mesh`. The types of
    arrays would name that mesh then, and JAX would put shardings into reductions over devices.
    """

    def bind(*operands: Any) -> Sequence[Any]:
        return _off_mesh_p.bind(*operands, function=function, caller=caller)

    return bind


_off_mesh_p = core.Primitive("off_mesh")
_off_mesh_p.multiple_results = True


@_off_mesh_p.def_abstract_eval
def _off_mesh_types(
    *avals: Any, function: Callable[..., Sequence[Any]], caller: _Caller
) -> list[Any]:
    with jax.sharding.use_abstract_mesh(_NO_MESH), caller.again():
        outputs = jax.eval_shape(function, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
        return [jax.core.ShapedArray(y.shape, y.dtype) for y in outputs]


def _lower_off_mesh(
    ctx: Any, *operands: Any, function: Callable[..., Sequence[Any]], caller: _Caller
) -> Sequence[Any]:
    with jax.sharding.use_abstract_mesh(_NO_MESH), caller.again():
        types = [jax.core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]
        bare = ctx.replace(avals_in=types)
        return mlir.lower_fun(function, multiple_results=True)(bare, *operands)


_NO_MESH = jax.sharding.AbstractMesh((), ())
mlir.register_lowering(_off_mesh_p, _lower_off_mesh)


def _rule(factors: Factors, axes: int) -> str:
    """Shardy's rule to carry shardings across the call, as an einsum of factors.

    Contracted factors are no reduction factors of the rule: the call adds up the parts itself.
    """
    alone = itertools.count()

    def side(arrays: Sequence[Names]) -> str:
        return ", ".join(" ".join(n or f"alone{next(alone)}" for n in names) for names in arrays)

    compass = [(None,) * axes] if axes else []
    return f"{side([*factors.operands, *compass])} -> {side(factors.results)}"
