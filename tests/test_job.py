"""Jobs on a tiny model: what they write, count and keep, and how they resume."""

import json
import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchgen import EngineConfig, JobConfig, ModelConfig, PromptConfig, SamplingParams, job_status, run_job
from batchgen.errors import InputCorrupt, Interrupted, OutputLocked, TooManyErrors, UsageError
from support.progress import Recorder, in_phase, interrupt, rows_done

SHARED = "A shared prefix that is long enough for several chunks of sixteen tokens. "
Rows = list[dict[str, Any]]
Write = Callable[..., Path]
Read = Callable[[Path], Rows]


def prompts(count: int) -> Rows:
    return [{"prompt": f"{SHARED}{'ab'[i % 2]} question {i}", "n": i} for i in range(count)]


def config_of(model: Path, source: Path, **options: Any) -> JobConfig:
    options.setdefault("sampling", SamplingParams(max_tokens=4))
    options.setdefault("output", str(source.with_name("out.jsonl")))
    return JobConfig(inputs=(str(source),), model=ModelConfig(model=str(model)), **options)


def texts(rows: Rows) -> list[str]:
    return [row["text"] for row in rows]


def test_a_job_needs_an_input():
    with pytest.raises(UsageError, match=r"^no input; name a file, a folder, a glob or - for standard input$"):
        JobConfig(inputs=(), model=ModelConfig(model="m"))


@pytest.fixture
def whole(tiny_model_dir: Path, write_jsonl: Write, read_jsonl: Read) -> Rows:
    """The output rows of 12 prompts, run in one go."""
    source = write_jsonl(prompts(12), "whole.jsonl")
    report = run_job(config_of(tiny_model_dir, source, output=str(source.with_name("whole.out.jsonl"))))
    return read_jsonl(Path(report.output))


