"""The sample model: a job's answers, what it writes beside plain torch on the CPU, and a job that is killed and continued."""

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

import numpy as np

from batchgen import LLM, Result, SamplingParams
from benchmarks.gpu.device import Bench
from benchmarks.programs import ROOT, python_path
from sample_data.check_answers import count_right

SAMPLE = ROOT / "sample_data"
LIMIT = 150.0
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": 32},
    "sampled": {"temperature": 0.8, "seed": 5, "max_tokens": 32},
    "filters and penalties": {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2, "seed": 3, "max_tokens": 32},
    "three of each": {"temperature": 1.0, "n": 3, "seed": 1, "max_tokens": 8},
    "labels": {"choices": ("Positive", "Negative", "No idea")},
}  # fmt: skip
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
            "right": sum(right for right, _ in count_right(rows).values()),
            "rows": len(rows),
            "completion_tokens_per_s": figures["completion_tokens_per_s"],
            "wall_s": round(time.perf_counter() - began, 2),
            "notes": [line for line in said.splitlines() if "switched off" in line or "plain torch" in line],
        }


def beside_cpu(bench: Bench, dtype: str) -> dict[str, Any]:
    """Counts rows whose tokens (or label) are those of plain torch on the CPU, and compares embeddings. Near ties may differ."""
    lines = (SAMPLE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts: list[Any] = [json.loads(line)["prompt"] for line in lines[::3]]
    options: dict[str, Any] = {"model": SAMPLE / "model", "dtype": dtype, "progress": False}
    here, there = {"device": bench.device.type}, {"device": "cpu", "compile": "off"}
    found: dict[str, Any] = {}
    with LLM(**options, **here) as ours, LLM(**options, **there) as plain:
        for how, params in KINDS.items():
            mine, theirs = (llm.generate(prompts, SamplingParams(**params)) for llm in (ours, plain))
            equal = [_made(a) == _made(b) for a, b in zip(mine, theirs, strict=True)]
            found[how] = {"rows": len(equal), "equal": sum(equal)}
    with LLM(**options, **here, task="embed") as ours, LLM(**options, **there, task="embed") as plain:
        a, b = (np.array([result.embedding for result in llm.embed(prompts)]) for llm in (ours, plain))
    return found | {"embeddings": {"rows": len(a), "largest_difference": float(np.abs(a - b).max())}}


def _made(result: Result) -> Any:
    return result.text if result.choice_probs else [list(completion.token_ids) for completion in result.completions]


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


def job(bench: Bench, output: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "batchgen", "run", str(SAMPLE / "prompts.jsonl"), "--model", str(SAMPLE / "model")]
    command += ["-o", str(output), "--device", bench.device.type, *options]
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
