"""The fields of a problem stand in Python, in C++ and in C: they are the same ones.

`jaxfp8/_value/spec.py` is the model. `ffi/common/spec.h` has its fields in its order, with a flag
before each shape that may be missing. `ffi/include/jaxfp8/jaxfp8.h` has the same fields, but for
what the C interface does not take, and `jaxfp8/_call/library/abi.py` has those of that header.
"""

import ctypes
import dataclasses
import pathlib
import re

import pytest

from jaxfp8._call.library import abi
from jaxfp8._value import spec as python

pytestmark = pytest.mark.any_jax

FFI = pathlib.Path(__file__).parents[2] / "ffi"
CPP = FFI / "common/spec.h"
C = FFI / "include/jaxfp8/jaxfp8.h"

OF_PYTHON = {"str": "std::string_view", "Shape": "Dims", "bool": "bool"}
OF_CPP = {"std::string_view": "const char*", "Dims": "jaxfp8_dims", "bool": "int32_t"}
OF_CTYPES = {
    ctypes.c_char_p: "const char*",
    ctypes.c_int32: "int32_t",
    ctypes.c_size_t: "size_t",
    ctypes.c_void_p: "void*",
    abi.Dims: "jaxfp8_dims",
    abi.Operand: "jaxfp8_operand_spec",
    abi.Epilogue: "jaxfp8_epilogue_spec",
}
NOT_IN_C = {"scale_rounded"}  # what a caller of the C interface rounds itself
STRUCTS = {
    "jaxfp8_operand_spec": abi.Operand,
    "jaxfp8_epilogue_spec": abi.Epilogue,
    "jaxfp8_scaled_dot_spec": abi.Spec,
    "jaxfp8_scaled_dot_buffers": abi.Buffers,
}


def fields_of(path: pathlib.Path, struct: str) -> list[tuple[str, str]]:
    """Name and type of each field of a struct in a header."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(), flags=re.DOTALL)
    body = re.search(rf"struct {struct} \{{(.*?)\}}", text, re.DOTALL)
    assert body is not None, f"{path.name} has no struct {struct}"
    fields = []
    for declaration in filter(None, map(str.strip, body[1].split(";"))):
        first, *others = declaration.partition("=")[0].split(",")
        match = re.fullmatch(r"(.*?[\s*])(\w+)\s*", first.strip(), re.DOTALL)
        assert match is not None, declaration
        kind = match[1].strip()
        fields.append((match[2], kind))
        base = kind.rstrip("*").strip()
        for other in map(str.strip, others):
            fields.append((other.lstrip("* "), base + "*" * other.count("*")))
    return [(name, kind.replace(" *", "*")) for name, kind in fields]


def model_of(cls: type) -> list[tuple[str, str]]:
    """The fields of a spec in Python as C++ has them."""
    expected = []
    for field in dataclasses.fields(cls):
        kind, _, optional = str(field.type).partition(" | ")
        if optional:
            expected.append((f"has_{field.name}", "bool"))
        expected.append((field.name, OF_PYTHON.get(kind, kind)))
    return expected


def by_type(fields: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The fields grouped by type: C has flags before shapes."""
    return sorted(fields, key=lambda field: field[1])


@pytest.mark.parametrize("name", ["OperandSpec", "EpilogueSpec", "ScaledDotSpec"])
def test_cpp_has_the_fields_of_python_in_their_order(name):
    assert fields_of(CPP, name) == model_of(getattr(python, name)), f"{CPP.name}: {name}"


@pytest.mark.parametrize(
    ("struct", "name"),
    [("jaxfp8_operand_spec", "OperandSpec"), ("jaxfp8_epilogue_spec", "EpilogueSpec")],
)
def test_c_has_the_fields_of_python_with_those_of_a_type_in_their_order(struct, name):
    model = [
        (field, OF_CPP[kind])
        for field, kind in model_of(getattr(python, name))
        if field not in NOT_IN_C
    ]
    there = fields_of(C, struct)
    assert by_type(there) == by_type(model), f"{C.name}: {struct}"


@pytest.mark.parametrize("struct", STRUCTS)
def test_ctypes_have_the_fields_of_c_in_their_order(struct):
    twin = [(name, OF_CTYPES[kind]) for name, kind in STRUCTS[struct]._fields_]
    there = [
        (name, kind.removeprefix("const ") if "void" in kind else kind)
        for name, kind in fields_of(C, struct)
    ]
    assert twin == there, f"abi.py: {STRUCTS[struct].__name__}, {C.name}: {struct}"


def test_a_changed_header_is_seen(tmp_path):
    """The tests above read what they compare: a swapped, renamed or missing field shows."""
    for old, new in (
        ("  Dims batch;\n  Dims tiles;", "  Dims tiles;\n  Dims batch;"),
        ("Dims tiles;", "Dims tile;"),
        ("  bool zero_point = false;\n", ""),
        ("std::string_view dtype;", "int dtype;"),
    ):
        text = CPP.read_text()
        assert text.count(old) == 1
        changed = tmp_path / "spec.h"
        changed.write_text(text.replace(old, new))
        assert fields_of(changed, "OperandSpec") != model_of(python.OperandSpec)
