"""How far a run is, how fast, and what is left: from what a job tells."""

from collections.abc import Mapping
from typing import Any

import pytest

from batchgen.progress import Counts, Silent, Told


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def generating(clock: Clock, *, done: int = 0, kept: int = 0, total: int | None = 100) -> Counts:
    counts = Counts(clock)
    counts.phase("planning")
    counts.kept(kept)
    counts.rows(done, 0, total)
    counts.tokens(0, 0)
    counts.phase("generating")
    return counts


def tell(counts: Counts, done: int, completion: int, *, kept: int = 0, total: int | None = 100) -> None:
    counts.kept(kept)
    counts.rows(done, 0, total)
    counts.tokens(0, completion)


def test_what_is_left_comes_from_the_rows_that_this_run_has_generated(clock: Clock) -> None:
    counts = generating(clock)
    clock.now += 10
    tell(counts, 20, 1000)
    assert (counts.rows_per_second, counts.tokens_per_second, counts.seconds_left) == (2.0, 100.0, 40.0)


@pytest.mark.parametrize("told", [True, False])
def test_rows_kept_from_earlier_runs_do_not_make_it_look_fast(clock: Clock, told: bool) -> None:
    counts = generating(clock, done=60, kept=60 if told else 0)
    clock.now += 10
    tell(counts, 70, 500, kept=60 if told else 0)
    assert (counts.rows_per_second, counts.seconds_left) == (1.0, 30.0)


def test_rows_that_are_kept_while_others_are_generated_do_not_either(clock: Clock) -> None:
    counts = generating(clock)
    clock.now += 10
    tell(counts, 10, 500)
    tell(counts, 60, 500, kept=50)
    assert (counts.rows_generated, counts.seconds_left) == (10, 40.0)


def test_rows_that_fail_before_they_are_requests_do_not_either(clock: Clock) -> None:
    counts = generating(clock, done=50)
    clock.now += 10
    tell(counts, 60, 500)
    assert (counts.rows_generated, counts.seconds_left) == (10, 40.0)


def test_what_unfinished_rows_have_is_counted_in_rows_of_the_mean_length(clock: Clock) -> None:
    counts = generating(clock)
    clock.now += 10
    tell(counts, 20, 1000)
    clock.now += 10
    counts.running(500)
    assert (counts.tokens_per_second, counts.seconds_left) == (75.0, 70 * 20 / 30)


def test_a_first_short_row_does_not_promise_an_early_end(clock: Clock) -> None:
    counts = generating(clock)
    clock.now += 10
    tell(counts, 1, 2)
    counts.running(5000)
    assert counts.seconds_left == 98 * 10 / 2


def test_what_is_left_is_not_known_before_a_row_is_finished_nor_without_a_total_nor_after_the_last(
    clock: Clock,
) -> None:
    counts = generating(clock)
    clock.now += 10
    counts.running(100)
    assert counts.seconds_left is None
    tell(counts, 20, 1000, total=None)
    assert counts.seconds_left is None
    tell(counts, 100, 5000)
    assert counts.seconds_left == 0.0
    counts.phase("writing")
    assert counts.seconds_left is None


def test_time_after_the_last_step_does_not_slow_the_speed_and_time_between_steps_does(clock: Clock) -> None:
    counts = generating(clock)
    clock.now += 10
    tell(counts, 20, 1000)
    counts.phase("planning rows 21–40")
    clock.now += 10
    assert counts.tokens_per_second == 100.0
    counts.phase("generating")
    assert counts.tokens_per_second == 50.0


def test_rows_that_only_go_by_have_a_speed_of_their_own(clock: Clock) -> None:
    counts = Counts(clock)
    counts.phase("planning")
    clock.now += 4
    counts.passed(2000)
    assert (counts.rows_passed, counts.rows_per_second) == (2000, 500.0)
    counts.phase("generating")
    assert (counts.rows_passed, counts.rows_per_second) == (None, 0.0)


def test_the_figures_are_plain_values(clock: Clock) -> None:
    counts = generating(clock, done=10, kept=10)
    clock.now += 10
    counts.kept(10)
    counts.rows(30, 2, 100)
    counts.tokens(4000, 900)
    counts.running(100)
    assert counts.figures() == {
        "phase": "generating",
        "rows_total": 100,
        "rows_done": 30,
        "rows_failed": 2,
        "rows_kept": 10,
        "rows_passed": None,
        "prompt_tokens": 4000,
        "completion_tokens": 1000,
        "completion_tokens_per_s": 100.0,
        "rows_per_s": 2.0,
        "seconds": 10.0,
        "eta_seconds": 30.5,
    }


def test_all_that_is_told_is_passed_on_and_kept_every_second_and_at_new_phases(clock: Clock) -> None:
    heard: list[Any] = []

    class Heard(Silent):
        def __getattribute__(self, name: str) -> Any:
            return lambda *values: heard.append((name, *values))

    kept: list[Mapping[str, Any]] = []
    told = Told(Heard(), kept.append, clock)
    told.note("a note")
    told.phase("planning")
    told.passed(5)
    told.phase("generating")
    for done in range(1, 25):
        clock.now += 0.125
        told.kept(0)
        told.rows(done, 0, 100)
        told.tokens(0, done * 10)
        told.running(done)
    told.phase("generating")
    assert [(k["phase"], k["rows_done"]) for k in kept] == [
        ("planning", 0),
        ("generating", 0),
        ("generating", 8),
        ("generating", 16),
        ("generating", 24),
    ]
    assert heard[:4] == [("note", "a note"), ("phase", "planning"), ("passed", 5), ("phase", "generating")]
    assert heard[4:8] == [("kept", 0), ("rows", 1, 0, 100), ("tokens", 0, 10), ("running", 1)]
    assert len(heard) == 4 + 24 * 4 + 1
