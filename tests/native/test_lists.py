"""Activations, dtypes and CUDA paths stand in one list each in C++: Python has the same ones."""

import pathlib
import re

import numpy as np
import pytest

from jaxfp8._call.reference import dot_reference
from jaxfp8._value import dtypes, spec

pytestmark = pytest.mark.any_jax

FFI = pathlib.Path(__file__).parents[2] / "ffi"


def listed(header, macro):
    """The lines of an X-macro, each as the texts of its arguments."""
    body = re.search(rf"#define {macro}\(V\)((?:.*\\\n)*.*)", (FFI / header).read_text())[1]
    return [re.findall(r'[^,\s"]+', line) for line in re.findall(r"V\(([^)]*)\)", body)]


def test_cpp_has_the_activations_of_python():
    names = ("none", *(name for _, name in listed("common/activation.h", "JAXFP8_ACTIVATIONS")))
    assert names == spec.ACTIVATIONS == tuple(dot_reference.ACTIVATIONS)


def test_cpp_has_the_dtypes_of_python():
    rounded = listed("common/dtype.h", "JAXFP8_ROUNDED_DTYPES")
    floats = (np.dtype(np.float32), *dtypes.SIXTEEN_BIT_FLOATS, *dtypes.FLOAT8)
    python = (*floats, *dtypes.EIGHT_BIT_INTS)
    assert {name for _, name, _, _ in rounded} == {dtype.name for dtype in python}
    (rest,) = listed("common/dtype.h", "JAXFP8_DTYPES")
    assert rest[1] == dtypes.INT32.name


def test_every_cuda_path_is_defined_with_the_name_of_the_list():
    sources = (path.read_text() for path in (FFI / "cuda").rglob("*.c[cu]"))
    defined = re.findall(r'\bPath (k\w+)[ ={]+"(\w+)"', "\n".join(sources))
    assert sorted(defined) == sorted(map(tuple, listed("cuda/path.h", "JAXFP8_CUDA_PATHS")))


def test_every_cuda_path_is_documented():
    text = (FFI.parent / "docs/custom_call.md").read_text()
    assert all(name in text for _, name in listed("cuda/path.h", "JAXFP8_CUDA_PATHS"))
