"""What a pre-tokenizer's regex can match, as far as kinds of characters tell: which kinds never follow each other inside a match, whatever the text.

A regex is read once into the pairs of kinds that may be neighbours in what it matches. Everything is on the safe side: `over` holds all kinds that a part of it
may match, `under` those of which it matches every character. What cannot be read is an `UnreadableError`, and the regex then tells nothing.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

LETTER, NUMBER, OTHER, SPACE, NEWLINE, BLANK = "letter", "number", "other", "space", "newline", "blank"
"""Kinds: letters and numbers (Unicode L and N), other visible characters, the space, line feed and carriage return, other whitespace."""
_VISIBLE = frozenset((LETTER, NUMBER, OTHER))
_WHITE = frozenset((SPACE, NEWLINE, BLANK))
_ALL = _VISIBLE | _WHITE
_NONE: frozenset[str] = frozenset()


def kind_of(character: str) -> str | None:
    """The kind of a space, a line feed, or a character that was a letter, number, punctuation or symbol already in Unicode 3.2, so that every
    library agrees on it; None for others."""
    if character in " \n":
        return SPACE if character == " " else NEWLINE
    category = unicodedata.ucd_3_2_0.category(character)[0]
    return {"L": LETTER, "N": NUMBER, "P": OTHER, "S": OTHER}.get(category)


class UnreadableError(ValueError):
    """A regex with something in it that is not understood here."""


@dataclass(frozen=True, slots=True)
class Kinds:
    """One character of a regex: a literal, a class, an escape."""

    over: frozenset[str]
    under: frozenset[str] = _NONE

    @property
    def negated(self) -> Kinds:
        return Kinds(_ALL - self.under, _ALL - self.over)

    def also(self, other: Kinds) -> Kinds:
        return Kinds(self.over | other.over, self.under | other.under)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A part of a regex, or all of it, by the kinds of what it matches."""

    first: frozenset[str] = _NONE
    last: frozenset[str] = _NONE
    nullable: bool = True
    """Whether it can match nothing."""
    pairs: frozenset[tuple[str, str]] = frozenset()
    """Neighbours that a match may hold."""
    alone: frozenset[str] = _NONE
    """Kinds of which it matches any single character, wherever it stands."""
    peeked: frozenset[str] = _NONE
    """Kinds after which it may look at the character that follows, without taking it."""

    def then(self, other: Pattern) -> Pattern:
        alone = (self.alone if other.nullable else _NONE) | (other.alone if self.nullable else _NONE)
        return Pattern(
            first=self.first | (other.first if self.nullable else _NONE),
            last=other.last | (self.last if other.nullable else _NONE),
            nullable=self.nullable and other.nullable,
            pairs=self.pairs | other.pairs | frozenset(product(self.last, other.first)),
            alone=alone,
            peeked=self.peeked | other.peeked,
        )

    def either(self, other: Pattern) -> Pattern:
        return Pattern(
            first=self.first | other.first,
            last=self.last | other.last,
            nullable=self.nullable or other.nullable,
            pairs=self.pairs | other.pairs,
            alone=self.alone | other.alone,
            peeked=self.peeked | other.peeked,
        )

    def repeated(self, least: int, most: int) -> Pattern:
        return Pattern(
            first=self.first,
            last=self.last,
            nullable=self.nullable or least == 0,
            pairs=self.pairs | (frozenset(product(self.last, self.first)) if most > 1 else frozenset()),
            alone=self.alone if least <= 1 else _NONE,
            peeked=self.peeked,
        )

    def crosses(self, before: str, after: str) -> bool:
        """Whether a match may hold, or depend on, what lies on both sides of a place between these kinds."""
        return (before, after) in self.pairs or before in self.peeked

    def ends(self, before: str, after: str) -> bool:
        """Whether, not crossing it, a match always ends or begins at such a place."""
        return before in self.alone or after in self.alone


def read_pattern(regex: str) -> Pattern:
    """Reads a regex of the tokenizers library (Oniguruma, Ruby's syntax). Raises `UnreadableError`."""
    reader = _Reader(regex)
    pattern = reader.alternatives()
    if reader.more or pattern.nullable:
        raise UnreadableError(regex)
    return pattern


def literal_pattern(text: str) -> Pattern:
    """That of a text to be found as it is."""
    pattern = Pattern()
    for character in text:
        pattern = pattern.then(_one(_literal(character)))
    return pattern


def _one(kinds: Kinds) -> Pattern:
    return Pattern(kinds.over, kinds.over, nullable=False, alone=kinds.under)


def _literal(character: str) -> Kinds:
    if character == " ":
        return Kinds(frozenset((SPACE,)), frozenset((SPACE,)))
    if character in "\r\n":
        return Kinds(frozenset((NEWLINE,)))
    if character.isspace():
        return Kinds(frozenset((BLANK,)))
    kind = kind_of(character)
    return Kinds(_VISIBLE if kind is None else frozenset((kind,)))


_ESCAPES = {
    "s": Kinds(_WHITE, _WHITE),
    "d": Kinds(frozenset((NUMBER,))),
    "w": Kinds(_VISIBLE, frozenset((LETTER,))),
}
_PROPERTIES = {
    "L": Kinds(frozenset((LETTER,)), frozenset((LETTER,))),
    "N": Kinds(frozenset((NUMBER,)), frozenset((NUMBER,))),
}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "v": "\v", "f": "\f"}


