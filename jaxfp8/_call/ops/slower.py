"""Products that `rewrite` leaves as written: XLA's program for them is faster than the kernel.

`ROWS` is the one table. The first row about a product counts, and tells which run set it. A speed
is XLA's time for the function as written over the time with the call, so below 1x the call loses.
H200, Xeon and Zen 4 stand for `python -m jaxfp8 bench --never-slower --quick`: on 2026-11-28 an
NVIDIA H200, and four threads of an Intel Xeon with AMX, jax 0.11.2; on 2026-11-29 two cores of an
AMD Zen 4 with two seeds, jax 0.10.0. "Zen 4, AVX2" is the same one with a library that detects
AVX2 alone, and `XLA_FLAGS=--xla_cpu_max_isa=AVX2`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from jaxfp8._call.gpu import asked, xla_products
from jaxfp8._call.library import ffi, targets
from jaxfp8._call.ops import lowering, routes
from jaxfp8._call.ops.compared_product import MANY, Product
from jaxfp8._value import dtypes
from jaxfp8._value.spec import ScaledDotSpec

# How a reason begins.
FASTER = "XLA's program is faster"
_HOPPER, _BLACKWELL = xla_products.MEASURED_ON, 100
_SOME = 16  # Programs of one row win; none between was measured.
_LEAVE = "leave it to XLA here"
_TO_BFLOAT16 = f"convert the float32 operand to bfloat16, or {_LEAVE}"
_CONSTANT_SCALES = f"use scales that are constant along the contracted axis, or {_LEAVE}"
_FEWER_ROWS = f"{_LEAVE}, or give it fewer rows"
_NO_TENSOR_CORES = "has no tensor cores"
_IN_FLOAT32 = "H100: 4096³ in blocks of 32 with float32 scales took 12.8 ms beside 0.33"
_SMALL = "is a call of its own, and {p.stored} values save less"
_FINE = "scales each tile of {p.tile} along the contracted axis by itself"
_AS_XLA = "multiplies in float32, as XLA does"
_SLOWER = "is slower than XLA's product of integers"
_MEMORY = "8 bits save memory"
_NO_GAIN = 1 << 20  # values of a weight


class Slower(NamedTuple):
    """Why XLA's program for a product is faster than the kernel, and a remedy."""

    reason: str
    remedy: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Products that XLA computes sooner.

    Attributes:
      on: the machine: "cuda", "cuda:90" (Hopper), "cuda:100+"; a CPU with "amx", without it but
        with AVX-512 VBMI "avx512", with "avx2" and no AVX-512, or "avx2+", one of the last two.
      about: whether the row is about a product.
      does: what its kernel does instead.
      remedy: what to change.
      seen: the figures behind the row, and those of the nearest products that stay calls.
    """

    on: str
    about: Callable[[Product], bool]
    does: str
    remedy: str = _LEAVE
    seen: str


def _is_fine(p: Product) -> bool:
    """Whether scales or zero points make XLA's program more than one kernel."""
    return p.tile > 0 or p.shifted


def _is_of_integers(p: Product) -> bool:
    """Whether XLA multiplies integers, some rows by weights [N, K]."""
    return p.in_integers and p.in_lines and p.rows >= _SOME


def _is_int8(p: Product) -> bool:
    return all(dtypes.is_int8(side.dtype) for side in p.codes)


