"""Equal rows whose results cannot differ are computed once. Whole jobs with the real tokenizer and no model (`support.runs`)."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from batchgen import JobReport, SamplingParams
from batchgen.config import INPUT_LIMITS
from batchgen.errors import UsageError
from batchgen.jobs.order.requests import FirstReading
from batchgen.request import Leaf
from batchgen.result import Result
from support.runs import Oracle

PROMPTS = ["p0", "p1", "p0", "p2", "p0", "p1", "p3", "p0"]
"""Rows of four different prompts."""
WINDOWS = pytest.mark.parametrize("window", [None, 3])


def counts(report: JobReport | None) -> tuple[int, ...]:
    """`rows`, `rows_resumed` and `rows_equal` of a run, and `rows` and `rows_equal` of its job."""
    stats = report.stats
    names = [(stats, ("rows", "rows_resumed", "rows_equal")), (stats["job"], ("rows", "rows_equal"))]
    return tuple(figures[name] for figures, given in names for name in given)


@WINDOWS
def test_equal_rows_run_once_and_all_have_the_result(runs, window):
    answered, report = runs.run(PROMPTS, window=window)
    assert sorted(answered) == ["p0", "p1", "p2", "p3"]
    assert runs.texts() == [f"a: {prompt}" for prompt in PROMPTS]
    assert [row["id"] for row in runs.rows()] == [*range(8)]
    assert counts(report) == (8, 0, 4, 8, 4)
    assert report.stats["finish_reasons"]["stop"] == 8
    # A completion has one token, and the engine of the test counts none.
    assert report.stats["job"]["completion_tokens"] == 4
    assert report.stats["prompt_tokens"] == sum(row["usage"]["prompt_tokens"] for row in runs.rows())


@WINDOWS
def test_a_limit_takes_no_equal_rows_after_it_and_takes_away_none(runs, window):
    runs.run(PROMPTS, window=window, limit=2)
    answered, report = runs.run(PROMPTS, window=window, limit=5)
    assert (answered, runs.texts()) == (["p2"], [f"a: {prompt}" for prompt in PROMPTS[:5]])
    assert counts(report) == (1, 4, 0, 5, 2)
    runs.run(PROMPTS, window=window)
    assert runs.run([*PROMPTS, "p0"], window=window, limit=4)[0] == []
    assert runs.texts() == [f"a: {prompt}" for prompt in PROMPTS]


@WINDOWS
def test_a_limit_takes_away_no_equal_rows_that_were_moved(runs, window):
    runs.run(PROMPTS[:5], window=window)
    answered, report = runs.run(["q0", "q1", "p4", *PROMPTS[::-1]], window=window, limit=1)
    assert answered == ["q0"]
    assert runs.texts() == [f"a: {prompt}" for prompt in ("q0", "p0", "p1", "p0", "p2", "p0")]
    assert counts(report) == (1, 5, 0, 6, 2)


@WINDOWS
@pytest.mark.parametrize("most", range(4))
def test_a_killed_job_runs_equal_rows_once_in_all(runs, window, most):
    first, _ = runs.run(PROMPTS, window=window, most=most)
    second, report = runs.run(PROMPTS, window=window)
    assert sorted([*first, *second]) == ["p0", "p1", "p2", "p3"]
    assert runs.texts() == [f"a: {prompt}" for prompt in PROMPTS]
    assert (report.stats["rows"] + report.stats["rows_resumed"], report.stats["job"]["rows_equal"]) == (8, 4)


def test_a_reading_that_is_used_again_knows_the_equal_rows(runs, monkeypatch):
    monkeypatch.setattr("batchgen.config.INPUT_LIMITS", replace(INPUT_LIMITS, run_rows=2, window_leaves=2))
    runs.run(PROMPTS, most=2)
    monkeypatch.setattr(FirstReading, "_read_all", None)
    answered, report = runs.run(PROMPTS)
    assert len(answered) == 2
    assert (report.stats["rows"] + report.stats["rows_resumed"], report.stats["job"]["rows_equal"]) == (8, 4)


class Backwards(Oracle):
    def add(self, leaves: Sequence[Leaf], plan: Any, on_result: Callable[[Result], None]) -> None:
        super().add(leaves[::-1], plan, on_result)


def test_order_done_writes_earlier_results_then_new_ones_as_they_come_then_equal_rows(runs):
    runs.engine = Backwards
    assert runs.run(PROMPTS, order="done", most=2)[0] == ["p3", "p2"]
    runs.run(PROMPTS, order="done")
    assert runs.texts() == [f"a: {prompt}" for prompt in ["p2", "p3", "p1", "p0", "p0", "p0", "p1", "p0"]]


def test_rows_that_leave_a_group_of_equal_rows_count_as_rows(runs):
    rows = ["p0"] * 30 + [f"p{i}" for i in range(1, 21)]
    runs.run(rows)
    with pytest.raises(UsageError, match="29 of the 50 finished rows"):
        runs.run(rows[29:])
    _, report = runs.run(rows[2:])
    assert counts(report) == (0, 48, 0, 48, 27)
    assert not (runs.folder / "o.jsonl.job" / "kept.sqlite").exists()


PARAMS: dict[str, tuple[list[dict[str, Any]], int]] = {
    "sampled": ([{}, {}], 2),
    "other parameters": ([{"temperature": 0, "max_tokens": 2}, {"temperature": 0, "max_tokens": 3}], 2),
    "greedy and sampled": ([{"temperature": 0}, {}, {"temperature": 0}], 2),
    "sampled labels": ([{"choices": ["a", "b"]}] * 2, 2),
    "labels": ([{"choices": ["a", "b"], "temperature": 0}] * 2, 1),
}
"""Parameters of rows with the same prompt, beside the job's temperature of 1, and how many of the rows run."""


@pytest.mark.parametrize("case", PARAMS)
def test_only_rows_whose_results_cannot_differ_run_once(case, runs):
    params, expected = PARAMS[case]
    rows = [{"prompt": "p", "sampling_params": own} for own in params]
    answered, _ = runs.run(rows, sampling=SamplingParams(max_tokens=4, temperature=1.0))
    assert len(answered) == expected


@pytest.mark.parametrize("kept", [1 << 26, 0])
def test_on_standard_output_equal_rows_of_later_windows_have_a_kept_result(kept, runs, monkeypatch, capfdbinary):
    monkeypatch.setattr("batchgen.jobs.stdout_job._RECENT_BYTES", kept)
    runs.output = "-"  # type: ignore[assignment]
    answered, report = runs.run(PROMPTS, window=3)
    texts = [json.loads(line)["text"] for line in capfdbinary.readouterr().out.splitlines()]
    assert texts == [f"a: {prompt}" for prompt in PROMPTS]
    assert [answered.count(prompt) for prompt in ("p0", "p1", "p2", "p3")] == ([1] * 4 if kept else [3, 2, 1, 1])
    assert counts(report) == (8, 0, 4 if kept else 1, 8, 4 if kept else 1)
