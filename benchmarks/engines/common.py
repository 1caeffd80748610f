"""What all engine scripts share: arguments, rows, and the JSON line of figures. Imports only the standard library.

A script runs with the Python of its engine's own environment, where batchgen and torch may be missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

PATIENCE = 2
"""A sweep ends after this many sizes in a row that are slower than the best."""


@dataclass(frozen=True, slots=True)
class Work:
    """A workload's rows, in the order of its file."""

    prompts: list[str]
    max_tokens: list[int]

    @property
    def completion_tokens(self) -> int:
        return sum(self.max_tokens)


def parser(description: str, converts: bool = False) -> argparse.ArgumentParser:
    """`converts`: the engine has its own format for models, which the same script makes beforehand with `--convert`."""
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--model", required=True, help="model folder")
    p.add_argument("--input", required=True, help="JSONL of {id, prompt, sampling_params: {max_tokens}}")
    p.add_argument("--ids-out", help="write the completions' token ids there, a JSON list a row (not for timing)")
    p.add_argument("--int8", action="store_true", help="in 8 bits, in the engine's own form of them")
    if converts:
        p.add_argument("--converted", type=Path, help="the model in the engine's own form")
        p.add_argument("--convert", action="store_true", help="make that, and nothing else")
    return p


def add_device(p: argparse.ArgumentParser) -> None:
    """Adds the option `--device`, for engines that run on other devices than the CPU, too."""
    p.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")


def threads() -> int:
    """Returns the engine's number of threads, which `compare.py` sets by OpenMP's variable."""
    return int(os.environ["OMP_NUM_THREADS"])


def model_dtype(model: str) -> str:
    """ "float32" or "bfloat16", as the checkpoint says."""
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    return str(config.get("dtype") or config["torch_dtype"])


def shared_prefix(ids: Sequence[Sequence[Any]]) -> int:
    """Returns the number of tokens that all prompts begin with. Each prompt keeps at least one token of its own, from which it continues."""
    first, last = min(ids), max(ids)
    most = min(map(len, ids)) - 1
    return next((i for i in range(most) if first[i] != last[i]), most)


def add_sweep(p: argparse.ArgumentParser, batch: int) -> None:
    """Adds the options of an engine whose best batch size is searched for first."""
    p.add_argument("--batch", type=int, default=batch)
    p.add_argument("--sweep", type=lambda text: [int(size) for size in text.split(",")], help="sizes to try instead")
    p.add_argument("--sweep-rows", type=int, default=32)


def read_work(path: str) -> Work:
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return Work([row["prompt"] for row in rows], [row["sampling_params"]["max_tokens"] for row in rows])


def check_and_write_ids(path: str | None, ids: Sequence[Sequence[int]], work: Work) -> None:
    """Checks that the engine has made the right number of tokens for each row, and writes them. Otherwise its figures would mean nothing."""
    made = [len(row) for row in ids]
    if made != work.max_tokens:
        wrong = sum(a != b for a, b in zip(made, work.max_tokens, strict=False))
        raise SystemExit(f"{wrong} of {len(work.max_tokens)} rows have another number of tokens than asked for")
    if path:
        Path(path).write_text("".join(json.dumps(list(map(int, row))) + "\n" for row in ids), encoding="utf-8")


def report(
    engine: str,
    *,
    wall_s: float,
    load_s: float,
    completion_tokens: int,
    rows: int,
    packages: Sequence[str],
    **extras: Any,
) -> None:
    """Prints the line that `compare.py` reads. `wall_s`: generation with tokenizing, without loading the model."""
    print(
        json.dumps(
            {
                "engine": engine,
                "rows": rows,
                "wall_s": round(wall_s, 4),
                "load_s": round(load_s, 4),
                "completion_tokens": completion_tokens,
                "tokens_per_s": round(completion_tokens / wall_s, 3),
                "memory_bytes_peak": memory_bytes_peak(),
                "versions": {"python": platform.python_version()} | {name: version_of(name) for name in packages},
                "extras": extras,
            }
        ),
        flush=True,
    )


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def memory_bytes_peak() -> int:
    """Returns the maximum memory of this process so far."""
    try:
        # getrusage includes the memory of the parent process at the start; the kernel's own figure does not.
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
