"""Products of groups, of rows or along the contracted axis: mixtures of experts and gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxfp8._call.ops.ragged_call import results_of as bind
from jaxfp8._call.ops.ragged_reference import RaggedSpec
from jaxfp8._ops.epilogue import Epilogue, check_addend, prepare
from jaxfp8._ops.operands import Operand, Side, as_sides
from jaxfp8._ops.products import Product
from jaxfp8._value import checks, dtypes
from jaxfp8._value.errors import message
from jaxfp8._value.prepared import PreparedArray
from jaxfp8._value.qarray import QArray
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, Shape, is_known

_OPERATION = "jaxfp8.ragged_dot"


def ragged_dot(
    lhs: Operand,
    rhs: Operand,
    group_sizes: ArrayLike,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: str | None = None,
    gated: bool = False,
    row_weights: ArrayLike | None = None,
    out_scale: ArrayLike | None = None,
    return_amax: bool = False,
) -> Product:
    """Products of groups, computed on the 8-bit data: of rows, or along the contracted axis.

    The shapes decide:

        lhs [M, K],    rhs [G, K, N]:  y[m]    = lhs[m] @ rhs[g(m)]
        lhs [G, M, K], rhs [G, K, N]:  y[g, m] = lhs[g, m] @ rhs[g],  m < group_sizes[g]
        lhs [M, K],    rhs [K, N]:     y[g]    = lhs[:, k(g)] @ rhs[k(g), :]

    In the first, rows are in groups: the first `group_sizes[0]` are of group 0, the next
    `group_sizes[1]` of group 1, and so on. Each group has a matrix of its own. In the second, each
    group has rows of its own; only the first ones count. Rows of no group are zeros. In the third,
    the positions of K are in groups, likewise. It is the gradient of the weights of the first: with
    tokens x [T, A] and cotangents dy [T, B], `ragged_dot(x.T, dy, sizes)` is [G, A, B]. A group
    without positions gives zeros. Values at positions of other groups, or of none, do not count,
    NaN included.

    The first two take an epilogue, as a layer of experts needs it:

        z = sum + residual + bias[g]
        y = activation(z), or activation(z[:, :N / 2]) * z[:, N / 2:] if gated
        y = row_weights * y;    out = y, or saturate(y / out_scale) in 8 bits

    A row of no group has a sum of 0, and no bias.

    It is `jax.lax.ragged_dot`, or `ragged_dot_general`, of the dequantized operands, with sums and
    scales as in `dot_general`. Sizes need not be multiples of anything, stay on the device, and may
    be 0. Known ones have to fit `lhs`. Among those of a traced array, one below 0 counts as 0, and
    excess over `lhs` is cut off.

    On the CPU it is one call: each group multiplies its own rows, or its own part of K, by the
    kernel that `dot_general` would take. The call has the epilogue, on GPUs too, but for gates and
    for weights of rows behind a bias, a residual, an activation or a gate: XLA then computes the
    whole epilogue behind the call, from sums in float32. It does so on several devices, under
    `vmap` and in derivatives as well.

    On an NVIDIA GPU of compute capability 9.0 it is one launch for two 8-bit operands without zero
    points: FP8 scales may change every 128 of K or a multiple, or not at all; int8 and uint8 scales
    may not change along K. Tiles of scales begin at multiples of their size along K, for any start
    of a group. The kernel reads K-contiguous operands: hold weights as [G, N, K] and pass `w.mT`,
    and hold operands of a sum over tokens as [A, T] and [B, T]. Others are transposed first.
    Rows of bfloat16 or float16 times 8-bit weights are one launch from compute capability 8.0 on.
    Weights may have zero points, and are read as stored; scales may change as FP8's do. All
    other products on GPUs are one scaled dot per group, of all rows or all of K, with the reason
    in a `FallbackWarning`. The same holds, on the CPU too, under `vmap` and in derivatives. There
    are derivatives by a float `lhs` or `rhs` and by scales.

    On several devices groups, rows, columns and K may be split, in any mixture. Each device
    multiplies its own part. It sends what a product of floats would, in 8 bits where operands
    move. Along explicit mesh axes the output is split as the rows and columns are, and derivatives
    gather operands first, with a `FallbackWarning`.

    Args:
      lhs: [M, K] or [G, M, K].
      rhs: [G, K, N] or [K, N].
      group_sizes: integers [G].
      precision: as in `dot_general`. Pass HIGHEST for gradients, which are sums over many tokens:
        where no scale changes along K, a GPU may sum FP8 fast, in fewer bits than float32.
      preferred_element_type: output dtype: float32, bfloat16 or float16; or 8 bits, with
        `out_scale`. Default: the float side's dtype, else that of the scales, else float32.
      bias: [G or 1, N or 1], or [N]: one row for each group.
      residual: broadcasts over the output; not with `gated`.
      activation: as in `dot_general`.
      gated: whether the columns are those of a gate, then those that it multiplies.
      row_weights: [M] or [G, M], such as the weights of a router. Right behind the
        sums they are multiplied with a scale of the rows first, in float32. In rows of no group one
        that is not finite gives NaN, or 0 where it is a scale of the rows.
      out_scale, return_amax: as in `dot_general`.

    Both operands may be any of `dot_general`'s, except a `PreparedArray`.

    Returns:
      [M, N] for the first of these, else [G, M, N]; N / 2 columns if gated. An 8-bit output is a
      `QArray`. With `return_amax` it is `(out, amax)`.

    Raises:
      TypeError: an operand, the sizes or the output dtype is not listed above.
      ValueError: shapes do not fit; `precision` or `activation` is unknown; known sizes do not fit
        `lhs`; or groups along K have an epilogue.
      UnsupportedError: inside `jaxfp8.strict()`, if no kernel takes it.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8
      >>> experts = jaxfp8.quantize(jnp.stack([jnp.eye(4), 2 * jnp.eye(4)]))
      >>> rows = jaxfp8.quantize(jnp.ones((5, 4)))
      >>> y = jax.eval_shape(jaxfp8.ragged_dot, rows, experts, jnp.array([3, 1]))
      >>> y.shape
      (5, 4)
      >>> tokens, cotangents = jaxfp8.quantize(jnp.ones((4, 5))), jaxfp8.quantize(jnp.ones((6, 5)))
      >>> y = jax.eval_shape(jaxfp8.ragged_dot, tokens, cotangents.mT, jnp.array([3, 1]))
      >>> y.shape
      (2, 4, 6)
      >>> y = jaxfp8.ragged_dot(rows, experts, jnp.array([3, 1]), bias=jnp.array([[1.0], [0.5]]))
      >>> y[:, 0].round(1).tolist()
      [2.0, 2.0, 2.0, 2.5, 0.0]
    """
    for name, operand in (("lhs", lhs), ("rhs", rhs)):
        if isinstance(operand, PreparedArray):
            needs, remedy = "groups take none", "pass `unprepare()` of it"
            raise TypeError(message(_OPERATION, f"`{name}`", "is prepared", needs, remedy))
    left, right = as_sides(_OPERATION, lhs, rhs)
    sides = left.without_exponents(), right.without_exponents()
    sizes = as_sizes(_OPERATION, group_sizes)
    check_shapes(_OPERATION, sides[0].shape, sides[1].shape, sizes)
    check_known_sizes(_OPERATION, group_sizes, sides[0].shape, sides[1].shape)
    bare = RaggedSpec(
        lhs=_spec(sides[0], 1),
        rhs=_spec(sides[1], 0),
        groups=sizes.shape[0],
        gated=bool(gated),
        weighted=row_weights is not None,
        precision=checks.as_precision(_OPERATION, precision),
        epilogue=EpilogueSpec(out_dtype=_out_dtype(preferred_element_type, sides).name),
    )
    epilogue = Epilogue(bias, residual, activation, out_scale, return_amax)
    spec, planes = _with_epilogue(bare, epilogue, row_weights)
    named: dict[str, Any] = {**sides[0].operands("lhs"), **sides[1].operands("rhs"), **planes}
    out, *amax = bind(spec, {**named, "group_sizes": sizes})
    y: Product = out
    if dtypes.is_eight_bit(spec.out_dtype):
        scale = planes["out_scale"].reshape(planes["out_scale"].shape[-out.ndim :])
        y = QArray(dtypes.bits_as(out, np.dtype(spec.out_dtype)), scale)
    return (y, amax[0].reshape(())) if amax else y


def _with_epilogue(
    spec: RaggedSpec, epilogue: Epilogue, row_weights: ArrayLike | None
) -> tuple[RaggedSpec, dict[str, jax.Array]]:
    """The spec with a checked epilogue, and its operands at rank 3: groups, rows, columns."""
    _check_places(spec, epilogue)
    out, dtype = spec.out_shape, np.dtype(spec.out_dtype)
    order = tuple(range(len(out)))
    wide = dataclasses.replace(epilogue, bias=None)
    after = prepare(_OPERATION, wide, out, order, dtype)
    planes = {name: x.reshape((1,) * (3 - x.ndim) + x.shape) for name, x in after.operands.items()}
    if epilogue.bias is not None:
        lines = (spec.groups, spec.columns)
        own = check_addend(_OPERATION, "bias", epilogue.bias, lines, "groups and their columns")
        planes["bias"] = jnp.broadcast_to(own, (spec.groups, own.shape[1]))[:, None]
    given: dict[str, Any] = {name: x.shape for name, x in planes.items()}
    if epilogue.return_amax:
        given["amax"] = (1, 1, 1)
    if row_weights is not None:
        weights = check_addend(_OPERATION, "row_weights", row_weights, spec.row_shape)
        planes["row_weights"] = jnp.broadcast_to(weights, spec.row_shape)
    return dataclasses.replace(spec, epilogue=dataclasses.replace(after.spec, **given)), planes


def _check_places(spec: RaggedSpec, epilogue: Epilogue) -> None:
    """Refuses an epilogue of products that have none."""
    given = {**vars(epilogue), "gated": spec.gated, "row_weights": spec.weighted or None}
    names = [name for name, value in given.items() if value is not None and value is not False]
    if spec.grouping == "contracted" and (names or dtypes.is_eight_bit(spec.out_dtype)):
        names = names or ["preferred_element_type"]
        needs, remedy = "groups along the contracted axis are sums alone", "apply it to the result"
    elif spec.gated and epilogue.residual is not None:
        names, needs, remedy = ["residual"], "a gated output takes none", "add it to the result"
    elif spec.gated and is_known((spec.columns,)) and spec.columns % 2:
        names, needs = ["gated"], f"{spec.columns} columns have no halves"
        remedy = "give the columns of the gate, then as many more"
    else:
        return
    raise ValueError(message(_OPERATION, f"`{names[0]}`", "is given", needs, remedy))


def _spec(side: Side, contracted: int) -> OperandSpec:
    """The spec of a side of matrices, contracted along one of its last two axes."""
    batch = tuple(range(len(side.shape) - 2))
    return side.spec((len(batch) + contracted,), batch)


def as_sizes(operation: str, group_sizes: ArrayLike) -> jax.Array:
    """Sizes of groups in int32; an error for what are no integers."""
    if isinstance(group_sizes, np.ndarray) and np.issubdtype(group_sizes.dtype, np.integer):
        limits = np.iinfo(np.int32)  # JAX would cut 64 bits off
        group_sizes = np.clip(group_sizes, limits.min, limits.max).astype(np.int32)
    elif isinstance(group_sizes, list | tuple) and not group_sizes:
        group_sizes = np.zeros(0, np.int32)
    sizes = checks.as_array(operation, "group_sizes", group_sizes)
    if not jnp.issubdtype(sizes.dtype, np.integer):
        got, needs = f"has dtype {sizes.dtype}", "integers are needed"
        remedy = "count what each group has, as `jnp.bincount` does"
        raise TypeError(message(operation, "`group_sizes`", got, needs, remedy))
    own, limits = jnp.iinfo(sizes.dtype), np.iinfo(np.int32)
    least, most = max(own.min, limits.min), min(own.max, limits.max)
    return jnp.clip(sizes, least, most).astype(jnp.int32)


def check_known_sizes(operation: str, group_sizes: Any, lhs: Shape, rhs: Shape) -> None:
    """Refuses sizes that do not fit `lhs`. Those of a tracer, or of another host, are not known."""
    most = lhs[0] if (len(lhs), len(rhs)) == (2, 3) else lhs[1]
    if not (_is_known(group_sizes) and is_known((most,))):
        return
    sizes = [int(size) for size in np.asarray(group_sizes).tolist()]
    what = "positions of K" if len(rhs) == 2 else "rows"
    own = most if len(lhs) == 3 else max(sum(sizes), most)
    needs = f"{most} at most are needed, as `lhs` has"
    for group, size in enumerate(sizes):
        if not 0 <= size <= own:
            more = "" if size < 0 else f", more than {most} {what}"
            got, needs = f"has {size} for group {group}{more}", f"0 to {most} are needed"
            break
    else:
        if len(lhs) == 3 or sum(sizes) <= most:
            return
        got = f"adds up to {sum(sizes)} {what}"
    remedy = "count what each group has, as `jnp.bincount` does, or pad `lhs`"
    raise ValueError(message(operation, "`group_sizes`", got, needs, remedy))


def _is_known(group_sizes: Any) -> bool:
    """Whether sizes may be read here and now."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(group_sizes)):
        return False
    return bool(getattr(group_sizes, "is_fully_addressable", True))


