"""`inspect`: sizes and reasons of all tensors, the values of scales, casts without scales."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint.files import E4M3, codes, file_bytes, folder, scales
from checkpoint.gguf_files import W, written

import jaxfp8
from jaxfp8 import __main__, checkpoint
from jaxfp8.checkpoint import CheckpointError

UP = {"up.weight": codes((6, 8)), "up.weight_scale": scales((6, 1))}


def test_tensors_that_would_not_load_have_their_sizes(tmp_path, capsys):
    """Thousands of them are one row."""
    bad = {f"layers.{n}.w.weight": codes((6, 8)) for n in range(3)}
    src = folder(tmp_path / "m", {**UP, **bad, "norm.weight": scales(8)})
    found = checkpoint.inspect(src)
    assert [row.path for row in found.unread] == list(bad)
    assert {(row.stored, row.nbytes, row.loads) for row in found.unread} == {
        ("F8_E4M3[6,8]", 48, "")
    }
    assert found.nbytes == 4 * 48 + 6 * 4 + 8 * 4
    assert [row.path for row in found.in_floats] == ["norm.weight"]
    assert __main__.main(["inspect", str(src)]) == 1
    out = capsys.readouterr().out
    assert "1 other arrays, 32 B; 3 tensors that would not load, 144 B" in out
    assert "layers.*.w.weight" in out and "3 x F8_E4M3[6,8]" in out


def test_a_tensor_that_loads_beside_one_that_does_not_is_there_once(tmp_path):
    both = folder(tmp_path / "m", UP | {"up.weight_g_idx": scales(8)})
    found = checkpoint.inspect(both)
    assert found.problems and len({row.path for row in found.rows}) == len(found.rows) == 3


@pytest.mark.parametrize("module", ["q", "k", "v", "kv"])
def test_scales_of_the_cache_keep_the_names_of_mistral(tmp_path, module):
    name = f"attention.{module}_fake_quantizer.qscale_act"
    tensors = {"attention.wq.weight": codes((6, 8)), name: scales(())}
    tensors |= {f"attention.wq.{end}": scales(()) for end in ("qscale_weight", "qscale_act")}
    rows = {row.path: row for row in checkpoint.inspect(folder(tmp_path / "m", tensors)).rows}
    assert rows.keys() == {"attention.wq.weight", "attention.wq.input_scale", name}
    assert rows[name].note == "a scale of attention or its cache"
    assert rows["attention.wq.input_scale"].note == "a static scale of activations"


def test_a_vector_in_q8_0_has_a_sentence_of_its_own(tmp_path):
    path = written(
        tmp_path / "m.gguf", {"output_norm.weight": (8, (64,), bytes(68)), "output.weight": W}
    )
    with pytest.raises(CheckpointError, match=r"Q8_0\[64\], but vectors are read as floats"):
        checkpoint.load(path)
    assert [row.nbytes for row in checkpoint.inspect(path).unread] == [68]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_of_scales_are_read_on_request(tmp_path, bad, capsys):
    scale = scales((6, 1))
    scale[3] = bad
    src = folder(tmp_path / "m", UP | {"up.weight_scale": scale})
    assert not checkpoint.inspect(src).problems
    (problem,) = checkpoint.inspect(src, values=True).problems
    assert "1 entries that are not finite" in problem
    assert __main__.main(["inspect", str(src), "--values"]) == 1
    assert problem in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="not finite"):
        checkpoint.load(src)


CAST = {
    "up.weight": codes((6, 8)),
    "up.bias": codes(6, ml_dtypes.float8_e5m2),
    "norm.weight": np.ones(8, E4M3),
}


def test_a_cast_without_scales_is_taken_as_it_is_by_the_command_line(tmp_path, capsys):
    src, dst = tmp_path / "cast.safetensors", tmp_path / "dst"
    src.write_bytes(file_bytes(CAST))
    assert __main__.main(["inspect", str(src)]) == 1
    assert "load it with `unscaled=True`" in capsys.readouterr().out
    assert __main__.main(["inspect", str(src), "--unscaled"]) == 0
    assert "none in the file: 1" in capsys.readouterr().out
    assert __main__.main(["convert", str(src), str(dst)]) == 1
    assert "load it with --unscaled" in capsys.readouterr().err
    assert __main__.main(["quantize", str(src), str(dst), "--recipe", "FP8_BLOCK"]) == 1
    assert "--unscaled" not in capsys.readouterr().err
    assert __main__.main(["convert", str(src), str(dst), "--unscaled"]) == 0
    got, want = checkpoint.load(dst), checkpoint.load(src, unscaled=True)
    assert isinstance(got["up.weight"], jaxfp8.QArray)
    for name in CAST:
        exact = np.asarray(
            jaxfp8.dequantize(want[name]) if "up.w" in name else want[name], np.float32
        )
        value = jaxfp8.dequantize(got[name]) if "up.w" in name else got[name]
        np.testing.assert_array_equal(np.asarray(value, np.float32), exact)
    assert got["norm.weight"].dtype == got["up.bias"].dtype == jnp.bfloat16


def test_an_open_checkpoint_is_not_read_again(tmp_path, monkeypatch):
    """A header of 100,000 tensors takes a second."""
    src = folder(tmp_path / "m", UP)
    with checkpoint.open(src) as opened:
        monkeypatch.setattr("jaxfp8.checkpoint._file.parse", None)
        assert checkpoint.inspect(opened).rows[0].scale == "channel, float32"
        assert not checkpoint.inspect(opened, values=True).problems
        with pytest.raises(ValueError, match="`unscaled` is passed with an open checkpoint"):
            checkpoint.inspect(opened, unscaled=True)
