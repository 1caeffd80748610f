"""How far a job is, as its folder tells it."""

import datetime as dt
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.errors import UsageError
from batchgen.progress import Counts, job_status
from batchgen.records import status as status_module
from batchgen.records.lock import Lock
from batchgen.records.manifest import Manifest
from batchgen.records.progress_file import ProgressFile, count_lines, read_progress
from batchgen.records.status import read_status

HOLD = """
import sys, time
from pathlib import Path
from batchgen.records.lock import Lock
lock = Lock(Path(sys.argv[1]), "o.jsonl")
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the job of `o.jsonl`, begun and left alone."""
    monkeypatch.chdir(tmp_path)
    folder = Path("o.jsonl.job")
    folder.mkdir()
    (folder / "lock").touch()
    save_manifest(folder, "running")
    return folder


def save_manifest(folder, state):
    Manifest(state=state, output="o.jsonl", settings={}, mentions={}, request={}).save(folder / "manifest.json")


def generated(done, *, failed=0, kept=0, total=100, seconds=10.0):
    """The figures of a run that has been generating for so long."""
    now = [0.0]
    counts = Counts(lambda: now[0])
    counts.phase("generating")
    now[0] = seconds
    counts.kept(kept)
    counts.rows(done, failed, total)
    counts.tokens(done * 20, done * 10)
    return counts.figures()


def add_results(folder, count, text="x"):
    with (folder / "journal").open("a") as journal:
        journal.writelines(f"{text}\n" for _ in range(count))


def tell(folder, figures, *, seconds_ago=0.0):
    ProgressFile(folder).tell(figures)
    told = json.loads((folder / "progress.json").read_text())
    told["updated"] = (dt.datetime.now(dt.UTC) - dt.timedelta(seconds=seconds_ago)).isoformat()
    (folder / "progress.json").write_text(json.dumps(told))


def contents(folder):
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}


def test_a_stopped_job_tells_what_its_last_run_came_to(folder):
    add_results(folder, 30)
    tell(folder, generated(30, failed=2, kept=10))
    before = contents(folder)
    found = read_status("o.jsonl")
    assert contents(folder) == before
    assert found.pop("updated")
    assert found == {
        "schema": "batchgen.status/1",
        "output": "o.jsonl",
        "folder": "o.jsonl.job",
        "state": "stopped",
        "process": None,
        "phase": "generating",
        "rows_passed": None,
        "seconds": 10.0,
        "completion_tokens_per_s": 30.0,
        "rows_per_s": 2.0,
        "eta_seconds": None,
        "rows_total": 100,
        "rows_done": 30,
        "rows_failed": 2,
        "rows_kept": 10,
        "prompt_tokens": 600,
        "completion_tokens": 300,
        "results": 30,
        "job": None,
    }
    assert job_status("o.jsonl") == read_status("o.jsonl")


def test_a_running_job_is_named_and_told_how_long_it_will_take_from_now(folder):
    lock = Lock(folder / "lock", "o.jsonl")
    held = json.loads((folder / "lock").read_text())
    held["started"] = (dt.datetime.now(dt.UTC) - dt.timedelta(seconds=60)).isoformat(timespec="seconds")
    (folder / "lock").write_text(json.dumps(held))
    add_results(folder, 20)
    tell(folder, generated(20), seconds_ago=5)
    found = read_status("o.jsonl")
    lock.release()
    assert found["process"] == {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": held["started"],
        "alive": True,
    }
    assert (found["state"], found["phase"], found["rows_done"]) == ("running", "generating", 20)
    assert found["eta_seconds"] == pytest.approx(35, abs=1)  # 40 when it was told


def test_looking_does_not_take_the_lock(folder, monkeypatch):
    def never(*_):
        raise AssertionError("the lock was touched")

    monkeypatch.setattr("fcntl.flock", never)
    assert read_status("o.jsonl")["state"] == "stopped"


