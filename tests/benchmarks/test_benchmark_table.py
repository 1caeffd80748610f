"""The tables of a result, word for word."""

import re
import sys
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import table
from benchmarks.compare import RESULTS
from benchmarks.programs import ROOT
from benchmarks.table import put, tables

PAGE = ROOT / "docs" / "benchmarks.md"
ON_THE_PAGE = re.findall("<!-- benchmarks:(.+):begin -->", PAGE.read_text(encoding="utf-8"))


def rows_of(result: Any) -> list[str]:
    """The lines of the tables."""
    return [line for line in tables(result.json).splitlines() if line.startswith("|")]


def test_a_table_has_medians_ratios_and_the_share_of_the_roofline(result):
    result.ran("batchgen", 2613.0, 2500.0, 2700.0)
    result.ran("transformers-generate", 194.0, 190.0, 200.0)
    result.ran("vllm", 2200.0, 2100.0, 2300.0)
    result.roofline(1000 / 5226)
    assert tables(result.json) == (
        "| 30m (32.0M parameters) |  | batchgen | of the roofline | transformers `generate` | vLLM |\n"
        "| --- | --- | ---: | ---: | ---: | ---: |\n"
        "| few shot | bfloat16 | 2,613 | 50% | 194 **13.5x** | 2,200 **1.2x** |\n"
        "\n"
        "Completion tokens/s, medians of 3 interleaved runs; with tokenizing, without loading the model; in bold, how many times as fast batchgen is. "
        "The roofline is the time that the linear layers and attention alone would take at this machine's own rates. A CPU, 2 threads, torch 1.2, "
        "transformers 1.2, vllm 1.2, 2026-01-02.\n"
    )


def test_what_was_not_measured_is_shown_as_such(result, case):
    result.ran("batchgen", 100.0)
    result.ran("vllm", 50.0, case=replace(case, dtype="float32"))
    result.ran("openvino", 50.0, case=replace(case, dtype="float32"))
    result.failed("ctranslate2", after=900.0)
    result.failed("openvino")
    assert rows_of(result)[2:] == [
        "| few shot | float32 | – | – | 50.0 | 50.0 | – |",
        "| few shot | bfloat16 | 100 | – | – | failed | not in 900 s |",
    ]


def test_an_engine_with_fewer_rows_has_the_ratio_on_those_rows(result, case):
    result.json["settings"]["engine_rows"] = {"transformers-continuous": 32}
    fewer = replace(case, limit=32)
    result.ran("batchgen", 900.0)
    result.ran("batchgen", 300.0, case=fewer)
    result.ran("transformers-continuous", 20.0, case=fewer)
    assert rows_of(result)[2:] == ["| few shot | bfloat16 | 900 | – | 20.0 **15.0x** (32 rows) |"]


def test_tables_go_between_their_markers():
    text = "a\n<!-- benchmarks:cpu:begin -->\nold\n<!-- benchmarks:cpu:end -->\nb\n"
    assert put(text, "cpu", "new\n") == text.replace("old", "new")
    with pytest.raises(ValueError, match="must be there once each"):
        put("no markers", "cpu", "new\n")


@pytest.mark.parametrize("name", ON_THE_PAGE)
def test_the_page_has_the_tables_of_its_result_files(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["table", str(RESULTS / f"{name}.json"), "--check", str(PAGE)])
    table.main()
