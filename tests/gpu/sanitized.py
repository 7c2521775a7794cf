"""A reduced suite for compute-sanitizer: every path, odd sizes, all features, few launches."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import quantized  # noqa: E402
from gpu import products  # noqa: E402
from gpu.tensors import Call, canonical  # noqa: E402
from gpu.test_cache_layouts import attention_product  # noqa: E402
from ragged_case import FP8_LOSS, Ragged  # noqa: E402

import jaxfp8  # noqa: E402
import oracle  # noqa: E402
from jaxfp8._ops import int8_compute  # noqa: E402

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
FULL = {"bias": (1, 72), "residual": (1, 72), "residual_dtype": "float32", "activation": "silu"}
EIGHT = {"out_dtype": E4M3, "out_scale": (1, 1), "amax": (1, 1)}
BLOCKS = {"lhs_tiles": (1, 128), "rhs_tiles": (128, 128)}

MX = {"lhs_tiles": (1, 32), "rhs_tiles": (1, 32)}
EXPONENTS = {"exponents": True}
CASES = [
    ("sm80_w8a16", ("bfloat16", E4M3, 1, 160, 72), {"rhs_tiles": (1, 160)}),
    ("sm80_w8a16", ("bfloat16", E4M3, 5, 160, 72), {"rhs_first": False, **FULL}),
    ("sm80_w8a16", ("float16", "int8", 17, 136, 72), {"rhs_tiles": (1, 136), "zero_points": True}),
    ("sm80_w8a16", ("bfloat16", E5M2, 33, 256, 72), {"rhs_tiles": (64, 128), **EIGHT}),
    ("sm80_w8a16", ("bfloat16", E4M3, 3, 1100, 264), {"rhs_first": False, "rhs_tiles": (1, 1100)}),
    ("sm80_w8a16", ("bfloat16", E4M3, 40, 1152, 136), {"rhs_tiles": (1, 128), **EIGHT}),
    ("sm80_w8a16", (E4M3, E5M2, 3, 1100, 72), {"rhs_tiles": (1, 1100), **FULL}),
    ("sm80_w8a16", (E4M3, E4M3, 16, 264, 136), {"rhs_first": False, "lhs_tiles": (1, 264)}),
    ("cublaslt_fp8", (E4M3, E4M3, 33, 100, 72), {"lhs_tiles": (1, 100), "rhs_tiles": (1, 100)}),
    ("cublaslt_fp8", (E4M3, E5M2, 32, 128, 64), {"out_dtype": "bfloat16"}),
    ("sm90_gemm", (E4M3, E4M3, 33, 300, 72), {**BLOCKS, "rhs_first": False, **FULL}),
    ("sm90_gemm", (E5M2, E4M3, 300, 128, 264), {**BLOCKS, "out_dtype": "bfloat16"}),
    ("sm90_gemm", (E4M3, E4M3, 140, 272, 72), {"precision": "default", **FULL}),
    ("sm90_gemm", ("int8", "int8", 300, 272, 264), {"zero_points": True, "out_dtype": "bfloat16"}),
    ("sm90_gemm", ("uint8", "int8", 33, 100, 72), {**FULL, "zero_points": True}),
    ("sm90_gemm", ("bfloat16", E4M3, 140, 272, 136), {"rhs_first": False, "rhs_tiles": (1, 272)}),
    ("sm90_gemm", ("float16", "int8", 70, 144, 72), {"rhs_first": False, **FULL, **EIGHT}),
    (
        "sm90_gemm",
        ("bfloat16", "uint8", 140, 400, 144),
        {"rhs_tiles": (1, 64), "zero_points": True},
    ),
    ("sm90_gemm", ("bfloat16", E4M3, 70, 272, 80), {"rhs_tiles": (128, 128), **EIGHT}),
    ("sm90_gemm", ("int8", "int8", 33, 128, 72), {"zero_points": True, "sums": True}),
    ("cublaslt_int8", ("uint8", "int8", 33, 100, 72), {**FULL, "zero_points": True}),
    ("cublaslt_int8", ("int8", "int8", 33, 128, 72), {"zero_points": True, "sums": True}),
    ("cublaslt_wide", ("bfloat16", E4M3, 65, 128, 72), {"rhs_tiles": (1, 128), **EIGHT}),
    ("sm80_w8a16", ("bfloat16", E4M3, 3, 1000, 77), {"rhs_tiles": (1, 32), **EIGHT}),
    ("sm80_w8a16", ("float16", "int8", 70, 416, 72), {"rhs_first": False, "rhs_tiles": (1, 32)}),
    ("sm80_w8a16", ("bfloat16", E5M2, 17, 416, 76), {"rhs_tiles": (1, 64), **EXPONENTS}),
    ("sm90_gemm", ("bfloat16", E4M3, 70, 272, 80), {"rhs_tiles": (1, 32), **EXPONENTS}),
    ("decoded_w8a16", (E4M3, E4M3, 70, 272, 80), {**MX, **EXPONENTS, "rhs_first": False}),
    ("cublaslt_wide", (E4M3, E5M2, 65, 128, 72), {**MX, **EXPONENTS}),
    ("sm80_imma", ("int8", E4M3, 17, 200, 72), {"lhs_tiles": (1, 200), "rhs_tiles": (1, 200)}),
    ("sm80_imma", ("int8", E5M2, 3, 1100, 264), {"rhs_first": False, **EIGHT}),
    ("sm80_imma", ("bfloat16", E4M3, 5, 160, 72), {"rhs_tiles": (1, 160), **FULL}),
    ("sm80_imma", ("float16", E4M3, 64, 2064, 48), {"rhs_first": False, "rhs_tiles": (1, 2064)}),
    ("general", ("float32", "int8", 33, 70, 72), {"rhs_tiles": (3, 16), **FULL}),
    ("general", ("int8", "uint8", 17, 65, 72), {"out_dtype": "int32"}),
]


def rounded(spec, operands):
    """The problem that `sm80_imma` computes: both sides in int8."""
    made = dict(operands)
    for name, side in (("lhs", spec.lhs), ("rhs", spec.rhs)):
        if side.dtype == "int8":
            continue
        x = operands[name]
        x = (x.view(side.dtype) if x.dtype == np.uint8 else x).astype(np.float32)
        largest = np.where(np.isfinite(x), abs(x), 0).max(side.contracting, keepdims=True)
        step = quantized.scale_of(largest, "int8")
        made[name] = quantized.codes_of(x / step, "int8")
        made[f"{name}_scale"] = step * operands.get(f"{name}_scale", np.float32(1))
    return int8_compute.narrowed(spec), made


def run_ragged() -> None:
    """Groups of rows or along K, where tiles or steps reach over the end of a group."""
    lines = {"lhs_tile": (1, 999), "rhs_tile": (1, 999)}
    kinds = ({}, {"grouping": "masked"}, {"grouping": "contracted"})
    weights = (
        {"lhs": "bfloat16"},
        {"lhs": "bfloat16", "depth": 304},
        {"lhs": "float16", "rhs": "uint8", "zero_points": True, "depth": 304, **lines},
    )
    for more in (*kinds, {"lhs": "int8", "rhs": "int8", **lines}, *weights):
        sizes = {"rows": 220, "columns": 72, "depth": 300}
        case = Ragged(sizes=(3, 0, 70, 129), **(sizes | more))
        lhs, rhs, wide = case.draw()
        y = jaxfp8.ragged_dot(
            lhs, rhs.mT, np.asarray(case.sizes, np.int32), preferred_element_type="float32"
        )
        case.assert_right(np.asarray(y), wide, FP8_LOSS)
        print("ragged", more, "right", flush=True)


def run_cache() -> None:
    """Few rows by a cache [B, T, H, D], whose batch has two axes."""
    for part, cache in (("scores", E4M3), ("outputs", "int8")):
        for kernel in ("sm80_w8a16", "general"):
            spec = attention_product((2, 3, 5, 130, 72), "BTHD", part, cache=cache)
            spec, operands = canonical(spec, products.draw(1, spec))
            call = Call(spec, operands, kernel)
            assert call.run() == (0, "")
            oracle.assert_within_bound(spec, operands, call.results()[0], slack=2.0**-21)
            print(kernel, part, "of a cache right", flush=True)


def main() -> None:
    """Runs all cases; exits non-zero where one fails."""
    run_ragged()
    run_cache()
    for seed, (kernel, sizes, more) in enumerate(CASES):
        exponents = more.get("exponents", False)
        spec = products.matrices(*sizes, **{n: m for n, m in more.items() if n != "exponents"})
        operands = products.draw(seed, spec)
        for side in ("lhs", "rhs") if exponents else ():
            if getattr(spec, side).scale:
                spec, operands = products.in_form(spec, operands, "exponents", side)
        spec, operands = canonical(spec, operands)
        call = Call(spec, operands, kernel)
        status, text = call.run()
        assert status == 0, text
        out, amax = call.results()
        if kernel == "sm80_imma":
            spec, operands = rounded(spec, operands)
        oracle.assert_within_bound(spec, operands, np.asarray(out), amax, 2.0**-10)
        print(kernel, *sizes, "right", flush=True)


if __name__ == "__main__":
    main()
