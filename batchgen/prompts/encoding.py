"""Tokenizes many texts at a time: prompts, and the texts that are scored after them. Knows nothing of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from batchgen.errors import BatchgenError, RowError, first_line
from batchgen.prompts.shared_text import SharedText
from batchgen.prompts.tokenizer import LoadedTokenizer, quiet
from batchgen.request import TokenArray


@dataclass(frozen=True, slots=True)
class EncoderLimits:
    batch_texts: int = 2048
    """Texts in one call of the tokenizers library."""
    batch_characters: int = 2_000_000
    """Characters in one call, which needs about 200 bytes per token. A longer text has a call of its own."""
    longest_text: int = 10_000_000
    """Characters of the longest text that is tokenized. 100,000,000 would need 25 GB, and no model takes that much."""
    min_shared_call: int = 10_000
    """Characters below which a call is not searched for shared text."""
    shared_cache_bytes: int = 1 << 26
    """Memory for the tokens of shared text."""


DEFAULT_LIMITS = EncoderLimits()


class Encoder:
    """Tokenizes lists of texts. A text that cannot be tokenized fails alone."""

    def __init__(
        self, tokenizer: Any, note: Callable[[str], None] = lambda text: None, limits: EncoderLimits | None = None
    ) -> None:
        """`note` is called with messages for the user. `limits` are `DEFAULT_LIMITS` unless given."""
        self._limits = limits = limits or DEFAULT_LIMITS
        rust = _rust_encoder(tokenizer)
        self._encode = rust or _python_encoder(tokenizer)
        self._shared: SharedText | None = None
        if rust and not tokenizer.split_special_tokens:
            self._shared = SharedText(
                tokenizer.backend_tokenizer, self._each, note, limits.min_shared_call, limits.shared_cache_bytes
            )
        adds_bos = self._encode([""], True)[0][:1].tolist() == [tokenizer.bos_token_id]
        self._bos: str | None = tokenizer.bos_token if adds_bos else None
        """The beginning-of-text token, if the tokenizer adds it by itself."""

    @cached_property
    def tokens_after(self) -> int | None:
        """The number of special tokens that the tokenizer puts after a text; None if that is not known."""
        (alone,), (whole,) = (self._encode(["a"], special) for special in (False, True))
        for after in range(len(whole) - len(alone) + 1 if len(alone) else 0):
            end = len(whole) - after
            if np.array_equal(whole[end - len(alone) : end], alone):
                return after
        return None

    def encode(self, texts: Sequence[str], *, special: bool, what: str = "the prompt") -> list[TokenArray | RowError]:
        """Returns the token ids of every text in order, int32 [length], or an error for a text that has none. Messages call the text `what`.

        With `special`, the tokenizer puts its special tokens around each text. A text that already begins with the beginning-of-text token
        does not get a second one.
        """
        out: dict[int, TokenArray | RowError] = {}
        longest = self._limits.longest_text
        for i, text in enumerate(texts):
            if len(text) > longest:
                error = f"{what} has {len(text)} characters; more than {longest} are never tokenized"
                out[i] = RowError("prompt_too_long", error)
        left = [i for i in range(len(texts)) if i not in out]
        asked = [texts[i] for i in left]
        found = self._shared.encode(asked, special) if self._shared else None
        for i, tokens in zip(left, self._each(asked, special) if found is None else found, strict=True):
            if tokens is None:
                out[i] = self._error(texts[i], special, what)
            else:
                out[i] = self._with_one_bos(texts[i], tokens, special)
        return [out[i] for i in range(len(texts))]

    def _each(self, texts: Sequence[str], special: bool) -> list[TokenArray | None]:
        """Tokenizes every text as a whole. Returns None for one that cannot be tokenized, which is found in ever smaller halves of its batch."""
        out: list[TokenArray | None] = []
        for batch in _text_batches(texts, self._limits):
            try:
                out += self._encode(batch, special)
            except BaseException as e:
                if not _of_a_text(e):
                    raise
                middle = len(batch) // 2
                out += self._each(batch[:middle], special) + self._each(batch[middle:], special) if middle else [None]
        return out

    def _with_one_bos(self, text: str, tokens: TokenArray, special: bool) -> TokenArray:
        written = special and self._bos is not None and text.startswith(self._bos)
        return tokens[1:].copy() if written and len(tokens) > 1 and tokens[0] == tokens[1] else tokens

    def _error(self, text: str, special: bool, what: str) -> RowError:
        try:
            self._encode([text], special)
        except BaseException as e:
            if not _of_a_text(e):
                raise
            return RowError("invalid_row", f"{what} cannot be tokenized: {_reason(text, e)}")
        raise AssertionError("a text that could not be tokenized can be")


def _rust_encoder(tokenizer: Any) -> Callable[[Sequence[str], bool], list[TokenArray]] | None:
    """Returns a function that calls the tokenizers library directly, without offsets, copies and warnings; None if the tokenizer's class changes the call."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    if (
        not isinstance(tokenizer, PreTrainedTokenizerFast)
        or kind._encode_plus is not PreTrainedTokenizerFast._encode_plus
        or kind.__call__ is not PreTrainedTokenizerBase.__call__
    ):
        return None
    backend = tokenizer.backend_tokenizer

    def encode(texts: Sequence[str], special: bool) -> list[TokenArray]:
        # transformers sets these at every call, so another caller may have changed them.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = tokenizer.split_special_tokens
        try:
            encodings = backend.encode_batch_fast(texts, add_special_tokens=special)
        except BaseException as e:
            if "ThreadPoolBuildError" not in str(e):
                raise
            raise BatchgenError(
                "the tokenizer cannot start its threads: too many processes and threads run already",
                "raise the limit (ulimit -u, or --pids-limit of a container), or set TOKENIZERS_PARALLELISM=false",
            ) from e
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    return encode


