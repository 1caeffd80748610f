"""Inputs in an object store give the same rows as files on disk. They are read in ranges and identified by the store's metadata."""

import gzip
import random
import signal
from itertools import islice

import fsspec
import pyarrow as pa
import pytest
import zstandard

from batchgen.config import JobConfig
from batchgen.errors import InputCorrupt, Interrupted, UsageError
from batchgen.records import remote
from batchgen.records.inputs import window_rows
from batchgen.records.output import job_path
from support.params import slow_but
from support.records import CSV, JSONL, ROWS, columns, opened, parquet_bytes

HINT = "check the address, your access to it and the connection"


def test_folders_and_globs_give_their_files_sorted_without_hidden_files_and_our_outputs(s3):
    for name in ("b.jsonl", "a.csv", "notes.txt", ".c.jsonl.new", ".d.jsonl", "deeper/e.jsonl", "o.jsonl", "p.jsonl"):
        s3.pipe_file(f"bucket/in/{name}", CSV if name.endswith("csv") else JSONL)
    folder = job_path("s3://bucket/in/o.jsonl", None)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    for name in ("s3://bucket/in", "s3://bucket/in/"):
        source = opened(name, output="s3://bucket/in/p.jsonl")
        assert [f.name for f in source.files] == ["s3://bucket/in/a.csv", "s3://bucket/in/b.jsonl"]
        assert source.notes == [
            "s3://bucket/in/o.jsonl is an output of batchgen: left out of the input",
            "s3://bucket/in/p.jsonl is an output of batchgen: left out of the input",
        ]
    assert [f.name for f in opened("s3://bucket/in/[ab].*").files] == ["s3://bucket/in/a.csv", "s3://bucket/in/b.jsonl"]
    assert [f.name for f in opened("s3://bucket/**/e.jsonl").files] == ["s3://bucket/in/deeper/e.jsonl"]
    with pytest.raises(UsageError, match=r"^S3://bucket/in/b\.jsonl is both an input and the output"):
        opened("s3://bucket/in/b.jsonl", output="S3://bucket/in/b.jsonl")
    with pytest.raises(UsageError, match=r"^s3a://bucket/in/b\.jsonl is both an input and the output"):
        opened("s3://bucket/in/b.jsonl", output="s3a://bucket/in/b.jsonl")


def test_an_existing_key_with_brackets_or_a_question_mark_is_not_a_glob(s3):
    s3.pipe_file("bucket/x[1]?.jsonl", JSONL)
    assert columns("s3://bucket/x[1]?.jsonl") == ROWS


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket/no.jsonl", "no such file: s3://bucket/no.jsonl; check the address and your access to it"),
        ("s3://nobucket/x.jsonl", "no such file: s3://nobucket/x.jsonl; check the address and your access to it"),
        ("s3://bucket/no*.jsonl", "no such file: s3://bucket/no*.jsonl; check the address and your access to it"),
        ("s3://bucket/texts", "no jsonl, parquet, csv or tsv file in the folder s3://bucket/texts; name the files, or a glob, with --input-format"),
        ("s3://bucket/texts/x.txt", "s3://bucket/texts/x.txt has an unknown suffix; say what it is with --input-format jsonl, parquet, csv or tsv"),
    ],
)  # fmt: skip
def test_an_unusable_input_is_refused_with_a_hint(s3, url, message):
    s3.pipe_file("bucket/texts/x.txt", b"x")
    with pytest.raises(UsageError) as caught:
        opened(url)
    assert str(caught.value) == message


def test_an_error_of_the_store_is_reported_in_one_line(s3, monkeypatch):
    monkeypatch.setattr(s3, "info", _fail(PermissionError("Forbidden\nand a page of XML")))
    with pytest.raises(UsageError) as caught:
        opened("s3://bucket/x.jsonl")
    assert str(caught.value) == f"s3://bucket/x.jsonl cannot be read: Forbidden; {HINT}"
    monkeypatch.setattr(s3, "info", _fail(_NotAnOSError()))
    with pytest.raises(UsageError) as caught:
        opened("s3://bucket/x.jsonl")
    assert str(caught.value) == f"s3://bucket/x.jsonl cannot be read: _NotAnOSError; {HINT}"


