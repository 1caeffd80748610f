"""Work under way is kept: a job that is killed again and again ends with few more tokens than one that is not, and with the same output."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchgen import EngineConfig, JobConfig, ModelConfig, SamplingParams, run_job
from batchgen.progress import Silent, Snapshot
from batchgen.scheduling.scheduler import Scheduler

TOKENS = 60


class Killed(BaseException):
    """The process is no more."""


class KillAfter(Silent):
    """Kills the run after so many updates in which the model generates, one a step or more."""

    def __init__(self, steps: int) -> None:
        self.left = steps
        self.tokens = 0

    def update(self, now: Snapshot) -> None:
        if now.phase == "generating":
            self.tokens = now.completion_tokens
            self.left -= 1
            if self.left < 0:
                raise Killed


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(SamplingParams(max_tokens=TOKENS, ignore_eos=True), id="greedy"),
        pytest.param(
            SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=1.0, n=2, logprobs=1, seed=3),
            id="several with log-probabilities",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.8, presence_penalty=0.5, stop=("zzzz",)),
            id="penalties and stop strings",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_job_killed_every_few_steps_ends_with_few_more_tokens_and_the_same_output(
    sampling: SamplingParams, tiny_model_dir: Path, write_jsonl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl({"prompt": f"All of them begin so, and this is number {i}"} for i in range(6))

    def config(name: str) -> JobConfig:
        return JobConfig(
            inputs=(str(source),),
            output=str(source.with_name(name)),
            model=ModelConfig(model=str(tiny_model_dir), compile="off"),
            engine=EngineConfig(batch_size=4),
            sampling=sampling,
            flush_every=0.0,
        )

    whole = run_job(config("whole.jsonl"))
    made = [0]
    accept = Scheduler._append

    def counted(self: Scheduler, *args: Any) -> Any:
        made[0] += 1
        return accept(self, *args)

    monkeypatch.setattr(Scheduler, "_append", counted)
    for _ in range(1000):
        progress = KillAfter(25)
        try:
            report = run_job(config("killed.jsonl"), progress)
        except Killed:
            continue
        break
    assert report.stats["job"]["completion_tokens"] == whole.stats["completion_tokens"]
    assert report.stats["completion_tokens"] < whole.stats["completion_tokens"] / 5, (
        "the last run had little left to do"
    )
    rows = [[json.loads(line) for line in Path(r.output).read_text().splitlines()] for r in (report, whole)]
    assert _texts(rows[0]) == _texts(rows[1])
    assert made[0] <= 1.1 * whole.stats["completion_tokens"]


def _texts(rows: list[dict[str, Any]]) -> list[Any]:
    return [(row["text"], row["usage"], [c["text"] for c in row.get("choices", ())]) for row in rows]
