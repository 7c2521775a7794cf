"""Contenders in turns, and one that fails."""

import itertools
import time

import pytest

from jaxfp8._bench import _case
from jaxfp8._bench._case import Case, Measured
from jaxfp8._bench._measure import Contender, Missing, Timing, attempt, measure


def sleeping(seconds: float, **more) -> Contender:
    return Contender(lambda: time.sleep(seconds), lambda last: None, **more)


def failing(after: int) -> Contender:
    calls = itertools.count()

    def enqueue():
        if next(calls) >= after:
            raise RuntimeError("out of luck\nand more lines")

    return Contender(enqueue, lambda last: None)


def test_seconds_are_those_of_a_unit():
    timings = measure({"a": sleeping(0.02), "b": sleeping(0.02, units=4)}, rounds=4)
    assert 0.02 <= timings["a"].median < 0.1
    assert timings["b"].median == pytest.approx(timings["a"].median / 4, rel=0.5)


@pytest.mark.parametrize("after", [0, 7], ids=["when compiled", "later"])
def test_a_contender_that_fails_is_reported_and_the_others_go_on(after):
    timings = measure({"bad": failing(after), "good": sleeping(0.02)}, rounds=3)
    assert timings["bad"] == Missing("RuntimeError: out of luck")
    assert isinstance(timings["good"], Timing)


def test_a_case_that_cannot_be_made_is_one_of_ours_that_failed():
    def make():
        raise MemoryError

    results = _case.timed("large", make, rounds=1)
    assert results.failed and results.timings == {"jaxfp8": Missing("MemoryError")}


def test_an_interrupt_is_not_a_failure():
    def make():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(make)


def measured(peaks=None, **seconds) -> Measured:
    case = Case(name="case", contenders={}, flops=4e9, bytes=1e9, product="f32")
    timings = {name: Timing(median=value, spread=0.0) for name, value in seconds.items()}
    return Measured(case=case, timings=timings, peaks=peaks or {})


def test_the_limit_is_what_takes_longest_at_its_peak():
    by_memory = measured({"read": 1e9, "f32": 1e10}, jaxfp8=2.0)
    by_products = measured({"read": 1e10, "f32": 1e9}, jaxfp8=8.0)
    assert (by_memory.limit, by_memory.share()) == ("read", 0.5)
    assert (by_products.limit, by_products.share()) == ("f32", 0.5)


def test_only_peers_win_and_only_by_more_than_the_noise():
    results = measured(jaxfp8=2.0, peer=1.0, level=1.99, **{"jaxfp8 other": 0.5})
    assert results.winners() == {"peer": 2.0}
