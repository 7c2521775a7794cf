"""The bar of long work: on a terminal alone, and gone when the work ends."""

import io

import pytest

from jaxfp8._value import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def now(monkeypatch):
    """A clock that a test sets."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    return clock


def test_a_terminal_shows_how_much_is_done_and_then_nothing(monkeypatch, now):
    monkeypatch.setattr("sys.stderr", Terminal())
    with progress.progress("measuring layers", 8) as done:
        done(1, "first")
        assert not progress.sys.stderr.getvalue()  # it has not taken long
        now[0] = 2.0
        done(1, "layers/1/up")
        shown = progress.sys.stderr.getvalue()
    assert (
        shown == "\r\x1b[Kmeasuring layers [######..................] 2 of 8, 6 s left layers/1/up"
    )
    assert progress.sys.stderr.getvalue() == shown + "\r\x1b[K"


def test_a_pipe_shows_nothing(monkeypatch, now):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with progress.progress("loading", 1 << 30) as done:
        now[0] = 60.0
        done(1 << 20)
    assert not progress.sys.stderr.getvalue()
