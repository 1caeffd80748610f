"""Outputs in an object store: the job's folder, recognizing the object, crashes and store errors."""

import re
from pathlib import Path

import fsspec
import pytest

from batchgen.errors import InputCorrupt, OutputError, UsageError
from batchgen.jobs.files import target
from batchgen.jobs.files.manifest import Manifest
from batchgen.jobs.files.target import LocalTarget, RemoteTarget, known_as, open_target
from batchgen.records.output import job_path, jobs_folder
from support.params import slow_but
from support.runs import FINISHED_FILES

HINT = "check the address, your access to it and the connection, or use another -o"


@pytest.fixture
def memory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fs = fsspec.filesystem("memory")
    monkeypatch.setattr(type(fs), "store", {})
    monkeypatch.setattr(type(fs), "pseudo_dirs", [""])
    fs.mkdir("/bucket")
    return fs


@pytest.fixture
def place(request, runs):
    """A file system and the output of `runs` in it, by the name of the store."""
    kind = getattr(request, "param", "memory")
    if kind == "local":
        return fsspec.filesystem("file"), str(runs.output)
    runs.output = f"{kind}://bucket/out/o.jsonl"
    return request.getfixturevalue(kind), runs.output


anywhere = pytest.mark.parametrize("place", ["local", "memory", "s3"], indirect=True)
in_a_store = pytest.mark.parametrize("place", ["memory", "s3"], indirect=True)


def everything(fs):
    fs.invalidate_cache()
    return sorted(p.removeprefix("/") for p in fs.find("bucket"))


@anywhere
def test_an_edited_output_is_not_replaced_but_an_identical_copy_is(place, runs):
    fs, url = place
    runs.run(["a"])
    fs.pipe_file(url, fs.cat_file(url))
    assert runs.run(["a"])[1].already_finished
    fs.pipe_file(url, fs.cat_file(url).replace(b"a: a", b"a: b"))
    with pytest.raises(UsageError) as caught:
        runs.run(["a"])
    assert str(caught.value) == (
        f"{url} was changed since batchgen wrote it; move it away, or use --overwrite to start again"
    )
    assert runs.run(["a"], overwrite=True)[0] == ["a"]
    assert runs.texts() == ["a: a"]


@anywhere
def test_an_unknown_output_is_only_replaced_with_overwrite(place, runs):
    fs, url = place
    fs.pipe_file(url, b"mine\n")
    with pytest.raises(UsageError) as caught:
        runs.run(["a"])
    assert str(caught.value) == (
        f"{url} exists and has no job folder, so batchgen does not know whether it may replace it; use the --work-dir of its run if it had one, --overwrite to replace it, or another -o"
    )
    assert not runs.job_folder.exists()
    runs.run(["a"], overwrite=True, most=0)
    assert fs.cat_file(url) == b"mine\n"
    assert runs.run(["a"])[0] == ["a"]  # the job began with --overwrite
    assert runs.texts() == ["a: a"]


def crash(patch, owner, method, at, *, after):
    """Makes call `at` (from 1) of a method die, before or `after` it has done its work."""
    real = getattr(owner, method)
    calls = []

    def crashing(*args):
        calls.append(1)
        if len(calls) == at and not after:
            raise KeyboardInterrupt
        done = real(*args)
        if len(calls) == at:
            raise KeyboardInterrupt
        return done

    patch.setattr(owner, method, crashing)


@pytest.mark.parametrize("place", slow_but(["local", "memory"], ["local", "memory", "s3"]), indirect=True)
@pytest.mark.parametrize("again", slow_but([True], [False, True]))
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", ["save", "put", "last save"])
def test_a_crash_while_finishing_loses_nothing(step, after, again, place, runs, monkeypatch):
    """In a first run, and in a run over a finished output."""
    rows = ["a", "b"]
    if again:
        runs.run(rows)
        rows.append("c")
    for _ in range(1 if (step, after) == ("last save", True) else 2):  # the run after the crash crashes too
        with monkeypatch.context() as patch:
            if step == "put":
                crash(patch, LocalTarget if place[1] == "o.jsonl" else RemoteTarget, "put", 1, after=after)
            else:
                crash(patch, Manifest, "save", 2 if step == "save" else 3, after=after)
            with pytest.raises(KeyboardInterrupt):
                runs.run(rows)
    assert runs.run(rows)[0] == []
    assert runs.texts() == [f"a: {row}" for row in rows]
    assert sorted(p.name for p in runs.job_folder.iterdir()) == FINISHED_FILES
    assert runs.run(rows)[1].already_finished


def _refuse(*args, **options):
    raise PermissionError("Access Denied")


@in_a_store
def test_a_failed_upload_is_a_one_line_error_and_nothing_is_generated_again(place, runs, monkeypatch):
    fs, url = place
    with monkeypatch.context() as patch:
        patch.setattr(fs, "put_file", _refuse)
        with pytest.raises(OutputError) as caught:
            runs.run(["a", "b"])
    assert str(caught.value) == (
        f"{url} cannot be written: Access Denied; "
        "check the connection and your access, and run the same command again: finished rows are kept"
    )
    assert everything(fs) == []
    with monkeypatch.context() as patch:
        patch.setattr(fs, "put_file", lambda here, there, **options: fs.pipe_file(there, b"{"))
        with pytest.raises(OutputError, match=r"cannot be written: 1 of \d+ bytes arrived; "):
            runs.run(["a", "b"])
    if "s3" in fs.protocol:  # S3 never stores a part of an upload
        fs.rm_file(url.partition("://")[2])
    assert runs.run(["a", "b"])[0] == []
    assert runs.texts() == ["a: a", "a: b"]


