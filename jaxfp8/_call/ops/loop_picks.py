"""Lets XLA:CPU slice FP8 stacks as bytes if a loop slices them for a product.

`jax.lax.scan` slices its stacks before its body sees them, so a product in the body gets FP8. XLA
on the CPU slices FP8 in float16, and converts the whole stack before the loop. Slices of bytes have
the same bits, and `_value/picking` has their figures. The lowering rule of a product therefore puts
bytes into JAX's unfinished module, for every slice with the dtype and sizes of its operand:

    %1 = dynamic_slice %stack, %i            %b = bitcast_convert (barrier %stack, %i)  : u8
    %2 = reshape %1                    ──▶   %s = dynamic_slice %b, %i                  : u8
                                             %2 = reshape (bitcast_convert %s)          : f8

These are enough. The product may stand in a function without a call yet, as under remat; and a
slice for something else keeps its value. JAX 0.10 writes a body shared by two scans only once,
before the second scan's slices: these stay FP8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir


def lowered(primitive: Primitive, abstract_eval: Callable[..., Any]) -> Primitive:
    """Lets loops slice the FP8 operands of a primitive as bytes, then lowers it to another one.

    JAX must not cache the first, since each loop counts. It caches the second for each platform.

    Args:
      primitive: has several results; gets its lowering rule here.
      abstract_eval: for both primitives.

    Returns:
      The second, of the same name and parameters, in want of its lowering rules.
    """
    second = Primitive(primitive.name)
    second.multiple_results = True
    second.def_abstract_eval(abstract_eval)

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        if "cpu" in ctx.module_context.platforms:
            _slice_as_bytes(ctx.module_context.module, operands)
        bind = functools.partial(second.bind, **params)
        return mlir.lower_fun(bind, multiple_results=True)(ctx, *operands)

    mlir.register_lowering(primitive, lower, cacheable=False)
    return second


def _slice_as_bytes(module: Any, operands: Sequence[Any]) -> None:
    """Replaces slices of FP8 stacks, the possible sources of operands."""
    kinds = [_kind(operand) for operand in operands if _may_be_slice(operand)]
    if not kinds:
        return
    for op in _operations(module.operation):
        if op.name == "stablehlo.reshape" and _kind(op.results[0]) in kinds:
            picked = op.operands[0].owner
            if not isinstance(picked, ir.Block) and picked.name == "stablehlo.dynamic_slice":
                op.operands[0] = _slice_of_bytes(picked)


def _may_be_slice(operand: Any) -> bool:
    """Whether an operand is FP8, and neither made of bytes nor an argument of the program."""
    owner = operand.owner
    if not str(operand.type.element_type).startswith("f8E"):
        return False
    if not isinstance(owner, ir.Block):
        return owner.name != "stablehlo.bitcast_convert"
    function = owner.owner.operation
    name = function.attributes["sym_name"] if function.name == "func.func" else None
    return name is not None and ir.StringAttr(name).value != "main"


def _kind(value: Any) -> tuple[Any, list[int]]:
    """Dtype and sizes of an array; axes may be permuted between a slice and a product."""
    return value.type.element_type, sorted(value.type.shape)


def _operations(op: Any) -> Iterator[Any]:
    """The operations inside another, from a copied list: the original grows meanwhile."""
    inner = [o.operation for region in op.regions for block in region for o in block]
    for one in inner:
        yield one
        yield from _operations(one)


def _slice_of_bytes(picked: Any) -> Any:
    """The result of a slice of FP8, by a slice of bytes in front of it."""
    stack, *starts = picked.operands
    of_bytes = ir.RankedTensorType.get(stack.type.shape, ir.IntegerType.get_unsigned(8))
    with ir.InsertionPoint(picked), picked.location:
        # The barrier keeps the bitcast in the loop. In front of it, it would be a copy.
        stack, *starts = hlo.OptimizationBarrierOp([stack, *starts]).results
        codes = hlo.bitcast_convert(of_bytes, stack)
        part = hlo.dynamic_slice(codes, starts, picked.attributes["slice_sizes"])
        return hlo.bitcast_convert(picked.results[0].type, part)
