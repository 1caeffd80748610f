"""A large file is planned, run for a while, killed and continued: how much memory each takes.

    python -m benchmarks.big_file --work FOLDER --rows 5000000 --seconds 120

Rows are about 1 KB each, most of it a column that is only carried. The tiny model generates one token a row. The run is killed (SIGKILL)
`--seconds` after its first results, and then continued for as long. Peaks of memory are the kernel's own figures of each process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from batchgen.errors import UsageError
from batchgen.jobs.status import job_status
from benchmarks.machine import machine_facts
from benchmarks.models import tiny_model_folder

GROUPS = 20_000
ROW_BYTES = 1_000


def write_rows(path: Path, count: int) -> None:
    rng = random.Random(0)
    filler = "".join(rng.choice("abcdefghijklmnop ") for _ in range(2 * ROW_BYTES))
    with path.open("w") as file:
        for i in range(count):
            prompt = f"Group {rng.randrange(GROUPS)} asks: what is {i} good for?"
            at = rng.randrange(ROW_BYTES)
            file.write(json.dumps({"id": i, "prompt": prompt, "note": filler[at : at + ROW_BYTES - 100]}) + "\n")


def peak_mib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) // 1024
    return 0


def results_of(output: str) -> int:
    """Returns the number of results in the job's folder."""
    try:
        return job_status(output)["results"] or 0
    except UsageError:
        return 0


def run_killed(command: list[str], output: str, seconds: float) -> dict[str, Any]:
    """Starts the command, and kills it this long after its first result. Returns what was measured."""
    before = 0 if "--overwrite" in command else results_of(output)
    began = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    first = None
    peak = 0
    while process.poll() is None:
        now = time.perf_counter()
        peak = max(peak, peak_mib(process.pid))
        if first is None and results_of(output) > before:
            first = now - began
        if first is not None and now - began > first + seconds:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.5)
    _, err = process.communicate()
    grown = results_of(output) - before
    return {
        "seconds_to_first_result": first,
        "results_written": grown,
        "peak_mib": peak,
        "returncode": process.returncode,
        "last_line": err.splitlines()[-1:] if err else [],
    }


def planned(command: list[str]) -> dict[str, Any]:
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, peak_mib(process.pid))
        time.sleep(0.5)
    plan = json.loads(process.communicate()[0])
    kept = ("rows", "windows", "prompt_tokens", "prefill_tokens_min", "groups")
    return {"seconds": time.perf_counter() - began, "peak_mib": peak, **{name: plan[name] for name in kept}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the file and the model")
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--no-plan", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    model = str(tiny_model_folder(given.work))
    path = given.work / f"big-{given.rows}.jsonl"
    if not path.exists():
        write_rows(path, given.rows)
    output = path.with_suffix(".out.jsonl")
    batchgen = [sys.executable, "-m", "batchgen_cli"]
    result: dict[str, Any] = {"machine": machine_facts(), "rows": given.rows, "file_bytes": path.stat().st_size}
    if not given.no_plan:
        result["plan"] = planned([*batchgen, "plan", str(path), "-m", model, "--max-tokens", "1", "--json"])
        print(json.dumps(result["plan"]), flush=True)
    run = [*batchgen, "run", str(path), "-m", model, "-o", str(output), "--max-tokens", "1"]
    result["first"] = run_killed([*run, "--overwrite"], str(output), given.seconds)
    print(json.dumps(result["first"]), flush=True)
    result["resumed"] = run_killed(run, str(output), given.seconds)
    result["results"] = results_of(str(output))
    result["folder_bytes"] = sum(
        os.path.getsize(Path(at) / name) for at, _, names in os.walk(f"{output}.job") for name in names
    )
    text = json.dumps(result, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
