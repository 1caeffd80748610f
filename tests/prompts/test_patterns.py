"""What a regex of a pre-tokenizer can match, by kinds of characters."""

from __future__ import annotations

import pytest

from batchgen.prompts.patterns import (
    LETTER,
    NEWLINE,
    NUMBER,
    OTHER,
    SPACE,
    UnreadableError,
    kind_of,
    literal_pattern,
    read_pattern,
)


@pytest.mark.parametrize(
    ("character", "kind"),
    [
        ("a", LETTER),
        ("中", LETTER),
        ("½", NUMBER),
        ("7", NUMBER),
        (".", OTHER),
        ("€", OTHER),
        (" ", SPACE),
        ("\n", NEWLINE),
    ],
)
def test_the_kind_of_a_character(character, kind):
    assert kind_of(character) == kind


@pytest.mark.parametrize("character", ["\t", "\r", "\u00a0", "\u0301", "\x1c", "😀", "\ud800"])
def test_characters_on_which_libraries_may_differ_have_no_kind(character):
    assert kind_of(character) is None


@pytest.mark.parametrize(
    ("regex", "before", "after", "crosses", "ends"),
    [
        (r"\p{L}+", LETTER, SPACE, False, True),
        (r"\p{L}+", LETTER, LETTER, True, True),
        (r"\p{L}", LETTER, LETTER, False, True),
        (r"\p{L}{2}", LETTER, SPACE, False, False),
        (r"\p{L}{1,3}", LETTER, LETTER, True, True),
        (r"\p{Lu}+", LETTER, SPACE, False, False),
        (r"[^\s]+", OTHER, SPACE, False, True),
        (r"[^a-z]+", LETTER, SPACE, True, True),
        (r"\S+\s", OTHER, SPACE, True, False),
        (r"\S+(?:\s|$x)?".replace("$", ""), OTHER, SPACE, True, True),
        (r"a?b?\s+", LETTER, SPACE, True, True),
        (r"\s+(?!\S)", LETTER, SPACE, False, False),
        (r"\s+(?!\S)|\s", LETTER, SPACE, False, True),
        (r"\p{L}+(?!\s)|\s", LETTER, SPACE, True, True),
        (r"\P{L}+", NUMBER, NEWLINE, True, True),
        (r"[0-9.,]+", NUMBER, SPACE, False, False),
        (r"[\s\S]", OTHER, SPACE, False, True),
        (r".+", OTHER, SPACE, True, False),
        (r"\p{Han} ", LETTER, SPACE, True, False),
        (r"[!-~]++[\r\n]*| ", OTHER, NEWLINE, True, False),
        (r"[ -~]?+\p{N}| ", OTHER, NUMBER, True, True),
        (r"(?i:'s|'t)|\w+", OTHER, LETTER, True, True),
    ],
)
def test_what_a_match_may_hold(regex, before, after, crosses, ends):
    pattern = read_pattern(regex)
    assert (pattern.crosses(before, after), pattern.ends(before, after)) == (crosses, ends)


@pytest.mark.parametrize(
    "regex",
    [
        "a*", "", "a|", "^a", "a$", "(?<=a)b", "(?<!a)b", "(?!a)b", r"\s+(?!ab)", r"\s+(?=a?)", r"\bfoo", r"a\x41", "[[:alpha:]]", r"[a-z&&[^b]]",
        "(a", "a)", "[a", "[]", "a{x}", "a{1", r"\p{L", "a\\", r"\1", "(?i)a", "?a", "[z-a]",
    ],
)  # fmt: skip
def test_what_is_not_understood_is_not_guessed(regex):
    with pytest.raises(UnreadableError):
        read_pattern(regex)


def test_a_text_to_be_found_as_it_is():
    pattern = literal_pattern("a .b")
    assert pattern.crosses(LETTER, SPACE)
    assert pattern.crosses(OTHER, LETTER)
    assert not pattern.crosses(OTHER, SPACE)
    assert literal_pattern(" ").ends(LETTER, SPACE)
