"""The files that belong to an input, and their rows."""

import bz2
import errno
import gzip
import io
import json
import lzma
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from batchgen.config import INPUT_FORMATS, InputFormat
from batchgen.errors import InputCorrupt, UsageError
from batchgen.records.output import output_format
from support.late import late
from support.records import CSV, JSONL, ROWS, columns, opened, parquet_bytes

pl = late("polars")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("place", ["local", "s3"])
@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize(("suffix", "data"), [(".jsonl", JSONL), (".csv", CSV), (".parquet", parquet_bytes())])
def test_every_format_is_read_plain_and_compressed(folder, request, suffix, data, compression, place):
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[compression]
    root = "" if place == "local" else "s3://bucket/"
    files = fsspec.filesystem("file") if place == "local" else request.getfixturevalue("s3")
    name, other = (f"{root}{stem}{compression}" for stem in (f"x{suffix}", "x.dat"))
    for path in (name, other):
        files.pipe_file(path, pack(data))
    source = opened(name)
    rows = list(source.rows())
    places = {".jsonl": [":1", ":3"], ".csv": [":2", ":3"], ".parquet": [":row 0", ":row 1"]}[suffix]
    assert [row.columns for row in rows] == ROWS
    assert [row.source for row in rows] == [name + place for place in places]
    assert [row.number for row in rows] == [0, 1]
    assert [row.error for row in rows] == [None, None]
    assert list(source.rows()) == rows  # a second time
    assert columns(other, format=suffix[1:]) == ROWS


@pytest.mark.parametrize(
    ("encoding", "name", "pack"),
    [
        ("cp1252", "x.jsonl", bytes),
        ("utf-16", "x.jsonl", bytes),
        ("utf-16-le", "x.jsonl.gz", gzip.compress),
        ("cp1252", "x.csv.zst", zstandard.compress),
        ("utf-16", "x.tsv", bytes),
        ("gb18030", "x.csv", bytes),
    ],
)
def test_text_in_another_encoding_is_read_if_it_is_named(folder, monkeypatch, encoding, name, pack):
    texts = ["é", "a" * 70_000 + "ü", "“"] if encoding == "cp1252" else ["é中\n🎈", "中" * 40_000, ""]
    lines = [json.dumps({"prompt": t}, ensure_ascii=False) for t in texts]
    data = "\n".join(lines if "jsonl" in name else ['"prompt"', *(f'"{t}"' for t in texts)]) + "\n"
    (folder / name).write_bytes(pack(data.encode(encoding)))
    assert columns(name, encoding=encoding) == [{"prompt": t} for t in texts]
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data.encode(encoding))))
    assert columns("-", encoding=encoding, format=name.split(".")[1]) == [{"prompt": t} for t in texts]


def test_bytes_that_the_encoding_does_not_have_fail_only_their_row(folder):
    (folder / "x.csv").write_bytes(b"prompt\n\xe9\na\x81\nb\n")
    rows = list(opened("x.csv", encoding="cp1252").rows())
    assert [row.columns for row in rows] == [{"prompt": "é"}, {}, {"prompt": "b"}]
    assert rows[1].error.message == "x.csv:3: column 'prompt' is not cp1252"
    (folder / "x.csv").write_bytes("prompt\na\nb".encode("utf-16-le") + b"c")  # half a character at the end
    assert [row.columns for row in opened("x.csv", encoding="utf-16-le").rows()] == [{"prompt": "a"}, {}]
    (folder / "x.jsonl").write_bytes(
        '{"prompt": "a"}\n'.encode("utf-16-le") + b"\0\xd8" + '\n{"prompt": "b"}'.encode("utf-16-le")
    )
    assert [row.columns for row in opened("x.jsonl", encoding="utf-16-le").rows()] == [
        {"prompt": "a"},
        {},
        {"prompt": "b"},
    ]


