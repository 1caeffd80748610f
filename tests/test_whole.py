"""Jobs in the prefix order of the whole input, with windows so small that requests are sorted on disk."""

import json
import random
import sqlite3
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from batchgen import EngineConfig, JobConfig, PromptConfig, SamplingParams, run_job
from batchgen.config import InputLimits
from batchgen.errors import InputCorrupt, Interrupted, OutputError
from batchgen.jobs.order.sorted_requests import SortedRequests
from batchgen.jobs.order.windows import PlannedWindows
from batchgen.recording import JobRecord
from support.harness import stored_keys
from support.params import slow_but
from support.progress import Recorder, in_phase, interrupt, rows_done
from support.records import json_rows

pytestmark = pytest.mark.usefixtures("loaded_once")

Rows = list[dict[str, Any]]
GROUPS = 7
SMALL = InputLimits(read_rows=4, run_rows=10, window_leaves=10, batch_rows=3)


def shuffled(count: int) -> Rows:
    rows = [
        {"prompt": f"All of them begin so. Group {i % GROUPS} has a head of its own: {i}", "n": i} for i in range(count)
    ]
    random.Random(1).shuffle(rows)
    return rows


def config_of(model: Path, source: Path, name: str = "out.jsonl", **options: Any) -> JobConfig:
    options = {"sampling": SamplingParams(max_tokens=4), "limits": SMALL} | options
    output = str(source.with_name(name))
    return JobConfig(inputs=source, model=model, output=output, **options)


def read_counts(progress: Recorder) -> list[int]:
    """The numbers of rows that were shown as read or written, without repeats."""
    passed = (now.rows_passed for now in progress.seen if now.rows_passed is not None)
    return [rows for rows, _ in groupby(passed)]


def check_goes_on(config: JobConfig, source: Path) -> tuple[Recorder, dict[str, Any]]:
    """Runs the job to its end, and compares its output with that of a job that nothing has stopped. Returns what it told, and its figures."""
    progress = Recorder()
    stats = run_job(config, progress).stats
    run_job(expected := replace(config, output=str(source.with_name("expected.jsonl"))))
    assert Path(str(config.output)).read_bytes() == Path(str(expected.output)).read_bytes()
    return progress, stats


def stopped(config: JobConfig, done: int) -> Path:
    """Runs the job and interrupts it when `done` rows are done. Returns the job's folder."""
    with pytest.raises(Interrupted):
        run_job(replace(config, flush_every=0.0), Recorder(rows_done(done), interrupt))
    return Path(f"{config.output}.job")


GREEDY, FORKS = SamplingParams(max_tokens=4), SamplingParams(max_tokens=6, temperature=1.0, n=2)


@pytest.mark.parametrize("sampling", slow_but([FORKS], [GREEDY, FORKS]))
def test_several_windows_give_the_output_and_the_prefill_of_one(sampling, tiny_model_dir, write_jsonl):
    source = write_jsonl(shuffled(45))
    whole = run_job(config_of(tiny_model_dir, source, sampling=sampling)).stats
    one = run_job(config_of(tiny_model_dir, source, "one.jsonl", sampling=sampling, window=50)).stats
    few = run_job(config_of(tiny_model_dir, source, "few.jsonl", sampling=sampling, window=10)).stats
    outputs = {source.with_name(name).read_bytes() for name in ("out.jsonl", "one.jsonl", "few.jsonl")}
    assert len(outputs) == 1
    assert whole["prefill_tokens"] == whole["prefill_tokens_min"] == one["prefill_tokens_min"] < few["prefill_tokens"]
    assert (whole["rows"], whole["rows_ok"], whole["rows_resumed"]) == (45, 45, 0)


def test_a_stopped_run_resumes_without_sorting_again(tiny_model_dir, write_jsonl):
    source = write_jsonl([*shuffled(60), {"prompt": ""}, {"other": 1}])
    config = config_of(tiny_model_dir, source)
    folder = stopped(config, 25)
    assert list((folder / "sorted").iterdir())
    progress, stats = check_goes_on(config, source)
    assert read_counts(progress) == [*range(4, 62, 4), 62]  # only the second reading
    assert stats["rows_resumed"] >= 20
    assert stats["job"] | {"seconds": 0} == stats["job"] | {
        "seconds": 0, "rows": 62, "rows_ok": 61, "rows_failed": 1, "runs": 2,
    }  # fmt: skip


