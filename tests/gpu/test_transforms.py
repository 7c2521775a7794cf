"""What JAX does with a product on a GPU: jit, vmap, grad, scan, CUDA graphs, threads."""

import dataclasses
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8 import testing
from jaxfp8._call.library import ffi
from jaxfp8._value.spec import EpilogueSpec, OperandSpec, ScaledDotSpec


def weight(seed: int, k: int, n: int, dtype=jnp.float8_e4m3fn) -> jaxfp8.QArray:
    x = jax.random.normal(jax.random.key(seed), (k, n)) / np.sqrt(k)
    return jaxfp8.quantize(x, dtype, channelwise_axes=(1,))


def activations(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(100 + seed), shape).astype(jnp.bfloat16)


def on_cpu(fun, *args):
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.jit(fun)(*jax.device_put(args, jax.devices("cpu")[0]))


def close(a, b, tolerance=2e-2):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) <= tolerance * np.linalg.norm(y)


def loss(x, w):
    return jnp.sum(jnp.tanh(jaxfp8.matmul(x, w)).astype(jnp.float32) ** 2)


PROGRAMS = {
    "jit": (jaxfp8.matmul, lambda: (activations(1, 8, 128), weight(1, 128, 64))),
    "vmap": (
        jax.vmap(jaxfp8.matmul, (0, None)),
        lambda: (activations(2, 5, 8, 128), weight(2, 128, 64)),
    ),
    "grad": (jax.grad(loss), lambda: (activations(3, 8, 128), weight(3, 128, 64))),
    "einsum": (
        lambda x, w: jaxfp8.einsum("bsd,dhk->bshk", x, w),
        lambda: (
            activations(4, 2, 8, 64),
            jaxfp8.quantize(
                jax.random.normal(jax.random.key(4), (64, 4, 16)), channelwise_axes=(1, 2)
            ),
        ),
    ),
    "attention": (
        lambda q, k: jaxfp8.einsum("bqhd,bkhd->bhqk", q, k),
        lambda: (
            jaxfp8.quantize(activations(5, 2, 16, 4, 32), channelwise_axes=(0, 1, 2)),
            jaxfp8.quantize(activations(6, 2, 24, 4, 32), channelwise_axes=(0, 1, 2)),
        ),
    ),
    "experts": (
        jax.vmap(jaxfp8.matmul),
        lambda: (
            activations(7, 4, 8, 128),
            jaxfp8.quantize(
                jax.random.normal(jax.random.key(7), (4, 128, 64)), channelwise_axes=(0, 2)
            ),
        ),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_gpu_and_a_cpu_agree(name):
    fun, make = PROGRAMS[name]
    args = make()
    before = sum(ffi.kernel_calls("cuda").values())
    with jaxfp8.strict():
        out = jax.jit(fun)(*args)
    jax.block_until_ready(out)
    assert sum(ffi.kernel_calls("cuda").values()) > before
    close(out, on_cpu(fun, *args))


def test_scan_over_a_stack_of_layers():
    stack = jaxfp8.quantize(
        jax.random.normal(jax.random.key(0), (6, 128, 128)) / 11, channelwise_axes=(0, 2)
    )

    def model(x, stack):
        return jax.lax.scan(lambda x, w: (jnp.tanh(jaxfp8.matmul(x, w)), None), x, stack)[0]

    args = (activations(8, 16, 128), stack)
    close(jax.jit(model)(*args), on_cpu(model, *args), 5e-2)


def test_a_captured_graph_gives_what_the_first_run_gave():
    w = [weight(i, 256, 256) for i in range(12)]

    @jax.jit
    def model(x):
        for one in w:
            x = jnp.tanh(jaxfp8.matmul(x, one))
        return x

    inputs = [activations(i, 16, 256) for i in range(4)]
    first = [np.asarray(model(x)) for x in inputs]
    for _ in range(5):
        for x, expected in zip(inputs, first, strict=True):
            np.testing.assert_array_equal(np.asarray(model(x)), expected)


@pytest.mark.parametrize("rows", [4, 512])
@pytest.mark.parametrize("kind", ["weight-only", "fp8", "int8"])
def test_repeats_have_the_same_bits(kind, rows):
    x, w = (
        activations(9, rows, 4096),
        weight(9, 4096, 1024, jnp.int8 if kind == "int8" else jnp.float8_e4m3fn),
    )
    if kind != "weight-only":
        x = jaxfp8.quantize(x, w.qvalue.dtype, channelwise_axes=(0,))
    product = jax.jit(jaxfp8.matmul)
    first = np.asarray(product(x, w))
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(product(x, w)), first)


def test_several_threads_at_once():
    problems = [(activations(i, 4 + 60 * (i % 3), 512), weight(i, 512, 384)) for i in range(8)]
    expected = [np.asarray(jax.jit(jaxfp8.matmul)(*p)) for p in problems]

    def repeat(i):
        return [np.asarray(jax.jit(jaxfp8.matmul)(*problems[i])) for _ in range(20)]

    with ThreadPoolExecutor(8) as pool:
        for i, results in enumerate(pool.map(repeat, range(8))):
            for result in results:
                np.testing.assert_array_equal(result, expected[i])


def test_a_rewritten_function_runs_on_the_kernels():
    w = weight(10, 512, 256)

    def layer(x, codes, scale):
        return jax.nn.gelu(x @ (codes.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)))

    args = (activations(10, 32, 512), w.qvalue, w.scale)
    testing.assert_rewritten(layer, *args, at_least=1)
    before = sum(ffi.kernel_calls("cuda").values())
    out = jax.jit(jaxfp8.rewrite(layer))(*args)
    assert sum(ffi.kernel_calls("cuda").values()) > before
    close(out, layer(*args))


