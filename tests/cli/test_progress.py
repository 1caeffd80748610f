"""What a user sees while a job runs."""

import io
import json
import logging
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from batchgen.progress import Tracker, rounded_duration
from batchgen_cli import stderr
from batchgen_cli.options import Display
from batchgen_cli.progress import Bar, Events, Lines, Notes, progress_for
from support.progress import Clock
from support.python_process import environment


class Told:
    """A progress display that is told about a run in calls of one line. A `Tracker` makes the snapshots."""

    def __init__(self, shown: Notes) -> None:
        self.shown = shown
        self.tracker = Tracker(shown, shown.clock)
        self.run = self.tracker.run

    def __getattr__(self, name: str) -> Any:
        return getattr(self.shown, name)

    def rows(self, done: int, failed: int, total: int | None) -> None:
        self.run.new.ok, self.run.new.failed = done - failed - self.run.resumed.ok, failed
        self.tracker.total = total

    def tokens(self, completion: int) -> None:
        self.run.new.completion_tokens = completion
        if self.tracker.total is not None:  # a row a second
            self.tracker.expect(0.0, float(self.tracker.total - self.run.done))
        self.tracker.generated(completion)

    def phase(self, name: str) -> None:
        self.tracker.phase(name)

    def figures(self) -> dict[str, Any]:
        return self.tracker.snapshot().figures()


class Terminal(io.StringIO):
    """A terminal of so many columns."""

    columns = 80
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True

    def width(self) -> int:
        return self.columns

    @property
    def shown(self) -> list[str]:
        """The lines that the terminal has shown, one after the other."""
        return [line.rstrip() for line in re.split(r"[\r\n]", self.getvalue()) if line.strip()]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def generate(shown: Told, clock: Clock, *, seconds: int, total: int | None = 100, failed_from: int = 10_000) -> None:
    """A row and 50 tokens a second."""
    shown.phase("generating")
    for second in range(1, seconds + 1):
        clock.now += 1
        shown.rows(second, 0 if second < failed_from else 2, total)
        shown.tokens(second * 50)


@pytest.fixture
def log(clock: Clock) -> Callable[..., list[str]]:
    """Runs a function with a display in lines of every ten seconds. Returns the lines, without `batchgen: `."""

    def shown(act: Callable[[Told], None]) -> list[str]:
        stream = io.StringIO()
        act(Told(Lines(stream, every=10, clock=clock)))
        return [line.removeprefix("batchgen: ") for line in stream.getvalue().splitlines()]

    return shown


def wait(shown: Told, seconds: int) -> None:
    for _ in range(seconds):
        shown.clock.now += 1
        shown.tick()


def test_a_log_gets_a_line_now_and_then(clock, log):
    def act(lines: Told) -> None:
        generate(lines, clock, seconds=25, failed_from=20)
        lines.note("a note\nwith a second line")

    assert log(act) == [
        "10 rows of 100 (10%), 90 s left, 50 tokens/s",
        "20 rows of 100 (20%), 80 s left, 2 failed, 50 tokens/s",
        "a note\\nwith a second line",
    ]
    assert log(lambda lines: generate(lines, clock, seconds=10, total=None)) == ["10 rows, 50 tokens/s"]


def test_a_log_hears_of_every_wait_over_two_seconds_and_that_it_goes_on(log):
    def act(lines: Told) -> None:
        lines.tick()
        for phase, seconds in (("loading tokenizer", 1), ("loading model", 25), ("planning", 1), ("writing", 3)):
            lines.phase(phase)
            wait(lines, seconds)

    assert log(act) == ["loading model", "loading model, 12 s so far", "loading model, 22 s so far", "writing"]


def test_events_go_on_while_nothing_changes(clock):
    stream = io.StringIO()
    events = Told(Events(stream, 10, clock=clock))
    events.phase("loading model")
    wait(events, 25)
    told = [(e["event"], e.get("phase")) for e in map(json.loads, stream.getvalue().splitlines())]
    assert told == [("phase", "loading model"), ("progress", "loading model"), ("progress", "loading model")]


