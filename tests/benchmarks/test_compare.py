"""The tables of a comparison, and those on the page."""

import json
import re
import sys

import pytest

from benchmarks import table
from benchmarks.compare import RESULTS
from benchmarks.programs import ROOT
from benchmarks.result_file import OtherRun, ResultFile, new_result

PAGE = ROOT / "docs" / "benchmarks.md"
ON_THE_PAGE = re.findall("<!-- benchmarks:(.+):begin -->", PAGE.read_text(encoding="utf-8"))


SETTINGS = {
    "threads": 2, "stand_in": None, "limit": None, "sweep": "4,8", "sweep_rows": 8, "quick": False, "repeats": 1,
    "timeout": 900.0, "engine_rows": {},
}  # fmt: skip


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
