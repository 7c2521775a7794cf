"""Writing: what servers read, and nothing lost when cut short."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors

import jaxfp8
from jaxfp8 import checkpoint
from jaxfp8.checkpoint import CheckpointError

W = np.random.default_rng(0).normal(size=(256, 200)).astype(np.float32)
Q = jaxfp8.quantize(W, channelwise_axes=(0,))
BLOCKS = jaxfp8.quantize(W, tiled_axes={0: 128, 1: 128})


def config_of(path):
    return json.loads((path / "config.json").read_text())["quantization_config"]


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize(
    ("q", "weights"),
    [
        (jaxfp8.quantize(W), {"type": "float", "strategy": "tensor"}),
        (Q, {"type": "float", "strategy": "channel"}),
        (BLOCKS, {"strategy": "block", "block_structure": [128, 128]}),
        (
            jaxfp8.quantize(W, jnp.int8, channelwise_axes=(0,), tiled_axes={1: 50}),
            {"type": "int", "strategy": "group", "group_size": 50},
        ),
        (
            jaxfp8.quantize(W, jnp.int8, channelwise_axes=(0,), zero_point=True),
            {"type": "int", "strategy": "channel", "symmetric": False},
        ),
    ],
    ids=["tensor", "channel", "block", "group", "zero points"],
)
def test_config_says_how_weights_are_held(tmp_path, q, weights):
    checkpoint.save(tmp_path / "m", {"up.weight": q, "lm_head.weight": W})
    config = config_of(tmp_path / "m")
    group = config["config_groups"]["group_0"]
    assert group["weights"].items() >= {"num_bits": 8, **weights}.items()
    assert group["targets"] == ["Linear"] and config["ignore"] == ["lm_head"]
    assert config["quant_method"] == "compressed-tensors"
    # Servers take int8 beside floats in words alone.
    form = {"float": "float-quantized", "int": "pack-quantized"}[weights.get("type", "float")]
    assert config["format"] == form


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (None, None),
        (jaxfp8.FP8_W8A16, None),
        (jaxfp8.FP8_AS_INT8, None),  # in what a device computes is no property of a file
        (jaxfp8.FP8_DYNAMIC, {"type": "float", "strategy": "token", "dynamic": True}),
        (jaxfp8.FP8_BLOCK, {"strategy": "group", "group_size": 128, "dynamic": True}),
        (jaxfp8.INT8_ASYMMETRIC, {"type": "int", "symmetric": False, "dynamic": True}),
    ],
    ids=["none", "FP8_W8A16", "FP8_AS_INT8", "FP8_DYNAMIC", "FP8_BLOCK", "INT8_ASYMMETRIC"],
)
def test_config_says_what_the_recipe_does_with_activations(tmp_path, recipe, expected):
    checkpoint.save(tmp_path / "m", {"up.weight": Q}, recipe=recipe)
    inputs = config_of(tmp_path / "m")["config_groups"]["group_0"]["input_activations"]
    assert inputs is None if expected is None else inputs.items() >= expected.items()


def test_static_scales_of_activations_are_kept(tmp_path):
    tree = {"up.weight": jaxfp8.quantize(W), "up.input_scale": jnp.float32(0.5)}
    checkpoint.save(tmp_path / "m", tree, recipe=jaxfp8.FP8_STATIC)
    inputs = config_of(tmp_path / "m")["config_groups"]["group_0"]["input_activations"]
    assert inputs["dynamic"] is False and inputs["strategy"] == "tensor"
    assert float(checkpoint.load(tmp_path / "m")["up.input_scale"]) == 0.5


def test_weights_held_in_several_ways_have_groups_of_their_own(tmp_path):
    tree = {"a": {"weight": Q}, "b": {"weight": BLOCKS}}
    checkpoint.save(tmp_path / "m", tree)
    groups = config_of(tmp_path / "m")["config_groups"].values()
    assert [group["targets"] for group in groups] == [["a"], ["b"]]
    same(checkpoint.load(tmp_path / "m"), {"a.weight": Q, "b.weight": BLOCKS})


R = np.random.default_rng(1)


def exponents(*shape):
    return jnp.asarray(R.integers(110, 130, shape).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu))


def some(dtype, *shape):
    return jnp.asarray(R.integers(-100, 100, shape).astype(dtype))


LOADED = {
    "e8m0 in blocks": jaxfp8.QArray(
        some(ml_dtypes.float8_e4m3fn, 256, 200), exponents(2, 2), tiles=(128, 128)
    ),
    "e8m0 by channel": jaxfp8.QArray(some(ml_dtypes.float8_e4m3fn, 6, 8), exponents(6, 1)),
    "e8m0 of one": jaxfp8.QArray(some(ml_dtypes.float8_e4m3fn, 6, 8), exponents()),
    "MXFP8": jaxfp8.QArray(some(ml_dtypes.float8_e4m3fn, 6, 64), exponents(6, 2)),
    "e5m2": jaxfp8.quantize(W, jnp.float8_e5m2),
    "e5m2 in MX groups": jaxfp8.QArray(some(ml_dtypes.float8_e5m2, 6, 64), exponents(6, 2)),
    "int8 in groups of 32": jaxfp8.QArray(
        some(np.int8, 6, 64), jnp.ones((6, 2), jnp.float16), some(np.int8, 6, 2)
    ),
    "uint8 with zero points": jaxfp8.QArray(
        jnp.arange(48, dtype=jnp.uint8).reshape(6, 8) + 200,
        jnp.ones((6, 1)),
        jnp.full((6, 1), 128, jnp.uint8),
    ),
    "one zero point": jaxfp8.QArray(some(np.int8, 6, 8), jnp.ones((6, 1)), some(np.int8, 1, 1)),
    "no rows": jaxfp8.quantize(jnp.ones((0, 128)), tiled_axes={0: 128, 1: 128}),
    "experts [E, N, K]": jaxfp8.quantize(R.normal(size=(3, 6, 8)), channelwise_axes=(0, 1)),
    "experts [E, K, N]": jaxfp8.quantize(R.normal(size=(3, 6, 8)), channelwise_axes=(0, 2)),
    "an expert's own": jaxfp8.quantize(R.normal(size=(3, 6, 8)), channelwise_axes=(0,)),
    "a vector": jaxfp8.quantize(R.normal(size=8)),
}


@pytest.mark.parametrize("q", LOADED.values(), ids=LOADED.keys())
def test_what_is_saved_loads_with_equal_bytes_twice(tmp_path, q):
    checkpoint.save(tmp_path / "m", {"a.weight": q, "b.weight": W})
    loaded = checkpoint.load(tmp_path / "m")
    got = loaded["a.weight"]
    np.testing.assert_array_equal(np.asarray(got.qvalue), np.asarray(q.qvalue))
    assert got.scale.dtype == q.scale.dtype and got.tile_sizes == q.tile_sizes
    assert np.asarray(got.scale).tobytes() == np.asarray(q.scale).tobytes()
    if q.zero_point is not None:
        zero = np.broadcast_to(q.zero_point, got.zero_point.shape)
        np.testing.assert_array_equal(got.zero_point, zero)
    checkpoint.save(tmp_path / "again", loaded)
    same(checkpoint.load(tmp_path / "again"), loaded)


PLAIN = {
    "e4m3": some(ml_dtypes.float8_e4m3fn, 6, 8),
    "e5m2 vector": some(ml_dtypes.float8_e5m2, 8),
    "int8": some(np.int8, 6, 8),
    "uint8": jnp.arange(6, dtype=jnp.uint8),
    "e8m0": exponents(4),
}


@pytest.mark.parametrize("beside", [{}, {"a.absmax": W[0]}, {"b.weight": Q}], ids=list)
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("x", PLAIN.values(), ids=PLAIN.keys())
def test_arrays_in_8_bits_without_scales_load_again(tmp_path, x, files, beside):
    tree = {"a.weight": x, "c.bias": x.reshape(-1), **beside}
    checkpoint.save(tmp_path / "m", tree, shard_bytes=1 if files > 1 else 1 << 30)
    same(checkpoint.load(tmp_path / "m"), jax.tree.map(jnp.asarray, tree))
    checkpoint.save(tmp_path / "m.safetensors", tree)
    same(checkpoint.load(tmp_path / "m.safetensors"), jax.tree.map(jnp.asarray, tree))


def test_codes_and_their_scale_as_two_arrays_are_a_weight(tmp_path):
    checkpoint.save(tmp_path / "m", {"a.weight": Q.qvalue, "a.weight_scale": Q.scale})
    same(checkpoint.load(tmp_path / "m"), {"a.weight": Q})


def test_tiles_across_experts_are_refused_with_a_remedy(tmp_path):
    w = R.normal(size=(4, 32, 64))
    q = jaxfp8.quantize(w, tiled_axes={0: 2, 1: 16, 2: 16})
    with pytest.raises(
        ValueError, match=r"across matrices .*with `tiled_axes=\{0: 1, 1: 16, 2: 16\}`"
    ):
        checkpoint.save(tmp_path / "m", {"experts.up": q})
    q = jaxfp8.quantize(w, tiled_axes={0: 1, 1: 16, 2: 16})
    checkpoint.save(tmp_path / "m", {"experts.up": q})
    same(checkpoint.load(tmp_path / "m"), {"experts.up": q})


def test_codes_that_servers_cannot_hold_are_named_in_the_format(tmp_path):
    checkpoint.save(tmp_path / "m", {"a.weight": LOADED["e5m2"]})
    assert config_of(tmp_path / "m")["format"] == "float8_e5m2-quantized"


@pytest.mark.parametrize(
    ("shape", "scales"),
    [((256, 256), (2, 2)), ((64, 256), (1, 2)), ((256, 64), (2, 1)), ((64, 64), (1, 1))],
    ids=str,
)
@pytest.mark.parametrize("way", ["quantize", "save", "save without a recipe"])
def test_layers_smaller_than_a_block_have_the_scales_of_blocks(tmp_path, shape, scales, way):
    tree = {"a.weight": jnp.asarray(R.normal(size=shape)), "b.weight": jnp.asarray(W)}
    if way == "quantize":
        checkpoint.save(tmp_path / "float", tree)
        checkpoint.quantize(tmp_path / "float", tmp_path / "m", jaxfp8.FP8_BLOCK)
    else:
        held = {n: jaxfp8.FP8_BLOCK.quantize_weight(w, contracting=(1,)) for n, w in tree.items()}
        recipe = jaxfp8.FP8_BLOCK if way == "save" else None
        checkpoint.save(tmp_path / "m", held, recipe=recipe)
    (group,) = config_of(tmp_path / "m")["config_groups"].values()
    assert group["weights"]["strategy"] == "block" and group["targets"] == ["Linear"]
    assert group["weights"]["block_structure"] == [128, 128]
    data = (tmp_path / "m" / "model.safetensors").read_bytes()
    found = {name: tensor["shape"] for name, tensor in safetensors.deserialize(data)}
    assert tuple(found["a.weight_scale"]) == scales
    want = jaxfp8.quantize(tree["a.weight"], tiled_axes={0: 128, 1: 128})
    got = checkpoint.load(tmp_path / "m")["a.weight"]
    np.testing.assert_array_equal(jaxfp8.dequantize(got), jaxfp8.dequantize(want))


def test_names_that_are_parts_of_others_mean_themselves_alone(tmp_path):
    tree = {"a.weight": W, "b.a.weight": Q, "b.weight": BLOCKS, "a.c.weight": Q, "c.weight": W}
    checkpoint.save(tmp_path / "m", tree)
    assert config_of(tmp_path / "m")["ignore"] == ["re:^a$", "re:^c$"]
    loaded = checkpoint.load(tmp_path / "m")
    same(
        {n: loaded[n] for n in tree},
        {**tree, "a.weight": jnp.asarray(W), "c.weight": jnp.asarray(W)},
    )


@pytest.mark.parametrize("given", ["mapping", "folder", "file"])
def test_config_of_the_model_is_kept(tmp_path, given):
    content = {"model_type": "llama", "hidden_size": 200}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = {"mapping": content, "folder": tmp_path, "file": tmp_path / "config.json"}[given]
    checkpoint.save(tmp_path / "m", {"up.weight": Q}, config=config)
    saved = json.loads((tmp_path / "m" / "config.json").read_text())
    assert saved.items() > content.items()


def test_large_checkpoints_have_several_files_and_an_index(tmp_path):
    tree = {f"{i}.weight": Q for i in range(3)}
    checkpoint.save(tmp_path / "m", tree, shard_bytes=60_000)
    assert sorted(os.listdir(tmp_path / "m")) == [
        "config.json",
        *(f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    same(checkpoint.load(tmp_path / "m"), tree)


def test_safetensors_package_reads_the_files(tmp_path):
    checkpoint.save(tmp_path / "m.safetensors", {"up.weight": Q, "norm": jnp.ones(3)})
    data = (tmp_path / "m.safetensors").read_bytes()
    found = {name: t for name, t in safetensors.deserialize(data)}
    assert bytes(found["up.weight"]["data"]) == np.asarray(Q.qvalue).tobytes()
    assert bytes(found["up.weight_scale"]["data"]) == np.asarray(Q.scale).tobytes()
    with safetensors.safe_open(tmp_path / "m.safetensors", "numpy") as opened:
        assert opened.metadata()["format"] == "pt"


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"w": jaxfp8.quantize(W, channelwise_axes=(1,))}, "save the transposed weight"),
        ({"w.weight": Q, "w.weight_scale": W}, "is there twice"),
        ({"w": 1.0}, "an array or a QArray is needed"),
    ],
    ids=["transposed", "twice", "a number"],
)
def test_what_the_format_cannot_say_is_refused(tmp_path, tree, text):
    with pytest.raises((ValueError, TypeError), match=text):
        checkpoint.save(tmp_path / "m", tree)
    assert not os.listdir(tmp_path)


def test_taken_path_is_refused_unless_asked_for(tmp_path):
    checkpoint.save(tmp_path / "m", {"up.weight": Q})
    with pytest.raises(CheckpointError, match="the path is taken"):
        checkpoint.save(tmp_path / "m", {"up.weight": BLOCKS})
    same(checkpoint.load(tmp_path / "m"), {"up.weight": Q})
    checkpoint.save(tmp_path / "m", {"up.weight": BLOCKS}, overwrite=True)
    same(checkpoint.load(tmp_path / "m"), {"up.weight": BLOCKS})
    assert os.listdir(tmp_path) == ["m"]


def test_folder_has_the_rights_of_any_other(tmp_path):
    checkpoint.save(tmp_path / "m", {"up.weight": Q})
    (tmp_path / "other").mkdir()
    assert (tmp_path / "m").stat().st_mode == (tmp_path / "other").stat().st_mode


# One import serves all processes: each is forked before JAX has threads.
KILLED = """
import os, signal, sys, jax.numpy as jnp
from jaxfp8 import checkpoint
def save(name, number):
    count, plain = [0], getattr(os, name)
    def dies(*arguments, **options):
        count[0] += 1
        if count[0] == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*arguments, **options)
    setattr(os, name, dies)
    checkpoint.save(f"{sys.argv[1]}/{name}{number}/m", {"new": jnp.ones(64)}, overwrite=True)
