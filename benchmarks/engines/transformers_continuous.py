"""transformers continuous batching with block sharing, as `generate_batch` sets it up; greedy, no end token.

Prompts are added sorted, as `generate_batch` adds them, so that those that share blocks follow each other; here each row has its
own number of tokens, which `generate_batch` does not allow. Needs psutil on a CPU, which sizes the pool.
"""

from __future__ import annotations

import math
import time
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.engines.common import Work, add_device, check_and_write_ids, parser, read_work, report
from benchmarks.machine import memory_of

MEMORY_SHARE = 0.3
"""Maximum share of the device's memory for the pool, which otherwise holds all rows at once."""


def blocks(model: Any, ids: list[list[int]], work: Work, page_size: int) -> int | None:
    """Returns the number of blocks for all rows at once without sharing; more would be of no use. None (transformers' own choice) if that is too much."""
    c = model.config
    needed = sum(
        math.ceil((len(prompt) + more) / page_size) + 1 for prompt, more in zip(ids, work.max_tokens, strict=True)
    )
    number = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * page_size * needed
    return needed if number * model.dtype.itemsize < MEMORY_SHARE * memory_of(model.device.type) else None


def main() -> None:
    p = parser((__doc__ or "").splitlines()[0])
    add_device(p)
    p.add_argument(
        "--max-batch-tokens", type=int, default=2048, help="most tokens in one forward; 0: its own choice (%(default)s)"
    )
    a = p.parse_args()
    work = read_work(a.input)
    start = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(a.model)
    model: Any = AutoModelForCausalLM.from_pretrained(a.model, dtype="auto", attn_implementation="sdpa")
    model = model.eval().to(a.device)
    load = time.perf_counter() - start

    start = time.perf_counter()
    ids = [list(x) for x in tokenizer(work.prompts)["input_ids"]]
    tokenizing = time.perf_counter() - start
    generation = GenerationConfig(
        max_new_tokens=max(work.max_tokens), do_sample=False, eos_token_id=-1, pad_token_id=tokenizer.pad_token_id
    )
    config = ContinuousBatchingConfig(max_batch_tokens=a.max_batch_tokens or None, allow_block_sharing=True)
    page = getattr(config, "page_size", None) or config.block_size  # its name in transformers 5.17
    config.num_blocks = blocks(model, ids, work, page)
    start = time.perf_counter()
    rows: dict[str, int] = {}
    done: dict[int, list[int]] = {}
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config
    ) as manager:
        # The pool counts as loading, as batchgen's does. With its default size, making it takes many seconds.
        load += time.perf_counter() - start
        start = time.perf_counter()
        for row in sorted(range(len(ids)), key=lambda row: ids[row], reverse=True):
            rows[manager.add_request(input_ids=ids[row], max_new_tokens=work.max_tokens[row])] = row
        while len(done) < len(ids):
            output = manager.get_result(timeout=1)
            if output is None:
                if not manager.is_running():
                    raise SystemExit("the generation thread ended before all rows were done")
                continue
            if output.is_finished():
                if output.error:
                    raise SystemExit(f"row {rows[output.request_id]}: {output.error}")
                done[rows[output.request_id]] = output.generated_tokens
        last_token = time.perf_counter()
    check_and_write_ids(a.ids_out, [done[row] for row in range(len(ids))], work)
    report(
        "transformers-continuous",
        wall_s=tokenizing + last_token - start,
        load_s=load,
        completion_tokens=work.completion_tokens,
        rows=len(ids),
        packages=("torch", "transformers", "tokenizers"),
        max_batch_tokens=a.max_batch_tokens,
        page_size=page,
        num_blocks=config.num_blocks,
    )


if __name__ == "__main__":
    main()
