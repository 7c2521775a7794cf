"""`bench --devices`: bytes of collectives from a program's text, tables, and one run."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxfp8
from jaxfp8 import __main__
from jaxfp8._bench import _decoder, _hlo, _profile, _scale, _scale_rows
from jaxfp8._bench._case import Case, Measured
from jaxfp8._bench._measure import Contender, Missing, Timing
from jaxfp8._bench._profile import Kernel


def bench(*arguments: str) -> int:
    return __main__.main(["bench", *arguments])


PROGRAM = """
HloModule jit_step, is_scheduled=true
%body (p: (s32[], u8[4,8])) -> (s32[], u8[4,8]) {
  %codes = u8[4,8]{1,0} get-tuple-element(%p), index=1
  %all-gather.1 = u8[16,8]{1,0} all-gather(%codes), replica_groups=[1,4]<=[4], dimensions={0}
}
%wrapped (p.1: bf16[8,8]) -> bf16[2,8] {
  %p.1 = bf16[8,8]{1,0} parameter(0)
  ROOT %reduce-scatter.1 = bf16[2,8]{1,0} reduce-scatter(%p.1), dimensions={0}, to_apply=%add
}
ENTRY %main (x: bf16[8,8], y: f32[8]) -> bf16[2,8] {
  %x = bf16[8,8]{1,0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %while.1 = (s32[], u8[4,8]{1,0}) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %start = ((bf16[8,8]{1,0}), bf16[2,8]{1,0}) async-start(%x), calls=%wrapped
  %sum = f32[8]{0} all-reduce(%y), to_apply=%add
  %gather = (bf16[8,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%x), dimensions={0}
  %scattered = (bf16[8,8]{1,0}, bf16[2,8]{1,0}) reduce-scatter-start(%x), dimensions={0}, to_apply=%add
  %moved = f32[8]{0} collective-permute(%y), source_target_pairs={{0,1},{1,0}}
}
"""  # noqa: E501


def test_bytes_that_a_program_sends_are_those_of_each_turn_of_a_loop():
    found = sorted(_hlo.sent(PROGRAM))
    assert found == [
        ("all-gather", 96),
        ("all-gather", 96),
        ("all-gather", 96),
        ("all-gather", 128),
        ("all-reduce", 64),
        ("collective-permute", 32),
        ("reduce-scatter", 96),
        ("reduce-scatter", 96),
    ]
    assert ("all-reduce", 32) in _hlo.sent(PROGRAM, float_bytes=2)


@pytest.fixture
def measured():
    """Two forms on one and on four devices, without a run."""
    seconds = {"jaxfp8 W8A16 x1": 8.0, "XLA bf16 x1": 12.0, "jaxfp8 W8A16 x4": 2.5}
    timings = {name: Timing(median=value, spread=0.0) for name, value in seconds.items()}
    sent = {"jaxfp8 W8A16 x4": {"all-gather": 2048}, "XLA bf16 x4": {"all-gather": 4096}}
    kernels = (
        Kernel("ncclDevKernel_AllGather", 0, 0.5),
        Kernel("psum_32_0_fusion", 0.5, 0.5),
        Kernel("gemm", 1, 3.0, op="dot.1"),
    )
    return Measured(
        case=Case(name="scale decode", contenders={}, sent=sent),
        timings={**timings, "XLA bf16 x4": Missing("no memory")},
        peaks={},
        profiles={"jaxfp8 W8A16 x4": kernels},
    )


def test_a_row_has_efficiency_bytes_and_the_share_of_collectives(measured):
    shown = _scale_rows._table(measured, ["jaxfp8 W8A16 x1", "jaxfp8 W8A16 x4", "XLA bf16 x4"])
    one, four = (dict(zip(_scale_rows.HEAD, row, strict=True)) for row in shown)
    assert one["of bf16"] == "1.50x" and one["in collectives"] == "not measured"
    assert (four["speedup"], four["efficiency"], four["of bf16"]) == ("3.20x", "80%", "")
    assert (four["sent"], four["bf16 sent"]) == ("2.0 KiB", "4.0 KiB")
    assert four["in collectives"] == "25%"
    empty = dataclasses.replace(measured, profiles={"jaxfp8 W8A16 x4": ()})
    assert _scale_rows.share_of_collectives(empty, "jaxfp8 W8A16 x4") is None


def test_all_programs_are_listed_without_being_made(capsys):
    assert bench("--list", "--platform", "cuda", "--devices", "8", "--rows", "4") == 0
    names = capsys.readouterr().out.splitlines()
    assert [name.split(",")[0] for name in names] == [
        "scale decode llama3-70b",
        "scale prefill llama3-70b",
        "scale train fsdp gpt-1.3b",
        "scale train fsdp x tensor gpt-1.3b",
        "scale experts decode",
        "scale experts train",
    ]
    assert "M = 4" in names[0] and "8192 tokens a device" in names[-1]


@pytest.mark.parametrize(
    ("devices", "quick", "counts"), [(1, False, [1]), (8, False, [1, 2, 4, 8]), (8, True, [1, 8])]
)
def test_numbers_of_devices(devices, quick, counts):
    assert sorted(set(_scale.counts(devices, quick))) == counts


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--devices", "0"], "--devices 0: 1 to"),
        (["--devices", "99"], "JAX_NUM_CPU_DEVICES=N"),
        (["--list", "--devices", "6"], "--devices 6: programs are split in powers of two"),
        (["--devices", "2", "--step", "decode"], "--devices has programs of its own"),
        (["--devices", "2", "--shapes", "64x64"], "--shapes takes llama3-70b or tiny"),
    ],
    ids=["none", "too many", "six", "step", "shapes"],
)
def test_a_wrong_option_says_what_to_give(capsys, arguments, expected):
    assert bench(*arguments) == 2
    assert expected in capsys.readouterr().err


@pytest.fixture
def small(monkeypatch):
    """In place of a decoder, one product with K split over axis m."""

    def served(*_):
        def on(mesh):
            mesh = _scale._tensor(mesh, mesh.size)
            x = _scale._put(mesh, jnp.ones((2, 64), jnp.bfloat16), P(None, "m"))
            for name, hold in (("jaxfp8", jaxfp8.quantize), (_scale.FLOATS, lambda w: w)):
                w = hold(jnp.ones((64, 32), jnp.bfloat16))
                state = _scale._put(mesh, jnp.zeros(2), P())
                step = lambda x, w, state: (x @ w, state + 1)  # noqa: E731
                yield name, step, x, _scale._put(mesh, w, P("m", None)), state

        return on

    monkeypatch.setattr(_scale, "_served", served)


def test_the_command_measures_and_writes(tmp_path, short, small, capsys):
    pytest.importorskip("matplotlib")
    record, page = tmp_path / "scale.json", tmp_path / "scale.html"
    options = ["--devices", str(jax.device_count()), "--shapes", "tiny", "--quick"]
    options += ["--only", "scale decode", "--json", str(record), "--plot", str(page)]
    assert bench(*options) == 0
    assert "All programs on most devices" in capsys.readouterr().out
    assert "<svg" in page.read_text()
    run = json.loads(record.read_text())
    assert run["settings"]["devices"] == 4
    forms = {one["name"]: one for one in run["cases"][0]["contenders"]}
    assert [*forms] == [f"{form} x{n}" for n in (1, 4) for form in ("jaxfp8", "XLA bf16")]
    sums = 2 * (2 * 32 * 2)
    assert forms["jaxfp8 x4"]["sent"] == forms["XLA bf16 x4"]["sent"] == {"all-reduce": sums}
    assert forms["jaxfp8 x1"]["sent"] == {}


def test_weights_of_a_decoder_are_split_by_their_names():
    mesh = _scale._tensor(_scale._mesh("cpu", 4), 2)
    q = jaxfp8.QArray(jnp.zeros((64, 32), jnp.int8), jnp.ones((64, 1)))
    layers = [{"query": q, "down": q, "mlp_norm": jnp.ones(64)}, {"gate": jnp.ones((3, 64, 31))}]
    placed = jax.tree.map(lambda x: x.sharding.spec, _scale._put(mesh, layers, _scale._of_weight))
    assert placed[0]["query"].qvalue == P("m", "d") and placed[0]["query"].scale == P("m", None)
    assert placed[0]["down"].qvalue == P("d", "m") and placed[0]["mlp_norm"] == P(None)
    assert placed[1]["gate"] == P(None, "m", None)  # two devices do not divide 31


def test_a_program_on_several_devices_is_profiled(monkeypatch):
    monkeypatch.setattr(_profile, "_CALLS", 1)
    x = _scale._put(_scale._mesh("cpu", 4), jnp.ones((8, 8)), P("d"))
    program = jax.jit(lambda x: x @ x.T).lower(x).compile()
    found = _profile.profile(Contender(lambda: program(x), program=program.as_text()))
    assert not isinstance(found, Missing) and found


@pytest.fixture
def perceptron(monkeypatch):
    """A layer without attention in place of the decoder that is trained."""
    monkeypatch.setitem(_decoder.MODELS, "tiny-8", _decoder.MODELS["tiny-block"])


def test_a_training_step_gathers_codes_on_a_mesh_of_two_axes(perceptron, monkeypatch):
    monkeypatch.setattr(_scale, "_TRAINED", ("jaxfp8 delayed",))
    amounts = _scale.AMOUNTS["tiny"]._replace(depth=1)
    case = _scale._case("train", "cpu", [4], lambda: _scale._training(amounts, 2), grows=True)
    (one,) = case.contenders.values()
    assert isinstance(one, Contender), one
    for leaf in jax.tree.leaves([one.enqueue() for _ in range(2)]):
        assert jnp.isfinite(leaf).all()
    # Half of each device's half of both weights, for the forward and for the backward product.
    assert case.sent["jaxfp8 delayed x4"]["all-gather"] == 2 * 2 * 64 * 128 // 4


def test_experts_exchange_rows_beside_gathering_tokens():
    forms = _scale._experts(_scale.AMOUNTS["tiny"])
    one, four = ({form for form, *_ in forms(_scale._mesh("cpu", n))} for n in (1, 4))
    assert _scale.FLOATS in one and four == one | {f"{form}, exchanged" for form in one}
    case = _scale._case("experts", "cpu", [4], lambda: forms, grows=False)
    slots = 4 * 3  # 1.25 of the 2 rows that a device of 4 tokens sends to each
    assert case.sent["XLA bf16, exchanged x4"] == {"all-to-all": slots * (2 * 2 * 64 + 4)}
    assert "all-to-all" not in case.sent["XLA bf16 x4"]


def test_scales_of_experts_are_those_of_one_number_of_devices():
    forms = _scale._trained_experts(_scale.AMOUNTS["tiny"])
    one, four = (list(forms(_scale._mesh("cpu", n))) for n in (1, 4))
    for leaf in jax.tree.leaves([state for *_, state in one]):
        leaf.delete()  # as a step does
    assert jax.tree.leaves([state for *_, state in four])
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves([data for _, _, *data in four]))
