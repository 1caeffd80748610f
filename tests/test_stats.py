"""The figures of a run, and their sums over the runs of a job."""

import json
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from batchgen.errors import RowError, UsageError
from batchgen.jobs.files.disk import check_file
from batchgen.result import Result
from batchgen.stats import (
    EngineStats,
    RowCounts,
    RunFigures,
    Setting,
    figures,
    side_by_side,
)
from batchgen.version import version_of

SETTING = Setting(model="m", dtype="float32", device="cpu", attention="cascade")


DONE = Result(row=0, text="x", finish_reason="stop", prompt_tokens=20, completion_tokens=5)
FAILED = Result.from_error(0, RowError("does_not_fit", "too big"), prompt_tokens=1000)


def run_of(rows: int, failed: int = 0) -> RunFigures:
    run = RunFigures(prefill_tokens_min=40, groups=2, prefix_nodes=3)
    for _ in range(rows):
        run.new.add(DONE)
    for _ in range(failed):
        run.new.add(FAILED)
    run.seconds["generate"] = 2.0
    return run


def engine_of(completion_tokens: int = 50) -> EngineStats:
    return EngineStats(
        prefill_tokens=50,
        recomputed_tokens=4,
        completion_tokens=completion_tokens,
        steps=10,
        decode_sequences=45,
        attention_parts=25,
        preemptions=1,
        kv_bytes_peak=1000,
        kv_bytes_unshared=3000,
        forward_seconds=1.5,
    )


def test_the_page_of_results_documents_every_figure_in_order():
    page = (Path(__file__).parent.parent / "docs" / "reference" / "results.md").read_text("utf-8")
    table = page.partition("## Figures")[2]
    first, meanings = zip(*(line.split(" | ", 1) for line in table.splitlines() if line.startswith("| `")), strict=True)
    stats = figures(run_of(10), engine_of(), SETTING)
    assert [name for cell in first for name in re.findall(r"`(\w+)`", cell)] == [*stats, "workers", "shards"]
    for name in ("seconds", "job"):
        said = next(text for cell, text in zip(first, meanings, strict=True) if cell == f"| `{name}`")
        assert stats[name].keys() <= set(re.findall(r"`(\w+)`", said)) | {"total"}, name


def test_figures_of_engines_side_by_side_are_added_but_the_time_in_the_model_is_their_mean():
    one = replace(engine_of(), drafted=Counter(grammar=4), accepted=Counter(grammar=3), parts={"layers": 2})
    other = replace(engine_of(), drafted=Counter(grammar=1, prompt=2), forward_seconds=0.5)
    both = side_by_side([other, one])
    assert (both.steps, both.forward_seconds, both.parts) == (20, 1.0, {"layers": 2})
    stats = figures(run_of(10), both, SETTING)
    assert (stats["drafted_tokens"], stats["accepted_tokens"]) == (7, 3)
    assert stats["drafts"] == {
        "grammar": {"drafted": 5, "accepted": 3},
        "outputs": {"drafted": 0, "accepted": 0},
        "prompt": {"drafted": 2, "accepted": 0},
    }
    assert side_by_side([]) == EngineStats()


def test_figures_of_a_run_are_exact():
    stats = figures(run_of(10, failed=2), engine_of(), SETTING)
    assert stats["schema"] == "batchgen.stats/1"
    assert (stats["rows"], stats["rows_ok"], stats["rows_failed"], stats["rows_resumed"]) == (12, 10, 2, 0)
    assert stats["finish_reasons"] == {"stop": 10, "length": 0, "timeout": 0, "error": 2}
    assert stats["prompt_tokens"] == 200  # without those of failed rows, which never ran
    assert stats["prefill_efficiency"] == 0.8
    assert stats["shared_fraction"] == 0.75
    assert stats["completion_tokens_per_s"] == 25.0
    assert stats["total_tokens_per_s"] == 125.0
    assert stats["rows_per_s"] == 6.0
    assert stats["mean_decode_batch"] == 4.5
    assert stats["attention_parts_per_step"] == 2.5
    assert stats["seconds"]["forward"] == 1.5
    assert (stats["groups"], stats["prefix_nodes"], stats["kv_bytes_unshared"]) == (2, 3, 3000)
    assert stats["memory_bytes_peak"] > 10_000_000


def test_prefill_tokens_min_never_exceeds_what_was_run():
    run = run_of(10)
    run.prefill_tokens_min = 5000  # planned, but stopped before most of it ran
    stats = figures(run, engine_of(), SETTING)
    assert (stats["prefill_tokens_min"], stats["prefill_efficiency"]) == (50, 1.0)


def test_the_job_figures_sum_all_runs():
    first = figures(run_of(4, failed=1), engine_of(20), SETTING)
    second_run = run_of(6)
    for _ in range(4):
        second_run.resumed.add(replace(DONE, finish_reason="length", truncated=True))
    second_run.resumed.add(FAILED)
    second = figures(second_run, engine_of(30), SETTING, earlier=first)
    assert (second["rows"], second["rows_resumed"]) == (6, 5)
    job = second["job"]
    assert (job["runs"], job["rows"], job["rows_ok"], job["rows_failed"]) == (2, 11, 10, 1)
    assert (job["prompt_tokens"], job["completion_tokens"]) == (200, 50)
    assert job["finish_reasons"] == {"stop": 6, "length": 4, "timeout": 0, "error": 1}
    assert (second["rows_truncated"], job["rows_truncated"]) == (0, 4)
    assert (job["prefill_tokens"], job["steps"], job["preemptions"]) == (100, 20, 2)
    assert job["seconds"]["generate"] == 4.0
    assert job["kv_bytes_peak"] == 1000


def test_counts_of_rows_come_back_from_json():
    counts = RowCounts()
    for result in (DONE, FAILED, replace(DONE, text=None, reasoning="hm", truncated=True)):
        counts.add(result)
    assert (counts.rows, counts.ok, counts.failed, counts.truncated, counts.unanswered) == (3, 2, 1, 1, 1)
    assert RowCounts(**json.loads(json.dumps(vars(counts)))) == counts


@pytest.mark.parametrize(
    ("writable", "refused"), [({"folder"}, False), ({"file.json"}, False), ({"stats.json"}, True), (set(), True)]
)
def test_a_stats_file_that_can_neither_be_replaced_nor_written_is_refused(tmp_path, monkeypatch, writable, refused):
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "file.json"
    monkeypatch.setattr(os, "access", lambda place, _: Path(place).name in writable)
    if not refused:
        check_file("--stats", str(path))
        return
    with pytest.raises(UsageError) as error:
        check_file("--stats", str(path))
    message = f"--stats {path} cannot be written: permission denied or a read-only disk; name another file"
    assert str(error.value) == message


def test_a_missing_package_has_no_version():
    assert version_of("no-such-package-anywhere") == "not installed"
    assert version_of("pytest") == pytest.__version__
