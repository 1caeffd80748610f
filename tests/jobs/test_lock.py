"""The lock of an output."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from batchgen.errors import OutputLocked
from batchgen.jobs.files.lock import Lock
from support.python_process import holding


@pytest.fixture
def other_process(tmp_path):
    """A second process that holds the lock file `tmp_path / "lock"`."""
    with holding(Lock, tmp_path / "lock", "o.jsonl") as process:
        yield process


def test_the_lock_of_a_running_process_is_respected_and_its_holder_named(tmp_path, other_process):
    with pytest.raises(OutputLocked) as caught:
        Lock(tmp_path / "lock", "o.jsonl")
    who = rf"process {other_process.pid} on {re.escape(socket.gethostname())}, since \d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00"
    assert re.fullmatch(rf"another run holds o\.jsonl \({who}\); wait for it to end, or stop it", str(caught.value))
    assert caught.value.exit_code == 75


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path, other_process):
    other_process.send_signal(signal.SIGKILL)
    other_process.wait()
    lock = Lock(tmp_path / "lock", "o.jsonl")
    assert lock.taken_over == other_process.pid
    assert json.loads((tmp_path / "lock").read_bytes())["pid"] == os.getpid()
    lock.release()


def test_a_released_lock_names_nobody_and_can_be_taken_again(tmp_path):
    lock = Lock(tmp_path / "lock", "o.jsonl")
    lock.release()
    lock.release()
    assert (tmp_path / "lock").read_bytes() == b""
    again = Lock(tmp_path / "lock", "o.jsonl")
    assert again.taken_over is None
    again.release()


def test_two_locks_in_one_process_exclude_each_other(tmp_path):
    lock = Lock(tmp_path / "lock", "o.jsonl")
    with pytest.raises(OutputLocked):
        Lock(tmp_path / "lock", "o.jsonl")
    lock.release()


def test_another_hosts_lock_is_not_taken_over(tmp_path):
    theirs = {"pid": 12, "host": "elsewhere", "started": "2026-01-02T03:04:05+00:00"}
    (tmp_path / "lock").write_text(json.dumps(theirs))
    with pytest.raises(OutputLocked) as caught:
        Lock(tmp_path / "lock", "o.jsonl")
    assert str(caught.value) == (
        "another run holds o.jsonl (process 12 on elsewhere, since 2026-01-02T03:04:05+00:00); "
        f"this host cannot tell whether it still runs; wait for it; if it is dead, delete {tmp_path / 'lock'}"
    )
    assert json.loads((tmp_path / "lock").read_text()) == theirs


def test_a_truncated_lock_file_has_no_holder(tmp_path):
    (tmp_path / "lock").write_text('{"pid": 12, "ho')
    Lock(tmp_path / "lock", "o.jsonl").release()


def test_without_file_locks_a_living_process_is_still_respected(tmp_path, monkeypatch):
    def unsupported(fd, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    holder = {"pid": os.getppid(), "host": socket.gethostname(), "started": "now"}
    (tmp_path / "lock").write_text(json.dumps(holder))
    with pytest.raises(OutputLocked):
        Lock(tmp_path / "lock", "o.jsonl")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / "lock").write_text(json.dumps(holder | {"pid": dead.pid}))
    lock = Lock(tmp_path / "lock", "o.jsonl")
    assert lock.taken_over == dead.pid
    lock.release()
