"""The report accounts for every dot: where it is, what it is, what became of it and why."""

from __future__ import annotations

import inspect
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rewrite.support import BF16, F32, Data

import jaxfp8
from jaxfp8.testing import assert_rewritten


def mixed(x: Any, q: Any, s: Any, w: Any) -> Any:
    y = jax.nn.relu(x @ (q.astype(F32) * s))
    z = x @ jnp.sin(q.astype(F32))
    return y + z, x @ w


def _args() -> tuple[jax.Array, ...]:
    data = Data()
    return data.normal(5, 32), data.bits8(32, 24), data.scale(24), data.normal(32, 7)


def _line(fun: Any, text: str) -> int:
    lines, start = inspect.getsourcelines(fun)
    return start + next(i for i, line in enumerate(lines) if text in line)


def test_rows_totals_and_the_uncounted() -> None:
    report = jaxfp8.explain(mixed)(*_args())
    assert (len(report.sites), len(report.matched), len(report.missed)) == (2, 1, 1)
    assert report.others == 1
    assert report.widened_bytes == 32 * 24 * 4


def test_row_names_the_line_and_function_of_the_user() -> None:
    report = jaxfp8.explain(mixed)(*_args())
    site = report.matched[0]
    assert (site.file, site.function) == (__file__, "mixed")
    assert site.line == _line(mixed, "relu")


def test_row_describes_the_dot() -> None:
    site = jaxfp8.explain(mixed)(*_args()).matched[0]
    assert site.dims == (1, 5, 24, 32)
    assert str(site.lhs) == "float32[5,32]"
    assert str(site.rhs) == "float8_e4m3fn[32,24] (per axis 1)"
    assert site.epilogue == "scale, relu -> float32"


def test_miss_names_the_operation_that_ended_the_fact_and_its_line() -> None:
    site = jaxfp8.explain(mixed)(*_args()).missed[0]
    assert "`sin`" in site.reason
    assert "before dequantising" in site.remedy
    assert site.ended_at == f"{__file__}:{_line(mixed, 'jnp.sin')}"


def test_row_says_where_there_are_kernels() -> None:
    platforms = jaxfp8.explain(mixed)(*_args()).matched[0].platforms
    assert platforms["cpu"] is None
    assert "cuda" in platforms


def test_report_needs_no_arrays() -> None:
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in _args()]
    assert len(jaxfp8.explain(mixed)(*shapes).matched) == 1


def test_report_as_json_holds_rows_and_totals() -> None:
    loaded = json.loads(jaxfp8.explain(mixed)(*_args()).to_json())
    assert loaded["totals"]["matched"] == 1
    assert [row["rewritten"] for row in loaded["sites"]] == [True, False]


def test_report_as_html_escapes_what_it_shows() -> None:
    report = jaxfp8.explain(lambda x, q: x @ q.astype(F32))(*_args()[:2])
    assert "&lt;lambda&gt;" in report._repr_html_()
    assert "<lambda>" not in report.to_html()


@pytest.mark.parametrize("width", [60, 100, 160])
def test_printed_report_fits_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    table = str(jaxfp8.explain(mixed)(*_args())).splitlines()[1:-1]
    assert max(map(len, table)) <= width


def test_printed_report_needs_no_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxfp8._rewrite._report_text.rich_table", None)
    text = str(jaxfp8.explain(mixed)(*_args()))
    assert "1 of 2 dots on 8-bit data" in text
    assert "`sin`" in text


def test_report_follows_facts_into_loops() -> None:
    def f(x: Any, q: Any) -> Any:
        w = jnp.exp(q.astype(F32))
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=2)[0]

    data = Data()
    site = jaxfp8.explain(f)(data.normal(5, 32), data.bits8(32, 32)).missed[0]
    assert "`exp`" in site.reason


def test_path_is_the_named_scope() -> None:
    def f(x: Any, q: Any) -> Any:
        with jax.named_scope("layer_3"):
            return x @ q.astype(F32)

    assert jaxfp8.explain(f)(*_args()[:2]).matched[0].path.endswith("layer_3")


def test_assert_rewritten_returns_the_report() -> None:
    assert len(assert_rewritten(mixed, *_args()).matched) == 1


def test_assert_rewritten_fails_with_the_report_as_its_message() -> None:
    with pytest.raises(AssertionError, match=r"1 dots of `mixed` are rewritten[\s\S]*`sin`"):
        assert_rewritten(mixed, *_args(), at_least=2)


def test_strict_names_the_place_the_reason_and_the_remedy() -> None:
    with pytest.raises(
        ValueError, match=r"1 of 2 8-bit dots of `mixed`.*test_report.py:\d+: `sin`"
    ):
        jaxfp8.rewrite(mixed, strict=True)(*_args())


def test_bf16_scales_on_both_sides_are_told_apart() -> None:
    def f(a: Any, b: Any, s: Any) -> Any:
        return (a.astype(BF16) * s[:, None].astype(BF16)) @ (b.astype(BF16) * 0.5)

    data = Data()
    site = jaxfp8.explain(f)(data.bits8(5, 32), data.bits8(32, 24), data.scale(5)).matched[0]
    assert (site.lhs.scale, site.rhs.scale) == ("per axis 0", "per tensor")


def test_dot_that_nobody_uses_is_neither_a_row_nor_a_miss() -> None:
    def f(x: Any, q: Any) -> Any:
        w = q.astype(F32)
        del_me = x @ w, x @ jnp.sin(w)
        return (x @ w * 2.0, del_me)[0]

    report = jaxfp8.explain(f)(*_args()[:2])
    assert (len(report.matched), len(report.missed)) == (1, 0)
