"""llama.cpp through llama-cpp-python's low-level calls: one context, sequences join and leave; greedy, past the end token.

The common beginning of all rows is decoded once and shared between the sequences (`llama_memory_seq_cp`). With `--sweep`, several numbers
of sequences are tried on the first rows: llama.cpp masks the cells of other sequences and does not skip them, so more is not always faster.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engines.common import (
    PATIENCE,
    Work,
    add_sweep,
    check_and_write_ids,
    model_dtype,
    parser,
    read_work,
    report,
    shared_prefix,
    threads,
)

STEP_TOKENS = 2048
PHYSICAL_TOKENS = 512


class Token(NamedTuple):
    id: int
    position: int
    sequence: int
    wants_logits: bool


class Context:
    """A model with room for `sequences` that share a prefix of `shared` tokens and have up to `own` of their own."""

    def __init__(self, file: Path, shared: int, sequences: int, own: int) -> None:
        import llama_cpp

        self.api: Any = llama_cpp
        llama_cpp.llama_log_set(ctypes.cast(None, llama_cpp.llama_log_callback), None)
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        # With Q8_0 in its buffers for AMX, llama-cpp-python 0.3.36 ends in a segmentation fault. It does not ask the processor, so only a
        # build for AVX2 has none of them.
        without_amx = os.environ.get("BATCHGEN_ISA") == "avx2" or "amx_int8" not in Path("/proc/cpuinfo").read_text()
        options.use_extra_bufts = without_amx
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), options)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = shared + sequences * own + 64
        params.n_batch, params.n_ubatch, params.n_seq_max = STEP_TOKENS, PHYSICAL_TOKENS, sequences + 1
        params.n_threads = params.n_threads_batch = threads()
        params.kv_unified = True  # one cache for all, in which sequences may share cells
        params.flash_attn_type = 1
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.model or not self.context:
            raise SystemExit(f"llama.cpp cannot load {file} with room for {params.n_ctx} tokens")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(STEP_TOKENS, 0, 1)
        self.tokens = 0  # tokens that were run

    def close(self) -> None:
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)

    def share(self, source: int, sequence: int, tokens: int) -> None:
        """Empties a sequence, and gives it the first tokens of another one."""
        self.api.llama_memory_seq_rm(self.memory, sequence, -1, -1)
        if tokens:
            self.api.llama_memory_seq_cp(self.memory, source, sequence, 0, tokens)

    def decode(self, tokens: Sequence[Token]) -> list[int]:
        """Runs the tokens. Returns the likeliest next tokens of those that want logits, in their order."""
        import numpy as np

        batch, found = self.batch, []
        self.tokens += len(tokens)
        for at in range(0, len(tokens), STEP_TOKENS):
            part = tokens[at : at + STEP_TOKENS]
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token.id, token.position, 1
                batch.seq_id[i][0], batch.logits[i] = token.sequence, token.wants_logits
            if self.api.llama_decode(self.context, batch):
                raise SystemExit("llama_decode failed")
            wanted = sum(token.wants_logits for token in part)
            if wanted:
                logits = np.ctypeslib.as_array(self.api.llama_get_logits(self.context), shape=(wanted, self.vocabulary))
                found += logits.argmax(1).tolist()
        return found


def generate(context: Context, ids: list[list[int]], work: Work, shared: int, sequences: int) -> list[list[int]]:
    """Returns the completions of all rows. A new row takes the place of a finished one, and its own prompt tokens run beside the next tokens of the others."""
    prefix = sequences  # the sequence that holds it, after those of the rows
    context.decode([Token(token, i, prefix, False) for i, token in enumerate(ids[0][:shared])])
    done: list[list[int]] = [[] for _ in ids]
    waiting, free = list(range(len(ids)))[::-1], list(range(sequences))
    running: dict[int, int] = {}
    while waiting or running:
        tokens = [
            Token(done[row][-1], len(ids[row]) + len(done[row]) - 1, sequence, True)
            for sequence, row in running.items()
        ]
        order = list(running)
        while free and waiting and len(tokens) + len(ids[waiting[-1]]) - shared <= max(STEP_TOKENS, len(running) + 1):
            sequence, row = free.pop(), waiting.pop()
            context.share(prefix, sequence, shared)
            last = len(ids[row]) - 1
            tokens += [Token(ids[row][i], i, sequence, i == last) for i in range(shared, last + 1)]
            running[sequence] = row
            order.append(sequence)
        for sequence, token in zip(order, context.decode(tokens), strict=True):
            row = running[sequence]
            done[row].append(token)
            if len(done[row]) == work.max_tokens[row]:
                del running[sequence]
                free.append(sequence)
    return done


def run(file: Path, tokenizer: Any, work: Work, sequences: int) -> tuple[list[list[int]], float, float, int]:
    """Returns the completions, the seconds to generate them, the seconds to make the context, and the number of prompt tokens that were run.

    The context has the size that these rows need.
    """
    import llama_cpp

    def encode() -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch(work.prompts)]

    start = time.perf_counter()
    ids = encode()
    shared = shared_prefix(ids)
    own = max(len(prompt) - shared + more for prompt, more in zip(ids, work.max_tokens, strict=True))
    sequences = min(sequences, llama_cpp.llama_max_parallel_sequences() - 1, len(ids))
    context = Context(file, shared, sequences, own)
    load = time.perf_counter() - start
    start = time.perf_counter()
    done = generate(context, encode(), work, shared, sequences)
    wall = time.perf_counter() - start
    context.close()
    return done, wall, load, context.tokens - sum(number - 1 for number in work.max_tokens)


def sweep(file: Path, tokenizer: Any, work: Work, sizes: list[int], rows: int) -> dict[str, Any]:
    """Returns the tokens/s of each number of sequences, all on the same rows, and the best number."""
    rows = max(rows, *sizes)
    some = Work(work.prompts[:rows], work.max_tokens[:rows])
    rates: dict[int, float] = {}
    slower = 0
    for size in sorted(sizes):
        rates[size] = round(some.completion_tokens / run(file, tokenizer, some, size)[1], 3)
        slower = 0 if rates[size] == max(rates.values()) else slower + 1
        if slower == PATIENCE:
            break
    return {"tokens_per_s": rates, "best": max(rates, key=lambda size: rates[size]), "rows_tried": len(some.prompts)}


def main() -> None:
    p = parser((__doc__ or "").splitlines()[0], converts=True)
    add_sweep(p, batch=32)
    p.add_argument(
        "--f16", action="store_true", help="the weights in float16, which processors without bfloat16 are faster with"
    )
    a = p.parse_args()
    weights = "Q8_0" if a.int8 else "F16" if a.f16 else {"float32": "F32", "bfloat16": "BF16"}[model_dtype(a.model)]
    if a.convert:
        from benchmarks.engines.gguf_file import write_gguf

        write_gguf(Path(a.model), a.converted, weights)
        return
    from tokenizers import Tokenizer

    work = read_work(a.input)
    tokenizer = Tokenizer.from_file(str(Path(a.model) / "tokenizer.json"))
    if a.sweep:
        print(json.dumps(sweep(a.converted, tokenizer, work, a.sweep, a.sweep_rows)), flush=True)
        return
    done, wall, load, prefill = run(a.converted, tokenizer, work, a.batch)
    check_and_write_ids(a.ids_out, done, work)
    report(
        "llamacpp",
        wall_s=wall,
        load_s=load,
        completion_tokens=work.completion_tokens,
        rows=len(done),
        packages=("llama-cpp-python", "tokenizers"),
        prefill_tokens=prefill,
        batch=a.batch,
        precision=weights,
    )


if __name__ == "__main__":
    main()