def test_figures_of_an_earlier_run_are_not_taken_for_those_of_one_that_has_just_begun(folder):
    add_results(folder, 20)
    tell(folder, generated(20), seconds_ago=3600)
    lock = Lock(folder / "lock", "o.jsonl")
    found = read_status("o.jsonl")
    lock.release()
    assert (found["state"], found["phase"], found["rows_done"], found["rows_total"]) == ("running", "starting", 20, 100)
    assert (found["eta_seconds"], found["completion_tokens_per_s"], found["seconds"]) == (None, None, None)


def test_a_killed_job_is_dead_and_its_last_results_are_counted(folder):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    code = HOLD.replace("sys.argv[1]", repr(str(folder / "lock")))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout.readline() == b"held\n"
        assert read_status("o.jsonl")["state"] == "running"
        add_results(folder, 30)
        tell(folder, generated(30, kept=10))
        add_results(folder, 12)
        with (folder / "journal").open("a") as journal:
            journal.write("half a line")
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = read_status("o.jsonl")
    assert (found["state"], found["process"]["pid"], found["process"]["alive"]) == ("dead", process.pid, False)
    assert (found["rows_done"], found["results"], found["eta_seconds"]) == (42, 42, None)


def test_a_process_that_has_the_number_of_a_dead_one_is_not_taken_for_it(folder):
    with subprocess.Popen(["sleep", "60"]) as process:
        holder = {"pid": process.pid, "host": socket.gethostname(), "started": "2020-01-02T03:04:05+00:00"}
        (folder / "lock").write_text(json.dumps(holder))
        state = read_status("o.jsonl")["state"]
        process.kill()
    assert state == ("dead" if sys.platform == "linux" else "running")


def test_a_process_of_another_host_cannot_be_seen(folder):
    holder = {"pid": 12, "host": "elsewhere", "started": "2026-01-02T03:04:05+00:00"}
    (folder / "lock").write_text(json.dumps(holder))
    found = read_status("o.jsonl")
    assert (found["state"], found["process"]) == ("running", holder | {"alive": None})


def test_a_finished_job_tells_the_figures_of_all_its_runs(folder):
    save_manifest(folder, "finished")
    job = {"runs": 2, "rows": 100, "rows_failed": 3, "prompt_tokens": 2000, "completion_tokens": 1000}
    job["seconds"] = {"generate": 20.0, "total": 25.5}
    (folder / "stats.json").write_text(json.dumps({"rows": 40, "job": job}))
    found = read_status("o.jsonl")
    assert (found["state"], found["process"], found["job"]) == ("finished", None, job)
    assert {name: value for name, value in found.items() if value is not None and name not in ("state", "job")} == {
        "schema": "batchgen.status/1",
        "output": "o.jsonl",
        "folder": "o.jsonl.job",
        "seconds": 25.5,
        "completion_tokens_per_s": 50.0,
        "rows_per_s": 5.0,
        "rows_total": 100,
        "rows_done": 100,
        "rows_failed": 3,
        "prompt_tokens": 2000,
        "completion_tokens": 1000,
    }


def test_a_finished_job_stays_so_when_a_run_dies_before_it_has_begun_anything(folder):
    save_manifest(folder, "finished")
    holder = {"pid": 12, "host": socket.gethostname(), "started": "2020-01-02T03:04:05+00:00"}
    (folder / "lock").write_text(json.dumps(holder))
    assert read_status("o.jsonl")["state"] == "finished"


@pytest.mark.parametrize("damage", [None, b"", b"\xff{", b"[]", b'{"schema": "batchgen.progress/1", "rows_done": "x"}'])
def test_without_a_progress_file_that_can_be_read_the_journal_tells(folder, damage):
    if damage is not None:
        (folder / "progress.json").write_bytes(damage)
    assert read_status("o.jsonl")["rows_done"] is None
    add_results(folder, 7)
    found = read_status("o.jsonl")
    assert (found["state"], found["rows_done"], found["rows_total"], found["results"]) == ("stopped", 7, None, 7)


def test_a_journal_that_a_power_cut_has_shortened_is_counted_again(folder):
    add_results(folder, 30)
    tell(folder, generated(30))
    os.truncate(folder / "journal", 11)
    found = read_status("o.jsonl")
    assert (found["rows_done"], found["results"]) == (5, 5)


