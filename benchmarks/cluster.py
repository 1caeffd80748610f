"""How many rows one driver can handle, measured with engines that do nothing, and a simulated job of 100 million rows over 1,000 workers.

    python -m benchmarks.cluster --out benchmarks/results/cluster.json

The first part runs a whole job whose workers answer at once: its time is that of reading, planning, handing out, taking results in and writing. The
second part takes the measured costs and simulates three designs: one driver (`--ray`), static shards (`--shard I/N`), and workers that fetch pieces
of the prefix order from shared storage, which is not built.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import pickle
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from batchgen import EngineConfig, JobConfig, ModelConfig, SamplingParams, plan_job, run_job
from batchgen.devices import Workers
from batchgen.devices.transport import Link, Ready, Work, WorkerReport, WorkerSetup
from batchgen.result import Result
from batchgen.stats import EngineStats

ROOT = Path(__file__).parents[1]
BATCH = 256


class Idle:
    """A worker that answers every row at once. Messages are pickled as on a cluster; the worker's own time is counted separately."""

    def __init__(self, on_message: Callable[[Any], None], counts: dict[str, float]) -> None:
        self._on_message, self._counts = on_message, counts
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, message: Any) -> None:
        self._counts["bytes_out"] += len(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        self._inbox.put(message)

    def kill(self) -> None:
        self._inbox.put(None)

    def wait(self) -> None: ...

    def how_it_ended(self) -> str:
        return ""

    def _run(self) -> None:
        heard = 0
        self._on_message(Ready("float32", "none", BATCH))
        self._on_message(WorkerReport(0, True, (), (), (), EngineStats()))
        while (message := self._inbox.get()) is not None:
            heard += 1
            began = time.thread_time()
            requests = message.requests if isinstance(message, Work) else ()
            results = tuple(
                Result(
                    row=r.row,
                    text="a short answer",
                    finish_reason="stop",
                    prompt_tokens=len(r.tokens),
                    completion_tokens=3,
                )
                for r in requests
            )
            data = pickle.dumps(WorkerReport(heard, True, results, (), (), EngineStats()), pickle.HIGHEST_PROTOCOL)
            self._counts["bytes_in"] += len(data)
            self._counts["worker_seconds"] += time.thread_time() - began
            self._on_message(pickle.loads(data))


class Idlers:
    """A transport to such workers."""

    replaces = False

    def __init__(self, count: int) -> None:
        self.count, self.name = count, f"{count} idle"
        self.counts = {"bytes_out": 0.0, "bytes_in": 0.0, "worker_seconds": 0.0}

    def setups(self, model: ModelConfig, engine: EngineConfig) -> list[WorkerSetup]:
        return [WorkerSetup(model, engine, place, self.count) for place in range(self.count)]

    def start(self, setup: WorkerSetup, on_message: Callable[[Any], None]) -> Link:
        return Idle(on_message, self.counts)

    def close(self) -> None: ...


def driver(rows: int, workers: int) -> dict[str, Any]:
    """A job of short rows through one driver: its CPU time and its bytes. Other work on the machine does not change CPU time much."""
    import batchgen.job

    transport = Idlers(workers)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "in.jsonl")
        with source.open("w") as file:
            for i in range(rows):
                prompt = f"Where does this word come from? Group {i * 7 % (rows // 50 + 1)}: word {rng.random()}"
                file.write(json.dumps({"prompt": prompt, "n": i}) + "\n")
        config = JobConfig(
            inputs=source,
            output=str(Path(folder, "out.jsonl")),
            model=ROOT / "sample_data" / "model",
            sampling=SamplingParams(max_tokens=8),
        )
        plan_job(config)  # imports and compilation are not measured
        began = time.process_time()
        plan_job(config)
        reading = time.process_time() - began
        batchgen.job.open_engine = lambda model, tokenizer, config, *texts: Workers(model, config, transport)
        began = time.process_time()
        report = run_job(config)
        whole = time.process_time() - began - transport.counts["worker_seconds"]
    return {
        "rows": rows,
        "workers": workers,
        "plan_cpu_us_per_row": round(1e6 * reading / rows, 1),
        "job_cpu_us_per_row": round(1e6 * whole / rows, 1),
        "bytes_out_per_row": round(transport.counts["bytes_out"] / rows, 1),
        "bytes_in_per_row": round(transport.counts["bytes_in"] / rows, 1),
        "wall_seconds": report.stats["seconds"],
    }


