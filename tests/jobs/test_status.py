"""The status of a job, read from its folder."""

import datetime as dt
import json
import os
import signal
import socket
import sqlite3
import zlib
from pathlib import Path

import pytest

from batchgen.errors import UsageError
from batchgen.jobs.files.lease import Lease
from batchgen.jobs.files.manifest import Manifest
from batchgen.jobs.files.results import Results
from batchgen.jobs.shards import CLAIMS
from batchgen.jobs.status import job_status
from batchgen.progress import Silent, Tracker
from batchgen.result import Result
from support.python_process import holding


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a job with the output `o.jsonl` that has begun and is not running."""
    monkeypatch.chdir(tmp_path)
    folder = Path("o.jsonl.job")
    folder.mkdir()
    save_manifest(folder, "running")
    return folder


def save_manifest(folder, state):
    Manifest(state=state, output="o.jsonl", settings={}, mentions={}, request={}).save(folder / "manifest.json")


def generated(done, *, failed=0, kept=0, total=100, seconds=10.0):
    """Returns the figures of a run that has generated for `seconds`."""
    now = [0.0]
    tracker = Tracker(Silent(), lambda: now[0])
    run = tracker.run
    tracker.phase("generating")
    now[0] = seconds
    tracker.total = total
    run.resumed.ok, run.new.failed, run.new.ok = kept, failed, done - kept - failed
    run.new.reasons["stop"] = done
    run.new.prompt_tokens, run.new.completion_tokens = done * 20, done * 10
    tracker.generated(done * 10)
    tracker.expect(0.0, 40.0)
    return tracker.snapshot().figures()


def add_results(folder, count, more=()):
    """Writes `count` results, and then the facts in `more`."""
    results = Results(folder, 0.0)
    first = results.count
    for i in range(first, first + count):
        results.append(i.to_bytes(16, "big"), Result(row=i, text="x", finish_reason="stop"))
    for figures in more:
        results.keep_progress(figures)
    results.close()
    (folder / "run.sqlite").unlink()


def tell(folder, figures, *, seconds_ago=0.0):
    add_results(folder, 0, [figures])
    db = sqlite3.connect(folder / "results.sqlite")
    (value,) = db.execute("SELECT value FROM facts WHERE name = 'progress'").fetchone()
    told = json.loads(value)
    told["updated"] = (dt.datetime.now(dt.UTC) - dt.timedelta(seconds=seconds_ago)).isoformat()
    value = json.dumps(told).encode()
    db.execute("UPDATE facts SET value = ?, checksum = ?", (value, zlib.crc32(b"progress" + value)))
    db.commit()
    db.close()


def contents(folder):
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}


def test_a_stopped_job_tells_the_progress_of_its_last_run(folder):
    add_results(folder, 30)
    tell(folder, generated(30, failed=2, kept=10))
    before = contents(folder)
    found = job_status("o.jsonl")
    assert contents(folder) == before
    assert found.pop("updated")
    assert found == {
        "schema": "batchgen.status/1", "output": "o.jsonl", "folder": "o.jsonl.job", "state": "stopped",
        "process": None, "phase": "generating", "rows_passed": None, "seconds": 10.0,
        "completion_tokens_per_s": 30.0, "rows_per_s": 2.0, "eta_seconds": None, "rows_total": 100, "rows_done": 30,
        "rows_failed": 2, "rows_kept": 10, "prompt_tokens": 600, "completion_tokens": 300,
        "finish_reasons": {"stop": 30}, "results": 30, "shards": None, "workers": None, "job": None,
    }  # fmt: skip


def test_a_running_job_tells_its_process_and_remaining_time(folder):
    lease = Lease(folder / CLAIMS, "o.jsonl")
    (claim,) = (folder / CLAIMS).iterdir()
    held = json.loads(claim.read_text())
    held["started"] = (dt.datetime.now(dt.UTC) - dt.timedelta(seconds=60)).isoformat(timespec="seconds")
    claim.write_text(json.dumps(held))
    add_results(folder, 20)
    tell(folder, generated(20), seconds_ago=5)
    found = job_status("o.jsonl")
    lease.release()
    assert found["process"] == {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": held["started"],
        "alive": True,
    }
    assert (found["state"], found["phase"], found["rows_done"]) == ("running", "generating", 20)
    assert 0 < found["eta_seconds"] < 36  # 40 when the progress was written, 5 seconds before


def test_workers_are_listed_only_for_a_running_job(folder):
    workers = [{"device": "cpu:0", "state": "running", "rows_done": 3}]
    lease = Lease(folder / CLAIMS, "o.jsonl")
    tell(folder, generated(30) | {"workers": workers})
    assert job_status("o.jsonl")["workers"] == workers
    lease.release()
    found = job_status("o.jsonl")
    assert (found["state"], found["workers"]) == ("stopped", None)


def test_a_run_that_has_just_begun_does_not_show_the_figures_of_an_earlier_one(folder):
    add_results(folder, 20)
    tell(folder, generated(20), seconds_ago=3600)
    lease = Lease(folder / CLAIMS, "o.jsonl")
    found = job_status("o.jsonl")
    lease.release()
    assert (found["state"], found["phase"], found["rows_done"], found["rows_total"]) == ("running", "starting", 20, 100)
    assert (found["eta_seconds"], found["completion_tokens_per_s"], found["seconds"]) == (None, None, None)


def test_a_killed_job_is_dead_and_its_last_results_are_counted(folder):
    with holding(Lease, folder / CLAIMS, "o.jsonl") as process:
        assert job_status("o.jsonl")["state"] == "running"
        add_results(folder, 30)
        tell(folder, generated(30, kept=10))
        add_results(folder, 12)
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = job_status("o.jsonl")
    assert (found["state"], found["process"]["pid"], found["process"]["alive"]) == ("dead", process.pid, False)
    assert (found["rows_done"], found["results"], found["eta_seconds"]) == (42, 42, None)


@pytest.mark.parametrize(("total", "done"), [(100, 42), (None, 42), (35, 35)])
def test_results_since_the_last_progress_are_rows_that_are_done_and_never_more_than_there_are(folder, total, done):
    add_results(folder, 30)
    tell(folder, generated(30, total=total))
    add_results(folder, 12)
    found = job_status("o.jsonl")
    assert (found["rows_done"], found["rows_total"], found["results"]) == (done, total, 42)


def test_a_finished_job_tells_the_figures_of_all_its_runs(folder):
    save_manifest(folder, "finished")
    job = {"runs": 2, "rows": 100, "rows_failed": 3, "prompt_tokens": 2000, "completion_tokens": 1000}
    job |= {"finish_reasons": {"stop": 97, "error": 3}, "seconds": {"generate": 20.0, "total": 25.5}}
    (folder / "stats.json").write_text(json.dumps({"rows": 40, "job": job}))
    found = job_status("o.jsonl")
    assert (found["state"], found["process"], found["job"]) == ("finished", None, job)
    assert {name: value for name, value in found.items() if value is not None and name not in ("state", "job")} == {
        "schema": "batchgen.status/1", "output": "o.jsonl", "folder": "o.jsonl.job", "seconds": 25.5,
        "completion_tokens_per_s": 50.0, "rows_per_s": 5.0, "rows_total": 100, "rows_done": 100, "rows_failed": 3,
        "prompt_tokens": 2000, "completion_tokens": 1000, "finish_reasons": {"stop": 97, "error": 3},
    }  # fmt: skip


def test_without_progress_the_results_are_counted(folder):
    assert (job_status("o.jsonl")["rows_done"], job_status("o.jsonl")["results"]) == (None, None)
    add_results(folder, 7)
    found = job_status("o.jsonl")
    assert (found["state"], found["rows_done"], found["rows_total"], found["results"]) == ("stopped", None, None, 7)


@pytest.mark.parametrize("damage", [b"", b"x" * 5000])
def test_figures_of_an_unreadable_database_are_left_out(folder, damage):
    (folder / "results.sqlite").write_bytes(damage)
    found = job_status("o.jsonl")
    assert (found["state"], found["rows_done"], found["results"]) == ("stopped", None, None)


def test_the_status_can_be_read_while_the_job_writes(folder):
    results = Results(folder, 3600.0)
    results.keep_progress(generated(0))
    for done in (1, 2, 3):
        results.append(bytes([done]) * 16, Result(row=done, text="x", finish_reason="stop"))
        results.commit()
        assert (job_status("o.jsonl")["rows_done"], job_status("o.jsonl")["results"]) == (done, done)
    results.keep_progress(generated(5))
    results.append(bytes(16), Result(row=4, text="x", finish_reason="stop"))
    results.commit()
    assert (job_status("o.jsonl")["rows_done"], job_status("o.jsonl")["results"]) == (6, 4)
    results.close()


@pytest.mark.parametrize("wrong", ["o.jsonl.job", "out.jsonl"])
def test_a_name_that_is_no_output_suggests_one(wrong, folder):
    with pytest.raises(UsageError, match=r"did you mean o\.jsonl, or has the run a --work-dir\?$"):
        job_status(wrong)
