"""batchgen as its users run it: a job from a JSONL file to a JSONL file. Its time includes reading, tokenizing, planning and writing."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from batchgen import EngineConfig, JobConfig, ModelConfig, PromptConfig, SamplingParams, run_job
from batchgen.attention.kv_cache import KVCache, bytes_per_token
from batchgen.process.collector import few_collections
from batchgen.state.cache import StateCache
from benchmarks.engines.common import add_device, check_and_write_ids, parser, read_work, report

FIGURES = ("prompt_tokens", "prefill_tokens", "prefill_tokens_min", "shared_fraction", "steps", "mean_decode_batch",
           "attention_parts_per_step", "preemptions", "kv_bytes_peak", "kv_bytes_unshared", "completion_tokens_per_s",
           "seconds")  # fmt: skip
TOUCHED = 1 << 31
"""Bytes at each end of the pool, more than any workload needs here. vLLM writes its 6 GiB when it allocates them."""


def touch_pools() -> None:
    """Makes the system provide the pool's memory when the pool is made, before the clock starts, as for the other engines."""
    make = KVCache.__init__

    def made(self: Any, layers: Any, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        make(self, layers, num_blocks, block_size, dtype)
        blocks = min(num_blocks, TOUCHED // (bytes_per_token(layers, dtype) * block_size))
        for pool in (*self.keys.values(), *self.values.values()):
            paged = self._paged(pool)
            for part in (paged[:, :blocks], paged[:, num_blocks - blocks :]):  # blocks are allocated from both ends
                part.zero_()

    KVCache.__init__ = made  # type: ignore[method-assign]
    make_states = StateCache.__init__

    def made_states(self: Any, *given: Any) -> None:
        make_states(self, *given)
        for states in (*self.convolution.values(), *self.recurrent.values()):
            states.zero_()

    StateCache.__init__ = made_states  # type: ignore[method-assign]


def main() -> None:
    p = parser(__doc__)
    add_device(p)
    p.add_argument("--no-share", action="store_true", help="run every prompt whole")
    p.add_argument("--plain", action="store_true", help="in float32, without batchgen's own kernels")
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output.jsonl"
        config = JobConfig(
            inputs=(a.input,),
            output=str(output),
            model=ModelConfig(
                model=a.model,
                device=a.device,
                dtype="float32" if a.plain else "auto",
                quantize="int8" if a.int8 else "none",
                compile="off" if a.plain else "auto",
            ),
            prompts=PromptConfig(chat=False),
            sampling=SamplingParams(ignore_eos=True),
            engine=EngineConfig(share=not a.no_share),
            token_ids=a.ids_out is not None,
        )
        if a.device == "cpu":
            touch_pools()
        with few_collections():  # the command runs all of a process with them
            start = time.perf_counter()
            stats = run_job(config).stats
            whole = time.perf_counter() - start
        work = read_work(a.input)
        rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    failed = [row["error"] for row in rows if row["error"]]
    if failed:
        raise SystemExit(f"{len(failed)} rows failed, the first with {failed[0]}")
    made = [row["usage"]["completion_tokens"] for row in rows]
    if made != work.max_tokens:
        raise SystemExit("some rows have another number of tokens than asked for")
    if a.ids_out:
        check_and_write_ids(a.ids_out, [row["token_ids"] for row in rows], work)
    load = stats["seconds"]["load"]
    report(
        "batchgen",
        wall_s=whole - load,
        load_s=load,
        completion_tokens=stats["completion_tokens"],
        rows=len(rows),
        packages=("torch", "transformers", "tokenizers"),
        precision="int8" if a.int8 else stats["dtype"],
        generate_s=stats["seconds"]["generate"],
        **{name: stats[name] for name in FIGURES},
    )


if __name__ == "__main__":
    main()
