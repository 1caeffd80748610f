"""Outputs in an object store: the job's folder, recognizing the object, crashes and store errors."""

import json
from pathlib import Path

import fsspec
import pytest

from batchgen.errors import OutputError, UsageError
from batchgen.jobs.files import target
from batchgen.jobs.files.manifest import Manifest
from batchgen.jobs.files.target import LocalTarget, RemoteTarget, known_as, open_target
from batchgen.records.output import job_path, jobs_folder
from support.jobs import FINISHED_FILES, crash
from support.params import slow_but

HINT = "check the address, your access to it and the connection, or use another -o"


@pytest.fixture(params=["memory", "s3"])
def store(request):
    """A store's file system and the URL of an output in it."""
    return request.getfixturevalue(request.param), f"{request.param}://bucket/out/o.jsonl"


@pytest.fixture(params=["local", "memory", "s3"])
def place(request, tmp_path, monkeypatch):
    """The same, and a folder of this machine."""
    if request.param == "local":
        monkeypatch.chdir(tmp_path)
        return fsspec.filesystem("file"), "o.jsonl"
    return request.getfixturevalue(request.param), f"{request.param}://bucket/out/o.jsonl"


@pytest.fixture
def memory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fs = fsspec.filesystem("memory")
    monkeypatch.setattr(type(fs), "store", {})
    monkeypatch.setattr(type(fs), "pseudo_dirs", [""])
    fs.mkdir("/bucket")
    return fs


def lines(fs, url):
    fs.invalidate_cache()
    return [json.loads(line)["text"] for line in fs.cat_file(url).splitlines()]


def everything(fs):
    fs.invalidate_cache()
    return sorted(p.removeprefix("/") for p in fs.find("bucket"))


def test_an_edited_output_is_not_replaced_but_an_identical_copy_is(place, run, write_input):
    fs, url = place
    write_input(["a"])
    run(url)
    fs.pipe_file(url, fs.cat_file(url))
    assert run(url)[0].finished == {"rows": 1}
    fs.pipe_file(url, fs.cat_file(url).replace(b"A", b"B"))
    with pytest.raises(UsageError) as caught:
        run(url)
    assert (
        str(caught.value)
        == f"{url} was changed since batchgen wrote it; move it away, or use --overwrite to start again"
    )
    assert run(url, overwrite=True)[1] == ["a"]
    assert lines(fs, url) == ["A"]


def test_an_unknown_output_is_only_replaced_with_overwrite(place, run, write_input):
    fs, url = place
    write_input(["a"])
    fs.pipe_file(url, b"mine\n")
    with pytest.raises(UsageError) as caught:
        run(url)
    assert str(caught.value) == (
        f"{url} exists and has no job folder, so batchgen does not know whether it may replace it; use the --work-dir of its run if it had one, --overwrite to replace it, or another -o"
    )
    assert not job_path(url, None).exists()
    run(url, overwrite=True, stop_after=0)
    assert fs.cat_file(url) == b"mine\n"
    assert run(url)[1] == ["a"]  # the job began with --overwrite
    assert lines(fs, url) == ["A"]


@pytest.mark.parametrize("place", slow_but(["local", "memory"], ["local", "memory", "s3"]), indirect=True)
@pytest.mark.parametrize("again", slow_but([True], [False, True]))
@pytest.mark.parametrize(
    "step", ["save, before", "save, after", "put, before", "put, after", "last save, before", "last save, after"]
)
def test_a_crash_while_finishing_loses_nothing(step, again, place, monkeypatch, run, write_input):
    """In a first run, and in a run over a finished output."""
    fs, url = place
    write_input(["a", "b"])
    if again:
        run(url)
        write_input(["a", "b", "c"])
    what, _, when = step.partition(", ")
    after = when == "after"
    for _ in range(2):  # the run after the crash crashes too
        with monkeypatch.context() as patch:
            if what == "put":
                crash(patch, LocalTarget if url == "o.jsonl" else RemoteTarget, "put", 1, after=after)
            else:
                crash(patch, Manifest, "save", 2 if what == "save" else 3, after=after)
            if (what, when) == ("last save", "after"):
                with pytest.raises(KeyboardInterrupt):
                    run(url)
                break
            with pytest.raises(KeyboardInterrupt):
                run(url)
    assert run(url)[1] == []
    assert lines(fs, url) == (["A", "B", "C"] if again else ["A", "B"])
    assert sorted(p.name for p in job_path(url, None).iterdir()) == FINISHED_FILES
    assert run(url)[0].finished is not None


def test_a_failed_upload_is_a_one_line_error_and_nothing_is_generated_again(store, monkeypatch, run, write_input):
    fs, url = store
    write_input(["a", "b"])
    with monkeypatch.context() as patch:
        patch.setattr(fs, "put_file", _refuse)
        with pytest.raises(OutputError) as caught:
            run(url)
    assert str(caught.value) == (
        f"{url} cannot be written: Access Denied; "
        "check the connection and your access, and run the same command again: finished rows are kept"
    )
    assert everything(fs) == []
    assert run(url)[1] == []
    assert lines(fs, url) == ["A", "B"]


