"""The form in which a scaled dot reaches a GPU, computed by the CPU's kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8._call.gpu import canonical as _canonical
from jaxfp8._call.ops import dot
from jaxfp8._value import dtypes
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec
from specs import draw_operands, draw_spec

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}


def numbers(x: jax.Array, dtype: str) -> np.ndarray:
    x = np.asarray(x)
    return np.float64(x.view(np.dtype(dtype)) if dtypes.is_float8(dtype) else x)


def both_ways(spec, operands):
    """The outputs of a problem and of its canonical form."""
    form = _canonical.canonical(spec)
    named = {name: jnp.asarray(x) for name, x in operands.items()}
    direct = dot._bind(spec, "", named)
    return direct, form.results(dot._bind(form.spec, "", form.operands(named)))


@pytest.mark.parametrize("seed", range(40))
def test_random_problems_mean_the_same_in_canonical_form(seed):
    rng = np.random.default_rng(1000 + seed)
    spec = draw_spec(rng)
    while _canonical.is_empty(spec):
        spec = draw_spec(rng)
    outputs = both_ways(spec, draw_operands(rng, spec))
    for direct, canonical in zip(*outputs, strict=True):
        assert direct.shape == canonical.shape
        dtype = spec.epilogue.out_dtype if direct is outputs[0][0] else "float32"
        a, b = numbers(direct, dtype), numbers(canonical, dtype)
        if dtypes.is_eight_bit(dtype):  # a sum at the border between two codes
            assert np.mean(a != b) < 0.02
        else:
            np.testing.assert_allclose(a, b, rtol=TOLERANCE.get(dtype, 0), atol=1e-3)


@pytest.mark.parametrize("seed", range(12))
def test_caches_of_any_order_mean_the_same_in_canonical_form(seed):
    """Few rows, and weights whose two batch axes, free and contracted axis stand anywhere."""
    rng = np.random.default_rng(2000 + seed)
    spec = draw_cache(rng)
    direct, canonical = both_ways(spec, draw_operands(rng, spec))
    for a, b in zip(direct, canonical, strict=True):
        np.testing.assert_allclose(numbers(a, "float32"), numbers(b, "float32"), 1e-5, 1e-3)


def draw_cache(rng) -> ScaledDotSpec:
    sizes = {"B": int(rng.choice([1, 3])), "H": 2, "T": 5, "D": 7}
    order = "".join(rng.permutation(list("BHTD")))
    contracted, free = ("D", "T") if rng.random() < 0.5 else ("T", "D")
    cache = OperandSpec(
        dtype=str(rng.choice(["int8", "float8_e4m3fn"])),
        shape=tuple(sizes[axis] for axis in order),
        contracting=(order.index(contracted),),
        batch=(order.index("B"), order.index("H")),
        tiles=tuple(sizes[a] if rng.random() < 0.5 else 1 for a in order),
        scale=True,
        zero_point=False,
    )
    rows = OperandSpec(
        dtype="bfloat16",
        shape=(sizes["B"], sizes["H"], 3, sizes[contracted]),
        contracting=(3,),
        batch=(0, 1),
        tiles=(1, 1, 1, sizes[contracted]),
        scale=bool(rng.random() < 0.5),
        zero_point=False,
    )
    out = (sizes["B"], sizes["H"], 3, sizes[free])
    some = tuple(size if rng.random() < 0.5 else 1 for size in out)
    epilogue = EpilogueSpec(out_dtype="float32", bias=some, amax=some)
    return ScaledDotSpec(lhs=rows, rhs=cache, epilogue=epilogue)


def side(shape, contracting, batch=(), tiles=None, dtype="float8_e4m3fn") -> OperandSpec:
    return OperandSpec(
        dtype=dtype,
        shape=shape,
        contracting=contracting,
        batch=batch,
        tiles=tiles or shape,
        scale=tiles is not None,
        zero_point=False,
    )


def canonical_of(lhs, rhs) -> ScaledDotSpec:
    spec = ScaledDotSpec(lhs=lhs, rhs=rhs, epilogue=EpilogueSpec(out_dtype="bfloat16"))
    return _canonical.canonical(spec).spec


ACTIVATIONS = side((6, 64), (1,), dtype="bfloat16")


def test_a_weight_with_its_contracted_axis_first_stays_so_beside_wide_activations():
    rhs = canonical_of(ACTIVATIONS, side((64, 4, 8), (0,), tiles=(64, 1, 1))).rhs
    assert (rhs.shape, rhs.contracting, rhs.tiles) == ((1, 64, 32), (1,), (1, 64, 1))


def test_a_weight_with_its_contracted_axis_last_stays_so():
    rhs = canonical_of(ACTIVATIONS, side((4, 8, 64), (2,), tiles=(1, 1, 64))).rhs
    assert (rhs.shape, rhs.contracting) == ((1, 32, 64), (2,))


def test_tensor_cores_get_both_8_bit_sides_with_the_contracted_axis_last():
    spec = canonical_of(side((6, 64), (1,)), side((64, 32), (0,), tiles=(64, 1)))
    assert (spec.rhs.shape, spec.rhs.tiles) == ((1, 32, 64), (1, 1, 64))


def test_a_weight_that_a_batch_shares_is_one_matrix():
    lhs = side((5, 6, 64), (2,), (0,), dtype="bfloat16")
    spec = canonical_of(lhs, side((1, 64, 32), (1,), (0,)))
    assert spec.lhs.shape == (1, 30, 64)
    assert spec.rhs.shape == (1, 64, 32)


def test_activations_that_a_batch_shares_are_one_matrix():
    lhs = side((1, 6, 64), (2,), (0,), dtype="bfloat16")
    spec = canonical_of(lhs, side((5, 64, 32), (1,), (0,)))
    assert spec.lhs.shape == (1, 6, 64)
    assert spec.out_shape == (1, 6, 160)


def test_blocks_of_an_axis_that_is_split_in_two_are_blocks_of_the_whole():
    rhs = canonical_of(ACTIVATIONS, side((64, 4, 8), (0,), tiles=(16, 1, 8))).rhs
    assert rhs.tiles == (1, 16, 8)


def test_a_scale_that_repeats_along_joined_axes_is_given_for_each_index():
    rhs = canonical_of(ACTIVATIONS, side((64, 4, 8), (0,), tiles=(64, 4, 1))).rhs
    assert rhs.tiles == (1, 64, 1)


def cache_of(shape, contracting, batch, heads=4, rows=(2,), dtype="bfloat16") -> ScaledDotSpec:
    """The canonical form of rows [3, 4, *rows, K] by a cache with scales for tokens and heads."""
    tiles = tuple(size if a == contracting else 1 for a, size in enumerate(shape))
    values = side((3, heads, *rows, shape[contracting]), (2 + len(rows),), (0, 1), dtype=dtype)
    return canonical_of(values, side(shape, (contracting,), batch, tiles))


@pytest.mark.cuda_library
def test_keys_of_a_cache_by_token_are_read_as_they_are_stored():
    spec = cache_of((3, 50, 4, 64), 3, (0, 2))
    assert spec.rhs.shape == (3, 50, 4, 64)
    assert (spec.rhs.batch, spec.rhs.contracting, spec.rhs.tiles) == ((0, 2), (3,), (1, 1, 1, 64))
    assert (spec.lhs.shape, spec.lhs.batch, spec.lhs.contracting) == ((3, 4, 2, 64), (0, 1), (3,))
    assert spec.out_shape == (3, 4, 2, 50)


@pytest.mark.cuda_library
def test_values_of_a_cache_by_token_are_read_as_they_are_stored():
    rhs = canonical_of(
        side((3, 4, 2, 50), (3,), (0, 1), dtype="bfloat16"), side((3, 50, 4, 64), (1,), (0, 2))
    ).rhs
    assert (rhs.shape, rhs.batch, rhs.contracting) == ((3, 50, 4, 64), (0, 2), (1,))


@pytest.mark.cuda_library
@pytest.mark.parametrize("order", ["TBHD", "THBD", "HTBD", "HBTD", "BTHD", "DBHT", "BDHT"])
def test_a_cache_is_read_as_it_is_stored_whatever_the_order_of_its_axes(order):
    sizes = {"B": 3, "H": 4, "T": 50, "D": 64}
    shape = tuple(sizes[axis] for axis in order)
    rhs = cache_of(shape, order.index("D"), (order.index("B"), order.index("H"))).rhs
    joined = order.replace("BH", "+")  # side by side they are one axis
    assert rhs.shape == tuple({**sizes, "+": 12}[axis] for axis in joined)


@pytest.mark.cuda_library
def test_a_cache_is_read_in_place_as_long_as_32_bits_count_its_scales():
    assert cache_of((3, 2**29 - 1, 4, 64), 3, (0, 2)).rhs.batch == (0, 2)


@pytest.mark.cuda_library
def test_a_batch_of_one_text_is_one_axis():
    spec = canonical_of(
        side((1, 4, 2, 64), (3,), (0, 1), dtype="bfloat16"), side((1, 50, 4, 64), (3,), (0, 2))
    )
    assert (spec.rhs.shape, spec.rhs.batch) == ((50, 4, 64), (1,))
    assert (spec.lhs.shape, spec.lhs.batch) == ((4, 2, 64), (0,))


def test_a_cache_by_head_has_one_batch_axis():
    assert cache_of((3, 4, 50, 64), 3, (0, 1)).rhs.shape == (12, 50, 64)


@pytest.mark.parametrize(
    ("shape", "contracting", "batch", "more"),
    [
        ((3, 50, 64, 4), 2, (0, 3), {}),
        ((3, 50, 4, 2, 64), 4, (0, 2), {}),
        ((3, 2**29, 4, 64), 3, (0, 2), {}),
        ((3, 50, 4, 64), 3, (0, 2), {"rows": (65,)}),
        ((3, 50, 4, 64), 3, (0, 2), {"dtype": "float32"}),
    ],
    ids=["a batch axis last", "a head between tokens", "far scales", "many rows", "float32"],
)
def test_what_no_kernel_reads_in_place_is_transposed(shape, contracting, batch, more):
    spec = cache_of(shape, contracting, batch, **more)
    assert spec.rhs.batch == (0,)
    assert len(spec.rhs.shape) == 3


@pytest.mark.cuda_library
def test_of_paths_that_are_named_one_alone_gets_two_batch_axes():
    lhs = side((3, 4, 2, 64), (3,), (0, 1), dtype="bfloat16")
    rhs = side((3, 50, 4, 64), (3,), (0, 2))
    spec = ScaledDotSpec(lhs=lhs, rhs=rhs, epilogue=EpilogueSpec(out_dtype="bfloat16"))
    paths = ("sm80_w8a16", "general", "cublaslt_wide")
    axes = {name: len(_canonical.canonical(spec, name).spec.rhs.shape) for name in paths}
    assert axes == {"sm80_w8a16": 4, "general": 3, "cublaslt_wide": 3}
