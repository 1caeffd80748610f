"""Several completions, log-probabilities, labels, scores and grammars by `batchgen run`: the rows that come out."""

import csv
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.records import json_rows

pytestmark = pytest.mark.usefixtures("loaded_once")


def test_rows_of_a_schema_say_whether_their_text_is_valid_and_have_its_value(
    cli, write_jsonl, tiny_model_dir, tmp_path
):
    schema, stats = tmp_path / "schema.json", tmp_path / "stats.json"
    schema.write_text('{"type": "object", "properties": {"a": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2},'
                      '"b": {"type": ["boolean", "null"]}}, "required": ["a", "b"]}')  # fmt: skip
    rows = [{"prompt": "x", "valid": "of the input"}, {"prompt": "y", "sampling_params": {"max_tokens": 3}}, {"id": 1}]
    options = ("-m", tiny_model_dir, "--json-schema", schema, "--stats", stats, "--temperature", "1")
    for output in (tmp_path / "o.jsonl", tmp_path / "o.parquet"):
        outcome = cli("run", write_jsonl(rows), *options, "-o", output)
        assert outcome.code == 3
        assert "1 of 2 completions ends in the middle of its JSON; run again with --retry length" in outcome.err
        assert "objects of the JSON schema have no other keys" in outcome.err
        counts = {"valid": 1, "cut": 1, "invalid": 0}
        assert json.loads(stats.read_text())["json"] == counts
        outcome = cli(
            "run", write_jsonl(rows), *options, "-o", output, "--parse", "json"
        )  # is read back and written again
        figures = json.loads(stats.read_text())
        assert (figures["rows"], figures["json"], figures["job"]["json"]) == (1, None, counts)
        is_table = output.suffix == ".parquet"
        whole, cut, failed = pq.read_table(output).to_pylist() if is_table else json_rows(output)
        value = json.loads(whole["text"])
        assert (whole["valid"], whole["parsed"], whole["input_valid"]) == (True, value, "of the input")
        assert value["a"] in ([1, 1], [1, 2], [2, 1], [2, 2])
        assert (cut["valid"], cut["parsed"], cut["finish_reason"]) == (False, None, "length")
        assert (failed["valid"], failed["parsed"]) == (None, None)
        if is_table:
            parsed = pa.struct([("a", pa.list_(pa.int64())), ("b", pa.bool_())])
            assert pq.read_schema(output).field("parsed").type == parsed


def test_a_number_that_is_cut_is_not_valid(cli, write_jsonl, tiny_model_dir, tmp_path):
    """Its first digits are a number too."""
    schema, output = tmp_path / "schema.json", tmp_path / "o.jsonl"
    schema.write_text('{"type": "integer", "minimum": 1}')
    source = write_jsonl([{"prompt": f"{i}"} for i in range(12)])
    options = ("--temperature", "2", "--max-tokens", "4", "--parse", "json")
    assert cli("run", source, "-m", tiny_model_dir, "--json-schema", schema, *options, "-o", output).code == 0
    rows = json_rows(output)
    ends = [row["finish_reason"] for row in rows]
    assert {"stop", "length"} == set(ends)
    assert [row["valid"] for row in rows] == [end == "stop" for end in ends]
    assert [row["parsed"] for row in rows] == [int(row["text"]) if row["valid"] else None for row in rows]
    figures = json.loads((tmp_path / "o.jsonl.job" / "stats.json").read_text())["json"]
    assert figures == {"valid": ends.count("stop"), "cut": ends.count("length"), "invalid": 0}


@pytest.mark.parametrize("name", ["o.jsonl", "o.parquet", "o.csv"])
def test_each_of_several_completions_says_whether_it_is_valid_and_has_its_value(
    cli, write_jsonl, tiny_model_dir, tmp_path, name
):
    schema, output = tmp_path / "schema.json", tmp_path / name
    schema.write_text('{"type": "array", "items": {"type": "integer", "minimum": 1}}')
    rows: list[dict[str, Any]] = [{"prompt": f"{i}"} for i in range(6)]
    options = ("-m", tiny_model_dir, "-n", "3", "--temperature", "2", "--max-tokens", "5", "-o", output)
    for count, more in ((5, ()), (6, ("--parse", "json"))):  # the second run reads the rows of the first one back
        outcome = cli("run", write_jsonl(rows[:count]), "--json-schema", schema, *options, *more)
        assert outcome.code == 0
    if output.suffix == ".csv":
        with output.open(newline="") as file:
            choices = [json.loads(row["choices"]) for row in csv.DictReader(file)]
    else:
        read = pq.read_table(output).to_pylist() if output.suffix == ".parquet" else json_rows(output)
        assert [(row["valid"], row["parsed"]) for row in read] == [
            (row["choices"][0]["valid"], row["choices"][0]["parsed"]) for row in read
        ]
        choices = [row["choices"] for row in read]
    every = [choice for row in choices for choice in row]
    ends = [choice["finish_reason"] for choice in every]
    assert (len(every), {*ends}) == (18, {"stop", "length"})
    assert [choice["valid"] for choice in every] == [end == "stop" for end in ends]
    assert [c["parsed"] for c in every] == [json.loads(c["text"]) if c["valid"] else None for c in every]
    figures = json.loads((tmp_path / f"{name}.job" / "stats.json").read_text())
    assert figures["job"]["json"] == {"valid": ends.count("stop"), "cut": ends.count("length"), "invalid": 0}
    assert f"{ends.count('length')} of 18 completions end in the middle of their JSON" in outcome.err


