"""LongRoPE: rows of more tokens than the model was first trained for have other rotary frequencies, as in transformers, whatever runs beside them."""

import copy
import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from batchgen.config import INPUT_LIMITS, EngineConfig
from batchgen.engine.engine import Engine
from batchgen.jobs.order.sorted_requests import bounded_windows
from batchgen.model.adapter import prepare
from batchgen.request import Request
from batchgen.result import Completion, Result
from support.models import kernels, make_requests, planned, random_tokens, tiny_tokenizer
from support.params import FULL, slow_but
from support.shapes import COMMON, LONGROPE
from support.tiny_model import EOS_ID, save_tiny_tokenizer

SHORT = 48
LENGTHS = [12, 30, 46, 47, 48, 49, 50, 60, 90]
MAX_TOKENS = [3, 40, 2, 9]


def phi3(**settings: Any) -> Any:
    """A random Phi 3. Its `generate` runs a text again from its beginning when it becomes longer than `SHORT`, but not in transformers 5.17."""
    rope = {"rope_parameters": LONGROPE | {"original_max_position_embeddings": SHORT}, "pad_token_id": 0}
    config = COMMON | rope | {"sliding_window": None, "original_max_position_embeddings": SHORT} | settings
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("phi3", **config)).float().eval()


@cache
def reference() -> Any:
    return phi3()


@cache
def cases() -> tuple[list[list[int]], list[int], list[list[int]]]:
    """Prompts of all lengths around `SHORT`, which share a beginning, the lengths of their completions, and these as the model gives them for each text so far."""
    rng = random.Random(3)
    document = random_tokens(rng, max(LENGTHS))
    prompts = [document[: length - 3] + random_tokens(rng, 3) for length in LENGTHS for _ in range(2 if FULL else 1)]
    lengths = [MAX_TOKENS[i % len(MAX_TOKENS)] for i in range(len(prompts))]
    return prompts, lengths, [completed(p, n) for p, n in zip(prompts, lengths, strict=True)]


