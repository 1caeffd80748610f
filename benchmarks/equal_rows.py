"""What equal rows cost: `python -m benchmarks.equal_rows`. Runs the different rows of a job alone, and the whole job, of which 60 % are equal to others.

Seconds are processor time of the command and its child processes, in user mode and in all; medians of runs that take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from pathlib import Path

from benchmarks.programs import run_batchgen


def write_rows(folder: Path, count: int, equal: float, words: int) -> dict[str, Path]:
    """Writes the job `all` and the job `different`, which has its different rows. Prompts have so many words."""
    rng = random.Random(3)
    vocabulary = [
        "order",
        "town",
        "letter",
        "price",
        "lamp",
        "chair",
        "paid",
        "green",
        "north",
        "seven",
        "winter",
        "paper",
    ]
    different = [" ".join(rng.choices(vocabulary, k=words)) + f" {i}" for i in range(count - int(count * equal))]
    prompts = different + rng.choices(different, k=count - len(different))
    rng.shuffle(prompts)
    files = {"different": different, "all": prompts}
    for name, texts in files.items():
        lines = [json.dumps({"id": i, "prompt": text}) for i, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return {name: folder / f"{name}.jsonl" for name in files}


def run(rows: Path, model: str, max_tokens: int) -> tuple[float, float]:
    """Runs a job. Returns its seconds in user mode, and those in all."""
    before = os.times()
    run_batchgen(rows, model, f"{rows}.out.jsonl", "--overwrite", "--max-tokens", str(max_tokens))
    after = os.times()
    user = after.children_user - before.children_user
    return user, user + after.children_system - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--equal", type=float, default=0.6)
    parser.add_argument("--model", default="sample_data/model")
    parser.add_argument("--words", type=int, nargs="+", default=[20, 400], help="words of a prompt")
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print("| words | tokens out | different rows, user s | all rows, user s | ratio | ratio, user and system |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for words in args.words:
        for out in args.max_tokens:
            with tempfile.TemporaryDirectory() as place:
                files = write_rows(Path(place), args.rows, args.equal, words)
                seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in files}
                for _ in range(args.repeats):
                    for name, rows in files.items():
                        seconds[name].append(run(rows, args.model, out))
            user, whole = ({n: statistics.median(s[i] for s in seconds[n]) for n in files} for i in (0, 1))
            ratios = user["all"] / user["different"], whole["all"] / whole["different"]
            print(
                f"| {words} | {out} | {user['different']:.1f} | {user['all']:.1f} | {ratios[0]:.3f} | {ratios[1]:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
