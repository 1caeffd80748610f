"""Compares the column `text` of an output file with `expected`, and prints how many are right, task by task.

    python sample_data/check_answers.py OUTPUT [--threshold 0.95]

Exit code 1 when fewer than the threshold are right, 2 when the file is not such an output.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

COLUMNS = ("task", "expected", "text")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a Parquet file, else of JSONL (plain, or .gz)."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        present = [name for name in COLUMNS if name in pq.read_schema(path).names]
        return list(pq.read_table(path, columns=present).to_pylist())
    lines = (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8")
    with lines:
        return [json.loads(line) for line in lines if line.strip()]


def count_right(rows: Iterable[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """For each task the right rows and all rows. Spaces around an answer do not count, anything else does."""
    counts: dict[str, tuple[int, int]] = {}
    for row in rows:
        right, total = counts.get(row["task"], (0, 0))
        text = row["text"]
        counts[row["task"]] = (right + (text is not None and text.strip() == row["expected"]), total + 1)
    return dict(sorted(counts.items()))


def table(counts: dict[str, tuple[int, int]]) -> str:
    right, total = (sum(pair[i] for pair in counts.values()) for i in (0, 1))
    lines = [f"{'task':<12}{'right':>7}{'rows':>7}{'accuracy':>11}"]
    lines += [f"{task:<12}{good:>7}{rows:>7}{good / rows:>11.1%}" for task, (good, rows) in counts.items()]
    lines += ["-" * len(lines[0]), f"{'total':<12}{right:>7}{total:>7}{right / total:>11.1%}"]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares an output's answers with the expected ones.")
    parser.add_argument("output", type=Path, help="what `batchgen run` wrote: JSONL or Parquet")
    parser.add_argument("--threshold", type=float, default=0.95, help="least share of right answers (default 0.95)")
    args = parser.parse_args()
    try:
        rows = read_rows(args.output)
    except (OSError, ValueError) as error:
        parser.error(f"cannot read {args.output}: {error}")
    if not rows or any(name not in row for row in rows for name in COLUMNS):
        parser.error(f"{args.output} has no rows, or not all of the columns {', '.join(COLUMNS)}")
    counts = count_right(rows)
    print(table(counts))
    if sum(right for right, _ in counts.values()) < args.threshold * len(rows):
        print(f"fewer than {args.threshold:.0%} are right", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