@pytest.mark.parametrize("damage", slow_but(["flipped"], ["gone", "cut", "flipped"]))
def test_damaged_sorted_requests_are_made_again(damage, tiny_model_dir, write_jsonl):
    source = write_jsonl([*shuffled(40), {"other": 1}])
    config = config_of(tiny_model_dir, source)
    path = stopped(config, 25) / "sorted" / "run-00002"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flipped" else data[:-9])
    assert read_counts(check_goes_on(config, source)[0]).count(41) == 2


@pytest.mark.parametrize(
    "change", [{"limit": 39}, {"prompts": PromptConfig(priority_column="n")}], ids=["limit", "priority"]
)
def test_sorted_requests_of_another_input_are_made_again(change, tiny_model_dir, write_jsonl):
    source = write_jsonl(shuffled(40))
    stopped(config_of(tiny_model_dir, source), 25)
    progress = Recorder()
    rows = run_job(config_of(tiny_model_dir, source, **change), progress).stats["job"]["rows"]
    assert rows == 40 if "limit" not in change else rows in (39, 40)  # the last row may have a result already
    assert len(read_counts(progress)) >= 20  # both readings, of four rows at a time


def test_a_stored_reading_knows_the_rows_of_the_input_and_those_that_had_results_before(tiny_model_dir, write_jsonl):
    rows = shuffled(60)
    source = write_jsonl(rows[:30])
    config = config_of(tiny_model_dir, source)
    run_job(config)
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stopped(config, 40)
    progress = Recorder()
    job = run_job(config, progress).stats["job"]
    assert read_counts(progress).count(60) == 1  # only the second reading
    assert {now.rows_total for now in progress.seen if now.phase == "generating"} == {60}
    assert (job["rows"], job["finish_reasons"]["length"] + job["finish_reasons"]["stop"]) == (60, 60)


def test_the_end_of_a_window_runs_together_with_the_next(tiny_model_dir, write_jsonl, monkeypatch):
    """Each window of ten has one long row, which would otherwise decode alone."""
    rows = [row | {"sampling_params": {"max_tokens": 40 if i % 10 == 0 else 4}} for i, row in enumerate(shuffled(60))]
    source = write_jsonl(rows)
    sampling = SamplingParams(ignore_eos=True)
    engine = EngineConfig(batch_size=4, speculate="off")  # drafts depend on the clock
    # Whether the next window is planned in time depends on threads. Here it always is.
    monkeypatch.setattr(PlannedWindows, "next_if_ready", _next_when_planned)
    together = run_job(config_of(tiny_model_dir, source, "together.jsonl", sampling=sampling, engine=engine))
    monkeypatch.setattr(PlannedWindows, "next_if_ready", lambda self, waiting: None)
    apart = run_job(config_of(tiny_model_dir, source, "apart.jsonl", sampling=sampling, engine=engine))
    assert Path(together.output).read_bytes() == Path(apart.output).read_bytes()
    assert together.stats["steps"] < 0.75 * apart.stats["steps"]
    for figure in ("prefill_tokens", "prefill_tokens_min", "completion_tokens"):
        assert together.stats[figure] == apart.stats[figure]


def _next_when_planned(windows: Any, waiting: int) -> Any:
    found = next_if_ready(windows, waiting)
    if found is None and windows._ahead is not None and not waiting:
        wait([windows._ahead])
        found = next_if_ready(windows, waiting)
    return found


next_if_ready = PlannedWindows.next_if_ready


