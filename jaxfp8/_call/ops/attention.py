"""Attention of a decoding step over a cache, `attention_p`: one kernel on a GPU.

    scores  = sum_d query * keys * key_scale * scale + bias
    out     = sum_t softmax(scores) * value_scale * values

This holds for each text and each head of the cache. A bias of at most `masked` replaces its score,
and tokens from `lengths` on have no weight. On other platforms, on automatic or explicit axes of a
mesh, under vmap and in derivatives it is two products with a softmax between them. They are scaled
dots over a cache in 8 bits, and dots over one in bfloat16.

Order of this file: problem, support, primitive, its rules, lowering.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType

from jaxfp8._call.library import ffi, targets
from jaxfp8._call.mesh import explicit, partitioning
from jaxfp8._call.ops.dot import scaled_dot
from jaxfp8._call.ops.eager import run_compiled, transform_as
from jaxfp8._value import compat
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec, Shape, is_known

# The problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """All facts of attention except its data. ffi/cuda/kernels/attention/problem.h is its twin.

    Attributes:
      texts, heads, rows, tokens, width: queries are bfloat16 [texts, heads, rows, width]. Heads are
        those of the cache; rows are the query heads for each of them, times new tokens.
      cache: dtype of keys and values. FP8 may travel as uint8.
      keys_by_token, values_by_token: whether the array is [texts, tokens, heads, width], and not
        [texts, heads, tokens, width].
      key_scale, value_scale, bias: shape of a float32 array that broadcasts to
        [texts, heads, rows, tokens], or None. Scales have one row.
      lengths: shape of an int32 array that broadcasts to [texts, 1, rows, 1], or None.
      scale: of all scores.
      masked: the largest bias that replaces a score.
      equal_if_empty: whether all weights of a row of length 0 are equal; else they are NaN.
      out_dtype: bfloat16 or float32.
    """

    texts: int
    heads: int
    rows: int
    tokens: int
    width: int
    cache: str
    keys_by_token: bool
    values_by_token: bool
    key_scale: Shape | None = None
    value_scale: Shape | None = None
    bias: Shape | None = None
    lengths: Shape | None = None
    scale: float = 1.0
    masked: float = -(2.0**100)
    equal_if_empty: bool = False
    out_dtype: str = "bfloat16"

    @property
    def query(self) -> Shape:
        """Shape of the queries and of the output."""
        return self.texts, self.heads, self.rows, self.width

    def operand_names(self) -> tuple[str, ...]:
        """The operands in order."""
        given = (name for name in _TERMS if getattr(self, name) is not None)
        return ("query", "keys", "values", *given)

    def attributes(self) -> dict[str, Any]:
        """The attributes of the custom call."""
        given = {name: getattr(self, name) is not None for name in _TERMS}
        flags = ("keys_by_token", "values_by_token", "equal_if_empty")
        numbers = {name: np.float32(getattr(self, name)) for name in ("scale", "masked")}
        return {"cache": self.cache, **numbers, **given} | {n: getattr(self, n) for n in flags}

    def __str__(self) -> str:
        """The form in a printed jaxpr."""
        return f"({self.query} over {self.tokens} tokens of {self.cache} > {self.out_dtype})"


_TERMS = ("key_scale", "value_scale", "bias", "lengths")

# Support. `AttentionWhyNot` in ffi/cuda/kernels/attention/schedule.cc has the same rules, but for
# 32 rows.

_OLDEST_GPU = 80
_WIDTHS = (64, 128, 256)
# A tile has 8 rows, and each reads the cache anew.
_TILE, MOST_ROWS = 8, 16


def runs_here() -> bool:
    """Whether the least capable GPU in use has the kernel."""
    capability = targets.compute_capability()
    return capability is not None and capability >= _OLDEST_GPU


def why_not(spec: AttentionSpec) -> str | None:
    """Why the kernel cannot compute a problem, or None if it can."""
    sizes = (*spec.query, spec.tokens)
    if not is_known(sizes) or min(sizes) < 1:
        return "a size is 0 or unknown"
    if spec.width not in _WIDTHS:
        return f"its heads have {spec.width} values, and the kernel takes 64, 128 and 256"
    if spec.cache not in ("bfloat16", "float8_e4m3fn", "int8"):
        return f"the cache is {spec.cache}, and the kernel takes bfloat16, float8_e4m3fn and int8"
    if spec.rows > MOST_ROWS:
        return f"{spec.rows} rows share a head of the cache, and the kernel takes {MOST_ROWS}"
    if spec.out_dtype not in ("bfloat16", "float32"):
        return f"the output is {spec.out_dtype}, and the kernel gives bfloat16 and float32"
    return None


def why_not_on_mesh(aval: Any) -> str | None:
    """Why the kernel cannot give an output of this type, or None if its mesh leaves nothing to XLA.

    The type has no mesh if `jax.jit` places the inputs. The lowering decides then.
    """
    mesh = aval.sharding.mesh
    sizes = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    if any(kind == AxisType.Auto and size > 1 for kind, size in sizes):
        return "its mesh has automatic axes; inside `jax.shard_map` over all axes it is one call"
    return None


# The primitive

attention_p = Primitive("attention")


def attend(spec: AttentionSpec, **operands: jax.Array) -> jax.Array:
    """Attention as `spec` describes it, [texts, heads, rows, width]."""
    flat = compat.vary_alike([operands[name] for name in spec.operand_names()])
    if explicit.mesh_of(map(jax.typeof, flat)) is not None:
        return by_dots(*flat, spec=spec)
    return attention_p.bind(*flat, spec=spec, split=partitioning.is_wanted(flat))


run_compiled(attention_p)


@attention_p.def_abstract_eval
def _abstract_eval(*avals: Any, spec: AttentionSpec, split: bool) -> Any:
    del split
    return avals[0].update(shape=spec.query, dtype=jnp.dtype(spec.out_dtype), weak_type=False)


# Its rules are those of the scaled dots.


def by_dots(*operands: jax.Array, spec: AttentionSpec, split: bool = False) -> jax.Array:
    """The same as two products with a softmax between them."""
    del split  # each dot finds it anew
    given = dict(zip(spec.operand_names(), operands, strict=True))
    keys = _cache_side(spec, by_token=spec.keys_by_token, summed=_WIDTH)
    values = _cache_side(spec, by_token=spec.values_by_token, summed=_TOKENS)
    scores = _dot(given["query"], given["keys"], keys, "float32") * np.float32(spec.scale)
    scores = _masked(spec, scores * given.get("key_scale", 1.0), given)
    weights = jax.nn.softmax(scores) * given.get("value_scale", 1.0)
    return _dot(weights.astype(jnp.bfloat16), given["values"], values, spec.out_dtype)


_TOKENS, _WIDTH = 2, 3  # axes of [texts, heads, tokens, width]


def _cache_side(spec: AttentionSpec, *, by_token: bool, summed: int) -> OperandSpec:
    order = (0, 2, 1, 3) if by_token else (0, 1, 2, 3)
    shape = (spec.texts, spec.heads, spec.tokens, spec.width)
    stored = tuple(shape[axis] for axis in order)
    batch = (0, order.index(1))
    return OperandSpec.unscaled(spec.cache, stored, (order.index(summed),), batch)


def _dot(rows: jax.Array, cache: jax.Array, side: OperandSpec, out_dtype: str) -> jax.Array:
    """Rows [texts, heads, rows, depth] by a cache."""
    if side.dtype == "bfloat16":
        numbers = ((3,), side.contracting), ((0, 1), side.batch)
        narrow = functools.partial(
            lax.dot_general, dimension_numbers=numbers, preferred_element_type=jnp.float32
        )
        # XLA on a CPU has no float32 sums of bfloat16 for some shapes.
        y = lax.platform_dependent(rows, cache, cuda=narrow, default=lambda *xs: narrow(*_wide(xs)))
        return y.astype(out_dtype)
    lhs = OperandSpec.unscaled("bfloat16", rows.shape, (3,), (0, 1))
    epilogue = EpilogueSpec(out_dtype=out_dtype)
    return scaled_dot(ScaledDotSpec(lhs=lhs, rhs=side, epilogue=epilogue), lhs=rows, rhs=cache)[0]


def _wide(arrays: tuple[jax.Array, ...]) -> list[jax.Array]:
    return [x.astype(jnp.float32) for x in arrays]


def _masked(spec: AttentionSpec, scores: jax.Array, given: dict[str, jax.Array]) -> jax.Array:
    if spec.bias is not None:
        bias = given["bias"]
        scores = jnp.where(bias <= np.float32(spec.masked), bias, scores + bias)
    if spec.lengths is None:
        return scores
    lengths = given["lengths"]
    scores = jnp.where(jnp.arange(spec.tokens) < lengths, scores, -jnp.inf)
    return jnp.where(lengths > 0, scores, 0.0) if spec.equal_if_empty else scores


transform_as(attention_p, by_dots)


# Lowering

# The kernel has at most so many CTAs where parts of a text go through scratch memory.
_MOST_PARTS = 1024


def scratch_bytes(spec: AttentionSpec) -> int:
    """Scratch for the sums of parts: a maximum, a sum of weights and outputs of each row."""
    tiles = spec.texts * spec.heads * -(-spec.rows // _TILE)
    parts = tiles * min(-(-spec.tokens // 64), max(1, _MOST_PARTS // tiles))
    return parts * _TILE * (spec.width + 2) * 4


def _call(*operands: jax.Array, spec: AttentionSpec, split: bool) -> jax.Array:
    del split
    ffi.register_if_it_runs_here("cuda")
    results = [
        jax.ShapeDtypeStruct(spec.query, spec.out_dtype),
        jax.ShapeDtypeStruct((scratch_bytes(spec),), np.uint8),
    ]
    return jax.ffi.ffi_call(ffi.ATTENTION_TARGET, results)(*operands, **spec.attributes())[0]


_lower_dots = mlir.lower_fun(by_dots, multiple_results=False)
_lower_kernel = mlir.lower_fun(_call, multiple_results=False)


def _lower_cuda(ctx: Any, *operands: Any, spec: AttentionSpec, split: bool) -> Any:
    for_export = ctx.module_context.lowering_parameters.for_export
    is_alone = not split or compat.place_of(ctx) is None
    is_served = why_not(spec) is None and ffi.why_unavailable("cuda") is None
    takes = is_alone and is_served and not for_export and runs_here()
    return (_lower_kernel if takes else _lower_dots)(ctx, *operands, spec=spec, split=split)


mlir.register_lowering(attention_p, _lower_dots)
mlir.register_lowering(attention_p, _lower_cuda, platform="cuda")
