"""Whole jobs that read from an object store and write to it: exit codes and messages."""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.usefixtures("loaded_once")

PROMPTS = ["one", "two", "three"]


@pytest.fixture
def store(s3):
    s3.pipe_file("bucket/in/a.jsonl", b"".join(json.dumps({"prompt": p}).encode() + b"\n" for p in PROMPTS))
    return s3


@pytest.fixture
def run(cli, tiny_model_dir):
    def run(*inputs, output, **options):
        flags = [part for name, value in options.items() for part in (f"--{name}", value)]
        return cli("run", *inputs, "-m", tiny_model_dir, "--max-tokens", "4", "-o", output, *flags)

    return run


def test_a_job_in_a_store_writes_the_same_output_as_on_disk_and_runs_once(store, run, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(store.cat_file("bucket/in/a.jsonl"))
    assert run(tmp_path / "a.jsonl", output=tmp_path / "o.jsonl").code == 0
    assert run("s3://bucket/in/a.jsonl", output="s3://bucket/o.jsonl").code == 0
    assert store.cat_file("bucket/o.jsonl") == (tmp_path / "o.jsonl").read_bytes()
    again = run("s3://bucket/in/a.jsonl", output="s3://bucket/o.jsonl")
    assert (again.code, again.out) == (0, "")
    assert "nothing to do" in again.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "cache", "o.jsonl", "o.jsonl.job"]


def test_a_folder_of_parquet_in_a_store_becomes_parquet_with_the_file_of_each_row(store, run):
    for name in "xy":
        stream = io.BytesIO()
        pq.write_table(pa.table({"prompt": [name], "at": pa.array([1], pa.timestamp("ns", "UTC"))}), stream)
        store.pipe_file(f"bucket/parquet/{name}.parquet", stream.getvalue())
    assert run("s3://bucket/parquet", output="s3://bucket/parquet/out.parquet").code == 0
    table = pq.read_table(io.BytesIO(store.cat_file("bucket/parquet/out.parquet")))
    assert table["input_file"].to_pylist() == ["s3://bucket/parquet/x.parquet", "s3://bucket/parquet/y.parquet"]
    assert table.schema.field("at").type == pa.timestamp("ns", "UTC")
    assert (
        run("s3://bucket/parquet", output="s3://bucket/parquet/out.parquet").code == 0
    )  # the output is not read as an input
