"""Partial completions are kept: a job that is killed repeatedly generates few extra tokens and gives the same output."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchgen import EngineConfig, JobConfig, JobReport, ModelConfig, SamplingParams, run_job
from batchgen.progress import Silent, Snapshot
from batchgen.scheduling.scheduler import Scheduler
from support.params import slow_but
from support.runs import Killed

TOKENS = 60


class KillAfter(Silent):
    """Kills the run after `steps` progress updates while the model generates."""

    def __init__(self, steps: int) -> None:
        self.left = steps
        self.tokens = 0

    def update(self, now: Snapshot) -> None:
        if now.phase == "generating":
            self.tokens = now.completion_tokens
            self.left -= 1
            if self.left < 0:
                raise Killed


class Jobs:
    """Runs one job, and counts the tokens that were generated for it."""

    def __init__(self, source: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source, self.model = source, model
        self.tokens = 0
        accept = Scheduler._append

        def counted(scheduler: Scheduler, *args: Any) -> Any:
            self.tokens += 1
            return accept(scheduler, *args)

        monkeypatch.setattr(Scheduler, "_append", counted)

    def run(self, name: str, sampling: SamplingParams, progress: Silent | None = None, **options: Any) -> JobReport:
        config = JobConfig(
            inputs=(str(self.source),),
            output=str(self.source.with_name(name)),
            model=ModelConfig(model=str(self.model), compile="off"),
            engine=EngineConfig(batch_size=4),
            sampling=sampling,
            **options,
        )
        return run_job(config, progress)

    def run_killed(self, name: str, sampling: SamplingParams, steps: int, **options: Any) -> tuple[JobReport, int]:
        """Runs the job, each time killed after `steps` steps, until a run finishes first. Returns its report and the number of kills."""
        for kills in range(1000):
            try:
                return self.run(name, sampling, KillAfter(steps), **options), kills
            except Killed:
                continue
        raise AssertionError("the job makes no progress")


@pytest.fixture
def jobs(write_jsonl: Callable[..., Path], tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    rows = ({"prompt": f"And {i}"} for i in range(8))
    return Jobs(write_jsonl(rows), tiny_model_dir, monkeypatch)


SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=TOKENS, ignore_eos=True),
    "several with log-probabilities": SamplingParams(
        max_tokens=TOKENS, ignore_eos=True, temperature=1.0, n=2, logprobs=1, seed=3
    ),
    "penalties and stop strings": SamplingParams(
        max_tokens=TOKENS, ignore_eos=True, temperature=0.8, presence_penalty=0.5, stop=("zzzz",)
    ),
}


@pytest.mark.parametrize("name", slow_but({"greedy"}, SAMPLINGS))
def test_a_job_killed_every_few_steps_gives_the_same_output_and_loses_only_the_last_steps_tokens(name, jobs):
    whole = jobs.run("whole.jsonl", SAMPLINGS[name])
    jobs.tokens = 0
    report, kills = jobs.run_killed("killed.jsonl", SAMPLINGS[name], steps=25, flush_every=0.0)
    assert kills >= 3
    assert report.stats["job"]["completion_tokens"] == whole.stats["completion_tokens"]
    assert report.stats["completion_tokens"] < whole.stats["completion_tokens"] / 2, "most was kept"
    assert _rows(report) == _rows(whole)
    assert jobs.tokens <= whole.stats["completion_tokens"] + 4 * kills


def _rows(report: JobReport) -> list[Any]:
    rows = map(json.loads, Path(report.output).read_text().splitlines())
    return [(row["text"], row["usage"], [c["text"] for c in row.get("choices", ())]) for row in rows]
