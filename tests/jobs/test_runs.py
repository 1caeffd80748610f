"""Over any sequence of runs a completion is generated once, and it is in the output whenever its row is in the input.

Whole jobs with the real tokenizer and no model (`support.runs`).
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchgen import JobConfig, PromptConfig, SamplingParams, plan_job
from batchgen.errors import BatchgenError, UsageError
from support.params import examples
from support.runs import Runs

ROWS = 12


PROMPTS = [f"p{i}" for i in range(40)]


def test_an_empty_input_does_not_empty_a_finished_output(runs):
    runs.run(PROMPTS)
    before = {p.name: p.read_bytes() for p in (runs.output, runs.folder / "o.jsonl.job" / "manifest.json")}
    with pytest.raises(UsageError) as error:
        runs.run([])
    assert str(error.value) == (
        f"40 of the 40 finished rows of {runs.output} are no longer in the input and would be removed from the output; "
        "check the input; --prune removes them, another -o keeps them"
    )
    assert before == {p.name: p.read_bytes() for p in (runs.output, runs.folder / "o.jsonl.job" / "manifest.json")}
    assert runs.run(PROMPTS)[0] == []
    assert runs.run([], prune=True)[1] is not None
    assert runs.rows() == []


@pytest.mark.parametrize("window", [None, 7])
def test_up_to_a_tenth_of_the_rows_may_leave_and_their_results_come_back(runs, window):
    runs.run(PROMPTS, window=window)
    assert runs.run(PROMPTS[:36], window=window)[0] == []
    assert len(runs.rows()) == 36
    with pytest.raises(UsageError, match="20 of the 36 finished rows"):
        runs.run(PROMPTS[:16], window=window)
    assert len(runs.rows()) == 36
    assert runs.run(PROMPTS, window=window)[0] == []
    assert runs.texts() == [f"a: {prompt}" for prompt in PROMPTS]


@pytest.mark.parametrize("window", [None, 1])
def test_a_named_column_may_be_missing_in_the_whole_first_window(runs, window):
    rows = [{"prompt": "p"}, {"prompt": "q"}, {"prompt": "r", "seed": 5}]
    prompts = PromptConfig(row_params=("seed",))
    assert runs.run(rows, window=window, prompts=prompts)[0] == ["p", "q", "r"]
    assert plan_job(JobConfig(
        inputs=runs.folder / "in.jsonl", model=runs.models["a"], window=window, prompts=prompts
    )).figures["rows"] == 3  # fmt: skip
    with pytest.raises(UsageError, match=r"^no row has the column 'top_k' of --row-params"):
        runs.run(rows, window=window, prompts=PromptConfig(row_params=("top_k",)), overwrite=True)


def test_a_finished_job_is_recognised_before_a_tokenizer_is_loaded(runs):
    _, first = runs.run(PROMPTS)
    written = runs.output.stat().st_mtime_ns
    answered, again = runs.run(PROMPTS, stats="figures.json")
    assert (answered, runs.loaded, again.already_finished) == ([], 1, True)
    assert (again.stats, again.exit_code, again.chat) == (first.stats, first.exit_code, first.chat)
    assert json.loads(Path("figures.json").read_text()) == first.stats
    assert runs.output.stat().st_mtime_ns == written
    assert runs.run(PROMPTS, retry=("errors", "length"), prune=True)[1] == again
    assert runs.loaded == 1
    for prune, loaded in ((False, 2), (False, 2), (True, 3)):  # a result that no row has is there until it is pruned
        runs.run(PROMPTS[:39], prune=prune)
        assert runs.loaded == loaded


def test_a_finished_job_in_a_read_only_folder_has_nothing_to_write(runs, monkeypatch):
    runs.run(PROMPTS)
    monkeypatch.setattr("batchgen.jobs.files.target.os.access", lambda path, mode: mode == os.R_OK)
    assert runs.run(PROMPTS)[1].already_finished
    for more, options in ((["new"], {}), ([], {"overwrite": True})):
        with pytest.raises(UsageError, match=r"o\.jsonl cannot be written: .* is read-only; check its permissions"):
            runs.run([*PROMPTS, *more], **options)


def _damage(name: str) -> Callable[[Runs], object]:
    return lambda runs: (runs.folder / "o.jsonl.job" / name).write_bytes(b"x")


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


CHANGES: dict[str, tuple[Callable[[Runs], object], dict[str, Any], int | None]] = {
    "the output is gone": (lambda runs: runs.output.unlink(), {}, 40),
    "the output was changed": (lambda runs: runs.output.write_text("{}"), {}, None),
    "the keys are damaged": (_damage("keys"), {}, 0),
    "the figures are damaged": (_damage("stats.json"), {}, 0),
    "a run was killed while it removed its files": (_damage("output.partial"), {}, 0),
    "another weight": (lambda runs: _append(runs.models["a"] / "model.safetensors"), {}, None),
    "another tokenizer file": (lambda runs: (runs.models["a"] / "merges.txt").write_text("x"), {}, None),
    "other sampling": (lambda runs: None, {"sampling": SamplingParams(max_tokens=5)}, None),
    "other columns": (lambda runs: None, {"keep": ()}, 0),
    "a limit": (lambda runs: None, {"limit": 3}, 0),
    "rows to run again": (lambda runs: None, {"retry": ("length",)}, 4),
    "errors to run again": (lambda runs: None, {"retry": ("errors",)}, 1),
    "all again": (lambda runs: None, {"overwrite": True}, 40),
}
"""A change to a finished job, the options of the next run, and the number of rows that run generates (None: it is refused)."""


@pytest.mark.parametrize("change", CHANGES)
def test_after_any_change_a_job_is_not_taken_for_finished(change, runs):
    runs.reason = lambda prompt: "length" if prompt[-1] == "2" else "stop"
    rows = [*PROMPTS[:39], "fail"]
    runs.run(rows)
    happens, options, expected = CHANGES[change]
    happens(runs)
    try:
        answered = len(runs.run(rows, **options)[0])
    except BatchgenError:
        answered = None
    assert answered == expected
    assert runs.loaded == 2


def test_results_without_a_manifest_are_not_discarded(runs):
    runs.run(PROMPTS, most=21)
    (runs.folder / "o.jsonl.job" / "manifest.json").unlink()
    with pytest.raises(
        UsageError, match=r"has 21 results but no manifest\.json, so the settings that made them are not known"
    ):
        runs.run(PROMPTS)


class AnyRuns(RuleBasedStateMachine):
    """Random sequences of runs. `base` and `model` are set by the test."""

    base: Path
    model: Path

    @initialize()
    def begin(self) -> None:
        folder = self.base / str(len(list(self.base.iterdir())))
        folder.mkdir()
        self.runs = Runs(folder, self.model)
        self.pool: list[str | None] = [*PROMPTS[:8]]
        self.made: dict[str, int] = {}
        """How many completions of each prompt were generated with this job's settings."""
        self.of = "a"

    @rule(data=st.data())
    def change_the_input(self, data: st.DataObject) -> None:
        self.pool = data.draw(st.lists(st.sampled_from([*PROMPTS[:ROWS], None]), max_size=ROWS, unique=False))

    @rule(data=st.data())
    def grow_the_input(self, data: st.DataObject) -> None:
        self.pool = [*self.pool, *data.draw(st.lists(st.sampled_from(PROMPTS[:ROWS]), max_size=3))]

    @rule(data=st.data())
    def reorder_the_input(self, data: st.DataObject) -> None:
        self.pool = data.draw(st.permutations(self.pool))

    @rule(
        limit=st.none() | st.integers(0, ROWS),
        most=st.none() | st.integers(0, 6),
        prune=st.booleans(),
        window=st.sampled_from([None, 3]),
        order=st.sampled_from(["input", "done"]),
    )
    def run(self, limit: int | None, most: int | None, prune: bool, window: int | None, order: str) -> None:
        before = self.runs.texts()
        have = dict(self.made)
        try:
            answered, report = self.runs.run(
                self.pool,
                model=self.of,
                limit=limit,
                most=most,
                prune=prune,
                window=window,
                order=order if window else "input",
            )
        except UsageError as e:
            assert "are no longer in the input" in str(e)  # noqa: PT017 - whether there is one depends on the run
            assert not prune
            assert self.runs.texts() == before
            return
        wanted = {prompt: self.pool.count(prompt) for prompt in self.pool if prompt is not None}
        for prompt in answered:
            self.made[prompt] = self.made.get(prompt, 0) + 1
            assert self.made[prompt] <= wanted[prompt], "a completion was made twice"
        if report is None:
            assert self.runs.texts() == before
            return
        texts = self.runs.texts()
        for prompt, count in wanted.items():
            there = texts.count(f"{self.of}: {prompt}")
            assert there >= min(count, have.get(prompt, 0)), "a completion that was finished is not in the output"
            assert there >= min(count, before.count(f"{self.of}: {prompt}")), "a row was taken from the output"
            if limit is None:
                assert there == count
        if limit is None:
            assert len(texts) == len(self.pool)
        if prune:
            self.made = {prompt: min(n, wanted.get(prompt, 0)) for prompt, n in self.made.items()}

    @precondition(lambda self: self.made)
    @rule()
    def try_another_model(self) -> None:
        before = self.runs.texts()
        other = "b" if self.of == "a" else "a"
        with pytest.raises(UsageError, match=r"was made with other settings: model file model\.safetensors"):
            self.runs.run(self.pool, model=other, most=0)
        assert self.runs.texts() == before

    @rule()
    def start_over_with_another_model(self) -> None:
        self.of = "b" if self.of == "a" else "a"
        answered, _ = self.runs.run(self.pool, model=self.of, overwrite=True)
        self.made = {prompt: answered.count(prompt) for prompt in answered}

    @invariant()
    def the_output_is_of_one_model(self) -> None:
        if hasattr(self, "runs"):
            assert all(text is None or text.startswith(f"{self.of}: ") for text in self.runs.texts())


@pytest.mark.parametrize("count", [examples(4, 8), pytest.param(300, marks=pytest.mark.nightly)])
def test_over_any_runs_a_completion_is_generated_once_kept_and_of_the_right_model(count, tmp_path, tiny_model_dir):
    class Machine(AnyRuns):
        base, model = tmp_path, tiny_model_dir

    Machine.TestCase.settings = settings(
        max_examples=count,
        stateful_step_count=12,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    Machine.TestCase().runTest()
