"""Whole steps: what is timed is right, and where its time goes is told."""

import functools
import json
import types

import numpy as np
import pytest

from jaxfp8 import __main__
from jaxfp8._bench import _hlo, _profile, _rows, _step, _timed
from jaxfp8._bench._measure import Missing
from jaxfp8._bench._profile import Kernel
from jaxfp8._bench._step import Step

TINY = ["--shapes", "tiny", "--layers", "1", "--rows", "2", "--quick"]
STEPS = {
    "decode": Step(kind="decode", model="tiny", rows=3, layers=1, cache=5, as_written=True),
    "decode [K,N]": Step(kind="decode", model="tiny", rows=1, layers=1, cache=4, layout="kn"),
    "prefill": Step(kind="prefill", model="tiny", rows=7, layers=1, cache=0),
}


def bench(*arguments: str) -> int:
    return __main__.main(["bench", *arguments])


@functools.cache
def case_of(name):
    """Compiled once for all tests."""
    return _step.case(STEPS[name], lambda footprint: {})


@pytest.mark.parametrize("name", STEPS)
def test_every_form_of_a_step_computes_it(name):
    case = case_of(name)
    exact = next(iter(case.contenders.values())).exact()
    for label, form in case.contenders.items():
        assert not isinstance(form, Missing), form
        error = np.linalg.norm(np.asarray(form.enqueue(), np.float64) - exact)
        assert error <= form.error * np.linalg.norm(exact), label
    assert len(case.contenders) == (6 if STEPS[name].as_written else 4)


def test_a_step_repeated_gives_the_same_bits():
    """Its cache is updated in place, so the second call finds what the first left."""
    form = case_of("decode").contenders["jaxfp8 W8A16"]
    np.testing.assert_array_equal(np.asarray(form.enqueue()), np.asarray(form.enqueue()))


def test_bytes_are_those_that_a_step_reads():
    case = case_of("decode")
    sizes = STEPS["decode"].sizes
    weights = sum(k * n for k, n in sizes.weights.values())
    norms, cache = 2 * sizes.width * 2, 3 * 5 * sizes.kv_heads * sizes.head * 2 * 2
    assert case.moved["XLA bf16"] == 2 * weights + norms + cache
    scales = sum(n for _, n in sizes.weights.values()) * 4
    assert case.moved["jaxfp8 W8A16"] == case.bytes == weights + scales + norms + cache


def test_the_command_writes_times_and_kernels(tmp_path, short, capsys):
    record, page = tmp_path / "step.json", tmp_path / "step.html"
    options = [*TINY, "--step", "decode", "--cache", "4"]
    assert bench(*options, "--json", str(record), "--plot", str(page)) == 0
    shown = capsys.readouterr().out
    assert "speed" in shown and "gaps before" in shown
    assert "<svg" in page.read_text() and "jaxfp8 W8A16 by kernel" in page.read_text()
    run = json.loads(record.read_text())
    assert run["settings"]["step"] == "decode" and run["settings"]["cache"] == 4
    (case,) = run["cases"]
    speeds = {one["name"]: one["speed"] for one in case["contenders"]}
    assert speeds["XLA bf16"] == 1 and all(speed > 0 for speed in speeds.values())
    assert [profile["name"] for profile in case["profiles"]] == list(speeds)
    for profile in case["profiles"]:
        assert sum(k["launches"] for k in profile["kernels"]) == len(profile["launches"])
        assert profile["span"] > profile["gaps"] >= 0
        assert all(kernel["bytes"] > 0 for kernel in profile["kernels"])


def test_goals_are_those_of_the_named_model():
    steps = [Step(kind="decode", model="llama3-8b", rows=m, layers=8, cache=1024) for m in (16, 17)]
    texts = [[goal.reach for goal in _step._goals(step)] for step in steps]
    assert texts == [[1.6, 1.5], []]


def test_without_a_trace_the_timings_stay_and_a_line_says_why(monkeypatch):
    monkeypatch.setattr(_profile.jax.profiler, "ProfileData", None)
    measured = _timed.measured(case_of("decode [K,N]"), 1)
    assert measured.seconds("jaxfp8 W8A16")
    lines = _rows.missing(measured)
    assert len(lines) == 4 and "no breakdown by kernel: this release of JAX" in lines[0]