def test_a_huge_journal_is_not_read_anew(folder, monkeypatch):
    monkeypatch.setattr(status_module, "MOST_COUNTED", 100)
    add_results(folder, 60)
    tell(folder, generated(60))
    add_results(folder, 10)
    assert (read_status("o.jsonl")["rows_done"], read_status("o.jsonl")["results"]) == (70, 70)
    (folder / "progress.json").unlink()
    assert (read_status("o.jsonl")["rows_done"], read_status("o.jsonl")["results"]) == (None, None)


def test_more_results_than_rows_are_no_more_than_all_rows(folder):
    add_results(folder, 95)
    tell(folder, generated(95))
    add_results(folder, 10)
    assert (read_status("o.jsonl")["rows_done"], read_status("o.jsonl")["results"]) == (100, 105)


def test_a_resumed_run_goes_on_counting_results_where_the_last_one_was(folder):
    add_results(folder, 30)
    tell(folder, generated(30))
    add_results(folder, 5)
    tell(folder, generated(3, kept=3))
    found = read_status("o.jsonl")
    assert (found["rows_done"], found["results"]) == (3, 35)


def test_a_progress_file_that_cannot_be_written_is_left_as_it_was(folder, monkeypatch):
    add_results(folder, 30)
    file = ProgressFile(folder)
    file.tell(generated(30))
    before = (folder / "progress.json").read_bytes()

    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    file.tell(generated(31))
    assert (folder / "progress.json").read_bytes() == before


def test_no_progress_file_is_written_where_there_is_no_journal(folder):
    ProgressFile(folder).tell(generated(1))
    assert read_progress(folder) is None
    assert not (folder / "progress.json").exists()


def test_lines_are_counted_to_the_last_whole_one(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\n" + b"x" * (3 << 20) + b"\nfour\nhalf")
    end = path.stat().st_size - 4
    assert count_lines(path) == (4, end)
    assert count_lines(path, 4) == (3, end)
    assert count_lines(path, end) == (0, end)
    assert count_lines(path, 0, 1) == (2, 8)


@pytest.mark.parametrize("make", ["nothing", "folder", "file"])
def test_where_there_is_no_job_one_line_says_so(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if make == "folder":
        Path("o.jsonl.job").mkdir()
    elif make == "file":
        Path("o.jsonl.job").touch()
    with pytest.raises(UsageError) as caught:
        read_status("o.jsonl")
    assert str(caught.value) == (
        "there is no job of o.jsonl: o.jsonl.job is not a job's folder; name the output of a run, and the --work-dir it had"
    )


def test_a_job_under_another_folder_is_found_there(folder):
    Path("work").mkdir()
    folder.rename("work/o.jsonl.job")
    assert read_status("o.jsonl", "work")["state"] == "stopped"


def test_a_damaged_manifest_is_told(folder):
    (folder / "manifest.json").write_text("{")
    with pytest.raises(UsageError) as caught:
        read_status("o.jsonl")
    assert str(caught.value).startswith("o.jsonl.job/manifest.json is damaged; ")


def test_damaged_figures_are_left_out(folder):
    save_manifest(folder, "finished")
    for damage in ("{", "[]", '{"job": 3}', "{}"):
        (folder / "stats.json").write_text(damage)
        assert (read_status("o.jsonl")["state"], read_status("o.jsonl")["job"]) == ("finished", None)
    (folder / "stats.json").write_text('{"job": {"rows": 3}}')
    assert (read_status("o.jsonl")["rows_done"], read_status("o.jsonl")["job"]) == (None, {"rows": 3})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_told(folder):
    folder.chmod(0)
    try:
        with pytest.raises(UsageError, match=r"o\.jsonl\.job cannot be read: Permission denied"):
            read_status("o.jsonl")
    finally:
        folder.chmod(0o755)


def test_standard_output_keeps_nothing(tmp_path):
    with pytest.raises(UsageError, match="a job that writes to standard output keeps nothing by which to tell"):
        read_status("-")
