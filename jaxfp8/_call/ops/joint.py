"""Products of one input as one call, `joint_dots_p`: one launch on a GPU.

A weight of few columns keeps few blocks at work, and each launch waits for the one before. From
compute capability 9.0 on `sm80_w8a16` computes several products of up to 64 rows at once, of FP8
values up to 16. On other platforms, on several devices, under vmap and in derivatives they run as
separate scaled dots. A launch may multiply the outputs of two, and write their product alone.

Order of this file: choice of products, primitive, its rules, lowering.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jaxfp8._call.gpu import asked, canonical, xla_products
from jaxfp8._call.library import ffi, targets
from jaxfp8._call.mesh import explicit, partitioning
from jaxfp8._call.ops import lowering, remat
from jaxfp8._call.ops.dot import scaled_dot, scaled_dot_p, transpose_rule
from jaxfp8._call.ops.eager import run_compiled, transform_as
from jaxfp8._value import compat
from jaxfp8._value.spec import ScaledDotSpec, Shape, is_known

# As in ffi/cuda/kernels/sm80_w8a16/schedule.h.
MOST = 4
# Three of 64 rows and 4096 x 4096 take 34 us in one launch and 48 in three on an H100. More rows
# were not measured.
_MOST_ROWS = 64
_OLDEST_GPU = 90

# Choice of products


def runs_here() -> bool:
    """Whether the least capable GPU in use computes several products at once."""
    capability = targets.compute_capability()
    return capability is not None and capability >= _OLDEST_GPU


def what_is_shared(spec: ScaledDotSpec) -> tuple[str, Hashable] | None:
    """The name of the operand that products in one launch share, and other facts to compare.

    None if the product has a launch of its own.
    """
    if not is_known(spec.lhs.shape + spec.rhs.shape) or canonical.is_empty(spec):
        return None
    form = canonical.canonical(spec).spec
    name = asked.weights_of(form)
    if name is None or asked.rows_beside(name, form) > _MOST_ROWS:
        return None
    alone = math.prod(form.batch_shape) != 1 or form.epilogue.amax is not None
    if alone or not getattr(spec, name).free:
        return None
    weights, shared = getattr(form, name), "lhs" if name == "rhs" else "rhs"
    folded = (weights.scale or weights.zero_point) and weights.scale_varies
    facts = getattr(form, shared), weights.dtype, weights.contracting, folded
    return shared, (shared, *facts)


def pays(specs: Sequence[ScaledDotSpec]) -> bool:
    """Whether one launch is faster; not if XLA would get all their weights as one small product."""
    name = asked.weights_of(canonical.canonical(specs[0]).spec)
    assert name is not None
    first, *rest = (getattr(spec, name) for spec in specs)
    columns = sum(math.prod(side.sizes(side.free)) for side in (first, *rest))
    sizes = {axis: 1 for axis in first.free} | {first.free[0]: columns}
    shape = tuple(sizes.get(axis, size) for axis, size in enumerate(first.shape))
    whole = dataclasses.replace(first, shape=shape)
    as_one = dataclasses.replace(specs[0], **{name: whole})
    return not xla_products.takes(as_one, "", targets.compute_capability())


def why_not_multiplied(specs: Sequence[ScaledDotSpec]) -> str | None:
    """Why one launch cannot multiply the outputs of two products of one input, or None if it can.

    `WhyNotGated` in ffi/cuda/kernels/sm80_w8a16/schedule.cc has the same rules.
    """
    one, other = specs
    if one.out_shape != other.out_shape:
        return "the outputs differ in shape"
    if _blocks(one) != _blocks(other):
        return "scales of the weights change at different places of the contracted axis"
    for spec in specs:
        epilogue = spec.epilogue
        if spec.lhs.zero_point or spec.rhs.zero_point or epilogue.out_scale is not None:
            return "a product has zero points or an 8-bit output"
        if any(tile % _BLOCK for tile in _blocks(spec)):
            return f"scales of a weight change more often than every {_BLOCK} of K"
        if epilogue.amax is not None or epilogue.out_dtype not in _WIDE:
            return f"a product gives its amax, or {epilogue.out_dtype}"
    return None


_WIDE = ("float32", "bfloat16", "float16")
_BLOCK = 128


def _blocks(spec: ScaledDotSpec) -> Shape:
    """The tiles along the contracted axes of both sides, if scales change along them."""
    sides = [side for side in (spec.lhs, spec.rhs) if side.scale and side.scale_varies]
    return tuple(side.tiles[axis] for side in sides for axis in side.contracting)


# The primitive

joint_dots_p = Primitive("joint_dots")
joint_dots_p.multiple_results = True


def joint_dots(
    specs: Sequence[ScaledDotSpec], operands: Sequence[dict[str, Any]], multiplied: str = ""
) -> list[jax.Array]:
    """The outputs of several scaled dots, as one launch if possible.

    `what_is_shared` is equal for all, and there are at most `MOST` of them. `multiplied` is the
    dtype of the product of two outputs, then the only one (`why_not_multiplied`); "" for none.
    """
    each = [
        compat.vary_alike([named[name] for name in spec.operand_names()])
        for spec, named in zip(specs, operands, strict=True)
    ]
    flat = list(itertools.chain(*each))
    varying = {compat.varying_axes(own[0]) for own in each}
    if explicit.mesh_of(map(jax.typeof, flat)) is not None or len(varying) > 1:
        outs = [scaled_dot(spec, **named)[0] for spec, named in zip(specs, operands, strict=True)]
        return _results(outs, multiplied)
    split = partitioning.is_wanted(flat)
    return joint_dots_p.bind(*flat, specs=tuple(specs), split=split, multiplied=multiplied)


run_compiled(joint_dots_p)


def _results(outs: list[jax.Array], multiplied: str) -> list[jax.Array]:
    """The outputs, or their product."""
    if not multiplied:
        return outs
    one, other = (out.astype(jnp.float32) for out in outs)
    return [(one * other).astype(multiplied)]


# Its rules are those of the scaled dots, one after another.


def _each(
    specs: tuple[ScaledDotSpec, ...], split: bool, *flat: Sequence[Any]
) -> Iterator[tuple[dict[str, Any], list[tuple[Any, ...]]]]:
    """For each dot the parameters of its primitive, and the values of its operands."""
    left = [iter(sequence) for sequence in flat]
    for spec in specs:
        number = len(spec.operand_names())
        params = {"spec": spec, "kernel": "", "split": split, "out_sharding": None}
        yield params, [tuple(itertools.islice(rest, number)) for rest in left]


def _separate(
    *operands: Any, specs: tuple[ScaledDotSpec, ...], split: bool, multiplied: str
) -> list[jax.Array]:
    dots = _each(specs, split, operands)
    outs = [scaled_dot_p.bind(*own, **params)[0] for params, (own,) in dots]
    return _results(outs, multiplied)


@joint_dots_p.def_abstract_eval
def _abstract_eval(
    *avals: Any, specs: tuple[ScaledDotSpec, ...], split: bool, multiplied: str
) -> list[Any]:
    dots = _each(specs, split, avals)
    outs = [scaled_dot_p.abstract_eval(*own, **params)[0][0] for params, (own,) in dots]
    return [outs[0].update(dtype=jnp.dtype(multiplied))] if multiplied else outs


def _transpose(cotangents: list[Any], *operands: Any, **params: Any) -> list[Any]:
    assert not params["multiplied"], "only dots are linear; `transform_as` takes the product apart"
    dots = zip(cotangents, _each(params["specs"], params["split"], operands), strict=True)
    return [x for ct, (own, (values,)) in dots for x in transpose_rule([ct], *values, **own)]


transform_as(joint_dots_p, _separate)
ad.primitive_transposes[joint_dots_p] = _transpose
remat.count_as_dots(joint_dots_p, lambda *_, specs, **__: map(remat.scaled_dot, specs))


def dots_of(inputs: Sequence[Any], params: dict[str, Any]) -> list[tuple[ScaledDotSpec, Any]]:
    """The scaled dots of an equation of `joint_dots_p`: each problem, and its inputs."""
    return [(own["spec"], values) for own, (values,) in _each(params["specs"], False, inputs)]


# Lowering


def _call(
    *operands: jax.Array, specs: tuple[ScaledDotSpec, ...], split: bool, multiplied: str
) -> list[jax.Array]:
    """One call for all dots. The attributes of dot i are named `doti_...`."""
    ffi.register_if_it_runs_here("cuda")
    forms: list[canonical.Canonical] = []
    arrays: list[jax.Array] = []
    attributes: dict[str, Any] = {}
    for i, (params, (own,)) in enumerate(_each(specs, split, operands)):
        form, own_arrays = lowering.in_canonical_form(*own, spec=params["spec"])
        forms.append(form)
        arrays += own_arrays
        attributes |= {f"dot{i}_{name}": x for name, x in form.spec.attributes().items()}
    results = [result for form in forms for result in lowering.result_types(form.spec)]
    if multiplied:
        results, forms = [jax.ShapeDtypeStruct(results[0].shape, multiplied)], forms[:1]
        attributes["multiplied"] = multiplied
    outs = jax.ffi.ffi_call(ffi.JOINT_TARGET, results)(*arrays, **attributes)
    return [form.results([out])[0] for form, out in zip(forms, outs, strict=True)]


_lower_separate = mlir.lower_fun(_separate, multiple_results=True)
_lower_joint = mlir.lower_fun(_call, multiple_results=True)


def _lower_cuda(
    ctx: Any, *operands: Any, specs: tuple[ScaledDotSpec, ...], split: bool, multiplied: str
) -> Sequence[Any]:
    for_export = ctx.module_context.lowering_parameters.for_export
    is_alone = not split or compat.place_of(ctx) is None
    served = all(lowering.why_not(spec, "cuda") is None for spec in specs)
    joins = is_alone and served and not for_export and runs_here()
    rule = _lower_joint if joins else _lower_separate
    return rule(ctx, *operands, specs=specs, split=split, multiplied=multiplied)


mlir.register_lowering(joint_dots_p, _lower_separate)
mlir.register_lowering(joint_dots_p, _lower_cuda, platform="cuda")
