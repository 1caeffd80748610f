"""Where the processor time of a job of many short rows goes: `python -m benchmarks.short_rows --rows 300000`.

Runs a job of rows of one token in this process, and a thread that looks at all other threads fifty times a second: the processor
time that a thread has taken since the last look (Linux's own count) belongs to the part whose function it is in. Waiting takes none.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

PARTS = {
    "starting": (
        "prompts/tokenizer.py:load", "jobs/identity", "model/loader", "model/weights", "model_files", "model/checks",
        "kernels/fusion", "kernels/build", "attention/base.py:<module>", "model/loaded_model.py:<module>",
    ),
    "reading": ("records/files", "records/jsonl", "records/inputs", "records/rows", "records/tables"),
    "tokenizing": ("prompts/", "parsers/", "process/template"),
    "planning": ("prefix/", "jobs/order/s", "jobs/order/w", "request.py"),
    "keys and equal rows": ("jobs/order/requests", "jobs/files/row_"),
    "stepping": ("scheduling/", "engine/", "drafting/"),
    "sampling": ("sampling/",),
    "model": ("model/", "attention/", "kernels/", "state/", "<native threads>"),
    "storing": ("jobs/files/", "jobs/base", "jobs/job_folder", "records/result_values"),
    "writing": ("assembly.py", "records/writers", "records/output", "recording/"),
}  # fmt: skip
"""Parts of a job, and the files of the package whose functions belong to them. The innermost such function on a thread's stack counts."""


class Sampler:
    """Counts the processor time of this process by the function that it was spent in."""

    def __init__(self, package: Path, seconds: float = 0.02) -> None:
        self.parts: Counter[str] = Counter()
        """Seconds, by part."""
        self.functions: Counter[str] = Counter()
        """Seconds, by the package's innermost function."""
        self._package = f"{package}/"
        self._seconds = seconds
        self._before: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.own = 0.0
        """Seconds of the counting itself."""

    def __enter__(self) -> Sampler:
        # With the usual 5 ms, this thread would mostly run when another one enters SQLite or a file.
        sys.setswitchinterval(1e-4)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        me = threading.get_native_id()
        while not self._ended.wait(self._seconds):
            frames = sys._current_frames()
            by_thread = {t.native_id: frames.get(t.ident or 0) for t in threading.enumerate()}
            for name in os.listdir("/proc/self/task"):
                thread = int(name)
                try:
                    with open(f"/proc/self/task/{name}/schedstat") as file:
                        now = int(file.read().split()[0]) / 1e9
                except OSError:  # it has ended
                    continue
                spent, self._before[thread] = now - self._before.get(thread, 0.0), now
                if thread == me:
                    self.own = now
                elif spent:
                    self._count(by_thread.get(thread), thread in by_thread, spent)

    def _count(self, frame: FrameType | None, known: bool, spent: float) -> None:
        while frame is not None and not frame.f_code.co_filename.startswith(self._package):
            frame = frame.f_back
        if frame is None:
            place = "<other>" if known else "<native threads>"
        else:
            place = f"{frame.f_code.co_filename.removeprefix(self._package)}:{frame.f_code.co_qualname}"
        self.functions[place] += spent
        self.parts[next((part for part, files in PARTS.items() if place.startswith(files)), "rest")] += spent


def rows_of(count: int, path: Path) -> Path:
    """Writes `count` different short rows."""
    with path.open("w") as file:
        for i in range(count):
            file.write(json.dumps({"prompt": f"Row {i}: is {i * 7919 % 1000} a lucky number?"}) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=30_000)
    parser.add_argument("--model", default="sample_data/model")
    parser.add_argument("--work", help="folder for input and output (default: a temporary one)")
    parser.add_argument(
        "--functions", type=int, default=0, metavar="N", help="also show the N functions that take the most"
    )
    args = parser.parse_args()
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command has it, before torch is imported

    import batchgen
    from batchgen import JobConfig, run_job
    from batchgen.config import ModelConfig
    from batchgen.sampling_params import SamplingParams

    with tempfile.TemporaryDirectory() as temporary:
        work = Path(args.work or temporary)
        rows = rows_of(args.rows, work / "rows.jsonl")
        config = JobConfig(
            inputs=[str(rows)], output=str(work / "out.jsonl"), overwrite=True,
            model=ModelConfig(model=args.model), sampling=SamplingParams(max_tokens=1),
        )  # fmt: skip
        began, processor = time.perf_counter(), time.process_time()
        with Sampler(Path(batchgen.__file__).parent) as sampler:
            stats = run_job(config).stats
        seconds, used = time.perf_counter() - began, time.process_time() - processor - sampler.own
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    templates = children.ru_utime + children.ru_stime
    outside = sum(sampler.parts.values()) - sampler.parts["model"] - sampler.parts["starting"] + templates
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{args.rows:,} rows, {stats['rows_ok']:,} ok: {seconds:.1f} s, processor {used:.1f} s, peak {memory:,} MiB")
    print("| part | s of processor time | µs per row |\n| --- | ---: | ---: |")
    lines = [(part, sampler.parts[part]) for part in (*PARTS, "rest")]
    lines += [("templates, in a process of their own", templates), ("outside the model and the start", outside)]
    for part, spent in lines:
        print(f"| {part} | {spent:.2f} | {1e6 * spent / args.rows:.0f} |")
    for place, spent in sampler.functions.most_common(args.functions):
        print(f"{spent:8.2f}  {place}")


if __name__ == "__main__":
    main()
