"""Compares a device's results with those of transformers' `generate` there: tokens in float32, logits in bfloat16, under several schedules.

The shapes and the reference are those of tests/parity; float32 is real float32 (no TF32).
"""

from __future__ import annotations

import copy
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from batchgen.config import EngineConfig
from batchgen.engine.engine import Engine
from batchgen.model.adapter import prepare
from batchgen.model.exact_float32 import use_exact_float32
from batchgen.model.loaded_model import LoadedModel
from batchgen.prompts import LoadedTokenizer
from batchgen.result import Result
from batchgen.scheduling.sequence import GenerationSequence
from benchmarks.gpu.device import Bench
from benchmarks.gpu.serving import Numbers
from benchmarks.models import random_model
from benchmarks.programs import ROOT

sys.path.insert(0, str(ROOT / "tests"))

ARCHITECTURES = (
    "llama", "llama/llama3", "llama/mqa", "qwen2", "qwen3", "mistral/sliding_window", "mixtral", "gemma2", "gemma3_text", "gemma4_text",
    "phi3", "gpt2", "gpt_neox", "gpt_oss", "olmo2", "olmoe", "cohere2", "granite", "glm4", "exaone4", "smollm3", "starcoder2",
    "opt", "qwen3_moe", "deepseek_v2", "deepseek_v3", "mimo_v2_flash", "minimax_m2", "helium", "ernie4_5",
)  # fmt: skip
"""They have sliding windows, soft caps, sinks, one or many heads, K and V of different sizes, experts, learned and scaled positions."""
TINY = ("llama", "gemma2")
BLOCK_TABLE = 8  # of 32 tokens; the longest completion needs 6
SCHEDULES: dict[str, dict[str, Any]] = {
    "all at once": {},
    "no graphs": {"compile": "off"},
    "graphs": {"compile": "on"},
    "in slices, memory short": {"max_batch_tokens": 24, "batch_size": 8},
    "one by one": {"batch_size": 1},
    "first come": {"policy": "fifo", "max_batch_tokens": 64},
    "prefill first": {"policy": "prefill-first", "batch_size": 4},
}
TELLING = ("all at once", "in slices, memory short")
BFLOAT16 = ("0.5b", "llama", "qwen3", "gemma2", "mixtral")
BFLOAT16_OUT = 16
NO_WORSE = 1.05
"""Largest allowed ratio to transformers' own error. The errors of this number of rows differ by so much by chance."""


def cases(bench: Bench) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    use_exact_float32()
    names = bench.size(ARCHITECTURES, TINY)
    for name in names:
        yield f"float32 {name}", lambda name=name: float32(bench, name, TELLING)  # type: ignore[misc]
    for name in names[: bench.size(2, 1)]:
        yield f"schedules {name}", lambda name=name: float32(bench, name, tuple(SCHEDULES))  # type: ignore[misc]
    for name in bench.size(BFLOAT16, BFLOAT16[:2]):
        yield f"bfloat16 {name}", lambda name=name: bfloat16(bench, name)  # type: ignore[misc]


def float32(bench: Bench, name: str, schedules: Sequence[str]) -> dict[str, Any]:
    """Counts rows with the tokens of `generate` under each schedule, and measures how far logits are from its logits, relative to the largest."""
    from support.models import build, expect, make_requests, run
    from support.shapes import prompts_and_lengths

    reference = build(name).to(bench.device)
    model = prepared(reference)
    prompts, lengths = prompts_and_lengths()
    with torch.device(bench.device):
        expected = [expect(reference, p, n) for p, n in zip(prompts, lengths, strict=True)]
    largest = max(float(e.logits.abs().max()) for e in expected)
    found: dict[str, Any] = {}
    notes: list[str] = []
    for how in schedules:
        options = dict(SCHEDULES[how])
        graphs = options.pop("compile", model.compile)
        of = prepared(reference, graphs=graphs) if graphs == "on" else replace(model, compile=graphs)
        engine = small_engine(of, **options)
        if "short" in how:
            block = engine.sizes.block_size * engine.sizes.bytes_per_token
            engine = small_engine(of, kv_memory=f"{BLOCK_TABLE * block}B", **options)
        seen = Seen(engine)
        results = run(engine, make_requests(prompts, lengths))
        equal = [list(r.token_ids) == e.tokens for r, e in zip(results, expected, strict=True)]
        far = [
            float((logits - expected[row].logits[number]).abs().max())
            for row, number, logits in seen.logits(results)
            if equal[row]
        ]
        found[how] = {
            "rows": len(equal),
            "equal": sum(equal),
            "logit_error": float(f"{max(far, default=0.0) / largest:.2e}"),
            "preemptions": engine.stats.preemptions,
            "attention": engine.runner.attention,
        }
        notes += [f"{how}: {note}" for note in engine.notes]
    exact = all(f["equal"] == f["rows"] for f in found.values())
    return {"exact": exact, "notes": notes, "schedules": found}


