"""With our kernels, on one kind of processor, a row's logits and results are the same to the last bit whatever else is in the job.

Every row is run alone in one thread. Then random jobs of many rows are run with other policies, budgets, amounts of memory, numbers of
threads and drafts, right and wrong ones, and are interrupted and resumed. Every row of logits that is sampled from, every token,
log-probability and score must be `==`.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.engine.engine import Engine
from batchgen.model.adapter import prepare
from batchgen.prefix import plan_requests
from batchgen.request import Request, leaves_of
from batchgen.sampling.filters import row_sums
from batchgen.sampling.logprobs import score_targets
from batchgen.sampling_params import SamplingParams
from batchgen.scheduling.pool_size import BATCH_SIZE, sufficient_memory
from batchgen.scheduling.waiting import POLICIES
from support.drafters import ForcedDrafter, known
from support.fusing import with_adapters
from support.models import build, engine_for, kernels, load_folder, make_requests, run
from support.params import FULL, slow_but
from support.quantized import make
from support.shapes import SHAPES, VOCAB

pytestmark = pytest.mark.usefixtures("compiled")
SHAPE = {
    "hidden_size": 192, "intermediate_size": 328, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 40, "max_position_embeddings": 2048,
}  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16]


@cache
def model(name: str, dtype: torch.dtype, tied: bool = False) -> Any:
    shape = SHAPE | {"tie_word_embeddings": tied} if name in LARGER else {}
    module = build(name.removesuffix(" adapted"), **shape).to(dtype)
    return prepare(with_adapters(module) if name.endswith(" adapted") else module, kernels=kernels())


@dataclass
class Outcome:
    """The results of a run by row, and the logits that it sampled from by row key, choice and position."""

    results: dict[int, Any] = field(default_factory=dict)
    logits: dict[tuple[bytes, int, int], torch.Tensor] = field(default_factory=dict)

    def watch(self, engine: Engine) -> None:
        sample = engine.sampler.sample

        def sample_and_keep_logits(logits: torch.Tensor, sampler_indices: Any, positions: Any, *more: Any) -> Any:
            records = engine.sampler._batch_params.of(sampler_indices)
            output = sample(logits, sampler_indices, positions, *more)
            for row in range(len(logits)) if output.kept is None else output.kept:
                key, choice = records[row]["key"].tobytes(), int(records[row]["choice"])
                self.logits[key, choice, int(positions[row])] = logits[row].clone()
            return output

        engine.sampler.sample = sample_and_keep_logits  # type: ignore[method-assign]


def text(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def random_prompts(rng: random.Random, count: int, longest: int) -> list[list[int]]:
    """A tree: most prompts branch off from another one; some are equal, some are a prefix of another."""
    prompts = [text(rng, rng.randint(1, longest))]
    while len(prompts) < count:
        above = rng.choice(prompts)
        cut = rng.choice([0, len(above), rng.randint(0, len(above))])
        added = text(rng, rng.choice([0, 1, rng.randint(1, 40), rng.randint(1, longest)]))
        prompts.append((above[:cut] + added)[: 3 * longest] or [1])
    return prompts


def random_params(rng: random.Random) -> SamplingParams:
    if rng.random() < 0.4:
        return SamplingParams(max_tokens=rng.randint(1, 12), n=rng.choice([1, 1, 2]), logprobs=rng.choice([None, 0, 3]))
    return SamplingParams(
        max_tokens=rng.randint(1, 12), n=rng.choice([1, 1, 3]), logprobs=rng.choice([None, 5]), seed=rng.randint(0, 3),
        temperature=rng.choice([0.5, 1.0, 1.7]), top_p=rng.choice([1.0, 0.9, 0.4]), top_k=rng.choice([0, 0, 7, 50]),
        min_p=rng.choice([0.0, 0.02]), repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        presence_penalty=rng.choice([0.0, 0.3]),
    )  # fmt: skip


def random_requests(rng: random.Random, count: int, longest: int) -> list[Request]:
    prompts, texts, params = random_prompts(rng, count, longest), [], []
    for _ in prompts:
        scored = [text(rng, rng.randint(1, 6)) for _ in range(rng.choice([0, 0, 0, 1, 3]))]
        names = tuple(map(str, range(len(scored)))) if len(scored) > 1 else ()
        texts.append(scored)
        params.append(SamplingParams(choices=names) if scored else random_params(rng))
    return make_requests(prompts, texts=texts, params=params)


def alone(model: Any, requests: list[Request]) -> Outcome:
    """Runs every row by itself, in one thread."""
    torch.set_num_threads(1)
    outcome = Outcome()
    for request in requests:
        engine = engine_for(model, debug=False, kv_memory="16MiB")
        outcome.watch(engine)
        outcome.results[request.row] = run(engine, [request])[0]
    return outcome


def draft(rng: random.Random, engine: Engine, results: dict[int, Any]) -> None:
    """Lets most engines verify drafts in every step."""
    if not engine.loop.ahead and rng.random() < 0.7:
        right, longest = rng.choice([1.0, 0.9, 0.5, 0.0]), rng.choice([1, 3, 20])
        engine.scheduler.drafter = ForcedDrafter(known(results), range(VOCAB), right, longest, rng.randrange(1000))


def random_engine(rng: random.Random, model: Any) -> Engine:
    options: dict[str, Any] = {
        "policy": rng.choice(sorted(POLICIES)), "chunk_size": rng.choice([8, 32, 48, 96]),
        "batch_size": rng.choice([1, 2, 5, 64]), "max_batch_tokens": rng.choice([7, 33, 300, 4096]),
        "ahead": rng.random() < 0.2,
    }  # fmt: skip
    options["batch_size"] = min(options["batch_size"], options["max_batch_tokens"])
    return engine_for(model, debug=False, **options)


def together(rng: random.Random, model: Any, requests: list[Request], results: dict[int, Any]) -> Outcome:
    """Runs all rows in one job, half of the time with no more memory than the largest row needs. Interrupts the job up to twice.

    Drafts are made from `results`.
    """
    torch.set_num_threads(rng.randint(1, 4))
    outcome = Outcome()
    rows = rng.sample(requests, len(requests))
    for cut in range(rng.choice([1, 1, 2, 3])):
        engine = random_engine(rng, model)
        if rng.random() < 0.5:
            sizes, batch_size = engine.sizes, BATCH_SIZE["cpu"]
            need = max(sizes.blocks_for(leaf) for leaf in leaves_of(requests)) + 1
            kv = need * sizes.block_size * sizes.bytes_per_token
            memory = f"{sufficient_memory(kv, sizes.bytes_per_state_slot, batch_size)}B"
            engine = engine_for(
                model, debug=False, kv_memory=memory, chunk_size=engine.config.chunk_size, policy=engine.config.policy
            )
        draft(rng, engine, results)
        outcome.watch(engine)
        steps = iter(range(10_000) if cut == 0 and rng.random() < 0.5 else range(rng.randint(1, 15)))
        begun = _run(engine, rows, outcome, steps)
        rows = [replace(r, begun=begun.get(r.row, {})) for r in rows if r.row not in outcome.results]
        if not rows:
            break
    if rows:
        engine = random_engine(rng, model)
        draft(rng, engine, results)
        outcome.watch(engine)
        _run(engine, rows, outcome, iter(range(10_000)))
    return outcome


def _run(engine: Engine, rows: list[Request], outcome: Outcome, steps: Iterator[int]) -> dict[int, Any]:
    """Runs as many steps as `steps` has items. Returns the unfinished completions."""
    begun: dict[int, Any] = {}

    def stop() -> str | None:
        if next(steps, None) is not None:
            return None
        begun.update(engine.under_way())
        return "now"

    planned = plan_requests(rows, engine.config.chunk_size)
    engine.add(*planned, lambda r: outcome.results.__setitem__(r.row, r))
    engine.run(stop)
    return begun


def check(model: Any, seed: int, count: int, longest: int) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng, count, longest)
    want = alone(model, requests)
    got = together(rng, model, requests, want.results)
    assert got.results == want.results
    assert got.logits.keys() <= want.logits.keys()
    for position, logits in got.logits.items():
        assert torch.equal(logits, want.logits[position]), position


LARGER = [
    "llama", "qwen2", "qwen3", "mistral/sliding_window", "gemma2", "olmo2", "phi3", "gpt2", "falcon", "falcon/alibi", "qwen3_moe",
    "mixtral", "gpt_oss", "phimoe",
]  # fmt: skip
"""Models that are built with `SHAPE`."""
MODELS = ["llama tied", "llama adapted", *SHAPES]
ROWS = 8 if FULL else 6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", slow_but(["llama tied", "llama adapted", "qwen3_5_text", "jamba", "dbrx"], MODELS))
def test_a_row_of_a_job_equals_the_same_row_run_alone(name, dtype):
    check(model(name.removesuffix(" tied"), dtype, name.endswith("tied")), 1, ROWS, 60)


CODES = "olmo_hybrid, gates in codes"


@pytest.mark.parametrize(
    "name", slow_but(["laguna", CODES], ["laguna", CODES, "olmo_hybrid", "llama4_text", "qwen3_5_text", "hy_v4"])
)
def test_a_row_of_a_job_in_8_bits_equals_the_same_row_run_alone(name, tmp_path):
    if name == CODES:
        make(
            "gptq in order", tmp_path, build("olmo_hybrid", linear_num_key_heads=8, linear_num_value_heads=8).bfloat16()
        )
    else:
        build(name).save_pretrained(tmp_path)
    texts = [np.arange(3, 40, dtype=np.int32)]
    check(load_folder(tmp_path, texts=texts, dtype="float32", quantize="int8"), 1, ROWS, 60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 152))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_a_random_job_equals_the_same_row_run_alone(seed, dtype):
    rng = random.Random(seed)
    name = rng.choice(MODELS)
    bare = name.removesuffix(" tied")
    # The others have no more than 512 positions.
    longest = rng.choice([30, 100, 400] if bare in LARGER else [30, 100])
    check(model(bare, dtype, name.endswith("tied")), seed, rng.choice([3, 10, 20]), longest)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_sums_of_a_row_depend_neither_on_threads_nor_on_other_rows(rows):
    x = torch.randn((5, 150_001), generator=torch.Generator().manual_seed(0)) * 3
    torch.set_num_threads(1)
    weights = x.exp()
    sums, scores = row_sums(weights, torch.float64), score_targets(x, range(5), range(5))
    torch.set_num_threads(3)
    assert torch.equal(row_sums(weights[:rows], torch.float64), sums[:rows])
    for got, want in zip(score_targets(x[:rows], range(rows), range(rows)), scores, strict=True):
        assert torch.equal(got, want[:rows])
