"""The column `input_file`: the file that a row came from, if there are several."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

X, Y = "data/x.jsonl", "data/y.jsonl"


@pytest.fixture
def column(runs, write_jsonl):
    """Runs a job over two files (or those that are named), and returns the column of its output."""
    Path("data").mkdir()
    write_jsonl([{"prompt": "a"}, {"prompt": "b"}], X)
    write_jsonl([{"prompt": "c"}], Y)

    def run(*names, output="o.jsonl", **options):
        runs.output = output
        run.answered = runs.run(None, inputs=names or (X, Y), **options)[0]
        return [row.get("input_file") for row in runs.rows()]

    return run


@pytest.mark.parametrize("output", ["o.jsonl", "o.parquet"])
def test_rows_of_several_files_have_the_file_name_that_the_user_gave(output, column, runs):
    assert column(output=output) == [X, X, Y]
    assert list(runs.rows()[0])[:3] == ["id", "input_file", "prompt"]
    if output == "o.parquet":
        assert pq.read_schema(output).field("input_file") == pa.field("input_file", pa.string())


def test_only_rows_of_several_files_have_the_column_and_changing_it_generates_nothing(column, runs):
    column(X)
    assert "input_file" not in runs.rows()[0]
    assert column() == [X, X, Y]
    assert column.answered == ["c"]
    assert column(keep=()) == [None, None, None]
    assert column.answered == []


def test_a_malformed_row_has_its_file_name(column):
    Path(Y).write_text("{not JSON\n")
    assert column() == [X, X, Y]


def test_a_column_named_input_file_is_carried_as_input_input_file(column, runs):
    Path(Y).write_text(json.dumps({"prompt": "c", "input_file": "mine", "input_input_file": 1}) + "\n")
    column()
    assert {name: value for name, value in runs.rows()[2].items() if "file" in name} == {
        "input_file": Y, "input_input_input_file": "mine", "input_input_file": 1,
    }  # fmt: skip
    assert column(Y, output="one.jsonl") == ["mine"]
