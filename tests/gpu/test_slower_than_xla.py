"""Products that `rewrite` leaves as written on a GPU, because XLA's program is faster there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8._call.library import ffi

pytestmark = pytest.mark.filterwarnings("ignore:.*is rewritten, so:jaxfp8.FallbackWarning")


def in_float32(x, w, *_):
    return x[0] @ (w[0].astype(jnp.float32) * 0.5).T


@pytest.mark.parametrize(("fun", "dtype"), [(in_float32, "float32")])
def test_a_product_that_xla_computes_faster_is_no_call(fun, dtype):
    size = 512
    keys = jax.random.split(jax.random.key(0), 2)
    x, w = (jax.random.normal(key, (1, size, size)) for key in keys)
    scale = jnp.full((1, size, size // 32), 0.5, jnp.float8_e8m0fnu)
    args = x.astype(dtype), w.astype(jnp.float8_e4m3fn), scale, scale
    (site,) = jaxfp8.explain(fun)(*args).missed
    assert "XLA's program is faster on this GPU" in site.reason
    before = ffi.kernel_calls("cuda")
    found, written = (np.asarray(jax.jit(f)(*args)) for f in (jaxfp8.rewrite(fun), fun))
    assert ffi.kernel_calls("cuda") == before
    assert np.linalg.norm(found - written) <= 1e-5 * np.linalg.norm(written)
