"""The kernels that sample, each against the sampler in plain torch."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.kernels.ops import only_allowed, sample_rows
from batchgen.sampling import sampler as module
from batchgen.sampling.filters import forbid
from batchgen.sampling.logprobs import measure, summaries
from batchgen.sampling_params import SamplingParams
from support.numbers import dtypes, numbers
from support.params import examples
from support.sampler import sampler_of

pytestmark = pytest.mark.usefixtures("kernels")


@dtypes
@pytest.mark.parametrize("columns", [1, 15, 16, 300, 4096, 8191])
def test_a_greedy_token_is_the_first_of_equal_largest_logits(dtype, columns, threads):
    x = numbers(60, columns, dtype=dtype).round()  # many are equal
    x[1] = -torch.inf
    x[2, columns // 2] = torch.inf
    x[3, columns // 2 :] = torch.nan
    x[4, -1] = torch.nan
    x[5, -1] = 1000
    x[6] = -5
    greedy, u = sampler_of(*[SamplingParams()] * 60)._batch_params.records, np.zeros(60)
    places, values = sample_rows(x, greedy, u)
    want = [next((i for i, v in enumerate(row) if v != v), row.index(max(row))) for row in x.tolist()]
    assert places.tolist() == want
    assert torch.equal(values.nan_to_num(7), x[torch.arange(60), places].nan_to_num(7))
    assert torch.equal(sample_rows(x.T.contiguous().T, greedy, u)[0], places)


@dtypes
@pytest.mark.parametrize(("columns", "words"), [(1, 1), (31, 1), (64, 2), (100, 3), (4100, 129)])
def test_only_the_tokens_of_a_mask_keep_their_logits(dtype, columns, words, threads):
    x = numbers(60, columns, dtype=dtype)
    x[1, columns // 2 :] = torch.nan
    mask = torch.randint(-(2**31), 2**31 - 1, (60, words + 1), dtype=torch.int32)[:, :words]  # its rows have gaps
    mask[2:5, words // 2 :], mask[5:9] = -1, 0
    got = only_allowed(x, mask)
    assert torch.equal(got.nan_to_num(7), forbid(x, mask).nan_to_num(7))
    assert torch.equal(got.isnan(), forbid(x, mask).isnan())
    assert torch.equal(only_allowed(x.T.contiguous().T, mask).nan_to_num(7), got.nan_to_num(7))


def difficult(rows, columns, dtype):
    """Rows of different logits, of many equal ones, of equal ones alone, of few numbers and of one."""
    x = numbers(rows, columns, dtype=dtype) * 4
    x[1::5] = x[1::5].round()
    x[2::5] = 1.5
    x[3::5, columns // 3 + 1 :] = -torch.inf
    x[4::5, 1:] = -torch.inf
    return x


FILTERS = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in itertools.product(
        (1e-6, 0.7, 1.5, 1e6), (0, 1, 3, 40, 3000), (1.0, 0.9999999, 0.9, 0.3, 1e-9), (0.0, 0.05, 1.0)
    )
]


@dtypes
@pytest.mark.parametrize("columns", [1, 2, 63, 128, 129, 1000, 5000])
def test_sampled_tokens_are_those_of_plain_torch(dtype, columns, monkeypatch, threads):
    """A token may be a neighbour's where the uniform number is at the border of both, up to the rounding of sums."""
    count = len(FILTERS)
    x = difficult(count, columns, dtype)
    u = np.random.default_rng(columns).random(count)
    u[::7], u[1::7] = 0.0, 1 - 2.0**-53
    monkeypatch.setattr(module, "uniforms", lambda *args: u)
    sampler = sampler_of(*FILTERS, vocabulary=columns, own_kernels=True)
    got = sampler.sample(x, range(count), [0] * count)
    probabilities = sampler.probabilities(x, range(count)).double()
    ends = probabilities.cumsum(-1)
    tokens = torch.tensor(got.tokens)[:, None]
    assert all(got.valid)
    assert (probabilities.gather(1, tokens) > 0).all()
    end, begin = ends.gather(1, tokens)[:, 0].numpy(), (ends - probabilities).gather(1, tokens)[:, 0].numpy()
    assert (begin - 1e-5 <= u).all()
    assert (u <= end + 1e-5).all()
    assert sampler_of(*FILTERS, vocabulary=columns, own_kernels=True, at_once=3 * columns).sample(x, range(count), [0] * count) == got  # fmt: skip