@torch.inference_mode()
def completed(prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(reference()(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


@cache
def prepared(*, compiled: bool) -> Any:
    return prepare(copy.deepcopy(reference()), kernels=kernels() if compiled else None)


def engine(*, compiled: bool = True, **options: Any) -> Engine:
    model = prepared(compiled=compiled)
    tokenizer = replace(tiny_tokenizer(), hf_config=reference().config)
    assert tokenizer.short_context == SHORT
    return Engine(model, tokenizer, EngineConfig(**{"kv_memory": "64MiB", "debug": True} | options))


def requests_of(prompts: list[list[int]], lengths: list[int], **sampling: Any) -> list[Request]:
    requests = make_requests(prompts, lengths, **sampling)
    return [replace(r, long=len(r.tokens) > SHORT) for r in requests]


def add_all(engine: Engine, requests: list[Request], results: dict[int, Result]) -> None:
    for window in bounded_windows(requests, INPUT_LIMITS):
        engine.add(*planned(window), lambda result: results.update({result.row: result}))


def results_of(engine: Engine, requests: list[Request]) -> list[Result]:
    results: dict[int, Result] = {}
    add_all(engine, requests, results)
    engine.run()
    assert engine.unfinished == engine.waiting == 0
    return [results[request.row] for request in requests]


OPTIONS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "plain torch": {"compiled": False},
    "in small steps": {"max_batch_tokens": 24, "batch_size": 5},
    "in the order of the input": {"policy": "fifo", "batch_size": 4},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_rows_below_above_and_across_the_length_are_what_the_model_gives_for_each_text(options):
    prompts, lengths, expected = cases()
    across = [len(p) <= SHORT < len(p) + n - 1 for p, n in zip(prompts, lengths, strict=True)]
    assert 0 < sum(across) < len(across)
    results = results_of(engine(**options), requests_of(prompts, lengths))
    assert [list(result.token_ids) for result in results] == expected
    assert {result.finish_reason for result in results} == {"length"}


SAMPLED = {"temperature": 1.0, "n": 3, "logprobs": 1, "frequency_penalty": 0.4}


def sampled() -> list[Request]:
    prompts, lengths, _ = cases()
    return requests_of(prompts, lengths, **SAMPLED)


@cache
def alone() -> list[Any]:
    return [result.completions for result in results_of(engine(batch_size=1, speculate="off"), sampled())]


def test_sampled_completions_are_those_of_rows_run_alone():
    assert [result.completions for result in results_of(engine(), sampled())] == alone()


@pytest.mark.parametrize("every", [9, 14])
def test_a_run_that_is_stopped_again_and_again_goes_on_exactly(every):
    requests, results, runs = sampled(), {}, 0
    while len(results) < len(requests):
        other, steps = engine(batch_size=9), iter(range(every))
        begun: dict[int, Any] = {}

        def stop(other: Engine = other, steps: Any = steps, begun: dict[int, Any] = begun) -> str | None:
            if next(steps, None) is not None:
                return None
            begun.update(other.under_way())
            return "now"

        add_all(other, [r for r in requests if r.row not in results], results)
        other.run(stop)
        requests = [replace(r, begun=begun.get(r.row, {})) for r in requests]
        runs += 1
    assert runs > 3
    assert [results[request.row].completions for request in requests] == alone()


def test_a_row_of_which_one_completion_has_become_long_goes_on_exactly():
    room = {r.row: SHORT + 1 - len(r.tokens) for r in sampled()}
    requests = [r for r in sampled() if 2 < room[r.row] < r.max_tokens]
    assert requests
    continued = []
    for r in requests:
        first, second, third = alone()[r.row]
        begun = {0: so_far(first, room[r.row]), 1: so_far(second, 2), 2: so_far(third, 1)}
        continued.append(replace(r, begun=begun))
    for result in results_of(engine(), continued):
        assert result.completions == alone()[result.row]


def so_far(completion: Completion, count: int) -> Completion:
    tokens, logprobs = completion.token_ids[:count], (completion.logprobs or ())[:count]
    return Completion(text="", finish_reason="", token_ids=tokens, logprobs=logprobs)


def test_rows_go_on_exactly_when_all_are_started_again_in_the_middle():
    other = engine(batch_size=9)
    results: dict[int, Result] = {}
    add_all(other, sampled(), results)
    for step in range(400):
        if not other.unfinished:
            break
        other.run(iter([None] * 5 + ["pause"]).__next__)
        if step % 3 == 0:
            other._start_again()
    assert [results[request.row].completions for request in sampled()] == alone()


def test_a_row_can_be_cancelled_whichever_frequencies_it_waits_for():
    prompts, _, _ = cases()
    requests = requests_of(prompts, [40] * len(prompts))
    other = engine(batch_size=2)
    results: dict[int, Result] = {}
    add_all(other, requests, results)
    long = next(request.row for request in requests if request.long)
    other.cancel(requests[long])  # it waits until all others have become long
    halted: list[int] = []

    def stop() -> None:
        if not halted and other.results.halted_leaves:
            room = {request.row: SHORT + 1 - len(request.tokens) for request in requests}
            halted.append(next(row for row, begun in other.under_way().items() if len(begun[0].token_ids) == room[row]))
            other.cancel(requests[halted[0]])

    other.run(stop)
    ended = [row for row, result in sorted(results.items()) if result.finish_reason == "cancelled"]
    assert ended == sorted([long, *halted])
    assert len(results[halted[0]].token_ids) == SHORT + 1 - len(prompts[halted[0]])
    assert len(results) == len(requests)


def test_scores_are_those_of_the_whole_text_with_its_own_frequencies():
    rng = random.Random(5)
    prompts = [random_tokens(rng, length) for length in (20, 44, 47, 48, 60)]
    texts = [[random_tokens(rng, 5)] for _ in prompts]
    requests = [replace(r, long=len(r.tokens) + 4 > SHORT) for r in make_requests(prompts, texts=texts)]
    for prompt, (text,), result in zip(prompts, texts, results_of(engine(), requests), strict=True):
        with torch.inference_mode():
            logits = reference()(input_ids=torch.tensor([prompt + text[:-1]])).logits[0, len(prompt) - 1 :].double()
        want = logits.log_softmax(-1)[range(len(text)), text].sum()
        assert result.score is not None
        assert result.score.logprob == pytest.approx(float(want), abs=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "phi3"
    phi3(vocab_size=260, eos_token_id=EOS_ID).save_pretrained(path)
    save_tiny_tokenizer(path, chat=False)
    return path


WAYS: dict[str, list[list[str]]] = {
    "windows": [["--window", "4"]],
    "parts": [["--limit", "5"], []],
    "shards": [["--shard", "1/2"], ["--shard", "2/2", "--merge"]],
    "two processes": [["--device", "cpu:0,1"]],
}


@pytest.mark.parametrize("way", slow_but(["windows", "parts", "shards"], WAYS))
def test_a_job_writes_the_same_in_every_way(folder, way, tmp_path, write_jsonl, cli):
    words = "the quick brown fox jumps over the lazy dog and runs on and on through the field"
    rows = write_jsonl([{"prompt": words[: 20 + 9 * i] + f" {i}", "max_tokens": 6 + 25 * (i % 2)} for i in range(7)])
    options = ["--model", folder, "--temperature", "0.7", "-n", "2", "--token-ids", "--row-params", "max_tokens", "-q"]
    outputs = []
    for name, runs in ("whole", [[]]), (way, WAYS[way]):
        for more in runs:
            outcome = cli("run", rows, *options, *more, "-o", tmp_path / f"{name}.jsonl")
            assert outcome.code == 0, outcome.err
        outputs.append((tmp_path / f"{name}.jsonl").read_bytes())
    assert outputs[0] == outputs[1]
    written = [json.loads(line) for line in outputs[0].splitlines()]
    prompts = [row["usage"]["prompt_tokens"] for row in written]
    ends = [n + len(row["choices"][0]["token_ids"]) for n, row in zip(prompts, written, strict=True)]
    assert min(ends) < SHORT < max(prompts)
    assert any(n < SHORT < end for n, end in zip(prompts, ends, strict=True))


def test_a_prompt_and_its_completion_may_have_the_whole_context(folder, tmp_path, write_jsonl, cli):
    rows = write_jsonl([{"prompt": "a" * 40}, {"prompt": "b" * 500}, {"prompt": "c" * 600}])
    options = ["--model", folder, "--max-tokens", "1000", "--ignore-eos", "-q"]
    assert cli("run", rows, *options, "-o", tmp_path / "out.jsonl").code == 3
    *whole, long = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert [row["usage"]["prompt_tokens"] + row["usage"]["completion_tokens"] for row in whole] == [512, 512]
    assert long["error"]["type"] == "prompt_too_long"
