import math

import pytest
import torch

from batchgen.engine import scores as module
from batchgen.engine.scores import score_targets


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


def test_among_equals_the_first_is_the_likeliest():
    logits = torch.tensor([[1.0, 2.0, 2.0]])
    assert score_targets(logits, [0, 0, 0], [0, 1, 2])[1] == [False, True, False]


def test_blocks_change_nothing(monkeypatch):
    torch.manual_seed(0)
    logits = torch.randn(9, 7).bfloat16()
    pairs = list(range(9)), [1, 2, 3] * 3
    whole = score_targets(logits, *pairs)
    monkeypatch.setattr(module, "BLOCK", 14)
    assert score_targets(logits, *pairs) == whole


@pytest.mark.parametrize("bad", [[math.nan, 1.0, 0.0], [math.inf, 1.0, 0.0], [-math.inf] * 3])
def test_logits_that_are_not_numbers_have_no_score(bad):
    logits = torch.tensor([[0.0, 1.0, 2.0], bad])
    logprobs, _ = score_targets(logits, [0, 1], [2, 1])
    assert math.isfinite(logprobs[0])
    assert math.isnan(logprobs[1])


def test_a_token_that_cannot_be_is_minus_infinity_and_one_that_is_unknown_is_not_a_number():
    logits = torch.tensor([[0.0, -math.inf]])
    logprobs, likeliest = score_targets(logits, [0, 0], [1, 9])
    assert logprobs[0] == -math.inf
    assert math.isnan(logprobs[1])
    assert likeliest == [False, False]
