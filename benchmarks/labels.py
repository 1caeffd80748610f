"""Compares labels by scoring every choice with generating four tokens, on few-shot prompts: rows per second.

    python -m benchmarks.labels

512 rows of 32 tokens under a prefix of 2,048; three labels of one to three tokens. Both ways run in turn, in one process.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from batchgen.config import EngineConfig, ModelConfig
from batchgen.engine.engine import Engine
from batchgen.model.loader import load_model
from batchgen.prefix import plan_prefixes
from batchgen.prompts import load_tokenizer
from batchgen.request import Request, leaves_of, row_key
from batchgen.sampling_params import SamplingParams
from benchmarks.machine import machine_facts
from benchmarks.models import model_folder

PREFIX, OWN = 2048, 32
LABELS = {"positive": [300], "negative": [301, 302], "neutral": [303, 304, 305]}
GENERATED = 4


def requests(rows: int, params: SamplingParams) -> list[Request]:
    rnd = random.Random(7)
    prefix = [rnd.randrange(256, 8000) for _ in range(PREFIX)]
    texts = tuple(np.array(tokens, dtype=np.int32) for tokens in LABELS.values()) if params.choices else ()
    return [
        Request(
            row=row,
            tokens=np.array([*prefix, *(rnd.randrange(256, 8000) for _ in range(OWN))], dtype=np.int32),
            params=params,
            max_tokens=params.max_tokens,
            key=row_key(b"k" * 16, row),
            texts=texts,
        )
        for row in range(rows)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "batchgen-benchmarks")
    parser.add_argument("--out", type=Path, default=None, help="write the figures there, as JSON")
    args = parser.parse_args()
    config = ModelConfig(model=str(model_folder(args.work, "30m", args.dtype)), device="cpu")
    tokenizer = load_tokenizer(config)
    model = load_model(config, tokenizer)
    ways = {
        "labels": SamplingParams(choices=tuple(LABELS)),
        "four tokens": SamplingParams(max_tokens=GENERATED, ignore_eos=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.repeats):
        for name, params in ways.items():
            engine = Engine(model, tokenizer, EngineConfig(kv_memory="2GiB"))
            began = time.perf_counter()
            leaves = leaves_of(requests(args.rows, params))
            engine.add(leaves, plan_prefixes([leaf.tokens for leaf in leaves], 16), lambda result: None)
            engine.run()
            seconds[name].append(time.perf_counter() - began)
            print(name, f"{args.rows / seconds[name][-1]:.1f} rows/s", flush=True)
    figures = {name: {"seconds": s, "rows_per_s": args.rows / statistics.median(s)} for name, s in seconds.items()}
    ratio = figures["labels"]["rows_per_s"] / figures["four tokens"]["rows_per_s"]
    print(f"labels / four tokens: {ratio:.2f}")
    if args.out:
        facts = {"machine": machine_facts(), "dtype": args.dtype, "rows": args.rows, "ways": figures, "ratio": ratio}
        args.out.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