PROGRAM = """
HloModule jit_step, is_scheduled=true
%inside (p.1: f32[3,4]) -> f32[3,4] {
  %p.1 = f32[3,4]{1,0} parameter(0)
  ROOT %neg = f32[3,4]{1,0} negate(%p.1)
}
ENTRY %main (x: bf16[2,8], w: f8e4m3fn[8,16], cache: bf16[64,16]) -> bf16[64,16] {
  %x = bf16[2,8]{1,0} parameter(0), metadata={op_name="x (of f)"}
  %w = f8e4m3fn[8,16]{1,0} parameter(1)
  %cache = bf16[64,16]{1,0} parameter(2)
  %call = (bf16[2,16]{1,0}, u8[4096]{0}) custom-call(%x, %w), custom_call_target="product"
  %y = bf16[2,16]{1,0} get-tuple-element(%call), index=0
  %scale = f32[] constant(2)
  %wide_fusion = f32[2,16]{1,0} fusion(%y, %scale), kind=kLoop, calls=%inside
  ROOT %dynamic-update-slice.1 = bf16[64,16]{1,0} dynamic-update-slice(%cache, %y, %scale)
}
"""


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("wide_fusion", 2 * 16 * 2 + 4 + 2 * 16 * 4),
        ("call", 2 * 8 * 2 + 8 * 16 + 2 * 16 * 2),
        ("dynamic-update-slice.1", 2 * (2 * 16 * 2 + 4)),
        ("neg", 2 * 3 * 4 * 4),
    ],
    ids=["operands and result", "no scratch", "update in place", "inside a computation"],
)
def test_bytes_of_an_instruction_are(name, nbytes):
    assert _hlo.moved(PROGRAM)[name] == nbytes


def test_bytes_count_for_the_longest_kernel_of_an_instruction():
    ran = [
        Kernel(name="product", start=0, seconds=2, op="dot.1"),
        Kernel(name="sum", start=2, seconds=1, op="dot.1"),
        Kernel(name="product", start=3, seconds=2, op="dot.2"),
        Kernel(name="memset", start=5, seconds=1),
        Kernel(name="loop_add_fusion_3", start=6, seconds=1),
    ]
    sizes = {"dot.1": 10, "dot.2": 20, "loop_add_fusion.3": 7}
    known = _profile.with_bytes(_profile.Profile(tuple(ran)), sizes)
    assert {group.name: group.nbytes for group in known.groups()} == {
        "product": 30,
        "sum": 0,
        "memset": None,
        "loop_add_fusion": 7,
    }


def kernels(*starts, seconds=1.0):
    return [Kernel(name=f"dot.{i}", start=s, seconds=seconds) for i, s in enumerate(starts)]


def test_gaps_are_before_the_kernel_that_ends_them():
    (group,) = _profile.of_calls(kernels(10, 11, 14, 14.5), 1).groups()
    assert (group.name, group.launches, group.seconds, group.gaps) == ("dot", 4, 4.0, 2.0)


def test_the_call_of_median_length_is_shown():
    found = _profile.of_calls(kernels(0, 2, 10, 15, 30, 31), 3)
    assert [kernel.start for kernel in found.kernels] == [0, 2]


def test_calls_of_other_numbers_of_kernels_are_told_apart_by_their_gaps():
    found = _profile.of_calls(kernels(0, 2, 20, 22, 24, 50, 51, 52), 3)
    assert [kernel.start for kernel in found.kernels] == [0, 1, 2]


@pytest.mark.parametrize(("count", "expected"), [(0, "CUPTI"), (2, "2 kernels of 3 calls")])
def test_a_trace_without_kernels_is_no_breakdown(count, expected):
    assert expected in _profile.of_calls(kernels(*range(count)), 3).reason


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--shapes", "64x48", "--step", "decode"], "'64x48' is no decoder; --shapes takes"),
        (["--shapes", "tiny", "--layers", "2"], "--layers goes with --step decode or prefill"),
        (["--shapes", "tiny", "--as-written"], "--as-written goes with --step"),
        (["--shapes", "tiny", "--step", "decode", "--cache", "0"], "--cache 0: a number from 1"),
        (["--shapes", "tiny", "--step", "prefill", "--cache", "8"], "goes with --step decode"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_says_what_to_give(capsys, arguments, expected):
    assert bench(*arguments) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("shapes", [["--shapes", "llama3-8b"], []], ids=["named", "default"])
def test_steps_are_listed_without_being_made(capsys, shapes):
    assert bench("--list", "--platform", "cuda", *shapes, "--step", "decode") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"decode llama3-8b, 8 layers, M = {rows}, cache 1024" for rows in (1, 16, 64)
    ]


class Named(types.SimpleNamespace):
    """A plane, a line or an event of a trace."""


def event(name, start, **stats):
    return Named(name=name, start_ns=start, duration_ns=1, stats=list(stats.items()))


TRACE = Named(
    planes=[
        Named(
            name="/host:CPU",
            lines=[Named(name="python", events=[event("f", 0), event("dot.1", 1, hlo_op="dot.1")])],
        ),
        Named(
            name="/device:GPU:0",
            lines=[
                Named(name="Stream #13(Compute)", events=[event("gemm", 2, hlo_op="dot.1")]),
                Named(name="XLA Ops", events=[event("dot.1", 2)]),
            ],
        ),
    ]
)


@pytest.mark.parametrize(("on_cpu", "names"), [(True, ["dot.1"]), (False, ["gemm"])])
def test_kernels_of_a_trace_are_those_of_the_device_that_ran(on_cpu, names):
    """A trace as JAX writes it on a machine with a GPU, in its own fields."""
    assert [kernel.name for kernel in _profile._kernels(TRACE, on_cpu)] == names
