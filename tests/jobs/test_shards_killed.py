"""Four concurrent shards in one folder, each killed at random and started again: the merged output is that of one run."""

from __future__ import annotations

import json
import random
import time

import pytest

from batchgen.assembly import merge_job
from support.harness import TINY_SPOOL, Case, Job, Running, read_output

SHARDS = 4
ROUNDS = 5


def start(job: Job, number: int) -> Running:
    return job.start("--shard", f"{number}/{SHARDS}", quiet=False)


def finish(job: Job, rng: random.Random, kills: int) -> int:
    """Runs all shards to their end, and kills each up to `kills` times at random moments. Returns the number of kills."""
    running = {number: start(job, number) for number in range(1, SHARDS + 1)}
    left = dict.fromkeys(running, kills)
    killed = 0
    while running:
        time.sleep(rng.choice((0.0, 0.01, 0.03, 0.1)))
        number = rng.choice(list(running))
        if left[number]:
            left[number] -= 1
            running[number].kill(9)
            killed += running[number].wait().code == -9
            running[number] = start(job, number)
        elif running[number].ended():
            ended = running.pop(number).wait()
            assert ended.code in (0, 3), ended.err
    return killed


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--temperature", "0.9", "--seed", "7"), ("-n", "2", "--temperature", "0.9")])
def test_shards_killed_at_random_moments_give_the_output_of_one_run(runs, tmp_path, options):
    case = Case(options=(*options, "--flush-every", "0"), settings=TINY_SPOOL)
    job = Job(runs, case, tmp_path / "job")
    rng = random.Random(str(options))
    killed = 0
    for _ in range(ROUNDS):
        job.prepare()
        killed += finish(job, rng, kills=rng.randint(0, 3))
        report = merge_job(str(job.output))
        assert report.exit_code == 3
        assert read_output(job.output) == job.expected
        assert report.stats["job"]["rows"] == 26
    assert killed > ROUNDS


@pytest.mark.slow
def test_a_waiting_shard_takes_over_from_a_killed_first_reader(runs, tmp_path):
    job = Job(runs, Case(settings=TINY_SPOOL), tmp_path / "job")
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