@pytest.mark.parametrize("failure", [PermissionError("Access Denied"), FileNotFoundError("bucket/in.jsonl")])
def test_an_input_whose_store_falls_silent_while_the_job_runs_fails_the_job_and_not_the_command(
    failure, memory, runs, monkeypatch
):
    memory.pipe_file("/bucket/in.jsonl", b'{"prompt": "a"}\n{"prompt": "b"}\n')

    def fail(path):
        raise failure

    with monkeypatch.context() as patch:

        def lose_the_store(prompt):
            patch.setattr(memory, "info", fail)
            return "stop"

        runs.reason = lose_the_store
        with pytest.raises(InputCorrupt) as caught:
            runs.run(None, inputs="memory://bucket/in.jsonl")
    assert str(caught.value) == (
        f"memory://bucket/in.jsonl cannot be read: {failure}; "
        "check the connection and run the same command again: finished rows are kept"
    )
    assert runs.run(None, inputs="memory://bucket/in.jsonl")[0] == []
    assert runs.texts() == ["a: a", "a: b"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://nobucket/o.jsonl", f"s3://nobucket/o.jsonl cannot be written: The specified bucket does not exist; {HINT}"),
        ("s3://bucket/folder", "the output s3://bucket/folder has an unknown suffix; use .jsonl, .csv, .tsv (or one of them with .gz or .zst) or .parquet, or - for standard output"),
        ("s3://bucket/folder.jsonl", "the output s3://bucket/folder.jsonl is a folder; name a file in it"),
        ("zip://o.jsonl::s3://bucket/a.zip", "the output zip://o.jsonl::s3://bucket/a.zip is a file inside an archive; write it as a separate file"),
        ("https://host/o.jsonl", "the output https://host/o.jsonl is a web address; name a local file, or a store: s3://bucket/o.jsonl"),
        ("nosuch://bucket/o.jsonl", "nosuch://bucket/o.jsonl cannot be written: Protocol not known: nosuch; use a path, or a URL such as s3://bucket/rows.jsonl"),
        ("s3://bucket/denied.jsonl", f"s3://bucket/denied.jsonl cannot be written: Access Denied; {HINT}"),
    ],
)  # fmt: skip
def test_an_output_that_cannot_be_written_is_refused_before_the_run_and_nothing_is_touched(
    url, message, s3, runs, monkeypatch
):
    names = ["bucket/folder.jsonl/x", "bucket/folder/x"]
    for name in names:
        s3.pipe_file(name, b"1")
    if "denied" in url:
        monkeypatch.setattr("s3fs.core.S3File._initiate_upload", _refuse)
    runs.output = url
    with pytest.raises(UsageError) as caught:
        runs.run(["a"])
    assert str(caught.value) == message
    assert not jobs_folder().exists()
    assert everything(s3) == names


@in_a_store
def test_checking_write_permission_leaves_nothing_behind(place):
    fs, url = place
    fs.pipe_file(url, b"mine\n")
    before = fs.info(url.partition("://")[2])
    open_target(url).check()
    fs.invalidate_cache()
    assert fs.info(url.partition("://")[2]) == before
    assert everything(fs) == ["bucket/out/o.jsonl"]
    if "s3" in fs.protocol:
        assert "Uploads" not in fs.call_s3("list_multipart_uploads", Bucket="bucket")


def test_without_atomic_uploads_the_file_is_uploaded_under_another_name_first(place, runs, monkeypatch):
    fs, _ = place
    seen = []

    def looking(self, source, to):
        seen.append((sorted(self.store), source, to))
        type(self).__mro__[1].mv(self, source, to)

    monkeypatch.setattr(type(fs), "mv", looking)
    runs.run(["a"])
    assert seen == [(["/bucket/out/.o.jsonl.new"], "/bucket/out/.o.jsonl.new", "/bucket/out/o.jsonl")]
    assert sorted(fs.store) == ["/bucket/out/o.jsonl"]


def test_without_object_versions_the_object_is_read_to_recognize_it(place, runs, monkeypatch):
    fs, url = place
    monkeypatch.setattr(target, "object_version", lambda info: None)
    runs.run(["a"])
    assert runs.run(["a"])[1].already_finished
    fs.pipe_file(url, fs.cat_file(url).replace(b"a: a", b"a: b"))
    with pytest.raises(UsageError, match="was changed since batchgen wrote it"):
        runs.run(["a"])


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


@pytest.fixture
def no_home(monkeypatch):
    """A user that the system does not know, without the variable HOME."""

    def home(cls):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", classmethod(home))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def test_only_the_job_of_a_remote_output_needs_a_home_or_a_work_dir(no_home, runs):
    assert runs.run(["p", "q"])[0] == ["p", "q"]
    assert runs.run(["p", "q", "r"])[0] == ["r"]
    assert job_path("s3://bucket/o.jsonl", "work") == Path("work/o.jsonl.job")
    message = "s3://bucket/o.jsonl needs a folder for its job, and there is no cache: Could not determine home directory.; name one with --work-dir"
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        job_path("s3://bucket/o.jsonl", None)


def test_without_a_home_a_remote_input_is_no_output(memory, no_home, runs):
    memory.pipe("/bucket/in/a.jsonl", b'{"prompt": "p"}\n')
    assert runs.run(None, inputs="memory://bucket/in/")[0] == ["p"]
