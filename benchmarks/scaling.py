"""How time grows with the number of rows, and how memory and the share of the roofline change with the length of the shared prefix.

    python -m benchmarks.scaling --out benchmarks/results/scaling.json

Twice the rows should take twice the time. A longer prefix should cost its own keys and values once, and nothing per row.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from benchmarks.machine import cores, machine_facts
from benchmarks.models import DTYPES, SHAPES, model_folder, tiny_model_folder
from benchmarks.programs import OURS, ROOT, Case, Launcher, end_children_too, environment_of, last_json, run
from benchmarks.roofline import ITEM_BYTES, Shape
from benchmarks.workloads import single_token_words

SMALLEST, DOUBLINGS = 1000, 6
PREFIXES = (1024, 8192)


class Rows:
    """Files of rows that share one prefix."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.words = single_token_words(AutoTokenizer.from_pretrained(model))

    def file(self, rows: int, prefix: int, own: tuple[int, int], out: int) -> Path:
        rnd = random.Random(f"{rows} {prefix}")
        shared = self._text(rnd, prefix)
        path = self.folder / f"rows-{rows}-{prefix}.jsonl"
        with path.open("w", encoding="utf-8") as f:
            for row in range(rows):
                prompt = shared + self._text(rnd, rnd.randint(*own))
                f.write(json.dumps({"id": row, "prompt": prompt, "sampling_params": {"max_tokens": out}}) + "\n")
        return path

    def _text(self, rnd: random.Random, tokens: int) -> str:
        return "".join(rnd.choices(self.words, k=tokens))


def doubling(launcher: Launcher, case: Case, rows: Rows, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the seconds by number of rows, as medians of the repeats; `doubled` is their ratio to twice the seconds of half the rows."""
    sizes = [SMALLEST * 2**i for i in range(args.doublings + 1)]
    files = {size: rows.file(size, args.prefix, (8, 8), args.tokens_out) for size in sizes}
    walls: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(args.repeats):
        for size in sizes:
            figures = launcher.call(OURS, of_file(case, files[size]), [])
            walls[size].append(figures["wall_s"])
            print(f"{size:,} rows: {figures['wall_s']:.1f} s", flush=True)
    found: list[dict[str, Any]] = []
    for size in sizes:
        wall = statistics.median(walls[size])
        doubled = round(wall / (2 * found[-1]["wall_s"]), 4) if found else None
        found.append(
            {"rows": size, "wall_s": wall, "walls": walls[size], "ms_a_row": 1e3 * wall / size, "doubled": doubled}
        )
    return found


def by_prefix(launcher: Launcher, case: Case, rows: Rows, args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for prefix in PREFIXES:
        file = rows.file(args.prefix_rows, prefix, (16, 64), args.prefix_tokens_out)
        of = of_file(case, file)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "benchmarks.roofline", "--model", str(of.folder), "--input", str(of.input)]
        least = last_json("roofline", run("roofline", command, environment_of(launcher.threads, path), None))
        runs = [launcher.call(OURS, of, []) for _ in range(args.repeats)]
        wall = statistics.median(r["wall_s"] for r in runs)
        found.append(
            {
                "prefix_tokens": prefix,
                "rows": args.prefix_rows,
                "wall_s": wall,
                "walls": [r["wall_s"] for r in runs],
                "roofline": least,
                "roofline_share": round(least["seconds"]["total"] / wall, 4),
                "memory_bytes_peak": max(r["memory_bytes_peak"] for r in runs),
                "kv_bytes_peak": max(r["extras"]["kv_bytes_peak"] for r in runs),
            }
        )
    return found


def prefix_copies(by_length: list[dict[str, Any]], shape: Shape) -> float:
    """Returns how many copies of the longer prefix are in memory, by the peak of the pool: one if rows keep no copy of it."""
    short, long = by_length
    token = shape.layers * 2 * shape.kv_heads * shape.head_dim * ITEM_BYTES[shape.dtype]
    more: int = long["kv_bytes_peak"] - short["kv_bytes_peak"]
    return more / (token * (long["prefix_tokens"] - short["prefix_tokens"]))


def of_file(case: Case, file: Path) -> Case:
    return Case(case.model, case.dtype, file.stem, case.folder, file)


def show(result: dict[str, Any]) -> None:
    for entry in result["doubling"]:
        doubled = f", {entry['doubled']:.2f} of twice the time of half" if entry["doubled"] else ""
        print(f"{entry['rows']:,} rows: {entry['wall_s']:.1f} s, {entry['ms_a_row']:.2f} ms a row{doubled}")
    for entry in result["by_prefix"]:
        print(
            f"prefix of {entry['prefix_tokens']:,}: {entry['wall_s']:.1f} s, {entry['roofline_share']:.0%} of the roofline, peak "
            f"{entry['memory_bytes_peak'] / 2**20:,.0f} MiB, of it {entry['kv_bytes_peak'] / 2**20:,.0f} MiB keys and values"
        )
    if result["by_prefix"]:
        print(f"what the longer prefix has more is in memory {result['prefix_copies']:.2f} times")


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--parts", nargs="+", choices=["rows", "prefix"], default=["rows", "prefix"])
    p.add_argument("--model", choices=["tiny", *SHAPES], default="30m")
    p.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    p.add_argument("--doublings", type=int, default=DOUBLINGS, help=f"from {SMALLEST:,} rows (%(default)s)")
    p.add_argument("--prefix", type=int, default=256, help="tokens that the doubled rows share (%(default)s)")
    p.add_argument("--tokens-out", type=int, default=8, help="of a doubled row (%(default)s)")
    p.add_argument("--prefix-rows", type=int, default=256, help="rows under each prefix (%(default)s)")
    p.add_argument("--prefix-tokens-out", type=int, default=64, help="of each of those (%(default)s)")
    p.add_argument("--repeats", type=int, default=1, help="medians of so many (%(default)s)")
    p.add_argument("--threads", type=int)
    p.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "batchgen-benchmarks")
    p.add_argument("--out", type=Path, help="write the figures there, as JSON")
    return p.parse_args()


def main() -> None:
    args = parse()
    disable_progress_bar()
    end_children_too()
    tiny = args.model == "tiny"
    folder = tiny_model_folder(args.work) if tiny else model_folder(args.work, args.model, args.dtype)
    launcher = Launcher(Path(), args.threads or cores())
    case = Case(args.model, "float32" if tiny else args.dtype, "scaling", folder, Path())
    result: dict[str, Any] = {"machine": machine_facts(), "model": case.model, "dtype": case.dtype}
    with tempfile.TemporaryDirectory() as place:
        rows = Rows(Path(place), folder)
        result["doubling"] = doubling(launcher, case, rows, args) if "rows" in args.parts else []
        result["by_prefix"] = by_prefix(launcher, case, rows, args) if "prefix" in args.parts else []
    if result["by_prefix"]:
        result["prefix_copies"] = round(prefix_copies(result["by_prefix"], Shape.of(folder)), 3)
    show(result)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