def test_completions_of_a_rows_own_schema_say_in_a_table_whether_they_are_valid(
    cli, write_jsonl, tiny_model_dir, tmp_path
):
    own = {"sampling_params": {"json_schema": {"enum": [1]}, "n": 2, "max_tokens": 4}}
    for carried in ({}, {"valid": "of the input"}):
        output = tmp_path / f"{len(carried)}.parquet"
        source = write_jsonl([{"prompt": "x"} | own | carried, {"prompt": "y", "sampling_params": {"n": 2}}])
        assert cli("run", source, "-m", tiny_model_dir, "-o", output).code == 0
        found = [[choice["valid"] for choice in row["choices"]] for row in pq.read_table(output).to_pylist()]
        assert found == [[True, True], [None, None]]


def test_a_value_of_a_rows_own_schema_that_does_not_fit_the_column_is_in_the_text_alone(
    cli, write_jsonl, tiny_model_dir, tmp_path
):
    schema, output = tmp_path / "schema.json", tmp_path / "o.parquet"
    schema.write_text('{"type": "object", "properties": {"v": {"type": "boolean"}}, "required": ["v"]}')
    own: list[Any] = [
        None,
        {"type": "boolean"},
        {"properties": {"w": {"enum": [1]}}, "required": ["w"], "type": "object"},
    ]
    source = write_jsonl([{"prompt": "a", "sampling_params": one and {"json_schema": one}} for one in own])
    options = ("--json-schema", schema, "--parse", "json", "--max-tokens", "40")
    assert cli("run", source, "-m", tiny_model_dir, *options, "-o", output).code == 0
    rows = pq.read_table(output).to_pylist()
    assert [row["valid"] for row in rows] == [True] * 3
    assert rows[0]["parsed"] == json.loads(rows[0]["text"])
    assert [row["parsed"] for row in rows[1:]] == [None, None]
    assert rows[2]["text"] == '{"w": 1}'


@pytest.mark.parametrize(
    ("name", "options"), [("o.jsonl", ()), ("o.parquet", ()), ("o.jsonl", ("--output-format", "openai"))]
)
def test_rows_with_a_schema_of_their_own_stay_valid_when_the_job_goes_on(
    cli, write_jsonl, tiny_model_dir, tmp_path, name, options
):
    own = json.dumps({"json_schema": {"enum": [1]}})
    rows = [{"prompt": "x", "sampling_params": own}, {"prompt": "y", "sampling_params": None}]
    source, output = tmp_path / f"in{name[1:]}", tmp_path / name
    for count, more in ((1, options), (2, ())):
        if output.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows[:count]), source)
        else:
            source = write_jsonl(rows[:count])
        assert cli("run", source, "-m", tiny_model_dir, "-o", output, "--max-tokens", "4", *more).code == 0
    figures = json.loads((tmp_path / f"{name}.job" / "stats.json").read_text())
    assert figures["job"]["json"] == {"valid": 1, "cut": 0, "invalid": 0}
    written = pq.read_table(output).to_pylist() if output.suffix == ".parquet" else json_rows(output)
    assert [row.get("valid") for row in written] == [True, None]


def test_a_table_has_valid_of_rows_with_a_schema_of_their_own_among_the_columns_of_results(
    cli, write_jsonl, tiny_model_dir, tmp_path
):
    rows: list[dict[str, Any]] = [{"prompt": "x", "sampling_params": {"json_schema": {"enum": [1]}}}, {"prompt": "y"}]
    results = ["text", "finish_reason", "usage", "truncated"]
    carried: dict[str, Any]
    for carried, after in (({}, [*results, "valid"]), ({"valid": "of the input"}, ["valid", *results])):
        source = write_jsonl([rows[0], rows[1] | carried])
        table, text = tmp_path / f"{len(carried)}.parquet", tmp_path / f"{len(carried)}.csv"
        for output in (table, text):
            assert cli("run", source, "-m", tiny_model_dir, "-o", output, "--max-tokens", "4").code == 0
        names = ["id", "prompt", "sampling_params", *after, "error"]
        assert pq.read_schema(table).names == text.read_text().splitlines()[0].split(",") == names
        first, second = pq.read_table(table)["valid"].to_pylist()
        assert (first, second) == (("true", '"of the input"') if carried else (True, None))


def test_parquet_to_parquet_has_a_column_for_what_rows_may_ask_for(cli, tiny_model_dir, tmp_path):
    prompts = {"prompt": ["a", "b"]}
    cases: list[tuple[dict[str, Any], tuple[str, ...], list[str]]] = [
        (prompts, (), []),
        (prompts, ("-n", "2"), ["choices"]),
        (prompts, ("--choices", "x,y"), ["choice_probs"]),
        (prompts | {"sampling_params": [{"n": 2}, {"n": None}]}, (), ["choices"]),
        (prompts | {"sampling_params": [{"seed": 2}, None]}, (), []),
        (prompts | {"n": [None, 2]}, ("--row-params", "n"), ["choices"]),
        (prompts | {"completion": ["c", "d"]}, ("--score",), ["score"]),
    ]
    usual = ["text", "finish_reason", "usage", "truncated", "error"]
    for number, (columns, options, extra) in enumerate(cases):
        source = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table(columns), source)
        outcome = cli("run", source, "-m", tiny_model_dir, "--max-tokens", "2", *options)
        assert (outcome.code, outcome.err.count("error")) == (0, 0)
        table = pq.read_table(tmp_path / f"{number}.out.parquet")
        assert table.column_names == ["id", *columns, *usual[:-1], *extra, usual[-1]]
        for name in extra:
            assert any(value is not None for value in table[name].to_pylist())
