"""Texts to score after a prompt, as tokens: a row's choices, or its completion. Knows nothing of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from batchgen.errors import RowError
from batchgen.prompts.encoding import Encoder
from batchgen.prompts.tokenizer import LoadedTokenizer
from batchgen.request import TokenArray

Texts = tuple[TokenArray, ...]
_SETS_KEPT = 1024  # of choices: most rows of a job have the same


class TextEncoder:
    """Tokens of texts alone: no special tokens are put around them."""

    def __init__(self, text: LoadedTokenizer, encoder: Encoder) -> None:
        self._encoder = encoder
        self._vocab_size = text.vocab_size
        ends, own = text.eos_token_ids, text.tokenizer.eos_token_id
        self._end = own if own in ends else next(iter(ends), None)
        """The end token: the tokenizer's where it is one of the model's, which in a chat model is the one that ends a turn."""
        self._of_choices = lru_cache(maxsize=_SETS_KEPT)(self._encode_choices)

    def choices(self, choices: tuple[str, ...]) -> Texts | RowError:
        """Their tokens, in order, none the beginning of another: where one were, all have the end token.

        An error of type `unsupported_parameter` where they cannot be told apart or have no tokens.
        """
        return self._of_choices(choices)

    def _encode_choices(self, choices: tuple[str, ...]) -> Texts | RowError:
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
                f"the tokens of the choice {one!r} begin those of {other!r}, and the model has no end token to tell them apart",
            )
        return tuple(np.append(array, np.int32(self._end)) for array in whole)

    def texts(self, texts: Sequence[str]) -> list[TokenArray | RowError]:
        """The tokens of each text, maybe none; an error's message calls the text `it`."""
        return [self._known(tokens) for tokens in self._encoder.encode(texts, special=False, what="it")]

    def _known(self, tokens: TokenArray | RowError) -> TokenArray | RowError:
        if not isinstance(tokens, RowError) and len(tokens) and int(tokens.max()) >= self._vocab_size:
            error = f"it has token {int(tokens.max())}, and the model knows {self._vocab_size} tokens"
            return RowError("invalid_row", error)
        return tokens


def _begins(texts: Sequence[TokenArray]) -> tuple[int, int] | None:
    """Two of the texts, the first of which begins the second or equals it; equal ones before others."""
    # In this order a text comes right before those that it begins, if any of them does.
    order = sorted(range(len(texts)), key=lambda i: texts[i].astype(">u4").tobytes())
    pairs = [
        (i, j)
        for i, j in pairwise(order)
        if len(texts[i]) <= len(texts[j]) and np.array_equal(texts[i], texts[j][: len(texts[i])])
    ]
    return min(pairs, key=lambda pair: len(texts[pair[1]]) - len(texts[pair[0]]), default=None)
