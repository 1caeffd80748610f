"""Images and prompts whose tokens see one another are never cut by a step, and each of their tokens sees the whole."""

from dataclasses import replace

import pytest

from batchgen.scheduling.batch import Budget, Limits, ScheduledSpan, pack
from batchgen.scheduling.sequence import last_seen, uncut
from support.whole_images import sequence


def test_a_token_of_a_whole_image_sees_its_image_to_the_end():
    assert last_seen(sequence(), 0, 11).tolist() == [0, 1, 4, 4, 4, 6, 6, 7, 10, 10, 10]
    assert last_seen(sequence(), 2, 8).tolist() == [4, 4, 4, 6, 6, 7]
    assert last_seen(sequence(whole=False), 0, 11).tolist() == list(range(11))
    assert last_seen(sequence(prompt=7), 0, 11).tolist() == [10] * 11


@pytest.mark.parametrize(
    ("start", "stop", "end"),
    [(0, 1, 1), (0, 2, 2), (0, 3, 2), (0, 4, 2), (0, 5, 5), (0, 6, 5), (0, 7, 7), (2, 4, 2), (5, 6, 5), (0, 9, 8), (8, 11, 11)],
)  # fmt: skip
def test_a_step_ends_before_or_after_an_image(start, stop, end):
    assert uncut(sequence(), start, stop) == end
    assert uncut(sequence(whole=False), start, stop) == stop
    assert uncut(sequence(prompt=7), start, stop) == (11 if stop == 11 else start)


@pytest.mark.parametrize(("prompt", "expected"), [(0, [2, 5, 7, 8, 11]), (7, [11, 13])])
def test_what_is_too_large_for_a_step_has_a_step_of_its_own(prompt, expected):
    """After a preemption, the tokens that were generated follow the prompt, as any others."""
    limits = Limits(batch_size=4, max_batch_tokens=2, max_prefill_tokens=2)
    ends = []
    seq = sequence(prompt=prompt)
    if prompt:
        seq.generated = [5, 6]
    while seq.computed < seq.end:
        budget = Budget(limits)
        budget.slice(seq)
        (scheduled,) = budget.spans
        ends.append(scheduled.stop)
        seq.computed = scheduled.stop
    assert ends == expected


def test_an_image_waits_for_the_next_step_if_this_one_has_no_room_for_it():
    budget = Budget(Limits(batch_size=4, max_batch_tokens=5, max_prefill_tokens=5))
    first, second = sequence(), sequence()
    first.computed, second.computed = 5, 2
    budget.slice(first)
    budget.slice(second)
    assert [(s.start, s.stop) for s in budget.spans] == [(5, 8)]


def test_halves_of_a_batch_keep_images_whole():
    packed = pack([ScheduledSpan(sequence(), 0, 8, 8)])
    first, second = packed.halves()
    assert [len(half.tokens) for half in (first, second)] == [2, 6]
    alone = pack([ScheduledSpan(replace(sequence()), 2, 5, 5)])
    assert [len(half.tokens) for half in alone.halves()] == [0, 3]