class _NotAnOSError(Exception):
    """Like the errors of botocore."""


def _fail(error):
    def fail(*args, **options):
        raise error

    return fail


def test_a_store_that_has_listed_files_is_not_asked_whether_they_can_be_read_twice(s3, monkeypatch):
    for name in ("a", "b"):
        s3.pipe_file(f"bucket/in/{name}.jsonl", JSONL)
    source = opened("s3://bucket/in")
    monkeypatch.setattr(s3, "_call_s3", _fail(AssertionError("a request")))
    assert not source.is_read_once()
    assert window_rows(JobConfig(inputs="s3://bucket/in", model="m"), source) is None


def test_a_store_is_asked_once_for_a_folder_of_many_files_and_not_for_each(s3, monkeypatch):
    for i in range(9):
        s3.pipe_file(f"bucket/in/{i}.jsonl", JSONL)
    source = opened("s3://bucket/in")
    alone = opened("s3://bucket/in/5.jsonl").fingerprint()
    requests = []
    call = type(s3)._call_s3
    monkeypatch.setattr(
        type(s3), "_call_s3", lambda self, method, *args, **k: requests.append(method) or call(self, method, *args, **k)
    )
    before = source.fingerprint()
    assert requests == ["list_objects_v2"]
    assert before[5:6] == alone
    other = JSONL.replace(b"one", b"six")
    s3.call_s3("put_object", Bucket="bucket", Key="in/5.jsonl", Body=other)  # without the file system's cache noticing
    changed = source.fingerprint()
    assert changed[5]["version"] == 'ETag "' + _md5(other) + '"'
    monkeypatch.setattr(s3, "ls", _fail(PermissionError("Forbidden")))
    assert source.fingerprint() == changed


def _md5(data: bytes) -> str:
    import hashlib

    return hashlib.md5(data).hexdigest()


def test_a_store_without_versions_has_no_fingerprint(monkeypatch):
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "store", {})
    fsspec.filesystem("memory").pipe("/bucket/x.jsonl", JSONL)
    assert opened("memory://bucket/x.jsonl").fingerprint() != []
    monkeypatch.setattr("batchgen.records.files.object_version", lambda info: None)
    assert opened("memory://bucket/x.jsonl").fingerprint() == []


def test_reading_the_first_rows_of_a_large_parquet_file_fetches_little_of_it(s3, monkeypatch):
    texts = [random.Random(i).randbytes(500).hex() for i in range(8_000)]
    data = parquet_bytes(pa.table({"prompt": texts}), row_group_size=400)
    assert len(data) > 4_000_000
    s3.pipe_file("bucket/x.parquet", data)
    monkeypatch.setattr(remote, "_READ_AHEAD", 1 << 16)
    fetched = _counted(monkeypatch)
    source = opened("s3://bucket/x.parquet")
    assert source.schema == pa.schema([("prompt", pa.string())])
    assert [row.columns["prompt"] for row in islice(source.rows(), 5)] == texts[:5]
    assert sum(fetched) < len(data) / 4
    fetched.clear()
    assert [row.columns["prompt"] for row in source.rows()] == texts
    assert sum(fetched) < len(data) * 1.3


def _counted(monkeypatch) -> list[int]:
    from s3fs.core import S3File

    fetched: list[int] = []
    real = S3File._fetch_range

    def counting(self, start, end):
        fetched.append(end - start)
        return real(self, start, end)

    monkeypatch.setattr(S3File, "_fetch_range", counting)
    return fetched


