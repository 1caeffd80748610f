import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import TopPLogitsWarper

from batchgen.sampling import filters
from batchgen.sampling import sampler as module
from batchgen.sampling_params import SamplingParams
from support.params import examples
from support.sampler import PROMPT, Sampler, by_transformers, key, sampler_of

V = 64
CPU = torch.device("cpu")
ALL = SamplingParams(
    temperature=0.8,
    top_k=20,
    top_p=0.9,
    min_p=0.02,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
)


def random_logits(rows: int, vocabulary: int = V, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return (torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


# Probabilities


COMBINATIONS = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, repetition_penalty=r)
    for t, k, p, m, r in itertools.product(
        (0.5, 1.0, 1.7), (0, 1, 7, V + 9), (1.0, 0.8, 0.05), (0.0, 0.1), (1.0, 1.5, 0.7)
    )
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_probabilities_are_float32_for_any_dtype_and_the_logits_are_not_changed(dtype):
    logits = random_logits(2, dtype=dtype)
    before = logits.clone()
    sampler = sampler_of(ALL, SamplingParams(temperature=0.5))
    got = sampler.probabilities(logits, [0, 1])
    sampler.sample(logits, [0, 1], [0, 0])
    assert got.dtype == torch.float32
    torch.testing.assert_close(got[0], by_transformers(logits[:1], ALL, PROMPT)[0], atol=1e-5, rtol=0)
    assert torch.equal(logits, before)


@settings(max_examples=examples(15, 60))
@given(
    st.lists(st.integers(-6, 6), min_size=12, max_size=12),
    st.integers(0, 12),
    st.sampled_from([0.1, 0.33, 0.5, 0.77, 0.9, 0.99, 1.0]),
)
def test_top_k_and_top_p_follow_their_definitions_for_equal_logits(values, top_k, top_p):
    p = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p)
    got = sampler_of(p, vocabulary=12).probabilities(torch.tensor([values], dtype=torch.float32), [0])[0]
    least = sorted(values, reverse=True)[top_k - 1] if top_k else min(values)
    order = sorted((t for t in range(12) if values[t] >= least), key=lambda t: (-values[t], t))
    weights = np.exp(np.array([values[t] for t in order], dtype=np.float64))
    before = np.cumsum(weights) - weights
    kept = {t for t, mass in zip(order, before, strict=True) if mass < top_p * weights.sum() - 1e-6 or top_p == 1}
    edge = {t for t, mass in zip(order, before, strict=True) if abs(mass - top_p * weights.sum()) <= 1e-6}
    assert kept <= set(got.nonzero()[:, 0].tolist()) <= kept | edge


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e6, 1e300])
def test_extreme_temperatures_give_finite_probabilities(temperature):
    logits = random_logits(1)
    logits[0, 3] = -torch.inf
    got = sampler_of(SamplingParams(temperature=temperature)).probabilities(logits, [0])[0]
    assert got.sum().item() == pytest.approx(1)
    assert got[3] == 0
    assert got[logits[0].argmax()] == got.max()
    assert (got.max().item() == 1) == (temperature < 1)


# Tokens


def test_greedy_rows_take_the_first_of_the_likeliest_tokens():
    logits = torch.zeros(2, V)
    logits[1, [9, 30]] = 1.0
    greedy = SamplingParams(top_p=0.1, top_k=3)
    sampled = sampler_of(greedy, greedy).sample(logits, [0, 1], [0, 0])
    assert (sampled.tokens, sampled.valid) == ([0, 9], [True, True])


def test_a_token_is_the_first_at_which_the_cumulative_probability_passes_the_uniform(monkeypatch):
    logits = torch.tensor([[0.25, 0.0, 0.5, 0.25, 0.0]]).log().expand(5, 5)
    sampler = sampler_of(*[SamplingParams(temperature=1.0)] * 5, vocabulary=5)
    u = np.array([0.0, 0.2499999, 0.25, 0.75, 1 - 2.0**-53])
    monkeypatch.setattr(module, "uniforms", lambda *args: u)
    assert sampler.sample(logits, range(5), [0] * 5).tokens == [0, 0, 2, 3, 3]


def test_a_uniform_that_rounds_to_one_never_selects_a_token_of_probability_zero():
    weights = torch.tensor([[0.3, 0.7, 0.0], [0.0, 0.2, 0.9]])
    tokens = filters.inverse_cdf(weights, torch.ones(2), torch.tensor([1, 2]))
    assert tokens.tolist() == [1, 2]


