"""Free space on the disk is checked before a job begins."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from batchgen.errors import OutputError
from batchgen.jobs.place import check_space, min_bytes
from batchgen.records import RowForm, open_input

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch):
    def has(count: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(0, 0, count))

    return has


def test_a_disk_that_may_fill_up_is_mentioned(free):
    free(2999 << 20)
    assert check_space(Path("x.job"), 1000 << 20) == (
        "the disk of x.job has 2.9 GiB of free space, and the output alone needs 1000.0 MiB: the disk may fill up (finished rows would be kept)"
    )


def test_a_job_that_cannot_fit_is_not_begun(free, open_, write_input):
    write_input(["a", "b"])
    free(10)
    with pytest.raises(OutputError) as error:
        open_()
    assert str(error.value) == (
        "the disk of o.jsonl.job has 10 B of free space, and the output alone needs 32 B; "
        "free some space, carry fewer columns with --keep, or write elsewhere with -o and --work-dir"
    )
    assert not Path("o.jsonl.job").exists(), "no empty folder is left behind"
    free(1 << 40)
    job, _ = open_()
    job.close()


def test_the_minimum_output_size_is_known_only_from_json_lines_to_json_lines_with_all_columns(write_input):
    write_input(["a", "b"])
    source = open_input(["in.jsonl"], format=None, output=None)
    assert min_bytes(source, "o.jsonl", RowForm()) == 32
    assert min_bytes(source, "o.jsonl", RowForm(keep=())) == 0
    assert min_bytes(source, "o.jsonl.gz", RowForm()) == min_bytes(source, "o.parquet", RowForm()) == 0