ROWS = (
    Row(
        on="cuda",
        about=lambda p: p.path == "xla" and "float32" in p.wide and min(p.lines) > 16,
        does="rounds float32 to TF32, and the product does not",
        remedy=_TO_BFLOAT16,
        seen="H200: 8192 x 1536 x 384 took 268 µs beside 72, and 48 x 768 x 768 13 beside 9",
    ),
    Row(
        on="cuda",
        about=lambda p: p.path == "general" and p.wide == "float32",
        does=_NO_TENSOR_CORES,
        remedy=_TO_BFLOAT16,
        seen=_IN_FLOAT32,
    ),
    Row(
        on="cuda",
        about=lambda p: p.path == "general" and p.tile > 0,
        does=_NO_TENSOR_CORES,
        remedy=_CONSTANT_SCALES,
        seen=_IN_FLOAT32,
    ),
    Row(
        on="cuda",
        about=lambda p: p.path == "general",
        does=_NO_TENSOR_CORES,
        seen=_IN_FLOAT32,
    ),
    Row(
        on="cuda",
        about=lambda p: p.path.startswith("cublaslt_") and p.tile_of_floats > 0,
        does="multiplies each tile of {p.tile_of_floats} along the contracted axis by itself",
        remedy=_CONSTANT_SCALES,
        seen="H100: int8 in groups of 128 took 3.4 ms for 4096³ beside 0.26; each group passes "
        "sums through memory, on every GPU",
    ),
    Row(
        on="cuda:100+",
        about=lambda p: p.path.startswith("cublaslt_") and p.with_exponents == 2,
        does="decodes both sides",
        seen="not measured: from Blackwell on cuDNN multiplies blocks of 32 as they are",
    ),
    Row(
        on="cuda:90",
        about=lambda p: p.path == "cublaslt_wide" and not p.wide and p.with_exponents == 1,
        does="decodes both sides, as XLA does",
        remedy=f"give both sides exponents for scales, or {_LEAVE}",
        seen="H200: codes by MX 0.79x (8 x 512 x 6144 x 4096), 0.90x (4096 x 768 x 3072) and 1.02x "
        "(8192 x 2112 x 7168)",
    ),
    Row(
        on="cuda",
        about=lambda p: p.path == asked.WEIGHT_ONLY and bool(p.wide) and p.rows > 256,
        does="is for up to 256 rows, and these are {p.rows}",
        remedy=_FEWER_ROWS,
        seen="H100: with 256 rows it was level with decoding first; each 64 rows decode again",
    ),
    Row(
        on="cuda",
        about=lambda p: (
            p.path != asked.WEIGHT_ONLY
            and bool(p.wide)
            and p.tile > 0
            and p.rows > 512
            and not p.path.startswith("cublaslt_")
        ),
        does="is for up to 512 rows, and these are {p.rows}",
        remedy=_FEWER_ROWS,
        seen="H100: 256 rows of 14336 x 4096 with scales of 32 took 90 µs beside 150, 4096 rows "
        "979 beside 688; with 1024 rows and blocks of 128 XLA was 1.08x faster",
    ),
    Row(
        on="cuda:90",
        about=lambda p: p.path == "decoded_w8a16" and p.rows > 512,
        does="is for up to 512 rows, and these are {p.rows}",
        remedy=_FEWER_ROWS,
        seen="H200: 1024 rows 0.69x (8192 x 2048) and 0.77x (4096 x 14336); 8 x 256 rows 1.17x",
    ),
    Row(
        on="cuda:90",
        about=lambda p: p.path == asked.WEIGHT_ONLY and p.batches > 1 and p.shifted,
        does="makes the sums of zero points in each of a batch",
        seen="H200: 8 rows by 8 weights of 1024 x 8192 took 39 µs beside 28",
    ),
    Row(
        on="cuda:90",
        about=lambda p: (
            p.batches > 1
            and not p.wide
            and p.stored <= 5 << 20
            and p.path in ("decoded_w8a16", asked.WEIGHT_ONLY)
        ),
        does=_SMALL,
        seen="H200: batches of 8 0.68x (16 x 384 x 384) and 0.84x (4 x 384 x 1536); by sm90_gemm "
        "1.04x (16 x 768 x 768); 2.8x (8 x 2048 x 8192)",
    ),
    Row(
        on="cuda:90",
        about=lambda p: p.batches == 1 and _is_fine(p) and p.stored <= 5 << 19,
        does=_SMALL,
        seen="H200: 64 x 3072 x 768 with zero points took 31 µs beside 17, and 128 x 768 x 3072 in "
        "groups of 128 18 beside 13. Set before rows by MX weights had a faster kernel",
    ),
    Row(
        on="cuda:90",
        about=lambda p: (
            p.batches == 1 and bool(p.wide) and p.shifted and p.stored <= 8 << 20 and not p.may_join
        ),
        does=_SMALL,
        seen="H200: 1024 x 8192 with zero points 0.73x (16 rows) and 0.78x (1024 rows); from "
        "7168 x 2048 on 1.3x to 4.7x with up to 64 rows",
    ),
    Row(
        on="cuda:90",
        about=lambda p: (
            p.path == "decoded_w8a16"
            and p.batches == 1
            and not p.with_exponents
            and p.stored <= (16 << 20 if p.rows > 1 else 8 << 20)
        ),
        does=_SMALL,
        seen="H200: 0.89x (1 x 2048 x 2048), 0.77x (2 x 2112 x 7168), 0.93x (16 x 7168 x 2048); "
        "1.14x (1 x 2112 x 7168), 1.16x (1 x 6144 x 4096), 1.06x (64 x 14336 x 4096)",
    ),
    Row(
        on="cuda:90",
        about=lambda p: (
            p.batches == 1
            and bool(p.wide)
            and p.tile > 0
            and not p.with_exponents
            and p.rows > 16
            and p.lines[1] <= 2112
            and not p.may_join
        ),
        does="has few columns to share out",
        remedy=_CONSTANT_SCALES,
        seen="H200: 2112 columns 0.87x (48 rows) and 0.89x (128 rows); up to 16 rows of 2048 and "
        "2112 columns 1.19x to 1.27x; 128 rows of 8192 columns 1.17x",
    ),
    Row(
        on="amx",
        about=lambda p: p.wide == "bfloat16" and p.shifted and p.rows > MANY,
        does="multiplies in float32",
        remedy=f"use symmetric codes, or {_LEAVE}",
        seen="Xeon: 0.40x to 0.63x from 128 rows on; 1.01x to 1.62x with 48 and 64 rows",
    ),
    Row(
        on="amx",
        about=lambda p: (
            p.wide == "float16"
            and p.shifted
            and MANY < p.rows <= 512
            and p.batches == 1
            and p.stored <= 5 << 19
        ),
        does=_SMALL,
        seen="Xeon: 0.85x and 0.77x in two runs (128 x 384 x 1536); 1.3x and 1.4x (4096 x 384 x "
        "384), 3.5x and more with 64 rows of larger weights",
    ),
    Row(
        on="amx",
        about=lambda p: bool(p.wide) and 0 < p.tile <= 32 and p.rows > MANY,
        does=_FINE,
        remedy=_CONSTANT_SCALES,
        seen="Xeon: 0.46x and 0.90x (1024 rows), 0.78x (256) and 0.61x (100) by MX weights; groups "
        "of 32 with 64 rows 2.9x",
    ),
    Row(
        on="amx",
        about=lambda p: p.path == "amx_int8" and 0 < p.tile <= 32 and p.rows > 48,
        does=_FINE,
        remedy=_CONSTANT_SCALES,
        seen="Xeon: int8 codes by MX weights 0.65x (64 x 2048 x 8192); groups of 32 with 48 rows "
        "1.01x",
    ),
    Row(
        on="amx",
        about=lambda p: p.path == "amx_int8" and _is_of_integers(p),
        does=_SLOWER,
        seen="Xeon: programs of int8 by weights [N, K] 0.73x, 0.74x and 0.74x with 256 rows; 0.86x "
        "to 0.97x with 16 in two runs; two threads of another Xeon took 1.18x with weights [K, N]",
    ),
    Row(
        on="amx",
        about=lambda p: (
            p.path == "amx_bf16"
            and p.batches == 1
            and p.tile == 0
            and p.rows > MANY
            and p.stored <= (5 << 19 if _is_int8(p) else 9 << 16)
        ),
        does=_SMALL,
        seen="Xeon: 256 rows of MiniLM 0.76x (int8) and 0.82x (e4m3), of GPT-2 0.87x (int8) and "
        "1.01x (e4m3); alone, int8 products of these sizes 1.03x to 1.09x; 512 x 768 x 768 in e5m2 "
        "1.01x, 256 x 768 x 3072 in e4m3 1.36x; programs of Llama 1B 1.4x to 1.7x",
    ),
    Row(
        on="avx512",
        about=lambda p: (
            p.path == "avx512_vbmi"
            and p.wide in ("float32", "float16")
            and p.batches == 1
            and _is_fine(p)
            and p.rows > MANY
            and p.stored <= 9 << 18
        ),
        does=f"{_AS_XLA}, and scales or shifts parts of K",
        remedy=f"{_CONSTANT_SCALES}; or convert the activations to bfloat16",
        seen="Zen 4: 0.75x and 0.79x (256 x 768 x 3072, int8), 0.84x (8192 x 384 x 384, MX), 11 of "
        "18 below 1.00x and one above 1.18x; scales per channel or tensor 0.94x to 1.30x; 1.25x to "
        "2.1x with 48 and 64 rows, 1.85x and more with 100 rows of larger weights; bfloat16 with "
        "zero points 0.94x to 1.57x",
    ),
    Row(
        on="avx2+",
        about=lambda p: (
            p.batches == 1
            and p.rows == 1
            and _is_int8(p)
            and p.in_lines
            and p.depth < 4096
            and 0 < p.tile <= {"float32": p.depth, "float16": 64}.get(p.wide, 0)
        ),
        does=_FINE,
        remedy=f"use bfloat16, store the weight as [K, N], or {_LEAVE}",
        seen="Zen 4, also held to AVX2: one row of float32 by int8 [N, K] 0.45x to 0.95x in groups "
        "of 32, 0.65x to 1.2x of 128, 0.6x to 0.9x of 256 (N 384 to 12288, K 384 to 3584), per "
        "channel 0.79x to 1.04x; of float16 0.7x to 1.1x in groups of 32, of 64 0.61x with a "
        "residual and 1.1x to 1.5x alone, of 128 1.5x; K of 4096 7x and more, two rows 1.7x",
    ),
    Row(
        on="avx512",
        about=lambda p: (
            p.path == "avx512_vnni"
            and _is_of_integers(p)
            and p.rows < 2 * _SOME
            and p.stored <= 9 << 16
        ),
        does=_SLOWER,
        seen="Zen 4: MiniLM with 16 texts 0.83x, 0.92x and 0.76x; GPT-2 with 16 texts 1.03x; "
        "products of MiniLM 1.4x to 2.6x from 32 rows on",
    ),
    Row(
        on="avx2",
        about=lambda p: (
            p.path == "avx2_f32"
            and p.batches == 1
            and bool(p.wide)
            and (p.wide != "bfloat16" or 0 < p.tile <= 32)
            and p.rows > MANY
            and p.stored <= 9 << 18
        ),
        does=f"decodes the weight, and then {_AS_XLA}",
        remedy=_FEWER_ROWS,
        seen="Zen 4, AVX2: float32 and float16 0.76x to 0.99x in 9 of 14 (256 x 768 x 3072, 4096 x "
        "384 x 384), up to 1.17x, and 1.48x (100 rows); bfloat16 by MX 0.89x and 0.95x (1024 "
        "rows). Other bfloat16 and FP8 on both sides have no row: programs with 256 rows took "
        "0.58x to 1.47x, but MiniLM 1.10x and 1.14x on a Zen 3, which has AVX2 alone",
    ),
    Row(
        on="avx2",
        about=lambda p: p.path == "avx2_int8" and _is_of_integers(p) and p.stored <= 9 << 18,
        does=_SLOWER,
        seen="Zen 4, AVX2: 0.70x and 0.84x (MiniLM, 256 and 16 rows), 0.81x and 0.96x (GPT-2), "
        "0.99x and 1.19x (Llama 1B); MiniLM 1.00x on a Zen 3",
    ),
)


