"""What every engine script shares: its arguments, its rows, its one JSON line of figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.stats import memory_bytes_peak, versions


@dataclass(frozen=True, slots=True)
class Work:
    """A workload's rows, in the order of its file."""

    prompts: list[str]
    max_tokens: list[int]

    @property
    def completion_tokens(self) -> int:
        return sum(self.max_tokens)


def parser(description: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--model", required=True, help="model folder")
    p.add_argument("--input", required=True, help="JSONL of {id, prompt, sampling_params: {max_tokens}}")
    p.add_argument("--ids-out", help="write the completions' token ids there, a JSON list a row (not for timing)")
    return p


def read_work(path: str) -> Work:
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return Work([row["prompt"] for row in rows], [row["sampling_params"]["max_tokens"] for row in rows])


def check_and_write_ids(path: str | None, ids: Sequence[Sequence[int]], work: Work) -> None:
    """Every engine makes the same number of tokens for each row, or its figures mean nothing."""
    made = [len(row) for row in ids]
    if made != work.max_tokens:
        wrong = sum(a != b for a, b in zip(made, work.max_tokens, strict=False))
        raise SystemExit(f"{wrong} of {len(work.max_tokens)} rows have another number of tokens than asked for")
    if path:
        Path(path).write_text("".join(json.dumps(list(map(int, row))) + "\n" for row in ids), encoding="utf-8")


def report(engine: str, *, wall_s: float, load_s: float, completion_tokens: int, rows: int, **extras: Any) -> None:
    """Prints the line that `compare.py` reads. `wall_s`: generation with tokenizing in it, without the load of the model."""
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
                "versions": versions(),
                "extras": extras,
            }
        ),
        flush=True,
    )
