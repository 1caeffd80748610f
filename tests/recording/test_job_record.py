"""The record of a job is of bounded size, and survives whatever happens to its file."""

import json

import numpy as np

from batchgen.prefix import Outline
from batchgen.recording import JobRecord, RunRecorder, tree_record
from batchgen.recording.job_record import FILE, MAX_POINTS, MAX_RUNS, MAX_TEXT, MIN_TEXT, TEXT_CHARACTERS
from batchgen.stats import EngineStats


class Engine:
    """An engine that has made a hundred tokens a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            completion_tokens=round(self.now * 100), prefill_tokens=7, kv_bytes=5, process_bytes_peak=1000
        )


def recorder_of(engine, kept, max_points=400, tree=lambda: None):
    return RunRecorder(
        "", tree=tree, decode=str, keep=lambda run, tree: kept.append((run, tree)), clock=engine.clock,
        memory=lambda: 24, max_points=max_points,
    )  # fmt: skip


def test_a_run_is_recorded_as_sums_at_moments():
    engine, kept = Engine(), []
    recorder = recorder_of(engine, kept)
    for engine.now in (0.0, 0.01, 0.02, 0.06, 0.5):
        recorder.see(engine.stats)
    assert kept == []
    recorder.end(engine.stats)
    ((run, tree),) = kept
    assert run["seconds"] == [0.0, 0.06, 0.5, 0.5]
    assert run["completion_tokens"] == [0, 6, 50, 50]
    assert (run["prefill_tokens"], run["memory_bytes"], run["kv_bytes"]) == ([7] * 4, [1024] * 4, [5] * 4)
    assert tree is None


def test_a_long_run_has_no_more_points_than_a_short_one():
    engine, kept = Engine(), []
    recorder = recorder_of(engine, kept, max_points=10)
    for i in range(10_000):
        engine.now = i / 10
        recorder.see(engine.stats)
    recorder.end(engine.stats)
    seconds = kept[-1][0]["seconds"]
    assert (seconds[0], seconds[-1]) == (0.0, 999.9)
    assert 5 <= len(seconds) <= 10
    assert len(kept) == 101  # after a second, then every ten seconds, and at the end


def run_of(label, started, points):
    names = ("seconds", "completion_tokens", "prefill_tokens", "scored_tokens", "memory_bytes", "kv_bytes")
    return {"label": label, "started": started, **{name: list(range(points)) for name in names}}


def test_a_run_takes_the_place_of_its_own_earlier_record():
    record = JobRecord()
    record.keep(run_of("", "1", 2), {"rows": 10})
    record.keep(run_of("", "1", 3), {"rows": 20})
    record.keep(run_of("", "2", 1), {"rows": 5})
    assert [(run["started"], len(run["seconds"])) for run in record.runs] == [("1", 3), ("2", 1)]
    assert record.tree == {"rows": 20}  # of the run that planned the most rows


def test_many_runs_are_thinned():
    record = JobRecord()
    for i in range(MAX_RUNS + 5):
        record.keep(run_of("", str(i), 401), None)
    assert [run["started"] for run in record.runs] == [str(i) for i in range(5, MAX_RUNS + 5)]
    assert sum(len(run["seconds"]) for run in record.runs) <= MAX_POINTS
    assert all(run["seconds"][0] == 0 and run["seconds"][-1] == 400 for run in record.runs)


def test_a_damaged_or_missing_record_is_an_empty_one(tmp_path):
    assert JobRecord.load(tmp_path) == JobRecord()
    for text in ("", "[]", "{}", '{"schema": "another"}', '{"schema": "batchgen.record/1", "other": 1}', "\x00"):
        (tmp_path / FILE).write_text(text)
        assert JobRecord.load(tmp_path) == JobRecord()
    JobRecord().save(tmp_path / "no such folder")


def test_the_texts_of_a_tree_are_bounded():
    outline = Outline()
    for i in range(2000):  # a thousand nodes of 9,000 tokens each
        outline.add(np.array([*[i // 2] * 9000, i % 2], dtype=np.int32))
    record = tree_record(outline.tree(), lambda ids: "x" * (5 * len(ids)))
    assert len(record["texts"]) == 1000
    assert all(text.endswith("…") for text in record["texts"])
    assert max(map(len, record["texts"])) == MAX_TEXT + 1
    assert min(map(len, record["texts"])) == MIN_TEXT + 1
    assert sum(map(len, record["texts"])) < TEXT_CHARACTERS + MAX_TEXT + 1000 * (MIN_TEXT + 1)
    assert len(json.dumps(record)) < 1_000_000
