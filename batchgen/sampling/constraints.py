"""Which tokens the running sequences may sample next. Knows token ids, no logits, nor how grammars are written.

A sequence goes by any name that its caller gives it, from its `add` to its `remove`.

A token may follow when what was sampled and its bytes begin a text of the row's grammar (grammars.py). The row's end tokens,
the model's and its `stop_token_ids`, may follow where the text is whole and nowhere else; other special tokens never. So a
completion that ends with `stop` is a text of the grammar; one that was cut (`length`) is the beginning of one. Within that
the choice is the model's own: no spelling in tokens is preferred or forced.

A model that marks its thoughts has them first: while it thinks every token may follow but the end tokens, and the grammar begins
with the answer. Where the prompt has not opened the thoughts, the mark that opens them may be the first token. Thoughts that have taken
their budget are ended: the tokens of the mark behind them are the only ones that may follow.

The masks of the whole batch are computed in another thread, which does not hold the interpreter, while the model runs.
Shapes: N rows, V vocabulary; 32 tokens to a word of a mask, the first in the lowest bit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchgen.errors import RowError
from batchgen.parsers.thinking import ThinkingFormat, ThoughtStream
from batchgen.request import TokenArray
from batchgen.sampling.grammars import Grammar, Vocabulary, one_line
from batchgen.sampling.stopping import PROMPT_END, Detokenizer
from batchgen.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

_ALL = np.uint32(0xFFFFFFFF)


@dataclass(eq=False)
class _Row:
    grammar: Grammar | None
    matcher: LLMatcher | None
    """None for a row whose thoughts alone are limited."""
    ends: frozenset[int]
    """The tokens that end its completion."""
    tokens: list[int]
    """What was sampled of the answer, without an end token."""
    error: RowError | None
    thoughts: ThoughtStream | None = None
    """None once the answer has begun."""
    budget: int | None = None
    """Tokens that the thoughts may still take; None for no limit."""
    forced: list[int] = field(default_factory=list)
    """The only tokens that may follow, one after the other: they end the thoughts."""

    @property
    def thinking(self) -> bool:
        return self.thoughts is not None and self.thoughts.thinking


@dataclass(frozen=True)
class _Work:
    names: list[Hashable]
    masks: Future[NDArray[np.uint32]]


class Constraints:
    """Grammars of the running sequences, and the masks of their next tokens.

    `tokenizer` is transformers'; `vocab_size` is the width of the logits, which may be more or less than the tokenizer's.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        thinking: ThinkingFormat | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._thinking = thinking
        self._piece = Detokenizer(tokenizer).piece if thinking is not None else None
        self._opening = None if thinking is None else _opening(tokenizer, thinking, vocab_size)
        """The token that the mark which opens thoughts begins with, if that is a token of its own."""
        self._vocabulary = Vocabulary(tokenizer, vocab_size)
        self._vocab_size = vocab_size
        self._eos = frozenset(i for i in eos_token_ids if i < vocab_size)
        self._rows: dict[Hashable, _Row] = {}
        self._thread = ThreadPoolExecutor(1, "masks")  # begins with the first work
        self._work: _Work | None = None

    def check(self, params: SamplingParams) -> None:
        """Raises `ValueError`, in one line, for a regex or schema that cannot be used. Any thread may call this, as often as it likes.

        Raises `UsageError` where none can be used: llguidance is missing, or the tokenizer is of another kind.
        """
        if params.constrained:
            fault = self._vocabulary.grammar(params).fault
            if fault:
                raise ValueError(fault)

    @property
    def used(self) -> bool:
        """Whether any sequence has a grammar."""
        return bool(self._rows)

    def add(
        self, name: Hashable, params: SamplingParams, generated: Sequence[int] = (), prompt: TokenArray | None = None
    ) -> None:
        """A sequence begins. After a preemption `generated` are the tokens that it had already sampled. `prompt` tells whether it begins in thoughts.

        A grammar that cannot be used is raised by `accept`, for its row alone; `UsageError` as in `check`.
        """
        self._settle()
        if name in self._rows:
            raise ValueError(f"{name} is in use")
        thoughts = self._thoughts(params, prompt)
        if not params.constrained and thoughts is None:
            return
        grammar = self._vocabulary.grammar(params) if params.constrained else None
        ends = self._eos | {i for i in params.stop_token_ids if i < self._vocab_size}
        error = RowError("constraint_error", grammar.fault) if grammar is not None and grammar.fault else None
        row = self._rows[name] = _Row(
            grammar,
            None if grammar is None else grammar.matcher.deep_copy(),
            ends,
            [],
            error,
            thoughts,
            params.reasoning_budget,
        )
        self._limit(row)
        for token in generated:
            if error is None and not self._thought(row, token):
                row.tokens.append(token)
        if row.error is None and row.tokens and row.matcher is not None and not row.matcher.consume_tokens(row.tokens):
            self._replace_matcher(row)

    def _thoughts(self, params: SamplingParams, prompt: TokenArray | None) -> ThoughtStream | None:
        """Follows a completion through its thoughts, if it may have any and they matter here."""
        if self._thinking is None or self._piece is None or prompt is None or params.reasoning != "auto":
            return None
        end = "".join(map(self._piece, prompt[-PROMPT_END:].tolist()))
        stream = ThoughtStream(self._thinking, end, self._piece)
        return stream if stream.thinking or self._opening is not None else None

    def _thought(self, row: _Row, token: int) -> bool:
        """Takes a token that was sampled; whether it is one of the thoughts or their marks, not of the answer."""
        if row.thoughts is None:
            return False
        if row.matcher is not None and not row.thinking:  # by the mask it opens the thoughts, or begins the answer
            row.thoughts.thinking = token == self._opening
            if not row.thinking:
                row.thoughts = None
                return False
        if row.forced:
            row.forced.pop(0)
        elif row.budget is not None and row.thinking:
            row.budget -= 1
        begins = row.thoughts.append(token)
        if not begins:
            self._limit(row)
            return True
        answered, rest = row.thoughts.answer_start == 0, row.thoughts.begins.strip()
        row.thoughts = None
        row.forced.clear()
        if rest and row.matcher is not None:  # a token that ends the mark and begins the answer
            row.tokens += self._tokenizer.encode(rest, add_special_tokens=False)
            if not row.matcher.consume_tokens(row.tokens):
                row.error = _went_wrong(row, "the mark behind the thoughts runs into the answer")
        return not answered

    def _limit(self, row: _Row) -> None:
        """Ends the thoughts of a row that has no tokens left for them."""
        if row.thoughts is None or not row.thinking or row.budget is None or row.budget > 0 or row.forced:
            return
        assert self._thinking is not None
        ending = self._thinking.ending(begun=row.thoughts.count > 0)
        row.forced = self._tokenizer.encode(ending, add_special_tokens=False)

    def remove(self, name: Hashable) -> None:
        """The sequence leaves; nothing of it stays. Does nothing for one without a grammar."""
        if name in self._rows:
            self._settle()
            del self._rows[name]

    def clear(self) -> None:
        """All sequences leave."""
        self._settle()
        self._rows.clear()

    def start(self, names: Sequence[Hashable]) -> None:
        """Begins to compute the masks of these sequences in another thread. `mask` of the same ones then takes them."""
        self._settle()
        rows = [self._rows.get(name) for name in names] if self._rows else []
        if any(rows):
            self._work = _Work(list(names), self._thread.submit(self._masks, rows))

    def mask(self, names: Sequence[Hashable]) -> torch.Tensor | None:
        """The tokens that may follow, int32 [N, ceil(V / 32)] on the host, in the order of `names`; None when none of them has a grammar.

        Waits for what `start` began, or computes it now. Rows without a grammar have all bits set; those whose grammar went
        wrong have all but the end tokens', so that they come to `accept`.
        """
        if self._work is None or self._work.names != list(names):
            self.start(names)
        if self._work is None:
            return None
        masks = self._work.masks.result()
        return torch.from_numpy(masks.view(np.int32)[:, : (self._vocab_size + 31) // 32])

    def accept(self, name: Hashable, token: int) -> bool:
        """The token was sampled, under the sequence's mask. Returns whether the text is whole and nothing may follow: the completion ends with `stop`.

        Raises `RowError("constraint_error")` when the row's grammar went wrong, here or before.
        """
        self._settle()
        row = self._rows.get(name)
        if row is None:
            return False
        if row.error is None and self._thought(row, token):
            if row.error is not None:
                raise row.error
            return False
        if row.matcher is None:
            return False
        ended = token in row.ends
        if row.error is None and ended and not row.matcher.is_accepting():
            row.error = _went_wrong(row, "an end token was drawn inside the text")
        elif row.error is None and not ended:
            row.tokens.append(token)
            if not row.matcher.consume_token(token):
                self._replace_matcher(row)
        if row.error is not None:
            raise row.error
        return ended or row.matcher.is_stopped()

    def _settle(self) -> None:
        """Before a matcher is touched: waits until none is at work. The masks are out of date then."""
        work, self._work = self._work, None
        if work is not None:
            work.masks.result()

    def _masks(self, rows: Sequence[_Row | None]) -> NDArray[np.uint32]:
        """[N, V // 32 + 1]: with a bit for llguidance's end, which is not set."""
        masks = np.full((len(rows), self._vocab_size // 32 + 1), _ALL, dtype=np.uint32)
        for i, row in enumerate(rows):
            if row is not None and row.thinking and row.error is None:
                self._mask_thoughts(masks[i], row)
        ours = {
            i: row
            for i, row in enumerate(rows)
            if row is not None and (row.error is not None or (row.matcher is not None and not row.thinking))
        }
        self._vocabulary.fill(masks, [(row.matcher, i) for i, row in ours.items() if row.error is None and row.matcher])
        for i, row in ours.items():
            if row.error is None and row.matcher is not None and row.matcher.is_error():
                self._replace_matcher(row)
                if row.error is None:
                    self._vocabulary.fill(masks, [(row.matcher, i)])
        self._place_ends(masks, ours)
        for i, row in ours.items():
            if row.error is None and row.thoughts is not None and self._opening is not None:
                masks[i, self._opening // 32] |= np.uint32(1 << self._opening % 32)
        for i in np.flatnonzero(~masks.any(axis=1)).tolist():
            if ours[i].error is None:  # the model has no end token, or it is one that the text would have gone on with
                ours[i].error = _went_wrong(ours[i], "no token may follow")
        failed = {i: row for i, row in ours.items() if row.error is not None}
        if failed:
            masks[list(failed)] = _ALL
            self._place_ends(masks, failed)
        return masks

    def _mask_thoughts(self, mask: NDArray[np.uint32], row: _Row) -> None:
        """What may follow in thoughts: anything but an end, which would leave the answer out; or what ends them."""
        if row.forced:
            mask[:] = 0
            mask[row.forced[0] // 32] = np.uint32(1 << row.forced[0] % 32)
        elif row.matcher is not None:
            for token in row.ends:
                mask[token // 32] &= ~np.uint32(1 << token % 32)

    def _place_ends(self, masks: NDArray[np.uint32], rows: dict[int, _Row]) -> None:
        """Allows the rows' end tokens where llguidance allows its end, and nowhere else."""
        at = np.fromiter(rows, dtype=np.int64, count=len(rows))
        end = self._vocabulary.end
        whole = masks[at, end // 32] >> np.uint32(end % 32) & np.uint32(1)
        whole[[row.error is not None for row in rows.values()]] = 0
        _put(masks, at, [end], np.zeros_like(whole))
        _put(masks, at, self._eos, whole)
        for place, (i, row) in enumerate(rows.items()):
            if len(row.ends) > len(self._eos):
                _put(masks, np.array([i]), row.ends - self._eos, whole[place : place + 1])

    def _replace_matcher(self, row: _Row) -> None:
        """Replaces a failed matcher by one with its own lexer. Marks the row failed if that fails too.

        The rows of a grammar share a lexer, and may together have come to its limits; alone the row may go on.
        """
        assert row.grammar is not None
        row.matcher = self._vocabulary.fresh(row.grammar)
        if row.tokens:
            row.matcher.consume_tokens(row.tokens)
        if not row.matcher.is_error() and not row.matcher.is_stopped():
            row.matcher.compute_bitmask()
        if row.matcher.is_error():
            row.error = _went_wrong(row, one_line(row.matcher.get_error()))


def _opening(tokenizer: Any, thinking: ThinkingFormat, vocab_size: int) -> int | None:
    ids = tokenizer.encode(thinking.open, add_special_tokens=False)
    marks = set(tokenizer.get_added_vocab().values())
    return ids[0] if ids and ids[0] in marks and ids[0] < vocab_size else None


def _put(
    masks: NDArray[np.uint32], rows: NDArray[np.int64], tokens: Iterable[int], allowed: NDArray[np.uint32]
) -> None:
    """Sets each token's bit in some rows [n] to `allowed` [n], 0 or 1."""
    for token in tokens:
        word, bit = divmod(token, 32)
        masks[rows, word] = masks[rows, word] & ~np.uint32(1 << bit) | allowed << np.uint32(bit)


def _went_wrong(row: _Row, why: str) -> RowError:
    return RowError("constraint_error", f"the grammar went wrong after {len(row.tokens)} tokens: {why}")
