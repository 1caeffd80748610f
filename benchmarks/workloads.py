"""The rows of the workloads: raw prompts with exact token counts, in random order, the same for every engine.

A row is `{id, prompt, sampling_params: {max_tokens}}`. Text is made of words that are single tokens of the tokenizer, each with
its space before it, so that a text of n words has n tokens wherever it stands.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SEED = 7
Text = Callable[[int], str]
Prompt = tuple[str, int]
"""A prompt and the number of tokens to generate for it."""


def _under_one(text: Text, rnd: random.Random, prefix: int, rows: int, out: int) -> list[Prompt]:
    shared = text(prefix)
    return [(shared + text(rnd.randint(16, 64)), out) for _ in range(rows)]


def _nested(text: Text, rnd: random.Random, root: int, group: int, groups: int, rows: int) -> list[Prompt]:
    first = text(root)
    begun = [first + text(group) for _ in range(groups)]
    return [(g + text(rnd.randint(8, 96)), rnd.randint(8, 128)) for g in begun for _ in range(rows)]


def _labelling(text: Text, rows: int) -> list[Prompt]:
    examples = text(2048)
    return [(examples + text(32), 4) for _ in range(rows)]


def _strangers(text: Text, rnd: random.Random, rows: int, out: int) -> list[Prompt]:
    return [(text(rnd.randint(32, 512)), out) for _ in range(rows)]


def shared_prefix(text: Text, rnd: random.Random) -> list[Prompt]:
    """One prefix of 1,024 tokens, 256 rows, 16–64 tokens of their own, 64 out."""
    return _under_one(text, rnd, 1024, 256, 64)


def nested_groups(text: Text, rnd: random.Random) -> list[Prompt]:
    """A root of 128 tokens, 16 groups of 512, 16 rows each, 8–96 tokens of their own, 8–128 out."""
    return _nested(text, rnd, 128, 512, 16, 16)


def few_shot(text: Text, rnd: random.Random) -> list[Prompt]:
    """Few-shot labelling: one prefix of 2,048 tokens, 512 rows of 32 tokens, 4 out."""
    return _labelling(text, 512)


def nothing_shared(text: Text, rnd: random.Random) -> list[Prompt]:
    """128 rows of 32–512 tokens, 32 out."""
    return _strangers(text, rnd, 128, 32)


def long_prefix(text: Text, rnd: random.Random) -> list[Prompt]:
    """One prefix of 8,192 tokens, 64 rows, 16–64 tokens of their own, 32 out."""
    return _under_one(text, rnd, 8192, 64, 32)


def varied_lengths(text: Text, rnd: random.Random) -> list[Prompt]:
    """128 rows of 16–256 tokens that share nothing, 1–256 out, with lengths that are uniform on a logarithmic scale."""
    return [(text(rnd.randint(16, 256)), round(256 ** rnd.random())) for _ in range(128)]


WORKLOADS: dict[str, Callable[[Text, random.Random], list[Prompt]]] = {
    workload.__name__.replace("_", "-"): workload
    for workload in (shared_prefix, nested_groups, few_shot, nothing_shared, long_prefix, varied_lengths)
}


def shared_2048(text: Text, rnd: random.Random) -> list[Prompt]:
    """One prefix of 2,048 tokens, 2,000 rows, 16–64 tokens of their own, 64 out."""
    return _under_one(text, rnd, 2048, 2000, 64)


def nested_2048(text: Text, rnd: random.Random) -> list[Prompt]:
    """A root of 512 tokens, 32 groups of 1,024, 64 rows each, 8–96 tokens of their own, 8–128 out."""
    return _nested(text, rnd, 512, 1024, 32, 64)


def few_shot_4000(text: Text, rnd: random.Random) -> list[Prompt]:
    """Few-shot labelling: one prefix of 2,048 tokens, 4,000 rows of 32 tokens, 4 out."""
    return _labelling(text, 4000)


def unshared_2000(text: Text, rnd: random.Random) -> list[Prompt]:
    """2,000 rows of 32–512 tokens, 64 out."""
    return _strangers(text, rnd, 2000, 64)


GPU_WORKLOADS: dict[str, Callable[[Text, random.Random], list[Prompt]]] = {
    "gpu-shared-prefix": shared_2048,
    "gpu-nested-groups": nested_2048,
    "gpu-few-shot": few_shot_4000,
    "gpu-nothing-shared": unshared_2000,
}
"""Workloads of a size for a GPU."""
ALL = WORKLOADS | GPU_WORKLOADS


def single_token_words(tokenizer: Any) -> list[str]:
    words = (tokenizer.decode([i]) for i in range(300, len(tokenizer)))
    return [w for w in words if w.startswith(" ") and w[1:].isascii() and w[1:].isalpha() and len(w) > 2]


def make_rows(name: str, tokenizer: Any) -> Iterator[dict[str, Any]]:
    rnd = random.Random(f"{SEED} {name}")
    words = single_token_words(tokenizer)

    def text(count: int) -> str:
        return "".join(rnd.choices(words, k=count))

    prompts = ALL[name](text, rnd)
    rnd.shuffle(prompts)
    for number, (prompt, max_tokens) in enumerate(prompts):
        yield {"id": f"{name}-{number}", "prompt": prompt, "sampling_params": {"max_tokens": max_tokens}}


def workload_file(work: Path, name: str, model: Path, limit: int | None = None) -> tuple[Path, dict[str, Any]]:
    """Returns the workload's JSONL file under `work`, with its first `limit` rows or all, and its figures. Makes the file if it is missing."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = list(make_rows(name, tokenizer))[:limit]
    path = work / "workloads" / f"{name}{f'-{limit}' if limit else ''}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    lengths = [len(ids) for ids in tokenizer([row["prompt"] for row in rows])["input_ids"]]
    expected = [row["prompt"].count(" ") for row in rows]
    if lengths != expected:
        raise RuntimeError(
            f"{name}: prompts are not one token a word; the token counts of this workload are not what it says"
        )
    return path, {
        "description": " ".join((ALL[name].__doc__ or "").split()),
        "rows": len(rows),
        "prompt_tokens": sum(lengths),
        "longest_prompt": max(lengths),
        "completion_tokens": sum(row["sampling_params"]["max_tokens"] for row in rows),
    }
