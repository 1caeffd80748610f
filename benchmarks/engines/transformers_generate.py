"""transformers `generate`: static left-padded batches, rows sorted by length so that little is padding; greedy, no end token.

With `--sweep`, several batch sizes are tried, each on some of the batches of the whole file.
"""

from __future__ import annotations

import json
import math
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.engines.common import (
    PATIENCE,
    Work,
    add_device,
    add_sweep,
    check_and_write_ids,
    parser,
    read_work,
    report,
)
from benchmarks.machine import memory_of

Batch = list[int]
MEMORY_SHARE = 0.6
"""Maximum share of the device's memory: a batch that would need more is not tried."""


class Generator:
    def __init__(self, model: str, device: str) -> None:
        self.device = device
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval().to(device)
        self.model.generation_config.eos_token_id = None

    def tokenize(self, work: Work) -> list[list[int]]:
        return [list(ids) for ids in self.tokenizer(work.prompts)["input_ids"]]

    @torch.inference_mode()
    def run(self, batch: Batch, ids: list[list[int]], work: Work) -> dict[int, list[int]]:
        """Returns the completions of one batch, by row."""
        pad = self.tokenizer.pad_token_id
        width = max(len(ids[row]) for row in batch)
        tokens = torch.tensor([[pad] * (width - len(ids[row])) + ids[row] for row in batch], device=self.device)
        mask = torch.tensor([[0] * (width - len(ids[row])) + [1] * len(ids[row]) for row in batch], device=self.device)
        longest = max(work.max_tokens[row] for row in batch)
        out = self.model.generate(
            tokens, attention_mask=mask, max_new_tokens=longest, do_sample=False, pad_token_id=pad
        )
        new = out[:, width:].tolist()
        return {row: new[i][: work.max_tokens[row]] for i, row in enumerate(batch)}

    def bytes_needed(self, size: int, tokens: int) -> int:
        """Returns a rough estimate: KV, a copy of a layer's KV while it grows, activations of the prompt."""
        c = self.model.config
        number = torch.finfo(self.model.dtype).bits // 8
        kv = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
        activations = 4 * c.hidden_size + 3 * c.intermediate_size
        return int(size * tokens * number * (kv * (1 + 1 / c.num_hidden_layers) + activations))


def batches(ids: list[list[int]], work: Work, size: int) -> list[Batch]:
    order = sorted(range(len(ids)), key=lambda row: (work.max_tokens[row], len(ids[row])))
    return [order[i : i + size] for i in range(0, len(order), size)]


def some(whole: list[Batch], rows: int) -> list[Batch]:
    """Returns at least two of the batches, with `rows` rows or more together, evenly spaced from short to long ones."""
    count = min(len(whole), max(2, math.ceil(rows / len(whole[0]))))
    return [whole[int((i + 0.5) * len(whole) / count)] for i in range(count)]


def sweep(generator: Generator, work: Work, sizes: list[int], rows: int) -> dict[str, Any]:
    """Returns the tokens/s of each size, and the best size."""
    ids = generator.tokenize(work)
    longest = max(map(len, ids)) + max(work.max_tokens)
    shortest = min(range(len(ids)), key=lambda row: len(ids[row]))
    generator.run([shortest], ids, work)  # the work of the first call only is not in the time of any size
    rates: dict[int, float] = {}
    too_large: list[int] = []
    slower = 0
    for size in sorted(sizes):
        if generator.bytes_needed(min(size, len(ids)), longest) > MEMORY_SHARE * memory_of(generator.device) and rates:
            too_large.append(size)
            continue
        chosen = some(batches(ids, work, size), rows)
        start = time.perf_counter()
        try:
            for batch in chosen:
                generator.run(batch, ids, work)
        except torch.OutOfMemoryError:
            too_large.append(size)
            break
        seconds = time.perf_counter() - start
        rates[size] = round(sum(work.max_tokens[row] for batch in chosen for row in batch) / seconds, 3)
        slower = 0 if rates[size] == max(rates.values()) else slower + 1
        if slower == PATIENCE or size >= len(ids):
            break
    best = max(rates, key=lambda size: rates[size])
    return {"tokens_per_s": rates, "best": best, "rows_tried": rows, "too_large_for_memory": too_large}


def main() -> None:
    p = parser((__doc__ or "").splitlines()[0])
    add_sweep(p, batch=16)
    add_device(p)
    a = p.parse_args()
    work = read_work(a.input)
    start = time.perf_counter()
    generator = Generator(a.model, a.device)
    load = time.perf_counter() - start
    if a.sweep:
        print(json.dumps(sweep(generator, work, a.sweep, a.sweep_rows)), flush=True)
        return
    start = time.perf_counter()
    ids = generator.tokenize(work)
    done: dict[int, list[int]] = {}
    for batch in batches(ids, work, a.batch):
        done |= generator.run(batch, ids, work)
    wall = time.perf_counter() - start
    check_and_write_ids(a.ids_out, [done[row] for row in range(len(ids))], work)
    report(
        "transformers-generate",
        wall_s=wall,
        load_s=load,
        completion_tokens=work.completion_tokens,
        rows=len(ids),
        packages=("torch", "transformers", "tokenizers"),
        prefill_tokens=sum(len(batch) * max(len(ids[row]) for row in batch) for batch in batches(ids, work, a.batch)),
        batch=a.batch,
        attention=generator.model.config._attn_implementation,
    )


if __name__ == "__main__":
    main()