def test_no_wide_copy_of_a_weight_is_made():
    w = weight(11, 8192, 8192)
    compiled = jax.jit(jaxfp8.matmul).lower(activations(11, 4, 8192), w).compile()
    scratch = compiled.memory_analysis().temp_size_in_bytes
    assert scratch < 0.1 * w.qvalue.size  # the workspace; a bfloat16 copy would be 2.0
    assert "bf16[8192,8192]" not in compiled.as_text()


def test_a_scale_that_the_function_rounds():
    def model(x, q, s):
        wide = q.astype(jnp.bfloat16) * s.astype(jnp.bfloat16)
        return jax.lax.dot(x, wide, preferred_element_type=jnp.float32)

    x, w = activations(12, 8, 256), weight(12, 256, 128)
    args = x, w.qvalue, w.scale.reshape(-1)
    before = sum(ffi.kernel_calls("cuda").values())
    out = jax.jit(jaxfp8.rewrite(model))(*args)
    assert sum(ffi.kernel_calls("cuda").values()) > before
    close(out, on_cpu(model, *args), 2**-8)


def test_scales_are_rounded_by_every_path_that_takes_the_product():
    """Of FP8 by FP8 it is the slowest. An attribute is never ignored."""
    side = OperandSpec(
        dtype="float8_e4m3fn",
        shape=(1, 128, 128),
        contracting=(2,),
        batch=(0,),
        tiles=(1, 128, 128),
        scale=False,
        zero_point=False,
    )
    rhs = dataclasses.replace(side, scale=True, scale_rounded=True)
    spec = ScaledDotSpec(lhs=side, rhs=rhs, epilogue=EpilogueSpec(out_dtype="float32"))
    results = [(spec.out_shape, np.float32), ((1 << 20,), np.uint8)]
    call = jax.ffi.ffi_call(ffi.TARGET, [jax.ShapeDtypeStruct(*result) for result in results])
    ffi.ensure_registered("cuda")
    ones = jnp.full(side.shape, 0x38, np.uint8)
    scale = jnp.full((1, 1, 1), 1 + 2.0**-10, np.float32)  # bfloat16 has 1
    out, _ = call(ones, ones, scale, **spec.attributes(), kernel="")
    np.testing.assert_array_equal(out, 128.0)


_RUN = """
import sys, jaxfp8, jax.export, numpy as np
with open(sys.argv[1], "rb") as file:
    program = jax.export.deserialize(bytearray(file.read()))
np.save(sys.argv[2], program.call(np.load(sys.argv[3])))
"""


def test_a_process_that_only_imports_the_package_runs_a_program(tmp_path):
    pytest.importorskip("flatbuffers")
    x, w = activations(0, 8, 256).astype(jnp.float32), weight(0, 256, 128)
    fun = jax.jit(lambda x: jaxfp8.matmul(x, w))
    program = jax.export.export(fun, disabled_checks=jaxfp8.ffi.export_checks())(x)
    (tmp_path / "program").write_bytes(program.serialize())
    np.save(tmp_path / "x.npy", x)
    command = [sys.executable, "-c", _RUN, "program", "y.npy", "x.npy"]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=300)
    close(np.load(tmp_path / "y.npy"), fun(x), 1e-6)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.int8])
@pytest.mark.parametrize("batch", [1, 3])
def test_attention_over_a_cache_with_a_scale_for_each_token(batch, dtype):
    def attend(query, k, of_k, v, of_v):
        keys, values = (
            c.astype(query.dtype) * s.astype(query.dtype) for c, s in ((k, of_k), (v, of_v))
        )
        return jax.nn.dot_product_attention(query, keys, values)

    query = activations(0, batch, 1, 8, 64)
    growing = jnp.exp2(jnp.linspace(-3, 3, 200))[:, None, None]
    cache = [
        jaxfp8.quantize(
            activations(i, batch, 200, 2, 64) * growing, dtype, channelwise_axes=(0, 1, 2)
        )
        for i in (1, 2)
    ]
    args = query, *(x for c in cache for x in (c.qvalue, c.scale))
    out = jax.jit(jaxfp8.rewrite(attend, strict=True))(*args)
    wide = [query.astype(jnp.float32), *(jaxfp8.dequantize(c, jnp.float32) for c in cache)]
    close(out, on_cpu(jax.nn.dot_product_attention, *wide))