def test_a_folder_gives_its_known_files_sorted_and_without_our_outputs(folder):
    data = folder / "data"
    (data / "deeper").mkdir(parents=True)
    for name in ("b.jsonl", "a.csv.gz", ".hidden.jsonl", "notes.txt", "b.out.jsonl", "mine.jsonl", "deeper/c.jsonl"):
        (data / name).write_bytes(gzip.compress(CSV) if name.endswith("gz") else JSONL)
    (data / "b.out.jsonl.job").mkdir()
    source = opened("data", output="data/mine.jsonl")
    assert [f.name for f in source.files] == ["data/a.csv.gz", "data/b.jsonl"]
    assert source.notes == [
        "sub-folders of data are not read (deeper); a glob reads them, such as 'data/**/*.jsonl'",
        "data/b.out.jsonl is an output of batchgen: left out of the input",
        "data/mine.jsonl is an output of batchgen: left out of the input",
    ]
    assert [f.name for f in opened("data", format="csv").files] == ["data/a.csv.gz"]


def test_files_of_a_folder_that_are_compressed_otherwise_are_named(folder):
    (folder / "data" / "d.jsonl.xz").mkdir(parents=True)
    for name in ("a.jsonl", "b.jsonl.bz2", "c.CSV.ZSTD", "notes.txt.bz2", ".e.jsonl.bz2", "f.jsonl.sha256"):
        (folder / "data" / name).write_bytes(JSONL)
    source = opened("data")
    assert [f.name for f in source.files] == ["data/a.jsonl"]
    hint = "unpack them, or give those of gzip and zstandard the suffix .gz or .zst"
    note = f"files of data are not read because of their suffix ({{}}): {hint}"
    assert source.notes == [note.format("b.jsonl.bz2, c.CSV.ZSTD")]
    assert opened("data", format="jsonl").notes == [note.format("b.jsonl.bz2")]
    for i in range(5):
        (folder / "data" / f"b{i}.jsonl.bz2").touch()
    assert opened("data", format="jsonl").notes == [
        note.format("b.jsonl.bz2, b0.jsonl.bz2, b1.jsonl.bz2, b2.jsonl.bz2, b3.jsonl.bz2 and 1 more")
    ]


def test_a_folder_whose_files_are_all_in_sub_folders_names_the_glob_that_reads_them(folder):
    (folder / "my data" / "lang=de").mkdir(parents=True)
    (folder / "my data" / "lang=de" / "part-0.jsonl.gz").write_bytes(gzip.compress(JSONL))
    with pytest.raises(UsageError) as e:
        opened("my data")
    assert str(e.value) == (
        "no jsonl, parquet, csv or tsv file in the folder my data; "
        "its sub-folders have some, which a glob reads: 'my data/**/*.jsonl.gz'"
    )


def test_columns_that_only_the_names_of_folders_have_are_noted(folder):
    for language, content in (("de", JSONL), ("en", b'{"prompt": "a", "lang": "en"}\n')):
        (folder / "year=2026" / f"lang={language}").mkdir(parents=True)
        (folder / "year=2026" / f"lang={language}" / "part=0.jsonl").write_bytes(content)
    year = "'year' is only in the names of folders (year=…) and no column of the rows"
    for pattern, notes in (
        ("*/lang=en/*", [year]),
        ("**/*.jsonl", [year, year.replace("year", "lang")]),
    ):
        source = opened(pattern)
        several = "; input_file has each row's folders" if len(source.files) > 1 else ""
        list(source.rows())
        assert source.notes == [note + several for note in notes]


def test_a_glob_gives_its_files_sorted_and_skips_job_folders(folder):
    (folder / "z.jsonl.job").mkdir()
    (folder / "z.jsonl.job" / "manifest.json").write_text("{}")
    for name in ("z.jsonl", "b.jsonl", "a.jsonl", "z.jsonl.job/spool.jsonl"):
        (folder / name).write_bytes(JSONL)
    source = opened("**/*.jsonl")
    assert [f.name for f in source.files] == ["a.jsonl", "b.jsonl"]
    assert source.notes == ["z.jsonl is an output of batchgen: left out of the input"]


