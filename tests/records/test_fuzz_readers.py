"""Any bytes give one row for every record and one result for every row, only the documented errors, and no hang.

The oracles below count records and share no code with the readers. The nightly run (`pytest -m nightly`) reads
BATCHGEN_FUZZ_INPUTS malformed files (a million by default); BATCHGEN_FUZZ_SEED repeats a run.
"""

import base64
import datetime as dt
import gzip
import io
import json
import os
import random
import re
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from batchgen.errors import ROW_ERROR_TYPES, InputCorrupt, UsageError
from batchgen.records.rows import Row
from batchgen.request import Request
from batchgen.result import Result
from support.params import slow_but
from support.records import opened, parquet_bytes
from support.tokenizers_by_hand import CHATML, builder

MAX_SECONDS = 10
"""A file that takes longer hangs."""
Built = Callable[[list[Row]], list[Request | Result]]


# Reading and checking.


def read(path: Path, data: bytes) -> tuple[list[Row], InputCorrupt | None]:
    path.write_bytes(data)
    source = opened(path)
    rows: list[Row] = []
    try:
        source.schema  # noqa: B018
        rows.extend(source.rows())
    except InputCorrupt as e:
        return rows, e
    return rows, None


def check(path: Path, data: bytes, build: Built | None) -> None:
    """Checks one file, from its bytes to the results of its rows."""
    if is_refused(path, data):
        with pytest.raises(UsageError):
            read(path, data)
        return
    rows, broken = read(path, data)
    assert [row.number for row in rows] == list(range(len(rows)))
    for row in rows:
        if row.error is not None:
            assert row.columns == {}
            assert row.error.type == "invalid_row"
            fit_for_a_line(row.error.message)
        else:
            assert isinstance(row.columns, dict)
        assert row.size >= 0
    if broken is not None:
        assert broken.hint
        fit_for_a_line(broken.message)
    COUNTED[path.suffixes[0]](path, data, rows, broken)
    if build is not None and rows:
        built = build(rows)
        assert [b.row for b in built] == [row.number for row in rows]
        for b, row in zip(built, rows, strict=True):
            if isinstance(b, Result) and b.error_type is not None:
                assert b.error_type in ROW_ERROR_TYPES
                fit_for_a_line(b.error_message or "")
            else:
                assert row.error is None


def is_refused(path: Path, data: bytes) -> bool:
    """Whether the first bytes of a file contradict its name."""
    match path.suffix:
        case ".gz":
            return data != b"" and not data.startswith(b"\x1f\x8b")
        case ".zst":  # a frame, or one to skip
            return data != b"" and data[:4] != b"\x28\xb5\x2f\xfd" and not re.match(rb"[\x50-\x5f]\x2a\x4d\x18", data)
        case ".parquet":  # zeros at the start are damage
            return data != b"" and not data.startswith((b"PAR1", b"PARE", bytes(4)))
    if data.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xff\xfe", b"\xfe\xff")):
        return True
    if [byte == 0 for byte in data[:4]] in ([False, True] * 2, [True, False] * 2):  # UTF-16 without a mark
        return True
    if data.startswith((b"PAR1", b"PARE")) and any(byte < 32 and byte not in b"\t\n\r" for byte in data[4:8]):
        return True  # a number follows, not text
    lines = [line for line in (line.removeprefix(b"\xef\xbb\xbf").strip() for line in data.split(b"\n")) if line]
    match path.suffix, lines:
        case ".jsonl", [b"[" | b"[{", *_]:  # an array over several lines
            return True
        case ".jsonl", [b"{", *rest]:  # an object over several lines, or one line that is cut off
            return not (rest and rest[0].startswith(b"{"))
    return False


def fit_for_a_line(message: str) -> None:
    assert message
    assert "\n" not in message
    message.encode()


# The oracles.


def plain_bytes(path: Path, data: bytes) -> tuple[bytes, bool]:
    """Decompresses a file as far as possible. Returns the data and whether it is complete."""
    if path.suffix == ".gz":
        out = b""
        while data:
            member = zlib.decompressobj(31)
            try:
                for i in range(0, len(data), 64):  # in pieces, so that a broken member gives the data before the damage
                    out += member.decompress(data[i : i + 64])
                    if member.eof:
                        data = member.unused_data + data[i + 64 :]
                        break
            except zlib.error:
                return out, False
            if not member.eof:
                return out, False
            data = data.lstrip(b"\0")  # padding, which gzip allows
        return out, True
    if path.suffix == ".zst":
        out = b""
        while data:
            frame = zstandard.ZstdDecompressor().decompressobj()
            try:
                out += frame.decompress(data)
            except zstandard.ZstdError:
                return out, False
            if not frame.eof:
                return out, False
            data = frame.unused_data
        return out, True
    return data, True