def test_a_truncated_upload_is_an_error_and_is_repeated(monkeypatch, store, run, write_input):
    fs, url = store
    write_input(["a", "b"])
    with monkeypatch.context() as patch:
        patch.setattr(fs, "put_file", lambda here, there, **options: fs.pipe_file(there, b"{"))
        with pytest.raises(OutputError, match=r"cannot be written: 1 of \d+ bytes arrived; "):
            run(url)
    if "s3" in fs.protocol:  # S3 never stores a part of an upload
        fs.rm_file(url.partition("://")[2])
    assert run(url)[1] == []
    assert lines(fs, url) == ["A", "B"]


def _refuse(*args, **options):
    raise PermissionError("Access Denied")


def test_an_output_that_cannot_be_written_is_refused_before_the_run_and_nothing_is_touched(
    s3, monkeypatch, run, write_input
):
    write_input(["a"])
    s3.pipe_file("bucket/folder/x", b"1")
    for url, message in (
        ("s3://nobucket/o.jsonl", f"s3://nobucket/o.jsonl cannot be written: The specified bucket does not exist; {HINT}"),
        ("s3://bucket/folder", "the output s3://bucket/folder has an unknown suffix; use .jsonl, .csv, .tsv (or one of them with .gz or .zst) or .parquet, or - for standard output"),
        ("zip://o.jsonl::s3://bucket/a.zip", "the output zip://o.jsonl::s3://bucket/a.zip is a file inside an archive; write it as a separate file"),
        ("https://host/o.jsonl", "the output https://host/o.jsonl is a web address; name a local file, or a store: s3://bucket/o.jsonl"),
        ("nosuch://bucket/o.jsonl", "nosuch://bucket/o.jsonl cannot be written: Protocol not known: nosuch; use a path, or a URL such as s3://bucket/rows.jsonl"),
    ):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            run(url)
        assert str(caught.value) == message
    s3.pipe_file("bucket/folder.jsonl/x", b"1")
    with pytest.raises(UsageError) as caught:
        run("s3://bucket/folder.jsonl")
    assert str(caught.value) == "the output s3://bucket/folder.jsonl is a folder; name a file in it"
    monkeypatch.setattr("s3fs.core.S3File._initiate_upload", _refuse)
    with pytest.raises(UsageError) as caught:
        run("s3://bucket/o.jsonl")
    assert str(caught.value) == f"s3://bucket/o.jsonl cannot be written: Access Denied; {HINT}"
    assert not jobs_folder().exists()
    assert everything(s3) == ["bucket/folder.jsonl/x", "bucket/folder/x"]


def test_checking_write_permission_leaves_nothing_behind(store):
    fs, url = store
    fs.pipe_file(url, b"mine\n")
    before = fs.info(url.partition("://")[2])
    open_target(url).check()
    fs.invalidate_cache()
    assert fs.info(url.partition("://")[2]) == before
    assert everything(fs) == ["bucket/out/o.jsonl"]
    if "s3" in fs.protocol:
        assert "Uploads" not in fs.call_s3("list_multipart_uploads", Bucket="bucket")


def test_without_atomic_uploads_the_file_is_uploaded_under_another_name_first(memory, monkeypatch, run, write_input):
    write_input(["a"])
    seen = []

    def looking(self, source, to):
        seen.append((sorted(self.store), source, to))
        type(self).__mro__[1].mv(self, source, to)

    monkeypatch.setattr(type(memory), "mv", looking)
    run("memory://bucket/o.jsonl")
    assert seen == [(["/bucket/.o.jsonl.new"], "/bucket/.o.jsonl.new", "/bucket/o.jsonl")]
    assert sorted(memory.store) == ["/bucket/o.jsonl"]


def test_without_object_versions_the_object_is_read_to_recognize_it(memory, monkeypatch, run, write_input):
    monkeypatch.setattr(target, "object_version", lambda info: None)
    write_input(["a"])
    run("memory://bucket/o.jsonl")
    assert run("memory://bucket/o.jsonl")[0].finished == {"rows": 1}
    memory.pipe_file("/bucket/o.jsonl", memory.cat_file("/bucket/o.jsonl").replace(b"A", b"B"))
    with pytest.raises(UsageError, match="was changed since batchgen wrote it"):
        run("memory://bucket/o.jsonl")


@pytest.mark.slow
def test_a_multipart_upload_is_recognized_again(s3, tmp_path):
    (tmp_path / "part").write_bytes(bytes(101 << 20))
    there = open_target("s3://bucket/big.jsonl")
    there.check()
    put = there.put(tmp_path / "part", "digest")
    assert put["version"].endswith('-3"')  # an ETag of three parts
    assert known_as(there, [put]) == put


def test_the_folder_of_a_remote_output_is_in_the_cache_or_the_work_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    folder = job_path("s3://bucket/a/o.jsonl", None)
    assert (folder.parent, folder.name) == (Path("/cache/batchgen/jobs"), "o.jsonl-2bd0369e871a9677.job")
    assert job_path("S3:///bucket/a/o.jsonl", None) == folder
    assert job_path("s3://bucket/b/o.jsonl", None) != folder
    assert job_path("s3://bucket/a/o.jsonl", "work") == Path("work/o.jsonl.job")
    assert len(job_path(f"s3://bucket/{'x' * 1000}.jsonl", None).name) < 150
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the XDG specification says to ignore relative paths
    monkeypatch.setenv("HOME", "/home/me")
    assert jobs_folder() == Path("/home/me/.cache/batchgen/jobs")