def test_an_output_that_is_named_is_read_and_brackets_in_its_name_are_not_a_glob(folder):
    (folder / "x[1].out.jsonl").write_bytes(JSONL)
    (folder / "x[1].out.jsonl.job").mkdir()
    assert columns("x[1].out.jsonl") == ROWS


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (["prompt.jsonl"], {}, "no such file: prompt.jsonl; did you mean prompts.jsonl?"),
        (["nowhere/q.jsonl"], {}, "no such file: nowhere/q.jsonl; check the path"),
        (["x.txt"], {}, "x.txt has an unknown suffix; say what it is with --input-format jsonl, parquet, csv or tsv; lines of text become prompts with: jq -Rc '{prompt: .}' x.txt > x.jsonl"),
        (["a b.jsonl.xz"], {}, "a b.jsonl.xz has an unknown suffix; unpack it first: xz -d 'a b.jsonl.xz'"),
        (["x.xlsx"], {}, "x.xlsx has an unknown suffix; save its sheet as CSV"),
        (["pointer.csv"], {}, "pointer.csv is a Git LFS pointer, not the file itself; run `git lfs pull`"),
        (["x.json"], {}, "x.json has an unknown suffix; say what it is with --input-format jsonl, parquet, csv or tsv; a JSON array becomes JSONL with: jq -c '.[]' x.json > x.jsonl"),
        (["link.jsonl"], {}, "link.jsonl is a link to gone.jsonl, which does not exist; check the link"),
        (["links"], {}, "links/a.jsonl is a link to gone.jsonl, which does not exist; check the link"),
        (["links/*.jsonl"], {}, "links/a.jsonl is a link to gone.jsonl, which does not exist; check the link"),
        (["shards"], {}, "shards/data/train-00001-of-00002.parquet is a link to gone.parquet, which does not exist; check the link"),
        (["x.arrow"], {}, "x.arrow has an unknown suffix; write it as Parquet first"),
        (["packed.jsonl"], {}, "packed.jsonl is compressed with gzip; give it a name that ends with .gz"),
        (["packed.csv"], {}, "packed.csv is compressed with zstandard; give it a name that ends with .zst"),
        (["utf16.csv"], {}, "utf16.csv is in UTF-16, not in UTF-8; use --encoding utf-16"),
        (["bare.jsonl"], {}, "bare.jsonl is in UTF-16, not in UTF-8; use --encoding utf-16-be"),
        (["bare.jsonl"], {"encoding": "U16"}, "bare.jsonl has no byte order mark, which --encoding U16 needs; use utf-16-le or utf-16-be"),
        (["table.parquet"], {"encoding": "cp1252"}, "--encoding is for text files, and table.parquet is parquet; leave it out"),
        (["array.jsonl"], {}, "array.jsonl looks like a JSON array, not an object on each line; convert it: jq -c '.[]' array.jsonl > lines-array.jsonl"),
        (["pretty.jsonl"], {}, "pretty.jsonl looks like pretty-printed JSON (objects over several lines), not an object on each line; convert it: jq -c . pretty.jsonl > lines-pretty.jsonl"),
        (["table.jsonl"], {}, "table.jsonl is a Parquet file; use --input-format parquet"),
        (["x.jsonl.gz"], {}, "x.jsonl.gz is not compressed with gzip; give it a name without .gz"),
        (["x.csv.zst"], {}, "x.csv.zst is not compressed with zstandard; give it a name without .zst"),
        (["x.parquet.gz"], {}, "x.parquet.gz is not compressed with gzip; give it a name without .gz"),
        (["x.parquet"], {}, "x.parquet is not a Parquet file; say what it is with --input-format jsonl, csv or tsv"),
        (["file://"], {}, "an input has an empty name; name a file, a folder, a glob or - for standard input"),
        (["http://"], {}, "http:// cannot be read: it names no host; use a path, or a URL such as s3://bucket/rows.jsonl"),
        (["https:///rows.jsonl"], {}, "https:///rows.jsonl cannot be read: it names no host; use a path, or a URL such as s3://bucket/rows.jsonl"),
        (["s3://"], {}, "s3:// cannot be read: it names no file; use a path, or a URL such as s3://bucket/rows.jsonl"),
        (["q*.jsonl"], {}, "no file matches q*.jsonl; check the pattern and the folder it starts from"),
        (["empty"], {}, "no jsonl, parquet, csv or tsv file in the folder empty; name the files, or a glob, with --input-format"),
        (["ours"], {}, "ours has only outputs of batchgen; name these files themselves to read them"),
        (["-", "prompts.jsonl"], {}, "- (standard input) cannot be read together with other inputs; name files only, or - alone"),
        *(
            (["prompts.jsonl"], {"output": name}, f"{name} is both an input and the output; name another output with -o, or put a glob in quotes, so that batchgen leaves outputs out")
            for name in ("./prompts.jsonl", "same.jsonl")
        ),
    ],
)  # fmt: skip
def test_an_unusable_input_is_refused_with_a_hint(folder, inputs, options, message):
    (folder / "prompts.jsonl").write_bytes(JSONL)
    (folder / "same.jsonl").symlink_to("prompts.jsonl")
    (folder / "x.txt").write_bytes(JSONL)
    for name in ("x.jsonl.gz", "x.csv.zst", "x.parquet.gz", "x.parquet"):
        (folder / name).write_bytes(b"this is not what its suffix says")
    (folder / "array.jsonl").write_text("\n" + json.dumps([{"a": 1}], indent=1))
    (folder / "pretty.jsonl").write_text(json.dumps({"a": 1}, indent=1) + "\n" + json.dumps({"a": 2}, indent=1))
    (folder / "x.json").write_bytes(b"[]")
    (folder / "a b.jsonl.xz").touch()
    (folder / "x.xlsx").touch()
    (folder / "pointer.csv").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n")
    (folder / "link.jsonl").symlink_to("gone.jsonl")
    (folder / "links").mkdir()
    (folder / "links" / "a.jsonl").symlink_to("gone.jsonl")
    (folder / "links" / "b.jsonl").write_bytes(JSONL)
    (folder / "shards" / "data").mkdir(parents=True)
    (folder / "shards" / "data" / "train-00001-of-00002.parquet").symlink_to("gone.parquet")
    (folder / "shards" / "data" / "train-00000-of-00002.parquet").write_bytes(parquet_bytes(ROWS))
    (folder / "x.arrow").touch()
    (folder / "packed.jsonl").write_bytes(gzip.compress(JSONL))
    (folder / "packed.csv").write_bytes(zstandard.compress(CSV))
    (folder / "utf16.csv").write_text("id,prompt\n", encoding="utf-16")
    (folder / "bare.jsonl").write_text("{}\n", encoding="utf-16-be")
    (folder / "table.parquet").touch()
    pq.write_table(pa.table({"prompt": ["a"]}), folder / "table.jsonl")
    (folder / "empty").mkdir()
    (folder / "ours" / "o.jsonl.job").mkdir(parents=True)
    (folder / "ours" / "o.jsonl").write_bytes(JSONL)
    with pytest.raises(UsageError) as caught:
        opened(*inputs, **options)
    assert str(caught.value) == message


