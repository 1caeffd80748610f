"""A model in this process run by the engine as a job runs it, and when each of its steps began."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchgen.config import EngineConfig
from batchgen.engine.engine import Engine
from batchgen.model.adapter import prepare
from batchgen.prefix import plan_requests
from batchgen.prompts import LoadedTokenizer
from batchgen.request import Request, row_key
from batchgen.sampling_params import SamplingParams
from benchmarks.gpu.device import Bench
from benchmarks.models import GPU_CONFIGS, random_model

FIRST_TOKEN = 256
"""Prompts are made of tokens from here on: lower ones may be special tokens."""


class Numbers:
    """A tokenizer whose text is the token ids, so that it takes no time in a step."""

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(map(str, ids))

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[None]:
        return [None for _ in tokens]

    def convert_ids_to_tokens(self, token: int) -> str:
        return str(token)


@dataclass(frozen=True, slots=True)
class Moment:
    """The engine is about to take a step."""

    at: float
    """Seconds of `time.perf_counter`."""
    tokens: int
    """Number of completion tokens so far."""
    steps: int


class Served:
    """An engine with a random model of `GPU_CONFIGS`, and prompts that share nothing with those of other calls."""

    def __init__(self, bench: Bench, name: str, **config: Any) -> None:
        self.bench = bench
        self.name = bench.model(name)
        self.vocabulary = GPU_CONFIGS[self.name]["vocab_size"]
        module = random_model(self.name, str(bench.device), str(bench.dtype).removeprefix("torch."))
        context = GPU_CONFIGS[self.name]["max_position_embeddings"]
        tokenizer = LoadedTokenizer(Numbers(), None, context, (), self.vocabulary)
        self.engine = Engine(
            prepare(module), tokenizer, EngineConfig(**(bench.size({}, {"kv_memory": "64MiB"}) | config))
        )
        self._random = random.Random(0)

    def prompts(self, count: int, shared: int, own: int) -> list[list[int]]:
        """All under one prefix."""
        prefix = self.tokens(shared)
        return [prefix + self.tokens(own) for _ in range(count)]

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(FIRST_TOKEN, self.vocabulary) for _ in range(count)]

    def run(self, prompts: Sequence[Sequence[int]], out: int) -> list[Moment]:
        """Generates `out` tokens for each prompt. Returns when each step began, and when all were done."""
        sampling = SamplingParams(max_tokens=out, ignore_eos=True)
        requests = [
            Request(
                row=row,
                tokens=np.array(prompt, dtype=np.int32),
                params=sampling,
                max_tokens=out,
                key=row_key(b"k" * 16, row),
            )
            for row, prompt in enumerate(prompts)
        ]
        planned = plan_requests(requests, self.engine.config.chunk_size)
        failed: list[str | None] = []
        moments: list[Moment] = []
        stats = self.engine.stats

        def stop() -> None:
            moments.append(Moment(time.perf_counter(), stats.completion_tokens, stats.steps))

        self.engine.add(*planned, lambda result: failed.append(result.error_message))
        self.bench.sync()
        self.engine.run(stop)
        self.bench.sync()
        stop()
        if any(failed) or len(failed) != len(requests):
            raise RuntimeError(
                f"{len(failed)} of {len(requests)} prompts were done; the first error: {next(filter(None, failed), None)}"
            )
        return moments


class OneAtATime:
    """Engines of one model after the other: the KV pool of the next one takes its size from the memory that the last one has freed."""

    def __init__(self, bench: Bench, **config: Any) -> None:
        self.bench = bench
        self.config = config
        self._served: Served | None = None
        self._model = ""

    def __call__(self, model: str) -> Served:
        if self._served is None or self._model != model:
            self._served = None
            self.bench.free()
            self._served, self._model = Served(self.bench, model, **self.config), model
        return self._served


def reached(moments: Sequence[Moment], tokens: int) -> Moment:
    """Returns the first moment with so many completion tokens."""
    return next(moment for moment in moments if moment.tokens >= tokens)
