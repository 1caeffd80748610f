"""How the texts of options become values."""

from pathlib import Path

import pytest

from batchgen.errors import UsageError
from batchgen_cli.values import (
    choices,
    columns,
    json_object,
    json_schema,
    kept_columns,
    number_or_auto,
    sampling_params,
    text_or_file,
)


def test_keep_is_all_none_or_a_list() -> None:
    assert kept_columns("all") is None
    assert kept_columns("none") == ()
    assert kept_columns("a,b c,") == ("a", "b c")


def test_columns_are_separated_by_commas() -> None:
    assert columns(None) == ()
    assert columns("a,b") == ("a", "b")


def test_auto_is_no_number() -> None:
    assert number_or_auto("--batch-size", "auto") is None
    assert number_or_auto("--batch-size", "12") == 12
    with pytest.raises(UsageError, match="--batch-size '1x' is not a number"):
        number_or_auto("--batch-size", "1x")


def test_a_text_is_taken_to_the_letter_unless_it_names_a_file() -> None:
    assert text_or_file("--prefix", None) is None
    assert text_or_file("--prefix", "a@b\\n") == "a@b\\n"


def test_json_is_an_object() -> None:
    assert json_object("--chat-template-kwargs", None) == {}
    assert json_object("--chat-template-kwargs", '{"a": [1]}') == {"a": [1]}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, ()),
        ("A,B,C", ("A", "B", "C")),
        (" very good, bad ", ("very good", "bad")),
        ('["a, b", " c", ""]', ("a, b", " c", "")),
        (' ["x"]', ("x",)),
        ("A", ("A",)),
        ("A,,B", ("A", "", "B")),
    ],
)
def test_choices_are_separated_by_commas_or_a_json_list_taken_to_the_letter(
    text: str | None, found: tuple[str, ...]
) -> None:
    assert choices(text) == found


def test_a_list_of_choices_that_is_not_json_is_wrong_use() -> None:
    with pytest.raises(UsageError, match=r"--choices must be separated by commas, or a JSON list: Expecting value"):
        choices("[a, b]")


def test_a_schema_is_that_of_its_file_blanks_apart(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text('{\n "type": "object",  "properties": {"b": {}, "a": {}}}\n')
    assert json_schema(path) == '{"type": "object", "properties": {"b": {}, "a": {}}}'
    assert json_schema(None) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{a",
            "is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1); mend the file",
        ),
        ("", "is not JSON: Expecting value: line 1 column 1 (char 0); mend the file"),
        ("[1]", 'must hold a JSON object; such as {"type": "object"}'),
    ],
)
def test_a_schema_that_is_none_is_wrong_use(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(UsageError) as e:
        json_schema(path)
    assert str(e.value) == f"--json-schema {path} {message}"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": 0}, "--n must be between 1 and 1024, not 0"),
        ({"stop_token_ids": (-1,)}, "--stop-token-id must be token ids, not (-1,)"),
        ({"choices": ("a",)}, "--choices must be two or more different texts, not ('a',)"),
        ({"choices": ("a", "b"), "n": 2}, "--choices cannot be combined with --n"),
        ({"regex": "a", "json_schema": "{}"}, "--regex cannot be combined with --json-schema"),
        ({"json_schema": "{}", "ignore_eos": True}, "--json-schema cannot be combined with --ignore-eos"),
        ({"json_schema": ""}, "--json-schema must be text that is not empty, not ''"),
    ],
)
def test_parameters_that_do_not_go_are_told_by_their_options(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as e:
        sampling_params(**values)
    assert str(e.value) == message