@settings(max_examples=examples(15, 60))
@given(
    st.lists(st.integers(-6, 6), min_size=300, max_size=300),
    st.integers(0, 12),
    st.sampled_from([0.1, 0.33, 0.5, 0.77, 0.9, 0.99, 1.0]),
)
def test_the_same_tokens_stay_of_equal_ones_at_the_edge(values, top_k, top_p):
    """Whatever can be sampled has a uniform number with which it is: those of the middles of all tokens' parts."""
    x = torch.tensor([values], dtype=torch.float32)
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p)
    sampler = sampler_of(params, vocabulary=len(values))
    weights = sampler.probabilities(x, [0])[0].double()
    stay = weights.nonzero()[:, 0]
    u = (weights.cumsum(0) - weights / 2)[stay].numpy()
    records = np.repeat(sampler._batch_params.records[:1], len(stay))
    got, _ = sample_rows(x.expand(len(stay), -1), records, u)
    assert got.tolist() == stay.tolist()


@dtypes
def test_rows_that_are_not_numbers_are_said_so_and_take_some_token(dtype, threads):
    params = [SamplingParams(temperature=1.0), *FILTERS[::17]]
    for broken in (torch.nan, torch.inf, -torch.inf):
        x = numbers(len(params), 300, dtype=dtype)
        x[:, 100 if broken > -1 or broken != broken else slice(None)] = broken
        sampled = sampler_of(*params, vocabulary=300, own_kernels=True).sample(x, range(len(params)), [0] * len(params))
        assert not any(sampled.valid)
        assert all(0 <= token < 300 for token in sampled.tokens)


PENALTIES = [
    SamplingParams(), SamplingParams(repetition_penalty=1.4), SamplingParams(repetition_penalty=0.8, presence_penalty=0.7),
    SamplingParams(frequency_penalty=-0.4), SamplingParams(presence_penalty=-1, frequency_penalty=0.3),
]  # fmt: skip


@dtypes
@pytest.mark.parametrize("columns", [3, 200, 4100])
@pytest.mark.parametrize("drafts", [None, [(), (1,), (1, 2), (), (2,), (2, 2), (), (0,), (), (1,)]])
def test_penalties_are_those_of_plain_torch(dtype, columns, drafts, threads):
    scores = []
    x = difficult(10, columns, dtype)
    for own_kernels in (False, True):
        sampler = sampler_of(
            *PENALTIES, vocabulary=columns, prompt=np.arange(4), generated=[0, 2, 2, 1], own_kernels=own_kernels
        )
        at = [0, 0, 0, 1, 1, 1, 2, 2, 4, 4] if drafts else [0, 1, 2, 3, 4] * 2
        step, _ = sampler._batch_params.of_step(at, sampler._batch_params.of(at), np.zeros(10), drafts)
        before = step.records.copy()
        scores.append(sampler._penalties.applied(x, step))
        assert (step.records == before).all()
    assert scores[1].dtype == torch.float32
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-6, atol=1e-6)


@dtypes
@pytest.mark.parametrize("columns", [1, 40, 128, 5000])
def test_log_probabilities_are_those_of_plain_torch(dtype, columns, threads):
    x = difficult(20, columns, dtype)
    x[5] = 0.0
    x[5, ::2] = -0.0
    tokens = torch.arange(20) % columns
    for k in {0, 1, min(4, columns), min(300, columns), columns}:
        got, want = (measure(x, tokens, k, own_kernels=own) for own in (True, False))
        assert torch.equal(got[:, 1 : 1 + k], want[:, 1 : 1 + k])
        torch.testing.assert_close(got, want, rtol=1e-6, atol=2e-6)
    for broken in (torch.inf, torch.nan):
        for place in (columns // 2, columns - 1):
            x[7, place] = broken
            for k in {1, min(4, columns)}:
                found = summaries(x, k, own_kernels=True)
                assert found.log_weights.isnan().tolist() == [row == 7 for row in range(20)]
                assert ((found.ids >= 0) & (found.ids < columns)).all()
