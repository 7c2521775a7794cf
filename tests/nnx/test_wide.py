"""What of a model of nnx stays in floats: it is listed with its reason, and goes on working."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfp8
import jaxfp8.nnx

X = jax.random.normal(jax.random.key(0), (2, 5, 16))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(16, 16, (3,), rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.up = nnx.Linear(16, 16, rngs=rngs)
        self.experts = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (4, 16, 16)))

    def __call__(self, x):
        x = self.up(self.norm(self.conv(x)))
        return jnp.einsum("btk,ekn->btn", x, self.experts[...])


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(20, 16, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])

    def __call__(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


def quantized():
    return jaxfp8.nnx.quantize(Model(), jaxfp8.INT8_DYNAMIC, where="up$")


def test_each_weight_that_stays_wide_has_a_row_with_bytes_and_reason():
    left = {row.path: row for row in quantized().left}
    rest = "it is no layer's weight; `jaxfp8.quantize_dots` can run its products in 8 bits"
    want = {"embed": ("Embed", 20 * 16, "`where` does not choose it")}
    for i in range(3):
        want[f"blocks/{i}/conv/kernel"] = ("Conv", 3 * 16 * 16, "Conv has no 8-bit twin")
        want[f"blocks/{i}/experts"] = ("Block", 4 * 16 * 16, rest)
    found = {path: (row.kind, row.bytes_before // 4, row.reason) for path, row in left.items()}
    assert found == want
    assert all(row.bytes_after == row.bytes_before for row in left.values())


def test_rows_and_the_rest_are_all_parameters():
    changes, params = quantized(), jax.tree.leaves(nnx.state(Model(), nnx.Param))
    rows = sum(row.bytes_before for row in changes.rows)
    assert rows + changes.other_bytes == sum(x.nbytes for x in params)
    assert len(changes.rows) + changes.others == len(params)


def test_rows_that_are_alike_print_as_one(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    changes = quantized()
    lines = [line.split() for line in str(changes).splitlines()]
    (conv,) = (line for line in lines if "conv/kernel" in line[0])
    assert conv[:4] == ["blocks/*/conv/kernel", "3", "x", "Conv"] and conv[-2:] == ["9.0", "KiB"]
    assert sum("blocks/" in line[0] for line in lines) == 3
    assert lines[-1][0] == str(changes.others) == "12"
    assert changes.to_html().count("<tr>") == 1 + 4
    assert len(json.loads(changes.to_json())["rows"]) == len(changes.rows) == 10


# Weights that are read as floats


class Centred(nnx.Module):
    """A wrapper of the user's own."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        kernel = self.layer.kernel
        kernel[...] = kernel[...] - kernel[...].mean()
        return self.layer(x)


class Tied(nnx.Module):
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return self.layer(x) @ self.layer.kernel[...].T


FLAX = {
    "WeightNorm": lambda layer: nnx.WeightNorm(layer, rngs=nnx.Rngs(1)),
    "WeightNorm without scale": lambda layer: nnx.WeightNorm(
        layer, use_scale=False, rngs=nnx.Rngs(1)
    ),
    "SpectralNorm": lambda layer: nnx.SpectralNorm(layer, rngs=nnx.Rngs(1)),
}
OWN = {"wrapper": Centred, "weight used twice": Tied}
CALLING = {
    "LoRA": lambda layer: nnx.LoRA(16, 2, 16, base_module=layer, rngs=nnx.Rngs(1)),
    "Sequential": lambda layer: nnx.Sequential(layer, nnx.relu),
}


class Two(nnx.Module):
    def __init__(self, wrap):
        rngs = nnx.Rngs(0)
        self.plain = nnx.Linear(16, 16, rngs=rngs)
        self.wrapped = wrap(nnx.Linear(16, 16, rngs=rngs))

    def __call__(self, x):
        return self.wrapped(self.plain(x))


def near(got, want):
    return np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)


@pytest.mark.parametrize(
    "recipe", [jaxfp8.FP8_W8A16, jaxfp8.INT8_DYNAMIC], ids=lambda recipe: recipe.name
)
@pytest.mark.parametrize("name", FLAX)
def test_layer_in_a_wrapper_of_flax_that_reads_weights_is_left(name, recipe):
    model, exact = Two(FLAX[name]), Two(FLAX[name])(X)
    (left,) = jaxfp8.nnx.quantize(model, recipe).left
    assert left.path == "wrapped/layer_instance"
    assert left.reason == f"{name.split()[0]} reads its weight as floats"
    assert isinstance(model.plain, jaxfp8.nnx.Linear) and near(model(X), exact)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("wrap", OWN.values(), ids=OWN)
def test_a_sample_shows_whose_weight_is_read(wrap, jit):
    class Jitted(Two):
        def __call__(self, x):
            run = nnx.jit(lambda model, x: Two.__call__(model, x)) if jit else Two.__call__
            return run(self, x)

    model, exact = Jitted(wrap), Jitted(wrap)(X)
    changes = jaxfp8.nnx.quantize(model, jaxfp8.FP8_W8A16, sample=(X,))
    assert [row.path for row in changes.changed] == ["plain"]
    assert [row.reason for row in changes.left] == [
        "something else than the layer reads its weight"
    ]
    assert near(model(X), exact)


@pytest.mark.parametrize("wrap", CALLING.values(), ids=CALLING)
def test_wrapper_that_calls_its_layer_holds_one_in_8_bits(wrap):
    model, exact = Two(wrap), Two(wrap)(X)
    assert len(jaxfp8.nnx.quantize(model, jaxfp8.FP8_W8A16, sample=(X,)).changed) == 2
    assert near(model(X), exact)


@pytest.mark.parametrize("wrap", [FLAX["WeightNorm"], Centred], ids=["WeightNorm", "own"])
def test_report_leaves_the_same_layers(wrap):
    report = jaxfp8.nnx.report(Two(wrap), X, recipe=jaxfp8.INT8_DYNAMIC)
    assert [row.path for row in report.rows] == ["plain"] and report.total.sqnr > 30


@pytest.mark.parametrize("wrap", [FLAX["WeightNorm"], FLAX["SpectralNorm"]])
def test_static_scales_are_found_beside_wrappers(wrap):
    model, exact = Two(wrap), Two(wrap)(X)
    jaxfp8.nnx.quantize(model, jaxfp8.FP8_STATIC, sample=(X,))
    assert near(model(X), exact)


@pytest.mark.parametrize(
    "recipe", [jaxfp8.FP8_W8A16, jaxfp8.INT8_DYNAMIC], ids=lambda recipe: recipe.name
)
def test_floats_written_over_codes_are_an_error_that_names_the_layer(recipe):
    model = Two(FLAX["SpectralNorm"])
    jaxfp8.nnx.quantize(model, recipe)
    model.plain.kernel.set_value(jnp.ones((16, 16)))
    with pytest.raises(TypeError, match=r"Linear at plain`: `kernel` is float32.*`where`"):
        model(X)
