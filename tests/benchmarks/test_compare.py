"""Which runs a comparison makes and in which order, what it keeps, and what it leaves out."""

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import table
from benchmarks.compare import RESULTS
from benchmarks.programs import ROOT, Case, EngineFailed
from benchmarks.result_file import medians, new_result
from benchmarks.table import tables

NAMES = {"model": "30m", "dtype": "bfloat16", "workload": "few-shot", "limit": None}


def names_of(calls: list[tuple[str, int | None]]) -> str:
    return " ".join(name for name, _ in calls)


def test_engines_take_turns_and_each_repeat_begins_with_another(engines, comparison):
    comparison("--repeats", "3", others=["vllm", "openvino"]).run()
    assert names_of(engines.calls) == ("batchgen vllm openvino vllm openvino batchgen openvino batchgen vllm")


def test_an_engine_with_fewer_rows_is_compared_with_batchgen_on_just_those(engines, comparison):
    made = comparison("--repeats", "1", "--engine-rows", "vllm=32", others=["vllm"])
    made.run()
    assert engines.calls == [("batchgen", None), ("vllm", 32), ("batchgen", 32)]
    assert medians(made.file.result, NAMES) == {"batchgen": 100.0}
    assert medians(made.file.result, NAMES | {"limit": 32}) == {"batchgen": 100.0, "vllm": 100.0}


def test_what_fails_once_on_a_case_is_not_tried_again(engines, comparison):
    engines.rates["vllm"] = EngineFailed("vllm: exit 1: no")
    made = comparison("--repeats", "3", others=["vllm"])
    made.run()
    assert names_of(engines.calls) == "batchgen vllm batchgen batchgen"
    assert made.file.result["failures"] == [
        NAMES | {"engine": "vllm", "message": "vllm: exit 1: no", "timed_out_after": None}
    ]


def test_going_on_measures_only_what_is_not_there(engines, comparison, capsys, tmp_path):
    comparison("--repeats", "2").run()
    engines.calls.clear()
    capsys.readouterr()
    made = comparison("--repeats", "3", "--continue", others=["transformers-generate", "vllm"])
    made.run()
    assert capsys.readouterr().out.startswith(f"{tmp_path}/result.json: 4 measurements are kept\n")
    assert names_of(engines.calls) == "vllm vllm vllm batchgen transformers-generate"
    assert json.loads((tmp_path / "result.json").read_text())["measurements"] == made.file.result["measurements"]
    assert sorted(m["repeat"] for m in made.file.result["measurements"]) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


# -- tables


PAGE = ROOT / "docs" / "benchmarks.md"
ON_THE_PAGE = re.findall("<!-- benchmarks:(.+):begin -->", PAGE.read_text(encoding="utf-8"))


SETTINGS = {
    "threads": 2, "stand_in": None, "limit": None, "sweep": "4,8", "sweep_rows": 8, "quick": False, "repeats": 1,
    "timeout": 900.0, "engine_rows": {},
}  # fmt: skip


def test_a_table_has_medians_ratios_and_the_share_of_the_roofline(measured):
    result = new_result("test", {"cpu": "A CPU", "date": "2026-01-02T03:04:05+00:00"}, SETTINGS)
    names = Case("30m", "bfloat16", "few-shot", Path("model"), Path("rows.jsonl")).names()
    result["models"] = {"30m": {"parameters": 32_000_000}}
    result["rooflines"] = [names | {"seconds": {"total": 1000 / 5226}}]
    rates = {"batchgen": (2613, 2500, 2700), "transformers-generate": (194, 190, 200), "vllm": (2200, 2100, 2300)}
    result["measurements"] = [
        names | {"repeat": repeat} | measured(engine, rate)
        for engine, of in rates.items()
        for repeat, rate in enumerate(of)
    ]
    assert tables(result) == (
        "| 30m (32.0M parameters) |  | batchgen | of the roofline | transformers `generate` | vLLM |\n"
        "| --- | --- | ---: | ---: | ---: | ---: |\n"
        "| few shot | bfloat16 | 2,613 | 50% | 194 **13.5x** | 2,200 **1.2x** |\n"
        "\n"
        "Completion tokens/s, medians of 3 interleaved runs; with tokenizing, without loading the model; in bold, how many times as fast batchgen is. "
        "The roofline is the time that the linear layers and attention alone would take at this machine's own rates. A CPU, 2 threads, torch 1.2, "
        "transformers 1.2, vllm 1.2, 2026-01-02.\n"
    )


@pytest.mark.parametrize("name", ON_THE_PAGE)
def test_the_page_has_the_tables_of_its_result_files(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["table", str(RESULTS / f"{name}.json"), "--check", str(PAGE)])
    table.main()
