"""The rows of a job, a window at a time."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from batchgen.config import JobConfig, ModelConfig
from batchgen.errors import InputCorrupt
from batchgen.reading import read_windows, window_rows


class Source(SimpleNamespace):
    is_stdin = False

    def rows(self, limit: int | None) -> Iterator[int]:
        yield from range(5 if limit is None else limit)
        raise InputCorrupt("it breaks off")


def config_of(window: int | None) -> JobConfig:
    return JobConfig(inputs=("x.jsonl",), model=ModelConfig(model="m"), window=window)


def test_rows_before_a_break_come_first_and_then_the_break() -> None:
    windows = read_windows(Source(), config_of(2))  # type: ignore[arg-type]
    assert [next(windows), next(windows), next(windows)] == [[0, 1], [2, 3], [4]]
    with pytest.raises(InputCorrupt, match="it breaks off"):
        next(windows)


def test_standard_input_is_planned_in_smaller_windows() -> None:
    assert window_rows(config_of(None), SimpleNamespace(is_stdin=False)) == 50_000  # type: ignore[arg-type]
    assert window_rows(config_of(None), SimpleNamespace(is_stdin=True)) == 4_096  # type: ignore[arg-type]
    assert window_rows(config_of(7), SimpleNamespace(is_stdin=True)) == 7  # type: ignore[arg-type]
