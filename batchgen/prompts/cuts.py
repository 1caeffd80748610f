"""Where a text can be cut so that its parts, each tokenized alone, give the tokens of the whole, whatever the text is: derived from the tokenizer itself.

A fast tokenizer finds its added tokens first, then normalizes, splits (the pre-tokenizer) and tokenizes each piece between them alone. So a cut is good
- before an added token that nothing before it can be a part of, and
- between a visible character and a space or line feed, where no regex of the pre-tokenizer can match across, and one of them always splits; or, where
  nothing splits, where no token of a BPE vocabulary holds the two characters side by side, so that no merge crosses.
What is not understood here gives no cuts.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any

from batchgen.prompts.patterns import (
    LETTER,
    NEWLINE,
    NUMBER,
    OTHER,
    SPACE,
    Pattern,
    UnreadableError,
    kind_of,
    literal_pattern,
    read_pattern,
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UNICODE_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_SPLIT_AT_BLANKS = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")
_SEPARATE = ("Digits", "Punctuation")  # cut out characters one by one, or runs of them; no whitespace is one
_PLACES = tuple(product((LETTER, NUMBER, OTHER), (SPACE, NEWLINE)))
_TRIES = 64
"""Places that are looked at for one cut, from the last one back."""


class Cuts:
    """The places of one tokenizer. `backend` is a `tokenizers.Tokenizer`."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        added = list(backend.get_added_tokens_decoder().values())
        self._normalizer = _state(backend.normalizer)
        self._marks = _marks(added)
        self._stages = _stages(_state(backend.pre_tokenizer))
        if any(token.single_word for token in added) or getattr(backend.model, "dropout", None):
            self._marks, self._stages = (), None
        if any(token.normalized and (token.rstrip or _holds_blanks(token.content)) for token in added):
            self._stages = None  # these are looked for in the normalized text, which is not at hand
        signs = {mark[0] for mark in self._marks} | ({" ", "\n"} if self._places or self._unmergeable else set())
        self._openings = {sign: _openings(added, sign) for sign in sorted(signs)}
        """What may come behind a cut, and the ends of a text that it may then continue to an added token."""

    @cached_property
    def _places(self) -> frozenset[tuple[str, str]]:
        """The kinds before and behind a cut between two pieces of the pre-tokenizer."""
        if self._stages is None or not _keeps_blanks(self._normalizer):
            return frozenset()
        return frozenset(place for place in _PLACES if _splits(self._stages, *place))

    @cached_property
    def _unmergeable(self) -> frozenset[str] | None:
        """Characters that no token has before a space, where a BPE takes its pieces whole; None where it does not."""
        model, blank = self._backend.model, _whole_pieces(self._normalizer, self._stages)
        if blank is None or type(model).__name__ != "BPE" or getattr(model, "ignore_merges", False):
            return None
        if model.continuing_subword_prefix or model.end_of_word_suffix:
            return None
        vocabulary = self._backend.get_vocab(with_added_tokens=False)
        if blank not in vocabulary:
            return None
        merged = {token[i - 1] for token in vocabulary for i in range(1, len(token)) if token[i] == blank}
        return frozenset(token for token in vocabulary if len(token) == 1) - merged

    @property
    def any(self) -> bool:
        """Whether there can be a cut in any text."""
        return bool(self._marks or self._places or self._unmergeable)

    def last(self, text: str, upto: int) -> int | None:
        """The last good cut in `text[:upto]`, on which alone it depends; None where none is found."""
        before = upto
        for _ in range(_TRIES):
            place = max((text.rfind(sign, 1, before) for sign in self._openings), default=-1)
            if place < 0:
                return None
            if self._is_good(text, place, upto) and not text.endswith(self._openings[text[place]], 0, place):
                return place
            before = place
        return None

    def _is_good(self, text: str, place: int, upto: int) -> bool:
        if text.startswith(self._marks, place, upto):
            return True
        return text[place] in " \n" and self._splits_between(text[place - 1], text[place])

    def _splits_between(self, before: str, blank: str) -> bool:
        if blank == " " and self._unmergeable and before in self._unmergeable:
            return True
        kind = kind_of(before)
        return kind is not None and (kind, kind_of(blank)) in self._places and _is_kept(before, self._normalizer)


def _state(part: Any) -> Any:
    """A part of a tokenizer as its file would hold it; None for none."""
    return None if part is None else json.loads(part.__getstate__())


# -- added tokens


