"""Whole steps: what is timed is right, and where its time goes is told."""

import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8 import __main__
from jaxfp8._bench import _decoder, _hlo, _profile, _step
from jaxfp8._bench._case import measured
from jaxfp8._bench._measure import Missing
from jaxfp8._bench._profile import Kernel
from jaxfp8._bench._step import Step

TINY = ["--shapes", "tiny", "--layers", "1", "--rows", "2", "--quick"]
STEPS = {
    "decode": Step("decode", "tiny", rows=3, layers=1, cache=5, platform="cpu"),
    "prefill": Step("prefill", "tiny", rows=7, layers=2, cache=0, platform="cpu"),
    "train": Step("train", "tiny", rows=16, layers=2, cache=0, platform="cpu"),
    "remat": Step("remat", "tiny-block", rows=16, layers=2, cache=0, platform="cpu"),
}
# Errors as shares of the norm: weights are exact in all forms, activations are rounded to 8 bits.
ERRORS = {"jaxfp8 W8A16": 0.03, "jaxfp8 FP8 dynamic": 0.1, "XLA bf16": 0.03}


def bench(*arguments: str) -> int:
    return __main__.main(["bench", *arguments])


@functools.cache
def case_of(name):
    """Compiled once for all tests."""
    return _step.case(STEPS[name])


def wide(tree):
    """The numbers behind 8 bits and bfloat16, in float32."""
    is_held = lambda leaf: isinstance(leaf, jaxfp8.QArray)  # noqa: E731
    return jax.tree.map(
        lambda leaf: jaxfp8.dequantize(leaf) if is_held(leaf) else jnp.asarray(leaf, jnp.float32),
        tree,
        is_leaf=is_held,
    )


def error(a, b):
    """The distance of two trees, as a share of the norm of the second."""
    a, b = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(wide(t))]) for t in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("name", ["decode", "prefill"])
@pytest.mark.slow
def test_every_form_of_a_step_computes_it(name, monkeypatch):
    """Against the same decoder in float32, on the same weights, tokens and cache."""
    given = {}
    kept = lambda step, x, weights, state: given.setdefault("all", (x, weights, state))  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(_step, "contender", kept)
        _step.case(STEPS[name])
    (tokens, position), weights, caches = given["all"]
    with jax.default_matmul_precision("highest"):
        dot, sizes = lambda x, w: x @ w.T, _decoder.MODELS["tiny"]
        operands = (wide(tokens), position), wide(weights), wide(caches)
        exact, _ = _decoder.forward(*operands, sizes=sizes, dot=dot)
    contenders = case_of(name).contenders
    assert list(contenders) == list(ERRORS)
    for label, form in contenders.items():
        assert not isinstance(form, Missing), form
        assert error(form.enqueue(), exact) <= ERRORS[label], label


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["train", "remat"])
def test_gradients_of_a_training_step_are_those_of_bfloat16(kind):
    """After two steps: the first ones of delayed scales have no history."""
    forms = case_of(kind).contenders
    gradients = {label: [form.enqueue() for _ in range(3)][-1] for label, form in forms.items()}
    exact = gradients.pop("XLA bf16")
    recipes = ("delayed", "current", "row", "block")
    assert list(gradients) == [f"jaxfp8 {recipe}" for recipe in recipes]
    down = exact[0]["down"] if kind == "train" else exact["down"][0]  # or stacked
    assert down.shape == (64, 128) and down.dtype == jnp.float32
    assert min(case_of(kind).temporary[name] for name in forms) > 0
    for label, own in gradients.items():
        assert error(own, exact) <= 0.15, label


def test_products_with_weights_are_kernel_calls():
    for label in ("jaxfp8 W8A16", "jaxfp8 FP8 dynamic"):
        program = case_of("decode").contenders[label].program
        assert program.count('custom_call_target="jaxfp8_scaled_dot') == 7, label


def test_a_step_repeated_gives_the_same_bits():
    """Its cache is updated in place, so the second call finds what the first left."""
    form = case_of("decode").contenders["jaxfp8 W8A16"]
    np.testing.assert_array_equal(*(np.asarray(form.enqueue(), np.float32) for _ in range(2)))


