"""Scores of texts and labels equal those of transformers' own forward, whatever the batch, the memory and the tree."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from batchgen.request import row_key
from batchgen.sampling_params import SamplingParams
from support.models import (
    WAYS,
    engine_for,
    generate,
    generate_all,
    make_requests,
    packed_model,
    random_tokens,
    reference_model,
    run,
)
from support.params import slow_but
from support.requests import request
from support.shapes import RECURRENT_SHAPES, tree_tokens


@torch.inference_mode()
def teacher(model, prompt, text):
    """Returns the log-probability of the text after the prompt, and whether each of its tokens is the likeliest."""
    logits = model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].float()
    targets = torch.tensor(text)
    logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return float(logprobs.double().sum()), bool((logits.argmax(-1) == targets).all())


def scored(prompts, texts, choices=()):
    return make_requests(prompts, texts=texts, choices=tuple(choices))


def cases():
    rng = random.Random(3)
    root = random_tokens(rng, 40)
    groups = [root + random_tokens(rng, n) for n in (30, 24, 7)]
    prompts = [g + random_tokens(rng, rng.randint(1, 20)) for g in groups for _ in range(3)]
    prompts += [groups[0], groups[0], root, root[:16], [5], [5]]
    texts = [random_tokens(rng, rng.choice([1, 2, 9, 40])) for _ in prompts]
    texts[0] = generate(reference_model("llama"), prompts[0], 6)  # what greedy decoding writes
    texts[10] = texts[9]  # an equal row
    prompts.append(prompts[0] + texts[0][:3])  # a prompt that begins with another and its text
    texts.append(texts[0][3:])
    return prompts, texts


PROMPTS, TEXTS = cases()
ENGINES = WAYS | {
    "prompts first": {"policy": "prefill-first", "max_batch_tokens": 50},
    "a step ahead": {"batch_size": 3, "ahead": True},
}
"""For short memory, see `test_short_memory.py`."""


@pytest.mark.parametrize(
    "name",
    slow_but({"llama", "lfm2"}, ["llama", "gpt2", "gemma2", "mistral/sliding_window", *RECURRENT_SHAPES]),
)
def test_a_score_equals_that_of_one_forward_over_prompt_and_text(name):
    want = [teacher(reference_model(name), p, t) for p, t in zip(PROMPTS, TEXTS, strict=True)]
    assert name != "llama" or want[0][1]
    tokens = tree_tokens(PROMPTS)
    for how, options in ENGINES.items():
        engine = engine_for(packed_model(name), **options)
        results = run(engine, scored(PROMPTS, [[t] for t in TEXTS]))
        for result, text, (logprob, greedy) in zip(results, TEXTS, want, strict=True):
            assert result.score.logprob == pytest.approx(logprob, abs=2e-3), how
            assert (result.score.tokens, result.score.greedy) == (len(text), greedy), how
            assert (result.text, result.finish_reason, result.completion_tokens) == (None, None, 0)
        assert engine.stats.prefill_tokens == tokens, how
        assert engine.stats.completion_tokens == 0


@pytest.mark.parametrize("name", slow_but({"llama"}, ["llama", *RECURRENT_SHAPES]))
@pytest.mark.parametrize("choices", [[[3], [4], [5]], [[3, 1], [3, 2], [4], [3, 1, 7]], [[9] * 30, [9] * 29 + [8]]])
def test_the_probabilities_of_choices_are_those_of_their_tokens(name, choices):
    labels = [f"label {i}" for i in range(len(choices))]
    model = reference_model(name)
    results = run(engine_for(packed_model(name)), scored(PROMPTS, [choices] * len(PROMPTS), labels))
    for prompt, result in zip(PROMPTS, results, strict=True):
        logprobs = np.array([teacher(model, prompt, choice)[0] for choice in choices])
        want = np.exp(logprobs - logprobs.max())
        want /= want.sum()
        assert list(result.choice_probs) == labels
        assert list(result.choice_probs.values()) == pytest.approx(want.tolist(), abs=1e-4)
        assert sum(result.choice_probs.values()) == pytest.approx(1, abs=1e-12)
        assert result.text == labels[int(want.argmax())]
        assert (result.finish_reason, result.score) == ("stop", None)


def test_rows_that_score_and_rows_that_generate_share_prefixes():
    rng = random.Random(4)
    root = random_tokens(rng, 50)
    prompts = [root + random_tokens(rng, n) for n in (5, 9, 0, 3)]
    generated = make_requests(prompts, [6] * 4)
    later = scored(prompts, [[[1, 2], [3]]] * 4, ["a", "b"])
    requests = [*generated, *(replace(r, row=4 + r.row) for r in later)]
    engine = engine_for(packed_model("llama"))
    results = run(engine, requests)
    assert [list(r.token_ids) for r in results[:4]] == generate_all(reference_model("llama"), prompts, [6] * 4)
    alone = run(engine_for(packed_model("llama")), later)
    for one, other in zip(results[4:], alone, strict=True):
        assert one.choice_probs == pytest.approx(other.choice_probs, abs=1e-5)
    assert engine.stats.prefill_tokens == 50 + 5 + 9 + 3


def test_above_temperature_0_a_label_is_sampled_by_its_probability():
    rng = random.Random(5)
    prompt = random_tokens(rng, 20)
    params = SamplingParams(choices=("a", "b", "c"), temperature=1.0)
    requests = [
        request(row, prompt, 0, params=params, key=row_key(b"0" * 16, row), texts=[[1, 2], [3], [4]])
        for row in range(600)
    ]
    results = run(engine_for(packed_model("llama"), debug=False), requests)
    probs = results[0].choice_probs
    counts = {label: sum(r.text == label for r in results) for label in probs}
    spread = sum((counts[label] - 600 * p) ** 2 / (600 * p) for label, p in probs.items())
    assert spread < 18.4  # chi-squared, 2 degrees of freedom, 1e-4
    again = run(engine_for(packed_model("llama"), batch_size=3, debug=False), requests[:50])
    assert [r.text for r in again] == [r.text for r in results[:50]]
