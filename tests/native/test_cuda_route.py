"""Which path of the CUDA library takes which problem on which device: asks no GPU."""

import dataclasses

import numpy as np
import pytest

import specs
from jaxfp8._call.gpu import asked
from jaxfp8._call.gpu import canonical as _canonical
from jaxfp8._call.library import ffi
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec

pytestmark = pytest.mark.cuda_library

CUBLASLT = 130100
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def side(dtype: str, lines: int, tiles: tuple[int, int] | None, depth: int) -> OperandSpec:
    """A K-major side of `lines` lines; without tiles it has no scale."""
    return OperandSpec(
        dtype=dtype,
        shape=(lines, depth),
        contracting=(1,),
        batch=(),
        tiles=tiles or (lines, depth),
        scale=tiles is not None,
        zero_point=False,
    )


def product(lhs, rhs, m=4096, n=4096, k=4096, tiles=((1, 4096), (1, 4096)), **epilogue):
    return ScaledDotSpec(
        lhs=side(lhs, m, tiles[0], k),
        rhs=side(rhs, n, tiles[1], k),
        epilogue=EpilogueSpec(**{"out_dtype": "bfloat16", **epilogue}),
    )


def paths(spec, compute_capability, cublaslt=CUBLASLT):
    """The paths that can, best first, and why the others cannot."""
    canonical = _canonical.canonical(spec).spec
    found = ffi.cuda_paths(canonical, compute_capability, cublaslt)
    assert isinstance(found, dict), found
    return [name for name, why in found.items() if not why], found


def mx(spec):
    """The product with the scales of its 8-bit sides as exponents."""
    sides = {
        name: dataclasses.replace(one, scale_exponents=one.scale)
        for name, one in (("lhs", spec.lhs), ("rhs", spec.rhs))
    }
    return dataclasses.replace(spec, **sides)


