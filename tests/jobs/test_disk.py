"""Full disks and files that vanish under a running job: a one-line error, and the same command continues once that is repaired."""

import errno
import json
import re
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from batchgen.errors import OutputError
from batchgen.jobs.files.disk import write_stats, writing
from support.harness import read_output, stored_keys
from support.params import slow_but

linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="stops are seen in /proc")
each = pytest.mark.parametrize("job", slow_but({"spooled"}, ["spooled", "windows"]), indirect=True)


@pytest.mark.parametrize("size", slow_but({600}, [600, 3_000, 30_000, 60_000]))
@pytest.mark.parametrize("job", ["spooled"], indirect=True)
def test_a_file_that_cannot_grow_ends_the_run_in_one_line_and_finished_rows_are_kept(job, size):
    """Limits the size of every file of the job with the system's own limit, so that write(2) first writes a part."""
    job.prepare()
    note = json.dumps({"note": "x" * 3_000})[1:]
    lines = (job.folder / "in.jsonl").read_text(encoding="utf-8").split("\n")
    (job.folder / "in.jsonl").write_text("\n".join(x[:-1] + ", " + note if x.endswith("}") else x for x in lines))
    job.keep_state()
    job.run()
    job.expected = read_output(job.output)
    job.reset()
    ended = job.run(file_size=size)
    assert (ended.code, ended.out) == (1, "")
    # SQLite words the error differently.
    assert re.fullmatch(
        r"out\.jsonl\S* cannot be written: (File too large|disk I/O error); check the disk .+", ended.error
    )
    kept = stored_keys(job.job_folder)
    assert len(set(kept)) == len(kept)
    job.check_output(finished=False)
    job.go_on()


def test_too_few_files_that_may_be_open_are_not_blamed_on_the_disk():
    again = "run the same command again: finished rows are kept"
    said = f"o.jsonl.job cannot be written: Too many open files; raise the limit of open files (ulimit -n) and {again}"
    with pytest.raises(OutputError, match=f"^{re.escape(said)}$"), writing("o.jsonl.job"):
        raise OSError(errno.EMFILE, "Too many open files")


def test_a_database_that_sqlite_cannot_open_is_not_blamed_on_the_disk(tmp_path):
    """SQLite does not say why."""
    said = r"^o cannot be written: unable to open .*; check its permissions and the limit of open files \(ulimit -n\)"
    with pytest.raises(OutputError, match=said), writing("o"), closing(sqlite3.connect(":memory:")) as db:
        db.execute("ATTACH DATABASE ? AS run", (str(tmp_path),))


@linux
@each
@pytest.mark.parametrize("what", slow_but({"all"}, ["job folder", "all"]))
def test_a_folder_deleted_under_a_running_job_ends_it_in_one_line(job, what):
    job.prepare()
    running = job.start(how="SIGSTOP", at=3, only=job.results)
    running.until_stopped()
    if what == "all":
        job.folder.rename(job.folder.with_name("gone"))
    else:
        shutil.rmtree(job.job_folder)
    running.kill(signal.SIGCONT)
    ended = running.wait()
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    if what == "all" and job.case.settings:  # the input is read again before anything is written
        assert ended.error.startswith("in.jsonl ")
    else:
        assert re.fullmatch(
            r"\S+ cannot be (written|read): No such file or directory; its folder was removed .+", ended.error
        )
    if what == "all":
        job.prepare()
    assert not job.output.exists()
    job.go_on()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("job", ["jsonl"], indirect=True)
def test_standard_output_and_stats_that_cannot_be_written_are_named(job):
    job.prepare()
    ended = job.run("-o", "-", stdout="/dev/full")
    assert ended.code == 1
    assert ended.error.startswith("standard output cannot be written: No space left on device; ")
    ended = job.run("--stats", "/dev/full")
    assert (ended.code, ended.error) == (1, "--stats /dev/full cannot be written: No space left on device")
    job.check_output(finished=True)
    assert job.run().code == job.case.code


def test_figures_for_standard_output_come_after_what_is_there_if_it_is_a_file(
    capfd,
):
    print("before", flush=True)
    write_stats("/dev/stdout", {"rows": 1})
    assert capfd.readouterr().out == 'before\n{\n  "rows": 1\n}\n'
