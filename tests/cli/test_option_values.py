"""How the texts of options become values."""

import pytest

from batchgen.errors import UsageError
from batchgen_cli.values import columns, json_object, kept_columns, number_or_auto, text_or_file


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
