"""Reading onto devices: each reads its own slice, and nothing is held twice."""

import concurrent.futures
import gc
import json
import os
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint.files import codes, folder, scales
from jax.sharding import NamedSharding, PartitionSpec

import jaxfp8
from jaxfp8 import checkpoint
from jaxfp8.checkpoint import _file
from jaxfp8.checkpoint._file import File

P = PartitionSpec
N, K = 512, 384
SPECS = [P("x", None), P(None, "x"), P("x", "y"), P(("x", "y"), None), P()]


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.fixture
def path(tmp_path):
    tensors = {"a.weight": codes((N, K)), "a.weight_scale": scales((4, 3)), "a.bias": scales(N)}
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return folder(tmp_path / "m", tensors, config)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_sharded_arrays_are_those_of_one_device(path, mesh, spec):
    whole = checkpoint.load(path)
    loaded = checkpoint.load(path, sharding=NamedSharding(mesh, spec))
    assert loaded["a.weight"].qvalue.sharding.spec == spec
    for x, y in zip(jax.tree.leaves(loaded), jax.tree.leaves(whole), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("spec", [P("x", None), P(None, ("x", "y"))], ids=str)
def test_each_device_reads_its_slice_only(path, mesh, spec, monkeypatch):
    read, plain = [], File._read_into

    def counted(file, entry, start, target):
        read.append((entry.name, target.size))
        plain(file, entry, start, target)

    monkeypatch.setattr("jaxfp8.checkpoint._file._SHORTEST_RUN", 1)
    monkeypatch.setattr(File, "_read_into", counted)
    checkpoint.load(path, sharding={"a.weight": NamedSharding(mesh, spec)}, where=["a.weight"])
    assert sum(size for name, size in read if name == "a.weight") == N * K
    assert max(size for name, size in read if name == "a.weight") < N * K


@pytest.mark.parametrize("shortest", [1, 1 << 20], ids=["runs", "rows"])
@pytest.mark.parametrize(
    "index",
    [np.s_[:, 3:7, :], np.s_[1:3, :, 2:5], np.s_[2:3], np.s_[0:0], np.s_[:, :, 4:5], ()],
    ids=str,
)
def test_slice_is_that_of_the_array(tmp_path, monkeypatch, index, shortest):
    monkeypatch.setattr("jaxfp8.checkpoint._file._SHORTEST_RUN", shortest)
    monkeypatch.setattr("jaxfp8.checkpoint._file._MOST_ROWS_BYTES", 100)
    whole = scales((4, 9, 6))
    folder(tmp_path / "m", {"a": whole})
    index = index if isinstance(index, tuple) else (index,)
    with File(str(tmp_path / "m" / "model.safetensors")) as file:
        np.testing.assert_array_equal(file.read(file.header.entries[0], index), whole[index])


def test_shardings_by_function(path, mesh):
    rows = NamedSharding(mesh, P("x"))
    loaded = checkpoint.load(path, sharding=lambda name, x: rows if len(x.shape) == 1 else None)
    assert loaded["a.bias"].sharding == rows and len(loaded["a.weight"].qvalue.devices()) == 1


def test_scale_is_split_as_its_weight_where_that_divides(path, mesh):
    loaded = checkpoint.load(path, sharding=NamedSharding(mesh, P("x", "y")))
    assert loaded["a.weight"].scale.sharding.spec == P("x", None)  # 4 of 2, 3 of 2


def test_product_of_a_sharded_checkpoint(path, mesh):
    x = jax.random.normal(jax.random.key(0), (4, K))

    def product(w):
        return jaxfp8.einsum("mk,nk->mn", x, w)

    exact = product(checkpoint.load(path)["a.weight"])
    w = checkpoint.load(path, sharding=NamedSharding(mesh, P("x", None)))["a.weight"]
    np.testing.assert_allclose(jax.jit(product)(w), exact, rtol=1e-5, atol=1e-4)


def test_dtype_is_for_floats_outside_weights(path):
    loaded = checkpoint.load(path, dtype=jnp.bfloat16)
    assert loaded["a.bias"].dtype == jnp.bfloat16
    assert loaded["a.weight"].scale.dtype == jnp.float32


@pytest.mark.parametrize(
    "where",
    [["a.bias"], lambda name, shape: name.endswith("bias"), r"\.bias$"],
    ids=["list", "function", "pattern"],
)
def test_where_chooses_what_is_read(path, where):
    assert list(checkpoint.load(path, where=where)) == ["a.bias"]


def test_unknown_name_is_refused(path):
    with pytest.raises(KeyError, match=r"'a\.b' is not in"):
        checkpoint.load(path, where=["a.b"])


def test_open_reads_when_asked(path):
    with checkpoint.open(path) as opened:
        assert list(opened) == ["a.weight", "a.bias"] and len(opened) == 2
        assert opened.shape("a.weight").tile_sizes == (128, 128)
        assert opened["a.bias"].shape == (N,)


def test_file_that_is_cut_while_it_is_read_is_an_error(path):
    with checkpoint.open(path) as opened:
        with (path / "model.safetensors").open("r+b") as file:
            file.truncate(1000)
        with pytest.raises(checkpoint.CheckpointError, match="cut short while it was read"):
            opened["a.weight"]


def large(tmp_path):
    """A weight of several parts that threads read; the last is short."""
    values = codes((4097, 2051))
    tensors = {"a.weight": values, "a.weight_scale": scales(())}
    return folder(tmp_path / "large", tensors) / "model.safetensors", values


def test_a_tensor_of_several_parts_is_read_whole(tmp_path):
    path, values = large(tmp_path)
    assert values.nbytes > 2 * _file.PART_BYTES
    loaded = checkpoint.load(path)["a.weight"].qvalue
    np.testing.assert_array_equal(np.asarray(loaded).view(np.uint8), values.view(np.uint8))


def test_a_file_that_is_cut_in_a_later_part_is_an_error(tmp_path):
    path, _ = large(tmp_path)
    with checkpoint.open(path) as opened:
        os.truncate(path, 2 * _file.PART_BYTES)
        with pytest.raises(checkpoint.CheckpointError, match="cut short while it was read"):
            opened["a.weight"]


def test_threads_share_an_open_checkpoint(tmp_path):
    tensors = {}
    for layer in range(24):
        tensors[f"{layer}.weight"] = codes((64, 48), seed=layer)
        tensors[f"{layer}.weight_scale"] = scales(())
    with checkpoint.open(folder(tmp_path / "m", tensors)) as opened:
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            found = list(pool.map(opened.__getitem__, list(opened) * 8))
        for name, array in zip(list(opened) * 8, found, strict=True):
            same = np.asarray(array.qvalue).view(np.uint8) == tensors[name].view(np.uint8)
            assert same.all()


def test_an_open_checkpoint_keeps_no_array(path):
    with checkpoint.open(path) as opened:
        array = weakref.ref(opened["a.weight"].qvalue)
        gc.collect()
        assert array() is None


def test_a_closed_checkpoint_says_so_for_a_large_tensor(tmp_path):
    opened = checkpoint.open(large(tmp_path)[0])
    opened.close()
    with pytest.raises(
        checkpoint.CheckpointError, match=r"the checkpoint is closed.*open it again"
    ):
        opened["a.weight"]


MEASURE = """
import json, pathlib, re, sys
import jax, jax.numpy as jnp, jaxfp8
from jaxfp8 import checkpoint
small, large = sys.argv[1:]
jax.block_until_ready(checkpoint.load(small))  # what the first use of everything takes
def peak():  # `ru_maxrss` would begin with that of the process that started this one
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", status)[1])
before = peak()
loaded = checkpoint.load(large)
print(json.dumps([peak() - before, sum(x.nbytes for x in jax.tree.leaves(loaded))]))
"""


def measured(tmp_path, layers, shape):
    """Peak of host memory and bytes of arrays, of a load in a fresh process; and the file's."""
    shape = n, k = shape
    tensors = {}
    for layer in range(layers):
        tensors[f"{layer}.weight"] = codes(shape, seed=layer)
        tensors[f"{layer}.weight_scale"] = scales((-(-n // 128), -(-k // 128)))
    large = folder(tmp_path / "large", tensors)
    small = folder(tmp_path / "small", {"a.weight": codes((8, 8)), "a.weight_scale": scales(())})
    command = [sys.executable, "-c", MEASURE, str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return *json.loads(done.stdout), (large / "model.safetensors").stat().st_size


@pytest.mark.slow
def test_memory_is_that_of_the_file_and_one_tensor(tmp_path):
    peak, resident, size = measured(tmp_path, 6, (2048, 4096))
    assert resident <= 1.02 * size
    # A process's own noise is a megabyte or two.
    assert peak <= resident + 1.1 * 2048 * 4096 + (2 << 20)