def jsonl_lines(data: bytes) -> list[bytes]:
    lines = [re.sub(rb"\A(\xef\xbb\xbf)?[ \t\r\n\v\f]*|[ \t\r\n\v\f]*\Z", b"", line) for line in data.split(b"\n")]
    return [line for line in lines if line]


def is_object(line: bytes) -> bool | None:
    """Whether a line is a JSON object; None if Python's parser cannot tell."""
    try:
        return isinstance(json.loads(line.decode()), dict)
    except (UnicodeDecodeError, json.JSONDecodeError):
        return False
    except (ValueError, RecursionError):
        return None


def counted_jsonl(path: Path, data: bytes, rows: list[Row], broken: InputCorrupt | None) -> None:
    plain, whole = plain_bytes(path, data)
    lines = jsonl_lines(plain)
    assert broken is None or not whole
    if broken is None and whole:
        assert len(rows) == len(lines)
    for row, line in zip(rows, lines if whole else lines[:-1], strict=False):  # the last one may be a part
        if len(line) < 90 and b"\xef\xbb\xbf" not in line:  # too short to be too deep
            assert (row.error is None) is is_object(line)


def csv_places(data: bytes) -> list[int] | None:
    """The first line of every record after the header, found by a separate state machine; None if the header is broken."""
    text = data.decode("utf-8-sig", "surrogateescape")
    lines = re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z", text)
    places: list[int] = []
    columns, i = 0, 0
    while i < len(lines):
        start, fields, state, error = i, [""], "start", False
        while i < len(lines) and (state == "quoted" or i == start):
            for c in lines[i]:
                if state == "quoted":
                    state = "closed" if c == '"' else state
                    fields[-1] += "" if c == '"' else c
                elif c in "\r\n":
                    state = "end"
                elif state == "start" and c == '"':
                    state = "quoted"
                elif c == ",":
                    fields.append("")
                    state = "start"
                elif state == "closed" and c == '"':
                    fields[-1] += '"'
                    state = "quoted"
                elif state == "closed":
                    error = True
                    break
                else:
                    fields[-1] += c
                    state = "field"
            i += 1
            if error:
                break
        error = error or state == "quoted"
        blank = not lines[start].strip("\r\n") and i == start + 1
        if not error and (blank or (len(fields) == 1 and not fields[0].strip() and columns != 1)):
            continue
        if not columns:
            if error:
                return None
            columns = len(fields)
        else:
            places.append(start + 1)
    return places


def counted_csv(path: Path, data: bytes, rows: list[Row], broken: InputCorrupt | None) -> None:
    plain, whole = plain_bytes(path, data)
    if whole:
        places = csv_places(plain)
        assert (broken is None) is (places is not None)
        if places is not None:
            assert [row.source for row in rows] == [f"{path}:{place}" for place in places]


def counted_parquet(path: Path, data: bytes, rows: list[Row], broken: InputCorrupt | None) -> None:
    if not data:
        assert (rows, broken) == ([], None)
    elif broken is None:
        metadata = pq.read_metadata(io.BytesIO(data))
        assert len(rows) == sum(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))


COUNTED = {".jsonl": counted_jsonl, ".csv": counted_csv, ".parquet": counted_parquet}


# Valid files and their mutations.


