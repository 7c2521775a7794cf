"""Exported programs: pytrees that travel in them, and processes that only import the package."""

import pathlib
import re
import subprocess
import sys

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfp8
import jaxfp8.linen
import jaxfp8.nnx

X = jnp.asarray(np.sin(np.arange(4 * 64.0, dtype=np.float32)).reshape(4, 64))
W = jnp.asarray(np.cos(np.arange(64 * 128.0, dtype=np.float32)).reshape(64, 128))
Q = jaxfp8.quantize(W, channelwise_axes=(1,))
BLOCKS = jaxfp8.quantize(W[:, :100], jnp.int8, tiled_axes={0: 32, 1: 32}, zero_point=True)


def of_dynamic_activations(x, w):
    return jaxfp8.recipe_dot_general(x, w, (((1,), (0,)), ((), ())), recipe=jaxfp8.FP8_DYNAMIC)


def of_a_rewrite(x, w):
    return jaxfp8.rewrite(lambda x, q, s: jax.nn.relu(x @ (q.astype(x.dtype) * s)))(
        x, w.qvalue, w.scale
    )


def of_nnx():
    """A split model, by the leaves of its state, and an input."""
    model = nnx.Sequential(
        nnx.Linear(64, 32, rngs=nnx.Rngs(0)), nnx.BatchNorm(32, rngs=nnx.Rngs(0))
    )
    jaxfp8.nnx.quantize(model, jaxfp8.FP8_W8A16)
    model.eval()
    graph, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)
    return lambda leaves, x: nnx.merge(graph, jax.tree.unflatten(structure, leaves))(x), (leaves, X)


def of_linen():
    """A model with an 8-bit layer and one that trains in FP8, its variables and an input."""
    trains = nn.Dense(8, dot_general_cls=jaxfp8.linen.Fp8DirectDotGeneralOp)
    model = nn.Sequential([jaxfp8.linen.Dense(32, recipe=jaxfp8.FP8_STATIC), trains])
    return model.apply, (model.init(jax.random.key(0), X), X)


# Made when a test asks: each process of a run imports this file.
PROGRAMS = {
    "product": lambda: (jaxfp8.matmul, (X, Q)),
    "prepared": lambda: (jaxfp8.matmul, (X, jaxfp8.prepare(Q))),
    "blocks": lambda: (jaxfp8.matmul, (X, BLOCKS)),
    "activations": lambda: (of_dynamic_activations, (X, Q)),
    "rewritten": lambda: (of_a_rewrite, (X, Q)),
    "nnx": of_nnx,
    "linen": of_linen,
}


def exported(fun, args):
    """The bytes of a program."""
    export = jax.export.export(jax.jit(fun), disabled_checks=jaxfp8.ffi.export_checks())
    return export(*args).serialize()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_with_8_bit_arguments_is_read_back(name):
    fun, args = PROGRAMS[name]()
    program = jax.export.deserialize(exported(fun, args))
    assert program.in_tree == jax.tree.structure((args, {}))
    np.testing.assert_array_equal(program.call(*args), jax.jit(fun)(*args))


@pytest.mark.parametrize(
    "tree",
    [
        Q,
        BLOCKS,
        jaxfp8.prepare(Q),
        jaxfp8.ScalingState.init(jaxfp8.DelayedScaling(amax_history_length=4)),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_a_result_keeps_its_structure(tree):
    leaves = jax.tree.leaves(tree)
    program = jax.export.deserialize(exported(lambda: tree, ()))
    got = program.call()
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    for ours, theirs in zip(leaves, jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_an_exported_derivative_is_read_back():
    export = jax.export.export(jax.jit(jaxfp8.matmul), disabled_checks=jaxfp8.ffi.export_checks())
    program = jax.export.deserialize(export(X, Q).serialize(vjp_order=1))
    got = jax.grad(lambda x: program.call(x, Q).sum())(X)
    np.testing.assert_allclose(got, jax.grad(lambda x: jaxfp8.matmul(x, Q).sum())(X), rtol=1e-6)


def test_without_consent_jax_names_the_call():
    with pytest.raises(ValueError, match="jaxfp8_scaled_dot"):
        jax.export.export(jax.jit(jaxfp8.matmul))(X, Q)


_RUN = """
import sys
{first}
import jaxfp8
import jax, jax.export, numpy as np
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        program = jax.export.deserialize(bytearray(file.read()))
    arrays = [np.load(f"{{path}}.{{i}}.npy") for i in range(len(program.in_avals))]
    typed = [x.view(a.dtype) for x, a in zip(arrays, program.in_avals)]
    args, _ = jax.tree.unflatten(program.in_tree, typed)
    np.save(f"{{path}}.out.npy", program.call(*args))
"""


@pytest.mark.parametrize(
    "first", ["", "import jax; jax.devices()"], ids=["import first", "backend first"]
)
@pytest.mark.slow
def test_a_process_that_only_imports_the_package_runs_a_program(tmp_path, first):
    paths, programs = [], {name: program() for name, program in PROGRAMS.items()}
    for name, (fun, args) in programs.items():
        paths.append(tmp_path / name)
        paths[-1].write_bytes(exported(fun, args))
        for i, leaf in enumerate(jax.tree.leaves(args)):
            np.save(f"{paths[-1]}.{i}.npy", np.asarray(leaf).view(f"u{leaf.dtype.itemsize}"))
    command = [sys.executable, "-c", _RUN.format(first=first), *map(str, paths)]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=120)
    for path, (fun, args) in zip(paths, programs.values(), strict=True):
        np.testing.assert_array_equal(np.load(f"{path}.out.npy"), jax.jit(fun)(*args))


def test_the_model_of_the_page_is_read_by_another_process():
    page = (pathlib.Path(__file__).parent.parent / "docs" / "export.md").read_text()
    section = page[page.index("## Save a model") :]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    first, second = code.split("# In another process, once it has imported jaxfp8:\n")
    names = {}
    exec(first, names)
    imports = "import jax, jax.export, jax.numpy as jnp, jaxfp8, pathlib, sys"
    path = f"path = pathlib.Path({str(names['path'])!r})"
    program = [imports, path, second, "assert 'flax' not in sys.modules"]
    subprocess.run([sys.executable, "-c", "\n".join(program)], check=True, timeout=120)
