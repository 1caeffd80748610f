"""`benchmarks/gpu.sh`: its parts run as processes, figures survive a part that fails, hangs or dies, and the whole runs in small on the CPU."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.result import GpuResult, read_result
from benchmarks.gpu.tables import tables
from benchmarks.programs import ROOT

# A part of the cases a, b and c, of which b does what its first argument says.
SCRIPT = """
import json, os, sys, time
def tell(case, **what): print("@gpu", json.dumps({"part": "decode", "case": case} | what), flush=True)
done = [case for _, case in json.loads(sys.argv[2])]
print("a library says something", flush=True)
for case in "abc":
    if case in done:
        continue
    tell(case, begins=True)
    if case == "b":
        if sys.argv[1] == "hangs":
            time.sleep(60)
        if sys.argv[1] == "dies":
            os._exit(7)
        tell(case, failure="no")
        if sys.argv[1] == "breaks the device":
            sys.exit(3)
        continue
    tell(case, figures={"case": case, "skipped": done}, seconds=1.0)
"""


def run_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, within: float | None = None) -> dict[str, Any]:
    monkeypatch.setattr(
        gpu,
        "command_of",
        lambda group, device, args, skip, share: [sys.executable, "-c", SCRIPT, how, json.dumps(skip)],
    )
    result = GpuResult(tmp_path / "gpu.json", {"gpu": "A GPU"}, "code", tiny=False)
    run = gpu.Run(result, Namespace(within=None, tiny=False, go_on=False, work=tmp_path), "cpu")
    if within:
        monkeypatch.setitem(PARTS, "decode", PARTS["decode"].__class__("", "", within))
    run.parts(["decode"])
    assert run.failed == 1
    return read_result(result.path)


@pytest.mark.parametrize(
    ("how", "within", "kept", "message"),
    [
        ("fails", None, {"a": [], "c": []}, "no"),
        ("breaks the device", None, {"a": [], "c": ["a", "b"]}, "no"),
        ("dies", None, {"a": [], "c": ["a", "b"]}, "exit 7: a library says something"),
        ("hangs", 2.0, {"a": []}, "not done after 2 s"),
    ],
)
def test_a_case_that_fails_is_noted_and_the_others_are_kept(tmp_path, monkeypatch, how, within, kept, message):
    found = run_of(tmp_path, monkeypatch, how, within)
    assert {e["case"]: e["figures"]["skipped"] for e in found["figures"]} == kept
    assert {e["case"]: e["message"] for e in found["failures"]} == {"b": message}


def run_tiny(folder: Path, *options: str) -> dict[str, Any]:
    """Fails with what it printed unless everything was measured."""
    command = [str(ROOT / "benchmarks" / "gpu.sh"), "--tiny", "--work", str(folder), *options]
    environment = os.environ | {"PYTHON": sys.executable}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return read_result(folder / "results" / "gpu-tiny.json")


@pytest.mark.nightly
def test_everything_runs_in_small_without_a_gpu(tmp_path):
    found = run_tiny(tmp_path, "--only", "decode,prefill,few-shot,parity")
    assert found["failures"] == []
    assert {entry["part"] for entry in found["figures"]} == {"decode", "prefill", "few-shot", "parity"}
    exact = [e["figures"]["exact"] for e in found["figures"] if e["case"].startswith(("float32", "schedules"))]
    assert exact == [True, True, True]
    assert [e["figures"]["notes"] for e in found["figures"] if e["part"] == "parity"] == [[]] * 5
    for entry in found["figures"]:
        if entry["part"] == "decode":
            assert entry["figures"]["own_tokens"] == 127.5
            assert entry["figures"]["floor_ms"] > 0


# -- its results


H200 = {
    "gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0",
    "versions": {"python": "3.12.3", "torch": "2.11.0", "transformers": "5.17.0", "triton": "3.6.0"},
}  # fmt: skip
DECODED = {"tokens_per_s": 20_000.4, "step_ms": 12.8, "floor_ms": 8.61, "floor_share": 0.673}


def result(folder: Path, machine: dict[str, Any] = H200, source: str = "one", *, tiny: bool = False) -> GpuResult:
    return GpuResult(folder / "gpu.json", machine, source, tiny=tiny)


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


def test_a_table_of_several_gpus_names_them_and_compares_engines_on_one_alone(tmp_path):
    h100 = result(tmp_path, H200 | {"gpu": "NVIDIA H100 80GB HBM3"})
    h100.add("decode", "8b 1024", DECODED, 1)
    h100.add("shared-prefix", "vllm", {"rows": 10, "tokens_per_s": 50.0}, 1)
    h200 = result(tmp_path / "other")
    for part, engine, rate in (
        ("shared-prefix", "batchgen", 100.0), ("few-shot", "batchgen", 100.0), ("few-shot", "vllm", 25.0)
    ):  # fmt: skip
        h200.add(part, engine, {"rows": 10, "tokens_per_s": rate}, 1)
    h100.merge(h200.json)
    lines = tables(h100.json).splitlines()
    assert "| 1,024 tokens, H100 | 20,000 | 12.8 | 8.6 | 67% |" in lines
    rates = {line.split(" | ")[0]: line.split(" | ")[1:4] for line in lines}
    assert rates["| shared prefix, 0.5B, H200"] == ["100", "not measured", "50 (10 rows, H100)"]
    assert rates["| few shot, 0.5B, H200"] == ["100", "not measured", "25 **4.0x**"]
