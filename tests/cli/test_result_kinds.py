"""Several completions, log-probabilities, labels, scores and grammars by `batchgen run`: the rows that come out."""

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

DRAWN = ("--temperature", "1", "--max-tokens", "4", "--ignore-eos")


def test_several_completions_are_choices_and_the_text_is_the_first(
    cli, write_jsonl, read_jsonl, tiny_model_dir, tmp_path
):
    source, output = write_jsonl([{"prompt": "one"}, {"prompt": 2}]), tmp_path / "o.jsonl"
    assert cli("run", source, "-m", tiny_model_dir, "-o", output, "-n", "3", *DRAWN).code == 3
    row, failed = read_jsonl(output)
    assert list(row) == ["id", "prompt", "text", "finish_reason", "usage", "choices", "error"]
    assert [list(choice) for choice in row["choices"]] == [["index", "text", "finish_reason", "logprobs"]] * 3
    assert [(c["index"], c["finish_reason"], c["logprobs"]) for c in row["choices"]] == [
        (i, "length", None) for i in range(3)
    ]
    assert row["text"] == row["choices"][0]["text"]
    assert row["usage"] == {"prompt_tokens": 4, "completion_tokens": 12}
    assert len({c["text"] for c in row["choices"]}) > 1
    assert (failed["choices"], failed["error"]["type"]) == (None, "invalid_row")


def test_log_probabilities_are_those_of_every_token(cli, write_jsonl, read_jsonl, tiny_model_dir, tmp_path):
    source, output = write_jsonl([{"prompt": "one"}]), tmp_path / "o.jsonl"
    options = ("--logprobs", "2", "--max-tokens", "3", "--ignore-eos", "--token-ids")
    assert cli("run", source, "-m", tiny_model_dir, "-o", output, *options).code == 0
    (row,) = read_jsonl(output)
    (choice,) = row["choices"]
    assert choice["token_ids"] == row["token_ids"] == [token["token_id"] for token in choice["logprobs"]]
    for token in choice["logprobs"]:
        assert list(token) == ["token", "token_id", "logprob", "top"]
        assert len(token["top"]) == 2
        assert token["top"][0] == {name: token[name] for name in ("token", "token_id", "logprob")}  # greedy
        assert token["top"][1]["logprob"] <= token["logprob"] < 0


def test_a_score_is_that_of_the_completion_column(cli, write_jsonl, read_jsonl, tiny_model_dir, tmp_path):
    written = tmp_path / "w.jsonl"
    source = write_jsonl([{"prompt": "abc"}])
    greedy = ("--max-tokens", "5", "--logprobs", "0", "--ignore-eos")
    assert cli("run", source, "-m", tiny_model_dir, "-o", written, *greedy).code == 0
    (row,) = read_jsonl(written)
    likely = sum(token["logprob"] for token in row["choices"][0]["logprobs"])
    prompts = [
        {"prompt": "abc", "answer": row["text"]},
        {"prompt": "abc", "answer": "zzzzz"},
        {"prompt": "abc", "answer": ""},
        {"prompt": "abc"},
    ]
    output = tmp_path / "o.jsonl"
    source = write_jsonl(prompts, "answers.jsonl")
    score = ("--score", "--completion-column", "answer")
    assert cli("run", source, "-m", tiny_model_dir, "-o", output, *score).code == 3
    first, second, empty, without = read_jsonl(output)
    assert list(first) == ["id", "prompt", "answer", "text", "finish_reason", "usage", "score", "error"]
    assert (first["text"], first["finish_reason"], first["error"]) == (None, None, None)
    if "\ufffd" not in row["text"]:  # else its tokens are others
        assert first["score"] == {"logprob": pytest.approx(likely, abs=1e-3), "tokens": 5, "greedy": True}
    assert second["score"]["greedy"] is False
    assert empty["score"] == {"logprob": 0.0, "tokens": 0, "greedy": True}
    assert without["error"] == {"type": "invalid_row", "message": "column 'answer' is missing"}
    assert without["score"] is None


def test_rows_of_a_schema_say_whether_their_text_is_valid_and_have_its_value(
    cli, write_jsonl, read_jsonl, tiny_model_dir, tmp_path
):
    schema, stats = tmp_path / "schema.json", tmp_path / "stats.json"
    schema.write_text('{"type": "object", "properties": {"a": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2},'
                      '"b": {"type": ["boolean", "null"]}}, "required": ["a", "b"]}')  # fmt: skip
    rows = [{"prompt": "x", "valid": "of the input"}, {"prompt": "y", "sampling_params": {"max_tokens": 3}}, {"id": 1}]
    options = ("-m", tiny_model_dir, "--json-schema", schema, "--stats", stats, "--temperature", "1")
    for output in (tmp_path / "o.jsonl", tmp_path / "o.parquet"):
        outcome = cli("run", write_jsonl(rows), *options, "-o", output)
        assert outcome.code == 3
        assert "1 of 3 rows ends in the middle of its JSON; run again with --retry length" in outcome.err
        assert "objects of the JSON schema have no other keys" in outcome.err
        counts = {"valid": 1, "cut": 1, "invalid": 0}
        assert json.loads(stats.read_text())["json"] == counts
        outcome = cli(
            "run", write_jsonl(rows), *options, "-o", output, "--parse", "json"
        )  # is read back and written again
        figures = json.loads(stats.read_text())
        assert (figures["rows"], figures["json"], figures["job"]["json"]) == (1, None, counts)
        is_table = output.suffix == ".parquet"
        whole, cut, failed = pq.read_table(output).to_pylist() if is_table else read_jsonl(output)
        value = json.loads(whole["text"])
        assert (whole["valid"], whole["parsed"], whole["input_valid"]) == (True, value, "of the input")
        assert value["a"] in ([1, 1], [1, 2], [2, 1], [2, 2])
        assert (cut["valid"], cut["parsed"], cut["finish_reason"]) == (False, None, "length")
        assert (failed["valid"], failed["parsed"]) == (None, None)
        if is_table:
            parsed = pa.struct([("a", pa.list_(pa.int64())), ("b", pa.bool_())])
            assert pq.read_schema(output).field("parsed").type == parsed


