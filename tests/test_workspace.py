"""How much scratch memory a product is given on a GPU, by the library and without it."""

import dataclasses

import pytest

import jaxfp8
from jaxfp8._call.gpu import asked, canonical
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec

pytestmark = pytest.mark.cuda_library

E4M3 = "float8_e4m3fn"
WEIGHTS = {"4096x4096": (4096, 4096), "4100 deep": (4096, 4100), "14336x4096": (14336, 4096)}
LARGE = {"28672x8192": (28672, 8192), "57344x8192": (57344, 8192)}


def side(dtype: str, shape, depth_axis: int, tiles=None, batch=()) -> OperandSpec:
    return OperandSpec(
        dtype=dtype,
        shape=shape,
        contracting=(depth_axis,),
        batch=batch,
        tiles=tiles or shape,
        scale=tiles is not None,
        zero_point=False,
    )


def scratch(lhs: OperandSpec, rhs: OperandSpec, kernel: str = "", **epilogue) -> int:
    spec = ScaledDotSpec(
        lhs=lhs, rhs=rhs, epilogue=EpilogueSpec(**{"out_dtype": "bfloat16", **epilogue})
    )
    return asked.workspace_bytes(canonical.canonical(spec).spec, kernel)


def of_weights(rows: int, columns: int, depth: int, layout: str = "nk", **more) -> int:
    """Of bfloat16 rows times e4m3 weights with a scale for each column."""
    shape = (columns, depth) if layout == "nk" else (depth, columns)
    tiles = (1, depth) if layout == "nk" else (depth, 1)
    weight = side(E4M3, shape, 1 if layout == "nk" else 0, tiles)
    return scratch(side("bfloat16", (rows, depth), 1), weight, **more)


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 17, 32, 64])
@pytest.mark.parametrize("weight", [(1024, 4096), *WEIGHTS.values(), *LARGE.values()], ids=str)
def test_few_rows_take_a_tenth_of_the_weight_at_most(weight, rows, layout):
    assert of_weights(rows, *weight, layout) <= 0.1 * weight[0] * weight[1]


def test_one_row_takes_a_hundredth_of_a_weight():
    assert of_weights(1, 14336, 4096) < 0.01 * 14336 * 4096


@pytest.mark.parametrize(("rows", "blocks"), [(1, 8), (8, 8), (16, 6), (64, 0)])
def test_blocks_share_outputs_as_far_as_a_tenth_of_the_weight_has_room(rows, blocks):
    outputs = 4096 // 128
    assert of_weights(rows, 4096, 4096) == max(256, blocks * outputs * rows * 128 * 4)


def test_many_rows_have_room_for_a_decoded_weight():
    assert of_weights(1024, 14336, 4096) > 14336 * 4096 * 2


def test_a_path_that_is_asked_for_by_name_gets_what_it_uses():
    assert of_weights(1, 4096, 4096, kernel="cublaslt_wide") > 32 << 20
    assert of_weights(1, 4096, 4096, kernel="sm80_w8a16") == of_weights(1, 4096, 4096)
    assert of_weights(1, 4096, 4096, kernel="general") == 256


def test_the_hopper_kernel_asks_for_copies_of_what_is_not_aligned_lines_of_the_depth():
    def scratch_of(lhs, rhs):
        lhs, rhs = (side(E4M3, (1, *shape), axis, batch=(0,)) for shape, axis in (lhs, rhs))
        spec = ScaledDotSpec(lhs=lhs, rhs=rhs, epilogue=EpilogueSpec(out_dtype="bfloat16"))
        return asked.workspace_bytes(spec, "sm90_gemm")

    assert scratch_of(((100, 48), 2), ((60, 48), 2)) == 256
    assert scratch_of(((100, 48), 2), ((48, 60), 1)) == 60 * 48
    assert scratch_of(((7, 33), 2), ((5, 33), 2)) == 512 + 5 * 48


def test_the_hopper_kernel_asks_for_sums_where_the_other_side_of_int8_has_zero_points():
    def scratch_of(depth, *, zero_point):
        lhs, rhs = (side("int8", (1, lines, depth), 2, batch=(0,)) for lines in (7, 100))
        lhs = dataclasses.replace(lhs, zero_point=zero_point)
        spec = ScaledDotSpec(lhs=lhs, rhs=rhs, epilogue=EpilogueSpec(out_dtype="bfloat16"))
        return asked.workspace_bytes(spec, "sm90_gemm")

    assert scratch_of(48, zero_point=False) == 256
    assert scratch_of(48, zero_point=True) == 4 * 100
    assert scratch_of(33, zero_point=True) == 512 + 19 * 256 + 4 * 100, "after both copies"