def test_standard_input_is_read_as_bytes(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(JSONL)))
    source = opened("-")
    assert source.is_stdin
    assert source.fingerprint() == []
    assert [(r.source, r.columns) for r in source.rows()] == [("<stdin>:1", ROWS[0]), ("<stdin>:3", ROWS[1])]


def read_words(stream, **_):
    for number, line in enumerate(stream, 1):
        yield f":{number}", {"words": line.decode().split()} if line.strip() else "an empty line", len(line)


def test_a_format_is_its_reader_and_a_line_in_the_table_of_formats(folder, monkeypatch):
    monkeypatch.setitem(INPUT_FORMATS, "words", InputFormat((".txt", ".text"), "a_module:read_words"))
    monkeypatch.setitem(sys.modules, "a_module", SimpleNamespace(read_words=read_words))
    (folder / "a.text.gz").write_bytes(gzip.compress(b"one two\n\nthree\n"))
    assert [row.columns or row.error.message for row in opened("a.text.gz").rows()] == [
        {"words": ["one", "two"]}, "a.text.gz:2: an empty line", {"words": ["three"]},
    ]  # fmt: skip
    assert [file.name for file in opened(".").files] == ["a.text.gz"]
    with pytest.raises(UsageError, match=r"^the output o\.txt has an unknown suffix; "):
        output_format("o.txt")


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.parquet", "x.jsonl.gz", "x.jsonl.zst"])
def test_an_empty_file_has_no_rows(folder, name):
    (folder / name).write_bytes(b"")
    assert columns(name) == []


def test_empty_files_that_no_writer_leaves_are_named(folder):
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        (folder / name).write_bytes(b"")
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(b""))
    assert opened("a.jsonl", "d.jsonl.gz").notes == []
    note = "b.jsonl.gz has 0 bytes and so no rows: was it copied or written to its end?"
    assert opened("a.jsonl", "b.jsonl.gz").notes == [note]
    assert opened(".").notes == [note.replace(":", " (and so have 1 more):")]


