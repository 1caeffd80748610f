"""A job with one process for each device: any process may be killed, and the output is that of one process."""

import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from support.harness import TINY_SPOOL, Case, Harness, Job, Running, stored_keys
from support.params import slow_but
from support.python_process import are_gone

TWO = ("--device", "cpu:0,1")
LONG = ("--max-tokens", "240", "--ignore-eos", "--flush-every", "0", "--batch-size", "2", "--grace", "600")
BEGUN = "SELECT DISTINCT key FROM under_way"
"""Finds the rows of which tokens are stored and no result."""


@pytest.fixture
def long_job(harness: Harness, tmp_path: Path) -> Job:
    """A job with rows long enough to interrupt. Its expected output is that of one process."""
    job = Job(harness, Case(options=LONG, settings=TINY_SPOOL), tmp_path / "job")
    job.case = replace(job.case, options=(*LONG, *TWO))
    job.prepare()
    return job


def in_the_middle(job: Job) -> tuple[Running, list[int]]:
    running = job.start()
    while len(stored_keys(job.job_folder)) <= 2 or len(stored_keys(job.job_folder, BEGUN)) <= 1:
        assert not running.ended(), running.wait().err
        time.sleep(0.001)
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


@pytest.mark.parametrize("kind", slow_but(["whole"], OPTIONS))
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
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=["KILL", "INT", "TERM"])
def test_when_the_job_is_ended_no_process_stays_and_it_can_continue_later(long_job, signum):
    """A terminal's Ctrl-C and schedulers signal all processes at once; kill -9 ends the job alone."""
    running, workers = in_the_middle(long_job)
    begun = stored_keys(long_job.job_folder, BEGUN)
    for pid in ([] if signum == signal.SIGKILL else workers) + [running.pid]:
        os.kill(pid, signum)
    ended = running.wait()
    if signum == signal.SIGKILL:
        assert ended.code == -9
    else:
        told = f"interrupted by {signum.name}; run the same command again to continue"
        assert (ended.code, ended.error) == (128 + signum, told)
    assert are_gone(workers)
    kept = stored_keys(long_job.job_folder)
    assert len(set(kept)) == len(kept)
    assert len(kept) >= 3
    assert signum != signal.SIGTERM or set(begun) <= set(kept)  # what ran was finished
    long_job.check_output(finished=False)
    long_job.go_on()


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_processes_that_hang(long_job):
    running, workers = in_the_middle(long_job)
    for pid in (*workers, running.pid):
        os.kill(pid, signal.SIGSTOP)
    running.until_stopped()
    running.kill_main_thread(signal.SIGHUP)
    running.kill_main_thread(signal.SIGTERM)
    running.kill(signal.SIGCONT)  # Python now handles both, the lower-numbered first
    ended = running.wait()
    assert (ended.code, ended.error) == (129, "interrupted by SIGHUP; run the same command again to continue")
    assert are_gone(workers)
    long_job.go_on()


@pytest.mark.parametrize(
    "kills", [pytest.param(4, marks=pytest.mark.slow), pytest.param(60, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("job", ["two devices"], indirect=True)
def test_killing_processes_at_random_moments_does_not_change_the_output(job, kills):
    rng = random.Random(5)
    for _ in range(kills):
        job.reset()
        running = job.start_up_to(rng)
        workers = running.workers()
        if workers and not running.ended():
            os.kill(rng.choice(workers), signal.SIGKILL)
        ended = running.wait()
        assert ended.code in (1, job.case.code), ended.err  # 1: before it was ready
        job.go_on()
