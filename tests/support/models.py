"""Tiny random models of every verified architecture, run by transformers and by batchgen."""

import copy
import ctypes
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from batchgen.config import EngineConfig, ModelConfig
from batchgen.engine.engine import Engine
from batchgen.kernels.build import NoKernels, library
from batchgen.model import loader
from batchgen.model.adapter import prepare
from batchgen.prompts import LoadedTokenizer, load_tokenizer
from batchgen.prompts.tokenizer import load_config
from batchgen.request import Request, row_digest, row_key
from batchgen.result import Result
from batchgen.sampling_params import SamplingParams
from support.params import FULL
from support.requests import planned, request
from support.shapes import COMMON, SHAPES, VOCAB, family_config

WAYS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "one at a time": {"batch_size": 1},
    "in slices": {"max_batch_tokens": 7, "batch_size": 3},
    "other blocks": {"chunk_size": 5},
    "in order": {"policy": "fifo"},
}
"""Settings of an engine, none of which changes results."""


class Numbers:
    """A tokenizer that writes token ids as text. None of its tokens is special."""

    added_tokens_decoder: MappingProxyType[int, Any] = MappingProxyType({})

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(map(str, ids))

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[None]:
        return [None for _ in tokens]

    def convert_ids_to_tokens(self, token: int) -> str:
        return str(token)


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def build(model_type: str, **changes: Any) -> Any:
    """A random float32 model. Equal arguments give equal weights."""
    settings = COMMON | SHAPES[model_type] | changes
    if model_type.split("/")[0] == "falcon":  # its head size cannot be set
        del settings["head_dim"]
    config = family_config(model_type, **settings)
    torch.manual_seed(0)
    # Falcon's eager attention adds ALiBi twice.
    attention = "sdpa" if model_type.startswith("falcon/alibi") else "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    return randomize(model)


