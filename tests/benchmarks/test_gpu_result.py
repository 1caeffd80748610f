"""The GPU result file is written case by case, continued, and merged from several files; and a table is made from it."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.result import GpuResult, NotAResult, read_result
from benchmarks.gpu.tables import tables

H200 = {
    "gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0",
    "versions": {"python": "3.12.3", "torch": "2.11.0", "transformers": "5.17.0", "triton": "3.6.0"},
}  # fmt: skip
DECODED = {"tokens_per_s": 20_000.4, "step_ms": 12.8, "floor_ms": 8.61, "floor_share": 0.673}


def result(folder: Path, machine: dict[str, Any] = H200, source: str = "one", *, tiny: bool = False) -> GpuResult:
    return GpuResult(folder / "gpu.json", machine, source, tiny=tiny)


def cases(found: GpuResult, kind: str = "figures") -> list[tuple[str, str]]:
    return [(e["part"], e["case"]) for e in found.json[kind]]


def test_only_figures_of_this_code_on_such_a_machine_need_not_be_made_again(tmp_path):
    result(tmp_path).add("decode", "8b 1024", DECODED, 1)
    assert result(tmp_path).has("decode", "8b 1024")
    assert not result(tmp_path).has("decode", "8b 4096")
    assert not result(tmp_path, source="two").has("decode", "8b 1024")
    assert not result(tmp_path, H200 | {"driver": "580.2"}).has("decode", "8b 1024")


def test_of_two_results_the_newer_figures_of_each_case_are_kept(tmp_path):
    ours, theirs = result(tmp_path / "a"), result(tmp_path / "b", H200 | {"driver": "580.2"})
    theirs.add("decode", "8b 1024", {"by": "theirs"}, 1)
    ours.add("decode", "8b 1024", {"by": "ours"}, 1)
    ours.add("decode", "8b 4096", {"by": "ours"}, 1)
    ours.fail("prefill", "8b 4 x 16384", "no")
    theirs.add("decode", "8b 4096", {"by": "theirs"}, 1)
    theirs.add("prefill", "8b 4 x 16384", {"by": "theirs"}, 1)
    theirs.fail("check", "8b", "no")
    assert ours.merge(read_result(theirs.path)) == 3
    kept = {
        (e["case"], e["figures"]["by"], ours.json["machines"][e["machine"]]["driver"]) for e in ours.json["figures"]
    }
    assert kept == {
        ("8b 1024", "ours", "580.1"), ("8b 4096", "theirs", "580.2"), ("8b 4 x 16384", "theirs", "580.2"),
    }  # fmt: skip
    assert cases(ours, "failures") == [("check", "8b")]
    assert ours.merge(read_result(theirs.path)) == 0


def test_a_tiny_run_never_gets_into_a_real_result(tmp_path):
    real, tiny = result(tmp_path / "a"), result(tmp_path / "b", tiny=True)
    real.save()
    tiny.save()
    with pytest.raises(NotAResult, match="is a real run's: name another folder"):
        result(tmp_path / "a", tiny=True)
    with pytest.raises(NotAResult, match="do not go together"):
        real.merge(tiny.json)


def test_a_table_shows_what_there_is(tmp_path):
    found = result(tmp_path)
    found.add("decode", "8b 1024", DECODED, 1)
    found.fail("decode", "8b 4096", "no")
    found.add("prefill", "8b 32 x 2048", {"matmul_share": 0.555, "tokens_per_s": 27_000.0}, 1)
    found.add("parity", "bfloat16 0.5b", {"difference": 0.0391, "spread_of_transformers": 0.047}, 1)
    lines = tables(found.json).splitlines()
    assert "| 1,024 tokens | 20,000 | 12.8 | 8.6 | 67% |" in lines
    assert "| 4,096 tokens | failed |  |  |  |" in lines
    assert "| 16,384 tokens | not measured |  |  |  |" in lines
    assert "| 8B, prompts of 2,048 tokens: of the rate of a large matrix product | 56%, 27,000 tokens/s |" in lines
    assert any(line.endswith("| 0.0391, 0.047 |") for line in lines)
