"""The header of a file: what is refused before any data is read, by hand and by a fuzzer."""

import contextlib
import json
import random

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from checkpoint.files import codes, file_bytes, scales, with_header

import jaxfp8
from jaxfp8 import checkpoint
from jaxfp8.checkpoint import CheckpointError
from jaxfp8.checkpoint._header import LENGTH_BYTES, _parsed, _quick, header_length, parse

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "U8", "shape": [3], "data_offsets": [16, 19]},
}
DATA = bytes(range(19))


def header(data):
    """The header of a file that is these bytes."""
    length = header_length("f", data[:LENGTH_BYTES], len(data))
    return parse("f", data[LENGTH_BYTES : LENGTH_BYTES + length], len(data))


def table(data):
    return {e.name: (e.code, e.shape, e.start, e.stop) for e in header(data).entries}


def spelt(data, blank=" "):
    """A file with metadata in front, and a blank or none behind commas and colons."""
    end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    content = json.loads(data[LENGTH_BYTES:end])
    first = {key: content.pop(key) for key in ("__metadata__",) if key in content}
    text = json.dumps({**first, **content}, separators=(f",{blank}", f":{blank}"))
    return with_header(text.encode(), data[end:])


def compact(data):
    """A file in the spelling of the safetensors package."""
    return spelt(data, "")


def changed(**fields):
    return GOOD | {"b": GOOD["b"] | fields}


LIES = {
    "a byte too many": (GOOD, DATA + b"x", "ends at byte"),
    "cut short": (GOOD, DATA[:-1], "the file was cut short"),
    "overlap": (changed(data_offsets=[15, 18]), DATA, "overlaps"),
    "gap": (changed(data_offsets=[17, 20]), DATA + b"x", "leaves a gap"),
    "shape": (changed(shape=[4]), DATA, "takes 4"),
    "dtype": (changed(dtype="F16"), DATA, "takes 6"),
    "unknown dtype": (changed(dtype="F9"), DATA, "what that means is unknown"),
    "negative": (changed(shape=[-3]), DATA, "a list of sizes is needed"),
    "a bool for a size": (changed(shape=[3, True]), DATA, "a list of sizes is needed"),
    "a float for a size": (changed(shape=[3.0]), DATA, "a list of sizes is needed"),
    "offsets backwards": (changed(data_offsets=[19, 16]), DATA, "begin and end"),
    "past the end": (changed(data_offsets=[1 << 62, (1 << 62) + 3]), DATA, "ends at byte"),
    "another field": (changed(extra=1), DATA, "are needed"),
    "no object": (b"[1, 2]", DATA, "does not begin with"),
    "no JSON": (b"{]", DATA, "cannot be read"),
    "a name twice": (b'{"a": 1, "a": 2}', DATA, "is there twice"),
    "NaN": (b'{"a": NaN}', DATA, "is no JSON"),
    "no UTF-8": (b'{"\xff": 1}', DATA, "cannot be read"),
    "deep": (b'{"a":' + b"[" * 200000, DATA, "cannot be read"),
    "metadata of numbers": (GOOD | {"__metadata__": {"a": 1}}, DATA, "map of texts"),
}


@pytest.mark.parametrize("case", LIES.values(), ids=LIES.keys())
def test_header_that_lies_is_refused(case):
    text, data, message = case
    with pytest.raises(CheckpointError, match=message):
        header(with_header(text, data))
    if isinstance(text, dict):
        for spelling in (compact, spelt):
            with pytest.raises(CheckpointError, match=message):
                header(spelling(with_header(text, data)))


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\xff" * 8, b"\x09" + b"\0" * 7 + b"{}"])
def test_length_that_does_not_fit_is_refused(data):
    with pytest.raises(CheckpointError):
        header(data)


def test_header_is_that_of_the_safetensors_package():
    tensors = {"a": scales((3, 4)), "b": codes((5,)), "c": np.zeros((0, 3), np.int8)}
    data = file_bytes(tensors, {"format": "pt"})
    theirs = {name: (t["dtype"], tuple(t["shape"])) for name, t in safetensors.deserialize(data)}
    assert theirs == {name: row[:2] for name, row in table(data).items()}


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"a": "1", "b": ""}], ids=str)
@pytest.mark.parametrize("blank", ["", " "], ids=["compact", "blanks"])
def test_the_spellings_of_the_package_and_of_python_are_read_without_json(metadata, blank):
    """And what differs from both is not."""
    tensors = {"a": scales(()), "b": codes((5, 3)), "c": np.zeros((0, 3), np.int8)}
    data = spelt(file_bytes(tensors, metadata), blank)
    size, text = len(data), data[LENGTH_BYTES : len(data) - 19]
    assert _quick("f", text, size) == _parsed("f", text, size)
    comma, last = f",{blank}".encode(), f"[0,{blank}3]".encode()
    assert text.count(last) == 1
    long = text.replace(last, b"[0," + b"3" * 5000 + b"]")
    wrong = [text[:-1] + b";", text + b"}", long]
    wrong += [text.replace(b"}" + comma, b"}" + other, 1) for other in (b"; ", b"x" + comma, b" ,")]
    for bad in wrong:
        assert _quick("f", bad, size) is None


# The fuzzer


