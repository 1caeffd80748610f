"""Quantized checkpoints beside the 16-bit one: `python -m benchmarks.packed`. The size of the file, memory, the time to load, and tokens per second by the number of rows.

The checkpoints are made from the random model of the 0.3B shapes. llama.cpp runs the same GGUF files if it is in the engines' folder
(`setup_engines.sh FOLDER llamacpp`). One run of each, in turn, of prompts of 32 tokens that share nothing and 32 tokens out; the speed is that of
the whole generation, prompts included.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from batchgen.process.machine import usable_cores
from benchmarks.machine import in_words, machine_facts
from benchmarks.models import model_folder
from benchmarks.programs import ROOT, run_batchgen
from benchmarks.workloads import single_token_words

FORMATS = {
    "Q4_0": "gguf", "Q4_K": "gguf", "Q8_0": "gguf", "MXFP4": "gguf", "AWQ": "awq", "GPTQ": "gptq", "NF4": "bitsandbytes nf4", "FP8": "fp8", "W4A16": "W4A16",
}  # fmt: skip
"""The formats, and who makes their checkpoints: "gguf", or a name of tests/support/quantized.py."""
PLAIN = "bfloat16"


def checkpoint(work: Path, name: str) -> Path:
    """Returns the model in a format: a folder or a GGUF file. Makes it if it is missing."""
    plain = model_folder(work, "0.3b", "bfloat16")
    if name == PLAIN:
        return plain
    if FORMATS[name] == "gguf":
        from benchmarks.engines.gguf_file import write_gguf

        file = work / "models" / f"0.3b.{name}.gguf"
        if not file.exists():
            write_gguf(plain, file, name)
        return file
    folder = work / "models" / f"0.3b-{name}"
    if not (folder / "config.json").exists():
        sys.path.insert(0, str(ROOT / "tests"))
        import torch
        from transformers import AutoModelForCausalLM

        from support.quantized import make

        make(FORMATS[name], folder, AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16))
        for file in plain.glob("tokenizer*"):
            shutil.copy(file, folder)
        shutil.rmtree(folder / "exact", ignore_errors=True)
    return folder


def rows_file(work: Path, tokenizer: Path, count: int) -> Path:
    from transformers import AutoTokenizer

    words, rnd = single_token_words(AutoTokenizer.from_pretrained(tokenizer)), random.Random(1)
    path = work / f"packed-{count}.jsonl"
    rows = ({"prompt": "".join(rnd.choices(words, k=32)), "sampling_params": {"max_tokens": 32}} for _ in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def size(model: Path) -> int:
    files = [model] if model.is_file() else list(model.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)


def batchgen(model: Path, rows: Path, threads: int) -> dict[str, Any]:
    """Runs a job. Returns its figures."""
    out = rows.with_suffix(".out.jsonl")
    options = [
        "--overwrite",
        "--dtype",
        "bfloat16",
        "--threads",
        str(threads),
        "--kv-memory",
        "512MiB",
        "--speculate",
        "off",
    ]
    run_batchgen(rows, model, out, "--stats", f"{out}.stats", *options)
    found: dict[str, Any] = json.loads(Path(f"{out}.stats").read_text())
    return found


def llamacpp(python: Path, model: Path, tokenizer: Path, rows: Path, count: int, threads: int) -> float:
    """Returns llama.cpp's tokens/s on a GGUF file."""
    command = [
        str(python), "-m", "benchmarks.engines.llamacpp", "--model", str(tokenizer), "--converted", str(model), "--input", str(rows),
        "--batch", str(min(count, 64)),
    ]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=True, env=env, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1])["tokens_per_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for models and rows")
    parser.add_argument("--formats", nargs="+", default=[PLAIN, *FORMATS], choices=[PLAIN, *FORMATS])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--engines", type=Path, help="the folder of setup_engines.sh, for llama.cpp")
    args = parser.parse_args()
    plain = checkpoint(args.work, PLAIN)
    python = args.engines and args.engines / "llamacpp" / "bin" / "python"
    files = {count: rows_file(args.work, plain, count) for count in args.rows}
    counts = " | ".join(f"{count} rows" for count in args.rows)
    print(f"| weights | files, MB | private memory, MB | load, s | {counts} |")
    print("| --- | ---: | ---: | ---: |" + " ---: |" * len(args.rows))
    speeds: dict[int, float] = {}
    for name in args.formats:
        model = checkpoint(args.work, name)
        figures = {count: batchgen(model, files[count], args.threads) for count in args.rows}
        memory = max(f["memory_bytes_peak"] for f in figures.values()) / 1e6
        load = min(f["seconds"]["load"] for f in figures.values())
        cells = []
        for count, f in figures.items():
            speed = f["completion_tokens_per_s"]
            speeds.setdefault(count, speed)
            cells.append(f"{speed:.0f} ({speed / speeds[count]:.2f})")
        print(f"| {name} | {size(model) / 1e6:.0f} | {memory:.0f} | {load:.1f} | {' | '.join(cells)} |", flush=True)
        if python and name != PLAIN and FORMATS[name] == "gguf":
            theirs = [llamacpp(python, model, plain, files[count], count, args.threads) for count in args.rows]
            print(f"| {name}, llama.cpp | | | | {' | '.join(f'{speed:.0f}' for speed in theirs)} |", flush=True)
    facts = machine_facts()
    print(f"\n{in_words(facts)}, {args.threads} threads, {facts['date'][:10]}")


if __name__ == "__main__":
    main()
