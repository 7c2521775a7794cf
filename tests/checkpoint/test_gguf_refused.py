"""GGUF: files that lie are refused, and damaged ones are never read past their bounds."""

import contextlib
import random
import struct

import numpy as np
import pytest
from checkpoint.gguf_files import LLAMA, W, blocks, file_bytes, text, typed
from checkpoint.test_header import mutated

from jaxfp8 import checkpoint
from jaxfp8.checkpoint import CheckpointError, _gguf_header

GOOD = file_bytes(LLAMA, {"output.weight": W[:2], "output_norm.weight": W[0]})
HEAD = b"GGUF" + struct.pack("<I", 3)


def counts(tensors, values):
    return HEAD + struct.pack("<QQ", tensors, values)


def record(name=b"a", sizes=(4,), kind=0, offset=0):
    head = text(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return head + struct.pack("<IQ", kind, offset)


def one(*records, data=16):
    head = counts(len(records), 0) + b"".join(records)
    return head + bytes(-len(head) % 32) + bytes(data)


LIES = {
    "cut short": (GOOD[:-32], "cut short"),
    "bytes behind": (GOOD + bytes(64), "nothing follows, ends at"),
    "no tensor, and bytes": (counts(0, 0) + bytes(4096), "nothing follows, ends at byte"),
    "no counts": (HEAD, "the file ends at byte 8"),
    "version 1": (b"GGUF" + struct.pack("<I", 1) + bytes(64), "version is 1, but 2 or 3"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(64), "big-endian"),
    "too many tensors": (counts(1 << 60, 0) + bytes(64), "announces 1152921504606846976 tensors"),
    "too many values": (counts(0, 1 << 60) + bytes(64), "metadata values"),
    "long key": (counts(0, 1) + struct.pack("<Q", 1 << 40) + bytes(64), "at most 65535 fit"),
    "long text": (
        counts(0, 1) + text("a") + struct.pack("<IQ", 8, 1 << 62),
        "the file ends at byte",
    ),
    "long array": (
        counts(0, 1) + text("a") + struct.pack("<IIQ", 9, 4, 1 << 62),
        "the file ends at byte",
    ),
    "array of many texts": (
        counts(0, 1) + text("a") + struct.pack("<IIQ", 9, 8, 1 << 40),
        "strings",
    ),
    "array of arrays": (counts(0, 1) + text("a") + struct.pack("<IIQ", 9, 9, 1), "of type 9"),
    "type of a value": (counts(0, 1) + text("a") + struct.pack("<II", 13, 0), "type 13"),
    "key twice": (counts(0, 2) + 2 * (text("a") + typed(1)), "'a' twice"),
    "no UTF-8": (counts(0, 1) + text(b"\xff") + typed(1), "no UTF-8"),
    "alignment 0": (file_bytes({"general.alignment": 0}, {"a": W}), "alignment is 0"),
    "alignment 48": (file_bytes({"general.alignment": 48}, {"a": W}, 48), "alignment is 48"),
    "alignment a text": (file_bytes({"general.alignment": "8"}, {"a": W}), "alignment is 8"),
    "long name": (one(record(b"a" * 64)), "at most 63 fit"),
    "five axes": (one(record(sizes=(1,) * 5)), "has 5 axes"),
    "a name twice": (one(record(), record(offset=32), data=48), "is there twice"),
    "overlap": (one(record(), record(b"b"), data=48), "tensors follow at multiples of 32"),
    "gap": (one(record(offset=32), data=48), "begins at byte"),
    "no multiple": (one(record(offset=8), data=48), "begins at byte"),
    "past the end": (one(record(sizes=(1 << 61, 4))), "cut short"),
    "half a block": (one(record(sizes=(31,), kind=8), data=34), "blocks of 32"),
    "unknown type": (one(record(kind=77)), "ggml's type 77"),
    "experts": (
        file_bytes(LLAMA, {"blk.0.ffn_up_exps.weight": (0, (1 << 40, 0, 4), b"")}),
        "1 to 4096",
    ),
    "no experts": (
        file_bytes(LLAMA, {"blk.0.ffn_up_exps.weight": (0, (0, 4), b"")}),
        "has 0 experts, but 1 to 4096 are read",
    ),
    "experts twice": (
        file_bytes(
            LLAMA | {"llama.expert_count": 1},
            {"blk.0.ffn_up_exps.weight": W[None], "blk.0.ffn_up.0.weight": W},
        ),
        "is there twice, but a name stands for one",
    ),
    "heads": (
        file_bytes(LLAMA, {"blk.0.attn_q.weight": W[:63]}),
        "63 rows, but the metadata says 4 heads of an even size",
    ),
    "no heads of keys": (
        file_bytes(
            {k: v for k, v in LLAMA.items() if "kv" not in k} | {"llama.embedding_length": 64},
            {"blk.0.attn_k.weight": W[:32]},
        ),
        "has 32 rows, but the metadata says 4 heads of 16 rows",
    ),
    "an adapter": (
        file_bytes({**LLAMA, "general.type": "adapter"}, {"blk.0.attn_q.weight.lora_b": W}),
        "general.type is 'adapter'",
    ),
    "statistics": (
        file_bytes({"general.type": "imatrix"}, {"blk.0.attn_q.weight.in_sum2": W[0]}),
        "general.type is 'imatrix', but it has statistics for llama.cpp's quantizer, and no weight",
    ),
    "a scale beside": (
        file_bytes(
            LLAMA, {"blk.0.ffn_up.weight": blocks(W), "blk.0.ffn_up.scale": np.ones(1, np.float32)}
        ),
        "scales the output of 'blk.0.ffn_up.weight'",
    ),
    "no heads": (
        file_bytes({"general.architecture": "llama"}, {"blk.0.attn_q.weight": W}),
        "to put its rows in order",
    ),
    "an infinite scale": (
        file_bytes(LLAMA, {"output.weight": np.full((2, 1, 34), 0x7C, np.uint8)}),
        "not finite",
    ),
    "missing parts": (file_bytes({"split.count": 3}, {"a": W}), "said to be in 3 files"),
}


@pytest.mark.parametrize("case", LIES.values(), ids=LIES.keys())
def test_a_file_that_lies_is_refused(tmp_path, case):
    data, message = case
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(tmp_path / "m.gguf")


# The fuzzer


def fuzzed():
    """A file with values of all types, and tensors of several."""
    metadata = {**LLAMA, "a": "b", "c": True, "d": 0.5, "e": ["x", "yz"], "f": [1, 2, 3]}
    tensors = {
        "blk.0.attn_q.weight": blocks(W[:8]),
        "blk.0.ffn_up_exps.weight": blocks(W.reshape(4, 16, 96)[:, :2]),
        "output_norm.weight": W[0].astype(np.float16),
        "blk.0.ffn_up.weight": (12, (1, 256), bytes(144)),
    }
    return file_bytes(metadata, tensors)


def test_mutated_file_is_refused_or_read_within_its_bounds(mutations, tmp_path):
    draw, data = random.Random(0), fuzzed()
    good = _gguf_header.parse("f", lambda start, n: data[start : start + n], len(data))
    head = good[1][0].start
    path, refused = tmp_path / "m.gguf", 0
    for number in range(mutations):
        bad = mutated(draw, struct.pack("<Q", head) + data)[8:]
        try:
            _, tensors = _gguf_header.parse("f", lambda start, n: bad[start : start + n], len(bad))  # noqa: B023
            ends = [0, *(t.stop for t in tensors), len(bad)]
            assert all(t.start >= ends[i] for i, t in enumerate(tensors)) and ends[-2] <= len(bad)
        except CheckpointError:
            refused += 1
        if number % 20 == 0:  # through files and devices
            path.write_bytes(bad)
            with contextlib.suppress(CheckpointError):
                checkpoint.inspect(path)
            with contextlib.suppress(CheckpointError):
                checkpoint.load(path)
    assert refused > mutations / 4
