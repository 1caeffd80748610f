"""What has followed the same tokens before: in the outputs of other rows, and in a row's own prompt. Token ids only."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from batchgen.request import TokenArray

CONTEXTS = (8, 4, 2)
"""Numbers of tokens, the largest first, by which continuations are found."""
LONGEST_CONTEXT = CONTEXTS[0]
MAX_ENTRIES = 200_000
"""Entries of a generation of `OutputIndex`; there are up to two."""
SURE = 3
"""As many equal continuations outweigh this many others."""
_MISALIGNED = 4  # hits inside of tokens after which a search gives up


class OutputText:
    """The tokens that a row writes, behind the last tokens of its prompt. Continuations refer to it while it grows."""

    def __init__(self, prompt: TokenArray) -> None:
        self.tokens: list[int] = prompt[-LONGEST_CONTEXT:].tolist()
        self.start = self.indexed = len(self.tokens)
        """Number of tokens of the prompt, and number of tokens that are in the index."""


_Entry = tuple[list[int], int, int]
"""A text, the place in it that follows the context, and how much more often its next token has come than another one."""


class OutputIndex:
    """Continuations by the tokens before them, for each group of rows and for the job (group None).

    The newest of the most frequent ones is kept. When the index is full, the half of the entries that were used longest ago is forgotten.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._new: dict[Hashable, _Entry] = {}
        self._old: dict[Hashable, _Entry] = {}

    def add(self, text: OutputText, group: Hashable) -> int:
        """Adds the tokens that a text has got since the last time. Returns their number."""
        tokens, count = text.tokens, len(text.tokens) - text.indexed
        for at in range(text.indexed, len(tokens)):
            for length in CONTEXTS:
                if length <= at:
                    context = tuple(tokens[at - length : at])
                    self._note((group, context), tokens, at)
                    if group is not None:
                        self._note((None, context), tokens, at)
        text.indexed = len(tokens)
        return count

    def find(self, group: Hashable, context: tuple[int, ...]) -> Sequence[int]:
        """Returns what has followed the context in a group, at most 32 tokens; nothing if it is not known."""
        entry = self._entry((group, context))
        return entry[0][entry[1] : entry[1] + 32] if entry is not None else ()

    def _note(self, key: Hashable, tokens: list[int], at: int) -> None:
        entry = self._entry(key)
        if entry is None:
            self._put(key, (tokens, at, 1))
            return
        known, place, sure = entry
        if known[place] == tokens[at]:
            self._put(key, (tokens, at, min(sure + 1, SURE)))
        elif sure > 1:
            self._put(key, (known, place, sure - 1))
        else:
            self._put(key, (tokens, at, 1))

    def _entry(self, key: Hashable) -> _Entry | None:
        return self._new.get(key) or self._old.get(key)

    def _put(self, key: Hashable, entry: _Entry) -> None:
        if len(self._new) >= self._max_entries:
            self._old, self._new = self._new, {}
        self._new[key] = entry


class PromptText:
    """A prompt that is searched for the last tokens of its completion."""

    def __init__(self, prompt: TokenArray) -> None:
        self._tokens = np.ascontiguousarray(prompt, dtype=np.int32)
        self._bytes = self._tokens.tobytes()

    def find(self, context: tuple[int, ...]) -> Sequence[int]:
        """Returns what follows the last place where the context stands, at most 32 tokens; nothing if it stands nowhere before the end."""
        wanted, end = np.array(context, dtype=np.int32).tobytes(), len(self._bytes) - 4
        for _ in range(_MISALIGNED):
            at = self._bytes.rfind(wanted, 0, max(0, end))
            if at < 0:
                break
            if at % 4 == 0:
                place = at // 4 + len(context)
                found: list[int] = self._tokens[place : place + 32].tolist()
                return found
            end = at + len(wanted) - 1
        return ()
