"""Jobs on a tiny model: what they write, count and keep, and how they resume."""

import json
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen import EngineConfig, JobConfig, PromptConfig, SamplingParams, run_job
from batchgen.engine.engine import Engine
from batchgen.errors import InputCorrupt, Interrupted, TooManyErrors
from batchgen.model import loader
from batchgen.progress import GENERATING
from batchgen.prompts import PromptBuilder
from support.progress import Recorder, in_phase, interrupt, rows_done
from support.records import json_rows

pytestmark = pytest.mark.usefixtures("loaded_once")

SHARED = "A shared prefix that is long enough for several chunks of sixteen tokens. "
Rows = list[dict[str, Any]]
Write = Callable[..., Path]


def prompts(count: int) -> Rows:
    return [{"prompt": f"{SHARED}{'ab'[i % 2]} question {i}", "n": i} for i in range(count)]


def config_of(model: Path, source: Path, **options: Any) -> JobConfig:
    options.setdefault("sampling", SamplingParams(max_tokens=4))
    options.setdefault("output", str(source.with_name("out.jsonl")))
    return JobConfig(inputs=source, model=model, **options)


@pytest.fixture
def whole(tiny_model_dir: Path, write_jsonl: Write) -> Rows:
    """The output rows of 12 prompts, run in one go."""
    source = write_jsonl(prompts(12), "whole.jsonl")
    report = run_job(config_of(tiny_model_dir, source, output=str(source.with_name("whole.out.jsonl"))))
    return json_rows(report.output)


@pytest.mark.parametrize("sampling", [{}, {"n": 2}, {"logprobs": 0}])
def test_rows_that_are_done_are_no_longer_under_way(sampling, tiny_model_dir, write_jsonl, monkeypatch):
    monkeypatch.setattr("batchgen.job.REFRESH_SECONDS", 0.0)
    # Of prompt and completion tokens: which part of the work has run depends on them, and a busy machine measures others in each run.
    monkeypatch.setattr(Engine, "prices", (1.0, 20.0))
    progress, engine = Recorder(), EngineConfig(batch_size=2)
    params = SamplingParams(max_tokens=4, ignore_eos=True, **sampling)
    run_job(config_of(tiny_model_dir, write_jsonl(prompts(12)), sampling=params, engine=engine), progress)
    generating = [now for now in progress.seen if now.phase == GENERATING]
    assert max(now.rows_under_way for now in generating if now.rows_done >= 6) <= 2
    assert any(now.rows_under_way for now in generating)
    assert max(now.percent for now in generating if now.rows_done == 6) <= 100 * 8 / 12


def test_the_figures_count_rows_tokens_and_phases(tiny_model_dir, write_jsonl, monkeypatch):
    progress, load, began = Recorder(), loader.load_model, time.monotonic()

    def load_after_reading(*args):
        while "loading model" not in progress.phases and time.monotonic() < began + 60:
            time.sleep(0.01)  # the kept model would be there before six rows are read
        return load(*args)

    monkeypatch.setattr(loader, "load_model", load_after_reading)
    stats = run_job(config_of(tiny_model_dir, write_jsonl(prompts(6))), progress).stats
    assert (stats["rows"], stats["rows_ok"], stats["rows_failed"], stats["rows_resumed"]) == (6, 6, 0, 0)
    length = len(f"{SHARED}a question 0") + 1  # one token for each byte, and the begin token
    assert stats["prompt_tokens"] == 6 * length
    # Run once: the prefix of all rows, 'a' or 'b' and ' question ' for each group, and a digit for each row.
    assert stats["prefill_tokens"] == stats["prefill_tokens_min"] == (1 + len(SHARED)) + 2 * 11 + 6
    assert stats["prefill_efficiency"] == 1.0
    last = progress.seen[-1]
    assert stats["completion_tokens"] == last.completion_tokens == stats["job"]["completion_tokens"]
    assert last.prompt_tokens == stats["prompt_tokens"]
    assert (last.rows_done, last.rows_failed, last.rows_total) == (6, 0, 6)
    assert progress.phases == [
        "loading tokenizer", "reading", "planning", "loading model", "generating", "writing",
    ]  # fmt: skip
    assert stats["seconds"]["generate"] > 0
    assert stats["seconds"]["total"] >= stats["seconds"]["load"] + stats["seconds"]["generate"]
    assert (stats["dtype"], stats["device"], stats["groups"], stats["prefix_nodes"]) == ("float32", "cpu", 2, 3)


