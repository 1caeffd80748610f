"""The page of a report: it shows what the data says, loads nothing, and is safe whatever the rows say."""

import base64
import gzip
import os
import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from batchgen.errors import OutputError, UsageError
from batchgen.recording import Agreement, RowFigures
from batchgen.report import report_plan
from batchgen.report.page import POLICY, ReportPage, page
from batchgen.result import Result, Score
from support.reports import job_page_data, parsed


def test_the_page_refers_to_nothing_outside():
    found = parsed(page(job_page_data()))
    outside = [(tag, name, value) for tag, name, value in found.references if not value.startswith(("#", "data:"))]
    assert outside == []
    assert {tag for tag, _, _ in found.references} == {"a", "link"}
    assert ("meta", POLICY) in found.policies
    assert found.policies[0] == ("meta", POLICY)
    style = re.search(r"<style>(.*?)</style>", page(job_page_data()), re.DOTALL)
    assert "url(" not in style[1]
    assert "@import" not in style[1]


def test_text_of_rows_is_text_in_the_page():
    evil = "</script><script>alert(1)</script><img src=http://x/y onerror=alert(2)>&amp;"
    data = job_page_data(title=evil, text=evil)
    found = parsed(page(data))
    assert found.data["tree"]["texts"][0] == evil
    assert found.data["rows"]["samples"]["stop"][0]["text"] == evil
    assert (found.title, found.headings[0]) == (f"{evil}: report", evil)
    assert found.tags.count("script") == 3
    assert "img" not in found.tags
    assert evil in found.cells  # the excerpt in the table of nodes


def test_reasons_errors_and_labels_are_text_in_the_page_and_in_the_words_of_their_charts():
    evil = "<img src=x onerror=alert(1)>&amp;"
    data = job_page_data()
    figures = RowFigures()
    classified = Result(row=0, text=evil, finish_reason=evil, prompt_tokens=1, choice_probs={evil: 1.0})
    failed = Result(row=1, text=None, finish_reason="error", error_type=evil, error_message=evil)
    for result in (classified, failed):
        figures.add(result, lambda: {evil: evil})
    found = parsed(page(data | {"rows": figures.as_dict()}))
    assert "img" not in found.tags
    assert found.labels["ends-chart"].endswith(f"1 error: {evil}.")
    assert found.labels["labels-chart"] == f"1 label; the most frequent is “{evil}” with 1 row."
    assert found.labels["ends-chart"] in found.text
    assert found.labels["labels-chart"] in found.text


def test_expected_labels_are_a_table_and_their_text_is_text():
    evil, data = "<img src=x>", job_page_data()
    agreement = Agreement(evil)
    for text, probability in (("a", 0.75), (evil, 0.25), ("a", 0.77)):
        result = Result(row=0, text=text, finish_reason="stop", choice_probs={text: probability})
        agreement.add(result, {evil: "a"})
    found = parsed(page(data | {"stats": data["stats"] | {"expect": agreement.as_dict()}}))
    assert "img" not in found.tags
    assert (
        f"2 of 3 rows are as in the column “{evil}” (66.7%). The labels that were given have a mean probability of 59.0%; "
        "the expected calibration error is 24.3%." in found.text
    )
    assert found.captions[-3:-1] == ["Expected and given labels", "How often labels are right, by their probability"]
    start = found.cells.index(evil)
    assert found.cells[start : start + 14] == [
        evil, "0", "0", "a", "1", "2", "0.2 to 0.3", "1", "25.0%", "0.0%", "0.7 to 0.8", "2", "76.0%", "100.0%",
    ]  # fmt: skip


def test_headings_and_tables_say_what_the_charts_show():
    found = parsed(page(job_page_data()))
    assert found.headings == [
        "answers.jsonl", "Prefix tree", "The chosen node", "Below it", "Tokens per second", "Where the time went",
        "Lengths of prompts and completions", "How rows ended", "Sample rows", "Memory", "All figures",
    ]  # fmt: skip
    assert found.language == "en"
    assert found.labels["tree-chart"] == (
        "The prefix tree of 4 prompts: 1 node. Sharing them saves 6 of 20 prompt tokens (30.0%)."
    )
    assert (
        found.labels["speed-chart"]
        == "Tokens per second over 2.0 s; at most 15 completion tokens/s, 14 prompt tokens/s."
    )
    assert found.labels["ends-chart"] == "3 stop, 1 error: prompt_too_long."
    assert found.captions == [
        "The nodes that save the most", "Tokens per second", "Where the time went", "Lengths of prompts, in tokens",
        "Lengths of completions, in tokens", "How rows ended", "Memory",
    ]  # fmt: skip
    start = found.cells.index("load the model")
    assert found.cells[start : start + 22] == [
        "load the model", "3.00", "read and plan", "0.50", "generate: in the model", "1.50", "generate: the rest", "0.50", "write", "0.25",
        "in all", "6.00", "5", "5", "3", "10", "10", "3", "stop", "3", "75.00%", "error: prompt_too_long",
    ]  # fmt: skip
    assert all(label for label in found.labels.values())  # every chart has words for those who do not see it


