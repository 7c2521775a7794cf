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
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

_Kind = tuple[str, list[int]]  # dtype and sizes of an array
_TERMINATORS = ("func.return", "stablehlo.return")


def lowered(primitive: Primitive, abstract_eval: Callable[..., Any]) -> Primitive:
    """Lets loops slice the FP8 operands of a primitive as bytes, then lowers it to another one.

    JAX must not cache the first, since each loop counts. It caches the second for each platform.
    The second has the same name and parameters, and needs lowering rules.
    """
    second = Primitive(primitive.name)
    second.multiple_results = True
    second.def_abstract_eval(abstract_eval)

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        if set(ctx.module_context.platforms) == {"cpu"}:
            module = ctx.module_context.module
            _MODULES.setdefault(module, _Module()).slice_as_bytes(module, operands)
        bind = functools.partial(second.bind, **params)
        return mlir.lower_fun(bind, multiple_results=True)(ctx, *operands)

    mlir.register_lowering(primitive, lower, cacheable=False)
    return second


class _Module:
    """What was read of a module that JAX is writing. It holds no part of the module.

    JAX appends to blocks. So a later product reads what was appended since, and the last operation
    of each block again, whose regions may have grown. A product of a new kind reads all.
    """

    def __init__(self) -> None:
        self._kinds: list[_Kind] = []  # of operands so far
        self._read: dict[int, int] = {}  # operations of a block, by its hash

    def slice_as_bytes(self, module: Any, operands: Sequence[Any]) -> None:
        """Replaces the slices of FP8 stacks from which operands may come."""
        kinds = [_kind(operand) for operand in operands if _may_be_slice(operand)]
        if not kinds:
            return
        if new := [kind for kind in kinds if kind not in self._kinds]:
            self._kinds += new
            self._read.clear()
        for function in module.body:
            self._slice_in(function.operation)

    def _slice_in(self, op: Any) -> None:
        for region in op.regions:
            for block in region:
                for inner in self._appended(block):
                    self._slice_in(inner)
                    self._replace(inner)

    def _appended(self, block: Any) -> list[Any]:
        """The operations of a block that were not read, and the last one that was."""
        operations, read = block.operations, self._read.get(hash(block), 0)
        number = len(operations)
        self._read[hash(block)] = number
        if number == 0 or (read == number and operations[number - 1].name in _TERMINATORS):
            return []
        first = max(read - 1, 0)
        new = operations if first == 0 else map(operations.__getitem__, range(first, number))
        return [op.operation for op in new]

    def _replace(self, op: Any) -> None:
        if op.name == "stablehlo.reshape" and _kind(op.results[0]) in self._kinds:
            picked = op.operands[0].owner
            if not isinstance(picked, ir.Block) and picked.name == "stablehlo.dynamic_slice":
                op.operands[0] = _slice_of_bytes(picked)


_MODULES: weakref.WeakKeyDictionary[Any, _Module] = weakref.WeakKeyDictionary()


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


def _kind(value: Any) -> _Kind:
    """Dtype and sizes of an array; axes may be permuted between a slice and a product."""
    return str(value.type.element_type), sorted(value.type.shape)


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
