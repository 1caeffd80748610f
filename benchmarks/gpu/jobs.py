"""Whole jobs from the command line with the sample model: the answers, plain torch beside it, and a job that is killed and continued."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.device import Bench
from benchmarks.programs import ROOT, python_path

SAMPLE = ROOT / "sample_data"
LIMIT = 150.0
SAMPLED = ("--temperature", "0.8", "--seed", "5", "--max-tokens", "64", "--batch-size", "16")


def cases(bench: Bench) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    yield "answers", lambda: answers(bench)
    for dtype in bench.size(("float32", "bfloat16"), ("float32",)):
        yield f"beside plain torch on the CPU, {dtype}", lambda dtype=dtype: beside_cpu(bench, dtype)  # type: ignore[misc]
    yield "killed and continued", lambda: killed(bench)


def answers(bench: Bench) -> dict[str, Any]:
    """The share of the sample job's rows that are right, in the type that jobs choose, and what the job says."""
    with tempfile.TemporaryDirectory() as folder:
        output, stats = Path(folder) / "out.jsonl", Path(folder) / "stats.json"
        began = time.perf_counter()
        said = finished(job(bench, output, "--stats", str(stats)))
        rows = texts(output)
        figures = json.loads(stats.read_text())
        return {
            "right": sum((row["text"] or "").strip() == row["expected"] for row in rows),
            "rows": len(rows),
            "completion_tokens_per_s": figures["completion_tokens_per_s"],
            "wall_s": round(time.perf_counter() - began, 2),
            "notes": [line for line in said.splitlines() if "switched off" in line or "plain torch" in line],
        }


def beside_cpu(bench: Bench, dtype: str) -> dict[str, Any]:
    """Counts rows whose text is that of plain torch on the CPU, greedy and sampled. Near ties may differ."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for how, options in {"greedy": (), "sampled": SAMPLED}.items():
            outputs = [Path(folder) / f"{how}-{device}.jsonl" for device in ("device", "cpu")]
            finished(job(bench, outputs[0], "--dtype", dtype, *options))
            finished(job(bench, outputs[1], "--dtype", dtype, "--compile", "off", *options, device="cpu"))
            mine, theirs = ([row["text"] for row in texts(output)] for output in outputs)
            found[how] = {"rows": len(mine), "equal": sum(a == b for a, b in zip(mine, theirs, strict=True))}
    return found


def killed(bench: Bench) -> dict[str, Any]:
    """Kills a job each time some rows are stored, and continues it. Its output must have the rows of one that was left alone."""
    with tempfile.TemporaryDirectory() as folder:
        whole, cut = Path(folder) / "whole.jsonl", Path(folder) / "cut.jsonl"
        options = ("--dtype", "float32", *SAMPLED)
        finished(job(bench, whole, *options))
        kills = 0
        for _ in range(bench.size(3, 1)):
            process = job(bench, cut, *options)
            before = stored(cut)
            end = time.monotonic() + LIMIT
            while process.poll() is None and stored(cut) <= before and time.monotonic() < end:
                time.sleep(0.02)
            if process.poll() is None:
                process.kill()
                kills += 1
            process.communicate()
        finished(job(bench, cut, *options))
        mine, theirs = texts(cut), texts(whole)
        equal = sum(a["text"] == b["text"] for a, b in zip(mine, theirs, strict=True))
        return {"rows": len(theirs), "equal": equal, "kills": kills}


def job(bench: Bench, output: Path, *options: str, device: str | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "batchgen", "run", str(SAMPLE / "prompts.jsonl"), "--model", str(SAMPLE / "model")]
    command += ["-o", str(output), "--device", device or bench.device.type, *options]
    environment = os.environ | {"PYTHONPATH": python_path()}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finished(process: subprocess.Popen[str]) -> str:
    """Waits for a job and returns what it has said. Raises `RuntimeError` if it fails."""
    try:
        said, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    if process.returncode:
        raise RuntimeError(f"a job ended with {process.returncode}: {said[-1500:]}")
    return said


def stored(output: Path) -> int:
    """Bytes that a job's folder holds so far."""
    folders = output.parent.glob(f"{output.name}.*")
    return sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())


def texts(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