def valid_files() -> list[tuple[str, bytes]]:
    rows = [
        {"id": 1, "prompt": "one", "x": [1, 2.5, None, True]},
        {"id": "b", "prompt": "zwölf \ud83d\ude00", "x": {"a": {"b": ["c"]}}},
        {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "n": 2},
        {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p", "max_tokens": 3}},
        {"prompt": 'a\u0000b\\"', "sampling_params": {"temperature": 1e309, "stop": ["x"]}},
    ]
    jsonl = b"".join(json.dumps(row).encode() + b"\n" for row in rows) * 2
    csv = '\ufeffid,prompt,temperature\r\n1,"a ""quoted""\nfield",0.5\r\n2,zwölf,\r\n3,"",1\n\n4,x,y\n'.encode()
    table = pa.table(
        {
            "id": list(range(6)),
            "prompt": ["a", None, "zwölf", "", "a" * 40, "b"],
            "messages": [[{"role": "user", "content": str(i)}] for i in range(6)],
            "when": pa.array([1, 2, None, 4, 5, 2**62], pa.timestamp("ns")),
            "kind": pa.array(["a", "b", "a", "b", "a", "b"]).dictionary_encode(),
        }
    )
    plain = pa.table({"prompt": ["a", "b", "c"], "day": [dt.date(2026, 1, 2)] * 3})
    files = [
        ("jsonl", jsonl),
        ("csv", csv),
        ("parquet", parquet_bytes(table, row_group_size=4)),
        ("parquet", parquet_bytes(plain, compression="none", write_page_checksum=True, use_dictionary=False)),
    ]
    for name, data in (("jsonl", jsonl), ("csv", csv)):
        files.append((f"{name}.gz", gzip.compress(data, mtime=0)))
        files.append((f"{name}.gz", gzip.compress(data[:60], mtime=0) + gzip.compress(data[60:], mtime=0)))
        files.append((f"{name}.zst", zstandard.compress(data[:60]) + zstandard.compress(data[60:])))
    files.append(("jsonl.zst", zstandard.ZstdCompressor(write_checksum=True).compress(jsonl)))
    return files


TOKENS = [
    b"\n", b"\r", b"\r\n", b'"', b'""', b",", b"{", b"}", b"[", b"]", b":", b"\\", b"\x00", b"\xef\xbb\xbf", b"\xff", b"\xed\xa0\x80",
    b"\\ud800", b"NaN", b"1e999", b"9" * 400, b"[" * 120, b'{"a":' * 30, b"null", b"true", b"\x0b", b"\xe2\x80\xa8", b"PAR1", b"\x1f\x8b",
    b'{"prompt": 5}\n', b'{"messages": [{"role": 1}]}\n', b'{"prompt": ""}\n', b'{"body": {}, "url": 3}\n', b"\x7f\xff\xff\xff",
]  # fmt: skip


def mutated(rng: random.Random, data: bytes) -> bytes:
    """The file with one to six changes: bytes are flipped, overwritten, deleted, inserted or doubled, or the end is cut off."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        at = rng.randrange(len(out) + 1)
        length = min(len(out) - at, rng.choice((1, 2, 4, 8, 30)))
        what = rng.randrange(8)
        if what == 0:
            out[at : at + length] = rng.randbytes(length)
        elif what == 1 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif what == 2:
            del out[at : at + length]
        elif what in (3, 4):
            out[at:at] = rng.choice(TOKENS)
        elif what == 5:
            out[at:at] = out[at : at + length]
        elif what == 6:
            out[at : at + length] = rng.choice(TOKENS)[:length].ljust(length, b"\x00")
        elif rng.random() < 0.3:
            del out[at:]
    return bytes(out)


@contextmanager
def no_hang() -> Iterator[Callable[[], None]]:
    """Fails the test when a file takes too long. Yields a function that restarts the timer."""

    def hangs(signum: int, frame: object) -> None:
        pytest.fail(f"no answer within {MAX_SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, hangs)
    try:
        yield lambda: signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS) and None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def fuzz(folder: Path, build: Built, *, seed: int, count: int, build_every: int) -> None:
    """Checks `count` mutated files. The note of a failure contains the data that repeats it."""
    files = list(valid_files())
    rng = random.Random(seed)
    with no_hang() as start:
        for i in range(count):
            name, data = files[i % len(files)]
            if name.endswith((".gz", ".zst")) and rng.random() < 0.5:  # damage inside, too
                pack = gzip.compress if name.endswith(".gz") else zstandard.compress
                data = pack(mutated(rng, files[0 if name.startswith("jsonl") else 1][1]))
            else:
                data = mutated(rng, data)
            start()
            try:
                check(folder / f"x.{name}", data, build if i % build_every == 0 else None)
            except BaseException as e:
                e.add_note(f"input {i} of seed {seed}, {name}: {base64.b64encode(data).decode()}")
                raise


@pytest.fixture(scope="module")
def build() -> Built:
    """Makes requests or results from rows, for a model with a chat template."""
    return builder(chat_template=CHATML, context=200).build


def test_the_oracles_and_the_readers_agree_on_the_valid_files(tmp_path, build):
    counts = []
    for name, data in valid_files():
        check(tmp_path / f"x.{name}", data, build)
        counts.append(len(read(tmp_path / f"x.{name}", data)[0]))
    assert counts == [10, 4, 6, 3, 10, 10, 10, 4, 4, 4, 10]


@pytest.mark.parametrize("seed", slow_but([0], range(3)))
def test_damaged_files_give_one_row_per_record_and_one_result_per_row(tmp_path, build, seed):
    fuzz(tmp_path, build, seed=seed, count=1000, build_every=10)


@pytest.mark.nightly
def test_a_million_damaged_files_give_one_row_per_record_and_one_result_per_row(tmp_path, build):
    count = int(os.environ.get("BATCHGEN_FUZZ_INPUTS", "1000000"))
    seed = int(os.environ.get("BATCHGEN_FUZZ_SEED", str(int(time.time()))))
    fuzz(tmp_path, build, seed=seed, count=count, build_every=20)
