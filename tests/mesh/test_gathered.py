"""Calls of which XLA gathers operands say so once, and inside `strict` are refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from mesh.automatic import AUTO, QW, P, X, normal, put

import jaxfp8
from jaxfp8._call.library import strictness


@pytest.fixture(autouse=True)
def _not_told(monkeypatch) -> None:
    monkeypatch.setattr(strictness, "_WARNED", set())


def exported():
    consent = jaxfp8.ffi.export_checks()
    return jax.export.export(jax.jit(lambda x: jaxfp8.matmul(x, QW)), disabled_checks=consent)


def test_an_exported_program_has_whole_calls() -> None:
    x = put(X, "x", None)
    with pytest.warns(
        jaxfp8.FallbackWarning, match=r"the product of .* and float8_e4m3fn\[.*exported"
    ):
        program = exported()(x)
    np.testing.assert_array_equal(jax.jit(program.call)(x), jaxfp8.matmul(X, QW))


def test_an_exported_program_is_refused_inside_strict() -> None:
    with jaxfp8.strict(), pytest.raises(jaxfp8.UnsupportedError, match="use explicit axes"):
        exported()(put(X, "x", None))


def test_jax_exports_no_call_that_xla_splits() -> None:
    """Why exported programs gather: what `custom_partitioning` lowers to is a pointer.

    JAX keeps what it points at alive, and exports no program that has to.
    """
    double = custom_partitioning(lambda x: 2 * x)
    double.def_partition(lambda mesh, operands, result: None, sharding_rule="i j -> i j")
    with pytest.raises(NotImplementedError, match="serialization of host_callbacks"):
        jax.export.export(jax.jit(double))(put(X, "x", None))


def test_a_program_for_more_devices_than_there_are() -> None:
    mesh = jax.sharding.AbstractMesh((8,), ("x",), axis_types=(AUTO,))
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("x")))
    traced = jax.jit(lambda x: jaxfp8.matmul(x, QW)).trace(x)
    with pytest.warns(jaxfp8.FallbackWarning, match="for 8 devices and there are 4"):
        traced.lower(lowering_platforms=("cpu",))


def test_a_tile_that_would_be_cut() -> None:
    x = put(X, None, ("x", "y"))

    def quantize(x):
        return jaxfp8.quantize(x, tiled_axes={1: 128})

    told = r"gathers operands of the quantization of float32\[\d+,\d+\]: .*cut tiles"
    with pytest.warns(jaxfp8.FallbackWarning, match=told):
        got = jax.jit(quantize)(x)
    np.testing.assert_array_equal(got.scale, quantize(X).scale)
    with jaxfp8.strict(), pytest.raises(Exception, match="XLA gathers operands"):
        jax.jit(lambda x: quantize(x))(x)


def test_three_tiles_on_two_devices() -> None:
    def quantize(x):
        return jaxfp8.quantize(x, jnp.int8, tiled_axes={0: 32})

    x = normal(96, 64)
    with pytest.warns(jaxfp8.FallbackWarning, match="cut tiles"):
        got = jax.jit(quantize)(put(x, "x", None))
    np.testing.assert_array_equal(got.scale, quantize(x).scale)
    np.testing.assert_array_equal(got.qvalue, quantize(x).qvalue)


def test_a_tile_that_a_shard_would_cut_along_explicit_axes() -> None:
    with jax.set_mesh(jax.make_mesh((4,), ("m",))):
        x = jax.device_put(X, jax.P(None, "m"))

        def quantize(x):
            return jaxfp8.quantize(x, tiled_axes={1: 128})

        with pytest.warns(jaxfp8.FallbackWarning, match="shards would cut .* along axis 1"):
            got = jax.jit(quantize)(x)
        np.testing.assert_array_equal(got.scale, quantize(X).scale)
        with jaxfp8.strict(), pytest.raises(jaxfp8.UnsupportedError, match="take tiles that"):
            jax.jit(lambda x: quantize(x))(x)