def test_every_row_has_a_completion_in_input_order(tiny_model_dir, write_jsonl, read_jsonl):
    source = write_jsonl(prompts(6))
    report = run_job(config_of(tiny_model_dir, source))
    rows = read_jsonl(Path(report.output))
    assert (report.exit_code, report.already_finished, report.failures, report.chat) == (0, False, (), False)
    assert [row["id"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row["n"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert all(row["usage"]["completion_tokens"] <= 4 and row["error"] is None for row in rows)


def test_the_figures_count_rows_tokens_and_phases(tiny_model_dir, write_jsonl):
    progress = Recorder()
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


def test_windows_give_the_same_rows_and_run_a_shared_prefix_once(tiny_model_dir, write_jsonl, read_jsonl, whole):
    report = run_job(config_of(tiny_model_dir, write_jsonl(prompts(12)), window=5))
    assert texts(read_jsonl(Path(report.output))) == texts(whole)
    assert report.stats["prefill_tokens"] == report.stats["prefill_tokens_min"]
    # The prefix of all rows, the two groups, and the digits of each row ('10' and '11' share their first with '1').
    assert report.stats["prefill_tokens"] <= (1 + len(SHARED)) + 2 * 11 + 14


def test_without_sharing_the_texts_are_the_same_and_whole_prompts_run(tiny_model_dir, write_jsonl, read_jsonl, whole):
    engine = EngineConfig(share=False)
    report = run_job(config_of(tiny_model_dir, write_jsonl(prompts(12)), engine=engine))
    assert texts(read_jsonl(Path(report.output))) == texts(whole)
    assert report.stats["prefill_tokens"] == report.stats["prompt_tokens"]
    assert report.stats["prefill_tokens_min"] < report.stats["prompt_tokens"] / 2


def test_equal_rows_above_temperature_0_are_sampled_differently(tiny_model_dir, write_jsonl, read_jsonl):
    sampling = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    source = write_jsonl([{"prompt": "same"}] * 6)
    report = run_job(config_of(tiny_model_dir, source, sampling=sampling, token_ids=True))
    token_ids = [tuple(row["token_ids"]) for row in read_jsonl(Path(report.output))]
    assert len(set(token_ids)) == 6
    # Other windows give the same tokens.
    other = config_of(
        tiny_model_dir, source, sampling=sampling, token_ids=True, window=4, output=str(source) + ".2.jsonl"
    )
    assert [tuple(row["token_ids"]) for row in read_jsonl(Path(run_job(other).output))] == token_ids


def test_a_second_run_finds_nothing_to_do_and_writes_the_figures_where_it_is_told(
    tiny_model_dir, write_jsonl, tmp_path
):
    config = config_of(tiny_model_dir, write_jsonl(prompts(4)))
    first = run_job(config)
    written = Path(first.output).stat().st_mtime_ns
    progress = Recorder()
    second = run_job(replace(config, stats=str(tmp_path / "stats.json")), progress)
    assert second.already_finished
    assert second.stats == first.stats == json.loads((tmp_path / "stats.json").read_text())
    assert Path(first.output).stat().st_mtime_ns == written
    assert "loading model" not in progress.phases


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_job_keeps_its_results_and_resumes(
    signum, tiny_model_dir, write_jsonl, read_jsonl, whole, tmp_path
):
    options: dict[str, Any] = {"engine": EngineConfig(batch_size=2), "stats": str(tmp_path / "stats.json")}
    config = config_of(tiny_model_dir, write_jsonl(prompts(12)), **options)
    progress = Recorder(rows_done(4), lambda: interrupt(signum))
    with pytest.raises(Interrupted) as error:
        run_job(config, progress)
    assert error.value.exit_code == 128 + signum
    assert not Path(str(config.output)).exists()
    first = json.loads((tmp_path / "stats.json").read_text())
    assert 4 <= first["rows"] < 12
    begun = r"(, and \d+ tokens? of unfinished rows)?"
    assert re.fullmatch(rf"{first['rows']} of 12 rows are done{begun}: everything is kept", progress.notes[-1])
    status = job_status(str(config.output))
    assert status["state"] == "stopped"
    assert sum(status["finish_reasons"].values()) == first["rows"]  # as it was at the last moment
    report = run_job(config)
    assert texts(read_jsonl(Path(report.output))) == texts(whole)
    assert (report.stats["rows"], report.stats["rows_resumed"]) == (12 - first["rows"], first["rows"])
    job = report.stats["job"]
    assert (job["runs"], job["rows"]) == (2, 12)
    assert job["prefill_tokens"] == first["prefill_tokens"] + report.stats["prefill_tokens"]


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
    with pytest.raises(Interrupted):
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


def test_failed_rows_are_reported_and_the_others_run(tiny_model_dir, write_jsonl, read_jsonl):
    source = write_jsonl([{"prompt": "fine"}, "{not json", {"prompt": 7}, {"prompt": "x" * 600}])
    report = run_job(config_of(tiny_model_dir, source))
    rows = read_jsonl(Path(report.output))
    assert report.exit_code == 3
    assert [row["error"] and row["error"]["type"] for row in rows] == [
        None, "invalid_row", "invalid_row", "prompt_too_long",
    ]  # fmt: skip
    assert (report.stats["rows_ok"], report.stats["rows_failed"]) == (1, 3)
    assert len(report.failures) == 3
    assert report.failures[0].startswith(f"{source}:2: invalid_row: ")
    assert report.failures[2] == (
        f"{source}:4: prompt_too_long: the prompt has 601 tokens, "
        "and the model's context of 512 tokens must hold it and a completion"
    )
    again = run_job(config_of(tiny_model_dir, source))
    assert (again.exit_code, again.already_finished) == (3, True)


@pytest.mark.parametrize("window", [None, 2])
def test_a_row_that_does_not_fit_in_memory_fails_alone_with_its_place_and_runs_again_on_request(
    tiny_model_dir, write_jsonl, read_jsonl, window
):
    source = write_jsonl([{"prompt": "x" * 400}, {"prompt": "short"}])
    config = config_of(tiny_model_dir, source, engine=EngineConfig(kv_memory="100KiB"), window=window)
    report = run_job(config)
    rows = read_jsonl(Path(report.output))
    assert report.exit_code == 3
    assert [row["error"] and row["error"]["type"] for row in rows] == ["does_not_fit", None]
    assert [line.partition(" prompt (")[0] for line in report.failures] == [f"{source}:1: does_not_fit:"]
    more = replace(config, engine=EngineConfig())
    assert run_job(more).already_finished
    again = run_job(replace(more, retry_errors=True))
    assert (again.exit_code, again.stats["rows"], again.stats["rows_resumed"]) == (0, 1, 1)
    assert [row["error"] for row in read_jsonl(Path(again.output))] == [None, None]


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


def test_rows_before_a_broken_place_of_the_input_are_generated_and_kept(tiny_model_dir, tmp_path):
    import gzip

    whole = gzip.compress("".join(json.dumps(row) + "\n" for row in prompts(800)).encode())
    source = tmp_path / "cut.jsonl.gz"
    source.write_bytes(whole[: len(whole) // 2])
    config = config_of(
        tiny_model_dir, source, output=str(tmp_path / "out.jsonl"), sampling=SamplingParams(max_tokens=1)
    )
    with pytest.raises(InputCorrupt) as error:
        run_job(config)
    assert error.value.exit_code == 1
    assert str(error.value).startswith(f"{source} breaks off after line ")
    source.write_bytes(whole)
    report = run_job(config)
    assert report.stats["rows_resumed"] > 100
    assert report.stats["rows_resumed"] + report.stats["rows"] == 800
    assert report.stats["job"]["runs"] == 2  # the figures of the run that broke off count


def test_resuming_with_other_settings_is_refused_and_names_them(tiny_model_dir, tiny_chat_model_dir, write_jsonl):
    source = write_jsonl(prompts(2))
    report = run_job(config_of(tiny_model_dir, source))
    with pytest.raises(UsageError) as error:
        run_job(config_of(tiny_model_dir, source, sampling=SamplingParams(max_tokens=4, temperature=0.5)))
    assert str(error.value) == (
        f"{report.output} was made with other settings: temperature was 0, is 0.5; use --overwrite to start again, or another -o"
    )
    with pytest.raises(UsageError, match=r"was made with other settings: model file .*; chat was false, is true"):
        run_job(config_of(tiny_chat_model_dir, source))
    again = run_job(config_of(tiny_model_dir, source, sampling=SamplingParams(max_tokens=2), overwrite=True))
    assert again.stats["rows"] == 2


def test_a_second_run_on_the_same_output_is_refused(tiny_model_dir, write_jsonl):
    config = config_of(tiny_model_dir, write_jsonl(prompts(4)))
    seen: list[Exception] = []

    def second() -> None:
        with pytest.raises(OutputLocked) as error:
            run_job(config)
        seen.append(error.value)

    assert run_job(config, Recorder(rows_done(2), second)).exit_code == 0
    assert len(seen) == 1
    assert str(seen[0]).startswith(f"another run holds {config.output} (process {os.getpid()} on ")


@pytest.mark.parametrize("window", [None, 2])
def test_rows_with_a_repeated_id_are_counted_in_one_note_and_all_run(window, tiny_model_dir, write_jsonl, read_jsonl):
    ids = ["a", "b", "a", 7, "7", None, None, "a"]
    source = write_jsonl([{"id": own, "prompt": f"{i}"} for i, own in enumerate(ids)])
    said = Recorder()
    report = run_job(config_of(tiny_model_dir, source, window=window), said)
    assert [note for note in said.notes if "the id of" in note] == [
        f"3 rows have the id of an earlier row (the first: 'a', {source}:3): every row runs, but the id does not tell them apart"
    ]
    rows = read_jsonl(Path(report.output))
    assert [row["id"] for row in rows] == ["a", "b", "a", 7, "7", 5, 6, "a"]
    assert all(row["error"] is None for row in rows)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(
    ("ids", "same", "first"),
    [
        ([None, None, None, None, "3", 1, "01", 4], 2, "'3', {}:5"),  # the first rows have no id
        (["x", None, "1", "3", None], 1, "'1', {}:3"),
        (["2", "x", None], 1, "'2', {}:3"),
        ([None] * 5, 0, ""),
    ],
)
def test_a_row_number_that_replaces_a_missing_id_counts_as_an_id(ids, same, first, window, tiny_model_dir, write_jsonl):
    source = write_jsonl([{"id": own, "prompt": f"{i}"} for i, own in enumerate(ids)])
    said = Recorder()
    run_job(config_of(tiny_model_dir, source, window=window), said)
    notes = [note for note in said.notes if "the id of" in note]
    assert len(notes) == (same > 0)
    for note in notes:
        assert note.startswith(f"{same} row")
        assert f"(the first: {first.format(source)})" in note
