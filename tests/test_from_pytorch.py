"""The example that calls the C interface from PyTorch."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from_pytorch = pytest.importorskip("from_pytorch")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_a_linear_layer_is_that_of_pytorch(rows, dtype):
    torch.manual_seed(rows)
    weight = torch.randint(-127, 128, (48, 96), dtype=torch.int8)
    scale = torch.rand(48, 1) / 100
    x, bias = torch.randn(rows, 96).to(dtype), torch.randn(1, 48)
    y = from_pytorch.linear(x, weight, scale, bias, "relu")
    exact = torch.relu(x.double() @ (weight.double() * scale).T + bias)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    np.testing.assert_allclose(y.double(), exact, rtol=tolerance, atol=tolerance)


def test_a_wrong_shape_is_an_error_with_a_reason():
    with pytest.raises(RuntimeError, match="contracting axes"):
        from_pytorch.linear(torch.ones(2, 8), torch.ones(4, 9, dtype=torch.int8), torch.ones(4, 1))