def test_a_window_that_cannot_be_read_fails_after_the_previous_one_is_done(tiny_model_dir, write_jsonl, monkeypatch):
    def broken(self: Any) -> Iterator[Any]:
        yield next(windows(self))
        raise OutputError("the disk is gone")

    windows = SortedRequests.windows
    monkeypatch.setattr(SortedRequests, "windows", broken)
    progress = Recorder()
    with pytest.raises(OutputError, match="the disk is gone"):
        run_job(config_of(tiny_model_dir, write_jsonl(shuffled(40))), progress)
    monkeypatch.setattr(SortedRequests, "windows", windows)
    stats = run_job(config_of(tiny_model_dir, write_jsonl(shuffled(40)))).stats
    assert stats["rows_resumed"] == 10


def test_a_signal_ends_the_wait_for_the_next_window_at_once(tiny_model_dir, write_jsonl, monkeypatch):
    planned = []

    def windows(requests: SortedRequests) -> Iterator[list[Any]]:
        interrupt()
        planned.append(requests)
        yield from ()

    monkeypatch.setattr(SortedRequests, "windows", windows)
    with pytest.raises(Interrupted):
        run_job(config_of(tiny_model_dir, write_jsonl(shuffled(40))))
    assert planned == []


def test_rows_with_lower_priority_values_finish_first(tiny_model_dir, write_jsonl):
    source = write_jsonl(row | {"p": row["n"] % 2} for row in shuffled(60))
    config = config_of(tiny_model_dir, source, prompts=PromptConfig(priority_column="p"))
    folder = stopped(config, 28)
    done = stored_keys(folder)[:20]
    odd = config_of(tiny_model_dir, write_jsonl((r for r in shuffled(60) if r["n"] % 2), "odd.jsonl"), "odd.out.jsonl")
    folder = stopped(odd, 29)
    assert len(done) == 20
    assert not set(stored_keys(folder)) & set(done)


@pytest.mark.parametrize("change", ["longer", "gone"])
def test_an_input_that_changes_during_the_job_ends_it_and_no_result_is_lost(change, tiny_model_dir, write_jsonl):
    source = write_jsonl(shuffled(30))
    text = source.read_text()
    config = config_of(tiny_model_dir, source)

    longer = text + json.dumps({"prompt": "one more"}) + "\n"
    action = source.unlink if change != "longer" else lambda: source.write_text(longer)
    with pytest.raises(InputCorrupt) as error:
        run_job(config, Recorder(rows_done(20), action))
    assert str(error.value) == (
        f"{source} changed while the job was running; run the same command again: the results of rows that still exist are kept"
    )
    assert not Path(str(config.output)).exists()
    source.write_text(longer)
    assert run_job(config).stats["rows"] == 1
    assert len(json_rows(str(config.output))) == 31


def test_a_damaged_result_in_the_database_is_noticed_and_generated_again(tiny_model_dir, write_jsonl, monkeypatch):
    config = config_of(tiny_model_dir, write_jsonl(shuffled(30)))
    database = Path(f"{config.output}.job") / "results.sqlite"

    def damage() -> None:
        with closing(sqlite3.connect(database)) as db:
            db.execute("UPDATE results SET checksum = checksum + 1 WHERE rowid = 7")
            db.commit()

    with pytest.raises(OutputError) as error:
        run_job(config, Recorder(in_phase("writing"), damage))
    assert str(error.value) == (
        f"the results of {config.output} are damaged: 1 of them cannot be read; "
        "run the same command again: only these rows are generated again"
    )
    stats = run_job(config).stats
    assert (stats["rows"], stats["rows_resumed"]) == (1, 29)


BY_NUMBER = {"prompts": PromptConfig(priority_column="n")}


@pytest.mark.parametrize(
    ("options", "rows"),
    [({}, 30), ({"window": 10}, 10), (BY_NUMBER, 10), ({"shard": "1/2"}, 30), ({"shard": "1/2"} | BY_NUMBER, None)],
    ids=["prefix order", "window", "priority", "shard", "shard, priority"],
)
def test_the_recorded_tree_is_that_of_all_rows_if_their_windows_follow_each_other(
    options, rows, tiny_model_dir, write_jsonl
):
    config = config_of(tiny_model_dir, write_jsonl(shuffled(30)), **options)
    run_job(config)
    tree = JobRecord.load(Path(f"{config.output}.job")).tree
    assert (None if tree is None else tree["rows"]) == rows
