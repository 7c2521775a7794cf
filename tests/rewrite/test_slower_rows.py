"""Each measured row of products left to XLA: the kind that lost stays, its neighbour is a call."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rewrite.support import BF16, E4M3, F16, F32, count, left_alone

import jaxfp8
from jaxfp8._call.library import ffi
from jaxfp8._call.ops import slower

pytestmark = left_alone
INT8, UINT8 = jnp.int8, jnp.uint8
HOPPER, CPU = jaxfp8.Target("cuda", 90), jaxfp8.Target("cpu")
AMX = "avx2 avx512 avx512_vbmi amx"
E8M0 = jnp.float8_e8m0fnu
Case = tuple[Any, tuple[Any, ...]]


def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def product(rows: int, n: int, k: int, x: Any, w: Any, tile: int = 0, **more: Any) -> Case:
    """Rows, as floats or as codes with one scale, times dequantized weights [N, K].

    Further options: `exponents` for the scales, `zero` points, and the size of a `batch`.
    """
    batch = (more["batch"],) if more.get("batch") else ()
    scale = array((*batch, n, k // tile if tile else 1), E8M0 if more.get("exponents") else F32)
    zero = array((*batch, n, 1), w) if more.get("zero") else None

    def fun(x: Any, w: Any, scale: Any, zero: Any) -> Any:
        wide = w.astype(BF16) if zero is None else (w.astype(F32) - zero.astype(F32)).astype(BF16)
        parts = wide.reshape(*scale.shape, -1) * scale.astype(BF16)[..., None]
        x = x if x.dtype in (F32, F16, BF16) else x.astype(BF16) * BF16(0.5)
        return x @ parts.reshape(w.shape).astype(x.dtype).mT

    return fun, (array((*batch, rows, k), x), array((*batch, n, k), w), scale, zero)


# A kernel, a product that lost with it, and one like it that did not.
ON_HOPPER: dict[str, tuple[str, Case, Case]] = {
    "exponents on one side": (
        "cublaslt_wide",
        product(4096, 768, 3072, E4M3, E4M3, 32, exponents=True),
        product(4096, 768, 3072, E4M3, E4M3),
    ),
    "many rows, decoded": (
        "decoded_w8a16",
        product(1024, 8192, 2048, INT8, INT8, 128),
        product(256, 16384, 2048, INT8, INT8, 128),
    ),
    "small batches of codes": (
        "decoded_w8a16",
        product(16, 384, 384, E4M3, E4M3, 32, batch=8),
        product(8, 2048, 8192, E4M3, E4M3, 32, batch=8),
    ),
    "small batches of few rows": (
        "sm80_w8a16",
        product(4, 384, 1536, E4M3, E4M3, batch=8),
        product(16, 3072, 768, BF16, E4M3, batch=8),
    ),
    "zero points": (
        "sm80_w8a16",
        product(16, 1024, 8192, BF16, UINT8, zero=True),
        product(16, 7168, 2048, BF16, UINT8, zero=True),
    ),
    "one row, decoded": (
        "decoded_w8a16",
        product(1, 2048, 2048, E4M3, E4M3, 32),
        product(1, 2112, 7168, E4M3, E4M3, 32),
    ),
    "a few rows, decoded": (
        "decoded_w8a16",
        product(2, 2112, 7168, INT8, INT8, 128),
        product(64, 14336, 4096, E4M3, E4M3, 64),
    ),
    "few columns": (
        "sm90_gemm",
        product(128, 2112, 7168, BF16, E4M3, 64),
        product(128, 8192, 2048, BF16, E4M3, 128),
    ),
    "few columns and rows": (
        "sm80_w8a16",
        product(48, 2112, 7168, BF16, E4M3, 128),
        product(2, 2112, 7168, BF16, E4M3, 128),
    ),
}


# Without the library scales are no exponents on GPUs.
_EXPONENTS = pytest.param(next(iter(ON_HOPPER)), marks=pytest.mark.cuda_library)


@pytest.mark.parametrize("case", [_EXPONENTS, *list(ON_HOPPER)[1:]])
def test_a_kind_that_lost_on_a_hopper_stays_as_written(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lost, kept = ON_HOPPER[case]
    monkeypatch.setattr(ffi, "cuda_paths", lambda *_: {path: ""})
    (site,) = jaxfp8.explain(lost[0], target=HOPPER)(*lost[1]).missed
    assert re.match(rf"XLA's program is faster on this GPU: .*`{path}`", site.reason)
    assert site.remedy.endswith(("leave it to XLA here", "give it fewer rows"))
    for fun, args, target in ((*kept, HOPPER), (*lost, jaxfp8.Target("cuda", 89))):
        report = jaxfp8.explain(fun, target=target)(*args)
        assert len(report.matched) == 1, (target, report.missed)


@pytest.mark.parametrize("case", ["zero points", "few columns and rows"])
def test_products_of_one_input_may_share_a_launch_and_stay_calls(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, (fun, (x, *weight)), _ = ON_HOPPER[case]
    monkeypatch.setattr(ffi, "cuda_paths", lambda *_: {path: ""})
    both = lambda x, one, other: (fun(x, *one), fun(x, *other))  # noqa: E731
    assert len(jaxfp8.explain(both, target=HOPPER)(x, weight, weight).matched) == 2


def in_integers(rows: int, is_kn: bool = False, size: int = 2048) -> Case:
    """int8 by int8, summed in int32 and scaled behind the product."""

    def fun(x: Any, w: Any, scale: Any) -> Any:
        axes = (((1,), (0 if is_kn else 1,)), ((), ()))
        return jax.lax.dot_general(x, w, axes, preferred_element_type=jnp.int32) * scale

    return fun, (array((rows, size), INT8), array((size, size), INT8), array((1, size), F32))


WITH_AMX: dict[str, tuple[str, Case, Case]] = {
    "zero points beside bfloat16": (
        "avx512_vbmi",
        product(128, 3072, 768, BF16, UINT8, zero=True),
        product(64, 3072, 768, BF16, UINT8, zero=True),
    ),
    "zero points beside float16 stay": (
        "avx512_vbmi",
        product(128, 3072, 768, BF16, UINT8, zero=True),
        product(4096, 384, 384, F16, UINT8, zero=True),
    ),
    "small zero points beside float16": (
        "avx512_vbmi",
        product(128, 384, 1536, F16, INT8, zero=True),
        product(64, 384, 1536, F16, INT8, zero=True),
    ),
    "MX": (
        "amx_bf16",
        product(1024, 384, 1536, BF16, E4M3, 32, exponents=True),
        product(64, 4096, 1024, BF16, E4M3, 32, exponents=True),
    ),
    "MX beside float32": (
        "avx512_vbmi",
        product(100, 384, 384, F32, E4M3, 32),
        product(128, 3072, 768, F32, E4M3, 64),
    ),
    "int8 codes by MX": (
        "amx_int8",
        product(64, 2048, 1024, INT8, INT8, 32, exponents=True),
        product(48, 1536, 384, INT8, INT8, 32),
    ),
    "integers": ("amx_int8", in_integers(16), in_integers(8)),
    "integers, [K, N] stays": ("amx_int8", in_integers(256), in_integers(256, is_kn=True)),
    "small int8 weights": (
        "amx_bf16",
        product(256, 3072, 768, BF16, INT8),
        product(256, 2048, 2048, BF16, INT8),
    ),
    "small FP8 weights": (
        "amx_bf16",
        product(256, 384, 1536, BF16, E4M3),
        product(256, 768, 3072, BF16, E4M3),
    ),
}


@pytest.mark.parametrize("case", WITH_AMX)
def test_a_kind_that_lost_beside_amx_stays_as_written(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, (fun, args), kept = WITH_AMX[case]
    monkeypatch.setattr(ffi, "cpu_paths", lambda *_: {"other": "it cannot", path: ""})
    monkeypatch.setattr(ffi, "cpu_features", lambda: "avx2")
    assert len(jaxfp8.explain(fun, target=CPU)(*args).matched) == 1
    monkeypatch.setattr(ffi, "cpu_features", lambda: AMX)
    (site,) = jaxfp8.explain(fun, target=CPU)(*args).missed
    assert re.match(rf"XLA's program is faster on this CPU: .*`{path}`", site.reason)
    assert count(jaxfp8.rewrite(fun, target=CPU), *args) == 0
    assert len(jaxfp8.explain(kept[0], target=CPU)(*kept[1]).matched) == 1


@pytest.mark.parametrize(
    "kept",
    [
        product(64, 384, 768, F32, INT8, 128),
        product(256, 6144, 768, F32, INT8, 128),
        product(256, 384, 768, BF16, INT8, 128),
        product(256, 384, 768, F32, INT8),
    ],
    ids=["fewer rows", "more columns", "bfloat16", "a scale per channel"],
)
@pytest.mark.parametrize("dtype", [F32, F16], ids=["float32", "float16"])
def test_many_rows_of_floats_by_a_small_weight_stay_as_written_with_avx512(
    dtype: Any, kept: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ffi, "cpu_paths", lambda *_: {"other": "it cannot", "avx512_vbmi": ""})
    monkeypatch.setattr(ffi, "cpu_features", lambda: AMX.removesuffix(" amx"))
    fun, args = product(100, 384, 768, dtype, INT8, 128)
    (site,) = jaxfp8.explain(fun, target=CPU)(*args).missed
    assert "in float32, as XLA does, and scales or shifts parts" in site.reason
    assert count(jaxfp8.rewrite(fun, target=CPU), *args) == 0
    assert len(jaxfp8.explain(kept[0], target=CPU)(*kept[1]).matched) == 1


@pytest.mark.parametrize(
    ("path", "lost", "kept"),
    [
        ("avx512_vbmi", product(1, 384, 1536, F32, INT8, 32), product(2, 384, 1536, F32, INT8, 32)),
        ("avx512_vbmi", product(1, 384, 1536, F16, INT8, 32), product(1, 384, 1536, F16, E4M3, 32)),
        ("avx512_vbmi", product(1, 768, 768, F16, INT8, 64), product(1, 768, 768, F16, INT8, 128)),
        (
            "avx512_vbmi",
            product(1, 384, 3584, F32, INT8, 128),
            product(1, 384, 4096, F32, INT8, 32),
        ),
        ("avx512_vnni", in_integers(16, size=384), in_integers(8, size=384)),
        ("avx512_vnni", in_integers(16, size=384), in_integers(16, size=1024)),
        ("avx512_vnni", in_integers(16, size=384), in_integers(32, size=384)),
    ],
    ids=[
        "two rows",
        "e4m3",
        "tiles of 128",
        "a deeper weight",
        "few integers",
        "larger integers",
        "more integers",
    ],
)
def test_a_kind_that_lost_with_avx512_stays_as_written(
    path: str, lost: Case, kept: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_lost(monkeypatch, AMX.removesuffix(" amx"), path, lost, kept)


@pytest.mark.parametrize(
    ("path", "lost", "kept"),
    [
        ("avx2_f32", product(256, 768, 3072, F32, INT8), product(64, 768, 3072, F32, INT8)),
        ("avx2_f32", product(100, 768, 768, F16, E4M3), product(100, 384, 384, BF16, E4M3)),
        ("avx2_f32", product(256, 768, 768, F16, E4M3), product(256, 768, 768, E4M3, E4M3)),
        (
            "avx2_f32",
            product(1024, 384, 1536, BF16, E4M3, 32, exponents=True),
            product(1024, 2048, 2048, BF16, E4M3, 32, exponents=True),
        ),
        ("avx2_int8", in_integers(16, size=384), in_integers(16, size=2048)),
        ("avx2_f32", product(1, 384, 1536, F32, INT8, 128), product(1, 384, 1536, F32, E4M3, 128)),
    ],
    ids=["many rows", "bfloat16", "codes", "larger MX", "larger integers", "e4m3"],
)
def test_a_kind_that_lost_with_avx2_stays_as_written(
    path: str, lost: Case, kept: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_lost(monkeypatch, "avx2", path, lost, kept)


def check_lost(
    monkeypatch: pytest.MonkeyPatch, features: str, path: str, lost: Case, kept: Case
) -> None:
    """One product stays as written on a CPU, and the other does not."""
    monkeypatch.setattr(ffi, "cpu_paths", lambda *_: {"other": "it cannot", path: ""})
    monkeypatch.setattr(ffi, "cpu_features", lambda: features)
    (site,) = jaxfp8.explain(lost[0], target=CPU)(*lost[1]).missed
    assert re.match(rf"XLA's program is faster on this CPU: .*`{path}`", site.reason)
    assert count(jaxfp8.rewrite(lost[0], target=CPU), *lost[1]) == 0
    assert len(jaxfp8.explain(kept[0], target=CPU)(*kept[1]).matched) == 1


def test_an_operation_that_only_saves_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    x = array((256, 384), BF16)
    w = jaxfp8.quantize(jnp.ones((384, 64)), channelwise_axes=(1,))
    (call,) = jaxfp8.explain(jaxfp8.matmul)(x, w).calls
    assert "save memory" not in call.note
    (call,) = jaxfp8.explain(jaxfp8.matmul, target=HOPPER)(x, w).calls
    assert call.note == "so small that XLA multiplies it: 8 bits save memory and hardly time"
    monkeypatch.setattr(ffi, "cpu_paths", lambda *_: {"amx_bf16": ""})
    monkeypatch.setattr(ffi, "cpu_features", lambda: AMX)
    (call,) = jaxfp8.explain(jaxfp8.matmul)(x, w).calls
    assert re.search("faster on this CPU: .*: 8 bits save memory alone$", call.note)


def test_a_row_names_its_machine_and_its_run() -> None:
    for row in slower.ROWS:
        assert row.on in ("cuda", "cuda:90", "cuda:100+", "amx", "avx512", "avx2", "avx2+")
        assert re.match(
            "H100: |H200: |Xeon: |Zen 4(, AVX2|, also held to AVX2)?: |not measured: ", row.seen
        ), row.seen


def test_a_captured_product_of_floats_is_not_compared_with_one_of_integers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ffi, "cpu_paths", lambda *_: {"amx_int8": ""})
    monkeypatch.setattr(ffi, "cpu_features", lambda: AMX)
    fun, args = product(256, 2048, 2048, INT8, INT8)
    (site,) = jaxfp8.explain(fun, target=CPU)(*args).matched
    assert "save memory" not in site.note


def test_a_scale_of_each_value_is_a_tile_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ffi, "cpu_paths", lambda *_: {"amx_bf16": ""})
    monkeypatch.setattr(ffi, "cpu_features", lambda: AMX)
    w = jaxfp8.quantize(jnp.ones((384, 64)), channelwise_axes=(0,))
    (call,) = jaxfp8.explain(jaxfp8.matmul)(array((256, 384), BF16), w).calls
    assert "scales each tile of 1 along the contracted axis by itself" in call.note


def test_the_weight_of_integers_may_be_on_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ffi, "cpu_paths", lambda *_: {"amx_int8": ""})
    monkeypatch.setattr(ffi, "cpu_features", lambda: AMX)
    fun = lambda w, x, scale: jnp.matmul(w, x, preferred_element_type=jnp.int32) * scale  # noqa: E731
    args = array((2048, 2048), INT8), array((2048, 256), INT8), array((2048, 1), F32)
    (site,) = jaxfp8.explain(fun, target=CPU)(*args).missed
    assert site.reason.endswith("is slower than XLA's product of integers")
