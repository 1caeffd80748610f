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
