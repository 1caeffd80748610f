"""The tables of a comparison, and those on the page."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import table
from benchmarks.compare import RESULTS
from benchmarks.programs import PROGRAMS, ROOT, Case
from benchmarks.result_file import OtherRun, ResultFile, new_result
from benchmarks.table import tables

PAGE = ROOT / "docs" / "benchmarks.md"
ON_THE_PAGE = re.findall("<!-- benchmarks:(.+):begin -->", PAGE.read_text(encoding="utf-8"))


SETTINGS = {
    "threads": 2, "stand_in": None, "limit": None, "sweep": "4,8", "sweep_rows": 8, "quick": False, "repeats": 1,
    "timeout": 900.0, "engine_rows": {},
}  # fmt: skip


def measured(engine: str, rate: float) -> dict[str, Any]:
    """Returns an engine's figures of a run that made 1,000 tokens."""
    names = ("torch", "transformers") if PROGRAMS[engine].environment is None else (engine,)
    return {
        "engine": engine,
        "wall_s": 1000 / rate,
        "tokens_per_s": rate,
        "versions": {"python": "3.11.7"} | dict.fromkeys(names, "1.2"),
        "extras": {"precision": "bfloat16"},
    }


def test_a_table_has_medians_ratios_and_the_share_of_the_roofline():
    result = new_result(
        "test", {"cpu": "A CPU", "instruction_sets": ["avx2", "avx512f"], "date": "2026-01-02T03:04:05+00:00"}, SETTINGS
    )
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
        "The roofline is the time that the linear layers and attention alone would take at this machine's own rates. A CPU with AVX512F, 2 threads, torch 1.2, "
        "transformers 1.2, vllm 1.2, 2026-01-02.\n"
    )


@pytest.mark.parametrize("name", ON_THE_PAGE)
def test_the_page_has_the_tables_of_its_result_files(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["table", str(RESULTS / f"{name}.json"), "--check", str(PAGE)])
    table.main()


@pytest.mark.parametrize("sets", [["avx2"], ["avx2", "avx512f"]])
def test_figures_of_a_processor_with_the_same_name_and_other_instructions_are_not_continued(tmp_path, sets):
    machine = {"cpu": "AMD EPYC", "cores": 2, "versions": {"torch": "1.2"}, "instruction_sets": ["avx2", "avx512f"]}
    file = tmp_path / "result.json"
    file.write_text(json.dumps(new_result("test", machine, SETTINGS)))
    now = ResultFile(file, new_result("test", machine | {"instruction_sets": sets}, SETTINGS))
    if sets == machine["instruction_sets"]:
        assert now.take_up() == [f"{file}: 0 measurements are kept"]
    else:
        with pytest.raises(OtherRun, match="instruction_sets"):
            now.take_up()
