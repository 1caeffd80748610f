"""`batchgen plan --measure` runs a few rows of a job, whose results the run uses; from what steps cost, a plan knows how long the job takes."""

import json
import shutil

import pytest

from batchgen import JobConfig, ModelConfig, SamplingParams, plan_job, run_job
from batchgen.config import EngineConfig, PromptConfig
from batchgen.job import measure_job
from batchgen.jobs.order.sorted_requests import spread
from batchgen.jobs.status import job_status
from support.embedders import save_classifier
from support.models import make_requests
from support.params import slow_but
from support.vision import make, picture

pytestmark = pytest.mark.usefixtures("loaded_once")

ROWS = [{"prompt": f"All rows begin with this text, which is more than a chunk. {i // 5} {i}"} for i in range(40)]


def config_of(model, source, output, **options):
    options.setdefault("sampling", SamplingParams(max_tokens=10, temperature=1.0))
    model = ModelConfig(model=str(model), **options.pop("task", {}))
    return JobConfig(inputs=(str(source),), model=model, output=str(output), **options)


KINDS = {
    "completions": {"sampling": SamplingParams(max_tokens=10, temperature=1.0)},
    "several": {"sampling": SamplingParams(max_tokens=6, temperature=1.0, n=3)},
    "labels": {"sampling": SamplingParams(choices=("yes", "no"))},
    "scores": {"prompts": PromptConfig(score=True, completion_column="prompt")},
    "embeddings": {"task": {"embed": True, "pooling": "last"}, "sampling": SamplingParams()},
    "classes": {"task": {"classify": True}, "sampling": SamplingParams()},
    "log-probabilities of prompts": {"prompts": PromptConfig(prompt_logprobs=True), "sampling": SamplingParams()},
    "a regex": {"sampling": SamplingParams(max_tokens=20, temperature=1.0, regex="(ab|ba){1,9}")},
    "images": {"prompts": PromptConfig(image_column="picture")},
    "own ids": {"sampling": SamplingParams(max_tokens=10, temperature=1.0), "id_column": "prompt"},
    "windows": {"window": 8},
    "as they finish": {"order": "done"},
}


QUICK = {"completions", "labels", "embeddings", "a regex", "windows"}


@pytest.mark.parametrize("kind", slow_but(QUICK, KINDS))
def test_the_run_uses_the_measured_rows_and_computes_the_others(kind, tiny_model_dir, write_jsonl, tmp_path):
    model, rows = tiny_model_dir, ROWS
    if kind == "classes":
        model = save_classifier(tmp_path / "model")
    elif kind == "images":
        model = tmp_path / "model"
        make("llava", model)
        for i in range(3):
            picture(i).save(tmp_path / f"{i}.png")
        rows = [row | {"picture": f"{i % 3}.png"} for i, row in enumerate(ROWS)]
    source = write_jsonl(rows)
    config = config_of(model, source, tmp_path / "out.jsonl", **KINDS[kind])
    measured = measure_job(config, 8)
    assert (measured["rows"], (tmp_path / "out.jsonl").exists()) == (8, False)
    plan = plan_job(config)
    assert plan.estimate.rows == 32
    assert kind != "labels" or (plan.figures["lengths"], plan.estimate.lengths) == (
        None,
        "none",
    )  # there are no completions
    report = run_job(config)
    assert (report.stats["rows"], report.stats["rows_resumed"]) == (32, 8)
    alone = run_job(config_of(model, source, tmp_path / "alone.jsonl", **KINDS[kind]))
    assert report.stats["job"]["completion_tokens"] == alone.stats["completion_tokens"]
    ours, theirs = (sorted((tmp_path / name).read_text().splitlines()) for name in ("out.jsonl", "alone.jsonl"))
    assert ours == theirs


def test_measuring_again_takes_other_rows_and_ends_with_the_job(tiny_model_dir, write_jsonl, tmp_path):
    config = config_of(tiny_model_dir, write_jsonl(ROWS), tmp_path / "out.jsonl")
    assert [measure_job(config, 30)["rows"] for _ in range(3)] == [30, 10, 0]
    report = run_job(config)
    assert (report.stats["rows"], report.stats["rows_resumed"]) == (0, 40)
    assert measure_job(config, 30) is None


def test_rows_that_fail_before_they_run_are_not_measured(tiny_model_dir, write_jsonl, tmp_path):
    source = write_jsonl([{"prompt": None}, *ROWS])
    measured = measure_job(config_of(tiny_model_dir, source, tmp_path / "o.jsonl"), 4)
    assert measured["rows"] == 4
    assert measured["rows_per_s"] == pytest.approx(4 / measured["seconds"])


def test_status_counts_the_measured_rows_among_all_rows(tiny_model_dir, write_jsonl, tmp_path):
    config = config_of(tiny_model_dir, write_jsonl(ROWS), tmp_path / "out.jsonl", sampling=SamplingParams(max_tokens=4))
    assert measure_job(config, 8)["rows"] == 8
    status = job_status(config.output)
    assert (status["state"], status["rows_done"], status["rows_total"]) == ("stopped", 8, 40)


def test_the_results_of_a_measurement_that_was_killed_are_kept(tiny_model_dir, write_jsonl, tmp_path, monkeypatch):
    config = config_of(tiny_model_dir, write_jsonl(ROWS), tmp_path / "out.jsonl", flush_every=0.0)

    class KilledError(Exception):
        pass

    def killed(*_):
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr("batchgen.job._keep_stopped", killed)
        with pytest.raises(KilledError):
            measure_job(config, 8)
    assert run_job(config).stats["rows_resumed"] == 8