def check_shapes(operation: str, lhs: Shape, rhs: Shape, sizes: jax.Array) -> None:
    """Refuses operands that are no groups of matrices."""
    got = f"are {list(lhs)} and {list(rhs)}"
    remedy = "pass what is stored as [G, N, K] or [N, K] as `w.mT`"
    if (len(lhs), len(rhs)) not in ((2, 3), (3, 3), (2, 2)):
        needs = "[M, K] and [G, K, N], [G, M, K] and [G, K, N], or [M, K] and [K, N] are needed"
    elif lhs[-1] != rhs[-2]:
        needs = "the last axis of `lhs` and the last but one of `rhs` are summed over, and"
        needs += " have to agree"
    elif len(lhs) == 3 and lhs[0] != rhs[0]:
        needs, remedy = "both need the same number of groups", "give `lhs` rows for each group"
    elif sizes.ndim != 1 or (len(rhs) == 3 and sizes.shape != rhs[:1]):
        got = f"has shape {list(sizes.shape)}, and `rhs` has shape {list(rhs)}"
        needs, remedy = (
            "one size for each group is needed",
            "pass integers [G], 0 for an empty group",
        )
        raise ValueError(message(operation, "`group_sizes`", got, needs, remedy))
    elif not is_known(sizes.shape):
        got, needs = f"has symbolic shape {sizes.shape}", "the number of groups has to be known"
        remedy = "export with a number of groups; rows may be symbolic"
        raise ValueError(message(operation, "`group_sizes`", got, needs, remedy))
    else:
        return
    raise ValueError(message(operation, "shapes of `lhs` and `rhs`", got, needs, remedy))


def _out_dtype(asked: DTypeLike | None, sides: tuple[Side, Side]) -> np.dtype:
    if asked is not None:
        allowed = (*dtypes.WIDE_FLOAT, *dtypes.EIGHT_BIT)
        return checks.as_dtype(_OPERATION, "preferred_element_type", asked, allowed)
    floats = [side.dtype for side in sides if side.dtype in dtypes.WIDE_FLOAT]
    named = floats or [side.result_dtype for side in sides if side.result_dtype is not None]
    return np.dtype(jnp.promote_types(named[0], named[-1])) if named else np.dtype(np.float32)
