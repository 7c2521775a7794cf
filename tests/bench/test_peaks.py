"""The loops that tell what a processor can do."""

import numpy as np
import pytest

from jaxfp8._bench import _peaks
from jaxfp8._call.library import ffi


def test_products_are_counted_by_the_round():
    assert ffi.peak_products("f32", 0) == 0
    assert ffi.peak_products("f32", 10) == 10 * ffi.peak_products("f32", 1) > 0


@pytest.mark.parametrize(
    ("kind", "feature"), [("int8", "avx512_vnni"), ("bf16", "avx512_bf16"), ("avx2", "avx2")]
)
def test_there_are_dot_products_where_the_processor_has_them(kind, feature):
    has = feature in ffi.cpu_features().split()
    assert (ffi.peak_products(kind, 1) > 0) == has
    assert _peaks.available(kind) == (kind if has else "f32")


def test_products_are_those_of_tiles_where_the_processor_has_them():
    squares = ffi.peak_products("bf16", 1) // (16 * 16 * 32 * 2)
    assert (squares == 4) == ("amx" in ffi.cpu_features().split())


def test_an_unknown_kind_has_no_products():
    assert ffi.peak_products("f8", 1) == 0


@pytest.mark.parametrize("size", [0, 256, 256 * 33])
def test_every_byte_is_read(size):
    data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    words = data.view(np.uint64)
    assert ffi.peak_read(data.ctypes.data, size) == np.bitwise_xor.reduce(words, initial=0)


@pytest.mark.parametrize("size", [1, 3 << 20])
def test_a_unit_of_reading_is_a_byte_and_of_products_an_operation(size):
    reading = _peaks.reads(size, 2)
    assert reading.units >= size - 2 * 256
    products = _peaks.products("f32", 2)
    assert products.units % ffi.peak_products("f32", 1) == 0
    for one in (reading, products):
        one.enqueue()