MANY = b"".join(json.dumps({"n": i, "prompt": "x" * (i % 97)}).encode() + b"\n" for i in range(20_000))
HINT = "the rows before that place are kept: put a whole copy in its place and run the same command again"


@pytest.mark.parametrize(
    ("suffix", "pack", "reason"),
    [
        (".gz", gzip.compress, "Compressed file ended before the end-of-stream marker was reached"),
        (".zst", zstandard.compress, "Truncated compressed stream"),
    ],
)
def test_a_truncated_stream_gives_the_rows_before_the_end_and_names_the_place(folder, suffix, pack, reason):
    packed = pack(MANY)
    (folder / f"x.jsonl{suffix}").write_bytes(packed[: len(packed) // 2])
    numbers = []
    with pytest.raises(InputCorrupt) as caught:
        numbers.extend(row.columns["n"] for row in opened(f"x.jsonl{suffix}").rows())
    assert len(numbers) > 4_000
    assert numbers == list(range(len(numbers)))
    assert str(caught.value) == f"x.jsonl{suffix} breaks off after line {len(numbers)}: {reason}; {HINT}"


def test_a_zstandard_file_may_begin_with_a_skippable_frame(folder, monkeypatch):
    data = zstandard.compress(b'{"prompt": "a"}\n')
    packed = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + len(data).to_bytes(4, "little") + data
    (folder / "x.jsonl.zst").write_bytes(packed)
    assert columns("x.jsonl.zst") == [{"prompt": "a"}]
    (folder / "packed.jsonl").write_bytes(packed)
    with pytest.raises(UsageError, match=r"packed\.jsonl is compressed with zstandard"):
        opened("packed.jsonl")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(packed)))
    assert columns("-") == [{"prompt": "a"}]


def test_a_closed_standard_input_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match=r"^standard input is closed; give it rows, or name a file$"):
        columns("-")