@torch.no_grad()
def randomize(model: Any) -> Any:
    """Adds random numbers to everything that training changes: a neutral bias, norm or sink would hide a mistake."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.1
        parameter.copy_(noise if parameter.dim() > 1 and "norm" not in name else parameter.nan_to_num() + noise)
    for name, buffer in model.named_buffers():
        if "bias" in name and buffer.is_floating_point():
            buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.1)
    return model


@cache
def reference_model(model_type: str) -> Any:
    return build(model_type)


def plain_llama(poison: int | None = None, **changes: Any) -> Any:
    """A Llama without our kernels, which a test may change. The embedding of the token `poison` is NaN."""
    module = build("llama", **changes)
    if poison is not None:
        module.model.embed_tokens.weight.data[poison] = math.nan
    return prepare(module)


def kernels() -> ctypes.CDLL | None:
    """Our kernels, which users run by default; None if this machine cannot compile them."""
    try:
        return library()
    except NoKernels:
        return None


@cache
def packed_model(model_type: str, *, compiled: bool = True) -> Any:
    return prepare(copy.deepcopy(reference_model(model_type)), kernels=kernels() if compiled else None)


def tiny_tokenizer(eos: tuple[int, ...] = ()) -> LoadedTokenizer:
    return LoadedTokenizer(Numbers(), hf_config=None, context_length=512, eos_token_ids=eos, vocab_size=VOCAB)


def make_requests(
    prompts: Sequence[Sequence[int]], max_tokens: Sequence[int] = (), *, texts: Sequence[Sequence[Sequence[int]]] = (),
    params: Sequence[SamplingParams] = (), priorities: Sequence[float] = (), **sampling: Any,
) -> list[Request]:  # fmt: skip
    """Requests with the keys that they have in a job. Every argument has an item for each row.

    A row with `texts` scores them and samples nothing. `params` are the parameters of each row, in place of `max_tokens` and `sampling`.
    """
    requests, seen = [], Counter[bytes]()
    for row, prompt in enumerate(prompts):
        scored = tuple(np.array(text, dtype=np.int32) for text in texts[row]) if texts else ()
        length = {"max_tokens": max_tokens[row]} if max_tokens else {}
        own = params[row] if params else SamplingParams(**length, **sampling)
        tokens = np.array(list(prompt), dtype=np.int32)
        digest = row_digest(tokens, own, scored)
        requests.append(
            request(
                row, tokens, 0 if scored else own.max_tokens, params=own, key=row_key(digest, seen[digest]), texts=scored,
                priority=priorities[row] if priorities else 0.0,
            )
        )  # fmt: skip
        seen[digest] += 1
    return requests


def mixed_requests(rng: random.Random, count: int) -> list[Request]:
    """Requests of all kinds under shared prefixes, some of which end at a node; texts to score and labels among them."""
    group = random_tokens(rng, 24)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": rng.randrange(9), "logprobs": 0},
        {"temperature": 1.4, "top_k": 20, "repetition_penalty": 1.3},
        {"frequency_penalty": 0.6, "presence_penalty": 0.2, "logprobs": 2},
        {"temperature": 0.9, "top_p": 0.9, "min_p": 0.02, "n": 3, "logprobs": 0},
        {"ignore_eos": True},
        {"stop": (f" {rng.randrange(VOCAB)} ", f"{rng.randrange(VOCAB)} {rng.randrange(VOCAB)}")},
        {"stop_token_ids": tuple(random_tokens(rng, 6))},
        {"choices": ("a", "b"), "temperature": rng.choice([0, 1.0])},
        {"choices": ("a",)},
    ]
    requests = []
    for row in range(count):
        prompt = group[: rng.choice([0, 9, 24])] + random_tokens(rng, rng.randint(0, 6)) or [1]
        params = dict(kinds[(row + count) % len(kinds)])
        texts = [random_tokens(rng, rng.randint(1, 5)) for _ in params.get("choices", ())]
        if len(texts) == 1:
            del params["choices"]  # a text to score
        most = rng.randint(1, 24)
        own = SamplingParams(max_tokens=most, **params)
        priority = rng.choice([0.0, 0.0, 1.0])
        requests.append(request(row, prompt, most, params=own, key=rng.randbytes(16), texts=texts, priority=priority))
    return requests


def engine_for(
    model: Any, eos: tuple[int, ...] = (), ahead: bool | None = None, blocks: int | None = None, head: Any = None, **config: Any
) -> Engine:  # fmt: skip
    """`ahead`: whether a step is launched before the tokens of the previous one are known; None is the default of the device.

    `blocks`: the KV memory is that of so many blocks, and of state slots that take about as much.
    """
    if blocks:
        config["kv_memory"] = memory_for(engine_for(model, head=head, **config), blocks)
    options = {"kv_memory": "64MiB" if FULL else "16MiB", "debug": True, "speculate": "off"} | config
    engine = Engine(model, replace(tiny_tokenizer(eos=eos), head=head), EngineConfig(**options))
    if ahead is not None:
        engine.loop.ahead = ahead
    return engine


def memory_for(engine: Engine, blocks: int) -> str:
    """The `kv_memory` for `blocks` blocks and for state slots that take about as much memory as the blocks."""
    sizes = engine.sizes
    block = sizes.block_size * sizes.bytes_per_token
    if not sizes.num_state_slots:
        return f"{blocks * block}B"
    slots = min(sizes.num_state_slots, max(2, blocks * block // sizes.bytes_per_state_slot)) if block else 4
    states = slots * sizes.bytes_per_state_slot
    return f"{max(blocks * block + states, 2 * states if block else states)}B"


def run(engine: Engine, requests: Sequence[Request], share: bool = True, stop: Any = None) -> list[Result]:
    """Results in the order of the requests. Checks that no row has two, and that each has one unless `stop` ends the run."""
    results: dict[int, Result] = {}

    def on_result(result: Result) -> None:
        assert result.row not in results
        results[result.row] = result

    engine.add(*planned(requests, share=share, chunk_size=engine.config.chunk_size), on_result)
    engine.run(stop)
    assert stop or len(results) == len(requests)
    return [results[r.row] for r in requests if r.row in results]


def token_ids(results: Iterable[Result]) -> dict[int, tuple[int, ...]]:
    """The tokens by row."""
    return {result.row: result.token_ids for result in results}


def rounded(results: Iterable[Result]) -> dict[int, Any]:
    """Returns results by row that can be compared: log-probabilities depend a little on what else is in the batch."""

    def completion(c: Any) -> Any:
        logprobs = [(t.token, pytest.approx(t.logprob, abs=1e-4)) for t in c.logprobs or ()]
        return c.token_ids, c.text, c.finish_reason, logprobs

    found = {}
    for r in results:
        probs = {text: pytest.approx(p, abs=1e-4) for text, p in (r.choice_probs or {}).items()}
        score = r.score and pytest.approx(r.score.logprob, abs=1e-4)
        completions = [completion(c) for c in r.completions]
        found[r.row] = (r.text, r.token_ids, r.finish_reason, r.error_type, completions, probs, score)
    return found


def tokens_of(engine: Engine, prompts: list[list[int]], lengths: list[int], **options: Any) -> list[list[int]]:
    """The tokens that an engine writes for prompts. `options` are those of `run`."""
    return [list(r.token_ids) for r in run(engine, make_requests(prompts, lengths), **options)]


def load_folder(folder: Path, *, texts: Any = (), **options: Any) -> Any:
    """Loads a saved model, on the CPU and with a tokenizer that writes numbers."""
    tokenizer = replace(tiny_tokenizer(), hf_config=load_config(ModelConfig(model=str(folder))))
    return loader.load_model(ModelConfig(**{"model": str(folder), "device": "cpu"} | options), tokenizer, 1, texts)


_loaded: dict[Any, Any] = {}
_load_tokenizer_once = cache(load_tokenizer)


def load_once(patch: pytest.MonkeyPatch, *folders: Path) -> None:
    """The models of these folders and their tokenizers are loaded once for each of their options. One that sees forgets what it saw before."""
    load, once = loader.load_model, set(map(str, folders))

    def tokenizer_kept(config: ModelConfig) -> LoadedTokenizer:
        return (_load_tokenizer_once if config.model in once else load_tokenizer)(config)

    def load_kept(config: ModelConfig, tokenizer: Any, processes: int = 1, texts: Any = ()) -> Any:
        if config.model not in once or config.quantize != "none":
            return load(config, tokenizer, processes, texts)
        if (config, processes) not in _loaded:
            _loaded[config, processes] = load(config, tokenizer, processes, texts)
        if vision := _loaded[config, processes].vision:
            vision.clear()
            vision.failed.clear()
            vision.encoded = 0
        return _loaded[config, processes]

    patch.setattr(loader, "load_model", load_kept)
    for module in ("dry_run", "job_setup", "llm"):
        patch.setattr(f"batchgen.{module}.load_tokenizer", tokenizer_kept)


@dataclass(frozen=True, eq=False)
class Expected:
    """The tokens that transformers generates for a prompt, and their logits."""

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor
    """[len(tokens), vocabulary]"""


@torch.inference_mode()
def expect(model: Any, prompt: list[int], max_tokens: int, eos: tuple[int, ...] = ()) -> Expected:
    """Runs transformers' greedy `generate` on one prompt, with a mask so that no token counts as padding."""
    ids = torch.tensor([prompt])
    for module in model.modules():
        if hasattr(module, "conv1d_state"):  # RecurrentGemma keeps the end of the previous prompt here
            module.conv1d_state = None
    model.generation_config.eos_token_id = list(eos) or None
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return Expected(prompt, out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits))


