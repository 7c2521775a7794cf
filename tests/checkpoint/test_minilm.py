"""The demo's real weights, quantized on the disk: the numbers of `Recipe.quantize_weight`."""

import numpy as np
import pytest

import jaxfp8
from jaxfp8 import checkpoint
from minilm import files


@pytest.fixture(scope="module")
def source():
    try:
        return files.find_folder() / "model.safetensors"
    except files.DemoError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    "recipe",
    [jaxfp8.FP8_DYNAMIC, jaxfp8.FP8_BLOCK, jaxfp8.INT8_DYNAMIC],
    ids=lambda recipe: recipe.name,
)
def test_weights_of_the_demo_are_those_of_the_recipe(source, tmp_path, recipe):
    report = checkpoint.quantize(source, tmp_path / "new", recipe)
    changed = {row.path for row in report.changed}
    assert len(changed) == 37 and min(row.sqnr for row in report.changed) > 30
    with checkpoint.open(source) as floats, checkpoint.open(tmp_path / "new") as new:
        assert set(new) == set(floats)
        for name in floats:
            w, got = floats[name], new[name]
            if name not in changed:
                assert np.asarray(got).tobytes() == np.asarray(w).tobytes()
                continue
            q = recipe.quantize_weight(w, contracting=(1,))
            assert np.asarray(got.qvalue).tobytes() == np.asarray(q.qvalue).tobytes()
            assert np.asarray(got.scale).tobytes() == np.asarray(q.scale).tobytes()