class Shape:
    """The simulated job: rows in groups with one prefix each, and workers whose speeds differ."""

    rows = 100_000_000
    workers = 1_000
    group, prefix, own, out = 50, 500, 100, 64
    decode_cost = 4
    speed = 20_000.0
    """Cost units (prompt tokens) a second of a worker."""
    spread = 0.1
    """Standard deviation of the workers' speeds."""

    def cost(self, rows: float, groups: float) -> float:
        return rows * (self.own + self.decode_cost * self.out) + groups * self.prefix

    def speeds(self) -> list[float]:
        rng = random.Random(1)
        return [max(0.3, rng.gauss(1, self.spread)) * self.speed for _ in range(self.workers)]


def one_driver(shape: Shape, job_seconds: float, window: int = 20_000) -> dict[str, float]:
    """`--ray`: every window is divided among all workers, and the slower of driver and workers sets the pace. `job_seconds` is the driver's time per row.

    The share of each worker has its own cuts: a group that lies in two shares runs twice.
    """
    windows = shape.rows / window
    cuts = windows * min(shape.workers, window / shape.group)
    work = shape.cost(shape.rows, shape.rows / shape.group + cuts)
    compute = work / sum(shape.speeds())
    return _figures(shape, max(compute, shape.rows * job_seconds), compute, cuts)


def static_shards(shape: Shape, plan_seconds: float) -> dict[str, float]:
    """`--shard I/1000`: one reading, then equal shares. The slowest worker ends last."""
    share = shape.cost(shape.rows, shape.rows / shape.group + shape.workers) / shape.workers
    speeds = shape.speeds()
    compute = share * shape.workers / sum(speeds)
    return _figures(shape, share / min(speeds) + shape.rows * plan_seconds, compute, shape.workers - 1)


def fetched_pieces(shape: Shape, plan_seconds: float, readers: int, piece: int = 20_000) -> dict[str, float]:
    """Not built: `readers` machines read and sort, workers fetch pieces by their numbers and keep their results beside them."""
    pieces = shape.rows // piece
    cost = shape.cost(piece, piece / shape.group + 1)
    free = [(0.0, speed) for speed in shape.speeds()]
    heapq.heapify(free)
    end = 0.0
    for _ in range(pieces):
        at, speed = heapq.heappop(free)
        end = max(end, at + cost / speed)
        heapq.heappush(free, (at + cost / speed, speed))
    compute = pieces * cost / sum(shape.speeds())
    return _figures(shape, end + shape.rows * plan_seconds / readers, compute, pieces - 1)


def _figures(shape: Shape, seconds: float, compute: float, cuts: float) -> dict[str, float]:
    return {
        "hours": round(seconds / 3600, 3),
        "idle_share": round(1 - compute / seconds, 4),
        "prefix_tokens_again": round(cuts * shape.prefix),
        "prefix_tokens_again_share": round(cuts * shape.group / shape.rows, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    measured = [driver(arguments.rows, workers) for workers in arguments.workers]
    shape, last = Shape(), measured[-1]
    job, plan = last["job_cpu_us_per_row"] / 1e6, last["plan_cpu_us_per_row"] / 1e6
    per_row = last["bytes_out_per_row"] + last["bytes_in_per_row"]
    found = {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "driver": measured,
        "simulated": {
            "one driver": one_driver(shape, job) | {"driver_bytes": round(per_row * shape.rows)},
            "static shards": static_shards(shape, plan) | {"driver_bytes": 0},
            "fetched pieces, 16 readers": fetched_pieces(shape, plan, 16) | {"driver_bytes": 0},
        },
    }
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
