"""What changes, and what does not, in a process that has x64."""

import os
import subprocess
import sys

import pytest

OF_PYTHON_NUMBERS = """
import jax, jax.numpy as jnp, numpy as np
from jaxfp8 import dequantize, fake_quantize, quantize

x = np.float32([1.3, -2.0, 0.26])
calls = (
    lambda: quantize(x, np.int8, scale=0.5, zero_point=3),
    lambda: quantize(x, np.uint8, scale=[0.5], zero_point=[3]),
    lambda: quantize(x, scale=1, scale_dtype="float8_e8m0fnu"),
    lambda: quantize(1.3),
    lambda: fake_quantize(1.3, scale=np.float64(0.3)),
    lambda: quantize(x, scale=1e50),
    lambda: quantize(x, np.int8, zero_point=2**40),
)
for call in calls:
    try:
        y = call()
        print(repr(y), dequantize(y) if hasattr(y, "qvalue") else y.dtype, getattr(y, "scale", y))
    except ValueError as error:
        print(error)
"""
OF_FLOAT64 = """
x = jnp.asarray(np.linspace(-3, 3, 12).reshape(4, 3))
q, narrow = (quantize(v, channelwise_axes=[1]) for v in (x, x.astype(jnp.float32)))
same = (q.qvalue == narrow.qvalue).all() and (q.scale == narrow.scale).all()
y, gradient = jax.value_and_grad(lambda v: fake_quantize(v, channelwise_axes=[1]).sum())(x)
print("float64:", x.dtype, q, same, y.dtype, gradient.dtype, (gradient == 1).all())
"""


@pytest.fixture(scope="module")
def printed_with_x64():
    """What the two scripts print in a process that has x64."""
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", OF_PYTHON_NUMBERS + OF_FLOAT64]
    environment = {**os.environ, "JAX_ENABLE_X64": "1"}
    return subprocess.run(
        command, env=environment, check=True, text=True, stdout=subprocess.PIPE
    ).stdout


def test_python_numbers_mean_the_same_with_x64(capsys, printed_with_x64):
    exec(OF_PYTHON_NUMBERS, {})
    printed = capsys.readouterr().out
    assert "zero_point=int32[]" in printed
    assert printed_with_x64.partition("float64:")[0] == printed


def test_float64_is_quantized_as_its_float32_and_keeps_its_gradient(printed_with_x64):
    q = "QArray(float8_e4m3fn[4,3], scale=float32[1,3])"
    found = printed_with_x64.partition("float64:")[2]
    assert found.strip() == f"float64 {q} True float64 float64 True"
