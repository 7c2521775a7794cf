"""What `Report.predict` says of a product is what docs/measurements.md measured, within 15 %."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import jaxfp8
from jaxfp8 import __main__
from jaxfp8._rewrite.report import predict

TOLERANCE = 0.15
E4M3, BF16 = jnp.float8_e4m3fn, jnp.bfloat16

# Device, kind, M, N, K, and the microseconds that were measured.
MEASURED = [
    ("h200", "W8A16", 1, 14336, 4096, 19.6),
    ("h200", "W8A16", 16, 14336, 4096, 22.7),  # 64 % of the copy
    ("h200", "W8A16", 64, 14336, 4096, 32.7),
    ("h200", "W8A16", 128, 14336, 4096, 58),
    ("h200", "W8A16", 256, 14336, 4096, 111),
    ("h200", "W8A16", 1024, 14336, 4096, 260),
    ("h200", "W8A16", 4096, 14336, 4096, 844),
    ("h200", "W8A16", 1, 28672, 8192, 62.9),
    ("h200", "W8A16", 16, 28672, 8192, 69.6),  # 83 % of the copy
    ("h200", "W8A16", 64, 28672, 8192, 96.9),
    ("h200", "W8A16", 128, 28672, 8192, 198),
    ("h200", "W8A16", 256, 28672, 8192, 410),
    ("h200", "W8A16", 1024, 28672, 8192, 1034),
    ("h200", "W8A16", 4096, 28672, 8192, 3202),
    ("h200", "bf16", 8, 256, 256, 3),
    ("h200", "bf16", 128, 14336, 4096, 34),
    ("h200", "bf16", 256, 14336, 4096, 47),
    ("h200", "bf16", 1024, 14336, 4096, 162),
    ("h200", "bf16", 4096, 14336, 4096, 665),
    ("h200", "bf16", 256, 28672, 8192, 186),
    ("h200", "bf16", 4096, 28672, 8192, 2655),
    ("h200", "bf16", 8192, 8192, 8192, 1592),
    ("h200", "FP8", 8192, 8192, 8192, 811),
    ("h200", "FP8", 4096, 12288, 4096, 313),
    ("h200", "FP8", 4096, 7168, 16384, 717),
    ("h200", "FP8", 4096, 4096, 7168, 192),
    ("h200", "FP8", 4096, 24576, 1536, 233),
    ("h200", "FP8", 4096, 7168, 2048, 92),
    ("h200", "FP8", 4096, 2112, 7168, 97),
    ("h200", "FP8 in blocks", 4096, 7168, 16384, 851),
    ("h200", "FP8 in blocks", 4096, 4096, 7168, 219),
    ("h200", "FP8 in blocks", 4096, 24576, 1536, 328),
    ("h200", "FP8 in blocks", 4096, 7168, 2048, 129),
    ("h200", "FP8 in blocks", 4096, 2112, 7168, 138),
    ("h200", "quantised", 8192, 8192, 8192, 866),
    ("h200", "quantised", 512, 8192, 8192, 59),
    ("h200", "INT8", 4096, 8192, 8192, 515),
    ("h100", "W8A16", 1, 28672, 8192, 87.1),
    ("h100", "W8A16", 16, 28672, 8192, 92.5),
    ("h100", "W8A16", 64, 28672, 8192, 111),
    ("h100", "W8A16", 16, 14336, 4096, 27.3),
    ("h100", "W8A16", 64, 14336, 4096, 34.7),
    ("h100", "W8A16", 16, 14336, 8192, 50.1),
    ("h100", "W8A16", 4096, 14336, 8192, 1590),
    ("h100", "W8A16", 1, 2048, 2048, 6.38),  # [K, N], so by the call
    ("h100", "W8A16", 64, 2048, 2048, 7.49),
    ("h100", "W8A16", 1, 1024, 4096, 6.8),
    ("h100", "W8A16", 64, 1024, 4096, 7.75),
    ("h100", "W8A16", 4096, 384, 1536, 13.65),
    ("h100", "bf16", 1, 28672, 8192, 161),
    ("h100", "bf16", 64, 28672, 8192, 171),
    ("h100", "bf16", 16, 14336, 8192, 83.4),
    ("h100", "bf16", 4096, 14336, 8192, 1310),
    ("h100", "bf16", 8192, 8192, 8192, 1560),
    ("h100", "quantised", 8192, 8192, 8192, 939),
    ("h100", "FP8 in blocks", 4096, 7168, 16384, 752),
    ("h100", "FP8 in blocks", 4096, 4096, 7168, 224),
    ("h100", "FP8 in blocks", 4096, 24576, 1536, 290),
    ("h100", "FP8 in blocks", 4096, 7168, 2048, 108),
    ("h100", "FP8 in blocks", 4096, 2112, 7168, 113),
]


def shaped(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def weight_only(x, q, scale):
    return x @ (q.astype(x.dtype) * scale.astype(x.dtype))


def quantised(x, q, scale):
    own = jnp.max(jnp.abs(x), 1, keepdims=True).astype(jnp.float32) / 448
    codes = jnp.clip(x / own, -448, 448).astype(E4M3)
    return ((codes.astype(jnp.float32) * own) @ (q.astype(jnp.float32) * scale)).astype(BF16)


def product(x, w):
    return jaxfp8.matmul(x, w, preferred_element_type=BF16)


def codes(shape, dtype, scale):
    return jaxfp8.QArray(shaped(shape, dtype), shaped(scale, jnp.float32))


def explained(kind, m, n, k):
    """The report on a product of a kind; W8A16 has bfloat16 beside it."""
    if kind in ("W8A16", "bf16", "quantised"):
        f = quantised if kind == "quantised" else weight_only
        args = shaped((m, k), BF16), shaped((k, n), E4M3), shaped((1, n), jnp.float32)
        return jaxfp8.explain(f)(*args)
    dtype = jnp.int8 if kind == "INT8" else E4M3
    in_blocks = kind == "FP8 in blocks"
    x = codes((m, k), dtype, (m, k // 128) if in_blocks else (m, 1))
    w = codes((k, n), dtype, (k // 128, -(-n // 128)) if in_blocks else (1, n))
    if in_blocks:
        w = dataclasses.replace(w, tiles=(128, 128))
    return jaxfp8.explain(product)(x, w)


@pytest.mark.parametrize(
    ("device", "kind", "m", "n", "k", "measured"),
    MEASURED,
    ids=[f"{device} {kind} {m}x{n}x{k}" for device, kind, m, n, k, _ in MEASURED],
)
def test_time_is_what_was_measured(device, kind, m, n, k, measured):
    (row,) = explained(kind, m, n, k).predict(device).products
    assert row.reason == ""
    seconds = row.bf16_seconds if kind == "bf16" else row.seconds
    assert seconds * 1e6 == pytest.approx(measured, rel=TOLERANCE)


def test_bytes_are_those_of_operands_and_output():
    (row,) = explained("W8A16", 16, 14336, 4096).predict("h100").products
    assert row.nbytes == 14336 * 4096 + 2 * 16 * (4096 + 14336)
    (row,) = explained("quantised", 16, 14336, 4096).predict("h100").products
    assert row.nbytes == 14336 * 4096 + 4 * 16 * 4096 + 2 * 16 * 14336


@pytest.mark.parametrize(
    ("kind", "m", "n", "k", "limit"),
    [
        ("W8A16", 1, 28672, 8192, "memory"),
        ("W8A16", 256, 28672, 8192, "operations"),
        ("W8A16", 8, 256, 256, "launch"),
    ],
    ids=["memory", "operations", "launch"],
)
def test_limit_is_what_takes_most(kind, m, n, k, limit):
    (row,) = explained(kind, m, n, k).predict("h200").products
    assert row.limit == limit


@pytest.mark.parametrize(
    ("m", "n", "k", "loses"),
    [(1, 28672, 8192, False), (8, 256, 256, False), (4096, 28672, 8192, True)],
    ids=["weight in memory", "small", "many rows"],
)
def test_it_says_where_8_bits_lose(m, n, k, loses):
    found = explained("W8A16", m, n, k).predict("h200")
    assert bool(found.losing) == loses
    assert ("8 bits lose in 1 of them" in str(found)) == loses


def test_one_row_of_a_small_weight_is_left_to_xla_in_its_own_layout():
    def by_lines(x, w):
        return jaxfp8.einsum("mk,nk->mn", x, w, preferred_element_type=BF16)

    w = codes((1024, 4096), E4M3, (1024, 1))
    (row,) = jaxfp8.explain(by_lines)(shaped((1, 4096), BF16), w).predict("h100").products
    (turned,) = explained("W8A16", 1, 1024, 4096).predict("h100").products
    assert (row.kind, turned.kind) == ("W8A16 by XLA", "W8A16")
    assert row.seconds * 1e6 == pytest.approx(3.89, rel=TOLERANCE)


def test_a_weight_without_the_batch_of_the_other_side_is_read_once():
    x, w = codes((16, 1, 4096), E4M3, (16, 1, 1)), codes((4096, 14336), E4M3, (1, 14336))
    (row,) = jaxfp8.explain(product)(x, w).predict("h100").products
    (flat,) = explained("FP8", 16, 14336, 4096).predict("h100").products
    assert (row.sizes, row.seconds) == (flat.sizes, flat.seconds)


@pytest.mark.parametrize("m", [1, 16])
def test_few_rows_of_fp8_take_what_those_of_bfloat16_do_but_for_their_bytes(m):
    n, k = 14336, 4096
    (row,) = explained("FP8", m, n, k).predict("h100").products
    (wide,) = explained("W8A16", m, n, k).predict("h100").products
    assert row.kind == "FP8 of few rows"
    assert row.seconds == pytest.approx(wide.seconds - m * k / 3.025e12)


def test_few_columns_of_fp8_count_as_rows():
    x, w = codes((14336, 4096), E4M3, (14336, 1)), codes((4096, 16), E4M3, (1, 16))
    (row,) = jaxfp8.explain(product)(x, w).predict("h100").products
    (turned,) = explained("FP8", 16, 14336, 4096).predict("h100").products
    assert (row.kind, row.seconds) == ("FP8 of few rows", turned.seconds)


@pytest.mark.parametrize(
    ("x", "w", "kind"),
    [
        (codes((17, 256), E4M3, (17, 1)), codes((256, 64), E4M3, (1, 64)), "FP8"),
        (codes((1, 256), jnp.float8_e5m2, (1, 1)), codes((256, 64), E4M3, (1, 64)), "FP8"),
        (codes((1, 256), E4M3, (1, 256)), codes((256, 64), E4M3, (1, 64)), "FP8"),
        (codes((2, 256), E4M3, (2, 256)), codes((256, 64), E4M3, (1, 64)), "FP8"),
        (codes((1, 256), E4M3, (1, 2)), codes((256, 64), E4M3, (2, 64)), "FP8 in blocks"),
    ],
    ids=["17 rows", "e5m2", "scales along K", "of each entry", "blocks"],
)
def test_other_fp8_is_not_of_few_rows(x, w, kind):
    (row,) = jaxfp8.explain(product)(x, w).predict("h100").products
    assert row.kind == kind


def test_a_weight_on_the_left_counts_the_rows_of_the_other_side():
    def left(q, x):
        return (q.astype(x.dtype) * jnp.bfloat16(0.5)) @ x

    report = jaxfp8.explain(left)(shaped((14336, 4096), E4M3), shaped((4096, 16), BF16))
    (row,) = report.predict("h100").products
    (right,) = explained("W8A16", 16, 14336, 4096).predict("h100").products
    assert row.seconds == right.seconds and row.sizes == "16 x 14336 x 4096"


@pytest.mark.parametrize(
    ("x", "w", "reason"),
    [
        (shaped((4, 32), jnp.float32), shaped((32, 8), E4M3), "float32 times 8 bits was not"),
        (shaped((3, 4, 32), BF16), shaped((3, 32, 8), E4M3), "in batches were not measured"),
        (codes((4, 32), E4M3, ()), shaped((32, 8), jnp.int8), "FP8 times int8 was not measured"),
    ],
    ids=["float32", "batches", "mixed"],
)
def test_what_was_not_measured_is_not_predicted(x, w, reason):
    weight = jaxfp8.QArray(w, shaped((), jnp.float32))
    found = jaxfp8.explain(lambda x, w: jaxfp8.matmul(x, w))(x, weight).predict("h100")
    (row,) = found.products
    assert reason in row.reason and row.seconds is None and row.speed is None
    assert "0 of 1 products" in str(found) and f"1 not predicted: {row.reason}" in str(found)


def test_a_missed_product_is_not_predicted():
    def lost(x, q):
        return x @ jnp.tanh(q.astype(x.dtype))

    report = jaxfp8.explain(lost)(shaped((1, 64), BF16), shaped((64, 32), E4M3))
    assert "missed, so XLA widens the data" in report.predict("h100").products[0].reason


def test_alike_products_are_one_row_and_all_count():
    def layers(x, q, scale):
        for _ in range(3):
            x = weight_only(x, q, scale)
        return x

    args = shaped((1, 4096), BF16), shaped((4096, 4096), E4M3), shaped((1, 4096), jnp.float32)
    found = jaxfp8.explain(layers)(*args).predict("NVIDIA H100 80GB HBM3")
    assert len(found.products) == 3 and "3 x " in str(found)
    assert found.seconds == pytest.approx(3 * found.products[0].seconds)
    assert json.loads(found.to_json())["seconds"] == found.seconds


def test_another_device_is_refused_by_those_that_are_known():
    report = explained("W8A16", 1, 64, 64)
    with pytest.raises(ValueError, match=r"`device` is 'a100'.*h100, h200.*bench --step"):
        report.predict("a100")


def test_each_number_says_where_it_comes_from():
    for device in predict._devices().values():
        assert device["source"] and device["quantize"]["of"]
        assert all(kind["of"] for kind in device["kinds"].values())
        assert all(kind["rates"][0][0] == 1 for kind in device["kinds"].values())


def test_the_command_prints_it(tmp_path, monkeypatch, capsys):
    text = (
        "import jax, jax.numpy as jnp\n"
        "def forward(x, q): return x @ (q.astype(x.dtype) * 0.5)\n"
        "def arguments():\n"
        "    s = jax.ShapeDtypeStruct\n"
        "    return s((1, 64), jnp.bfloat16), s((64, 32), jnp.float8_e4m3fn)\n"
    )
    (tmp_path / "predicted_model.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    command = ["explain", "predicted_model:forward", "--args", "predicted_model:arguments"]
    assert __main__.main([*command, "--device", "h100"]) == 0
    assert "on NVIDIA H100 80GB HBM3: 1 of 1 products predicted" in capsys.readouterr().out
    assert __main__.main([*command, "--device", "tpu"]) == 2
    assert "numbers are known of h100, h200" in capsys.readouterr().err