def than_xla(
    spec: ScaledDotSpec, platform: str, *, in_integers: bool = False, shares_input: bool = False
) -> Slower | None:
    """Why XLA's program for a product is faster than its kernel, for the target.

    The target is the machine at hand, unless the user names another.

    Args:
      spec: the product.
      platform: of the target.
      in_integers: whether XLA's program multiplies integers.
      shares_input: whether other products have the same floats.

    Returns:
      None if the kernel is at least as fast, without a kernel, and without a known GPU.
    """
    platform = {"gpu": "cuda"}.get(platform, platform)
    machines = _machines(platform)
    path = routes.kernel_for(spec, platform) if machines else None
    if not path:
        return None
    form = lowering.as_gpus_read_it(spec) if platform == "cuda" else spec
    product = Product(form, path, in_integers, shares_input)
    row = next((row for row in ROWS if row.on in machines and row.about(product)), None)
    return None if row is None else Slower(_reason(row, product, platform), row.remedy)


def only_saves_memory(spec: ScaledDotSpec, platform: str) -> str:
    """A note on a call in a report where 8 bits gain no time on the target; else "".

    On an H100 XLA read codes up to 1.2x as fast as bfloat16 up to 1024 x 1024, and larger ones 1.5x
    to 1.9x.
    """
    if (slower := than_xla(spec, platform)) is not None:
        return f"{slower.reason}: {_MEMORY} alone"
    if routes.kernel_for(spec, platform) != xla_products.NAME:
        return ""
    is_small = Product(spec, xla_products.NAME).stored <= _NO_GAIN
    return f"so small that XLA multiplies it: {_MEMORY} and hardly time" if is_small else ""


def _machines(platform: str) -> set[str]:
    """The names in the table for the target."""
    if platform == "cpu":
        features = ffi.cpu_features().split()
        if "amx" in features:
            return {"amx"}
        kind = "avx512_vbmi" if "avx512" in features else "avx2"
        return {kind.removesuffix("_vbmi"), "avx2+"} if kind in features else set()
    capability = targets.compute_capability() if platform == "cuda" else None
    if capability is None:
        return set()
    kinds = {"cuda:90": capability == _HOPPER, "cuda:100+": capability >= _BLACKWELL}
    return {"cuda", *(kind for kind, is_own in kinds.items() if is_own)}


def _reason(row: Row, product: Product, platform: str) -> str:
    where, does = "CPU" if platform == "cpu" else "GPU", row.does.format(p=product)
    kernel = "it" if product.path == xla_products.NAME else f"the kernel for it, `{product.path}`,"
    return f"{FASTER} on this {where}: {kernel} {does}"