def test_sampling_in_chunks_gives_the_same_tokens():
    params = [ALL, SamplingParams(), SamplingParams(temperature=1.0)] * 4
    logits = random_logits(12)
    whole = sampler_of(*params).sample(logits, range(12), [0] * 12)
    for rows in (1, 5):
        assert sampler_of(*params, at_once=rows * V).sample(logits, range(12), [0] * 12) == whole


# Logits that are not numbers


@pytest.mark.parametrize(
    "params", [SamplingParams(), ALL, SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.5)]
)
def test_rows_that_are_not_numbers_are_invalid_and_other_rows_are_unchanged(params):
    logits = random_logits(5)
    want = sampler_of(*[params] * 5).sample(logits, range(5), [0] * 5)
    assert want.valid == [True] * 5
    broken = logits.clone()
    broken[1, 7] = torch.nan
    broken[2] = -torch.inf
    broken[3, 0] = torch.inf
    got = sampler_of(*[params] * 5).sample(broken, range(5), [0] * 5)
    assert got.valid == [True, False, False, False, True]
    assert (got.tokens[0], got.tokens[4]) == (want.tokens[0], want.tokens[4])
    assert all(0 <= token < V for token in got.tokens)


def test_a_token_with_a_logit_of_minus_infinity_is_never_sampled():
    logits = torch.full((1, V), -torch.inf)
    logits[0, 11] = -2.0
    for params in (SamplingParams(), SamplingParams(temperature=1.0), ALL):
        sampled = sampler_of(params).sample(logits, [0], [0])
        assert (sampled.tokens, sampled.valid) == ([11], [True])


# State


def test_a_sequence_added_again_with_its_tokens_continues_unchanged():
    uninterrupted, sampled = sampler_of(ALL), []
    for step in range(6):
        sampled += uninterrupted.sample(random_logits(1, seed=step), [0], [step]).tokens
    restored = Sampler(V, CPU)
    restored.add(3, ALL, key(0), PROMPT, generated=sampled)
    for step in range(6, 12):
        logits = random_logits(1, seed=step)
        assert torch.equal(restored.probabilities(logits, [3]), uninterrupted.probabilities(logits, [0]))
        token = uninterrupted.sample(logits, [0], [step])
        assert restored.sample(logits, [3], [step]) == token


def test_a_reused_sampler_index_keeps_nothing_of_its_previous_sequence():
    sampler = sampler_of(ALL, ALL)
    for step in range(4):
        sampler.sample(random_logits(2), [0, 1], [step, step])
    sampler.remove([0])
    sampler.add(0, ALL, key(9), np.array([1], dtype=np.int32))
    logits = random_logits(1)
    want = by_transformers(logits[:1], ALL, [1])[0]
    torch.testing.assert_close(sampler.probabilities(logits, [0])[0], want, atol=1e-5, rtol=0)
    sampler.remove([0])
    sampler.add(0, SamplingParams(temperature=1.0), key(9), PROMPT)
    torch.testing.assert_close(sampler.probabilities(logits, [0])[0], logits[0].softmax(-1))


def test_prompt_tokens_without_logits_are_ignored():
    prompt = np.array([3, V, V + 5], dtype=np.int32)
    logits = random_logits(1)
    got = sampler_of(ALL, prompt=prompt).probabilities(logits, [0])[0]
    torch.testing.assert_close(got, by_transformers(logits[:1], ALL, [3])[0], atol=1e-5, rtol=0)


def test_sequences_added_under_inference_mode_can_be_sampled_outside_it():
    with torch.inference_mode():
        sampler = sampler_of(ALL)
        inside = sampler.sample(random_logits(1), [0], [0])
    sampler.sample(random_logits(1), [0], [1])
    assert inside == sampler_of(ALL).sample(random_logits(1), [0], [0])