@pytest.mark.parametrize("window_leaves", [20_000, 7])
def test_measured_rows_come_from_all_over_the_prefix_order(window_leaves, monkeypatch):
    requests = make_requests([[n // 100, n // 10 % 10, n % 10] for n in range(0, 1000, 3)], [5] * 334)
    windows = [requests[i : i + window_leaves] for i in range(0, len(requests), window_leaves)]
    for window in windows:
        window.reverse()  # inside a window the order has no meaning
    chosen = [int("".join(map(str, r.tokens))) for r in spread(windows, 32)]
    gaps = [b - a for a, b in zip(chosen, [*chosen[1:], 1000], strict=True)]
    assert (len(chosen), chosen[0]) == (32, 0)
    assert min(gaps) >= 15
    assert max(gaps) <= 63
    assert spread(windows, 500) == sorted(requests, key=lambda r: r.row)


def one_second_a_step(config, step_costs_folder):
    """Makes every step of the model cost a second."""
    (file,) = (step_costs_folder / "step-costs").iterdir()
    steps = [[*size, 1.0] for *size, _ in json.loads(file.read_text())]
    file.write_text(json.dumps(steps))


@pytest.mark.parametrize("options", [{}, {"max_prefill_tokens": 100}, {"batch_size": 5}])
def test_the_steps_of_the_plan_are_those_of_the_run(options, tiny_model_dir, write_jsonl, tmp_path, step_costs_folder):
    sampling = SamplingParams(max_tokens=10, ignore_eos=True)
    config = config_of(
        tiny_model_dir,
        write_jsonl(ROWS),
        tmp_path / "out.jsonl",
        sampling=sampling,
        engine=EngineConfig(speculate="off", **options),
    )
    steps = run_job(config).stats["steps"]
    one_second_a_step(config, step_costs_folder)
    shutil.rmtree(tmp_path / "out.jsonl.job")
    estimate = plan_job(config).estimate
    assert (estimate.seconds, estimate.high) == pytest.approx((steps, 1.15 * steps), rel=0.01)
    assert estimate.low < 0.85 * steps  # nobody knows that completions are that long
    assert (estimate.rows, estimate.lengths) == (40, "max_tokens")


def test_the_plan_of_little_kv_memory_has_the_cut_completions_and_the_failures_of_the_run(
    tiny_model_dir, write_jsonl, tmp_path, step_costs_folder
):
    config = config_of(
        tiny_model_dir,
        write_jsonl([*ROWS[:4], {"prompt": "x" * 200}]),
        tmp_path / "out.jsonl",
        sampling=SamplingParams(ignore_eos=True),
        engine=EngineConfig(speculate="off", kv_memory="40KiB"),
    )
    run = run_job(config)
    one_second_a_step(config, step_costs_folder)
    shutil.rmtree(tmp_path / "out.jsonl.job")
    plan = plan_job(config)
    assert (plan.figures["rows_failed"], plan.figures["failures"]) == (1, [*run.failures])
    assert "does_not_fit: prompt (201 tokens)" in plan.figures["failures"][0]
    assert plan.estimate.seconds == pytest.approx(run.stats["steps"], rel=0.01)
    assert plan.estimate.rows == 4


def test_lengths_are_those_of_the_rows_that_the_job_has_finished(
    tiny_model_dir, write_jsonl, tmp_path, step_costs_folder
):
    sampling = SamplingParams(max_tokens=10, ignore_eos=True)
    rows = [row | {"sampling_params": {"max_tokens": 20 if i % 3 else 4}} for i, row in enumerate(ROWS)]
    config = config_of(tiny_model_dir, write_jsonl(rows), tmp_path / "out.jsonl", sampling=sampling)
    measure_job(config, 8)
    one_second_a_step(config, step_costs_folder)
    report = plan_job(config)
    assert [report.figures["lengths"][name] for name in ("completions", "max", "cut")] == [8, 20, 8]
    assert (report.estimate.rows, report.estimate.lengths) == (32, "rows")
    assert report.estimate.seconds == pytest.approx(22, abs=2)  # a prefix, groups, then the longest completion
    assert report.estimate.low < report.estimate.seconds < report.estimate.high


def test_the_command_tells_what_it_measured(cli, tiny_model_dir, write_jsonl, tmp_path):
    arguments = (
        write_jsonl(ROWS),
        "-m",
        tiny_model_dir,
        "--max-tokens",
        "5",
        "--ignore-eos",
        "-o",
        tmp_path / "o.jsonl",
    )
    shown = cli("plan", *arguments, "--measure", "8", "-q")
    assert shown.code == 0
    lines = {line[:19].strip(): line[19:] for line in shown.out.splitlines()}
    assert lines["measured"].startswith("8 rows in ")
    assert lines["measured"].endswith("the run keeps their results")
    assert (
        lines["lengths"]
        == "5 tokens on average, half at most 5, 9 in 10 at most 5, the longest 5 (8 completions so far, 8 of them cut by --max-tokens)"
    )
    assert " to generate 32 rows (between " in lines["time"]
    plan = json.loads(cli("plan", *arguments, "--measure", "--json", "-q").out)
    assert (plan["measured"]["rows"], plan["measured"]["completion_tokens"]) == (32, 160)
    assert plan["lengths"] == {"completions": 40, "mean": 5.0, "half": 5, "most": 5, "max": 5, "cut": 40}
    assert plan["estimate"] == {"seconds": 0.0, "low": 0.0, "high": 0.0, "rows": 0, "lengths": "none"}
    assert "time               none: every row has its result" in cli("plan", *arguments, "-q").out.splitlines()
