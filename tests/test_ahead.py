"""Work done in another thread."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest

from batchgen.ahead import Ahead, StoppedError


def test_what_was_made_is_there_and_stays() -> None:
    ahead = Ahead(lambda: threading.get_ident())
    assert ahead.result() == ahead.result() != threading.get_ident()
    assert ahead.ready
    assert ahead.began <= ahead.ended


def test_it_is_not_ready_before_it_is_made() -> None:
    go = threading.Event()
    ahead = Ahead(go.wait)
    assert not ahead.ready
    go.set()
    assert ahead.result() is True


def test_an_error_is_raised_where_the_result_is_asked_for() -> None:
    def broken() -> None:
        raise MemoryError("no more")

    ahead = Ahead(broken)
    with pytest.raises(MemoryError, match="no more"):
        ahead.result()
    assert not ahead.ready


def test_what_is_stopped_ends_and_gives_nothing() -> None:
    begun = threading.Event()

    def endless() -> None:
        begun.set()
        while True:
            time.sleep(0.001)

    ahead = Ahead(endless)
    begun.wait()
    ahead.stop()
    with pytest.raises(StoppedError):
        ahead.result()


def test_what_swallows_the_first_stop_meets_with_another(capfd: pytest.CaptureFixture[str]) -> None:
    begun = threading.Event()

    def stubborn() -> None:
        begun.set()
        for _ in range(2):
            with suppress(StoppedError):
                while True:
                    time.sleep(0.001)
        while True:
            time.sleep(0.001)

    ahead = Ahead(stubborn)
    begun.wait()
    ahead.stop()
    with pytest.raises(StoppedError):
        ahead.result()
    assert capfd.readouterr() == ("", "")


def test_a_callback_that_a_stop_ends_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    begun = threading.Event()

    class Slow:
        def __del__(self) -> None:
            begun.set()
            while True:
                time.sleep(0.001)

    def endless() -> None:
        Slow()
        while True:
            time.sleep(0.001)

    ahead = Ahead(endless)
    begun.wait()
    ahead.stop()
    assert not ahead.ready
    assert capfd.readouterr() == ("", "")


def test_stopping_what_is_made_changes_nothing() -> None:
    ahead = Ahead(lambda: 7)
    assert ahead.result() == 7
    ahead.stop()
    assert ahead.result() == 7
