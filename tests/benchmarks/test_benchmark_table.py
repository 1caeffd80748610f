"""The tables of a result, word for word."""

import re
import sys

import pytest

from benchmarks import table
from benchmarks.compare import RESULTS
from benchmarks.programs import ROOT
from benchmarks.table import tables

PAGE = ROOT / "docs" / "benchmarks.md"
ON_THE_PAGE = re.findall("<!-- benchmarks:(.+):begin -->", PAGE.read_text(encoding="utf-8"))


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


@pytest.mark.parametrize("name", ON_THE_PAGE)
def test_the_page_has_the_tables_of_its_result_files(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["table", str(RESULTS / f"{name}.json"), "--check", str(PAGE)])
    table.main()