FINE = (None, (1, 32))
TILES_128 = ((1, 128), (128, 128))
WEIGHTS = (None, (1, 4096))
TAKEN = [
    (product(E4M3, E4M3), {80: "cublaslt_wide", 89: "cublaslt_fp8", 90: "cublaslt_fp8"}),
    (product(E4M3, E5M2, tiles=((4096, 4096),) * 2), {89: "cublaslt_fp8", 120: "cublaslt_fp8"}),
    (product(E5M2, E5M2), {89: "cublaslt_wide", 90: "sm90_gemm"}),
    (product(E4M3, E4M3, tiles=TILES_128), {89: "cublaslt_fp8", 90: "sm90_gemm"}),
    (product(E4M3, E4M3, tiles=((1, 128), (1, 128))), {90: "sm90_gemm", 100: "cublaslt_fp8"}),
    (product(E4M3, E4M3, tiles=((1, 64), (1, 64))), {90: "cublaslt_fp8"}),
    (product(E4M3, E4M3, m=17, n=118, k=4100, tiles=((1, 4100),) * 2), {90: "sm90_gemm"}),
    (product(E4M3, E4M3, m=16), {80: "sm80_w8a16", 90: "sm80_w8a16", 100: "sm80_w8a16"}),
    (product(E5M2, E4M3, n=3), {90: "sm80_w8a16"}),
    (product(E4M3, E4M3, m=17), {80: "cublaslt_wide", 89: "cublaslt_fp8", 90: "sm90_gemm"}),
    (product(E4M3, E4M3, m=64, tiles=((64, 4096), (4096, 4096))), {90: "cublaslt_fp8"}),
    (product(E4M3, E4M3, bias=(1, 4096)), {89: "cublaslt_fp8", 90: "sm90_gemm"}),
    (product(E4M3, E4M3, bias=(1, 4096), out_dtype=E4M3), {90: "cublaslt_fp8"}),
    (product(E5M2, E4M3, m=1), {89: "cublaslt_fp8", 90: "sm90_gemm"}),
    (product(E4M3, E4M3, m=1, tiles=TILES_128), {90: "sm90_gemm"}),
    (product(E4M3, E4M3, m=1, tiles=((1, 4096), (128, 128))), {90: "sm80_w8a16"}),
    (product("int8", "uint8"), {80: "cublaslt_int8", 90: "sm90_gemm", 100: "cublaslt_int8"}),
    (product("int8", "int8", tiles=(None, None), out_dtype="int32"), {90: "cublaslt_int8"}),
    (product("int8", "int8", m=1024, out_dtype="int8"), {90: "sm90_gemm"}),
    (product("int8", "int8", m=2048, out_dtype="int8"), {90: "cublaslt_int8"}),
    (product("int8", "uint8", k=40000, tiles=((1, 40000),) * 2), {90: "cublaslt_int8"}),
    (product("int8", "int8", tiles=((1, 16), (1, 16))), {80: "general", 90: "general"}),
    (product("bfloat16", E4M3, m=16, tiles=WEIGHTS), {80: "sm80_w8a16", 90: "sm80_w8a16"}),
    (product("float16", "int8", m=16, tiles=WEIGHTS), {86: "sm80_w8a16"}),
    (product("bfloat16", E4M3, m=512, tiles=WEIGHTS), {80: "cublaslt_wide", 90: "sm90_gemm"}),
    (product("float16", E5M2, m=65, tiles=WEIGHTS), {89: "sm80_w8a16", 90: "sm90_gemm"}),
    (product("float16", "int8", m=64, tiles=WEIGHTS), {90: "sm80_w8a16"}),
    (product("float16", "int8", m=256, n=1024, tiles=WEIGHTS), {90: "sm80_w8a16"}),
    (product("float16", "int8", m=512, n=1024, tiles=WEIGHTS), {90: "sm90_gemm"}),
    (product("bfloat16", E4M3, m=512, k=128, tiles=(None, (1, 128))), {90: "cublaslt_wide"}),
    (product("bfloat16", "uint8", m=512, tiles=WEIGHTS), {80: "cublaslt_wide", 90: "sm90_gemm"}),
    (product("bfloat16", E4M3, m=512, tiles=(None, (128, 128))), {90: "sm90_gemm"}),
    (product("bfloat16", E4M3, m=512, tiles=FINE), {80: "cublaslt_wide", 90: "sm90_gemm"}),
    (product("float16", "int8", m=32, tiles=FINE), {80: "sm80_w8a16", 90: "sm80_w8a16"}),
    (product("bfloat16", "uint8", m=512, tiles=FINE), {90: "cublaslt_wide"}),
    (product("int8", "int8", tiles=((1, 4096), (1, 128))), {90: "decoded_w8a16"}),
    (mx(product("bfloat16", E4M3, m=8, tiles=FINE)), {80: "sm80_w8a16", 90: "sm80_w8a16"}),
    (mx(product("bfloat16", E4M3, tiles=FINE)), {80: "cublaslt_wide", 90: "sm90_gemm"}),
    (mx(product(E4M3, E4M3, tiles=((1, 32),) * 2)), {80: "cublaslt_wide", 90: "cublaslt_wide"}),
    (mx(product(E5M2, E5M2, m=1, tiles=((1, 32),) * 2)), {80: "decoded_w8a16"}),
    (product("float16", E4M3, m=512, tiles=(None, (1, 128))), {90: "cublaslt_wide"}),
    (product("float32", E4M3, tiles=WEIGHTS), {80: "general", 90: "general"}),
]


@pytest.mark.parametrize(
    ("spec", "compute_capability", "path"),
    [
        pytest.param(spec, cc, path, id=f"{spec.lhs.dtype}-{spec.rhs.dtype}-{i}-sm_{cc}")
        for i, (spec, by_device) in enumerate(TAKEN)
        for cc, path in by_device.items()
    ],
)
def test_the_path_taken(spec, compute_capability, path):
    assert paths(spec, compute_capability)[0][0] == path


def cache(order: str, contracted: str) -> ScaledDotSpec:
    """Rows [B, H, M, K] by a cache whose axes stand in some order."""
    sizes = {"B": 4, "H": 8, "T": 256, "D": 128}
    free = "D" if contracted == "T" else "T"
    rhs = OperandSpec(
        dtype=E4M3,
        shape=tuple(sizes[axis] for axis in order),
        contracting=(order.index(contracted),),
        batch=(order.index("B"), order.index("H")),
        tiles=tuple(1 if axis in ("B", "H", free) else sizes[axis] for axis in order),
        scale=True,
        zero_point=False,
    )
    lhs = OperandSpec(
        dtype="bfloat16",
        shape=(4, 8, 4, sizes[contracted]),
        contracting=(3,),
        batch=(0, 1),
        tiles=(4, 8, 4, sizes[contracted]),
        scale=False,
        zero_point=False,
    )
    return ScaledDotSpec(lhs=lhs, rhs=rhs, epilogue=EpilogueSpec(out_dtype="float32"))


