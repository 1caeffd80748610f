"""How models mark their thoughts: the known formats, the format of a tokenizer, and the switch of a chat template.

A completion of such a model is its thoughts, a mark, and the answer. Either the prompt opens the thoughts, or the completion does. The
harmony format of gpt-oss has channels instead: every channel but `final` is thoughts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ThinkingFormat:
    """The marks around the thoughts in one family of models."""

    open: str
    close: str
    always: bool = False
    """Whether every completion begins with thoughts and marks its answer."""
    answer: re.Pattern[str] = field(init=False)
    """The mark before the answer."""
    longest: int = field(init=False)
    """Maximum number of its characters."""

    def __post_init__(self) -> None:
        marked = _HARMONY_ANSWER if self.always else re.escape(self.close)
        object.__setattr__(self, "answer", re.compile(marked))
        object.__setattr__(self, "longest", 200 if self.always else len(self.close))

    def opened(self, prompt: str) -> bool:
        """Whether a completion begins inside thoughts. `prompt` is the prompt's end, with special tokens written out; in the harmony format, at least
        the header of its last message. A harmony prompt that begins no message is raw text, and so is its completion.
        """
        if self.always:
            _, message, header = prompt.rpartition("<|start|>")
            return bool(message) and self.answer.search(header) is None
        _, mark, after = prompt.rpartition(self.open.rstrip())
        return bool(mark) and not after.strip()  # a mark further up is part of a message

    @property
    def begin(self) -> str:
        """The text with which a completion begins its thoughts. In the harmony format, any channel may come first."""
        return "<|channel|>" if self.always else self.open

    @property
    def no_thoughts(self) -> str:
        """The text after a prompt that has opened the thoughts, if there are to be none: the answer follows."""
        return "\n</think>\n\n" if self.close == "</think>" else self.close


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
    ThinkingFormat("<mm:think>", "</mm:think>"),  # MiniMax M3
    ThinkingFormat("<think:opensource>", "</think:opensource>"),  # Hy 3
    ThinkingFormat("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),  # Apriel
)
SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that turn thinking on and off."""


def thinking_format(tokenizer: Any) -> ThinkingFormat | None:
    """Returns the format whose marks are tokens of a transformers tokenizer or are in its chat template; None if there is none."""
    known: Mapping[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    templates = getattr(tokenizer, "chat_template", None)
    text = "".join(templates.values() if isinstance(templates, dict) else [templates or ""])
    if {"<|channel|>", "<|message|>"} <= known.keys():
        return HARMONY
    return next((f for f in FORMATS[1:] if f.close in known or f.close in text), None)


def thinking_off(template: str) -> dict[str, bool]:
    """Returns the variables that switch thinking off in a chat template; empty if it has no switch."""
    return {name: False for name in SWITCHES if re.search(rf"\b{name}\b(?! *\()", template)}


class ThoughtStream:
    """Follows a completion token by token until its thoughts end. `piece` returns the text of a token, special or not."""

    def __init__(self, format: ThinkingFormat, prompt: str, piece: Callable[[int], str]) -> None:
        """`prompt` is the prompt's end, as `ThinkingFormat.opened` takes it."""
        self._format, self._piece = format, piece
        self.thinking = format.opened(prompt)
        """Whether the last token belongs to the thoughts or to the mark that closes them."""
        self.ended = False
        """Whether the answer has begun."""
        self._closed = format.close in prompt
        self._inside = format.always and "<|message|>" in prompt[prompt.rfind("<|start|>") + 1 :]
        """Whether the completion continues a message of the harmony format."""
        self.answer_start = 0
        """Number of tokens before the answer, once it has begun."""
        self.begins = ""
        """The beginning of the answer, if it is in the same token as the end of the mark."""
        self.count = 0
        """Number of tokens so far."""
        self._tail = prompt[-format.longest :] if format.always and self.thinking else ""

    @property
    def ending(self) -> str:
        """The text that ends the thoughts after the tokens so far."""
        header = "<|end|><|start|>assistant" if self._format.always and self.count else ""
        return header + self._format.close

    def append(self, token: int) -> bool:
        """Takes the next token. Returns whether the answer begins after it. Must not be called again then."""
        self.count += 1
        self._tail += self._piece(token)
        if not self.thinking:
            begun, begin = self._tail.lstrip(), self._format.begin
            if begun.startswith(begin):
                self.thinking, self._tail = True, begun if self._format.always else begun[len(begin) :]
            elif not begin.startswith(begun):
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
        """Looks in a complete completion, which seemed to have no thoughts, for a mark that closes some.

        Some models leave out the opening mark, and thoughts may continue a last message of the assistant. In the harmony format, a completion
        that begins no message is an answer without thoughts.
        """
        if self._format.always and not (self.ended or self._inside):
            self.ended = {"<|channel|>", "<|message|>"}.isdisjoint(map(self._piece, tokens))
        if not self.ended or self.answer_start or self._closed or self._format.always:
            return
        tail = ""
        for count, token in enumerate(tokens, 1):
            tail = tail[-self._format.longest :] + self._piece(token)
            mark = self._format.answer.search(tail)
            if mark:
                self.answer_start, self.begins = count, tail[mark.end() :]
                return

    def reasoning(self, tokens: Sequence[int], text: Callable[[Sequence[int], Sequence[int]], str]) -> str:
        """Returns the thoughts in the tokens before the answer (all tokens if there is no answer), without marks and outer blanks.

        `text` returns the text that tokens add after others.
        """
        form = self._format
        if form.always:
            found = [
                text(tokens[max(0, start - 8) : start], tokens[start:stop])
                for start, stop in _messages(tokens, self._piece, self._inside)
            ]
            return "\n".join(part.strip() for part in found if part.strip())
        thoughts = text((), tokens)
        if self.begins and thoughts.endswith(self.begins):
            thoughts = thoughts[: -len(self.begins)]
        begun = thoughts.lstrip()
        if begun.startswith(form.open):
            thoughts = begun[len(form.open) :]
        elif begun.startswith(plain := re.sub(r"<\|[^>]*>", "", form.open)) and plain.strip():
            thoughts = begun[len(plain) :]  # the part of the mark that is not a special token (`thought` in Gemma 4)
        before, mark, _ = thoughts.rpartition(form.close)
        return (before if mark else thoughts).strip()


def _messages(tokens: Sequence[int], piece: Callable[[int], str], inside: bool) -> Iterable[tuple[int, int]]:
    """Yields the places [start, stop) of harmony's messages, except in the channel `final`. The first header may be incomplete, or missing (`inside`).

    Text that stands where a header should be, as after `<|end|>` or without `<|message|>`, counts as a message.
    """
    header, begin, start = "", 0, 0 if inside else None
    for at, token in enumerate(tokens):
        name = piece(token)
        if name in ("<|end|>", "<|start|>", "<|channel|>", "<|call|>", "<|return|>"):
            if start is not None or _is_text(header):
                yield begin if start is None else start, at
            header, begin, start = "", at + 1, None
        elif name == "<|message|>":
            start = None if header.startswith("final") else at + 1
        elif start is None:
            header += name
    if start is not None or _is_text(header):
        yield begin if start is None else start, len(tokens)


def _is_text(header: str) -> bool:
    """Whether what no `<|message|>` follows is text, and no role or channel whose completion was cut."""
    words = re.sub(r"\bto=\S+|<\|constrain\|>\s*\w*", "", header).split()
    return len(words) > 1 or any(len(word) > len("commentary") for word in words)
