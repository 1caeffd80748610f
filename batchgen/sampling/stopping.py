"""When a completion ends, and what its text is. One `Stopper` per sequence; knows tokens and a tokenizer, not logits.

A completion ends at an end token (the model's, unless they are ignored, and the request's own), at a stop string, or
at its maximum length. Its text is all of its tokens decoded at once, without special tokens and without the end
token, cut before the earliest stop string. A stop string that is a special token ends it at that token. Bytes that are not
a complete character become U+FFFD, as in `decode`, also if a completion ends inside a character. The prompt's last tokens are decoded with the completion and their text is removed again,
so that prompt and text concatenate: tokenizers of the sentencepiece family drop the space before the first word that they decode.

If a model marks its thoughts, the text is the answer alone, and stop strings are only searched for in the answer.

Without stop strings a token costs a set lookup and a comparison, and the text is decoded once, on demand. With stop strings the
text is followed as it grows, with the two offsets of text-generation-inference: each token decodes only a few tokens
again and searches only the end of the text. A match there is looked up again in the whole text, which decides. Until the
completion ends, U+FFFD at the end of the text is not searched because it may still become a character. (Why not
`tokenizers.decoders.DecodeStream`: docs/decisions/0011-own-code-beside-a-library.md.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from batchgen.parsers.repetition import repeats
from batchgen.parsers.thinking import ThinkingFormat, ThoughtStream
from batchgen.parsers.tool_calls import HARMONY_CALLS, ToolFormat, find_calls, harmony_call_start
from batchgen.request import TokenArray
from batchgen.result import ToolCall
from batchgen.sampling_params import SamplingParams

_PROMPT_END = 32  # tokens of a prompt's end, or of the header of its last message, where thoughts may be opened
_CONTEXT = 8  # number of tokens decoded before a completion; a character that they begin inside of is shorter
_OPEN = 4  # number of tokens whose text is decoded again with every next token; settling them costs a decode
_CONTEXTS_KEPT = 1024  # most prompts of a job end alike
_MAX_OPEN = 64  # the same inside a run of bytes; a run of twice as many bytes is not a character
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns tokens into text. Made once for a tokenizer of transformers."""

    def __init__(
        self, tokenizer: Any, thinking: ThinkingFormat | None = None, tool_format: ToolFormat | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self.thinking = thinking
        """How the model marks its thoughts."""
        self.tool_format = tool_format
        """How the model writes calls of tools."""
        self.decode = _decoder(tokenizer)
        """Returns the text of tokens without special tokens and without clean-up of spaces."""
        self._decode_context = lru_cache(maxsize=_CONTEXTS_KEPT)(self.decode)
        self._pieces: dict[int, str] = {}
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        found = zip(names, tokenizer.convert_tokens_to_ids(names), strict=True)
        # Byte-fallback tokens. A run of them is decoded as a whole: to characters if it is valid UTF-8, else all of it to U+FFFD.
        self.byte_tokens = frozenset(
            i for name, i in found if i is not None and tokenizer.convert_ids_to_tokens(i) == name
        )

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of the special tokens, which leave no text, by what they look like."""
        return {str(token): i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}

    def marked(self, tokens: Sequence[int]) -> str:
        """Returns the text of `tokens` with special tokens and without clean-up of spaces."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def piece(self, token: int) -> str:
        """Returns the text of a token, special or not, as it is in the middle of a text."""
        if token not in self._pieces:
            # Tokenizers of the sentencepiece family drop the space at the beginning of a text.
            self._pieces[token] = _added(self.marked([token]), self.marked([token, token]))
        return self._pieces[token]

    def thoughts(self, format: ThinkingFormat, prompt: TokenArray) -> ThoughtStream:
        """Returns the stream that follows the thoughts of a prompt's completion, from its first token."""
        end = prompt[-_PROMPT_END:]
        if format.always:  # the header of the last message, which may be long
            starts = (prompt == self._tokenizer.convert_tokens_to_ids("<|start|>")).nonzero()[0]
            end = prompt[starts[-1] :][:_PROMPT_END] if len(starts) else prompt[:0]
        return ThoughtStream(format, "".join(map(self.piece, end.tolist())), self.piece)

    def context(self, prompt: TokenArray) -> list[int]:
        """Returns the last tokens of a prompt, beginning outside of a run of bytes."""
        start = max(0, len(prompt) - _CONTEXT)
        while start > 0 and int(prompt[start]) in self.byte_tokens:
            start -= 1
        found: list[int] = prompt[start:].tolist()
        return found

    def text(self, context: Sequence[int], tokens: Sequence[int]) -> str:
        """Returns the text that `tokens` add after `context`."""
        return _added(self._decode_context(tuple(context)), self.decode([*context, *tokens]))


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Returns the decoder of the tokenizers library, in a fifth of the time, or the tokenizer's own if its class overrides decoding."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    if (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind._decode is PreTrainedTokenizerFast._decode
        and kind.decode is PreTrainedTokenizerBase.decode
    ):
        decode = tokenizer.backend_tokenizer.decode
        return lambda tokens: str(decode(tokens, skip_special_tokens=True))
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class Stopper:
    """Decides token by token when a completion ends, and makes its text.

    `max_tokens` (at most `params.max_tokens`), `prompt` and `tools` are the request's; `eos_token_ids` are the model's.
    """

    def __init__(
        self,
        params: SamplingParams,
        max_tokens: int,
        eos_token_ids: frozenset[int],
        detokenizer: Detokenizer,
        prompt: TokenArray,
        tools: str = "",
    ) -> None:
        self.tokens: list[int] = []
        """The sampled tokens, the end token included."""
        self.finish_reason: str | None = None
        self._max_tokens = max_tokens
        ends = frozenset() if params.ignore_eos else eos_token_ids
        self._ends = ends | frozenset(params.stop_token_ids) if params.stop_token_ids else ends
        self._stop = params.stop
        special = detokenizer.special_tokens if self._stop else {}
        self._stop_tokens = frozenset(special[text] for text in self._stop if text in special)
        self._detokenizer = detokenizer
        self._prompt, self._tools = prompt, tools
        self._context = detokenizer.context(prompt)
        self._growing: _GrowingText | None = None
        self._max_repeats = params.max_repeats
        self._thoughts: ThoughtStream | None = None
        if detokenizer.thinking is not None and params.reasoning == "auto":
            self._thoughts = detokenizer.thoughts(detokenizer.thinking, prompt)
        else:
            self._follow(0)
        self._text: str | None = None

    def append(self, token: int, whole: bool = False) -> str | None:
        """Takes the next token; returns `stop`, `repetition` or `length` when it ends the completion, else None.

        `whole`: the text is complete and nothing may follow.
        """
        self.tokens.append(token)
        if token in self._ends or self._stops_at(token) or whole:
            self.finish_reason = "stop"
        elif self._max_repeats is not None and repeats(self.tokens, self._max_repeats):
            self.finish_reason = "repetition"
        elif len(self.tokens) >= self._max_tokens:
            # Text that might have become another character is final now.
            answer = self._decoded() if self._stop else None
            self.finish_reason = "stop" if answer is not None and self._cut(answer) is not None else "length"
        if self.finish_reason is not None and self._thoughts is not None:
            before = self._thoughts.answer_start, self._thoughts.ended
            self._thoughts.look_back(self.tokens)
            if (self._thoughts.answer_start, self._thoughts.ended) != before:
                self._text = None
        return self.finish_reason

    @property
    def text(self) -> str | None:
        """The text of the answer, so far or in the end. None if the completion is, or has ended, inside its thoughts."""
        if self._text is not None:
            return self._text
        whole = self._decoded()
        if whole is None or self.finish_reason is None:
            return whole
        cut = self._cut(whole)
        self._text = whole if cut is None else cut
        return self._text

    @property
    def reasoning(self) -> str | None:
        """The thoughts before the answer; None if there are none. Empty if the completion was cut inside its thoughts, before their first text."""
        thoughts, tokens = self._thoughts, self.tokens[: self.reasoning_tokens]
        if thoughts is None or not tokens:
            return None
        if tokens[-1] in self._ends:
            tokens = tokens[:-1]
        found = thoughts.reasoning(tokens, self._detokenizer.text)
        return None if thoughts.ended and not found else found

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens of the thoughts and of the marks around them."""
        thoughts = self._thoughts
        if thoughts is None:
            return 0
        return thoughts.answer_start if thoughts.ended else len(self.tokens) if thoughts.thinking else 0

    def tool_calls(self, id_start: str) -> tuple[ToolCall, ...]:
        """The calls in a completion that its end token has ended, if its row has tools; `text` is then what stands beside them.

        Calls at the end of thoughts that were not closed end the thoughts. Ids begin with `id_start`, except where the model gives ids.
        """
        written = self._detokenizer.tool_format
        if not self._tools or written is None or self.finish_reason != "stop" or self.tokens[-1] not in self._ends:
            return ()
        harmony, tokens, begins = written is HARMONY_CALLS, self.tokens[:-1], ""
        thoughts = None if harmony or written.whole else self._thoughts
        if thoughts is not None:
            tokens, begins = tokens[thoughts.answer_start :], thoughts.begins
        prompt = self._detokenizer.marked(self._prompt.tolist()) if written.whole else ""
        answer = begins + self._detokenizer.marked(tokens)
        found = find_calls(written, answer, self._tools, prompt=prompt, id_start=id_start)
        if found is None:
            return ()
        text, calls = found
        if thoughts is not None and thoughts.thinking and not thoughts.ended:
            if not answer.lstrip().startswith(text):
                return ()  # the thoughts go on after a call
            thoughts.answer_start, thoughts.ended, text = self._tokens_of(answer, text), True, ""
        self._text = text
        if harmony:  # its messages to functions are neither thoughts nor answer
            start = harmony_call_start([self._detokenizer.piece(token) for token in self.tokens])
            if self._thoughts is None:
                self._text = self._detokenizer.text(self._context, self.tokens[:start])
            elif not self._thoughts.ended or self._thoughts.answer_start > start:
                self._text = ""
                self._thoughts.answer_start, self._thoughts.begins, self._thoughts.ended = start, "", True
            else:
                begin = self._thoughts.answer_start
                messages = range(begin, start)
                end = next((at for at in messages if self._detokenizer.piece(self.tokens[at]) == "<|end|>"), start)
                answer = self._detokenizer.text(self._before(begin), self.tokens[begin:end])
                self._text = (self._thoughts.begins + answer).strip()
        return calls

    def _tokens_of(self, answer: str, text: str) -> int:
        """Returns the number of tokens of a text, and of the blanks around it, at the beginning of the completion `answer`."""
        length = len(answer) - len(answer.lstrip().removeprefix(text).lstrip())
        sizes = range(len(self.tokens))
        return bisect_right(sizes, length, key=lambda size: len(self._detokenizer.marked(self.tokens[:size]))) - 1

    def _decoded(self, end: int | None = None) -> str | None:
        """Returns the text of the answer so far, or up to token `end`; None if the answer has not begun."""
        start, begins = 0, ""
        if self._thoughts is not None:
            if not self._thoughts.ended and self._thoughts.thinking and self.tokens:
                return None
            start, begins = self._thoughts.answer_start, self._thoughts.begins
        tokens = self.tokens[start:end]
        if tokens and tokens[-1] in self._ends:
            tokens = tokens[:-1]
        text = begins + self._detokenizer.text(self._before(start), tokens)
        return text.lstrip() if start else text  # blanks between the mark and the answer

    def _before(self, start: int) -> list[int]:
        """Returns the tokens to decode before those from `start` on."""
        return self.tokens[max(0, start - _CONTEXT) : start] if start else self._context

    def _stops_at(self, token: int) -> bool:
        """Takes a token. Returns whether the answer contains a stop string now."""
        if self._thoughts is not None and not self._thoughts.ended:
            if not self._thoughts.append(token):
                return False
            self._follow(self._thoughts.answer_start)
            start = self._thoughts.answer_start
        else:
            start = len(self.tokens) - 1
        growing = self._growing
        return growing is not None and any(self._is_stop(at, growing) for at in range(start, len(self.tokens)))

    def _follow(self, start: int) -> None:
        """The answer begins at token `start`: its text is searched for stop strings from there."""
        if self._stop:
            self._growing = _GrowingText(self._detokenizer, self._before(start), max(map(len, self._stop)))

    def _is_stop(self, at: int, growing: _GrowingText) -> bool:
        """Takes the answer's token `at` this place. Returns whether it is a stop string itself, or completes one."""
        if self.tokens[at] not in self._stop_tokens:
            return self._meets_stop_string(growing.append(self.tokens[at]))
        self._text = self._decoded(at)
        return True

    def _meets_stop_string(self, end: str) -> bool:
        """Whether the text contains a stop string. `end` is its new end, with room for the longest stop string."""
        if not any(s in end for s in self._stop):
            return False
        self._text = self._cut((self._decoded() or "").rstrip(_REPLACEMENT))
        return self._text is not None

    def _cut(self, text: str) -> str | None:
        """Returns `text` up to the earliest stop string; None if it contains none."""
        places = [at for at in map(text.find, self._stop) if at >= 0]
        return text[: min(places)] if places else None