@pytest.mark.parametrize("contracted", ["T", "D"])
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_a_cache_with_two_batch_axes_is_read_in_place(capability, contracted):
    spec = cache("BTHD", contracted)
    can, found = paths(spec, capability)
    assert can == ["sm80_w8a16", "general"]
    assert "one stride along the batch" in found["cublaslt_wide"]
    assert len(paths(cache("BHTD", contracted), capability)[0]) > 2


def test_every_problem_has_a_path_without_cublaslt():
    for spec, _ in TAKEN:
        can, found = paths(spec, 90, cublaslt=0)
        assert can[-1] == "general"
        assert not any(name.startswith("cublaslt") for name in can)
        assert all("jax[cuda13]" in why for why in found.values() if "libcublasLt" in why)


def test_an_older_device_is_told_so():
    told = ffi.cuda_paths(_canonical.canonical(TAKEN[0][0]).spec, 75, CUBLASLT)
    text = told if isinstance(told, str) else "; ".join(told.values())
    assert "7.5" in text


def test_zero_points_of_a_weight_are_taken_by_a_kernel_that_subtracts_them():
    spec = product("bfloat16", "int8", tiles=WEIGHTS)
    spec = dataclasses.replace(spec, rhs=dataclasses.replace(spec.rhs, zero_point=True))
    can, found = paths(spec, 90)
    assert "zero point" in found["cublaslt_wide"]
    assert can[0] == "sm90_gemm"
    assert paths(spec, 89)[0][0] in ("sm80_w8a16", "general")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tiles": (1, 96)}, "needs 32 or a multiple of 64"),
        ({"shape": (4096, 4100), "contracting": (0,), "tiles": (4096, 1)}, "multiple of 16 bytes"),
    ],
    ids=["blocks", "KN"],
)
def test_the_hopper_kernel_says_why_it_does_not_take_a_weight(change, reason):
    spec = product("bfloat16", "int8", m=512, tiles=WEIGHTS)
    spec = dataclasses.replace(spec, rhs=dataclasses.replace(spec.rhs, **change))
    can, found = paths(spec, 90)
    assert reason in found["sm90_gemm"]
    assert "sm90_gemm" not in can


def test_a_path_that_rounds_operands_again_has_to_be_named():
    for spec, _ in TAKEN:
        assert "sm80_imma" not in paths(spec, 90)[1]
    assert "sm80_imma" in ffi.kernels("cuda")


def in_int8(spec, compute_capability=90) -> dict[str, str] | str:
    """What the library says of a problem that is to be computed in int8."""
    form = _canonical.canonical(spec, "int8").spec
    return ffi.cuda_paths(form, compute_capability, CUBLASLT, "int8")


@pytest.mark.parametrize("compute_capability", [80, 86, 90, 100])
@pytest.mark.parametrize("rows", [1, 16, 32])
@pytest.mark.parametrize("lhs", ["int8", "bfloat16", "float16"])
def test_few_rows_by_fp8_in_int8_are_one_call(lhs, rows, compute_capability):
    tiles = (None, (1, 2048))
    spec = product(lhs, E4M3, m=rows, k=2048, tiles=tiles)
    assert in_int8(spec, compute_capability) == {"sm80_imma": ""}
    left = product(E5M2, lhs, m=4096, n=rows, k=2048, tiles=tiles[::-1])
    assert in_int8(left, compute_capability) == {"sm80_imma": ""}


@pytest.mark.parametrize(
    ("spec", "compute_capability", "reason"),
    [
        (product("bfloat16", E4M3, m=33, tiles=WEIGHTS), 90, "up to 32 rows, and these are 33"),
        (product(E4M3, E4M3, m=1), 90, "it multiplies int8, bfloat16 or float16 by FP8"),
        (product("bfloat16", E4M3, m=1, tiles=(None, (1, 128))), 90, "constant along"),
        (product("int8", E4M3, m=1, k=16384, tiles=(None, None)), 80, "fit shared memory"),
        (product("int8", E4M3, m=1, k=140000, tiles=(None, None)), 90, "holds the sum of 131071"),
        (product("bfloat16", E4M3, m=1, tiles=WEIGHTS), 75, "compute capability 8.0"),
    ],
)
def test_what_one_call_in_int8_does_not_take_has_a_reason(spec, compute_capability, reason):
    found = in_int8(spec, compute_capability)
    assert isinstance(found, str) and reason in found