def test_values_are_parsed_for_a_schema_only(cli, write_jsonl, tiny_model_dir):
    outcome = cli("run", write_jsonl([{"prompt": "a"}]), "-m", tiny_model_dir, "--parse", "json")
    assert (outcome.code, outcome.err) == (
        2, "batchgen: error: --parse json is for texts of --json-schema; add --json-schema FILE\n",
    )  # fmt: skip


def test_a_grammar_that_cannot_be_used_is_wrong_use_or_fails_its_row(
    cli, write_jsonl, read_jsonl, tiny_model_dir, tmp_path
):
    pytest.importorskip("llguidance")
    source, output = write_jsonl([{"prompt": "a", "sampling_params": {"regex": "(a"}}]), tmp_path / "o.jsonl"
    assert cli("run", source, "-m", tiny_model_dir, "-o", output).code == 3
    assert [row["error"]["type"] for row in read_jsonl(output)] == ["constraint_error"]
    outcome = cli("run", source, "-m", tiny_model_dir, "-o", tmp_path / "p.jsonl", "--regex", "(a")
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1].startswith("batchgen: error: --regex cannot be used: ")


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


def test_a_command_again_goes_on_and_other_labels_are_refused(cli, write_jsonl, tiny_model_dir, tmp_path):
    source, output = write_jsonl([{"prompt": "a"}, {"prompt": "b"}]), tmp_path / "o.jsonl"
    run = ("run", source, "-m", tiny_model_dir, "-o", output)
    assert cli(*run, "--choices", "x,y").code == 0
    whole = output.read_bytes()
    assert "nothing to do" in cli(*run, "--choices", "x,y", "--policy", "fifo", "--row-timeout", "9").err
    outcome = cli(*run, "--choices", "x,z")
    assert (outcome.code, output.read_bytes()) == (2, whole)
    assert 'was made with other settings: choices was ["x", "y"], is ["x", "z"]' in outcome.err
    write_jsonl([{"prompt": "b"}, {"prompt": "c"}, {"prompt": "a"}])
    outcome = cli(*run, "--choices", "x,y")
    assert (outcome.code, "1 done, 2 kept from an earlier run" in outcome.err) == (0, True)
    kept = {json.loads(line)["prompt"]: json.loads(line)["choice_probs"] for line in output.read_bytes().splitlines()}
    for line in whole.splitlines():
        row = json.loads(line)
        assert kept[row["prompt"]] == row["choice_probs"]


def test_rows_with_a_lower_priority_number_come_first(cli, write_jsonl, tiny_model_dir, tmp_path):
    prompts = [{"prompt": name, "urgency": urgency} for name, urgency in (("a", 2), ("b", None), ("c", -1), ("d", 1))]
    options = ("--priority-column", "urgency", "--batch-size", "1", "--order", "done", "--max-tokens", "2")
    outcome = cli("run", write_jsonl(prompts), "-m", tiny_model_dir, "-o", "-", *options)
    assert [row["prompt"] for row in outcome.rows] == ["c", "b", "d", "a"]


def test_a_policy_changes_the_order_of_the_work_and_not_its_rows(cli, write_jsonl, tiny_model_dir):
    source = write_jsonl({"prompt": f"{'ab'[i % 2] * 40}{i}"} for i in range(6))
    options = ("--batch-size", "1", "--order", "done", "--max-tokens", "3", "--temperature", "1")
    done = {
        policy: cli("run", source, "-m", tiny_model_dir, "-o", "-", "--policy", policy, *options).rows
        for policy in ("prefix", "prefill-first", "fifo")
    }
    assert [row["id"] for row in done["fifo"]] == [0, 1, 2, 3, 4, 5]
    assert [row["prompt"][0] for row in done["prefix"]] in (list("aaabbb"), list("bbbaaa"))
    in_order = [sorted(rows, key=lambda row: row["id"]) for rows in done.values()]
    assert in_order[0] == in_order[1] == in_order[2]


def test_a_row_that_runs_out_of_time_keeps_what_it_has_and_is_done(
    cli, write_jsonl, read_jsonl, tiny_model_dir, tmp_path
):
    source, output = write_jsonl([{"prompt": "a"}]), tmp_path / "o.jsonl"
    options = ("--row-timeout", "0.000001", "--max-tokens", "400", "--ignore-eos")
    outcome = cli("run", source, "-m", tiny_model_dir, "-o", output, *options)
    assert (outcome.code, "1 done" in outcome.err) == (0, True)
    (row,) = read_jsonl(output)
    assert (row["finish_reason"], row["error"]) == ("timeout", None)
    assert row["usage"]["completion_tokens"] < 400


def test_a_plan_tells_what_labels_and_completions_need(cli, write_jsonl, tiny_model_dir):
    source = write_jsonl([{"prompt": "a" * 40, "completion": "b"}])
    plans = [
        json.loads(cli("plan", source, "-m", tiny_model_dir, "--max-tokens", "40", "--json", *options).out)
        for options in ((), ("-n", "4"), ("--choices", "x,y"), ("--score",))
    ]
    assert [plan["prompt_tokens"] for plan in plans] == [41] * 4
    alone, several, labels, score = (plan["kv_bytes_unshared"] for plan in plans)
    assert (several, labels, score < alone) == (4 * alone, 2 * score, True)
