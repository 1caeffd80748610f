"""The time of a decode step outside the model, by the number of waiting requests: it must be small and must not grow with them.

    python -m benchmarks.overhead --waiting 0 10000 100000

256 sequences decode, and the rest waits. The overhead of a step is everything but the model's forward: scheduling, packing, sampling,
detokenizing, bookkeeping. `drawing_ms` is the part that the sampler takes for the logits. One process, the model `30m` in bfloat16, medians over the steps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from batchgen.config import EngineConfig, ModelConfig
from batchgen.engine.engine import Engine
from batchgen.model.loader import LoadedModel, load_model
from batchgen.prefix import plan_prefixes
from batchgen.prompts import LoadedTokenizer, load_tokenizer
from batchgen.request import Request, leaves_of, row_key
from batchgen.sampling_params import SamplingParams
from benchmarks.machine import machine_facts
from benchmarks.models import model_folder

SEQUENCES = 256
PREFIX, OWN = 512, 16
FIRST = 8
"""Steps that are not counted: prompts, and the first use of everything."""


def measure(
    model: LoadedModel, tokenizer: LoadedTokenizer, waiting: int, steps: int, params: dict[str, Any]
) -> dict[str, Any]:
    """Returns the milliseconds of a decode step, and those outside the model."""
    engine = Engine(model, tokenizer, EngineConfig(batch_size=SEQUENCES, kv_memory="2GiB"))
    rnd = random.Random(waiting)
    prefix = [rnd.randrange(256, 8000) for _ in range(PREFIX)]
    sampling = SamplingParams(max_tokens=FIRST + steps + 8, ignore_eos=True, **params)
    requests = [
        Request(
            row=row,
            tokens=np.array([*prefix, *(rnd.randrange(256, 8000) for _ in range(OWN))], dtype=np.int32),
            params=sampling,
            max_tokens=sampling.max_tokens,
            key=row_key(b"k" * 16, row),
        )
        for row in range(SEQUENCES + waiting)
    ]
    leaves = leaves_of(requests)
    engine.add(leaves, plan_prefixes([leaf.tokens for leaf in leaves], 16), lambda result: None)
    forward = model.module.forward
    model.module.forward = inside = Timed(forward)
    engine.sampler.sample = drawing = Timed(engine.sampler.sample)  # type: ignore[method-assign]
    found: list[tuple[float, float, float]] = []
    try:
        while len(found) < steps:
            inside.seconds = drawing.seconds = 0.0
            began = time.perf_counter()
            engine.step()
            total = time.perf_counter() - began
            running = engine.scheduler.running
            if len(running) == SEQUENCES and all(len(s.generated) >= FIRST for s in running):
                found.append((total, total - inside.seconds, drawing.seconds))
    finally:
        model.module.forward = forward
    return {
        "waiting": engine.scheduler.unfinished - SEQUENCES,
        "step_ms": round(statistics.median(total for total, _, _ in found) * 1e3, 2),
        "outside_ms": round(statistics.median(outside for _, outside, _ in found) * 1e3, 2),
        "drawing_ms": round(statistics.median(drawn for _, _, drawn in found) * 1e3, 2),
        "share": round(statistics.median(outside / total for total, outside, _ in found), 4),
    }


class Timed:
    """A function that adds up the time spent in it."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = self.function(*args, **kwargs)
        self.seconds += time.perf_counter() - began
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 10_000, 100_000])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "batchgen-benchmarks")
    parser.add_argument("--out", type=Path, default=None, help="write the figures there, as JSON")
    args = parser.parse_args()
    config = ModelConfig(model=str(model_folder(args.work, "30m", "bfloat16")), device="cpu")
    tokenizer = load_tokenizer(config)
    model = load_model(config, tokenizer)
    found = []
    for name, params in (("greedy", {}), ("sampled", {"temperature": 0.8, "top_p": 0.9, "top_k": 50})):
        for waiting in args.waiting:
            figures = {"sampling": name} | measure(model, tokenizer, waiting, args.steps, params)
            print(json.dumps(figures), flush=True)
            found.append(figures)
    if args.out:
        args.out.write_text(json.dumps({"machine": machine_facts(), "steps": found}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
