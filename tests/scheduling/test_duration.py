"""How long a job takes, by its steps without a model, and how long the rest of a running one."""

import pytest

from batchgen.prefix import plan_requests
from batchgen.request import DECODE_COST
from batchgen.scheduling.batch import Limits
from batchgen.scheduling.duration import TimeLeft
from batchgen.scheduling.rehearsal import Rehearsal
from batchgen.scheduling.waiting import POLICIES
from support.models import make_requests


@pytest.mark.parametrize(
    ("ended", "tokens", "waiting", "left"),
    [
        ([], 0, 10, 100.0),
        ([], 16, 6, 4 * 6 + 6 * 10.0),
        ([6, 6], 20, 4, 4 * 4 + 4 * 6.0),
        ([2, 8], 22, 4, 4 * 5 + 4 * 7.0),
        ([2, 2], 16, 4, 4 * 7 + 4 * 44 / 6),
        ([1, 1], 6, 4, 4 * 3 + 4 * 18 / 6),
        ([6] * 10, 60, 0, 0.0),
    ],
    ids=[
        "nothing runs yet: each may have its 10 tokens",
        "none has ended: those that run may have 10",
        "as long as those that ended",
        "as long as those that are longer than what runs",
        "longer than all that ended: at most 10",
        "longer than all that ended: they end as rarely as before",
        "all have ended",
    ],
)
def test_the_tokens_to_expect_of_ten_completions(ended, tokens, waiting, left):
    time_left = TimeLeft()
    time_left.add(make_requests([[1]] * 4, [10] * 4), 0)
    time_left.add(make_requests([[1]] * 2, [10] * 2, n=3), 0)
    time_left.ended(ended)
    assert time_left.completions_left(tokens, waiting) == pytest.approx(left)


@pytest.mark.parametrize(("most", "steps"), [(0, 0), (3, 3), (9, 9), (100, 9)])
def test_a_rehearsal_runs_no_more_steps_than_it_may(most, steps):
    rehearsal = Rehearsal(Limits(4, 100, 100), 2, 100, 0, POLICIES["prefix"])
    planned = plan_requests(make_requests([[1], [2]], [9, 5]), 16)
    for _ in range(2):
        assert len(list(rehearsal.run(*planned, most))) == steps
        assert (rehearsal.scheduler.unfinished, len(rehearsal.scheduler.running)) == (0, 0)


def test_texts_to_score_are_no_completions():
    time_left = TimeLeft()
    (request,) = make_requests([[1]], [10], choices=("yes", "no"))
    object.__setattr__(request, "texts", (request.tokens, request.tokens))
    time_left.add([request], 30)
    assert time_left.completions_left(0, 2) == 0.0
    assert time_left.expect((0.5, 2.0), 0, 0, 0.0, 0.0)[1] == 15.0


@pytest.mark.parametrize(
    ("prices", "ran", "elapsed", "seconds"),
    [
        ((0.5, 2.0), (0, 0), 0.0, 70.0),
        ((0.5, 2.0), (20, 5), 20.0, 60.0),
        ((0.5, 2.0), (20, 5), 41.0, 120.0),
        (None, (20, 5), 10.0, 30.0),
        (None, (0, 0), 10.0, None),
    ],
    ids=["by earlier runs", "as they foretold", "this run is slower", "by this run alone", "nothing is known"],
)
def test_the_seconds_of_the_work_that_is_left(prices, ran, elapsed, seconds):
    time_left = TimeLeft()
    time_left.add(make_requests([[1]], [10]), 100)
    assert time_left.expect(prices, *ran, 10.0, elapsed)[1] == seconds


@pytest.mark.parametrize(
    ("prices", "ran", "share"),
    [
        ((0.5, 2.0), (0, 0), 0.0),
        ((0.5, 2.0), (100, 0), 50 / 70),
        ((0.5, 2.0), (100, 5), 60 / 70),
        ((0.5, 2.0), (120, 10), 1.0),
        (None, (100, 0), 100 / (100 + 10 * DECODE_COST)),
    ],
    ids=["nothing ran", "the prompt ran", "half of the completion", "a prompt ran again", "prices are not known"],
)
def test_the_part_of_the_work_that_has_run(prices, ran, share):
    time_left = TimeLeft()
    time_left.add(make_requests([[1]], [10]), 100)
    assert time_left.expect(prices, *ran, 10.0 - ran[1], 1.0)[0] == pytest.approx(share)


def test_the_pace_of_late_counts_more_than_that_of_the_start():
    time_left = TimeLeft()
    time_left.add(make_requests([[1]] * 10, [100] * 10), 100)
    assert time_left.expect(None, 100, 0, 1000.0, 100.0)[1] == 4000.0
    foretold = [
        time_left.expect(None, 100, tokens, 1000.0 - tokens, 100.0 + tokens / 10)[1] for tokens in (100, 300, 500)
    ]
    assert foretold[0] > foretold[1] > foretold[2]
    assert 50.0 < foretold[2] < 100.0
