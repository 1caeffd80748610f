"""Labels from files and columns, the likeliest of many, and labels that are compared with a column of the input."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.records import json_rows

pytestmark = pytest.mark.usefixtures("loaded_once")

Cli = Callable[..., Any]


@pytest.fixture
def labelled(cli: Cli, tiny_model_dir: Path, tmp_path: Path) -> Callable[..., Any]:
    """Runs a job with labels and returns its rows and its outcome."""

    def run(source: Path, *options: str, code: int = 0) -> tuple[list[dict[str, Any]], Any]:
        output = tmp_path / "o.jsonl"
        outcome = cli("run", source, "-m", tiny_model_dir, "-o", output, "--overwrite", *options)
        assert outcome.code == code, outcome.err
        return json_rows(output), outcome

    return run


def test_labels_may_be_the_lines_of_a_file_or_a_list_in_one(labelled, write_jsonl, tmp_path):
    source, file = write_jsonl([{"prompt": "a"}]), tmp_path / "labels"
    wanted, _ = labelled(source, "--choices", '["yes, sure", "no"]')
    for text in ("\ufeffyes, sure\r\n\n  no \n", ' ["yes, sure",\n"no"]\n'):
        file.write_text(text, encoding="utf-8")
        assert labelled(source, "--choices", f"@{file}")[0] == wanted


def test_labels_of_a_rows_own_column_win_over_the_commands(labelled, write_jsonl):
    own: list[Any] = [["x", "yz"], '["x, y", "z"]', "x, yz ,q", None, "", [], ["x"], ["x", 1], {"a": 1}]
    source = write_jsonl([{"prompt": "a", "labels": value} for value in own])
    rows, _ = labelled(source, "--choices-column", "labels", "--choices", "a,b", code=3)
    assert [row["choice_probs"] and list(row["choice_probs"]) for row in rows] == [
        ["x", "yz"], ["x, y", "z"], ["x", "yz", "q"], ["a", "b"], ["a", "b"], ["a", "b"], None, None, None,
    ]  # fmt: skip
    errors = [row["error"]["message"] for row in rows[6:]]
    assert errors == [
        "choices must be two or more different texts, not 'x'",
        "choices must be text or a list of texts, not ['x', 1]",
        "choices must be text or a list of texts, not {'a': 1}",
    ]
    rows, _ = labelled(source, "--choices-column", "labels", code=3)
    assert [row["error"] for row in rows[3:6]] == [
        {"type": "invalid_row", "message": "column 'labels' has no labels"}
    ] * 3


def test_the_likeliest_labels_are_those_of_the_whole_map_and_the_sampled_one_is_among_them(labelled, write_jsonl):
    labels = [chr(c) for c in range(ord("a"), ord("u"))]
    source = write_jsonl([{"prompt": f"{i}"} for i in range(8)])
    whole, _ = labelled(source, "--choices", ",".join(labels))
    top, _ = labelled(source, "--choices", ",".join(labels), "--top-choices", "3")
    for row, all_of_them in zip(top, whole, strict=True):
        likeliest = sorted(all_of_them["choice_probs"].items(), key=lambda item: -item[1])[:3]
        assert list(row["choice_probs"].items()) == likeliest
        assert row["text"] == likeliest[0][0]
    sampled, _ = labelled(source, "--choices", ",".join(labels), "--top-choices", "1", "--temperature", "9")
    assert {len(row["choice_probs"]) for row in sampled} == {1, 2}
    assert all(row["text"] in row["choice_probs"] for row in sampled)


def expected_figures(tmp_path: Path) -> Any:
    return json.loads((tmp_path / "o.jsonl.job" / "stats.json").read_bytes())["expect"]


def test_results_are_compared_with_a_column_also_afterwards(cli, labelled, write_jsonl, tiny_model_dir, tmp_path):
    source = write_jsonl([{"prompt": f"{i}"} for i in range(6)])
    rows, outcome = labelled(source, "--choices", "a,b")
    assert expected_figures(tmp_path) is None
    texts = [row["text"] for row in rows]
    gold = [texts[0], texts[1], "b" if texts[2] == "a" else "a", None, texts[4], 5]
    source = write_jsonl([{"prompt": f"{i}", "gold": g} for i, g in enumerate(gold)])
    command = ("run", source, "-m", tiny_model_dir, "-o", tmp_path / "o.jsonl", "--choices", "a,b", "--keep", "none")
    outcome = cli(*command, "--expect", "gold")
    assert "6 kept from an earlier run" in outcome.err
    assert "3 of 5 rows as in 'gold' (60.0%); 1 without a value in 'gold'" in outcome.err
    found = expected_figures(tmp_path)
    assert (found["rows"], found["rows_right"], found["rows_without"], found["calibration"]["rows"]) == (5, 3, 1, 5)
    again = cli(*command, "--expect", "gold")
    assert "nothing to do" in again.err
    assert "3 of 5 rows" in again.err


def test_the_numbers_of_classes_are_compared_by_their_names(labelled, tmp_path):
    feature = {"info": {"features": {"gold": {"names": ["a", "b"], "_type": "ClassLabel"}}}}
    table = pa.table({"prompt": ["1", "2"], "gold": [0, 0]})
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(feature)}), tmp_path / "i.parquet")
    rows, _ = labelled(tmp_path / "i.parquet", "--choices", "a,b", "--expect", "gold")
    assert expected_figures(tmp_path)["rows_right"] == [row["text"] for row in rows].count("a")


def test_a_pipe_and_a_merge_of_shards_compare_every_row_once(cli, write_jsonl, tiny_model_dir, tmp_path):
    source = write_jsonl([{"prompt": f"{i}", "gold": "a"} for i in range(5)])
    options = ("-m", tiny_model_dir, "--choices", "a,b", "--expect", "gold", "--stats", tmp_path / "s.json")
    figures = []
    cli("run", source, "-o", "-", "--window", "2", *options)
    figures.append(json.loads((tmp_path / "s.json").read_bytes())["expect"])
    for shard in ("1/2", "2/2"):
        assert "accuracy" not in cli("run", source, "-o", tmp_path / "o.jsonl", "--shard", shard, *options).err
    cli("merge", tmp_path / "o.jsonl")
    assert expected_figures(tmp_path) == figures[0]
    assert figures[0]["rows"] == 5