class _GrowingText:
    """The end of a text that grows token by token, long enough to find a string of up to `longest` characters in it."""

    def __init__(self, detokenizer: Detokenizer, context: list[int], longest: int) -> None:
        self._detokenizer = detokenizer
        self._longest = longest
        # Two offsets: `_tokens` begins where the text was settled the time before last; `_read` is where it was settled last.
        self._tokens = list(context)
        self._read = len(context)
        self._settled = self._decoded = detokenizer.decode(self._tokens)  # the text up to `_read`, and of all tokens
        self._tail = ""  # the last characters of the completion's settled text

    def append(self, token: int) -> str:
        """Adds a token. Returns the end of the text: what is not settled yet, and the `longest - 1` characters before it."""
        self._tokens.append(token)
        before, self._decoded = self._decoded, self._detokenizer.decode(self._tokens)
        end = self._tail + _added(self._settled, self._decoded)
        waiting = len(self._tokens) - self._read
        if waiting >= _OPEN:
            # Text is settled after a visible token (special tokens may stand inside a run of bytes) that does not end inside a
            # character. It is not settled inside a run of bytes, which may still turn out to be invalid from its beginning.
            complete = self._decoded != before and not self._decoded.endswith(_REPLACEMENT)
            inside = token in self._detokenizer.byte_tokens and waiting < _MAX_OPEN
            if (complete and not inside) or waiting >= 2 * _MAX_OPEN:
                self._settle(end)
        return end

    def _settle(self, end: str) -> None:
        self._tail = end[len(end) - (self._longest - 1) :] if len(end) >= self._longest else end
        visible = self._decoded != self._settled  # special tokens leave no text and are dropped
        self._tokens = self._tokens[self._read :] if visible else self._tokens[: self._read]
        self._read = len(self._tokens)
        self._settled = self._decoded = self._detokenizer.decode(self._tokens)


def _added(before: str, after: str) -> str:
    """Returns what `after` adds to `before`. A character that `before` ends inside of belongs to the result."""
    if after.startswith(before):
        return after[len(before) :]
    differs = (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
    return after[next(differs, len(after)) :]
