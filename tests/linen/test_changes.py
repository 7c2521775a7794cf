"""What `jaxfp8.linen.quantize` makes of each parameter, and what stays wide."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxfp8
import jaxfp8.linen

INT8 = functools.partial(jaxfp8.linen.Dense, recipe=jaxfp8.INT8_DYNAMIC)


class Block(nn.Module):
    kind: object = nn.Dense

    @nn.compact
    def __call__(self, x, _=None):
        x = nn.Conv(16, (3,), name="conv")(nn.LayerNorm(name="norm")(x))
        x = nn.Dense(16, name="flax")(self.kind(16, name="up")(x))
        experts = self.param("experts", nn.initializers.lecun_normal(), (4, 16, 16))
        return jnp.einsum("btk,ekn->btn", x, experts), None


class Model(nn.Module):
    kind: object = nn.Dense
    scan: bool = False

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(20, 16, name="embed")(ids)
        if self.scan:
            axes, rngs = {"params": 0}, {"params": True}
            blocks = nn.scan(Block, variable_axes=axes, split_rngs=rngs, length=3)
            return blocks(self.kind, name="block")(x)[0]
        for i in range(3):
            x, _ = Block(self.kind, name=f"block_{i}")(x)
        return x


IDS = jnp.zeros((1, 5), int)
each_form = pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])


@functools.cache
def variables(scan):
    return Model(scan=scan).init(jax.random.key(0), IDS)


@each_form
def test_each_weight_has_a_row_with_its_reason(scan):
    _, found = jaxfp8.linen.quantize(Model(INT8, scan), variables(scan), IDS)
    names = ["block"] if scan else [f"block_{i}" for i in range(3)]
    rest = "it is no layer's weight; `jaxfp8.quantize_dots` can run its products in 8 bits"
    want = {"embed": ("Embed", "its layer is Flax's, not the Embed of `jaxfp8.linen`")}
    for name in names:
        want[f"{name}/flax"] = ("Dense", "its layer is Flax's, not the Dense of `jaxfp8.linen`")
        want[f"{name}/conv/kernel"] = ("Conv", "Conv has no 8-bit twin")
        want[f"{name}/experts"] = ("Block", rest)
    assert {row.path: (row.kind, row.reason) for row in found.left} == want
    assert [row.path for row in found.changed] == [f"{name}/up" for name in names]
    assert {(row.before, row.after, row.recipe) for row in found.changed} == {
        ("float32", "int8", "INT8_DYNAMIC")
    }


@each_form
def test_bytes_are_those_that_quantize_gives(scan):
    model, before = Model(INT8, scan), variables(scan)
    after, found = jaxfp8.linen.quantize(model, before, IDS)
    want = [sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (before, after)]
    for field, total in zip(("bytes_before", "bytes_after"), want, strict=True):
        assert sum(getattr(row, field) for row in found.rows) + found.other_bytes == total


def test_variables_in_8_bits_are_listed_as_such():
    model = Model(INT8)
    held, _ = jaxfp8.linen.quantize(model, variables(False), IDS)
    _, found = jaxfp8.linen.quantize(model, held, IDS)
    already = [row for row in found.rows if row.reason == "it is in 8 bits already"]
    assert not found.changed and [row.path for row in already] == [
        f"block_{i}/up" for i in range(3)
    ]


def test_rows_that_are_alike_print_as_one():
    text = str(jaxfp8.linen.quantize(Model(INT8), variables(False), IDS)[1])
    assert text.startswith("3 of 13 weights changed") and text.count("block_*/experts") == 1