def mutated(draw, data, most=3):
    """A file with up to `most` changes: bits, bytes, numbers, pieces moved, cut or doubled."""
    data = bytearray(data)
    end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    for _ in range(draw.randint(1, most)):
        at = draw.randrange(min(end, len(data)) or 1)
        kind = draw.randrange(7)
        if not data:
            break
        if kind == 0:
            data[min(at, len(data) - 1)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[min(at, len(data) - 1)] = draw.choice(b'0123456789{}[]",:-.eNFIU \x00\xff')
        elif kind == 2:
            del data[at : at + draw.randint(1, 8)]
        elif kind == 3:
            data[at:at] = data[at : at + draw.randint(1, 30)]
        elif kind == 4:
            del data[draw.randrange(len(data)) :]
        elif kind == 5:
            data += bytes(draw.randint(1, 9))
        else:
            data[: LENGTH_BYTES // 2] = draw.randbytes(LENGTH_BYTES // 2)
    return bytes(data)


def theirs(data):
    """What the safetensors package reads of a file; None where it refuses it."""
    try:
        return {n: (t["dtype"], tuple(t["shape"])) for n, t in safetensors.deserialize(data)}
    except (safetensors.SafetensorError, ValueError):
        return None


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "m.safetensors"
    w = jaxfp8.quantize(jnp.ones((40, 30)), tiled_axes={0: 16, 1: 16})
    checkpoint.save(path, {"up.weight": w, "norm.weight": jnp.ones(30, jnp.bfloat16)})
    return path


def test_mutated_file_of_ours_is_refused_or_the_same(written, mutations, tmp_path):
    draw, data, whole = random.Random(0), written.read_bytes(), table(written.read_bytes())
    refused = 0
    path = tmp_path / "m.safetensors"
    for number in range(mutations):
        bad = mutated(draw, data, most=2)  # three can hide each other from a digest
        try:
            assert table(bad) == whole
        except CheckpointError:
            refused += 1
        if number % 20 == 0:  # through files and devices
            path.write_bytes(bad)
            with contextlib.suppress(CheckpointError):
                checkpoint.load(path)
    assert refused > mutations / 2


@pytest.mark.parametrize("spelling", [bytes, compact, spelt])
def test_mutated_file_of_others_is_what_the_safetensors_package_reads(mutations, spelling):
    tensors = {"a.weight": codes((8, 4)), "a.weight_scale": scales((8, 1)), "b": scales((6, 4))}
    draw, data = random.Random(1), spelling(file_bytes(tensors, {"format": "pt"}))
    for _ in range(mutations):
        bad = mutated(draw, data)
        try:
            ours = table(bad)
        except CheckpointError:
            continue
        assert {name: row[:2] for name, row in ours.items()} == theirs(bad)
        assert all(0 < row[2] <= row[3] <= len(bad) for row in ours.values())


CONFIGS = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear", "re:.*up"],
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "block",
                    "block_structure": [128, 128],
                },
                "input_activations": {"dynamic": True, "strategy": "token"},
            },
            "group_1": {"targets": ["Attention"], "weights": None},
        },
        "ignore": ["lm_head", "re:.*gate"],
    },
    "ModelOpt": {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"up": {"quant_algo": "FP8_PB_WO"}, "down": {"quant_algo": "W8A16"}},
        "exclude_modules": ["lm_head*"],
    },
    "fp8": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]},
    "bitsandbytes": {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head"]},
    "quanto": {"quant_method": "quanto", "weights": "float8", "activations": None},
    "mistral": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_mutated_config_is_refused_or_read(mutations, tmp_path, config):
    text = json.dumps({"quantization_config": config}).encode()
    (tmp_path / "m.safetensors").write_bytes(
        file_bytes({"up.weight": codes((8, 4)), "up.weight_scale": scales((1, 1))})
    )
    draw = random.Random(2)
    for _ in range(mutations // 16):
        (tmp_path / "config.json").write_bytes(mutated(draw, bytes(8) + text)[8:])
        with contextlib.suppress(CheckpointError):
            checkpoint.inspect(tmp_path)


I8 = codes((8, 12), np.int8)
WRITERS = {
    "packed": {
        "up.weight_packed": np.zeros((8, 3), np.int32),
        "up.weight_shape": np.asarray([8, 12], np.int64),
        "up.weight_scale": scales((8, 2)),
        "up.weight_zero_point": np.ones((2, 2), np.int32),
        "up.weight_g_idx": np.repeat(np.arange(2, dtype=np.int32), 6),
    },
    "bitsandbytes": {"up.weight": I8, "up.SCB": scales(8), "up.weight_format": np.uint8(0)},
    "torchao": {"up._weight_qdata": I8, "up._weight_scale": scales((8, 1)), "up.bias": scales(8)},
    "optimum-quanto": {"up.weight._data": I8, "up.weight._scale": scales((8, 1))},
    "DeepSeek": {"w.weight": codes((8, 4)), "w.scale": scales((1, 1)), "n.scale": codes(4)},
}


@pytest.mark.parametrize("tensors", WRITERS.values(), ids=WRITERS.keys())
@pytest.mark.parametrize("unscaled", [False, True], ids=["", "unscaled"])
def test_mutated_file_of_a_writer_is_refused_or_read(mutations, tmp_path, tensors, unscaled):
    draw, data = random.Random(3), file_bytes(tensors)
    path = tmp_path / "m.safetensors"
    for number in range(mutations // 10):
        path.write_bytes(mutated(draw, data, most=2))
        with contextlib.suppress(CheckpointError):
            checkpoint.inspect(path)
            if number % 20 == 0:
                checkpoint.load(path, unscaled=unscaled)
