"""How models mark their thoughts: the formats that are known, which one a tokenizer has, and how a template switches thinking off.

A completion of such a model is its thoughts, a mark, and the answer. Thoughts begin where the prompt leaves them open or where the
completion opens them itself. The harmony format of gpt-oss has channels in their place: all but the channel `final` are thoughts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ThinkingFormat:
    """The marks around the thoughts of one family of models."""

    open: str
    close: str
    always: bool = False
    """Whether every completion is thoughts until the answer is marked."""
    answer: re.Pattern[str] = field(init=False)
    """What the answer comes after."""
    longest: int = field(init=False)
    """Characters that a mark may have."""

    def __post_init__(self) -> None:
        marked = _HARMONY_ANSWER if self.always else re.escape(self.close)
        object.__setattr__(self, "answer", re.compile(marked))
        object.__setattr__(self, "longest", 200 if self.always else max(len(self.open), len(self.close)))

    def opened(self, prompt: str) -> bool:
        """Whether a completion of this prompt (its end, special tokens written out) begins inside of thoughts."""
        if self.always:
            return self.answer.search(prompt[prompt.rfind("<|start|>") + 1 :]) is None
        _, mark, after = prompt.rpartition(self.open.rstrip())
        return bool(mark) and not after.strip()  # further up it is what somebody wrote

    def ending(self, *, begun: bool) -> str:
        """What ends the thoughts of a completion that has begun, or not."""
        return "<|end|><|start|>assistant" + self.close if self.always and begun else self.close


_HARMONY_ANSWER = r"<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
HARMONY = ThinkingFormat("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", always=True)
FORMATS = (
    HARMONY,  # gpt-oss
    ThinkingFormat("<think>", "</think>"),  # Qwen 3, DeepSeek, GLM, Kimi K2, MiniMax, Nemotron, EXAONE 4, Hunyuan, …
    ThinkingFormat("[THINK]", "[/THINK]"),  # Magistral, Mistral Small 4
    ThinkingFormat("<|channel>thought\n", "<channel|>"),  # Gemma 4
    ThinkingFormat("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThinkingFormat("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ThinkingFormat("◁think▷", "◁/think▷"),  # Kimi VL
)
_SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that turn thinking on and off."""


def thinking_format(tokenizer: Any) -> ThinkingFormat | None:
    """The format whose marks are tokens of a transformers tokenizer or stand in its chat template, if there is one."""
    known: Mapping[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    templates = getattr(tokenizer, "chat_template", None)
    text = "".join(templates.values() if isinstance(templates, dict) else [templates or ""])
    if {"<|channel|>", "<|message|>"} <= known.keys():
        return HARMONY
    return next((f for f in FORMATS[1:] if f.close in known or f.close in text), None)


def thinking_off(template: str) -> dict[str, bool]:
    """The variables that switch thinking off in a chat template; none where it has no switch."""
    return {name: False for name in _SWITCHES if re.search(rf"\b{name}\b(?! *\()", template)}


class ThoughtStream:
    """Follows a completion token by token, to the place where its thoughts end. `piece` is a token's text, special or not."""

    def __init__(self, format: ThinkingFormat, prompt: str, piece: Callable[[int], str]) -> None:
        """`prompt` is the prompt's end, with special tokens written out."""
        self._format, self._piece = format, piece
        self.thinking = format.opened(prompt)
        """Whether the last token was a thought's or the mark behind it."""
        self.ended = False
        """Whether what follows is the answer."""
        self._closed = format.close in prompt
        self.answer_start = 0
        """Tokens before the answer, once it has begun."""
        self.begins = ""
        """Characters of the answer that the last of those tokens has behind the mark."""
        self.count = 0
        """Tokens so far."""
        self._tail = prompt[-format.longest :] if format.always and self.thinking else ""

    def append(self, token: int) -> bool:
        """Takes the next token; returns whether the answer begins now. Not to be called after that."""
        self.count += 1
        self._tail += self._piece(token)
        if not self.thinking:
            begun = self._tail.lstrip()
            if begun.startswith(self._format.open):
                self.thinking, self._tail = True, begun[len(self._format.open) :]
            elif not self._format.open.startswith(begun):
                self.ended = True  # an answer without thoughts, from its first token
                return True
        if self.thinking:
            mark = self._format.answer.search(self._tail)
            if mark:
                self.begins = self._tail[mark.end() :]
                self.answer_start, self.ended = self.count, True
                return True
            self._tail = self._tail[-self._format.longest :]
        return False

    def look_back(self, tokens: Sequence[int]) -> None:
        """Of a whole completion that began as an answer: finds the end of thoughts that the prompt began, or that were never opened.

        Such are the thoughts of models that leave the opening mark out, and those that go on where a last message of the assistant stops.
        """
        if not self.ended or self.answer_start or self._closed or self._format.always:
            return
        tail = ""
        for count, token in enumerate(tokens, 1):
            tail = tail[-self._format.longest :] + self._piece(token)
            mark = self._format.answer.search(tail)
            if mark:
                self.answer_start, self.begins = count, tail[mark.end() :]
                return


def thoughts_of(
    format: ThinkingFormat,
    tokens: Sequence[int],
    piece: Callable[[int], str],
    text: Callable[[Sequence[int], Sequence[int]], str],
    begins: str,
) -> str:
    """The thoughts in the tokens before an answer (or in all of a completion that has none), without marks and outer blanks.

    `text` gives what tokens add after others; `begins` is what the last token has of the answer.
    """
    if format.always:
        found = [
            text(tokens[max(0, start - 8) : start], tokens[start:stop]) for start, stop in _messages(tokens, piece)
        ]
        return "\n".join(part.strip() for part in found if part.strip())
    thoughts = text((), tokens)
    if begins and thoughts.endswith(begins):
        thoughts = thoughts[: -len(begins)]
    begun = thoughts.lstrip()
    if begun.startswith(format.open):
        thoughts = begun[len(format.open) :]
    elif begun.startswith(plain := re.sub(r"<\|[^>]*>", "", format.open)) and plain.strip():
        thoughts = begun[len(plain) :]  # the part of the mark that is no special token (`thought` of Gemma 4)
    before, mark, _ = thoughts.rpartition(format.close)
    return (before if mark else thoughts).strip()


def _messages(tokens: Sequence[int], piece: Callable[[int], str]) -> Iterable[tuple[int, int]]:
    """Where the messages of harmony's channels begin and end, but for those of the channel `final`. The first header may be cut."""
    header, start = "", None
    for at, token in enumerate(tokens):
        name = piece(token)
        if name in ("<|end|>", "<|start|>", "<|channel|>", "<|call|>", "<|return|>"):
            if start is not None:
                yield start, at
            header, start = ("" if name != "<|start|>" else header), None
        elif name == "<|message|>":
            start = None if header.startswith("final") else at + 1
        elif start is None:
            header += name
    if start is not None:
        yield start, len(tokens)
