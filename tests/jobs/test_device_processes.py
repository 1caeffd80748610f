"""A job with one process for each device: any process may be killed, and the output is that of one process."""

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from batchgen import job_status
from support.harness import TINY_SPOOL, Case, Harness, Job, Running, stored_keys

TWO = ("--device", "cpu:0,1")
LONG = ("--max-tokens", "240", "--ignore-eos", "--flush-every", "0", "--batch-size", "2")


def until(done: Callable[[], bool], running: Running) -> None:
    while not done():
        assert not running.ended(), running.wait().err
        time.sleep(0.001)


def gone(pids: list[int]) -> bool:
    """Waits up to a minute for the processes to end. Returns whether all have."""
    end = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.fixture
def long_job(harness: Harness, tmp_path: Path) -> Job:
    """A job with rows long enough to interrupt. Its expected output is that of one process."""
    job = Job(harness, Case(options=LONG, settings=TINY_SPOOL), tmp_path / "job")
    job.case = replace(job.case, options=(*LONG, *TWO))
    job.prepare()
    return job


def in_the_middle(job: Job, quiet: bool = True) -> tuple[Running, list[int]]:
    running = job.start(quiet=quiet)
    until(lambda: len(stored_keys(job.job_folder)) > 2, running)
    workers = running.workers()
    assert len(workers) == 2
    return running, workers


OPTIONS = {
    "whole": (),
    "sampled": ("-n", "2", "--temperature", "0.9", "--token-ids"),
    "labels": ("--choices", "north,south,southern"),
    "windows": ("--window", "7"),
    "in their own order": ("--policy", "fifo"),
}
SLOW = ("sampled", "labels", "windows", "in their own order")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k in SLOW)) for k in OPTIONS])
def test_two_processes_write_what_one_writes(harness, tmp_path, kind):
    job = Job(harness, Case(options=OPTIONS[kind], settings=TINY_SPOOL), tmp_path / "job")
    job.case = replace(job.case, options=(*OPTIONS[kind], *TWO))
    job.go_on()
    stats = json.loads((job.job_folder / "stats.json").read_text())
    assert (stats["device"], stats["rows_ok"] + stats["rows_failed"]) == ("cpu:0,1", 26)
    assert stats["prefill_tokens"] >= stats["prefill_tokens_min"] > 0
    assert 0 < stats["seconds"]["forward"] <= stats["seconds"]["generate"]
    workers = stats["workers"]
    assert [worker["device"] for worker in workers] == ["cpu:0", "cpu:1"]
    assert sum(worker["rows"] for worker in workers) == 24  # two of the input's rows fail before they reach a model
    assert sum(worker["prefill_tokens"] for worker in workers) == stats["prefill_tokens"]


@pytest.mark.slow
def test_when_a_devices_process_is_killed_the_other_generates_its_rows(long_job):
    running, workers = in_the_middle(long_job, quiet=False)
    until(lambda: (job_status(str(long_job.output))["workers"] or [{}])[-1].get("state") == "running", running)
    os.kill(workers[0], signal.SIGKILL)
    ended = running.wait()
    assert ended.code == long_job.case.code, ended.err
    assert re.search(r"ended \(SIGKILL\); its \d+ unfinished rows go to cpu:1\n", ended.err), ended.err
    long_job.check_output(finished=True)
    assert gone(workers)


@pytest.mark.slow
def test_when_all_device_processes_are_killed_the_job_fails_and_can_continue_later(long_job):
    running, workers = in_the_middle(long_job)
    os.kill(running.pid, signal.SIGSTOP)  # so that it learns of both at once
    kept = stored_keys(long_job.job_folder)
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    os.kill(running.pid, signal.SIGCONT)
    ended = running.wait()
    assert ended.code == 1
    assert ended.error in (
        f"the process of cpu:{i} ended (SIGKILL); run the same command again to continue" for i in (0, 1)
    )
    now = stored_keys(long_job.job_folder)
    assert now[: len(kept)] == kept
    assert len(set(now)) == len(now)
    assert long_job.go_on().code == long_job.case.code


@pytest.mark.slow
def test_when_the_job_is_killed_no_process_stays_and_it_can_continue_later(long_job):
    running, workers = in_the_middle(long_job)
    running.kill(signal.SIGKILL)
    assert running.wait().code == -9
    assert gone(workers)
    kept = stored_keys(long_job.job_folder)
    assert len(set(kept)) == len(kept) > 2
    long_job.check_output(finished=False)
    long_job.go_on()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=["INT", "TERM"])
def test_a_signal_to_all_processes_is_handled_by_the_job_alone(long_job, signum):
    """A terminal's Ctrl-C and schedulers signal all processes at once."""
    running, workers = in_the_middle(long_job)
    for pid in (*workers, running.pid):
        os.kill(pid, signum)
    ended = running.wait()
    assert (ended.code, ended.error) == (
        128 + signum,
        f"interrupted by {signum.name}; run the same command again to continue",
    )
    assert gone(workers)
    kept = stored_keys(long_job.job_folder)
    assert len(set(kept)) == len(kept)
    if signum == signal.SIGTERM:  # what ran was finished
        assert len(kept) >= 2 + 4
    long_job.go_on()


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_processes_that_hang(long_job):
    running, workers = in_the_middle(long_job)
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    running.kill(signal.SIGHUP)
    running.kill(signal.SIGTERM)  # Python handles the lower-numbered of two pending signals first
    ended = running.wait()
    assert (ended.code, ended.error) == (129, "interrupted by SIGHUP; run the same command again to continue")
    assert gone(workers)
    long_job.go_on()


@pytest.mark.nightly
@pytest.mark.parametrize("job", ["two devices"], indirect=True)
def test_killing_processes_at_random_moments_does_not_change_the_output(job):
    rng = random.Random(5)
    for _ in range(60):
        job.reset()
        running = job.start_up_to(rng)
        workers = running.workers()
        if workers and not running.ended():
            os.kill(rng.choice(workers), signal.SIGKILL)
        ended = running.wait()
        assert ended.code in (1, job.case.code), ended.err  # 1: before it was ready
        job.go_on()
