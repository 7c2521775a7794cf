"""Reads what `write.py` wrote, and compares it with the writers' own decompression.

pytest tests/writers/compare.py --writers FOLDER
"""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8 import checkpoint

# What a case is, in inspect's words.
NAMED = {
    "compressed": "llm-compressor",
    "torchao": "torchao",
    "quanto": "optimum-quanto",
    "bitsandbytes": "bitsandbytes",
    "modelopt": "ModelOpt",
}
# The largest relative error, by the norm. ModelOpt rounds once more as it exports, with the scales
# that fused layers share. Others round the product of code and scale to the dtype of their model.
TOLERANCE = {"modelopt": 0.04, "torchao": 4e-3, "bitsandbytes": 1e-3}
REFUSED = {"modelopt_smoothed": "SmoothQuant"}


def pytest_generate_tests(metafunc):
    root = pathlib.Path(metafunc.config.getoption("--writers"))
    places = sorted(path.parent for path in root.glob("*/expected.safetensors"))
    assert places, f"{root} holds no files of the writers: run `make writers`"
    metafunc.parametrize("place", places, ids=lambda place: place.name)


def test_a_file_is_read_as_its_writer_reads_it(place):
    if place.name in REFUSED:
        with pytest.raises(checkpoint.CheckpointError, match=REFUSED[place.name]):
            checkpoint.load(place / "model")
        return
    summary, writer = checkpoint.inspect(place / "model"), place.name.split("_")[0]
    assert not summary.problems and NAMED[writer] in summary.format
    read, expected = (checkpoint.load(place / name) for name in ("model", "expected.safetensors"))
    for name, wide in expected.items():
        q = read[name]
        assert isinstance(q, jaxfp8.QArray), f"{name} is {q!r}"
        got, wide = (np.asarray(w, np.float64) for w in (jaxfp8.dequantize(q, jnp.float32), wide))
        error = np.linalg.norm(got - wide) / np.linalg.norm(wide)
        assert error < TOLERANCE.get(writer, 1e-6), f"{name}: {error}"
