"""What the benchmark times is right: every contender of every case, at small sizes."""

import functools

import jax
import numpy as np
import pytest

from jaxfp8._bench import _cases, _gpu_codes, _gpu_groups, _gpu_layers, _measure, _peaks
from jaxfp8._bench._case import measured
from jaxfp8._bench._measure import Missing
from jaxfp8._bench._products import KINDS, SAME, normal, product

pytestmark = pytest.mark.any_jax

# More than a block of scales and not a multiple of one; columns that can be prepared.
SIDE = 192
# Why a contender may be missing here.
MISSING = ("pip install", "multiples of 64 columns")
TABLE = dict(_cases.table("cpu", SIDE))
CASES = TABLE | dict(_cases.shaped("cpu", [(3, 40, 72)]))
# Errors as shares of the norm: in float32, rounded to bfloat16, of bfloat16 terms.
FLOAT, ROUNDED, NARROW = 1e-5, 4e-3, 1.5e-2


@pytest.mark.parametrize("name", CASES)
@pytest.mark.same_bits
def test_every_contender_computes_the_result_of_its_case(name):
    case, kind = CASES[name](), next(k for k in reversed(KINDS.values()) if name.startswith(k.name))
    compared = [check(case, kind, *item) for item in case.contenders.items()]
    assert sum(compared) >= 2


def check(case, kind, label, contender) -> bool:
    """Whether a contender is there; fails if its result is not that of its problem."""
    if isinstance(contender, Missing):
        assert any(why in contender.reason for why in MISSING), label
        return False
    if label == "XLA int8 -> int32":  # of the codes, without their scales
        return True
    result, exact = as_float64(contender.enqueue()), case.exact()
    if kind.has_bias and label.split()[-1] in ("f32", "bf16"):  # the bare product
        result = result + bias_of(exact.shape[1])
    assert result.shape == exact.shape, label
    error = np.linalg.norm(result - exact) / np.linalg.norm(exact)
    in_floats = kind.out_dtype == np.float32 and "bf16" not in label
    is_wide = label.startswith(SAME) or "bf16" in label
    allowed = FLOAT if in_floats else NARROW if is_wide else ROUNDED
    assert error <= allowed, f"{label}: {error:.2g}, but {allowed:.2g} is allowed"
    return True


def bias_of(n):
    """The bias of the cases that have one."""
    return np.asarray(normal(2, n), np.float64)


def as_float64(result):
    if hasattr(result, "double"):  # of PyTorch
        result = result.double().numpy()
    return np.asarray(result, np.float64)


def test_the_table_has_every_row_that_the_kernels_are_judged_by():
    names = dict(_cases.table("cpu"))
    rows = {
        "w8a16 e4m3": (1, 16, 17, 64, 256, 1024),
        "int8": (1, 16, 17, 64, 256),
        "zero points int8": (1, 256),
        "zero points w8a32 uint8": (1, 256),
        "blocks e4m3": (1, 256),
        "dynamic int8": (256,),
    }
    assert {f"{case} {m}x4096x4096" for case, ms in rows.items() for m in ms} <= set(names)
    assert "w8a16 e4m3 from memory 1x14336x4096" in names
    assert {"int8 16x50257x4096", "int8 16x4096x4100"} <= set(names)


GPU_CASES = {
    **{
        f"product, {kind}": functools.partial(product, kind, (16, 128, 256), "cuda")
        for kind in ("w8a16 e4m3", "int8", "dynamic e4m3", "fp8 tensor", "fp8 block", "imma")
    },
    "quantize": functools.partial(_gpu_codes.by_grain, "128x128", 128),
    "rows": functools.partial(_gpu_codes.rows, "rmsnorm", 3),
    "gate": functools.partial(_gpu_codes.rows, "silu gate", 3),
    "encode": functools.partial(_gpu_codes.training, "rmsnorm x3", 16),
    "encode, weight": functools.partial(_gpu_codes.training, "float32 weight", 16),
    "output": functools.partial(_gpu_layers.output, 64),
    "chain": functools.partial(_gpu_layers.chain, 16, 32, 64),
    "norm layer": functools.partial(_gpu_layers.norm_layer, 3, 64),
    "ragged rows": functools.partial(_gpu_groups.of_rows, (3, 0, 5), 48, 128),
    "ragged, masked": functools.partial(_gpu_groups.masked, (4, 4), 4, 48, 128),
    "ragged K": functools.partial(_gpu_groups.of_k, (130, 0, 126), 16, 48),
    "ragged w8a16": functools.partial(_gpu_groups.weight_only, (3, 0, 5), 48, 128),
}
# Activations in 8 bits or not, a scale rounded to bfloat16 or not.
NARROW = 4e-2


@pytest.mark.filterwarnings("ignore:.*is computed group by group")
@pytest.mark.parametrize("name", GPU_CASES)
def test_contenders_for_a_gpu_agree(name, monkeypatch):
    """They run on the CPU too, where the numbers are those of the definition."""
    monkeypatch.setattr(_measure, "BEYOND_CACHES", 0)
    monkeypatch.setattr(_peaks, "of_gpu", lambda by_memory=True: {})
    case = GPU_CASES[name]()
    results = {label: first_of(one.enqueue()) for label, one in case.contenders.items()}
    ours = results.pop(next(iter(results)))
    for label, theirs in results.items():
        if label == "XLA int8 -> int32":  # of the codes, without their scales
            continue
        if (
            label == "XLA bf16"
            and KINDS.get(name.removeprefix("product, "), KINDS["imma"]).has_bias
        ):
            theirs = theirs + bias_of(theirs.shape[-1])
        error = np.linalg.norm(theirs - ours) / np.linalg.norm(ours)
        assert error <= NARROW, label


def first_of(results):
    """The first array of the first set of operands."""
    return np.asarray(jax.tree.leaves(results)[0], np.float64)


@pytest.mark.slow
def test_a_copy_is_the_peak_of_what_memory_limits_on_a_gpu(monkeypatch):
    monkeypatch.setattr(_peaks, "_COPIED", 1 << 11)
    _peaks.copy.cache_clear()
    case = product("w8a16 e4m3", (1, 16, 32), "cuda")
    results = measured(case, 1)
    assert set(results.peaks) == {"read"} and results.limit == "read"
    assert product("w8a16 e4m3", (129, 16, 32), "cuda").flops
    _peaks.copy.cache_clear()
