"""SIGTERM, SIGINT and SIGHUP at any moment: their exit codes, one line, and running the command again gives the usual output."""

from __future__ import annotations

import random
import signal
from dataclasses import replace

import pytest

from support.harness import CASES, Ended, Job, stored_keys
from support.params import FULL, slow_but

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def check_stopped(job: Job, ended: Ended, signum: signal.Signals) -> None:
    """Checks that the signal ended the run, or that the run was complete when the signal came."""
    job.check_output(finished=False)
    if ended.code == job.case.code and job.is_in_place():
        assert ended.err == ""
        return
    assert ended.code == 128 + signum, ended.err
    assert ended.err == f"batchgen: error: interrupted by {signum.name}; run the same command again to continue\n"
    assert not job.is_in_place()
    keys = stored_keys(job.job_folder)
    assert len(set(keys)) == len(keys)


def check_signals_at_calls(job: Job, rng: random.Random, every: int) -> int:
    """Sends a signal right before every `every`-th call of a run from the job's state. Returns the number of signals."""
    met = 0
    for at in range(1 + rng.randrange(every), len(job.whole.calls) + 1, every):
        signum = rng.choice(SIGNALS)
        job.reset()
        check_stopped(job, job.run(how=signum.name, at=at), signum)
        job.go_on()
        met += 1
    return met


@pytest.mark.parametrize("grace", slow_but({None}, [None, "0"]))
@pytest.mark.parametrize("job", slow_but({"spooled"}, ["spooled", "windows"]), indirect=True)
def test_a_signal_at_any_call_ends_the_run_and_the_next_run_continues(job, grace):
    if grace is not None:
        job.case = replace(job.case, options=(*job.case.options, "--grace", grace))
    assert check_signals_at_calls(job, random.Random(3), every=35 if FULL else 200) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("job", ["sampled, spooled"], indirect=True)
def test_signals_at_random_moments_one_after_the_other_lose_no_row(job):
    rng = random.Random(4)
    kept: list[bytes] = []
    for _ in range(6):
        signum = rng.choice(SIGNALS)
        running = job.start_up_to(rng)
        running.kill(signum)
        check_stopped(job, running.wait(), signum)
        if job.is_in_place():
            job.prepare()
            kept = []
            continue
        now = stored_keys(job.job_folder)
        assert now[: len(kept)] == kept
        kept = now
    job.go_on()


@pytest.mark.parametrize("job", ["spooled"], indirect=True)
def test_a_second_signal_stops_at_once_and_loses_no_row(job):
    job.case = replace(job.case, options=(*job.case.options, "--grace", "600", "--max-tokens", "80", "--ignore-eos"))
    job.prepare()
    running = job.start(how="SIGSTOP", at=1, only=job.results)
    running.until_stopped()
    running.kill(signal.SIGHUP)
    running.kill(signal.SIGCONT)
    running.kill(signal.SIGTERM)  # Python handles the lower-numbered of two pending signals first
    ended = running.wait()
    assert (ended.code, ended.error) == (129, "interrupted by SIGHUP; run the same command again to continue")
    kept = stored_keys(job.job_folder)
    assert len(set(kept)) == len(kept)
    assert job.run().code == job.case.code


@pytest.mark.nightly
@pytest.mark.parametrize("grace", [None, "0"])
@pytest.mark.parametrize("state", ["new", "generated", "changed"])
@pytest.mark.parametrize("job", CASES, indirect=True)
def test_a_signal_at_every_call_of_every_job_ends_the_run_and_the_next_run_continues(job, state, grace):
    if grace is not None:
        job.case = replace(job.case, options=(*job.case.options, "--grace", grace))
    job.set_up(state)
    check_signals_at_calls(job, random.Random(state), every=1)