def _marks(added: Iterable[Any]) -> tuple[str, ...]:
    """The added tokens before which a text may be cut: found in the text as it is, and taking nothing before them."""
    raw = [token for token in added if not token.normalized]
    greedy = tuple(token.content for token in raw if token.lstrip)
    marks = [token.content for token in raw if token.content and not token.lstrip]
    blank = {mark for mark in marks if mark[0].isspace() and mark[0] != "\n"}
    return tuple(mark for mark in marks if mark not in blank and not any(g.startswith(mark) for g in greedy))


def _openings(added: Iterable[Any], sign: str) -> tuple[str, ...]:
    """How a text may end where an added token goes on with `sign`, or takes it in."""
    found = set()
    for token in added:
        text = token.content
        found |= {text[:i] for i in range(1, len(text)) if text[i] == sign}
        if token.rstrip and sign.isspace():
            found.add(text)
    return tuple(found)


def _holds_blanks(text: str) -> bool:
    plain = unicodedata.normalize("NFKC", text)
    return any(character.isspace() or character == "▁" for character in plain)


# -- normalizers


def _parts(state: Any, name: str) -> list[Mapping[str, Any]]:
    """A sequence's parts, in order; one part alone is a sequence of itself."""
    if state is None:
        return []
    if state.get("type") == "Sequence":
        return [part for inner in state[name] for part in _parts(inner, name)]
    return [state]


def _keeps_blanks(normalizer: Any) -> bool:
    """Whether spaces and line feeds come through it where they are, and nothing passes over them."""
    parts = _parts(normalizer, "normalizers")
    return all(part["type"] in (*_UNICODE_FORMS, "Lowercase", "BertNormalizer", "StripAccents") for part in parts)


def _is_kept(character: str, normalizer: Any) -> bool:
    """Whether a character is still of its kind after a normalizer that keeps blanks."""
    kinds = {part["type"] for part in _parts(normalizer, "normalizers")}
    if kinds <= {*_UNICODE_FORMS}:
        return not kinds or unicodedata.normalize("NFKD", character) == character
    return character.isascii()


# -- pre-tokenizers


def _stages(pre_tokenizer: Any) -> list[Mapping[str, Any]] | None:
    """The parts of a pre-tokenizer, None where one is not known."""
    parts = _parts(pre_tokenizer, "pretokenizers")
    known = {*_SPLIT_AT_BLANKS, *_SEPARATE, "Split", "ByteLevel", "Metaspace"}
    return parts if all(part["type"] in known for part in parts) else None


def _splits(stages: Sequence[Mapping[str, Any]], before: str, blank: str) -> bool:
    """Whether there is always a split between characters of these kinds, and none of the pieces on either side depends on the other."""
    if blank != SPACE and any(_adds_space(stage) for stage in stages):
        return False  # a part that begins with another character would be given one
    for stage in stages:
        kind = stage["type"]
        if kind in _SEPARATE:
            continue
        if kind in _SPLIT_AT_BLANKS:
            return True
        if kind == "Metaspace":
            return bool(stage.get("split", True)) and blank == SPACE
        pattern = _pattern(stage)
        if pattern is None or pattern.crosses(before, blank):
            return False
        if (kind == "ByteLevel" or stage["behavior"] in ("Isolated", "Removed")) and pattern.ends(before, blank):
            return True
        if kind == "ByteLevel":
            return False  # what comes after it sees other characters
    return False


def _adds_space(stage: Mapping[str, Any]) -> bool:
    if stage["type"] == "Metaspace":
        return str(stage.get("prepend_scheme", "always")) != "never"
    return stage["type"] == "ByteLevel" and bool(stage["add_prefix_space"])


def _pattern(stage: Mapping[str, Any]) -> Pattern | None:
    """What the stage splits by; None where that cannot be read."""
    try:
        if stage["type"] == "ByteLevel":
            return read_pattern(_GPT2) if stage.get("use_regex", True) else None
        pattern = stage["pattern"]
        return literal_pattern(pattern["String"]) if "String" in pattern else read_pattern(pattern["Regex"])
    except UnreadableError:
        return None


def _whole_pieces(normalizer: Any, stages: list[Mapping[str, Any]] | None) -> str | None:
    """What stands for a space in pieces that nothing splits; None where something may, or does more than that."""
    if stages is None:
        return None
    blank = " "
    for part in _parts(normalizer, "normalizers"):
        if part["type"] != "Replace" or part["pattern"] != {"String": " "} or blank != " " or len(part["content"]) != 1:
            return None
        blank = part["content"]
    for stage in stages:
        if stage["type"] == "Metaspace" and not stage.get("split", True) and blank == " " and stage is stages[-1]:
            blank = stage["replacement"]
        elif not (stage["type"] == "Split" and stage["pattern"] == {"String": " "} and blank != " "):
            return None
    return str(blank)
