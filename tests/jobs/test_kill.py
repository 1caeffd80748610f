"""A run may be ended at any moment: by kill -9, a power cut, a signal or a call that fails.

The output is absent, old or complete, an error is one line, and running the command again gives the usual output.
"""

import errno
import json
import os
import random
import re
import signal
import time
from dataclasses import replace

import pytest

from batchgen.assembly import merge_job
from support.harness import CASES, TINY_SPOOL, Case, Ended, Job, Running, read_output, stored_keys
from support.params import FULL, slow_but

KILLS = 3 if FULL else 1
"""How often each case is killed."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ERRORS = ("ENOSPC", "EIO", "EROFS", "EDQUOT")
SQLITE_WORDS = {"ENOSPC": "database or disk is full", "EROFS": "attempt to write a readonly database"}
WAYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "kill": (("kill",), ()),
    "torn": (("torn",), ()),
    "cut": (("cut",), ()),
    "signal": (tuple(s.name for s in SIGNALS), ()),
    "signal, no grace": (tuple(s.name for s in SIGNALS), ("--grace", "0")),
    "error": (ERRORS, ()),
}
"""How a run is ended at a call (`Plan.how`, one of them by chance), and options of the run."""


def check_stopped(job: Job, ended: Ended, signum: signal.Signals) -> None:
    """Checks that the signal ended the run, or that the run was complete when the signal came."""
    if ended.code == job.case.code and job.is_in_place():
        assert ended.err == ""
        return
    assert ended.code == 128 + signum, ended.err
    assert ended.err == f"batchgen: error: interrupted by {signum.name}; run the same command again to continue\n"
    assert not job.is_in_place()
    keys = stored_keys(job.job_folder)
    assert len(set(keys)) == len(keys)


def check_failed(job: Job, ended: Ended, how: str, call: str) -> None:
    """Checks that the job failed with one line that tells what cannot be written, why, and what to do, unless the call may fail."""
    name, path = call.split()[:2]
    if ended.code == job.case.code:
        if (
            path != "BEGIN"
        ):  # of the progress, which is stored at intervals of time: the next result would tell of a full disk
            assert name in ("flock", "pwrite", "fsync"), ended.err
            assert "claims/" in path, ended.err  # the run locks or releases the lease
        return
    assert (ended.code, ended.out) == (1, ""), (call, ended.err)
    reasons = {os.strerror(getattr(errno, how)), SQLITE_WORDS.get(how, "disk I/O error")}
    match = re.fullmatch(r"(\S+) cannot be written: (.+?); (.+)\n?", ended.error)
    assert match is not None, (call, ended.error)
    where = job.job_folder.relative_to(job.folder)
    assert match[1] == job.case.output or match[1].startswith(str(where)), (call, ended.error)
    assert any(reason in match[2] for reason in reasons), (call, ended.error)
    assert "run the same command again" in match[3] or "-o" in match[3], (call, ended.error)


def check_every_call(job: Job, way: str, rng: random.Random, *, every: int = 1, after: str = "") -> int:
    """Runs the job from its state, once for each of its calls, and ends each run at that call. Returns the number of runs.

    `every`: only every `every`-th call; `after`: only from the first call on that contains this text.
    """
    hows, options = WAYS[way]
    job.case = replace(job.case, options=(*job.case.options, *options))
    calls = job.calls()
    first = next(i for i, call in enumerate(calls, 1) if after in call)
    met = 0
    for at in range(first + rng.randrange(every), len(calls) + 1, every):
        call = calls[at - 1]
        if way in ("kill", "torn", "cut") and (call.startswith("open ") or (way == "torn" and call[:6] != "write ")):
            continue  # the state is the same as after the previous call
        how = rng.choice(hows)
        job.reset()
        ended = job.run(how=how, at=at, lasting=way == "error" and rng.random() < 0.5)
        job.check_output(finished=False)
        if way == "error":
            check_failed(job, ended, how, call)
        elif how.startswith("SIG"):
            check_stopped(job, ended, signal.Signals[how])
        else:
            assert ended.code == -9, call
        job.go_on()
        met += 1
    return met


def check_random_moments(job: Job, rng: random.Random, wanted: int) -> None:
    """Kills one to three runs in a row at random moments, checks what is left after each, and then finishes the job."""
    met = 0
    while met < wanted:
        job.reset()
        before: list[bytes] = []
        for _ in range(rng.randint(1, 3)):
            running = job.start_up_to(rng)
            time.sleep(rng.choice((0, 0, 0.001, 0.005)))
            running.kill(signal.SIGKILL)
            ended = running.wait()
            whole = ended.code == job.case.code
            assert whole or ended.code == -9, ended.err
            met += not whole
            job.check_output(finished=whole)
            if whole or job.is_in_place():
                break
            now = stored_keys(job.job_folder)
            if "--retry" not in job.case.options:
                assert len(set(now)) == len(now), "a row that was finished was generated again"
                assert now[: len(before)] == before, "a row that was finished was lost"
            before = now
        job.go_on()


@pytest.mark.parametrize("job", slow_but({"spooled", "streamed"}, CASES), indirect=True)
def test_a_job_killed_at_random_moments_gives_the_usual_output(job):
    check_random_moments(job, random.Random(str(job.case)), KILLS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "state"),
    [
        ("spooled", "changed"),
        ("parquet, windows", "changed"),
        ("several, gzip", "raised"),
        ("windows", "raised"),
    ],
    indirect=["job"],
)
def test_a_finished_job_that_goes_on_and_is_killed_at_random_moments_gives_the_usual_output(job, state):
    """It goes on because its input has changed or its limit of tokens was raised."""
    job.set_up(state)
    check_random_moments(job, random.Random(state), KILLS)


@pytest.mark.parametrize(
    ("job", "way", "every"),
    slow_but(
        [("spooled", "signal", 35), ("spooled", "error", 11)],
        [
            ("spooled", "signal", 35),
            ("spooled", "signal, no grace", 35),
            ("windows", "signal", 35),
            ("spooled", "error", 11),
        ],
    ),
    indirect=["job"],
)
def test_a_signal_or_an_error_at_any_call_ends_the_run_in_one_line_and_the_next_run_continues(job, way, every):
    assert check_every_call(job, way, random.Random(3), every=every if FULL else 200) >= 1


@pytest.mark.slow
@pytest.mark.parametrize(("way", "every", "least"), [("kill", 1, 30), ("torn", 1, 5), ("cut", 3, 8)])
@pytest.mark.parametrize("job", ["spooled"], indirect=True)
def test_a_job_killed_in_any_step_of_assembly_and_rename_gives_the_usual_output(job, way, every, least):
    """After a `cut`, only the synced parts of files and folders are left."""
    job.set_up("generated")
    assert check_every_call(job, way, random.Random(way), every=every, after="write " + job.partial) >= least


@pytest.mark.parametrize("job", ["spooled"], indirect=True)
def test_a_second_signal_stops_at_once_and_loses_no_row(job):
    job.case = replace(job.case, options=(*job.case.options, "--grace", "600", "--max-tokens", "80", "--ignore-eos"))
    job.prepare()
    running = job.start(how="SIGSTOP", at=1, only=job.results)
    running.until_stopped()
    running.kill_main_thread(signal.SIGTERM)
    running.kill_main_thread(signal.SIGHUP)
    running.kill(signal.SIGCONT)  # Python now handles both, the lower-numbered first
    ended = running.wait()
    assert (ended.code, ended.error) == (129, "interrupted by SIGHUP; run the same command again to continue")
    kept = stored_keys(job.job_folder)
    assert len(set(kept)) == len(kept)
    assert job.run().code == job.case.code


# -- shards


SHARDS = 4
ROUNDS = 5


def start_shard(job: Job, number: int) -> Running:
    return job.start("--shard", f"{number}/{SHARDS}", quiet=False)


def finish_shards(job: Job, rng: random.Random, kills: int) -> int:
    """Runs all shards to their end, and kills each up to `kills` times at random moments. Returns the number of kills."""
    running = {number: start_shard(job, number) for number in range(1, SHARDS + 1)}
    left = dict.fromkeys(running, kills)
    killed = 0
    while running:
        time.sleep(rng.choice((0.0, 0.01, 0.03, 0.1)))
        number = rng.choice(list(running))
        if left[number]:
            left[number] -= 1
            running[number].kill(9)
            killed += running[number].wait().code == -9
            running[number] = start_shard(job, number)
        elif running[number].ended():
            ended = running.pop(number).wait()
            assert ended.code in (0, 3), ended.err
    return killed


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--temperature", "0.9", "--seed", "7"), ("-n", "2", "--temperature", "0.9")])
def test_shards_killed_at_random_moments_give_the_output_of_one_run(harness, tmp_path, options):
    case = Case(options=(*options, "--flush-every", "0"), settings=TINY_SPOOL)
    job = Job(harness, case, tmp_path / "job")
    rng = random.Random(str(options))
    killed = 0
    for _ in range(ROUNDS):
        job.prepare()
        killed += finish_shards(job, rng, kills=rng.randint(0, 3))
        report = merge_job(str(job.output))
        assert report.exit_code == 3
        assert read_output(job.output) == job.expected
        assert report.stats["job"]["rows"] == 26
    assert killed > ROUNDS


@pytest.mark.slow
def test_a_waiting_shard_takes_over_from_a_killed_first_reader(harness, tmp_path):
    job = Job(harness, Case(settings=TINY_SPOOL), tmp_path / "job")
    job.prepare()
    reader = job.start("--shard", "1/2", "--merge", quiet=False, how="SIGSTOP", at=1, only="write out.jsonl.job/shards")
    reader.until_stopped()
    other = job.start("--shard", "2/2", "--merge", "--log-format", "json", quiet=False)
    other.until_said("waiting: another run holds the first reading of out.jsonl (process ")
    reader.kill(9)
    assert reader.wait().code == -9
    waited = other.wait()
    assert waited.code == 0, waited.err  # failed rows belong to no shard
    phases = [event["phase"] for event in map(json.loads, waited.err.splitlines()) if event["event"] == "phase"]
    assert phases[phases.index("waiting") :] == ["waiting", "planning", "loading model", "generating"]
    assert "loading model" not in phases[: phases.index("waiting")]
    assert job.run("--shard", "1/2", "--merge").code == 3
    job.check_output(finished=True)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["kill", "torn"])
def test_a_merge_killed_at_any_step_of_its_writing_gives_the_usual_output(harness, tmp_path, way):
    job = Job(harness, Case(settings=TINY_SPOOL), tmp_path / "job")
    job.prepare()
    for number in (1, 2):
        assert job.run("--shard", f"{number}/2").code in (0, 3)
    job.keep_state()
    job.case = replace(job.case, options=("--shard", "1/2", "--merge"))
    every = 1 if way == "torn" else 2  # there are few writes
    assert check_every_call(job, way, random.Random(way), every=every, after="output.partial") >= 2


# -- every moment


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("state", ["new", "generated", "changed"])
@pytest.mark.parametrize("job", CASES, indirect=True)
def test_a_job_ended_at_any_call_of_its_runs_gives_the_usual_output(job, state, way):
    job.set_up(state)
    check_every_call(job, way, random.Random(state))


@pytest.mark.nightly
@pytest.mark.parametrize("job", CASES, indirect=True)
def test_a_job_killed_a_hundred_times_at_random_moments_gives_the_usual_output(job):
    check_random_moments(job, random.Random(2), 100)