def generate(model: Any, prompt: list[int], max_tokens: int, eos: tuple[int, ...] = ()) -> list[int]:
    return expect(model, prompt, max_tokens, eos).tokens


def generate_all(
    model: Any,
    prompts: list[list[int]],
    lengths: list[int],
    eos: tuple[int, ...] = (),
    of: Callable[[Expected], list[int]] = attrgetter("tokens"),
) -> list[list[int]]:
    """Returns the tokens `of` what is generated. Equal prompts run once: a short completion is the beginning of a longer one."""
    longest: dict[tuple[int, ...], int] = {}
    for prompt, length in zip(map(tuple, prompts), lengths, strict=True):
        longest[prompt] = max(length, longest.get(prompt, 0))
    written = {prompt: of(expect(model, list(prompt), length, eos)) for prompt, length in longest.items()}
    return [written[tuple(prompt)][:length] for prompt, length in zip(prompts, lengths, strict=True)]


def before_near_ties(expected: Expected) -> list[int]:
    """Returns the tokens before the first whose logit is so near to another one that float32 in another order may choose that."""
    first, second = expected.logits.topk(2).values.T
    near = (first - second < 1e-5 * expected.logits.abs().amax(-1)).tolist()
    return expected.tokens[: near.index(True)] if True in near else expected.tokens