def test_a_log_has_no_control_characters_but_the_ends_of_its_lines(clock):
    stream = io.StringIO()
    lines = Told(Lines(stream, every=0, clock=clock))
    lines.phase("loading \x1b[2J model")
    lines.note("row \x07\r\x9b\u2028")
    generate(lines, clock, seconds=3)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028]", stream.getvalue())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (119.4, "119 s"),
        (120, "2 min"),
        (7_100, "118 min"),
        (7_200, "2 h 0 min"),
        (12_000, "3 h 20 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_times_are_as_people_read_them(seconds, text):
    assert rounded_duration(seconds) == text


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end(clock):
    terminal = Terminal()
    bar = Told(Bar(terminal, clock))  # type: ignore[arg-type]
    bar.phase("loading model")
    wait(bar, 3)
    generate(bar, clock, seconds=30, total=60, failed_from=30)
    bar.note("a note \x1b[2J")
    bar.close()
    assert terminal.shown[:4] == ["loading model…", "loading model…", "loading model… 2 s", "loading model… 3 s"]
    assert "generating:  50%|████████▌        | 30/60, 30 s left, 2 failed, 50 tokens/s" in terminal.shown
    assert f"\r{' ' * 79}\rbatchgen: a note \\x1b[2J\n" in terminal.getvalue()  # no ^C is left beside it
    assert set(terminal.getvalue().rsplit("\r", 2)[1]) == {" "}
    assert terminal.getvalue().endswith("\r")
    assert "\x1b" not in terminal.getvalue()


def test_the_bar_is_full_when_all_rows_are_done_and_some_still_count_as_under_way(clock):
    terminal = Terminal()
    bar = Told(Bar(terminal, clock))  # type: ignore[arg-type]
    bar.phase("generating")
    clock.now += 4
    bar.rows(4, 0, 4)
    bar.tracker.expect(0.75, 0.0)
    bar.tracker.generated(8)
    bar.close()
    assert terminal.shown[-1] == f"generating: 100%|{'█' * 31}| 4/4, 0 s left, 2 tokens/s"


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (60, "generating:  50%|█████     | 30/60, 30 s left, 2 failed"),
        (40, "generating:  50% 30/60, 30 s left"),
        (35, "generating:  50%|███   | 30/60"),
        (30, "generating:  50% 30/60"),
        (20, "generating:  50%"),
        (10, "generating"),
    ],
)
def test_what_does_not_fit_a_narrow_terminal_is_left_out_whole(columns, line, clock):
    terminal = Terminal()
    terminal.columns = columns
    bar = Told(Bar(terminal, clock))  # type: ignore[arg-type]
    generate(bar, clock, seconds=30, total=60, failed_from=30)
    assert terminal.shown[-1] == line
    assert max(map(len, terminal.shown)) < columns + (columns == 10)
    bar.close()