@pytest.mark.parametrize("lhs", ["int8", "bfloat16", "float16", E4M3])
def test_the_path_in_int8_asks_for_as_much_scratch_on_both_sides(lhs):
    weights = (1, 4095)
    right = product(lhs, E5M2, m=17, n=130, k=4095, tiles=((1, 4095), weights))
    left = product(E5M2, lhs, m=130, n=17, k=4095, tiles=(weights, (1, 4095)))
    for spec in (right, left):
        assert scratch(spec, "sm80_imma") == (256 if lhs == E4M3 else 17 * 4096 + 4 * 17)


def test_the_library_in_use_is_named_or_what_is_missing():
    path, version = ffi.cublaslt()
    assert version or "libcublasLt.so.13" in path


def scratch(spec, kernel: str = "", compute_capability: int | None = None) -> int:
    canonical = _canonical.canonical(spec, kernel).spec
    return asked.workspace_bytes(canonical, kernel, compute_capability)


def test_the_copy_of_a_row_that_is_stored_as_a_column_is_asked_for():
    row = side("int8", 1, (1, 64), 64)
    column = dataclasses.replace(row, shape=(64, 1), contracting=(0,), tiles=(64, 1))
    zeros = dataclasses.replace(side("uint8", 3, (1, 64), 64), zero_point=True)
    spec = ScaledDotSpec(lhs=column, rhs=zeros, epilogue=EpilogueSpec(out_dtype="bfloat16"))
    assert asked.workspace_bytes(spec, "sm90_gemm") == 256 + 4  # and the sum of the row
    given = dataclasses.replace(spec, lhs=dataclasses.replace(column, sums=True))
    assert asked.workspace_bytes(given, "sm90_gemm") == 256


def test_sums_of_a_batch_behind_the_free_axis_are_refused():
    batched = {"shape": (4, 3, 32), "contracting": (2,), "batch": (1,), "tiles": (1, 1, 1)}
    lhs = dataclasses.replace(side("int8", 4, None, 32), **batched)
    rhs = dataclasses.replace(lhs, shape=(3, 4, 32), batch=(0,), zero_point=True)
    spec = ScaledDotSpec(lhs=lhs, rhs=rhs, epilogue=EpilogueSpec(out_dtype="float32"))
    assert isinstance(ffi.cuda_paths(spec, 90, CUBLASLT), dict)
    given = dataclasses.replace(spec, lhs=dataclasses.replace(lhs, sums=True))
    assert "`lhs_sums` is given for a batch behind the free" in ffi.cuda_paths(given, 90, CUBLASLT)


@pytest.mark.parametrize("block", range(2))
def test_hopper_gets_no_more_scratch_than_its_kernel_takes(block):
    for spec in drawn(71_000 + block, 300):
        assert_enough_on_hopper(spec)
    for m in (16, 4096):
        for out_dtype in ("bfloat16", "int8"):
            assert_enough_on_hopper(product("int8", "uint8", m=m, out_dtype=out_dtype))
    exact = product("int8", "int8", tiles=(None, None), out_dtype="int32")
    assert scratch(product("int8", "int8"), "", 90) == 256
    assert scratch(exact, "", 90) == scratch(exact) > 32 << 20
    assert scratch(product(E4M3, E4M3, bias=(1, 4096)), "", 90) == 256, "before an epilogue"


def drawn(seed: int, number: int):
    """Random problems, without those that have no values."""
    rng = np.random.default_rng(seed)
    all_drawn = (specs.draw_spec(rng) for _ in range(number))
    return [spec for spec in all_drawn if not _canonical.is_empty(spec)]


def assert_enough_on_hopper(spec) -> None:
    least = scratch(spec, "", 90)
    if least != scratch(spec):
        assert paths(spec, 90)[0][0] == "sm90_gemm", str(spec)
        assert least == scratch(spec, "sm90_gemm")
