"""kill -9 and power cuts at any moment: the output is absent, old or complete, and running the command again gives the usual output."""

from __future__ import annotations

import random
import time

import pytest

from support.harness import CASES, Job, stored_keys
from support.params import FULL, slow_but

KILLS = 3 if FULL else 1
"""How often each case is killed."""


def kill_at_random(job: Job, rng: random.Random) -> bool:
    """Kills one run at a random call. Returns whether it was still alive then."""
    running = job.start_up_to(rng)
    time.sleep(rng.choice((0, 0, 0.001, 0.005)))
    running.kill(9)
    return running.wait().code == -9


def check_random_kills(job: Job, rng: random.Random, wanted: int) -> None:
    """Kills one to three runs in a row, checks what is left after each, and then finishes the job."""
    kills = 0
    while kills < wanted:
        job.reset()
        before: list[bytes] = []
        for _ in range(rng.randint(1, 3)):
            killed = kill_at_random(job, rng)
            kills += killed
            job.check_output(finished=not killed)
            if not killed or job.is_in_place():
                break
            now = stored_keys(job.job_folder)
            assert len(set(now)) == len(now), "a row that was finished was generated again"
            assert now[: len(before)] == before, "a row that was finished was lost"
            before = now
        job.go_on()


@pytest.mark.parametrize("job", slow_but({"spooled", "streamed"}, CASES), indirect=True)
def test_a_job_killed_at_random_moments_gives_the_usual_output(job):
    check_random_kills(job, random.Random(str(job.case)), KILLS)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["spooled", "parquet, windows"], indirect=True)
def test_a_finished_job_with_a_changed_input_killed_at_random_moments_gives_the_usual_output(job):
    job.prepare_changed()
    check_random_kills(job, random.Random(1), KILLS)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["several, gzip", "windows"], indirect=True)
def test_a_job_with_a_raised_limit_killed_at_random_moments_gives_the_usual_output(job):
    job.set_up("raised")
    rng = random.Random(3)
    for _ in range(KILLS):
        job.reset()
        for _ in range(rng.randint(1, 3)):
            killed = kill_at_random(job, rng)
            job.check_output(finished=not killed)
            if not killed or job.is_in_place():
                break
        job.go_on()


def check_every_call(job: Job, how: str, rng: random.Random, *, every: int = 1, after: str = "") -> int:
    """Runs the job from its state, once for each of its calls, and ends each run at that call by `how`. Returns the number of runs.

    `every`: only every `every`-th call; `after`: only from the first call on that contains this text.
    """
    calls = job.calls()
    first = next(i for i, call in enumerate(calls, 1) if after in call)
    met = 0
    for at in range(first + rng.randrange(every), len(calls) + 1, every):
        name = calls[at - 1].split()[0]
        if name == "open" or (how == "torn" and name != "write"):
            continue  # the state is the same as after the previous call
        job.reset()
        assert job.run(how=how, at=at).code == -9, calls[at - 1]
        job.check_output(finished=False)
        job.go_on()
        met += 1
    return met


@pytest.mark.parametrize(
    ("how", "every", "least"),
    [
        pytest.param("kill", 1, 30, marks=pytest.mark.slow),
        pytest.param("torn", 1, 5, marks=pytest.mark.slow),
        pytest.param("cut", 3, 8, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("job", ["spooled"], indirect=True)
def test_a_job_killed_in_any_step_of_assembly_and_rename_gives_the_usual_output(job, how, every, least):
    """After a `cut`, only the synced parts of files and folders are left."""
    job.prepare_generated()
    assert check_every_call(job, how, random.Random(how), every=every, after="write " + job.partial) >= least


STATES = ("new", "generated", "changed")
HOWS = ("kill", "torn", "cut")


@pytest.mark.nightly
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("job", CASES, indirect=True)
def test_a_job_killed_at_any_call_of_its_runs_gives_the_usual_output(job, state, how):
    job.set_up(state)
    check_every_call(job, how, random.Random(state))


@pytest.mark.nightly
@pytest.mark.parametrize("job", CASES, indirect=True)
def test_a_job_killed_a_hundred_times_at_random_moments_gives_the_usual_output(job):
    check_random_kills(job, random.Random(2), 100)
