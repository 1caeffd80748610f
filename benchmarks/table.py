"""A result file of `compare.py` as a markdown table; kept between two markers of README.md, so that it can be made again and checked.

    python -m benchmarks.table benchmarks/results/cpu.json                        prints it
    python -m benchmarks.table benchmarks/results/cpu.json --write README.md      puts it between the markers
    python -m benchmarks.table benchmarks/results/cpu.json --check README.md      fails if it is not what is there

The markers are `<!-- benchmarks:NAME:begin -->` and `<!-- benchmarks:NAME:end -->`, with the name of the result.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.compare import ENGINES, GENERATE, SCHEMA, medians

LABELS = {
    "batchgen": "batchgen",
    "transformers-generate": "transformers `generate`",
    "transformers-continuous": "transformers continuous batching",
}


def cases(result: dict[str, Any]) -> list[dict[str, str]]:
    """Every (model, dtype, workload) that was measured, in the order of the measurements."""
    keys = ("model", "dtype", "workload")
    seen = {tuple(m[key] for key in keys): None for m in result["measurements"]}
    return [dict(zip(keys, case, strict=True)) for case in seen]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def best_batch(result: dict[str, Any], case: dict[str, str]) -> int | None:
    for m in result["measurements"]:
        if m["engine"] == GENERATE and all(m[key] == value for key, value in case.items()):
            return int(m["extras"]["batch"])
    return None


def table(result: dict[str, Any]) -> str:
    """Rows: cases. Columns: tokens/s of each engine, and how many times batchgen's that is."""
    engines = [e for e in ENGINES if any(m["engine"] == e for m in result["measurements"])]
    head = ["workload", "model"]
    for engine in engines:
        head += [LABELS[engine]] if engine == "batchgen" else [LABELS[engine], "ratio"]
    lines = [head, ["---", "---", *["---:"] * (len(head) - 2)]]
    for case in cases(result):
        rates = medians(result, case)
        cells = [case["workload"].replace("-", " "), f"{case['model']} {case['dtype']}"]
        for engine in engines:
            rate, ours = rates.get(engine), rates.get("batchgen")
            batch = f" (batch {best_batch(result, case)})" if engine == GENERATE and rate else ""
            cells.append(f"{number(rate)}{batch}" if rate else "–")
            if engine != "batchgen":
                cells.append(f"**{ours / rate:.1f}x**" if rate and ours else "–")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\n" + caption(result)


def caption(result: dict[str, Any]) -> str:
    machine, settings = result["machine"], result["settings"]
    versions = machine["versions"]
    measured = [
        sum(m["engine"] == "batchgen" and all(m[k] == v for k, v in case.items()) for m in result["measurements"])
        for case in cases(result)
    ]
    repeats = min(measured, default=0)
    text = (
        f"Completion tokens/s, medians of {repeats} interleaved runs; tokenizing is in, the load of the model is not; the ratio is batchgen's to that engine's. "
        f"{machine['cpu']}, {settings['threads']} threads, torch {versions['torch']}, transformers {versions['transformers']}, {machine['date'][:10]}."
    )
    if settings["limit"]:
        text += f" Only the first {settings['limit']} rows of each workload."
    for failure in result["failures"]:
        text += f" {failure['workload']}, {failure['model']} {failure['dtype']}: {failure['message']}."
    return text + "\n"


def put(text: str, name: str, content: str) -> str:
    """`text` with `content` between the markers of `name`. Raises `ValueError` if they are not there, once each."""
    begin, end = f"<!-- benchmarks:{name}:begin -->", f"<!-- benchmarks:{name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the markers {begin} and {end} must be there once each, in this order")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{content}{end}{rest.partition(end)[2]}"


def main() -> None:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("result", type=Path)
    what = p.add_mutually_exclusive_group()
    what.add_argument("--write", type=Path, metavar="FILE", help="put the table between its markers in this file")
    what.add_argument("--check", type=Path, metavar="FILE", help="exit with 1 if the table in this file is another")
    args = p.parse_args()
    try:
        result = json.loads(args.result.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        p.error(f"{args.result} cannot be read: {e}")
    if result.get("schema") != SCHEMA:
        p.error(f"{args.result} is not a result of compare.py ({SCHEMA})")
    content = table(result)
    file = args.write or args.check
    if file is None:
        print(content, end="")
        return
    text = file.read_text(encoding="utf-8")
    try:
        new = put(text, result["name"], content)
    except ValueError as e:
        p.error(f"{file}: {e}")
    if args.write:
        file.write_text(new, encoding="utf-8")
    elif new != text:
        sys.exit(
            f"{file} is not what {args.result} says; make it again: python -m benchmarks.table {args.result} --write {file}"
        )


if __name__ == "__main__":
    main()
