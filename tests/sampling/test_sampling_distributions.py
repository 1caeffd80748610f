"""Probabilities are compared with transformers' processors, and sampled tokens with the probabilities."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from batchgen.sampling.filters import forbid
from batchgen.sampling_params import SamplingParams
from support.params import slow_but
from support.sampler import PROMPT, Sampler, by_transformers, key, sampler_of, words

V = 48
CPU = torch.device("cpu")
GENERATED = [1, 7, 7, 40]
ON = {
    "temperature": 0.7, "top_k": 11, "top_p": 0.83, "min_p": 0.06, "repetition_penalty": 1.3,
    "presence_penalty": 0.37, "frequency_penalty": -0.21,
}  # fmt: skip
OFF = {"temperature": 1.0}
COMBINATIONS = [
    SamplingParams(**OFF | dict(itertools.compress(ON.items(), switches)))
    for switches in itertools.product((False, True), repeat=len(ON))
]
COMBINATIONS += [
    replace(p, top_k=4) for p in COMBINATIONS if p.top_k
]  # few enough for the path that sorts only what it keeps


def name(p: SamplingParams) -> str:
    return "-".join(f"{n}={getattr(p, n)}" for n in ON if getattr(p, n) != getattr(SamplingParams(**OFF), n)) or "none"


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def difficult_logits() -> torch.Tensor:
    """Three rows of different logits and three with ties, then the same rows with many logits of -inf."""
    plain = torch.cat([noise(3, V, seed=1), noise(3, V, seed=2).round()])
    gaps = plain.clone()
    gaps[:, ::3] = -torch.inf
    gaps[-1, 4:] = -torch.inf  # fewer numbers than a top-k of 11 would keep
    return torch.cat([plain, gaps])


@pytest.mark.parametrize("params", slow_but(COMBINATIONS[::5], COMBINATIONS), ids=name)
def test_probabilities_equal_transformers_for_every_combination(params):
    logits = difficult_logits()
    sampler_indices = range(len(logits))
    sampler = sampler_of(*[params] * len(logits), vocabulary=V, generated=GENERATED)
    got, want = sampler.probabilities(logits, sampler_indices), by_transformers(logits, params, PROMPT, GENERATED)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert ((got > 0) == (want > 0)).all()
    allowed = set(range(1, V, 2)) | {4}
    may = torch.tensor([token in allowed for token in range(V)])
    got = sampler.probabilities(logits, sampler_indices, words(*[allowed] * len(logits), vocabulary=V))
    torch.testing.assert_close(got, by_transformers(logits, params, PROMPT, GENERATED, may), atol=1e-5, rtol=0)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_mask_is_applied_as_llguidance_does(width):
    apply = pytest.importorskip("llguidance.numpy").apply_token_bitmask_inplace
    mask = np.random.default_rng(width).integers(-(2**31), 2**31, (5, width)).astype(np.int32)
    scores = noise(5, V, seed=3)
    want = scores.numpy().copy()
    apply(want, mask)
    assert torch.equal(forbid(scores, torch.from_numpy(mask)), torch.from_numpy(want))


# Tokens


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """The probability that Pearson's chi-squared is at least this large. Cells that expect fewer than five are merged."""
    counts, expected = counts[expected > 0].astype(float), expected[expected > 0].astype(float)
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    spread = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor([(len(expected) - 1) / 2, spread / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


SHAPES = {
    "plain": (SamplingParams(temperature=1.0), None),
    "hot": (SamplingParams(temperature=1.9), None),
    "top_k": (SamplingParams(temperature=1.5, top_k=12), None),
    "small_top_k": (SamplingParams(temperature=2.0, top_k=4, top_p=0.95), None),
    "top_p": (SamplingParams(temperature=2.0, top_p=0.8), None),
    "min_p": (SamplingParams(temperature=2.0, min_p=0.1), None),
    "penalised": (
        SamplingParams(temperature=1.5, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.6),
        None,
    ),
    "masked": (SamplingParams(temperature=1.5), {1, 4, 5, 31, 32, 40, 47}),
    "everything": (SamplingParams(**ON | {"temperature": 1.6}), set(range(0, V, 2)) | {1, 7}),
}


@pytest.mark.parametrize(
    ("shape", "choice"),
    slow_but([*((shape, 0) for shape in SHAPES), ("everything", 7)], itertools.product(SHAPES, [0, 1, 7])),
)
def test_the_tokens_of_every_choice_follow_the_probabilities(shape, choice):
    params, allowed = SHAPES[shape]
    rows = 3000
    sampler = sampler_of(*[params] * rows, vocabulary=V, generated=GENERATED, choice=choice)
    logits = noise(1, V, seed=4).expand(rows, V)
    mask = words(allowed, vocabulary=V)
    expected = sampler.probabilities(logits[:1], [0], mask)[0].double().numpy() * rows
    sampled = sampler.sample(logits, range(rows), [len(GENERATED)] * rows, mask.expand(rows, -1))
    counts = np.bincount(sampled.tokens, minlength=V)
    assert counts[expected == 0].sum() == 0
    assert p_value(counts, expected) > 1e-4


def streams(params: SamplingParams, choices: range, positions: range, rows: int, vocabulary: int) -> np.ndarray:
    """Tokens [rows, choices, positions] sampled from a flat distribution. The choices of a row share its key."""
    sampler = Sampler(vocabulary, CPU)
    sampler_indices = list(itertools.product(range(rows), choices))
    for sampler_index, (row, choice) in enumerate(sampler_indices):
        sampler.add(sampler_index, params, key(row), PROMPT, choice=choice)
    logits = torch.zeros(len(sampler_indices), vocabulary)
    sampled = [
        sampler.sample(logits, range(len(sampler_indices)), [at] * len(sampler_indices)).tokens for at in positions
    ]
    return np.array(sampled).T.reshape(rows, len(choices), len(positions))


@pytest.mark.parametrize(
    ("one", "other"),
    [((0, 0), (1, 0)), ((0, 1), (1, 0)), ((0, 0), (0, 1)), ((1, 2), (2, 2)), ((1, 2), (2, 1))],
    ids=["choices", "crosswise", "positions", "later-choices", "later-crosswise"],
)
def test_the_choices_and_positions_of_a_key_are_independent(one, other):
    sampled = streams(SamplingParams(temperature=1.0), range(3), range(3), 2000, 4)
    pairs = sampled[:, one[0], one[1]] * 4 + sampled[:, other[0], other[1]]
    assert p_value(np.bincount(pairs, minlength=16), np.full(16, 2000 / 16)) > 1e-4


def test_each_choice_has_its_own_stream_which_more_choices_do_not_change():
    warm = SamplingParams(temperature=1.0)
    eight = streams(warm, range(8), range(12), 1, 4096)[0]
    assert len({tuple(stream) for stream in eight.tolist()}) == 8
    assert max(np.bincount(eight.ravel())) <= 3  # 96 tokens out of 4,096
    assert (streams(warm, range(3), range(12), 1, 4096)[0] == eight[:3]).all()


# The batch


KINDS = [
    SamplingParams(**ON),
    SamplingParams(**ON, logprobs=2, seed=5),
    SamplingParams(temperature=1.0, logprobs=9),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=9, logprobs=0),
    SamplingParams(temperature=0.8, min_p=0.05, frequency_penalty=1.0),
    SamplingParams(),
    SamplingParams(logprobs=4, repetition_penalty=1.2),
    SamplingParams(temperature=1.5, top_k=4),
    SamplingParams(temperature=1.5, top_k=3, top_p=0.7, presence_penalty=0.5),
]
STEPS = [noise(len(KINDS) * 3, V, seed=step).round().bfloat16() for step in range(5)]  # many are equal


def texts(order: list[int], sampler_indices: list[int], parts: list[int]) -> dict[int, list[object]]:
    """The samples of every sequence, in this order, at these sampler indices, with each step divided at `parts`."""
    sampler = Sampler(V, CPU)
    sampled: dict[int, list[object]] = {i: [] for i in order}
    for i, sampler_index in zip(order, sampler_indices, strict=True):
        sampler.add(sampler_index, KINDS[i % len(KINDS)], key(i // 2), PROMPT, choice=i % 2)
    for step, logits in enumerate(STEPS):
        for start, stop in itertools.pairwise([0, *parts, len(order)]):
            some = order[start:stop]
            masked = [set(range(step, V, 3)) if i % 5 == 0 else None for i in some]
            mask = words(*masked, vocabulary=V) if any(masked) else None
            got = sampler.sample(logits[some], sampler_indices[start:stop], [step] * len(some), mask)
            rows = zip(some, got.tokens, got.valid, got.logprobs or [None] * len(some), strict=True)
            for i, token, valid, logprobs in rows:
                sampled[i].append((token, valid, logprobs))
    return sampled


@pytest.fixture(scope="module")
def together() -> dict[int, list[object]]:
    everyone = list(range(len(STEPS[0])))
    return texts(everyone, everyone, [])


@pytest.mark.parametrize("seed", range(4))
def test_a_row_samples_the_same_tokens_and_logprobs_in_any_order_and_batch(seed, together):
    shuffle = random.Random(seed)
    count = len(together)
    order = shuffle.sample(range(count), count)
    parts = sorted(shuffle.sample(range(1, count), seed + 1))
    assert texts(order, shuffle.sample(range(3 * count), count), parts) == together
