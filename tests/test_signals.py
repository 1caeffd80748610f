"""How signals end a job."""

import os
import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from batchgen.errors import Interrupted
from batchgen.process.signals import Signals


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)
    time.sleep(0)  # let Python run the handler


def test_sigint_stops_at_the_next_step():
    with Signals(grace=5) as signals:
        send(signal.SIGINT)
        assert signals.stop() == "now"
        with pytest.raises(Interrupted) as error:
            signals.check()
    assert error.value.exit_code == 130
    assert str(error.value) == "interrupted by SIGINT; run the same command again to continue"


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_sigterm_and_sighup_drain_for_the_grace_period_and_then_stop(signum, code, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("batchgen.process.signals.time", SimpleNamespace(monotonic=lambda: now[0]))
    with Signals(grace=5) as signals:
        send(signum)
        now[0] = 104.9
        assert signals.stop() == "drain"
        now[0] = 105.0
        assert signals.stop() == "now"
        with pytest.raises(Interrupted) as error:
            signals.check()
    assert error.value.exit_code == code


def test_a_second_signal_stops_at_once_with_the_code_of_the_first():
    with Signals(grace=60) as signals:
        send(signal.SIGTERM)
        assert signals.stop() == "drain"
        with pytest.raises(Interrupted) as error:
            send(signal.SIGINT)
    assert error.value.exit_code == 143


def test_a_signal_ignored_from_the_start_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals(grace=5) as signals:
            send(signal.SIGHUP)
            assert signals.stop() is None
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signal_handlers_are_restored():
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with Signals(grace=5):
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_interruptible_work_ends_at_the_first_signal_even_while_it_waits():
    reader, writer = os.pipe()
    timer = threading.Timer(0.05, send, [signal.SIGTERM])
    with Signals(grace=60) as signals:
        timer.start()
        with pytest.raises(Interrupted) as error, signals.interruptible():
            os.read(reader, 1)  # never returns
    os.close(reader)
    os.close(writer)
    assert error.value.exit_code == 143


def test_a_library_that_raises_its_own_error_does_not_hide_the_interruption():
    with Signals(grace=60) as signals, pytest.raises(Interrupted), signals.interruptible():
        try:
            send(signal.SIGINT)
        except KeyboardInterrupt as e:
            raise ValueError("cannot load") from e


def test_a_library_that_catches_exceptions_does_not_catch_the_signal(capsys):
    with Signals(grace=5) as signals, pytest.raises(Interrupted), signals.interruptible():
        try:
            send(signal.SIGINT)
        except Exception as e:
            print(f"Error importing: {e}")
    assert capsys.readouterr() == ("", "")


def test_outside_the_main_thread_neither_handlers_nor_pythons_hook_are_changed():
    def found(signals: Signals | None = None) -> tuple[Any, ...]:
        return signals and signals.stop(), signal.getsignal(signal.SIGTERM), sys.unraisablehook

    def work() -> None:
        with Signals(grace=5) as signals, signals.interruptible():
            seen.append(found(signals))

    seen: list[Any] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [found()]


class _SendsWhenDeleted:
    def __del__(self) -> None:
        send(signal.SIGINT)


def test_a_signal_that_python_drops_in_a_finalizer_ends_the_work_at_its_end_and_the_second_one_at_once(capsys):
    for signals_sent in (1, 2):
        seen = []
        with Signals(grace=60) as signals, pytest.raises(Interrupted) as error, signals.interruptible():
            _SendsWhenDeleted()
            seen.append("the first is dropped")
            if signals_sent == 2:
                send(signal.SIGTERM)
            seen.append("the end")
        assert error.value.exit_code == 130
        assert len(seen) == 3 - signals_sent
    assert capsys.readouterr() == ("", "")