def test_many_rows_of_a_weight_have_room_for_tiles_that_blocks_share():
    shared = 132 * (16 + 4 * 128 * 256)
    assert of_weights(65, 4096, 4096, "nk") == shared
    assert of_weights(4, 4096, 4096, "nk", kernel="sm90_gemm") == shared
    assert of_weights(65, 4096, 4096, "kn") == shared
    assert of_weights(65, 4097, 4096, "kn") < 1 << 20
    assert of_weights(64, 4096, 4096, "nk") < 1 << 20
    assert of_weights(256, 1024, 4096, "nk") < 1 << 20, "few outputs"
    assert of_weights(200, 4096, 512, "nk") < 1 << 20, "little depth"
    assert of_weights(65, 4096, 4097, "nk") < 1 << 20, "lines that are not aligned"
    assert of_weights(65, 4096, 4096, "nk", kernel="sm80_w8a16") < 1 << 20


@pytest.mark.parametrize("kernel", ["", "decoded_w8a16"])
def test_mx_by_mx_has_room_for_the_decoded_side_of_fewer_values(kernel):
    def of(rows, depth):
        sides = [side(E4M3, (lines, depth), 1, (1, 32)) for lines in (rows, 4096)]
        lhs, rhs = (dataclasses.replace(one, scale_exponents=True) for one in sides)
        spec = ScaledDotSpec(lhs=lhs, rhs=rhs, epilogue=EpilogueSpec(out_dtype="bfloat16"))
        return asked.workspace_bytes(canonical.canonical(spec).spec, kernel, 90)

    assert of(1, 4096) == 2 * 4096 + of_weights(1, 4096, 4096)
    shared = 132 * (16 + 4 * 128 * 256)
    assert of(512, 4112) == shared + 2 * 512 * 4112


@pytest.mark.parametrize("kernel", ["sm80_imma", "int8"])
def test_the_path_in_int8_asks_for_codes_and_scales_of_the_rows(kernel):
    assert of_weights(5, 130, 4090, kernel=kernel) == 5 * 4096 + 4 * 5
    assert of_weights(32, 130, 10, kernel=kernel) == 32 * 16 + 4 * 32
    assert of_weights(33, 130, 4096, kernel=kernel) == 256, "it takes no more than 32 rows"


def test_a_product_that_no_other_kernel_takes_gets_next_to_nothing():
    weight = side(E4M3, (4096, 4096), 1, (1, 4096))
    assert scratch(side("float32", (16, 4096), 1), weight) == 256


@pytest.mark.parametrize("rows", [1, 16])
def test_few_rows_of_float8_take_a_tenth_of_the_weight_at_most(rows):
    both = side(E4M3, (rows, 4096), 1, (1, 4096)), side(E4M3, (4096, 4096), 1, (1, 4096))
    assert 256 < scratch(*both) <= 0.1 * 4096 * 4096
    assert scratch(*both[::-1]) == scratch(*both)


@pytest.mark.parametrize("rows", [17, 64, 256])
def test_hopper_needs_no_scratch_for_few_rows_of_float8(rows):
    def scratch_of(lhs_tiles, compute_capability, **more):
        lhs = side(E4M3, (1, rows, 4096), 2, lhs_tiles, batch=(0,))
        rhs = side(E4M3, (1, 4096, 4096), 2, (1, 4096, 4096), batch=(0,))
        epilogue = EpilogueSpec(out_dtype="bfloat16")
        spec = ScaledDotSpec(lhs=lhs, rhs=rhs, epilogue=epilogue, **more)
        return asked.workspace_bytes(spec, compute_capability=compute_capability)

    of_rows, of_all = (1, 1, 4096), (1, rows, 4096)
    assert scratch_of(of_rows, 90) == 256
    for more in ((of_rows, 89), (of_rows, None), (of_all, 90)):
        assert scratch_of(*more) > 32 << 20
    assert scratch_of(of_rows, 90, precision="highest") > 32 << 20


def test_products_by_the_library_have_its_own_scratch():
    both = side(E4M3, (17, 4096), 1, (1, 4096)), side(E4M3, (4096, 4096), 1, (1, 4096))
    assert scratch(*both) > 32 << 20


def test_scratch_is_bounded_however_large_the_problem():
    big = side(E4M3, (1, 1 << 16, 1 << 16), 2, batch=(0,))
    assert scratch(big, big) < 300 << 20
    values = side("bfloat16", (1, 256, 1 << 20), 2, batch=(0,))
    assert scratch(values, side(E4M3, (1, 1 << 20, 1 << 20), 2, batch=(0,))) < 300 << 20


def test_the_library_refuses_aloud_what_is_not_canonical():
    flat = side(E4M3, (8, 16), 1, batch=(0,))
    spec = ScaledDotSpec(lhs=flat, rhs=flat, epilogue=EpilogueSpec(out_dtype="bfloat16"))
    with pytest.raises(jaxfp8.LibraryError, match="needs one free and one contracted axis"):
        asked.workspace_bytes(spec)
