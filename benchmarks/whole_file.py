"""The whole file in prefix order: its savings and its cost.

    python -m benchmarks.whole_file --work FOLDER --rows 1000000 --groups 20000 [--sorted]

Makes a shuffled file of short rows in groups that share a beginning, and runs it (one token per row, tiny random model) in prefix order; with --sorted also
the same rows in order. Compares the number of prefilled tokens with the token trie of the whole file, and the time of the first reading (read,
tokenize, spool, sort) with that of tokenizing alone, in the same process.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from batchgen import EngineConfig, JobConfig, ModelConfig, PromptConfig, SamplingParams, run_job
from batchgen.progress import Silent, Snapshot
from batchgen.prompts import PromptBuilder, load_tokenizer
from batchgen.records import RowStream, open_input
from benchmarks.machine import machine_facts
from benchmarks.models import tiny_model_folder

WORDS = [
    "invoice",
    "amount",
    "date",
    "review",
    "product",
    "great",
    "bad",
    "service",
    "order",
    "ticket",
    "account",
    "billing",
    "refund",
    "delivery",
    "late",
    "happy",
    "question",
    "answer",
    "city",
    "name",
    "total",
]
BLOCK = 2_000


def write_rows(path: Path, count: int, groups: int, *, in_order: bool = False) -> None:
    rng = random.Random(0)
    heads = [f"{' '.join(rng.choice(WORDS) for _ in range(4))} {g}:" for g in range(groups)]
    rows = [(rng.randrange(groups), rng.choice(WORDS), i) for i in range(count)]
    if in_order:
        rows.sort(key=lambda row: heads[row[0]])
    with path.open("w") as file:
        for group, rest, i in rows:
            file.write(json.dumps({"id": i, "prompt": f"{heads[group]} {rest} {i}"}) + "\n")


class Phases(Silent):
    """When each phase began."""

    def __init__(self) -> None:
        self.began: list[tuple[str, float]] = []

    def update(self, now: Snapshot) -> None:
        if not self.began or self.began[-1][0] != now.phase:
            self.began.append((now.phase, time.perf_counter()))

    def seconds(self, name: str) -> float:
        """Returns the seconds from the first start of a phase to the next phase."""
        at = next(i for i, (phase, _) in enumerate(self.began) if phase == name)
        return self.began[at + 1][1] - self.began[at][1]


def tokenizing(model: str, path: Path) -> dict[str, float]:
    """Returns the seconds to tokenize the texts of the file: by the library alone, by transformers' own call, and with reading and rendering of the rows."""
    tokenizer = load_tokenizer(ModelConfig(model=model))
    with path.open() as file:
        texts = [json.loads(line)["prompt"] for line in file]
    backend = tokenizer.hf_tokenizer.backend_tokenizer
    seconds = {}
    began = time.perf_counter()
    for i in range(0, len(texts), BLOCK):
        [e.ids for e in backend.encode_batch_fast(texts[i : i + BLOCK], add_special_tokens=True)]
    seconds["tokenizers"] = time.perf_counter() - began
    began = time.perf_counter()
    for i in range(0, len(texts), BLOCK):
        tokenizer.hf_tokenizer(texts[i : i + BLOCK])
    seconds["transformers"] = time.perf_counter() - began
    del texts
    builder = PromptBuilder(tokenizer, PromptConfig(chat=False), SamplingParams(max_tokens=1))
    began = time.perf_counter()
    stream = RowStream(open_input([str(path)], format=None, output=None).rows())
    while rows := stream.take(BLOCK):
        builder.build(rows)
    seconds["read, render and tokenize"] = time.perf_counter() - began
    return seconds


def run(model: str, path: Path) -> dict[str, Any]:
    phases = Phases()
    config = JobConfig(
        inputs=(str(path),),
        model=ModelConfig(model=model),
        output=str(path.with_suffix(".out.jsonl")),
        prompts=PromptConfig(chat=False),
        sampling=SamplingParams(max_tokens=1),
        engine=EngineConfig(batch_size=1024, max_batch_tokens=16_384),
        overwrite=True,
    )
    stats = run_job(config, phases).stats
    kept = (
        "rows",
        "prompt_tokens",
        "prefill_tokens",
        "prefill_tokens_min",
        "seconds",
        "memory_bytes_peak",
        "rows_per_s",
    )
    return {"first_reading_seconds": phases.seconds("planning"), **{name: stats[name] for name in kept}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--groups", type=int, default=20_000)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the files and the model")
    parser.add_argument("--sorted", action="store_true", help="also the same rows in order")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    model = str(tiny_model_folder(given.work))  # tiny, so that the file is most of the work
    shuffled = given.work / "shuffled.jsonl"
    write_rows(shuffled, given.rows, given.groups)
    result: dict[str, Any] = {"machine": machine_facts(), "rows": given.rows, "groups": given.groups}
    result["tokenizing_seconds"] = tokenizing(model, shuffled)
    result["shuffled"] = run(model, shuffled)
    if given.sorted:
        in_order = given.work / "in_order.jsonl"
        write_rows(in_order, given.rows, given.groups, in_order=True)
        result["in_order"] = run(model, in_order)
    text = json.dumps(result, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
