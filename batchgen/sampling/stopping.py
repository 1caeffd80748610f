"""When a completion ends, and what its text is. One `Stopper` per sequence; knows tokens and a tokenizer, not logits.

A completion ends at an end token (the model's, unless they are ignored, and the request's own), at a stop string, or
at its length. Its text is what the tokenizer makes of all its tokens at once: without special tokens, without the end
token, cut before the earliest stop string. Bytes that are no whole character are U+FFFD, as `decode` gives them, also
where a completion ends inside a character. The prompt's last tokens are decoded with it and taken off again, so that
prompt and text concatenate: a tokenizer of the sentencepiece family drops the space before the first word it decodes.

Of a model that marks its thoughts the text is the answer alone: thoughts are split off, and stop strings are looked for behind them.

Without stop strings a token costs a set lookup and a comparison, and the text is decoded once, when it is asked for.
With them the text is followed as it grows, by the two offsets known from text-generation-inference: only a few tokens
are decoded again each time, and only the end of the text is searched. What is found there is then looked up in the
whole text, which decides. Until the completion ends, U+FFFD at the end of the text is not searched: it may become a
character.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from batchgen.parsers.thinking import ThinkingFormat, ThoughtStream, thoughts_of
from batchgen.parsers.tool_calls import HARMONY_CALLS, ToolFormat, find_calls, harmony_call_start
from batchgen.request import TokenArray
from batchgen.result import ToolCall
from batchgen.sampling_params import SamplingParams

PROMPT_END = 32  # prompt tokens that are looked at for open thoughts
_CONTEXT = 8  # prompt tokens decoded before a completion: more than a character cut by their beginning
_OPEN = 4  # tokens whose text is looked at again with every next token; settling them costs a decode
_MAX_OPEN = 64  # of those, where a run of bytes goes on; twice as many are no character but invalid bytes
_REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...
    def convert_tokens_to_ids(self, tokens: Any) -> Any: ...
    def convert_ids_to_tokens(self, ids: Any) -> Any: ...


class Detokenizer:
    """Tokens to text; made once for a tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        thinking: ThinkingFormat | None = None,
        tool_format: ToolFormat | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.thinking = thinking
        """How the model marks its thoughts."""
        self.tool_format = tool_format
        """How the model writes calls of tools."""
        self._decode = _rust(tokenizer) or _python(tokenizer)
        self._pieces: dict[int, str] = {}
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        found = zip(names, tokenizer.convert_tokens_to_ids(names), strict=True)
        # Byte-fallback tokens. A run of them is decoded as one: characters if all of it is valid, else all U+FFFD.
        self.byte_tokens = frozenset(
            i for name, i in found if i is not None and tokenizer.convert_ids_to_tokens(i) == name
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens` without special tokens, not tidied."""
        return self._decode(tokens)

    def marked(self, tokens: Sequence[int]) -> str:
        """The text of `tokens` with special tokens, not tidied."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def piece(self, token: int) -> str:
        """The text of one token in the middle of a text, special or not."""
        if token not in self._pieces:
            # Decoded by itself it would lose a space at its beginning in tokenizers of the sentencepiece family.
            once, twice = (
                str(self._tokenizer.decode([token] * n, skip_special_tokens=False, clean_up_tokenization_spaces=False))
                for n in (1, 2)
            )
            self._pieces[token] = _added(once, twice)
        return self._pieces[token]

    def context(self, prompt: TokenArray) -> list[int]:
        """The last tokens of a prompt, from one that does not continue a run of bytes."""
        start = max(0, len(prompt) - _CONTEXT)
        while start > 0 and int(prompt[start]) in self.byte_tokens:
            start -= 1
        return [int(t) for t in prompt[start:]]

    def text(self, context: Sequence[int], tokens: Sequence[int]) -> str:
        """The text that `tokens` add after `context`."""
        return _added(self.decode([*context]), self.decode([*context, *tokens]))


def _rust(tokenizer: Any) -> Callable[[Sequence[int]], str] | None:
    """The tokenizers library itself, where nothing of the class comes between: a fifth of the time."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    if (
        not isinstance(tokenizer, PreTrainedTokenizerFast)
        or kind._decode is not PreTrainedTokenizerFast._decode
        or kind.decode is not PreTrainedTokenizerBase.decode
    ):
        return None
    decode = tokenizer.backend_tokenizer.decode
    return lambda tokens: str(decode(tokens, skip_special_tokens=True))


def _python(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """Tokenizers written in Python, or with Python around the library, by their own call."""
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class Stopper:
    """Says when a completion ends, token by token, and then its text.

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
        """The completion as sampled, an end token included."""
        self.finish_reason: str | None = None
        self._max_tokens = max_tokens
        ends = frozenset() if params.ignore_eos else eos_token_ids
        self._ends = ends | frozenset(params.stop_token_ids) if params.stop_token_ids else ends
        self._stop = params.stop
        self._detokenizer = detokenizer
        self._prompt, self._tools = prompt, tools
        self._context = detokenizer.context(prompt)
        self._growing: _GrowingText | None = None
        self._thoughts: ThoughtStream | None = None
        if detokenizer.thinking is not None and params.reasoning == "auto":
            end = "".join(map(detokenizer.piece, prompt[-PROMPT_END:].tolist()))
            self._thoughts = ThoughtStream(detokenizer.thinking, end, detokenizer.piece)
        else:
            self._follow(0)
        self._text: str | None = None

    def append(self, token: int) -> str | None:
        """Takes the next token; returns `stop` or `length` when it ends the completion, else None."""
        self.tokens.append(token)
        if token in self._ends or self._stops_at(token):
            self.finish_reason = "stop"
        elif len(self.tokens) >= self._max_tokens:
            # What was held back counts now.
            answer = self._decoded() if self._stop else None
            self.finish_reason = "stop" if answer is not None and self._cut(answer) is not None else "length"
        if self.finish_reason is not None and self._thoughts is not None:
            start = self._thoughts.answer_start
            self._thoughts.look_back(self.tokens)
            if self._thoughts.answer_start != start:
                self._text = None
        return self.finish_reason

    @property
    def text(self) -> str | None:
        """The answer's text, before it has ended the text so far; None where the completion has ended inside of its thoughts."""
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
        """The thoughts before the answer; None where there are none."""
        thoughts, tokens = self._thoughts, self.tokens[: self.reasoning_tokens]
        if thoughts is None or not tokens:
            return None
        if tokens[-1] in self._ends:
            tokens = tokens[:-1]
        assert self._detokenizer.thinking is not None
        return thoughts_of(
            self._detokenizer.thinking, tokens, self._detokenizer.piece, self._detokenizer.text, thoughts.begins
        )

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the thoughts and the marks around them."""
        thoughts = self._thoughts
        if thoughts is None:
            return 0
        return thoughts.answer_start if thoughts.ended else len(self.tokens) if thoughts.thinking else 0

    def tool_calls(self, id_start: str) -> tuple[ToolCall, ...]:
        """The calls in a completion that its end token has ended, if its row has tools; `text` is then what stands beside them.

        Their ids begin with `id_start`, except where the model gives them ids.
        """
        written = self._detokenizer.tool_format
        if not self._tools or written is None or self.finish_reason != "stop" or self.tokens[-1] not in self._ends:
            return ()
        harmony, tokens, begins = written is HARMONY_CALLS, self.tokens[:-1], ""
        if self._thoughts is not None and not harmony and not written.whole:
            if self._thoughts.thinking and not self._thoughts.ended:
                return ()
            tokens, begins = tokens[self._thoughts.answer_start :], self._thoughts.begins
        prompt = self._detokenizer.marked(self._prompt.tolist()) if written.whole else ""
        answer = begins + self._detokenizer.marked(tokens)
        found = find_calls(written, answer, self._tools, prompt=prompt, id_start=id_start)
        if found is None:
            return ()
        self._text, calls = found
        if harmony:  # its messages to functions are neither thoughts nor answer
            start = harmony_call_start([self._detokenizer.piece(token) for token in self.tokens])
            if self._thoughts is None:
                self._text = self._detokenizer.text(self._context, self.tokens[:start])
            elif not self._thoughts.ended or self._thoughts.answer_start > start:
                self._text = ""
                self._thoughts.answer_start, self._thoughts.begins, self._thoughts.ended = start, "", True
        return calls

    def _decoded(self) -> str | None:
        """The answer so far; None where it has not begun."""
        start, begins = 0, ""
        if self._thoughts is not None:
            if not self._thoughts.ended and self._thoughts.thinking and self.tokens:
                return None
            start, begins = self._thoughts.answer_start, self._thoughts.begins
        tokens = self.tokens[start:]
        if tokens and tokens[-1] in self._ends:
            tokens = tokens[:-1]
        text = begins + self._detokenizer.text(self._before(start), tokens)
        return text.lstrip() if start else text  # what stands between the mark and the answer

    def _before(self, start: int) -> list[int]:
        """The tokens that those from `start` are decoded after."""
        return self.tokens[max(0, start - _CONTEXT) : start] if start else self._context

    def _stops_at(self, token: int) -> bool:
        """Whether the answer has a stop string with this token."""
        if self._thoughts is not None and not self._thoughts.ended:
            if not self._thoughts.append(token):
                return False
            self._follow(self._thoughts.answer_start)
            following = self.tokens[self._thoughts.answer_start :]
        else:
            following = [token]
        return self._growing is not None and any(self._meets_stop_string(self._growing.append(t)) for t in following)

    def _follow(self, start: int) -> None:
        """The answer begins at a token: from there its text is searched for stop strings."""
        if self._stop:
            self._growing = _GrowingText(self._detokenizer, self._before(start), max(map(len, self._stop)))

    def _meets_stop_string(self, end: str) -> bool:
        """Whether the text has a stop string, `end` being the end of it that is new, with room for the longest one."""
        if not any(s in end for s in self._stop):
            return False
        self._text = self._cut((self._decoded() or "").rstrip(_REPLACEMENT))
        return self._text is not None

    def _cut(self, text: str) -> str | None:
        """`text` before the earliest stop string; None where it has none."""
        places = [at for at in map(text.find, self._stop) if at >= 0]
        return text[: min(places)] if places else None


class _GrowingText:
    """The end of a text that grows by tokens, long enough to search for a string of up to `longest` characters."""

    def __init__(self, detokenizer: Detokenizer, context: list[int], longest: int) -> None:
        self._detokenizer = detokenizer
        self._longest = longest
        # Two offsets: these tokens begin where the text was settled the time before last, `_read` is the last time.
        self._tokens = list(context)
        self._read = len(context)
        self._settled = self._decoded = detokenizer.decode(self._tokens)  # up to `_read`, and of all tokens
        self._tail = ""  # the last characters of the completion's settled text

    def append(self, token: int) -> str:
        """The end of the text with `token`: what is not settled yet, and the `longest - 1` characters before it."""
        self._tokens.append(token)
        before, self._decoded = self._decoded, self._detokenizer.decode(self._tokens)
        end = self._tail + _added(self._settled, self._decoded)
        waiting = len(self._tokens) - self._read
        if waiting >= _OPEN:
            # Text is settled after a visible token (special ones may stand inside a run of bytes) at whose end no
            # character is open, but not inside a run of bytes: that may still turn out invalid from its beginning.
            complete = self._decoded != before and not self._decoded.endswith(_REPLACEMENT)
            inside = token in self._detokenizer.byte_tokens and waiting < _MAX_OPEN
            if (complete and not inside) or waiting >= 2 * _MAX_OPEN:
                self._settle(end)
        return end

    def _settle(self, end: str) -> None:
        self._tail = end[len(end) - (self._longest - 1) :] if len(end) >= self._longest else end
        visible = self._decoded != self._settled  # a long row of special tokens is forgotten
        self._tokens = self._tokens[self._read :] if visible else self._tokens[: self._read]
        self._read = len(self._tokens)
        self._settled = self._decoded = self._detokenizer.decode(self._tokens)


def _added(before: str, after: str) -> str:
    """What `after` has beyond `before`; a character that `before` ends inside of belongs to it."""
    if after.startswith(before):
        return after[len(before) :]
    differs = (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
    return after[next(differs, len(after)) :]