@pytest.mark.parametrize(
    ("variables", "removed"), [({"TERM": "xterm-256color"}, "\x1b[2A\r\x1b[J"), ({"TERM": "dumb"}, ""), ({"TERM": "xterm", "XTERM_VERSION": "XTerm(379)"}, "")]
)  # fmt: skip
def test_no_part_of_the_bar_is_left_where_a_narrower_terminal_has_wrapped_it(variables, removed, clock, monkeypatch):
    monkeypatch.delenv("XTERM_VERSION", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    bar = Told(Bar(terminal, clock))  # type: ignore[arg-type]
    generate(bar, clock, seconds=30, total=60, failed_from=30)
    wide = len(terminal.getvalue())
    terminal.columns = 30  # the 75 columns take three lines
    generate(bar, clock, seconds=1, total=60, failed_from=30)
    narrow = terminal.getvalue()[wide:]
    assert narrow.startswith(f"{removed}\r{' ' * 29}\r\rgenerating:   1% 1/60")
    bar.close()


def test_the_bar_is_that_of_the_rows_that_go_by_where_they_only_do(clock):
    terminal = Terminal()
    bar = Told(Bar(terminal, clock))  # type: ignore[arg-type]
    bar.phase("planning")
    clock.now += 2
    bar.tracker.passed(1_000)
    bar.rows(1_000, 0, 1_000)
    bar.phase("writing")
    clock.now += 1
    bar.tracker.passed(250)
    bar.close()
    assert terminal.shown[:3] == ["planning…", "planning: 1,000 rows, 500 rows/s", "writing…"]
    assert "writing:  25%|█████████▌                            | 250/1,000, 250 rows/s" in terminal.shown


def test_events_are_one_json_object_a_line(clock):
    stream = io.StringIO()
    events = Told(Events(stream, every=10, clock=clock))
    events.note("a note\x7f\n\x1b")
    events.phase("planning")
    events.phase("planning")
    generate(events, clock, seconds=10)
    events.write("a library's line")
    assert stream.getvalue().isascii()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", stream.getvalue())
    told = [json.loads(line) for line in stream.getvalue().splitlines()]
    for one in told:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", one.pop("time"))
    assert told == [
        {"event": "note", "text": "a note\x7f\n\x1b"},
        {"event": "phase", "phase": "planning"},
        {"event": "phase", "phase": "generating"},
        {"event": "progress", **events.figures()},
        {"event": "log", "text": "a library's line"},
    ]
    assert told[3]["eta_seconds"] == 90.0


@pytest.mark.parametrize(
    ("wanted", "quiet", "terminal", "kind"),
    [
        (None, False, True, Bar),
        (True, False, True, Bar),
        (None, False, False, Lines),
        (True, False, False, Lines),
        (False, False, True, Notes),
        (None, True, True, Notes),
    ],
)
def test_what_is_shown_depends_on_where(wanted, quiet, terminal, kind, monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal() if terminal else io.StringIO())
    with progress_for(Display(progress=wanted, quiet=quiet)) as shown:
        assert (type(shown), shown.notes) == (kind, not quiet)


@pytest.mark.parametrize(
    ("wanted", "quiet", "seen"),
    [(None, False, ["note", "phase", "log"]), (False, False, ["note", "log"]), (None, True, ["log"])],
)
def test_json_shows_no_bar_and_of_the_rest_what_is_asked_for(wanted, quiet, seen, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with progress_for(Display(progress=wanted, quiet=quiet, log_format="json")) as shown:
        shown.note("a note")
        Told(shown).phase("generating")
        print("a library's line", file=sys.stderr)
    assert [json.loads(line)["event"] for line in terminal.getvalue().splitlines()] == seen


def test_what_libraries_write_comes_out_in_whole_escaped_lines(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with progress_for(Display(progress=False)):
        kept = sys.stderr
        sys.stderr.write("half a ")
        assert stream.getvalue() == ""
        sys.stderr.write("line \x1b[31m\n\n")
        sys.stderr.write("\r 50%\r100%\r\n")
        sys.stderr.write("x.py:1: UserWarning: a\x07warning\n")
        thread = threading.Thread(target=lambda: print("of a thread", file=sys.stderr))
        thread.start()
        thread.join()
        sys.stderr.write("cut off")
    assert sys.stderr is stream
    print("later, by one who kept it", file=kept)
    assert stream.getvalue().splitlines() == [
        "half a line \\x1b[31m", "100%", "x.py:1: UserWarning: a\\x07warning", "of a thread", "cut off",
        "later, by one who kept it",
    ]  # fmt: skip


def full(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_no_file_takes_the_number_of_a_standard_stream_that_is_closed(tmp_path):
    code = (
        "import atexit, os, sys; from pathlib import Path; from batchgen_cli.__main__ import main; name = sys.argv.pop()\n"
        "atexit.register(lambda: Path(name).write_text(str(os.open(name, os.O_CREAT | os.O_WRONLY)))); main()"
    )
    command = [sys.executable, "-c", code, "--version", str(tmp_path / "number")]
    subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], env=environment(), check=False)
    assert int((tmp_path / "number").read_text()) > 2


@pytest.mark.parametrize("broken", [None, full])
def test_a_standard_error_that_is_closed_or_full_ends_nothing(broken, monkeypatch):
    terminal = Terminal()
    if broken is not None:
        monkeypatch.setattr(terminal, "write", broken)
        monkeypatch.setattr(terminal, "flush", broken)
    monkeypatch.setattr("sys.stderr", None if broken is None else terminal)
    for wanted in (None, False):
        with progress_for(Display(progress=wanted)) as shown:
            shown.note("x")
            Told(shown).phase("generating")
            if sys.stderr is not None:
                print("x", file=sys.stderr)
    stderr.write_line("x")
    stderr.drop_unwritten()


@pytest.mark.parametrize(("verbose", "seen"), [(True, 1), (False, 0)])
def test_warnings_of_libraries_are_shown_only_with_verbose(verbose, seen):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with progress_for(Display(progress=False, verbose=verbose)):
            warnings.warn("x", UserWarning, stacklevel=1)
    assert len(caught) == seen


def test_what_the_package_logs_is_a_note_and_quiet_with_q(capsys):
    for quiet in (False, True):
        with progress_for(Display(progress=False, quiet=quiet)):
            logging.getLogger("batchgen").info("compiling kernels")
    logging.getLogger("batchgen").info("not shown")
    assert capsys.readouterr().err == "batchgen: compiling kernels\n"
