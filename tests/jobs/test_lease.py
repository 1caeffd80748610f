"""Leases: machines that share a folder agree, also without file locks, which of them runs a job or a shard."""

import fcntl
import json
import multiprocessing
import threading
from pathlib import Path

import pytest

from batchgen.errors import OutputLocked
from batchgen.jobs.files.lease import Beats, Lease, last_claim
from support.python_process import holding

QUICK = Beats(every=0.01, silent=0.3, look=0.01)
PATIENT = Beats(every=0.01, silent=600, look=0.01)  # a busy machine may take long from one beat to the next


def claim_of_another_machine(folder: Path, number: int = 1, beat: int = 7) -> Path:
    """Writes the claim of a process on the host `far`."""
    folder.mkdir(exist_ok=True)
    path = folder / f"claim-{number:06d}"
    holder = {"pid": 12, "host": "far", "boot": "b", "locked": True, "started": "2026-01-01T00:00:00+00:00"}
    path.write_text(json.dumps(holder | {"number": number, "state": "running", "beat": beat}))
    return path


@pytest.fixture
def other_process(tmp_path: Path):
    with holding(Lease, tmp_path / "2", "shard 2/4 of o.jsonl") as process:
        yield process


def test_a_lease_is_held_by_one_process_and_names_it(tmp_path, other_process):
    with pytest.raises(OutputLocked) as caught:
        Lease(tmp_path / "2", "shard 2/4 of o.jsonl")
    assert f"another run holds shard 2/4 of o.jsonl (process {other_process.pid} on " in str(caught.value)
    assert caught.value.exit_code == 75


def test_a_claim_that_was_never_written_is_passed_after_a_few_seconds(tmp_path):
    (tmp_path / "claim-000007").touch()
    said: list[str] = []
    lease = Lease(tmp_path, "o.jsonl", said.append, QUICK)
    assert (last_claim(tmp_path)[0], len(said)) == (8, 1)
    lease.release()


def test_claims_of_long_ago_are_removed(tmp_path):
    for _ in range(103):
        Lease(tmp_path, "o.jsonl").release()
    assert sorted(int(p.name[-6:]) for p in tmp_path.iterdir()) == list(range(4, 104))


def test_without_file_locks_the_beats_tell_who_lives(tmp_path, monkeypatch):
    def unsupported(fd: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    lease = Lease(tmp_path, "o.jsonl", beats=PATIENT)
    with pytest.raises(OutputLocked):
        Lease(tmp_path, "o.jsonl", beats=PATIENT)
    lease.release()


def test_a_living_process_of_another_machine_keeps_its_lease(tmp_path):
    path = claim_of_another_machine(tmp_path / "1")
    ended = threading.Event()

    def beat() -> None:
        count = 8
        while not ended.wait(0.02):
            claim_of_another_machine(tmp_path / "1", beat=count)
            count += 1

    thread = threading.Thread(target=beat)
    thread.start()
    said: list[str] = []
    try:
        with pytest.raises(OutputLocked, match="process 12 on far"):
            Lease(tmp_path / "1", "shard 1/2 of o.jsonl", said.append, PATIENT)
    finally:
        ended.set()
        thread.join()
    assert said == [
        "shard 1/2 of o.jsonl was last held by process 12 on far: looking for up to 600 seconds whether its process still runs"
    ]
    assert path.exists()


def test_the_lease_of_a_silent_process_of_another_machine_is_taken_over(tmp_path):
    claim_of_another_machine(tmp_path / "1")
    lease = Lease(tmp_path / "1", "shard", beats=QUICK)
    assert lease.taken_over["host"] == "far"
    lease.check()
    lease.release()


def test_a_process_whose_lease_was_taken_over_stops_with_an_error(tmp_path):
    lease = Lease(tmp_path / "1", "shard 1/2 of o.jsonl", beats=Beats(every=60.0, silent=0.0))
    claim_of_another_machine(tmp_path / "1", number=2)
    with pytest.raises(OutputLocked, match=r"shard 1/2 of o\.jsonl was taken over by another run"):
        lease.check()
    lease.release()
    number, claim = last_claim(tmp_path / "1")
    assert (number, claim["host"]) == (2, "far")  # type: ignore[index]
    assert json.loads((tmp_path / "1" / "claim-000001").read_text())["state"] == "running"


def test_one_of_many_simultaneous_claims_wins(tmp_path):
    context = multiprocessing.get_context("fork")
    start, won = context.Barrier(9), context.Queue()

    def claim() -> None:
        start.wait()
        try:
            Lease(tmp_path / "1", "shard")
            won.put(1)
        except OutputLocked:
            won.put(0)
        start.wait()

    processes = [context.Process(target=claim) for _ in range(8)]
    for process in processes:
        process.start()
    start.wait()
    start.wait()  # nobody ends before all have tried
    for process in processes:
        process.join()
    assert sum(won.get() for _ in processes) == 1
