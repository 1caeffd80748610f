"""Log-probabilities of sampled tokens, and sampling under a mask."""

import numpy as np
import pytest
import torch

from batchgen.sampling.filters import forbid
from batchgen.sampling.logprobs import TokenLogprobs, measure, read
from batchgen.sampling_params import SamplingParams
from support.sampler import Sampler

V = 70
PROMPT = np.array([1, 2], dtype=np.int32)


def random_logits(rows, dtype=torch.float32):
    torch.manual_seed(rows)
    return (torch.randn(rows, V) * 3).to(dtype)


def sampler_of(*params):
    sampler = Sampler(V, torch.device("cpu"))
    for sampler_index, p in enumerate(params):
        sampler.add(sampler_index, p, sampler_index.to_bytes(16, "little"), PROMPT)
    return sampler


def words(allowed):
    """The mask that allows these sets of tokens, one for each row. None allows all tokens."""
    mask = np.zeros((len(allowed), -(-V // 32)), dtype=np.uint32)
    for row, tokens in enumerate(allowed):
        if tokens is None:
            mask[row] = 0xFFFFFFFF
        for token in tokens or ():
            mask[row, token // 32] |= np.uint32(1 << (token % 32))
    return torch.from_numpy(mask.view(np.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_raw_logits_whatever_the_sampling_parameters(dtype):
    warm = {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.5, "presence_penalty": 1.0}
    params = [
        SamplingParams(logprobs=3, **warm), SamplingParams(), SamplingParams(logprobs=0), SamplingParams(logprobs=5),
    ]  # fmt: skip
    logits = random_logits(4, dtype)
    sampled = sampler_of(*params).sample(logits, range(4), [0] * 4)
    want = logits.float().log_softmax(-1)
    assert sampled.logprobs[1] is None
    for row, k in ((0, 3), (2, 0), (3, 5)):
        found = sampled.logprobs[row]
        assert found.logprob == pytest.approx(float(want[row, sampled.tokens[row]]), abs=1e-6)
        assert found.top_logprobs == pytest.approx(want[row].topk(k).values.tolist(), abs=1e-6)
        assert [float(want[row, i]) for i in found.top_ids] == pytest.approx(list(found.top_logprobs), abs=1e-6)
    assert sampled.tokens == sampler_of(*params).sample(logits, range(4), [0] * 4).tokens


def test_asking_for_more_logprobs_than_the_vocabulary_has_gives_all_of_them():
    sampled = sampler_of(SamplingParams(logprobs=1000)).sample(random_logits(1), [0], [0])
    assert sorted(sampled.logprobs[0].top_ids) == list(range(V))


def test_measuring_in_chunks_gives_the_same_numbers():
    logits, tokens = random_logits(7), torch.arange(7)
    whole = measure(logits, tokens, 4)
    assert torch.equal(measure(logits, tokens, 4, at_once=2 * V), whole)


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


def test_a_greedy_row_has_the_same_logprobs_beside_a_row_that_asks_for_more():
    few, many = SamplingParams(logprobs=3), SamplingParams(logprobs=40)
    logits = random_logits(40).bfloat16()
    for i in range(0, 40, 2):
        alone = sampler_of(few).sample(logits[i : i + 1], [0], [0])
        beside = sampler_of(few, many).sample(logits[i : i + 2], [0, 1], [0, 0])
        assert beside.logprobs[0] == alone.logprobs[0]
        assert beside.logprobs[0].top_ids[0] == alone.tokens[0]


def test_a_mask_changes_the_token_but_not_the_logprobs():
    logits = random_logits(1)
    sampled = sampler_of(SamplingParams(logprobs=2)).sample(logits, [0], [0], words([{7, 66}]))
    want = logits[0].log_softmax(-1)
    assert sampled.tokens[0] in (7, 66)
    assert sampled.logprobs[0].logprob == pytest.approx(float(want[sampled.tokens[0]]), abs=1e-6)
    assert list(sampled.logprobs[0].top_ids) == want.topk(2).indices.tolist()


def test_measurements_are_read_row_by_row():
    assert read([[-1.0, 5.0, 6.0, -0.5, -2.0]] * 2, [2, 1]) == [
        TokenLogprobs(-1.0, (5, 6), (-0.5, -2.0)), TokenLogprobs(-1.0, (5,), (-0.5,)),
    ]  # fmt: skip


def test_a_step_is_copied_to_the_host_once(monkeypatch):
    calls = []
    real = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: (calls.append(1), real(self))[1])
    params = [SamplingParams(logprobs=2), SamplingParams(), SamplingParams(logprobs=9, temperature=1.0)]
    sampler = sampler_of(*params)
    sampler.sample(random_logits(3), range(3), [0] * 3)
    assert calls == [1]
    sampler.sample(random_logits(3), range(3), [1] * 3, words([{3}, {4, 5}, None]))
    assert calls == [1, 1]


def test_a_masked_row_samples_an_allowed_token_and_other_rows_are_unchanged():
    warm = SamplingParams(temperature=1.5, top_p=0.9, frequency_penalty=0.5, seed=3)
    params = [SamplingParams(), warm, SamplingParams(), warm]
    logits = random_logits(4)
    allowed = [{3, 40, 69}, {0, 31, 32, 63, 64}, None, None]
    free = sampler_of(*params).sample(logits, range(4), [0] * 4)
    sampled = sampler_of(*params).sample(logits, range(4), [0] * 4, words(allowed))
    assert sampled.tokens[0] == max(allowed[0], key=lambda t: float(logits[0, t]))
    assert sampled.tokens[1] in allowed[1]
    assert (sampled.tokens[2:], sampled.valid) == (free.tokens[2:], [True] * 4)


def test_a_row_with_no_allowed_token_is_invalid_and_others_are_valid():
    sampled = sampler_of(SamplingParams(), SamplingParams()).sample(
        random_logits(2), [0, 1], [0, 0], words([set(), None])
    )
    assert sampled.valid == [False, True]


def test_tokens_beyond_the_mask_are_forbidden():
    scores = forbid(torch.zeros(1, 40), torch.tensor([[-1]], dtype=torch.int32))
    assert scores[0, :32].tolist() == [0.0] * 32
    assert torch.isinf(scores[0, 32:]).all()