def test_sampling_with_the_devices_table_equals_sampling_with_the_hosts_records():
    """Sequences come and go, and each step samples some of them."""
    params = [ALL, SamplingParams(), SamplingParams(temperature=1.3, logprobs=2), *COMBINATIONS[::5]]
    count = len(params)
    samplers = [Sampler(V, CPU, capacity=3) for _ in range(2)]
    samplers[1]._batch_params._tabled = True
    sampled = [[], []]
    for sampler, found in zip(samplers, sampled, strict=True):
        for i, p in enumerate(params):
            sampler.add(i, p, key(i), PROMPT, [i])
        for step, sampler_indices in enumerate(
            (range(count), range(0, count, 3), range(count - 1, -1, -2), range(count))
        ):
            found.append(
                sampler.sample(
                    random_logits(len(sampler_indices), seed=step), sampler_indices, [step] * len(sampler_indices)
                )
            )
            if step == 1:
                sampler.remove([4])
                sampler.add(4, params[7], key(99), PROMPT)
        found.append(sampler.last[:count].tolist())
    assert sampled[0] == sampled[1]
    assert sampled[0][-1] == sampled[0][-2].tokens


# Cost


def test_top_p_over_the_likeliest_eighth_of_a_vocabulary_equals_top_p_over_all_of_it(monkeypatch):
    """The likeliest eighth is enough for peaked rows and not for flat ones."""
    size = 2048
    params = [SamplingParams(temperature=1.0, top_p=p) for p in (0.3, 0.9, 0.99)] * 2
    sampler = sampler_of(*params, vocabulary=size)
    lengths = []
    largest = filters.largest
    monkeypatch.setattr(filters, "largest", lambda x, k: (lengths.append(k), largest(x, k))[1])
    for scale, want in ((4.0, [256]), (0.1, [256, 2048])):
        lengths.clear()
        logits = random_logits(6, size, seed=2) * scale
        got = sampler.probabilities(logits, range(6))
        assert lengths == want
        for row, p in enumerate(params):
            warped = TopPLogitsWarper(p.top_p)(None, logits[row : row + 1].clone()).softmax(-1)
            torch.testing.assert_close(got[row : row + 1], warped, atol=1e-5, rtol=1e-4)


# Rows behind drafts


@pytest.mark.parametrize("right", [0, 1, 3, 5])
def test_rows_behind_drafts_are_sampled_as_if_the_drafts_had_been_sampled(right):
    rows = [
        SamplingParams(logprobs=2),
        ALL,
        SamplingParams(temperature=1.0, seed=5, logprobs=1),
        SamplingParams(temperature=1.0, frequency_penalty=1.5),
        SamplingParams(repetition_penalty=1.8),
    ]
    count, most = len(rows), 6
    # Few tokens, so that they come again and penalties matter.
    logits = torch.stack([random_logits(count, seed=at) - 20 * (torch.arange(V) > 6) for at in range(most + 1)], dim=1)
    alone = sampler_of(*rows)
    steps = [alone.sample(logits[:, at], range(count), [at] * count) for at in range(most + 1)]
    tokens = [[step.tokens[row] for step in steps] for row in range(count)]

    sampler = sampler_of(*rows)
    drafts = [[*of[:right], (of[right] + 1) % V, *of[right + 1 : most - 1]] for of in tokens]
    places = [(row, at) for row in range(count) for at in range(most)]
    got = sampler.sample(
        torch.stack([logits[row, at] for row, at in places]),
        [row for row, _ in places],
        [at for _, at in places],
        drafts=[tuple(drafts[row][:at]) for row, at in places],
    )
    kept = [(row, at) for row in range(count) for at in range(right + 1)]
    assert got.tokens == [tokens[row][at] for row, at in kept]
    assert got.logprobs == [steps[at].logprobs[row] for row, at in kept]
    # What was rejected has left no trace: the next step samples what it would have sampled.
    after = sampler.sample(logits[:, right + 1], range(count), [right + 1] * count)
    assert after == steps[right + 1]


def test_drafts_without_logits_are_wrong():
    """They come from prompts."""
    penalties = SamplingParams(presence_penalty=1.0, repetition_penalty=1.5)
    logits = random_logits(2)
    got = sampler_of(penalties).sample(logits, [0, 0], [0, 1], drafts=[(), (V + 5,)])
    assert got.tokens == sampler_of(penalties).sample(logits[:1], [0], [0]).tokens


def test_a_row_behind_a_right_draft_counts_only_if_it_has_numbers():
    sampler = sampler_of(SamplingParams(), SamplingParams(presence_penalty=1.0))
    logits = random_logits(6)
    first = [int(logits[0].argmax()), int(logits[3].argmax())]
    logits[1] = float("nan")
    logits[3] = -torch.inf
    drafts = [(), (first[0],), (first[0], 1), (), (first[1],), (first[1], 1)]
    got = sampler.sample(logits, [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2], drafts=drafts)
    assert got.tokens[0] == first[0]
    assert got.valid == [True, False]