def _python_encoder(tokenizer: Any) -> Callable[[Sequence[str], bool], list[TokenArray]]:
    """Returns a function that calls a tokenizer written in Python, or with Python around the library."""

    def encode(texts: Sequence[str], special: bool) -> list[TokenArray]:
        with quiet():
            lists = tokenizer(list(texts), add_special_tokens=special)["input_ids"]
        return [np.array(ids, dtype=np.int32) for ids in lists]

    return encode


def _text_batches(texts: Sequence[str], limits: EncoderLimits) -> Iterator[Sequence[str]]:
    start = characters = 0
    for i, text in enumerate(texts):
        full = i - start == limits.batch_texts or characters + len(text) > limits.batch_characters
        if i > start and full:
            yield texts[start:i]
            start, characters = i, 0
        characters += len(text)
    if start < len(texts):
        yield texts[start:]


def _of_a_text(error: BaseException) -> bool:
    """Whether a text can have caused the error. A panic of the Rust library counts, although it is not an `Exception`."""
    if isinstance(error, Exception):
        return not isinstance(error, (MemoryError, BatchgenError))
    return type(error).__name__ == "PanicException"


def _reason(text: str, error: BaseException) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        return f"character {e.start} is half of a surrogate pair (U+{ord(text[e.start]):04X})"
    return first_line(error)


Texts = tuple[TokenArray, ...]
_SETS_KEPT = 1024  # sets of choices; most rows of a job have the same ones


class TextEncoder:
    """Tokenizes texts without special tokens around them."""

    def __init__(self, tokenizer: LoadedTokenizer, encoder: Encoder) -> None:
        self._encoder = encoder
        self._vocab_size = tokenizer.vocab_size
        ends, own = tokenizer.eos_token_ids, tokenizer.hf_tokenizer.eos_token_id
        self._end = own if own in ends else next(iter(ends), None)
        """The end token: the tokenizer's if it is one of the model's (in a chat model it ends a turn), else the model's first one."""
        self.choices = lru_cache(maxsize=_SETS_KEPT)(self._choices)
        """`_choices`, with its last results kept."""

    def _choices(self, choices: tuple[str, ...]) -> Texts | RowError:
        """Returns the tokens of each choice, in order. If one choice is the beginning of another, all get the end token.

        Returns an error of type `unsupported_parameter` if a choice has no tokens, or if two cannot be told apart.
        """
        arrays = self.texts(choices)
        for choice, array in zip(choices, arrays, strict=True):
            if isinstance(array, RowError):
                return RowError("unsupported_parameter", f"the choice {choice!r}: {array.message}")
            if len(array) == 0:
                return RowError("unsupported_parameter", f"the choice {choice!r} has no tokens")
        whole = [array for array in arrays if not isinstance(array, RowError)]
        pair = _begins(whole)
        if pair is None:
            return tuple(whole)
        one, other = (choices[i] for i in pair)
        if len(whole[pair[0]]) == len(whole[pair[1]]):
            return RowError("unsupported_parameter", f"the choices {one!r} and {other!r} have the same tokens")
        if self._end is None:
            return RowError(
                "unsupported_parameter",
                f"the tokens of the choice {one!r} begin those of {other!r}, and the model has no end token that would tell them apart",
            )
        return tuple(np.append(array, np.int32(self._end)) for array in whole)

    def texts(self, texts: Sequence[str]) -> list[TokenArray | RowError]:
        """Returns the tokens of each text, possibly none. Error messages call the text "it"."""
        return [self._known(tokens) for tokens in self._encoder.encode(texts, special=False, what="it")]

    def _known(self, tokens: TokenArray | RowError) -> TokenArray | RowError:
        if not isinstance(tokens, RowError) and len(tokens) and int(tokens.max()) >= self._vocab_size:
            error = f"it has token {int(tokens.max())}, and the model knows {self._vocab_size} tokens"
            return RowError("invalid_row", error)
        return tokens


def _begins(texts: Sequence[TokenArray]) -> tuple[int, int] | None:
    """Returns two texts of which the first is the beginning of the second or equal to it, equal ones preferred; None if there are none."""
    # In this order, a text comes right before the texts that begin with it.
    order = sorted(range(len(texts)), key=lambda i: texts[i].astype(">u4").tobytes())
    pairs = [
        (i, j)
        for i, j in pairwise(order)
        if len(texts[i]) <= len(texts[j]) and np.array_equal(texts[i], texts[j][: len(texts[i])])
    ]
    return min(pairs, key=lambda pair: len(texts[pair[1]]) - len(texts[pair[0]]), default=None)