for call in sys.argv[2:]:
    child = os.fork()
    if not child:
        save(*call.split())
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
"""


def test_process_that_is_killed_loses_nothing(tmp_path):
    calls = ["pwrite 2", "fsync 1", "rename 1", "rename 2"]
    for call in calls:
        checkpoint.save(tmp_path / call.replace(" ", "") / "m", {"up.weight": Q})
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), *calls], check=True)
    for call in calls[:-1]:
        same(checkpoint.load(tmp_path / call.replace(" ", "") / "m"), {"up.weight": Q})
    # Between the two renames, the old folder lies beside, as a whole.
    (old,) = tmp_path.glob("rename2/.m.*/replaced")
    same(checkpoint.load(old), {"up.weight": Q})


# Orbax


def test_checkpoint_goes_through_orbax_and_back(tmp_path):
    checkpoint.save(tmp_path / "m", {"up.weight": BLOCKS, "norm.weight": jnp.ones(3)})
    loaded = checkpoint.load(tmp_path / "m")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", loaded)
        checkpointer.wait_until_finished()
        with checkpoint.open(tmp_path / "m") as opened:
            shapes = {name: opened.shape(name) for name in opened}
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=loaded["norm.weight"].sharding
            ),
            shapes,
        )
        restored = checkpointer.restore(tmp_path / "orbax", target)
    same(restored, loaded)
    checkpoint.save(tmp_path / "again", restored)
    again = checkpoint.load(tmp_path / "again")
    same(again, loaded)


def test_what_orbax_restores_without_a_target_is_no_qarray(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", {"up.weight": Q})
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "orbax")
    leaves = restored["up.weight"]
    again = jaxfp8.QArray(leaves["qvalue"], leaves["scale"])
    same(again, Q)