def test_an_input_without_permission_to_read_it_is_refused(folder, monkeypatch):
    (folder / "x.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.setattr(os, "access", lambda name, mode: False)  # root may read every file
    refusal = "cannot be read: permission denied; check its permissions, and those of the folders it is in$"
    with pytest.raises(UsageError, match=rf"^x\.jsonl {refusal}"):
        opened("x.jsonl")

    def denied(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "is_dir", denied)  # of a file in a folder that may not be searched
    for name in ("closed/x.jsonl", "closed/"):
        with pytest.raises(UsageError, match=rf"^{name} {refusal}"):
            opened(name)


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs a file whose first byte cannot be read")
def test_a_file_on_a_failing_disk_gives_the_rows_before_the_failure(folder):
    (folder / "x.jsonl").symlink_to("/proc/self/mem")
    with pytest.raises(InputCorrupt, match=r"^x\.jsonl breaks off at its start: Input/output error; "):
        columns("x.jsonl")


def test_a_parquet_file_with_a_broken_row_group_gives_the_groups_before_it(folder):
    data = parquet_bytes(
        [{"n": i, "text": f"row {i} " * 20} for i in range(1000)], row_group_size=250, compression="gzip"
    )
    place = pq.read_metadata(io.BytesIO(data)).row_group(2).column(1).data_page_offset
    (folder / "x.parquet").write_bytes(data[:place] + b"\xff" * 200 + data[place + 200 :])
    numbers = []
    with pytest.raises(InputCorrupt, match=r"^x\.parquet breaks off after row 499: "):
        numbers.extend(row.columns["n"] for row in opened("x.parquet").rows())
    assert numbers == list(range(500))


def test_columns_with_one_name_in_every_file_give_one_note(folder):
    for name in ("a", "b", "c"):
        (folder / f"{name}.csv").write_text("prompt,n,n\nx,1,2\n")
    source = opened("*.csv")
    assert [row.columns for row in source.rows()] == [{"prompt": "x", "n": "1", "n_2": "2"}] * 3
    assert source.notes == ["a.csv has more than one column 'n': another one is read as 'n_2'"]


def test_a_column_of_a_type_that_arrow_does_not_have_is_not_called_damage(folder):
    numbers = pl.Series([2**100], dtype=pl.Int128)
    pl.DataFrame({"prompt": ["a"], "n": numbers}).write_parquet(folder / "x.parquet")
    with pytest.raises(InputCorrupt) as caught:
        list(opened("x.parquet").rows())
    assert str(caught.value).endswith(
        "Integers with more than 64 bits not implemented; the rows before that place are kept: "
        "write it with columns of other types, such as text, and run the same command again"
    )


def test_the_output_is_looked_at_once_however_many_files_a_folder_has(folder, monkeypatch):
    (folder / "in").mkdir()
    for name in "abcdefgh":
        (folder / "in" / f"{name}.jsonl").write_bytes(JSONL)
    (folder / "o.jsonl").symlink_to("in/c.jsonl")
    looks = []
    stat = Path.stat
    monkeypatch.setattr(Path, "stat", lambda self, **how: looks.append(self) or stat(self, **how))
    source = opened("in", output="o.jsonl")
    assert [Path(f.name).stem for f in source.files] == list("abdefgh")
    assert looks.count(Path("o.jsonl")) == 1


def test_the_fingerprint_changes_with_the_file(folder):
    (folder / "a.jsonl").write_bytes(JSONL)
    source = opened("a.jsonl")
    before = source.fingerprint()
    assert [(p["path"], p["size"]) for p in before] == [(str(folder / "a.jsonl"), len(JSONL))]
    assert source.fingerprint() == before
    assert opened("a.jsonl", encoding="cp1252").fingerprint() == [before[0] | {"encoding": "cp1252"}]
    (folder / "a.jsonl").write_bytes(JSONL + JSONL)
    assert source.fingerprint() != before


def test_the_schema_combines_those_of_all_parquet_files(folder):
    (folder / "a.parquet").write_bytes(parquet_bytes([{"n": 1}]))
    pq.write_table(pa.table({"n": pa.array([1], pa.int32()), "day": pa.array([0], pa.date32())}), folder / "b.parquet")
    pq.write_table(pa.table({"n": ["text"]}), folder / "c.parquet")
    (folder / "d.jsonl").write_bytes(JSONL)
    assert opened("a.parquet", "b.parquet").schema == pa.schema([("n", pa.int64()), ("day", pa.date32())])
    assert opened("a.parquet", "c.parquet").schema is None
    assert opened("a.parquet", "d.jsonl").schema is None


def test_a_url_without_fsspec_or_with_an_unknown_scheme_is_refused(monkeypatch):
    with pytest.raises(UsageError) as caught:
        opened("nosuch://x/y.jsonl")
    assert caught.value.message == "nosuch://x/y.jsonl cannot be read: Protocol not known: nosuch"
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(UsageError) as caught:
        opened("s3://x/y.jsonl")
    assert caught.value.hint == "pip install 'batchgen-llm[remote]' (fsspec and the store's package)"


def test_a_store_whose_package_is_not_in_the_extra_is_not_said_to_come_with_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "paramiko", None)
    with pytest.raises(UsageError, match="paramiko") as caught:
        opened("sftp://host/x.jsonl")
    assert caught.value.hint == "pip install that package: fsspec needs it for this store"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PAR1\x15\x04\x15\x10", "standard input is a Parquet file; use --input-format parquet"),
        (bz2.compress(JSONL), "standard input is compressed with bzip2; unpack it first: bzip2 -dc | batchgen run -"),
        (lzma.compress(JSONL), "standard input is compressed with xz; unpack it first: xz -dc | batchgen run -"),
        (b"PK\x03\x04", "standard input is compressed with zip; unpack it first: unzip -p | batchgen run -"),
        (
            JSONL.decode().encode("utf-16"),
            "standard input is in UTF-16, not in UTF-8; use --encoding utf-16",
        ),
    ],
)
def test_standard_input_in_another_format_is_refused_when_it_is_read(monkeypatch, data, message):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    source = opened("-")
    with pytest.raises(UsageError) as error:
        list(source.rows())
    assert str(error.value) == message


@pytest.mark.parametrize("name", ["PARENT", "PAR1"])
def test_a_csv_column_may_have_the_name_of_parquet(folder, monkeypatch, name):
    data = f"{name},prompt\n1,a\n".encode()
    (folder / "c.csv").write_bytes(data)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    for source in (opened("c.csv"), opened("-", format="csv")):
        assert [row.columns for row in source.rows()] == [{name: "1", "prompt": "a"}]
