"""The rows of a job are read window by window."""

from types import SimpleNamespace
from typing import Literal

import pytest

from batchgen.config import JobConfig, ModelConfig
from batchgen.errors import UsageError
from batchgen.records import window_rows


def config_of(window: int | Literal["all"] | None, order: str = "input") -> JobConfig:
    return JobConfig(inputs=("x.jsonl",), model=ModelConfig(model="m"), window=window, order=order)


def rows_of(
    window: int | Literal["all"] | None, output: str = "o.jsonl", *, once: bool = False, order: str = "input"
) -> int | None:
    source = SimpleNamespace(fingerprint=lambda: [] if once else [{}], files=[SimpleNamespace(shown="<stdin>")])
    return window_rows(config_of(window, order), source, output)  # type: ignore[arg-type]


def test_files_are_sorted_as_a_whole_and_streams_run_in_windows():
    assert rows_of(None) is None
    assert rows_of("all") is None
    assert rows_of(7) == rows_of(7, once=True) == rows_of(7, "-") == 7
    assert rows_of(None, once=True) == rows_of(None, "-") == 4_096
    assert rows_of(None, order="done") == 50_000


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"once": True},
            "--window all reads the input twice, which <stdin> does not allow; use --window ROWS, or a file",
        ),
        ({"output": "-"}, "--window all writes no row before all rows are done; name an output with -o"),
        ({"order": "done"}, "--window all cannot be combined with --order done; use --window ROWS"),
    ],
)
def test_window_all_is_refused_if_the_input_cannot_be_read_twice_or_must_be_streamed(given, message):
    with pytest.raises(UsageError) as error:
        rows_of("all", **given)
    assert str(error.value) == message