def beginnings(found: list[list[int]], expected: list[list[int]]) -> list[list[int]]:
    """Returns as many of the tokens found as each of those expected has."""
    return [tokens[: len(want)] for tokens, want in zip(found, expected, strict=True)]


class Seen:
    """The logits of a packed model, each with the position and the token that it follows."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []
        self.logits: list[torch.Tensor] = []

    def note(self, _: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        keep = kwargs["logits_to_keep"]
        positions, tokens = (kwargs[name][0, keep].tolist() for name in ("position_ids", "input_ids"))
        self.places += zip(positions, tokens, strict=True)
        self.logits += output.logits[0]

    def furthest(self, expected: list[Expected]) -> float:
        """The largest difference of a logit from the nearest expected one after the same token at the same position.

        Infinite if none is expected there.
        """
        rows: dict[tuple[int, int], list[torch.Tensor]] = {}
        for e in expected:
            text = e.prompt + e.tokens
            for i, logits in enumerate(e.logits, len(e.prompt) - 1):
                rows.setdefault((i, text[i]), []).append(logits)
        differences = [
            float((torch.stack(rows[place]) - logits).abs().amax(1).min()) if place in rows else math.inf
            for place, logits in zip(self.places, self.logits, strict=True)
        ]
        return max(differences)


@contextmanager
def watched(model: Any) -> Iterator[Seen]:
    """Records the logits of a loaded model inside the block."""
    seen = Seen()
    handle = model.module.register_forward_hook(seen.note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


TOLERANCE = 5e-5
"""Largest difference of a logit, relative to the largest logit. Rounding stays below a fifth of it (below a tenth except for Gemma 4).
A scale of attention that is 2% off, or a missing sliding window, soft cap or sink, makes a difference of at least ten times as much."""


def check_equal_to_generate(
    model: Any, prompts: list[list[int]], lengths: list[int], expected: list[Expected]
) -> tuple[int, int]:
    """Compares tokens and logits with those of `generate`. Returns how many sequences each of two engines preempted.

    The first decodes all rows together; the second mixes slices of prefill with decoding, and runs out of blocks.
    """
    largest = max(float(e.logits.abs().max()) for e in expected)
    # Of 8 blocks of 32 tokens, the longest completion needs 6.
    engines = engine_for(model), engine_for(model, max_batch_tokens=24, batch_size=8, blocks=8)
    for engine in engines:
        with watched(model) as seen:
            results = run(engine, make_requests(prompts, lengths))
        assert {r.error_message for r in results} == {None}
        assert [list(r.token_ids) for r in results] == [e.tokens for e in expected]
        assert seen.furthest(expected) < TOLERANCE * largest
    return engines[0].stats.preemptions, engines[1].stats.preemptions
