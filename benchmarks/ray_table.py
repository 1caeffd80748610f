"""A table through Ray Data on a cluster of two nodes of this machine: Parquet in, prefix order, one token for each row, Parquet out.

    python -m benchmarks.ray_table --rows 1000000 --work FOLDER --out benchmarks/results/ray_table.json

Measures rows/s, the memory of the driver over time, and the prompt tokens that were run beside two minima: the token trie of all prompts, and the
sum of the tries of all batches, the minimum with cuts between batches.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import shutil
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen import SamplingParams
from batchgen.prefix.order import common_length, token_key
from batchgen.ray_data import Generate, in_prefix_order
from benchmarks.machine import machine_facts
from benchmarks.models import tiny_model_folder

GROUP = 200
"""Rows that share a prefix."""
FILES = 50
PAGE = 4096


class Counted(Generate):
    """Writes for each batch: its first and last prompt, the size of its token trie, and the prompt tokens that this actor has run so far."""

    def __init__(self, *given: Any, folder: str, **options: Any) -> None:
        super().__init__(*given, **options)
        self._folder, self._batches = Path(folder), 0
        self._name = f"{random.SystemRandom().getrandbits(64):016x}"

    def __call__(self, batch: pa.Table) -> pa.Table:
        engine, prompts = self._llm.engine, []
        add = engine.add

        def counted(leaves: Any, *rest: Any) -> None:
            prompts.extend(leaf.tokens for leaf in leaves)
            add(leaves, *rest)

        engine.add = counted  # type: ignore[method-assign]
        try:
            done = super().__call__(batch)
        finally:
            engine.add = add  # type: ignore[method-assign]
        prompts.sort(key=token_key)
        shared = sum(common_length(a, b) for a, b in pairwise(prompts))
        told = {
            "first": prompts[0],
            "last": prompts[-1],
            "min": sum(map(len, prompts)) - shared,
            "prompt": sum(map(len, prompts)),
            "rows": len(prompts),
            "run": self._llm.stats.prefill_tokens,
        }
        self._batches += 1
        (self._folder / f"{self._name}-{self._batches:06d}").write_bytes(pickle.dumps(told))
        return done


class Memory:
    """The resident memory of this process, every second."""

    def __init__(self) -> None:
        self.mib: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(1.0):
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            self.mib.append(pages * PAGE >> 20)

    def end(self) -> dict[str, Any]:
        """Returns the memory at ten moments at equal distances, and the maximum."""
        self._ended.set()
        self._thread.join()
        tenths = [self.mib[i * (len(self.mib) - 1) // 10] for i in range(11)]
        return {"mib_over_time": tenths, "mib_max": max(self.mib)}


def write_rows(folder: Path, rows: int) -> None:
    """Short prompts in groups of `GROUP`, shuffled over all files."""
    folder.mkdir(parents=True)
    order = np.random.default_rng(0).permutation(rows)
    for file, numbers in enumerate(np.array_split(order, FILES)):
        prompts = [
            f"Words of group {n // GROUP}, all of one language. Which one is it? Word {n % GROUP}" for n in numbers
        ]
        pq.write_table(pa.table({"n": numbers, "prompt": prompts}), folder / f"{file:03d}.parquet")


def run(work: Path, model: Path, rows: int, blocks: int, batch: int, workers: int) -> dict[str, Any]:
    import ray
    from ray.cluster_utils import Cluster

    write_rows(work / "in", rows)
    (work / "told").mkdir()
    cpus = 2 * workers + 2
    node = {"num_cpus": cpus // 2, "object_store_memory": 1 << 30}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        nodes = len(ray.nodes())
        memory, began = Memory(), time.perf_counter()
        ordered = in_prefix_order(ray.data.read_parquet(str(work / "in")), model, blocks=blocks, tokenizers=workers)
        done = ordered.map_batches(
            Counted,
            fn_constructor_args=(str(model), SamplingParams(max_tokens=1)),
            fn_constructor_kwargs={"device": "cpu", "folder": str(work / "told")},
            batch_format="pyarrow",
            batch_size=batch,
            compute=ray.data.ActorPoolStrategy(size=workers),
            num_cpus=1,
        )
        done.write_parquet(str(work / "out"))
        seconds = time.perf_counter() - began
        driver = memory.end()
    finally:
        ray.shutdown()
        cluster.shutdown()
    numbers = np.concatenate([pq.read_table(path, columns=["n"])["n"].to_numpy() for path in (work / "out").iterdir()])
    assert np.array_equal(np.sort(numbers), np.arange(rows)), "rows are missing, or there twice"
    facts = {"rows": rows, "nodes": nodes, "workers": workers, "blocks": blocks, "batch": batch}
    return facts | {
        "seconds": round(seconds, 1),
        "rows_per_s": round(rows / seconds, 1),
        "driver": driver,
        "prompt_tokens": tokens_run(work / "told"),
    }


def tokens_run(folder: Path) -> dict[str, Any]:
    """Returns the prompt tokens that were run, and the two minima."""
    batches = [(path.name.partition("-")[0], pickle.loads(path.read_bytes())) for path in sorted(folder.iterdir())]
    run = sum({name: told["run"] for name, told in batches}.values())  # an actor's last batch has its sum
    ordered = sorted((told for _, told in batches), key=lambda told: token_key(told["first"]))
    pairs = list(pairwise(ordered))
    with_cuts = sum(told["min"] for told in ordered)
    whole = with_cuts - sum(common_length(a["last"], b["first"]) for a, b in pairs)
    return {
        "all": sum(told["prompt"] for told in ordered),
        "run": run,
        "min": whole,
        "min_with_cuts": with_cuts,
        "batches": len(ordered),
        "batches_that_overlap": sum(token_key(a["last"]) > token_key(b["first"]) for a, b in pairs),
        "run_over_min": round(run / whole, 5),
        "run_over_min_with_cuts": round(run / with_cuts, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--blocks", type=int, default=64, help="blocks to sort into (%(default)s)")
    parser.add_argument("--batch", type=int, default=8192, help="rows of a batch of Generate (%(default)s)")
    parser.add_argument(
        "--workers", type=int, default=2, help="actors that generate, and actors that tokenize (%(default)s)"
    )
    parser.add_argument("--work", type=Path, required=True, help="an empty folder")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    place = arguments.work / "table"
    shutil.rmtree(place, ignore_errors=True)
    model = tiny_model_folder(arguments.work)
    found = {"machine": machine_facts()} | run(
        place, model, arguments.rows, arguments.blocks, arguments.batch, arguments.workers
    )
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
