"""The work around the model: the time that reading, tokenizing, planning, scheduling, detokenizing and writing add to a job of many rows.

    python -m benchmarks.around --out benchmarks/results/around.json

Two measurements are put together. First, the work around the model is timed over all rows with a stand-in for the forward, which returns
the same random logits at once; the time of the stand-in and of the sampler is left out. Second, the model's time (forward and sampling) is
extrapolated from real runs of N and 2N rows. `share` is the first time divided by the sum of both. Work that really runs beside the model,
such as tokenizing in another thread, is counted as if it did not, so the real share is no larger.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from benchmarks.machine import cores, machine_facts
from benchmarks.models import DTYPES, SHAPES, model_folder
from benchmarks.programs import OURS, ROOT, Case, Launcher, end_children_too, environment_of, last_json, run
from benchmarks.scaling import Rows, of_file

KINDS: dict[str, tuple[int, tuple[int, int], int]] = {
    "shared-prefix": (1024, (16, 64), 64),
    "few-shot": (2048, (32, 32), 4),
}
"""By name: tokens that all rows share, the least and most tokens of a row's own, tokens to generate."""
LOGITS_KEPT = 2048


class InPlace:
    """The stand-in for the forward, and the time that is not counted."""

    def __init__(self, vocabulary: int, dtype: Any) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(LOGITS_KEPT, vocabulary, generator=generator).to(dtype)
        self.next = 0
        self.seconds = 0.0
        self.steps = 0

    def run(self, batch: Any) -> Any:
        """Returns logits for the places that want some: other random rows each time, so that texts differ."""
        wanted = sum(scheduled.stop - scheduled.logits for scheduled in batch.spans)
        self.steps += 1
        self.next = (self.next + 37) % (LOGITS_KEPT // 2)
        if wanted > LOGITS_KEPT // 2:
            raise SystemExit(f"a step wants {wanted} logits")
        return self.logits[self.next : self.next + wanted] if wanted else None

    def not_counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def child(model: Path, rows: Path) -> None:
    """The measured process: a whole job without its forward, its figures on standard output."""
    import torch

    from batchgen import EngineConfig, JobConfig, ModelConfig, PromptConfig, SamplingParams, run_job
    from batchgen.model.runner import Runner
    from batchgen.sampling.sampler import Sampler
    from benchmarks.roofline import Shape

    shape = Shape.of(model)
    in_place = InPlace(shape.vocabulary, getattr(torch, shape.dtype))
    Runner.run = in_place.not_counted(lambda self, step, last=None: in_place.run(step))  # type: ignore[method-assign]
    Sampler.sample = in_place.not_counted(Sampler.sample)  # type: ignore[method-assign]
    config = JobConfig(
        inputs=(str(rows),),
        output=str(rows.with_suffix(".out.jsonl")),
        model=ModelConfig(model=str(model), device="cpu"),
        prompts=PromptConfig(chat=False),
        sampling=SamplingParams(ignore_eos=True),
        engine=EngineConfig(),
        overwrite=True,
    )
    began = time.perf_counter()
    stats = run_job(config).stats
    wall = time.perf_counter() - began - stats["seconds"]["load"]
    figures = {"rows": stats["rows_ok"], "steps": in_place.steps, "seconds": round(wall - in_place.seconds, 4)}
    print(json.dumps(figures | {"not_counted": round(in_place.seconds, 4), "parts": stats["seconds"]}))


def around(launcher: Launcher, case: Case, rows: Rows, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    file = rows.file(args.rows, *KINDS[kind])
    command = [sys.executable, "-m", "benchmarks.around", "--child", str(case.folder), str(file)]
    host = last_json("around", run("around", command, environment_of(launcher.threads, str(ROOT)), None))
    if host["rows"] != args.rows:
        raise SystemExit(f"{kind}: {host['rows']} of {args.rows} rows were done")
    real = []
    for count in (args.real_rows, 2 * args.real_rows):
        figures = launcher.call(OURS, of_file(case, rows.file(count, *KINDS[kind])), [])
        seconds = figures["extras"]["seconds"]
        outside = 1 - seconds["forward"] / figures["wall_s"]
        real.append({"rows": count, "wall_s": figures["wall_s"], "model_s": seconds["forward"], "outside": outside})
    model = model_seconds(real, args.rows)
    return {
        "kind": kind,
        "rows": args.rows,
        "around_s": host["seconds"],
        "model_s": round(model, 2),
        "share": round(host["seconds"] / (host["seconds"] + model), 4),
        "stand_in": host,
        "real": real,
    }


def model_seconds(real: list[dict[str, Any]], rows: int) -> float:
    """Returns the model's time for all rows: that of the smaller run, and for each further row what it took in the larger run."""
    less, more = real
    each: float = (more["model_s"] - less["model_s"]) / (more["rows"] - less["rows"])
    return float(less["model_s"] + each * (rows - less["rows"]))


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.around", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--rows", type=int, default=20_000)
    p.add_argument("--real-rows", type=int, default=512, help="N, of the real runs of N and 2N rows (%(default)s)")
    p.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    p.add_argument("--model", choices=list(SHAPES), default="30m")
    p.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    p.add_argument("--threads", type=int)
    p.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "batchgen-benchmarks")
    p.add_argument("--out", type=Path, help="write the figures there, as JSON")
    return p.parse_args()


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    args = parse()
    disable_progress_bar()
    end_children_too()
    folder = model_folder(args.work, args.model, args.dtype)
    launcher = Launcher(Path(), args.threads or cores())
    case = Case(args.model, args.dtype, "around", folder, Path())
    found = []
    with tempfile.TemporaryDirectory() as place:
        rows = Rows(Path(place), folder)
        for kind in args.kinds:
            entry = around(launcher, case, rows, kind, args)
            found.append(entry)
            print(
                f"{kind}, {args.rows:,} rows: {entry['around_s']:.1f} s around the model, {entry['model_s']:.1f} s in it: "
                f"{entry['share']:.1%}",
                flush=True,
            )
    if args.out:
        result = {"machine": machine_facts(), "model": args.model, "dtype": args.dtype, "kinds": found}
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
