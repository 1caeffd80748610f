"""What --quantize int8 changes in trained models: the next token's distribution, the likeliest token, and perplexity.

    python -m benchmarks.quality sample_data/model
    python -m benchmarks.quality FOLDER --train      first trains a Qwen3 of 5M parameters on texts as the sample's prompts have them

The texts are the prompts of sample_data/prompts.jsonl and their right answers. Models are in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from batchgen import LLM
from batchgen.config import ModelConfig
from batchgen.model.loader import load_model
from batchgen.model.weights import int8
from benchmarks.programs import ROOT

SAMPLE = ROOT / "sample_data"
SEED = 7
TEXT_TOKENS, TEXTS_IN_STEP = 512, 4
LEARNING_RATE = 4e-3


def train(folder: Path, steps: int) -> None:
    """Trains on every token of whole prompts and answers that `prompts.jsonl` does not have: other desks, and questions that are not held out."""
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(SAMPLE / "model")
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True, initializer_range=0.03,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=LEARNING_RATE, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    pieces, began = _pieces(tokenizer), time.monotonic()
    for step in range(steps):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min((step + 1) / 20, 1.1 - step / steps)
        ids = torch.tensor([next(pieces) for _ in range(TEXTS_IN_STEP)])
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % 20 == 0 or step + 1 == steps:
            print(f"step {step + 1}/{steps}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _pieces(tokenizer: PreTrainedTokenizerFast) -> Iterator[list[int]]:
    """Pieces of `TEXT_TOKENS` tokens."""
    sys.path.insert(0, str(SAMPLE))
    from office_tasks import ROOT as RULES
    from office_tasks import TASKS, desk_text, draw_questions, input_text, prefix_text

    rng, ids = Random(SEED), list[int]()
    while True:
        task = TASKS[rng.randrange(len(TASKS))]
        desk = task.desk(rng)
        prefix = prefix_text(RULES, task.rules, desk_text(rng, desk))
        for question in draw_questions(rng, desk, 2, held_out=False):
            messages = [
                {"role": "user", "content": prefix + input_text(question)},
                {"role": "assistant", "content": question.answer},
            ]
            ids += tokenizer.apply_chat_template(messages, return_dict=False)
        while len(ids) >= TEXT_TOKENS:
            yield ids[:TEXT_TOKENS]
            ids = ids[TEXT_TOKENS:]


def perplexity(model: str, quantize: str, prompts: list[Any], texts: list[str]) -> tuple[float, int]:
    """Of the texts after the prompts, and the number of tokens that it is of."""
    llm = LLM(model, quantize=quantize, dtype="bfloat16")
    scores = [row.score for row in llm.score(prompts=prompts, completions=texts)]
    tokens = sum(score.tokens for score in scores)
    return math.exp(-sum(score.logprob for score in scores) / tokens), tokens


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path)
    p.add_argument("--train", action="store_true", help="a model, which is then written into the folder")
    p.add_argument("--steps", type=int, default=150, help="of training (%(default)s)")
    p.add_argument("--rows", type=int, default=96, help="of the sample's 384, evenly spread (%(default)s)")
    args = p.parse_args()
    disable_progress_bar()
    if args.train:
        train(args.model, args.steps)
    rows = [json.loads(line) for line in (SAMPLE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    some = rows[:: max(1, len(rows) // args.rows)]
    model = str(args.model)
    found: dict[str, Any] = {"model": args.model.name, "rows": len(some)}

    tokenizer = LLM(model, dtype="bfloat16").tokenizer
    texts = [np.array(tokenizer.hf_tokenizer(row["prompt"])["input_ids"], dtype=np.int32) for row in some]
    int8.TEXTS, int8.PROMPT_TOKENS = len(texts), max(map(len, texts))  # whole prompts of all of them
    loaded = load_model(ModelConfig(model=model, dtype="bfloat16", quantize="int8"), tokenizer, 1, texts)
    found["after prompts"] = loaded.quantization
    cut = {row["prompt"]: len(row["prompt"]) // 2 for row in some}
    for name, prompts, continuations in (
        ("answers", [row["prompt"] for row in rows], [row["expected"] for row in rows]),
        ("second halves of prompts", [t[:n] for t, n in cut.items()], [t[n:] for t, n in cut.items()]),
    ):
        found[name] = {q: perplexity(model, q, prompts, continuations) for q in ("none", "int8")}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