def test_the_time_of_loading_includes_the_start_of_the_chat_template(tiny_model_dir, write_jsonl, monkeypatch):
    class Slow(PromptBuilder):
        def __init__(self, *args: Any, **options: Any) -> None:
            later = SimpleNamespace(**vars(time) | {"perf_counter": lambda: time.perf_counter() + 1000})
            monkeypatch.setattr("batchgen.stats.time", later)
            super().__init__(*args, **options)

    monkeypatch.setattr("batchgen.job_setup.PromptBuilder", Slow)
    assert run_job(config_of(tiny_model_dir, write_jsonl(prompts(1)))).stats["seconds"]["load"] > 1000


@pytest.mark.parametrize(("stop", "notes"), [((), 0), (("never in the text",), 1)])
def test_rows_that_only_their_length_ends_are_not_called_cut(stop, notes, tiny_model_dir, write_jsonl):
    told = Recorder()
    sampling = SamplingParams(max_tokens=2, ignore_eos=True, stop=stop)
    run_job(config_of(tiny_model_dir, write_jsonl(prompts(12)), sampling=sampling), told)
    assert sum("were cut by their length" in note for note in told.notes) == notes


def test_a_job_that_is_interrupted_before_its_first_token_has_nothing_to_keep(tiny_model_dir, write_jsonl):
    progress = Recorder(in_phase("generating"), interrupt)
    with pytest.raises(Interrupted):
        run_job(config_of(tiny_model_dir, write_jsonl(prompts(3))), progress)
    assert progress.notes[-1] == "no row was done yet, so there is nothing to keep"


@pytest.mark.parametrize(("window", "total"), [(3, None), (4, 3)])
def test_rows_that_come_are_counted_once_the_first_window_is_the_whole_input(
    window, total, tiny_model_dir, write_jsonl
):
    progress = Recorder()
    run_job(config_of(tiny_model_dir, write_jsonl(prompts(3)), window=window), progress)
    assert {now.rows_total for now in progress.seen if now.phase == "generating"} == {total}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_program_that_goes_on_with_its_next_job_after_an_error(
    signum, tiny_model_dir, write_jsonl, tmp_path
):
    config = config_of(tiny_model_dir, write_jsonl(prompts(3)), grace=0.0)
    started = []

    def run_both() -> None:
        for output in ("first.jsonl", "second.jsonl"):
            started.append(output)
            with suppress(Exception):
                run_job(replace(config, output=tmp_path / output), Recorder(rows_done(1), lambda: interrupt(signum)))

    with pytest.raises(KeyboardInterrupt):
        run_both()
    assert started == ["first.jsonl"]


@pytest.mark.parametrize(
    ("signum", "grace", "done"),
    [(signal.SIGTERM, 60.0, 2), (signal.SIGHUP, 60.0, 2), (signal.SIGTERM, 0.0, 1), (signal.SIGINT, 60.0, 1)],
)
def test_running_rows_may_finish_within_the_grace_period_after_sigterm_but_not_after_sigint(
    signum, grace, done, tiny_model_dir, write_jsonl, tmp_path
):
    lengths = [2, 30, 30, 30]
    source = write_jsonl([{**row, "max_tokens": n} for row, n in zip(prompts(4), lengths, strict=True)])
    config = config_of(
        tiny_model_dir,
        source,
        sampling=SamplingParams(ignore_eos=True),
        prompts=PromptConfig(row_params=("max_tokens",)),
        engine=EngineConfig(batch_size=2),
        grace=grace,
        stats=str(tmp_path / "stats.json"),
    )
    with pytest.raises(Interrupted):
        run_job(config, Recorder(rows_done(1), lambda: interrupt(signum)))
    assert json.loads((tmp_path / "stats.json").read_text())["rows"] == done


def test_an_interrupted_job_on_standard_output_writes_its_finished_rows(tiny_model_dir, write_jsonl, whole, capsys):
    options: dict[str, Any] = {"engine": EngineConfig(batch_size=2), "output": "-", "window": 5}
    with pytest.raises(Interrupted, match=r"standard output keeps nothing: the same command begins again$"):
        run_job(config_of(tiny_model_dir, write_jsonl(prompts(12)), **options), Recorder(rows_done(8), interrupt))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["id"] for row in rows[:5]] == [0, 1, 2, 3, 4]
    assert 8 <= len(rows) < 10
    assert {(row["id"], row["text"]) for row in rows} <= {(row["id"], row["text"]) for row in whole}
    assert len({row["id"] for row in rows}) == len(rows)


def test_a_signal_during_planning_ends_the_job_before_the_model_is_loaded(tiny_model_dir, write_jsonl):
    source = write_jsonl([{"prompt": 5}, *prompts(3)])  # the first row fails while it is planned
    progress = Recorder(rows_done(1), lambda: interrupt(signal.SIGTERM))
    with pytest.raises(Interrupted) as error:
        run_job(config_of(tiny_model_dir, source), progress)
    assert error.value.exit_code == 143
    assert "loading model" not in progress.phases


