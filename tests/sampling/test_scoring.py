import math

import numpy as np
import pytest
import torch

from batchgen.sampling.scoring import score_targets as measure_targets
from batchgen.sampling_params import SamplingParams
from support.sampler import Sampler


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


def test_among_equal_logits_the_first_is_the_likeliest():
    logits = torch.tensor([[1.0, 2.0, 2.0]])
    assert score_targets(logits, [0, 0, 0], [0, 1, 2])[1] == [False, True, False]


def test_measuring_in_chunks_gives_the_same_numbers():
    torch.manual_seed(0)
    logits = torch.randn(9, 7).bfloat16()
    pairs = list(range(9)), [1, 2, 3] * 3
    whole = score_targets(logits, *pairs)
    assert score_targets(logits, *pairs, 14) == whole


def test_scoring_copies_nothing_to_the_host(monkeypatch):
    calls = []
    for name in ("tolist", "item", "cpu", "__bool__", "__int__", "__float__"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, *a, f=real, n=name: (calls.append(n), f(self, *a))[1])
    measure_targets(torch.zeros(6, 9), range(6), [1] * 6)
    monkeypatch.undo()
    assert calls == []


def test_the_likeliest_token_is_the_one_that_greedy_decoding_samples():
    torch.manual_seed(0)
    logits = (torch.randn(60, 500) * 2).round().bfloat16()  # the largest are often equal
    sampler = Sampler(500, torch.device("cpu"))
    for sampler_index in range(60):
        sampler.add(sampler_index, SamplingParams(), bytes(16), np.array([1], dtype=np.int32))
    sampled = sampler.sample(logits, range(60), [0] * 60).tokens
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