def test_the_top_of_the_page_has_the_figures_of_the_job():
    found = parsed(page(job_page_data()))
    assert "\nFinished · tiny, float32 on cpu\n" in found.text
    assert found.tiles[:15] == [
        "rows", "4", "failed", "1", "prompt tokens", "15", "shared, run once", "6.7%", "completion tokens", "30",
        "completion tokens/s", "15", "time", "6.0 s", "memory at most",
    ]  # fmt: skip


def test_a_job_under_way_shows_what_there_is():
    data = job_page_data() | {"state": "running", "stats": None, "time": []}
    found = parsed(page(data | {"status": data["status"] | {"rows_total": 9}}))
    assert "\nRunning\n" in found.text
    assert found.tiles[:4] == ["rows", "4 of 9", "failed", "1"]
    assert found.captions[-1] == "How rows ended"


def test_the_plan_is_drawn_with_its_memory_and_shards():
    plan = {
        "rows": 3, "rows_failed": 1, "prompt_tokens": 20, "prefill_tokens": 14, "prefill_tokens_min": 14, "shared_fraction": 0.3,
        "prefix_nodes": 1, "weight_bytes": 2048, "kv_bytes_least": 512, "kv_bytes_shared": 1024, "kv_bytes_unshared": 0,
        "tree": [], "shards": {"rows": [2, 1], "cost": [0.6, 0.4], "prefill_tokens_again": 5},
    }  # fmt: skip
    data = report_plan("in.jsonl", plan, job_page_data()["tree"]).data
    assert data["memory"] == [("weights", 2048), ("KV of the longest row", 512), ("KV of all rows, shared", 1024)]
    found = parsed(page(data))
    assert found.headings == [
        "in.jsonl", "Prefix tree", "The chosen node", "Below it", "Memory", "Shards", "All figures",
    ]  # fmt: skip
    assert (
        found.labels["memory-chart"]
        == "weights: 2.0 KiB; KV of the longest row: 512 B; KV of all rows, shared: 1.0 KiB."
    )
    assert found.cells[-6:] == ["1", "2", "60.0%", "2", "1", "40.0%"]
    assert "\nThe plan of a run, before anything runs\n" in found.text
    assert found.tiles[:14] == [
        "rows", "3", "would fail", "1", "prompt tokens", "20", "to be run", "14", "shared, run once", "30.0%",
        "prefix nodes", "1", "model weights", "2.0 KiB",
    ]  # fmt: skip


def test_a_notebook_shows_the_page_in_a_frame():
    report = ReportPage(job_page_data())
    frames = []

    class Frames(HTMLParser):
        def handle_starttag(self, tag, attrs):
            frames.append((tag, dict(attrs)))

    Frames().feed(report._repr_html_())
    ((tag, attributes),) = frames
    assert tag == "iframe"
    assert attributes["srcdoc"] == report.html
    assert attributes["title"] == "answers.jsonl: report"
    assert repr(report) == "<answers.jsonl: report: display it in a notebook, or .save('report.html')>"


def test_a_page_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    report = ReportPage(job_page_data())
    report.save(tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text("utf-8") == report.html
    with pytest.raises(UsageError, match="cannot be written; name a file in a folder that exists"):
        report.save(tmp_path / "no" / "r.html")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="cannot be written: No space left on device"):
        report.save(tmp_path / "r.html")


def test_the_page_has_plotly_whole_and_the_licences_of_its_parts_are_shipped():
    shipped = files("batchgen.report") / "plotly"
    packed = re.search(r'id="plotly">([^<]*)<', page(job_page_data()))
    program = gzip.decompress(base64.b64decode(packed[1])).decode()
    assert program == (shipped / "plotly.min.js").read_text("utf-8")
    assert program.startswith("/* plotly.js ")
    assert "Copyright" in (shipped / "LICENSES.txt").read_text("utf-8")


def test_scores_and_rewards_are_drawn_with_their_middle():
    figures = RowFigures()
    for row, (logprob, reward) in enumerate([(-2.0, 0.25), (-4.0, 1.5), (-6.0, 4.0)]):
        score = Score(logprob=logprob, tokens=2, greedy=row == 0)
        figures.add(Result(row=row, text=None, finish_reason="stop", prompt_tokens=1, score=score), dict)
        figures.add(Result(row=row, text=None, finish_reason="stop", prompt_tokens=1, reward=reward), dict)
    found = parsed(page(job_page_data() | {"rows": figures.as_dict()}))
    assert found.labels["scores-chart"] == (
        "Mean log-probability of a token in 3 scored completions: half of them are at most -2.0; greedy decoding would have written 1 of them."
    )
    assert found.labels["rewards-chart"] == "Rewards of 3 rows: from 0.25 to 4.0, half of them at most 1.5."


def test_shards_are_a_table_of_who_has_done_what():
    data = job_page_data()
    shards = [
        {"shard": "1/2", "state": "done", "host": None, "rows_done": 3, "rows_total": 3},
        {"shard": "2/2", "state": "running", "host": "n7", "rows_done": None, "rows_total": 1},
    ]
    found = parsed(page(data | {"status": data["status"] | {"shards": shards, "rows_done": 6}}))
    assert found.labels["tree-chart"].endswith("(30.0%). It is the tree of the run that planned the most rows.")
    assert "Shards" in found.headings
    assert [row for row in zip(*[iter(found.cells)] * 5, strict=False) if "n7" in row] == [
        ("2/2", "running", "n7", "0", "1")
    ]
