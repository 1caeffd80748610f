"""How far a run is, how fast, and how much time is left."""

import pytest

from batchgen.progress import Snapshot, Tracker
from support.progress import Clock, Recorder


class Job:
    """A tracker with a fake clock, whose figures a test sets."""

    def __init__(self, *, done: int = 0, kept: int = 0, total: int | None = 100) -> None:
        self.clock, self.shown = Clock(), Recorder()
        self.tracker = Tracker(self.shown, self.clock)
        self.run = self.tracker.run
        self.tracker.phase("planning")
        self.run.resumed.ok, self.run.new.ok = kept, done - kept
        self.tracker.total = total
        self.tracker.phase("generating")

    def after(
        self, seconds: float, *, done: int, completion: int, kept: int = 0, tokens: int | None = None
    ) -> Snapshot:
        """Lets time pass. `completion` counts the tokens of finished rows, `tokens` those of all rows of this run."""
        self.clock.now += seconds
        self.run.resumed.ok, self.run.new.ok, self.run.new.completion_tokens = kept, done - kept, completion
        self.tracker.generated(completion if tokens is None else tokens)
        return self.tracker.snapshot()


def test_rows_kept_from_earlier_runs_and_rows_that_failed_during_planning_do_not_count_as_speed():
    assert Job(done=60, kept=60).after(10, done=70, kept=60, completion=500).rows_per_s == 1.0
    assert Job(done=50).after(10, done=60, completion=500).rows_per_s == 1.0


def test_parts_of_unfinished_rows_move_the_bar():
    job = Job()
    job.tracker.expect(10.0, None)
    now = job.after(20, done=20, completion=1000, tokens=1500)
    assert (now.completion_tokens, now.completion_tokens_per_s, now.share, now.percent) == (1500, 75.0, 0.3, 30)


def test_tokens_of_earlier_runs_and_of_equal_rows_count_as_done_but_not_as_speed():
    job = Job()
    job.run.begun_tokens, job.run.new.equal_tokens = 3000, 900
    now = job.after(10, done=20, completion=1000, tokens=150)
    assert (now.completion_tokens, now.completion_tokens_per_s) == (4050, 15.0)


def test_time_left_goes_down_by_the_clock_and_is_unknown_after_generating():
    job = Job()
    assert job.after(1, done=1, completion=50).seconds_left is None
    job.tracker.expect(0.0, 8.0)
    assert [job.after(5, done=1, completion=50).seconds_left for _ in range(2)] == [3.0, 0.0]
    job.tracker.expect(0.0, 8.0)
    job.tracker.phase("writing")
    assert job.tracker.snapshot().seconds_left is None


def test_time_between_steps_counts_for_the_speed_and_time_after_the_last_step_does_not():
    job = Job()
    job.after(10, done=20, completion=1000)
    job.tracker.phase("planning rows 21–40")
    job.clock.now += 10
    assert job.tracker.snapshot().completion_tokens_per_s == 100.0
    job.tracker.phase("generating")
    job.clock.now += 10
    assert job.tracker.snapshot().completion_tokens_per_s == 1000 / 30


def test_rows_that_are_only_read_or_written_have_their_own_speed():
    job = Job()
    job.tracker.phase("writing")
    job.clock.now += 4
    job.tracker.passed(50)
    now = job.tracker.snapshot()
    assert (now.rows_passed, now.rows_per_s, now.share) == (50, 12.5, 0.5)
    job.tracker.phase("generating")
    assert (job.tracker.snapshot().rows_passed, job.tracker.snapshot().rows_per_s) == (None, 0.0)


def test_the_figures_of_a_snapshot_are_plain_values():
    job = Job(done=10, kept=10)
    job.run.new.prompt_tokens, job.run.new.failed = 4000, 2
    job.run.new.reasons.update({"stop": 17, "length": 1, "error": 2})
    job.run.resumed.reasons.update({"stop": 10})
    job.tracker.expect(1.0, 40.94)
    now = job.after(10, done=28, kept=10, completion=900, tokens=1000)
    assert now.figures() == {
        "phase": "generating", "rows_total": 100, "rows_done": 30, "rows_failed": 2, "rows_kept": 10,
        "rows_passed": None, "prompt_tokens": 4000, "completion_tokens": 1000, "completion_tokens_per_s": 100.0,
        "rows_per_s": 2.0, "seconds": 10.0, "eta_seconds": 30.9,
        "finish_reasons": {"stop": 27, "length": 1, "error": 2},
    }  # fmt: skip
    assert list(now.figures()["finish_reasons"]) == ["stop", "length", "error"], (
        "the order of the summary and the statistics"
    )


def test_every_change_is_shown_and_one_per_second_and_phase_is_recorded():
    clock, shown, kept = Clock(), Recorder(), list[Snapshot]()
    tracker = Tracker(shown, clock)
    tracker.tell = kept.append
    tracker.note("a note")
    tracker.phase("planning")
    tracker.passed(5)
    tracker.phase("generating")
    for done in range(1, 25):
        clock.now += 0.125
        tracker.run.new.ok = done
        tracker.changed()
    tracker.phase("generating")
    assert [(k.phase, k.rows_done) for k in kept] == [
        ("planning", 0), ("generating", 0), ("generating", 8), ("generating", 16), ("generating", 24),
    ]  # fmt: skip
    assert shown.notes == ["a note"]
    assert [s.rows_done for s in shown.seen] == [0, 0, 0, *range(1, 25)]


@pytest.mark.parametrize(("total", "share"), [(None, None), (0, 1.0)])
def test_the_share_is_none_without_a_total_and_one_without_rows(total, share):
    assert Snapshot(rows_total=total).share == share
