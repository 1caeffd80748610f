"""Inputs and outputs without a job: small files in every format, their rows, and rows with results in a file."""

import hashlib
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.config import JobConfig
from batchgen.records import Input, Row, RowForm, open_input
from batchgen.records.writers import DEFAULT_LIMITS, DigestFile, GroupLimits, open_writer
from batchgen.result import Result

ROWS = [{"prompt": "one"}, {"prompt": "two"}]
JSONL = b'{"prompt": "one"}\n\n{"prompt": "two"}\n'
CSV = b"prompt\none\ntwo\n"


def parquet_bytes(rows: pa.Table | list[dict[str, Any]] = ROWS, **options: Any) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows) if isinstance(rows, list) else rows, stream, **options)
    return stream.getvalue()


def json_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of an output in JSON lines."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def opened(
    *names: str | Path, format: str | None = None, output: str | Path | None = None, encoding: str | None = None,
    config: str | None = None, split: str | None = None,
) -> Input:  # fmt: skip
    asked = JobConfig(
        inputs=tuple(map(str, names)), model="M", input_format=format, encoding=encoding, dataset_config=config, split=split
    )  # fmt: skip
    return open_input(asked, None if output is None else str(output))


def columns(*names: str | Path, **options: Any) -> list[dict[str, Any]]:
    return [row.columns for row in opened(*names, **options).rows()]


def with_results(source: Input) -> list[tuple[Row, Result]]:
    """The rows of an input, each with a result."""
    return [(row, Result(row=row.number, text="t", finish_reason="stop")) for row in source.rows()]


def write_output(
    path: Path, rows: Iterable[tuple[Row, Result]], *, schema: pa.Schema | None = None, in_order: bool = True,
    limits: GroupLimits = DEFAULT_LIMITS, at_once: int = 1000, notes: list[str] | None = None,
    headers: Sequence[tuple[str, ...]] = (), **form: Any,
) -> Path:  # fmt: skip
    """Writes rows with their results, `at_once` at a time, in the format of the path's suffix. Checks the notes of the writer, if any are expected."""
    file, spool, pairs = DigestFile(path), path.with_name("spool.jsonl"), list(rows)
    options = {"schema": schema, "in_order": in_order, "limits": limits, "headers": headers}
    writer = open_writer(file, path.name, spool=spool, form=RowForm(**form), **options)
    for start in range(0, len(pairs), at_once):
        writer.write(pairs[start : start + at_once])
    writer.close()
    assert file.hexdigest() == hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    assert not spool.exists()
    assert notes is None or list(writer.notes) == notes
    return path