def small_engine(model: LoadedModel, **config: Any) -> Engine:
    tokenizer = LoadedTokenizer(Numbers(), None, 512, (), model.vocab_size)
    return Engine(model, tokenizer, EngineConfig(**({"kv_memory": "64MiB", "debug": True} | config)))


class Seen:
    """The logits from which an engine's steps sample tokens, by row and number of the token."""

    def __init__(self, engine: Engine) -> None:
        self._found: list[tuple[int, int, torch.Tensor]] = []
        inner = engine.runner.run

        def run(step: Any, *args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits = inner(step, *args, **kwargs)
            at = 0
            for scheduled in step.spans:
                for position in range(scheduled.logits, scheduled.stop):
                    if logits is not None and isinstance(scheduled.span, GenerationSequence):
                        request = scheduled.span.request
                        # A copy, because the next step may overwrite these logits.
                        copied = logits[at].to(torch.float32, copy=True)
                        self._found.append((request.row, position - len(request.tokens) + 1, copied))
                    at += 1
            return logits

        engine.runner.run = run  # type: ignore[method-assign]

    def logits(self, results: Sequence[Result]) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Returns the logits without those of steps that were launched before the end of their row was known."""
        for row, number, logits in self._found:
            if number < len(results[row].token_ids):
                yield row, number, logits


def bfloat16(bench: Bench, name: str) -> dict[str, Any]:
    """Measures how far our logits, and those of transformers in batches, are from those of transformers with each row alone, and from the
    logits in float32.

    The largest difference says little if transformers' own logits are equal in every batch, bit for bit. Whether precision was lost
    shows in the error: the root mean square of the differences from float32.
    """
    from support.models import build, make_requests, run

    if name in BFLOAT16[:1]:
        reference = random_model(bench.model(name), str(bench.device), "bfloat16")
    else:
        reference = build(name).to(bench.device, torch.bfloat16)
        if getattr(reference.config, "attn_logit_softcapping", None) is None:  # sdpa ignores it
            reference.set_attn_implementation("sdpa")
    vocabulary = reference.config.vocab_size
    rnd = random.Random(4)
    root = [rnd.randrange(vocabulary) for _ in range(100)]
    prompts = [root + [rnd.randrange(vocabulary) for _ in range(rnd.randint(1, 40))] for _ in range(12)]
    # And as many rows that share nothing: the rounding of a root is the same for all rows under it.
    prompts += [[rnd.randrange(vocabulary) for _ in range(140)] for _ in range(12)]
    engine = small_engine(prepared(reference), kv_memory="256MiB")
    seen = Seen(engine)
    results = run(engine, make_requests(prompts, [BFLOAT16_OUT] * len(prompts), ignore_eos=True))
    drawn = [list(r.token_ids) for r in results]
    ours = torch.zeros(len(prompts), BFLOAT16_OUT, vocabulary, device=bench.device)
    for row, number, logits in seen.logits(results):
        ours[row, number] = logits
    alone, *batches = (decoded(reference, prompts, drawn, size) for size in (1, 2, 4, len(prompts)))
    exact = decoded(reference.float(), prompts, drawn, 1)
    far, spread = _largest(ours - alone), max(_largest(batch - alone) for batch in batches)
    error, error_of_theirs = _error(ours - exact), max(_error(theirs - exact) for theirs in (alone, *batches))
    return {
        "attention": engine.runner.attention,
        "notes": engine.notes,
        "difference": far,
        "spread_of_transformers": spread,
        "within_spread": far <= spread,
        "error": error,
        "error_of_transformers": error_of_theirs,
        "no_worse": error <= NO_WORSE * error_of_theirs,
        "logits": len(prompts) * BFLOAT16_OUT,
    }


def prepared(reference: Any, graphs: str = "auto") -> LoadedModel:
    """Returns a copy of the model as the engine runs it: on a CPU with our kernels, on a GPU with `--compile` of `graphs`."""
    from support.models import kernels

    on_cpu = reference.device.type == "cpu"
    return prepare(copy.deepcopy(reference), kernels=kernels() if on_cpu else None, compile=graphs)


def _largest(difference: torch.Tensor) -> float:
    return round(float(difference.abs().max()), 6)


def _error(difference: torch.Tensor) -> float:
    return round(float(difference.square().mean().sqrt()), 7)


@torch.inference_mode()
def decoded(model: Any, prompts: Sequence[Sequence[int]], drawn: Sequence[Sequence[int]], size: int) -> torch.Tensor:
    """Returns transformers' logits [rows, tokens sampled, vocabulary] when it decodes these tokens, `size` rows at a time, padded on the left."""
    found = []
    name = (
        "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    )  # the latter before transformers 5.24
    for at in range(0, len(prompts), size):
        batch = prompts[at : at + size]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in batch], device=model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch], device=model.device)
        following = torch.tensor(drawn[at : at + size], device=model.device)
        cache, steps = None, []
        for step in range(following.shape[1]):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            output = model(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1, **{name: cache}
            )  # fmt: skip
            cache = output[name]
            steps.append(output.logits[:, -1].float())
            ids = following[:, step : step + 1]
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
        found.append(torch.stack(steps, 1))
    return torch.cat(found)
