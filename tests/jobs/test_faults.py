"""System calls that fail: the run ends with one line that names the file and the reason, and the same command continues later."""

from __future__ import annotations

import errno
import os
import random
import re

import pytest

from support.harness import CASES, Ended, Job
from support.params import FULL

SQLITE_WORDS = {"ENOSPC": "database or disk is full", "EROFS": "attempt to write a readonly database"}
FAULTS = [(how, lasting) for how in ("ENOSPC", "EIO", "EROFS", "EDQUOT") for lasting in (False, True)]


def check_line(ended: Ended, job: Job, how: str, call: str) -> None:
    """Checks that the job failed with one line that tells what cannot be written, why, and what to do."""
    assert (ended.code, ended.out) == (1, ""), (call, ended.err)
    reasons = {os.strerror(getattr(errno, how)), SQLITE_WORDS.get(how, "disk I/O error")}
    shown = ended.error
    match = re.fullmatch(r"(\S+) cannot be written: (.+?); (.+)\n?", shown)
    assert match is not None, (call, shown)
    where = job.job_folder.relative_to(job.folder)
    assert match[1] == job.case.output or match[1].startswith(str(where)), (call, shown)
    assert any(reason in match[2] for reason in reasons), (call, shown)
    assert "run the same command again" in match[3] or "-o" in match[3], (call, shown)


def harmless(call: str) -> bool:
    """Whether the run may ignore that this call fails: it locks or releases the lease."""
    name, path = call.split()[:2]
    return name in ("flock", "pwrite", "fsync") and "claims/" in path


def check_faults(job: Job, rng: random.Random, every: int) -> int:
    """Injects a fault at every `every`-th call of a run, then runs the command again without it. Returns the number of faults."""
    calls = job.calls()
    met = 0
    for at in range(1 + rng.randrange(every), len(calls) + 1, every):
        how, lasting = rng.choice(FAULTS)
        call = f"call {at}, {calls[at - 1]}, {how}"
        job.reset()
        ended = job.run(how=how, at=at, lasting=lasting)
        if ended.code == job.case.code:
            assert harmless(calls[at - 1]), (call, ended.err)
        else:
            check_line(ended, job, how, call)
        job.check_output(finished=False)
        job.go_on()
        met += 1
    return met


@pytest.mark.parametrize("job", ["spooled"], indirect=True)
def test_a_failing_call_ends_the_run_in_one_line_and_the_next_run_continues(job):
    assert check_faults(job, random.Random(1), every=11 if FULL else 200) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("state", ["generated", "changed", "new"])
@pytest.mark.parametrize("job", CASES, indirect=True)
def test_any_failing_call_ends_the_run_in_one_line_and_the_next_run_continues(job, state):
    job.set_up(state)
    check_faults(job, random.Random(state), every=1)
