"""The column `input_file`: the file that a row came from, if there are several."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def output(name="o.jsonl"):
    if name.endswith("parquet"):
        return pq.read_table(name).to_pylist()
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def column(name="o.jsonl"):
    return [row.get("input_file") for row in output(name)]


@pytest.fixture
def two(write_input):
    Path("data").mkdir()
    write_input(["a", "b"], "data/x.jsonl")
    write_input(["c"], "data/y.jsonl")
    return "data/x.jsonl", "data/y.jsonl"


@pytest.mark.parametrize("name", ["o.jsonl", "o.parquet"])
def test_rows_of_several_files_have_the_file_name_that_the_user_gave(name, run, two):
    run(name, inputs=two)
    assert list(output(name)[0])[:3] == ["id", "input_file", "prompt"]
    assert column(name) == ["data/x.jsonl", "data/x.jsonl", "data/y.jsonl"]
    if name == "o.parquet":
        assert pq.read_schema(name).field("input_file") == pa.field("input_file", pa.string())


def test_only_rows_of_several_files_have_the_column_and_changing_it_generates_nothing(run, two):
    run(inputs=two[:1])
    assert "input_file" not in output()[0]
    assert run(inputs=two)[1] == ["c"]
    assert column() == ["data/x.jsonl", "data/x.jsonl", "data/y.jsonl"]
    assert run(inputs=two, keep=())[1] == []
    assert column() == [None, None, None]


def test_a_malformed_row_has_its_file_name(run, two):
    Path("data/y.jsonl").write_text("{not JSON\n")
    run(inputs=two)
    assert column() == ["data/x.jsonl", "data/x.jsonl", "data/y.jsonl"]


def test_a_column_named_input_file_is_carried_as_input_input_file(run, two):
    row = {"prompt": "c", "input_file": "mine", "input_input_file": 1}
    Path("data/y.jsonl").write_text(json.dumps(row) + "\n")
    run(inputs=two)
    assert {k: v for k, v in output()[2].items() if "file" in k} == {
        "input_file": "data/y.jsonl",
        "input_input_input_file": "mine",
        "input_input_file": 1,
    }
    run("one.jsonl", inputs=two[1:])
    assert output("one.jsonl")[0]["input_file"] == "mine"
