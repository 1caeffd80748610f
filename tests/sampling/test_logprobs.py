"""Log-probabilities of sampled tokens, and sampling under a mask."""

import math

import pytest
import torch

from batchgen.sampling.logprobs import measure, summaries
from batchgen.sampling.logprobs import score_targets as measure_targets
from batchgen.sampling_params import SamplingParams
from support.sampler import sampler_of, words

V = 70


def random_logits(rows, dtype=torch.float32):
    torch.manual_seed(rows)
    return (torch.randn(rows, V) * 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_raw_logits_whatever_the_sampling_parameters(dtype):
    warm = {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.5, "presence_penalty": 1.0}
    params = [
        SamplingParams(logprobs=3, **warm), SamplingParams(), SamplingParams(logprobs=0), SamplingParams(logprobs=5),
    ]  # fmt: skip
    logits = random_logits(4, dtype)
    sampled = sampler_of(*params, vocabulary=V).sample(logits, range(4), [0] * 4)
    want = logits.float().log_softmax(-1)
    assert sampled.logprobs[1] is None
    for row, k in ((0, 3), (2, 0), (3, 5)):
        found = sampled.logprobs[row]
        assert found.logprob == pytest.approx(float(want[row, sampled.tokens[row]]), abs=1e-6)
        assert found.top_logprobs == pytest.approx(want[row].topk(k).values.tolist(), abs=1e-6)
        assert [float(want[row, i]) for i in found.top_ids] == pytest.approx(list(found.top_logprobs), abs=1e-6)
    assert sampled.tokens == sampler_of(*params, vocabulary=V).sample(logits, range(4), [0] * 4).tokens


def test_asking_for_more_logprobs_than_the_vocabulary_has_gives_all_of_them():
    sampled = sampler_of(SamplingParams(logprobs=1000), vocabulary=V).sample(random_logits(1), [0], [0])
    assert sorted(sampled.logprobs[0].top_ids) == list(range(V))


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_measuring_in_chunks_gives_the_same_numbers(rows, k):
    logits = random_logits(7, torch.bfloat16)
    for whole, in_chunks in zip(summaries(logits, k), summaries(logits, k, at_once=rows * V), strict=True):
        assert torch.equal(whole, in_chunks)


def test_among_equal_logits_the_first_tokens_rank_first_for_every_k():
    logits = random_logits(40).bfloat16()
    logits[0] = 0.0
    logits[1, ::2] = -0.0
    logits[1, 1::2] = 0.0
    logits[2, 5:] = -torch.inf
    tokens = logits.argmax(-1)
    want = logits.float().sort(dim=-1, descending=True, stable=True).indices
    for k in (1, 4, 20, V):
        ids = measure(logits, tokens, k)[:, 1 : 1 + k].long()
        assert torch.equal(ids, want[:, :k])
        assert torch.equal(ids[:, 0], tokens)  # what greedy decoding takes


def test_a_mask_changes_the_token_but_not_the_logprobs():
    logits = random_logits(1)
    sampled = sampler_of(SamplingParams(logprobs=2), vocabulary=V).sample(
        logits, [0], [0], words({7, 66}, vocabulary=V)
    )
    want = logits[0].log_softmax(-1)
    assert sampled.tokens[0] in (7, 66)
    assert sampled.logprobs[0].logprob == pytest.approx(float(want[sampled.tokens[0]]), abs=1e-6)
    assert list(sampled.logprobs[0].top_ids) == want.topk(2).indices.tolist()


# -- scores of texts


def score_targets(*args):
    logprobs, likeliest = measure_targets(*args)
    return logprobs.tolist(), likeliest.tolist()


def test_a_score_is_the_log_softmax_and_whether_the_token_is_the_likeliest():
    torch.manual_seed(0)
    logits = torch.randn(5, 11) * 3
    rows, targets = [0, 0, 3, 4, 2, 2], [1, 7, 10, 0, 5, 5]
    targets[2] = int(logits[3].argmax())
    logprobs, likeliest = score_targets(logits, rows, targets)
    want = logits.log_softmax(-1)
    assert logprobs == pytest.approx([float(want[r, t]) for r, t in zip(rows, targets, strict=True)], abs=1e-6)
    assert likeliest == [int(logits[r].argmax()) == t for r, t in zip(rows, targets, strict=True)]
    assert likeliest[2]


def test_the_likeliest_token_is_the_one_that_greedy_decoding_samples():
    torch.manual_seed(0)
    logits = (torch.randn(60, 500) * 2).round().bfloat16()  # the largest are often equal
    sampled = sampler_of(*[SamplingParams()] * 60, vocabulary=500).sample(logits, range(60), [0] * 60).tokens
    assert (logits == logits.amax(-1, keepdim=True)).sum() > 60
    assert score_targets(logits, range(60), sampled)[1] == [True] * 60
    pairs = [(row, token) for row in range(60) for token in range(500) if token != sampled[row]]
    assert not any(score_targets(logits, *zip(*pairs, strict=True))[1])


@pytest.mark.parametrize("bad", [[math.nan, 1.0, 0.0], [math.inf, 1.0, 0.0], [-math.inf] * 3])
def test_logits_that_are_not_numbers_have_no_score(bad):
    logits = torch.tensor([[0.0, 1.0, 2.0], bad])
    logprobs, _ = score_targets(logits, [0, 1], [2, 1])
    assert math.isfinite(logprobs[0])
    assert math.isnan(logprobs[1])


def test_an_impossible_token_scores_minus_infinity_and_an_unknown_one_nan():
    logits = torch.tensor([[0.0, -math.inf]])
    logprobs, likeliest = score_targets(logits, [0, 0], [1, 9])
    assert logprobs[0] == -math.inf
    assert math.isnan(logprobs[1])
    assert likeliest == [False, False]
