"""Random scaled dots: a spec and operands that fit it, drawn from a numpy generator."""

from __future__ import annotations

import numpy as np

from jaxfp8._value import dtypes as _dtypes
from jaxfp8._value.spec import ACTIVATIONS, EpilogueSpec, OperandSpec, ScaledDotSpec

EIGHT_BIT = ("float8_e4m3fn", "float8_e5m2", "int8", "uint8")
WIDE = ("float32", "bfloat16", "float16")
SIZES = (0, 1, 2, 3, 4, 7, 8, 16, 17, 33, 64, 118)


def draw_spec(rng: np.random.Generator) -> ScaledDotSpec:
    """A spec of any dtypes, dimension numbers, granularity and epilogue."""
    batch = _draw_sizes(rng, rng.choice([0, 0, 0, 1, 2]), most=3)
    contracting = _draw_sizes(rng, rng.choice([1, 1, 1, 2, 0]), most=140)
    free = [_draw_sizes(rng, rng.choice([1, 1, 1, 2, 0]), most=60) for _ in range(2)]
    dtypes = [str(rng.choice(EIGHT_BIT)), str(rng.choice(EIGHT_BIT + WIDE + WIDE))]
    if rng.random() < 0.5:
        dtypes.reverse()
    shared = [b for b in range(len(batch)) if rng.random() < 0.3]
    lhs = _draw_side(rng, dtypes[0], batch, contracting, free[0], shared)
    rhs = _draw_side(rng, dtypes[1], batch, contracting, free[1], ())
    spec = ScaledDotSpec(lhs=lhs, rhs=rhs, epilogue=EpilogueSpec(out_dtype="float32"))
    return _with_epilogue(rng, spec)


def draw_operands(rng: np.random.Generator, spec: ScaledDotSpec) -> dict[str, np.ndarray]:
    """Operands of a spec, finite and of moderate size."""
    shapes = {
        "residual": spec.epilogue.residual,
        "bias": spec.epilogue.bias,
        "out_scale": spec.epilogue.out_scale,
    }
    operands: dict[str, np.ndarray] = {}
    for name in spec.operand_names():
        if name in ("lhs", "rhs"):
            side = getattr(spec, name)
            operands[name] = draw_values(rng, side.dtype, side.shape)
        elif name.endswith("_zero_point"):
            side = getattr(spec, name.removesuffix("_zero_point"))
            low, high = _dtypes.finite_range(side.dtype)
            operands[name] = rng.integers(low, high + 1, side.scale_shape, dtype=np.int32)
        elif name.endswith("_sums"):
            side = getattr(spec, name.removesuffix("_sums"))
            operands[name] = sums_of(side, operands[name.removesuffix("_sums")])
        elif name in ("lhs_scale", "rhs_scale"):
            side = getattr(spec, name.removesuffix("_scale"))
            operands[name] = _draw_scale(rng, side.scale_shape)
        elif name == "out_scale":
            operands[name] = _draw_scale(rng, shapes[name]) * np.float32(0.3)
        else:
            dtype = spec.epilogue.residual_dtype if name == "residual" else "float32"
            operands[name] = rng.normal(size=shapes[name]).astype(np.dtype(dtype))
    return operands


def sums_of(side: OperandSpec, values: np.ndarray) -> np.ndarray:
    """The sums of a side's integers over its contracted axes."""
    return values.sum(side.contracting, dtype=np.int32, keepdims=True)


def draw_values(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values as stored; any code but NaN and inf for FP8, any for integers."""
    if _dtypes.is_float8(dtype):
        codes = np.arange(256, dtype=np.uint8)
        finite = codes[np.isfinite(codes.view(np.dtype(dtype)).astype(np.float32))]
        return rng.choice(finite, shape)
    if _dtypes.is_int8(dtype):
        low, high = _dtypes.finite_range(dtype)
        return rng.integers(low, high + 1, shape).astype(dtype)
    return rng.normal(size=shape).astype(np.dtype(dtype))


def _draw_sizes(rng: np.random.Generator, rank: int, most: int) -> list[int]:
    sizes = [size for size in SIZES if size <= most]
    weights = np.array([0.3 if size == 0 else 1.0 for size in sizes])
    return [int(s) for s in rng.choice(sizes, rank, p=weights / weights.sum())]


def _draw_side(rng, dtype: str, batch, contracting, free, shared) -> OperandSpec:
    """A side whose axes stand in random order."""
    sizes = [1 if b in shared else size for b, size in enumerate(batch)] + contracting + free
    order = rng.permutation(len(sizes))
    place = [int(np.flatnonzero(order == i)[0]) for i in range(len(sizes))]
    shape = tuple(sizes[i] for i in order)
    split = len(batch) + len(contracting)
    return OperandSpec(
        dtype=dtype,
        shape=shape,
        batch=tuple(place[: len(batch)]),
        contracting=tuple(place[len(batch) : split]),
        tiles=tuple(_draw_tile(rng, size) for size in shape),
        scale=bool(rng.random() < 0.7),
        zero_point=_dtypes.is_int8(dtype) and bool(rng.random() < 0.4),
        sums=_dtypes.is_int8(dtype) and sum(shape) % 2 == 0,
    )


def _draw_tile(rng: np.random.Generator, size: int) -> int:
    return int(rng.choice([max(size, 1), max(size, 1), 1, 3, 16, 128]))


def _draw_scale(rng: np.random.Generator, shape) -> np.ndarray:
    return np.exp2(rng.uniform(-3, 3, shape)).astype(np.float32)


def _with_epilogue(rng: np.random.Generator, spec: ScaledDotSpec) -> ScaledDotSpec:
    sides = (spec.lhs, spec.rhs)
    plain = all(_dtypes.is_int8(s.dtype) and not s.scale for s in sides)
    if plain and rng.random() < 0.5:
        epilogue = EpilogueSpec(out_dtype="int32")
    else:
        epilogue = _draw_epilogue(rng, spec.out_shape)
    return ScaledDotSpec(lhs=spec.lhs, rhs=spec.rhs, epilogue=epilogue)


def _draw_epilogue(rng: np.random.Generator, out_shape) -> EpilogueSpec:
    out_dtype = str(rng.choice(WIDE + WIDE + EIGHT_BIT))
    residual = _draw_broadcast(rng, out_shape) if rng.random() < 0.3 else None
    return EpilogueSpec(
        residual=residual,
        residual_dtype="" if residual is None else str(rng.choice(WIDE)),
        bias=_draw_broadcast(rng, out_shape) if rng.random() < 0.4 else None,
        activation=str(rng.choice(ACTIVATIONS)) if rng.random() < 0.5 else "none",
        out_dtype=out_dtype,
        out_scale=_draw_broadcast(rng, out_shape) if _dtypes.is_eight_bit(out_dtype) else None,
        amax=_draw_broadcast(rng, out_shape) if rng.random() < 0.3 else None,
    )


def _draw_broadcast(rng: np.random.Generator, shape) -> tuple[int, ...]:
    return tuple(size if rng.random() < 0.6 else 1 for size in shape)
