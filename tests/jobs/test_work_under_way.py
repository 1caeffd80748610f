"""Partial completions are kept: a job that is killed repeatedly generates few extra tokens and gives the same output."""

from itertools import count
from typing import Any

import pytest

from batchgen import EngineConfig, JobConfig, JobReport, SamplingParams, run_job
from batchgen.scheduling.scheduler import Scheduler
from support.params import slow_but
from support.progress import Recorder
from support.records import json_rows
from support.runs import Killed

pytestmark = pytest.mark.usefixtures("loaded_once")

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "several with log-probabilities": {"temperature": 1.0, "n": 2, "logprobs": 1, "seed": 3},
    "penalties and stop strings": {"temperature": 0.8, "presence_penalty": 0.5, "stop": ("zzzz",)},
}


def killer(steps: int) -> Recorder:
    """Kills the run after `steps` progress updates while the model generates."""

    def kill() -> None:
        raise Killed

    left = count(-steps)
    return Recorder(lambda now: now.phase == "generating" and next(left) >= 0, kill)


@pytest.mark.parametrize("name", slow_but({"greedy"}, SAMPLINGS))
def test_a_job_killed_every_few_steps_gives_the_same_output_and_loses_only_the_last_steps_tokens(
    name,
    write_jsonl,
    tiny_model_dir,
    monkeypatch,
):
    tokens: list[int] = []
    accept = Scheduler._append
    monkeypatch.setattr(Scheduler, "_append", lambda *given: tokens.append(1) or accept(*given))
    source = write_jsonl({"prompt": f"And {i}"} for i in range(8))
    sampling = SamplingParams(max_tokens=60, ignore_eos=True, **SAMPLINGS[name])

    def run(output: str, progress: Recorder | None = None, **options: Any) -> JobReport:
        return run_job(
            JobConfig(
                inputs=source, output=source.with_name(output), model=tiny_model_dir, sampling=sampling,
                engine=EngineConfig(batch_size=4), **options,
            ),
            progress,
        )  # fmt: skip

    whole = run("whole.jsonl")
    tokens.clear()
    report, kills = None, 0
    while report is None:
        try:
            report = run("killed.jsonl", killer(25), flush_every=0.0)
        except Killed:
            kills += 1
            assert kills < 1000, "the job makes no progress"
    assert kills >= 3
    assert report.stats["job"]["completion_tokens"] == whole.stats["completion_tokens"]
    assert report.stats["completion_tokens"] < whole.stats["completion_tokens"] / 2, "most was kept"
    assert len(tokens) <= whole.stats["completion_tokens"] + 4 * kills
    killed, uninterrupted = (
        [(row["text"], row["usage"], [c["text"] for c in row.get("choices", ())]) for row in json_rows(output)]
        for output in (report.output, whole.output)
    )
    assert killed == uninterrupted