@pytest.mark.parametrize(
    "name",
    slow_but(("x.jsonl.gz", "x.csv", "x.parquet"), ("x.jsonl", "x.jsonl.gz", "x.jsonl.zst", "x.csv", "x.parquet")),
)
def test_a_broken_connection_ends_the_input_after_the_rows_that_were_read(s3, monkeypatch, name):
    texts = [random.Random(i).randbytes(500).hex() for i in range(2_000)]
    lines = "".join(f'{{"prompt": "{t}"}}\n' for t in texts).encode()
    data = {
        "x.jsonl": lines,
        "x.jsonl.gz": gzip.compress(lines),
        "x.jsonl.zst": zstandard.compress(lines),
        "x.csv": ("prompt\n" + "".join(f"{t}\n" for t in texts)).encode(),
        "x.parquet": parquet_bytes(pa.table({"prompt": texts}), row_group_size=100, compression="none"),
    }[name]
    s3.pipe_file(f"bucket/{name}", data)
    monkeypatch.setattr(remote, "_READ_AHEAD", 1 << 16)
    from s3fs.core import S3File

    real = S3File._fetch_range

    def breaking(self, start, end):
        if start > len(data) / 2 and end < len(data) * 0.9:  # not the end, where Parquet's footer is
            raise _NotAnOSError("Could not connect to the endpoint URL")
        return real(self, start, end)

    monkeypatch.setattr(S3File, "_fetch_range", breaking)
    read = []
    with pytest.raises(InputCorrupt) as caught:
        read.extend(row.columns["prompt"] for row in opened(f"s3://bucket/{name}").rows())
    assert 500 < len(read) < 1_500
    assert read == texts[: len(read)]
    place = {"x.csv": f"line {len(read) + 1}", "x.parquet": f"row {len(read) - 1}"}.get(name, f"line {len(read)}")
    assert str(caught.value) == (
        f"s3://bucket/{name} breaks off after {place}: Could not connect to the endpoint URL; "
        "the rows before that place are kept: check the connection and run the same command again"
    )


def test_a_signal_during_a_download_is_not_an_error_of_the_input(s3, monkeypatch):
    s3.pipe_file("bucket/x.jsonl", JSONL)
    source = opened("s3://bucket/x.jsonl")
    monkeypatch.setattr("s3fs.core.S3File._fetch_range", _fail(Interrupted(signal.SIGINT)))
    with pytest.raises(Interrupted):
        list(source.rows())


def test_an_object_replaced_during_reading_ends_the_input_and_the_versions_are_not_mixed(s3, monkeypatch):
    monkeypatch.setattr(remote, "_READ_AHEAD", 1 << 16)
    line = b'{"prompt": "' + b"x" * 1000 + b'"}\n'
    s3.pipe_file("bucket/x.jsonl", line * 1000)
    rows = opened("s3://bucket/x.jsonl").rows()
    next(rows)
    s3.call_s3("put_object", Bucket="bucket", Key="x.jsonl", Body=line.replace(b"x", b"y") * 1000)
    read = []
    with pytest.raises(InputCorrupt, match=r"^s3://bucket/x\.jsonl breaks off after line "):
        read.extend(row.columns["prompt"][0] for row in rows)
    assert set(read) == {"x"}


def test_a_chained_url_reads_files_in_an_archive_of_a_store(s3, tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("b.jsonl", JSONL)
        archive.writestr("a.csv", CSV)
    s3.put_file(str(tmp_path / "a.zip"), "bucket/a.zip")
    assert columns("zip://b.jsonl::s3://bucket/a.zip") == ROWS
    source = opened("zip://*.*::s3://bucket/a.zip")
    assert [f.name for f in source.files] == ["zip://a.csv::s3://bucket/a.zip", "zip://b.jsonl::s3://bucket/a.zip"]
    assert [row.columns for row in source.rows()] == ROWS + ROWS


def test_the_suffix_of_a_signed_web_address_is_before_its_question_mark():
    from batchgen.records.files import split_name

    assert split_name("https://host/a/x.jsonl.gz?X-Amz-Signature=b.csv") == ("x", "jsonl", "gzip")
    assert split_name("s3://bucket/x?y.csv") == ("x?y", "csv", None)
