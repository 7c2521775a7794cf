"""What the benchmark times is right: every contender of every case, at small sizes."""

import functools

import numpy as np
import pytest

from jaxfp8._bench import _cpu, _encoder, _gpu, _gpu_imma, _gpu_operands, _gpu_ragged, _timed
from jaxfp8._bench._measure import Missing

# More than a block of scales and not a multiple of one; columns that can be prepared.
SIDE = 192
# Why a contender may be missing here.
MISSING = ("pip install", "does not run on this processor", "multiples of 64 columns")
TABLE = {name: make for name, make in _cpu.table(SIDE) if not name.startswith("peak")}
CASES = TABLE | dict(_cpu.shaped([(3, 40, 72)]))


@pytest.fixture(autouse=True)
def shallow(monkeypatch):
    monkeypatch.setattr(_encoder, "LAYERS", 1)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.same_bits
def test_every_contender_computes_the_result_of_its_case(name):
    compared = [check(label, one) for label, one in CASES[name]().contenders.items()]
    assert sum(compared) >= 2


def check(label, contender) -> bool:
    """Whether a contender is there; fails if its result is not that of its problem."""
    if isinstance(contender, Missing):
        assert any(why in contender.reason for why in MISSING), label
        return False
    assert contender.exact is not None, label
    result, exact = as_float64(contender.enqueue()), contender.exact()
    assert result.shape == exact.shape, label
    error = np.linalg.norm(result - exact) / np.linalg.norm(exact)
    assert error <= contender.error, f"{label}: {error:.2g}, but {contender.error:.2g} is allowed"
    return True


def as_float64(result):
    if hasattr(result, "double"):  # of PyTorch
        result = result.double().numpy()
    return np.asarray(result, np.float64)


def test_the_table_has_every_row_that_the_kernels_are_judged_by():
    names = " ".join(dict(_cpu.table()))
    rows = {
        "w8a16 e4m3": (1, 16, 64, 256, 1024),
        "int8": (1, 16, 64, 256),
        "zero points int8": (1, 256),
        "zero points w8a32 uint8": (1, 256),
        "blocks e4m3": (1, 256),
        "dynamic int8": (256,),
        "odd w8a16 e4m3": (17,),
        "avx2 w8a16 e4m3": (1, 256),
    }
    assert not [
        (case, m) for case, ms in rows.items() for m in ms if f"{case} {m}x4096x4096" not in names
    ]
    for name in ("from memory 1x14336x4096", "16x50257x4096", "16x4096x4100", "MiniLM"):
        assert name in names


GPU_CASES = {
    "weight only": functools.partial(_gpu.weight_only, 3, 48, 64, first=True),
    "fp8 tensor": functools.partial(_gpu.fp8, 16, 32, 64, "tensor"),
    "fp8 block": functools.partial(_gpu.fp8, 16, 128, 256, "block"),
    "dynamic": functools.partial(_gpu.dynamic, 16, 32, 64),
    "quantize": functools.partial(_gpu.quantize, "128x128", 128),
    "chain": functools.partial(_gpu.chain, 16, 32, 64),
    "in int8": functools.partial(_gpu_imma.product, 3, 48, 64),
    "ragged rows": functools.partial(_gpu_ragged.of_rows, (3, 0, 5), 48, 128),
    "ragged, masked": functools.partial(_gpu_ragged.masked, (4, 4), 4, 48, 128),
    "ragged K": functools.partial(_gpu_ragged.of_k, (130, 0, 126), 16, 48),
}
# Activations in 8 bits or not, a scale rounded to bfloat16 or not.
NARROW = 4e-2


@pytest.mark.filterwarnings("ignore:.*is computed group by group")
@pytest.mark.parametrize("name", GPU_CASES)
def test_contenders_for_a_gpu_agree(name, monkeypatch):
    """They run on the CPU too, where the numbers are those of the definition."""
    monkeypatch.setattr(_gpu, "_torch_scaled_mm", lambda pairs: {})
    monkeypatch.setattr(_gpu_operands, "_BEYOND_CACHES", 0)
    case = GPU_CASES[name]()
    results = {label: first_of(one.enqueue()) for label, one in case.contenders.items()}
    ours = results.pop(next(iter(results)))
    for label, theirs in results.items():
        if label == "jaxfp8 without scales":
            continue
        error = np.linalg.norm(theirs - ours) / np.linalg.norm(ours)
        assert error <= NARROW, label


def first_of(results):
    """The first array of the first set of operands."""
    first = results[0]
    array = getattr(first, "qvalue", first[0] if isinstance(first, tuple) else first)
    return np.asarray(array, np.float64)


def test_a_copy_is_the_peak_of_what_memory_limits_on_a_gpu(monkeypatch):
    monkeypatch.setattr(_gpu, "_COPIED", 1 << 10)
    monkeypatch.setattr(_gpu, "_copy", _gpu._copy.__wrapped__)
    case = _gpu._beside_a_copy(_gpu.copy_bandwidth)
    measured = _timed.measured(case, 1)
    assert case.bytes == 4096 and set(measured.peaks) == {"read"} and measured.seconds("copy")
