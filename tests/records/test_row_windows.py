"""Which inputs run in windows, where a window ends, and overlong lines, which are never read into memory."""

import csv
import gzip
import io
import tracemalloc
from functools import partial
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from batchgen.config import JobConfig
from batchgen.records import window_rows
from batchgen.records.files import InputFile
from batchgen.records.jsonl import read_jsonl
from batchgen.records.rows import Row, RowStream
from batchgen.records.tables import PARQUET_BATCH, read_csv, read_parquet
from support.params import FULL
from support.records import opened, parquet_bytes


def rows(*sizes: int) -> list[Row]:
    return [Row(i, {}, None, "", size) for i, size in enumerate(sizes)]


def sizes_of(*sizes: int, most: int) -> list[list[int]]:
    stream = RowStream(iter(rows(*sizes)), most)
    return [[row.size for row in window] for window in iter(lambda: stream.take(100), [])]


def test_a_window_ends_with_the_row_that_exceeds_its_bytes():
    assert sizes_of(4, 4, 4, 4, most=8) == [[4, 4], [4, 4]]
    assert sizes_of(1, 99, 1, 1, most=8) == [[1, 99], [1, 1]]
    assert sizes_of(99, 99, most=8) == [[99], [99]]


def test_rows_that_end_and_rows_that_are_too_large_for_a_window_are_told_apart():
    stream = RowStream(iter(rows(4, 4, 4)), 8)
    assert [(len(stream.take(100)), stream.ended) for _ in range(2)] == [(2, False), (1, True)]
    limited = RowStream(iter(rows(4, 4, 4)))
    assert (len(limited.take(100, 2)), limited.ended) == (2, True)


def test_rows_have_their_size_in_the_file(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "abc"}\nbroken\n')
    (tmp_path / "b.csv").write_bytes(b"prompt,x\nabc,de\n")
    pq.write_table(pa.table({"prompt": ["x" * 1000] * 50}), tmp_path / "c.parquet")
    source = opened(*(tmp_path / name for name in ("a.jsonl", "b.csv", "c.parquet")))
    first, broken, csv, *parquet = [row.size for row in source.rows()]
    assert (first, broken, csv) == (18, 7, 5)
    assert {1000 <= size < 1010 for size in parquet} == {True}


def test_a_line_longer_than_the_limit_is_skipped():
    fits, long = b'{"a": "' + b"x" * 11 + b'"}', b'{"a": "' + b"x" * 12 + b'"}'
    stream = io.BytesIO(fits + b"\n" + long + b'\n{"b": 1}\n' + long)
    read = [columns for _, columns, _ in read_jsonl(stream, max_line=20, skip_bytes=4)]
    assert read == [{"a": "x" * 11}, "longer than 20 bytes", {"b": 1}, "longer than 20 bytes"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("piece", [1, 2, 3, 4, 5, 100])
def test_a_csv_line_longer_than_the_limit_is_skipped(end, piece, request):
    request.addfinalizer(partial(csv.field_size_limit, csv.field_size_limit()))  # the limit is the whole process's
    lines = [b"a,b", b"1,2", b"x" * 30 + b",1", b"3,4", b'"' + b"x" * 12, b"y" * 12 + b'",1', b"5,6", b"x" * 30]
    read = [
        (place, columns) for place, columns, _ in read_csv(io.BytesIO(end.join(lines)), max_line=20, skip_chars=piece)
    ]
    assert read == [
        (":2", {"a": "1", "b": "2"}),
        (":3", "not CSV: longer than 20 bytes"),
        (":4", {"a": "3", "b": "4"}),
        (":5", "not CSV: field larger than field limit (20)"),
        (":7", {"a": "5", "b": "6"}),
        (":8", "not CSV: longer than 20 bytes"),
    ]


BOMBS = [("a.jsonl.gz", b""), ("a.csv.gz", b"prompt\n"), ("a.jsonl.zst", b"")]


@pytest.mark.parametrize(
    ("name", "first"), [BOMBS[0], *(pytest.param(*bomb, marks=pytest.mark.slow) for bomb in BOMBS[1:])]
)
def test_a_decompression_bomb_takes_little_memory(tmp_path, name, first):
    """A line of 200 MB (50 MB in `make test`) in a file of 200 KB or less; the limit of a line is 1 MB."""
    reader = read_csv if ".csv" in name else read_jsonl
    with (zstandard if name.endswith("zst") else gzip).open(tmp_path / name, "wb") as f:
        f.write(first)
        for _ in range(200 if FULL else 50):
            f.write(b"x" * 1_000_000)
        f.write(b'\n{"prompt":"b"}\n')
    assert (tmp_path / name).stat().st_size < 300_000
    tracemalloc.start()
    with InputFile(str(tmp_path / name), "jsonl", "gzip" if name.endswith("gz") else "zstd").open() as stream:
        (_, bomb, _), (_, after, _) = reader(stream, max_line=1_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(bomb, str)
    assert bomb.endswith("longer than 1,000,000 bytes")
    assert isinstance(after, dict)
    assert peak < (12_000_000 if name.endswith("gz") else 80_000_000)  # zstandard decompresses a whole block at once


def test_a_parquet_file_of_long_rows_is_read_a_few_at_a_time(monkeypatch):
    texts = [f"{i}" + "x" * 20_000 for i in range(40)]
    stream = io.BytesIO(parquet_bytes(pa.table({"prompt": texts}), use_dictionary=False))
    batches: list[int] = []
    whole = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile, "iter_batches", lambda self, size, **how: batches.append(size) or whole(self, size, **how)
    )
    assert [columns["prompt"] for _, columns, _ in read_parquet(stream, batch_bytes=100_000)] == texts  # type: ignore[index]
    assert batches == [4]
    stream = io.BytesIO(parquet_bytes([{"prompt": "a"}] * 3000))
    assert len(list(read_parquet(stream))) == 3000
    assert batches == [4, PARQUET_BATCH]


def rows_of(window, output="o.jsonl", *, once=False, order="input") -> int | None:
    source = SimpleNamespace(is_read_once=lambda: once, files=[SimpleNamespace(shown="<stdin>")])
    return window_rows(JobConfig(inputs="x.jsonl", model="m", output=output, window=window, order=order), source)


def test_files_are_sorted_as_a_whole_and_streams_run_in_windows():
    assert rows_of(None) is None
    assert rows_of("all") is None
    assert rows_of(7) == rows_of(7, once=True) == rows_of(7, "-") == 7
    assert rows_of(None, once=True) == rows_of(None, "-") == 4_096
    assert rows_of(None, order="done") == 50_000
