"""What is seen while a job runs."""

import io

import pytest

from batchgen_cli import progress
from batchgen_cli.progress import Bar, Lines, Notes, Nothing, calm_libraries, progress_for


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_a_log_gets_a_line_now_and_then(clock: Clock) -> None:
    stream = io.StringIO()
    lines = Lines(stream, every=10)
    lines.phase("loading model")
    lines.phase("generating")
    for second in range(1, 26):
        clock.now = 100.0 + second
        lines.tokens(0, second * 50)
        lines.rows(second, 0 if second < 20 else 2, 100)
    lines.note("a note\nwith a second line")
    assert stream.getvalue().splitlines() == [
        "batchgen: loading model",
        "batchgen: 10 rows of 100 (10%), 50 tokens/s, 90 s left",
        "batchgen: 20 rows of 100 (20%), 2 failed, 50 tokens/s, 80 s left",
        "batchgen: a note\\nwith a second line",
    ]


def test_an_unknown_total_has_no_end(clock: Clock) -> None:
    stream = io.StringIO()
    lines = Lines(stream, every=10)
    lines.phase("generating")
    clock.now = 110.0
    lines.tokens(0, 1000)
    lines.rows(12_345, 0, None)
    assert stream.getvalue() == "batchgen: 12,345 rows, 100 tokens/s\n"


def test_a_long_rest_is_told_in_minutes(clock: Clock) -> None:
    stream = io.StringIO()
    lines = Lines(stream, every=10)
    lines.phase("generating")
    clock.now = 110.0
    lines.rows(10, 0, 610)
    assert stream.getvalue() == "batchgen: 10 rows of 610 (2%), 0 tokens/s, 10 min left\n"


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end(clock: Clock) -> None:
    stream = io.StringIO()
    bar = Bar(stream)
    bar.phase("generating")
    clock.now = 101.0
    bar.tokens(10, 500)
    bar.rows(30, 1, 60)
    bar.note("a note")
    bar.close()
    shown = stream.getvalue()
    assert "generating:  50%" in shown
    assert "30/60" in shown
    assert "500 tokens/s, 1 failed" in shown
    assert "batchgen: a note\n" in shown
    assert shown.rsplit("\r", 1)[1].strip() == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("wanted", "quiet", "terminal", "kind"),
    [
        (None, False, True, Bar),
        (True, False, True, Bar),
        (None, False, False, Lines),
        (True, False, False, Lines),
        (False, False, True, Notes),
        (None, True, True, Nothing),
    ],
)
def test_what_is_shown_depends_on_where(
    wanted: bool | None, quiet: bool, terminal: bool, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", Terminal() if terminal else io.StringIO())
    with progress_for(wanted, quiet=quiet) as shown:
        assert type(shown) is kind


def test_quiet_shows_no_notes() -> None:
    stream = io.StringIO()
    Nothing(stream).note("x")
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("verbose", "seen"), [(True, 1), (False, 0)])
def test_warnings_of_libraries_are_shown_only_with_verbose(verbose: bool, seen: int) -> None:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with calm_libraries(verbose=verbose):
            warnings.warn("x", UserWarning, stacklevel=1)
    assert len(caught) == seen