@pytest.mark.parametrize("window", [None, 2])
def test_a_row_that_does_not_fit_in_memory_fails_alone_with_its_place_and_runs_again_on_request(
    tiny_model_dir, write_jsonl, window
):
    source = write_jsonl([{"prompt": "x" * 400}, {"prompt": "short"}])
    config = config_of(tiny_model_dir, source, engine=EngineConfig(kv_memory="100KiB"), window=window)
    report = run_job(config)
    rows = json_rows(report.output)
    assert report.exit_code == 3
    assert [row["error"] and row["error"]["type"] for row in rows] == ["does_not_fit", None]
    assert [line.partition(" prompt (")[0] for line in report.failures] == [f"{source}:1: does_not_fit:"]
    more = replace(config, engine=EngineConfig())
    assert run_job(more).already_finished
    again = run_job(replace(more, retry_errors=True))
    assert (again.exit_code, again.stats["rows"], again.stats["rows_resumed"]) == (0, 1, 1)
    assert [row["error"] for row in json_rows(again.output)] == [None, None]


def test_max_errors_ends_the_job_and_keeps_finished_rows(tiny_model_dir, write_jsonl):
    source = write_jsonl([*prompts(3), {"prompt": 1}, {"prompt": 2}])
    with pytest.raises(TooManyErrors, match=r"2 rows failed of 5 done so far, more than --max-errors 1 allows"):
        run_job(config_of(tiny_model_dir, source, max_errors="1", window=3))
    report = run_job(config_of(tiny_model_dir, source, window=3))
    assert (report.exit_code, report.stats["rows_resumed"], report.stats["rows_failed"]) == (3, 3, 2)
    assert report.stats["job"]["runs"] == 2


def test_an_empty_input_gives_an_empty_output_without_loading_a_model(tiny_model_dir, write_jsonl):
    progress = Recorder()
    report = run_job(config_of(tiny_model_dir, write_jsonl([])), progress)
    assert (report.exit_code, Path(report.output).read_text()) == (0, "")
    assert "loading model" not in progress.phases


@pytest.mark.parametrize("output", ["o.csv", "o.parquet"])
@pytest.mark.parametrize("source", ["in.csv", "in.parquet"])
def test_a_table_without_rows_keeps_its_columns(source, output, tiny_model_dir, tmp_path):
    if source == "in.csv":
        (tmp_path / source).write_text("n,prompt,text\n")
    else:
        pq.write_table(pa.table({"n": [1], "prompt": ["x"], "text": ["y"]}).slice(1), tmp_path / source)
    run_job(config_of(tiny_model_dir, tmp_path / source, output=str(tmp_path / output)))
    expected = ["id", "n", "prompt", "input_text", "text", "finish_reason", "usage", "truncated", "error"]
    names = (
        pq.read_schema(tmp_path / output).names
        if output == "o.parquet"
        else (tmp_path / output).read_text().strip().split(",")
    )
    assert names == expected


def test_rows_before_a_broken_place_of_the_input_are_generated_and_kept(tiny_model_dir, tmp_path):
    import gzip

    whole = gzip.compress("".join(json.dumps(row) + "\n" for row in prompts(800)).encode())
    source = tmp_path / "cut.jsonl.gz"
    source.write_bytes(whole[: len(whole) // 2])
    config = config_of(
        tiny_model_dir, source, output=str(tmp_path / "out.jsonl"), sampling=SamplingParams(max_tokens=1)
    )
    assert run_job(replace(config, limit=3)).stats["rows"] == 3  # no row after the limit is read
    with pytest.raises(InputCorrupt) as error:
        run_job(config)
    assert error.value.exit_code == 1
    assert str(error.value).startswith(f"{source} breaks off after line ")
    source.write_bytes(whole)
    report = run_job(config)
    assert report.stats["rows_resumed"] > 100
    assert report.stats["rows_resumed"] + report.stats["rows"] == 800
    assert report.stats["job"]["runs"] == 3  # the figures of the run that broke off count


@pytest.mark.parametrize("window", [None, 2])
def test_rows_with_a_repeated_id_are_counted_in_one_note_and_all_run(window, tiny_model_dir, write_jsonl):
    ids = ["a", "b", "a", 7, "7", None, None, "a"]
    source = write_jsonl([{"id": own, "prompt": f"{i}"} for i, own in enumerate(ids)])
    said = Recorder()
    report = run_job(config_of(tiny_model_dir, source, window=window), said)
    assert [note for note in said.notes if "the id of" in note] == [
        f"3 rows have the id of an earlier row (the first: 'a', {source}:3): every row runs, but the id does not tell them apart"
    ]
    rows = json_rows(report.output)
    assert [row["id"] for row in rows] == ["a", "b", "a", 7, "7", 5, 6, "a"]
    assert all(row["error"] is None for row in rows)