def test_bytes_are_those_that_a_step_reads():
    case, sizes = case_of("decode"), _decoder.MODELS["tiny"]
    weights = sum(n * k for n, k in sizes.weights.values())
    norms, cache = 2 * sizes.width * 2, 3 * 5 * sizes.kv_heads * sizes.head * 2 * 2
    assert case.moved["XLA bf16"] == 2 * weights + norms + cache
    scales = sum(n for n, _ in sizes.weights.values()) * 4
    assert case.moved["jaxfp8 W8A16"] == case.bytes == weights + scales + norms + cache
    done = measured(case, 1)
    assert done.limit == "read" or case.flops
    rates = [done.rate(name) * done.seconds(name) for name in case.moved]
    assert done.limit != "read" or rates == pytest.approx(list(case.moved.values()))


@pytest.mark.parametrize("kind", ["decode", "train"])
@pytest.mark.slow
def test_the_command_writes_times_and_kernels(tmp_path, short, capsys, kind):
    pytest.importorskip("matplotlib")
    record, page = tmp_path / "step.json", tmp_path / "step.html"
    options = [*TINY, "--step", kind, *(["--cache", "4"] if kind == "decode" else [])]
    assert bench(*options, "--json", str(record), "--plot", str(page)) == 0
    assert "gaps before" in capsys.readouterr().out
    assert "<svg" in page.read_text() and "XLA bf16 by kernel" in page.read_text()
    run = json.loads(record.read_text())
    assert run["settings"]["step"] == kind and run["settings"]["layers"] == 1
    (case,) = run["cases"]
    names = [one["name"] for one in case["contenders"]]
    assert all(one["bytes"] > 0 for one in case["contenders"])
    assert [profile["name"] for profile in case["profiles"]] == names
    for profile in case["profiles"]:
        assert sum(k["launches"] for k in profile["kernels"]) == len(profile["launches"])
        assert profile["span"] > profile["gaps"] >= 0
        assert all(kernel["bytes"] > 0 for kernel in profile["kernels"])


def test_without_a_trace_the_timings_stay_and_a_line_says_why(monkeypatch, short, capsys):
    monkeypatch.setattr(_profile, "launches", lambda trace, on_cpu: [])
    assert bench(*TINY, "--step", "decode", "--cache", "4") == 0
    shown = capsys.readouterr().out
    assert "jaxfp8 W8A16: no breakdown by kernel: the profiler recorded 0 kernels" in shown


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
        Kernel("product", start=0, seconds=2, op="dot.1"),
        Kernel("sum", start=2, seconds=1, op="dot.1"),
        Kernel("product", start=3, seconds=2, op="dot.2"),
        Kernel("memset", start=5, seconds=1),
        Kernel("loop_add_fusion_3", start=6, seconds=1, op="command_buffer.1"),
    ]
    sizes = {"dot.1": 10, "dot.2": 20, "loop_add_fusion.3": 7}
    groups = _profile.groups(_profile.of_calls(ran, 1, sizes))
    expected = {"product": 30, "sum": 0, "memset": None, "loop_add_fusion": 7}
    assert {group.name: group.bytes for group in groups} == expected


def kernels(*starts, seconds=1.0):
    return [Kernel(f"dot.{i}", start=s, seconds=seconds) for i, s in enumerate(starts)]


def test_gaps_are_before_the_kernel_that_ends_them():
    call = _profile.of_calls(kernels(10, 11, 14, 14.5), 1, {})
    (group,) = _profile.groups(call)
    assert (group.name, group.launches, group.seconds, group.gaps) == ("dot", 4, 4.0, 2.0)
    assert _profile.whole(call).seconds == 5.5


def test_the_call_of_median_length_is_shown():
    call = _profile.of_calls(kernels(0, 2, 10, 15, 30, 31), 3, {})
    assert [(kernel.start, kernel.gap) for kernel in call] == [(0, 0), (2, 1)]


def test_calls_of_other_numbers_of_kernels_are_told_apart_by_their_gaps():
    call = _profile.of_calls(kernels(0, 2, 20, 22, 24, 50, 51, 52), 3, {})
    assert [kernel.start for kernel in call] == [0, 1, 2]


@pytest.mark.parametrize("count", [0, 2])
def test_a_trace_without_kernels_is_no_breakdown(count):
    reason = _profile.of_calls(kernels(*range(count)), 3, {}).reason
    assert f"{count} kernels of 3 calls" in reason and "CUPTI" in reason


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--shapes", "64x48", "--step", "decode"], "'64x48' is no decoder; --shapes takes"),
        (["--cache", "2"], "--cache with --step decode"),
        (["--layers", "2"], "--layers goes with --step"),
        (["--step", "decode", "--cache", "0"], "--layers and --cache: a number from 1"),
        (["--step", "train", "--cache", "8"], "--cache with --step decode"),
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
    assert [kernel.name for kernel in _profile.launches(TRACE, on_cpu)] == names