def _property(name: str) -> Kinds:
    if name in _PROPERTIES:
        return _PROPERTIES[name]
    parts = {"L": LETTER, "N": NUMBER, "P": OTHER, "S": OTHER, "M": OTHER}
    if len(name) <= 2 and name[:1] in parts:
        return Kinds(frozenset((parts[name[0]],)))
    return Kinds(_ALL)


class _Reader:
    def __init__(self, regex: str) -> None:
        self._regex, self._at = regex, 0

    @property
    def more(self) -> str:
        """The next character, nothing at the end."""
        return self._regex[self._at : self._at + 1]

    def _takes(self, *texts: str) -> str:
        """The first of the texts that comes next, which is passed; nothing where none does."""
        for text in texts:
            if self._regex.startswith(text, self._at):
                self._at += len(text)
                return text
        return ""

    def _need(self, text: str) -> None:
        if not self._takes(text):
            raise UnreadableError(self._regex)

    def _upto(self, end: str) -> str:
        stop = self._regex.find(end, self._at)
        if stop < 0:
            raise UnreadableError(self._regex)
        text, self._at = self._regex[self._at : stop], stop + len(end)
        return text

    def alternatives(self) -> Pattern:
        pattern = self._sequence()
        while self._takes("|"):
            pattern = pattern.either(self._sequence())
        return pattern

    def _sequence(self) -> Pattern:
        pattern = Pattern()
        while self.more and self.more not in "|)":
            if self._takes("(?!", "(?="):
                pattern = self._look(pattern)
            else:
                pattern = pattern.then(self._repeated(self._atom()))
        return pattern

    def _look(self, before: Pattern) -> Pattern:
        """A look at one character, after something that was taken: at the beginning of a match it would be harder to say where that is."""
        ahead = self.alternatives()
        self._need(")")
        if before.nullable or ahead.nullable or ahead.pairs or ahead.peeked:
            raise UnreadableError(self._regex)
        return Pattern(before.first, before.last, False, before.pairs, _NONE, before.peeked | before.last)

    def _atom(self) -> Pattern:
        if self._takes("(?:", "(?i:", "(?>"):
            pattern = self.alternatives()
            self._need(")")
            return pattern
        if self._takes("("):
            if self.more == "?":
                raise UnreadableError(self._regex)
            pattern = self.alternatives()
            self._need(")")
            return pattern
        if self._takes("["):
            return _one(self._class())
        if self.more in ("^", "$", "*", "+", "?", "{"):
            raise UnreadableError(self._regex)
        if self._takes("."):
            return _one(Kinds(_ALL))
        return _one(self._character()[0])

    def _repeated(self, pattern: Pattern) -> Pattern:
        while True:
            if sign := self._takes("?", "*", "+"):
                pattern = pattern.repeated(0 if sign in "?*" else 1, 1 if sign == "?" else 2)
                self._takes("?", "+")  # lazy, or taking all: the same characters
            elif self._takes("{"):
                low, _, high = (bound := self._upto("}")).partition(",")
                if not low.isdigit() or not (high.isdigit() or not high):
                    raise UnreadableError(self._regex)
                most = int(high) if high else 2 if "," in bound else int(low)
                pattern = pattern.repeated(int(low), most)
                self._takes("?")
            else:
                return pattern

    def _class(self) -> Kinds:
        negated = bool(self._takes("^"))
        kinds = Kinds(_NONE)
        if self.more == "]" or not self.more:
            raise UnreadableError(self._regex)
        while not self._takes("]"):
            if not self.more or self.more == "[" or self._regex.startswith("&&", self._at):
                raise UnreadableError(self._regex)
            one, start = self._character()
            following = self._regex[self._at + 1 : self._at + 2]
            if start is not None and self.more == "-" and following not in ("]", ""):
                self._at += 1
                stop = self._character()[1]
                if stop is None or stop < start:
                    raise UnreadableError(self._regex)
                one = _range(start, stop)
            kinds = kinds.also(one)
        return kinds.negated if negated else kinds

    def _character(self) -> tuple[Kinds, str | None]:
        """A character, or what stands for a class of them; which one, where it is one."""
        character = self.more
        self._at += 1
        if character != "\\":
            return _literal(character), character
        escape = self.more
        self._at += 1
        if escape in ("p", "P"):
            self._need("{")
            kinds = _property(self._upto("}"))
            return kinds.negated if escape == "P" else kinds, None
        if escape.lower() in _ESCAPES:
            kinds = _ESCAPES[escape.lower()]
            return kinds.negated if escape.isupper() else kinds, None
        character = _CONTROLS.get(escape, escape)
        if not character or (character == escape and character.isalnum()):
            raise UnreadableError(self._regex)
        return _literal(character), character


_WHITESPACE: Iterable[str] = [chr(i) for i in range(0x3001) if chr(i).isspace()]


def _range(start: str, stop: str) -> Kinds:
    kinds = Kinds(_VISIBLE) if ord(stop) - ord(start) > 127 else Kinds(_NONE)
    if not kinds.over:
        for code in range(ord(start), ord(stop) + 1):
            kinds = kinds.also(_literal(chr(code)))
    for white in _WHITESPACE:
        if start <= white <= stop:
            kinds = kinds.also(_literal(white))
    return kinds
