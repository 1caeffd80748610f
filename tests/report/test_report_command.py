"""`--report` and `batchgen report` as their users see them: the data in the page is that of the job."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchgen import JobConfig, plan_job, report_job, run_job
from support.reports import parsed
from support.runs import Runs

pytestmark = pytest.mark.usefixtures("loaded_once")

ROOT = "All rows begin with this text, which is more than a chunk. "
GROUPS = ["The first group goes on like this. ", "The second one has other words here. "]


@pytest.fixture
def source(write_jsonl: Callable[..., Path]) -> Path:
    rows = [{"id": f"r{i}", "prompt": f"{ROOT}{GROUPS[i % 2]}{i}"} for i in range(8)]
    return write_jsonl([*rows, {"id": "long", "prompt": "x" * 600}])


def data_of(file: Path) -> Any:
    return parsed(file.read_text("utf-8")).data


def check_tree(tree: Any) -> None:
    """The tree of `source`: 1 + 59 characters, 4 of them the start of both groups, and the groups."""
    assert (tree["rows"], tree["prompt_tokens"], tree["saved_tokens"]) == (8, 776, 640)
    assert (tree["parents"], tree["node_rows"], tree["tokens"]) == ([-1, 0, 0], [8, 4, 4], [64, 31, 33])
    assert (tree["saved"], tree["ending_rows"], tree["lone_rows"]) == ([448, 93, 99], [0, 4, 4], 0)
    assert tree["texts"] == [f"<|begin|>{ROOT}The ", GROUPS[0].removeprefix("The "), GROUPS[1].removeprefix("The ")]


def test_a_run_writes_a_report_of_itself(cli, source, tiny_model_dir, tmp_path):
    page = tmp_path / "r.html"
    outcome = cli("run", source, "-m", tiny_model_dir, "--max-tokens", "5", "--ignore-eos", "--report", page)
    assert outcome.code == 3
    assert f"the report is in {page}" in outcome.err
    data = data_of(page)
    check_tree(data["tree"])
    assert (data["kind"], data["title"], data["state"], data["missing"]) == ("job", "prompts.out.jsonl", "finished", "")
    assert data["rows"]["reasons"] == {"length": 8, "error": 1}
    assert data["rows"]["errors"] == {"prompt_too_long": 1}
    assert [row["id"] for row in data["rows"]["samples"]["length"]] == ["r0", "r1", "r2", "r3"]
    assert data["rows"]["samples"]["error: prompt_too_long"][0]["error"]["type"] == "prompt_too_long"
    assert data["rows"]["prompt_tokens"]["count"] == 8
    assert data["rows"]["completion_tokens"]["bins"] == [[5, 6, 8]]
    assert data["stats"]["prefill_tokens_min"] == 776 - data["tree"]["saved_tokens"]
    (run,) = data["runs"]
    generated = sum(
        rate * (b - a)
        for rate, a, b in zip(run["completion_tokens_per_s"], run["seconds"], run["seconds"][1:], strict=False)
    )
    assert generated == pytest.approx(40, rel=0.2)
    assert data["time"][0][0] == "load the model"


def test_the_report_afterwards_is_the_same(cli, source, tiny_model_dir, tmp_path):
    output = tmp_path / "o.jsonl.gz"
    page = tmp_path / "r.html"
    cli("run", source, "-m", tiny_model_dir, "--max-tokens", "5", "-o", output, "--report", page)
    outcome = cli("report", output)
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err == f"batchgen: the report is in {tmp_path / 'o.report.html'}\n"
    assert data_of(tmp_path / "o.report.html") == data_of(page)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_output_whose_folder_is_gone_tells_what_its_rows_tell(cli, source, tiny_model_dir, tmp_path, suffix):
    output = tmp_path / f"o.{suffix}"
    cli("run", source, "-m", tiny_model_dir, "--max-tokens", "5", "--ignore-eos", "-o", output)
    whole = report_job(str(output)).data
    shutil.rmtree(f"{output}.job")
    outcome = cli("report", output, "-o", tmp_path / "r.html")
    assert (outcome.code, outcome.err.splitlines()[0]) == (
        0,
        f"batchgen: missing in the report: {output}.job does not exist (a run with --work-dir has it there): no prefix tree, no figures over time, no memory",
    )
    data = data_of(tmp_path / "r.html")
    assert (data["tree"], data["runs"], data["stats"]) == (None, [], None)
    for name in ("rows", "reasons", "errors", "completion_tokens"):
        assert data["rows"][name] == whole["rows"][name]
    assert data["rows"]["samples"]["length"][0]["id"] == "r0"


def test_a_job_that_is_not_finished_reports_what_it_has(tmp_path, tiny_model_dir):
    runs = Runs(tmp_path, tiny_model_dir)
    runs.run(["fail", "one", "two", "zero"], most=3)
    data = report_job(str(runs.output)).data
    assert (data["state"], data["status"]["rows_done"]) == ("stopped", 3)
    assert data["rows"]["reasons"] == {"stop": 2, "error": 1}
    assert data["rows"]["errors"] == {"does_not_fit": 1}
    assert sorted(row["text"] for row in data["rows"]["samples"]["stop"]) == ["a: one", "a: two"]


def test_shards_report_before_and_after_they_are_merged(cli, source, tiny_model_dir, tmp_path):
    output = tmp_path / "o.jsonl"
    command = ("run", source, "-m", tiny_model_dir, "--max-tokens", "5", "-o", output)
    cli(*command, "--shard", "1/2")
    before = report_job(str(output)).data
    check_tree(before["tree"])
    assert [run["label"] for run in before["runs"]] == ["1/2"]
    assert [shard["state"] for shard in before["status"]["shards"]] == ["done", "not begun"]
    outcome = cli(*command, "--shard", "2/2", "--merge", "--report", tmp_path / "r.html")
    assert outcome.code == 3
    after = data_of(tmp_path / "r.html")
    check_tree(after["tree"])
    assert [run["label"] for run in after["runs"]] == ["1/2", "2/2"]
    assert after["rows"]["rows"] == 9


def test_the_plan_is_drawn_before_anything_runs(cli, source, tiny_model_dir, tmp_path):
    page = tmp_path / "plan.html"
    outcome = cli("plan", source, "-m", tiny_model_dir, "--max-tokens", "5", "--shards", "2", "--report", page)
    assert (outcome.code, outcome.err) == (0, f"batchgen: the report is in {page}\n")
    data = data_of(page)
    check_tree(data["tree"])
    assert (data["kind"], data["plan"]["prefill_tokens_min"], data["plan"]["rows_failed"]) == ("plan", 136, 1)
    assert data["plan"]["shards"]["rows"] == [3, 5]
    assert list(tmp_path.glob("*.job")) == []


def test_what_a_program_gets_displays_itself_in_a_notebook(source, tiny_model_dir, tmp_path):
    config = JobConfig(
        inputs=source, model=tiny_model_dir, output=tmp_path / "o.jsonl", work_dir=tmp_path, sampling={"max_tokens": 5}
    )
    plan, report = plan_job(config), run_job(config)
    for shown, page in ((plan, plan.page()), (report, report.page())):
        assert shown._repr_html_() == page._repr_html_()
        check_tree(page.data["tree"])
    assert report.page().html == report_job(str(tmp_path / "o.jsonl"), str(tmp_path)).html
    assert replace(report, output="-")._repr_html_() is None
