"""Jobs on strange inputs: each has the documented result (docs/safety.md), none ends in a traceback, and no row is lost."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen import JobConfig, SamplingParams, run_job
from batchgen.prompts import encoding
from batchgen.records.jsonl import MAX_DEPTH

pytestmark = pytest.mark.usefixtures("loaded_once")

Row = dict[str, Any]
Run = Callable[..., list[Row]]


@pytest.fixture
def run(tiny_model_dir: Path, tmp_path: Path) -> Run:
    """Runs a job over a file of these bytes with one token for each row. Returns the output rows."""

    def job(name: str, data: bytes, *, output: str = "out.jsonl", code: int | None = None, **options: Any) -> list[Row]:
        (tmp_path / name).write_bytes(data)
        config = JobConfig(
            inputs=tmp_path / name,
            output=str(tmp_path / output),
            model=tiny_model_dir,
            sampling=SamplingParams(max_tokens=1, ignore_eos=True),
            **options,
        )
        report = run_job(config)
        if output.endswith(".parquet"):
            rows = pq.read_table(report.output).to_pylist()
        else:
            rows = [json.loads(line) for line in Path(report.output).read_text("utf-8").split("\n")[:-1]]
        assert (
            report.exit_code
            == (3 if any(row["error"] for row in rows) else 0)
            == (report.exit_code if code is None else code)
        )
        assert report.stats["rows"] == len(rows)
        return rows

    return job


def errors(rows: list[Row]) -> list[tuple[str, str] | None]:
    """The type and the message of each error, without the place."""
    return [row["error"] and (row["error"]["type"], row["error"]["message"].split(": ", 1)[-1]) for row in rows]


LINES: list[tuple[str, bytes, tuple[str, str] | None]] = [
    ("spaces around", b'  {"prompt": "a"}\t', None),
    ("CRLF", b'{"prompt": "a"}\r', None),
    ("a byte order mark", b'\xef\xbb\xbf{"prompt": "a"}', None),
    ("a NUL byte in text", b'{"prompt": "a\x00b"}', ("invalid_row", "not JSON: Invalid control character at column 14 (in text it is written \\u0000)")),
    ("a NUL in text, escaped", b'{"prompt": "a\\u0000b"}', None),
    (
        "a lone surrogate in the prompt",
        b'{"prompt": "a\\ud800"}',
        ("invalid_row", "character 1 is half of a surrogate pair (U+D800)"),
    ),
    ("a lone surrogate elsewhere", b'{"prompt": "a", "x": "\\udfff"}', None),
    ("a list", b"[1]", ("invalid_row", "not an object but a list")),
    ("cut short", b'{"prompt": "a', ("invalid_row", "not JSON: Unterminated string starting at column 12")),
    ("an empty object", b"{}", ("invalid_row", "the row has no column 'prompt'")),
    ("deep", b'{"prompt": "a", "x": ' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}", None),
    ("endlessly deep", b"[" * 300_000, ("invalid_row", "nested more than 100 levels deep")),
    ("a huge whole number", b'{"prompt": "a", "x": ' + b"9" * 4000 + b"}", None),
    ("NaN", b'{"prompt": "a", "x": [NaN, Infinity, -Infinity, 1e999]}', None),
    ("a repeated key", b'{"prompt": "b", "prompt": "a"}', None),
    ("a key of a megabyte", b'{"prompt": "a", "' + b"k" * 1_000_000 + b'": 1}', None),
    ("a number as the prompt", b'{"prompt": 5}', ("invalid_row", "column 'prompt' must be text, not a number")),
    ("a huge number as the prompt", b'{"prompt": ' + b"9" * 4000 + b"}", ("invalid_row", "column 'prompt' must be text, not a number")),
    ("null as the prompt", b'{"prompt": null}', ("invalid_row", "column 'prompt' is null")),
    ("spaces as the prompt", b'{"prompt": "   "}', None),
    ("nothing as the prompt", b'{"prompt": ""}', None),
    ("lines that only Unicode has, in text", '{"prompt": "a\u2028\u0085b"}'.encode(), None),
    ("a prompt that fits no model", b'{"prompt": "' + b"x" * 20_000 + b'"}', ("prompt_too_long", "the prompt has 20001 tokens, and the model's context of 512 tokens must hold it and a completion")),
    ("names of results", b'{"prompt": "a", "text": 1, "error": 2, "usage": 3, "finish_reason": 4}', None),
]  # fmt: skip


def test_every_strange_line_has_its_result_and_does_not_affect_other_lines(run):
    """Each one is between two good lines of the same file, with blank lines around it. The last line has no line end."""
    good = b'{"prompt": "good"}\n'
    data = b"".join(good + line + b"\n \t\r\n\n" for _, line, _ in LINES) + good.rstrip()
    rows = run("x.jsonl", data, code=3)
    assert len(rows) == 2 * len(LINES) + 1
    assert {row["text"] for row in rows[::2]} == {rows[0]["text"]}
    assert errors(rows[::2]) == [None] * (len(LINES) + 1)
    found = dict(zip([name for name, _, _ in LINES], errors(rows[1::2]), strict=True))
    assert found == {name: error for name, _, error in LINES}
    by_name = dict(zip([name for name, _, _ in LINES], rows[1::2], strict=True))
    assert by_name["a huge whole number"]["x"] == int("9" * 4000)
    assert by_name["NaN"]["x"] == [None, None, None, None]
    assert by_name["a repeated key"]["prompt"] == "a"
    assert by_name["a key of a megabyte"]["k" * 1_000_000] == 1
    assert by_name["a lone surrogate elsewhere"]["x"] == "\udfff"
    assert by_name["names of results"]["input_error"] == 2
    assert by_name["a NUL in text, escaped"]["prompt"] == "a\x00b"


def test_no_strange_line_is_lost_in_parquet(run):
    data = b"".join(line + b"\n" for name, line, _ in LINES if name != "endlessly deep")
    rows = run("x.jsonl", data, output="out.parquet", code=3)
    assert errors(rows) == [error for name, _, error in LINES if name != "endlessly deep"]


@pytest.mark.parametrize("rows", [3, 0])
def test_parquet_on_standard_input_keeps_its_types(run, rows, tmp_path, tiny_model_dir, monkeypatch):
    table = pa.table(
        {
            "prompt": pa.array(["a", "b", "c"]),
            "large": pa.array([2**64 - 1, None, 1], pa.uint64()),
            "map": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int16())),
            "time": pa.array([1, 2, None], pa.timestamp("ns", "UTC")),
            "nothing": pa.array([None, None, None], pa.int8()),
        }
    ).slice(0, rows)
    data = io.BytesIO()
    pq.write_table(table, data)
    run("in.parquet", data.getvalue(), output="file.parquet")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data.getvalue())))
    config = JobConfig(
        inputs=("-",), input_format="parquet", output=str(tmp_path / "piped.parquet"),
        model=tiny_model_dir, sampling=SamplingParams(max_tokens=1, ignore_eos=True)
    )  # fmt: skip
    run_job(config)
    piped, file = pq.read_table(tmp_path / "piped.parquet"), pq.read_table(tmp_path / "file.parquet")
    assert piped.schema == file.schema
    assert piped.select(table.column_names) == table == file.select(table.column_names)
    assert piped == file


def long_lines(length: int) -> bytes:
    """Three rows with a column of `length` bytes, and one whose prompt has that length."""
    carried = json.dumps({"prompt": "p", "carried": "x" * length}) + "\n"
    return (carried * 3 + json.dumps({"prompt": "y " * (length // 2)}) + "\n").encode()


def test_long_lines_are_carried_or_fail_as_too_long(run):
    rows = run("x.jsonl", long_lines(1_000_000), code=3)
    assert [len(row.get("carried", "")) for row in rows] == [1_000_000] * 3 + [0]
    assert [row["error"] and row["error"]["type"] for row in rows] == [None] * 3 + ["prompt_too_long"]
    assert len(rows[3]["prompt"]) == 1_000_000


def test_a_prompt_above_the_limit_of_characters_is_not_tokenized(run, monkeypatch):
    """A prompt of 100,000,000 characters would need 25 GB. The limit outside this test is 10,000,000."""
    monkeypatch.setattr(encoding, "DEFAULT_LIMITS", encoding.EncoderLimits(longest_text=100, batch_characters=20))
    rows = run("x.jsonl", b"".join(b'{"prompt": "%s"}\n' % (b"x" * n) for n in (100, 101, 5)), code=3)
    error = ("prompt_too_long", "the prompt has 101 characters; more than 100 are never tokenized")
    assert errors(rows) == [None, error, None]


@pytest.mark.slow
def test_lines_of_100_mb_take_at_most_fifteen_times_their_size_in_memory(
    tiny_model_dir, tmp_path, command, command_environment
):
    """Compares whole processes: the memory that lines of ten bytes need is subtracted."""
    peaks = []
    size = 100_000_000
    for length in (10, size):
        source, out = tmp_path / f"{length}.jsonl", tmp_path / f"{length}.out.jsonl"
        source.write_bytes(long_lines(length))
        options = ["--model", str(tiny_model_dir), "-o", str(out), "--max-tokens", "1", "--kv-memory", "64MiB"]
        run = [sys.executable, "-c", PEAK, *command, "run", str(source), *options]
        done = subprocess.run(run, env=command_environment, capture_output=True, text=True, timeout=500)
        code, peak = done.stdout.split()
        assert (int(code), done.stderr.count("Traceback")) == (0 if length == 10 else 3, 0), done.stderr
        peaks.append(int(peak))
    with out.open() as f:
        rows = [json.loads(line) for line in f]
    assert [len(row.get("carried", "")) for row in rows] == [size] * 3 + [0]
    assert [row["error"] and row["error"]["type"] for row in rows] == [None] * 3 + ["prompt_too_long"]
    print(f"lines of {size} bytes: {peaks[1] - peaks[0]} bytes more")
    assert peaks[1] - peaks[0] < 15 * size


PEAK = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
"""
