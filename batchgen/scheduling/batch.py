"""One step as the scheduler decides it: which spans run, with which tokens, and which rows of logits are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchgen.scheduling.sequence import Branch, GenerationSequence, Saved, Span, State
from batchgen.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of a step."""

    batch_size: int
    """Most sequences running at once."""
    max_batch_tokens: int
    """Most tokens in one forward."""
    max_prefill_tokens: int
    """Of those, most that are not one sequence's next token."""
    max_scored_tokens: int = 4096
    """Most tokens of texts scored in one forward: each needs the logits of the whole vocabulary."""
    max_kv_read: int | None = None
    """Most tokens whose KV is read, those of a node once; None: no limit."""


@dataclass(frozen=True, slots=True)
class Work:
    """A span's share of a step: its tokens at positions [start, stop)."""

    span: Span
    start: int
    stop: int
    logits: int
    """First position after which the logits are wanted; `stop` for none."""


@dataclass(frozen=True, slots=True)
class Copy:
    """The KV of one page into another: a node's tail into the first page of a child."""

    source: int
    to: int


@dataclass(frozen=True, slots=True)
class Save:
    """Pages that a node gives up, to host memory."""

    pages: tuple[int, ...]
    to: Saved


@dataclass(frozen=True, slots=True)
class Load:
    """Of pages that were saved those from the `first`-th on, back into these."""

    source: Saved
    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass, packed in depth-first order, and what goes with it."""

    works: tuple[Work, ...]
    moves: tuple[Copy | Save | Load, ...]
    """Of pages, before the forward, one after the other."""
    preempted: tuple[GenerationSequence, ...]
    started: tuple[GenerationSequence, ...]
    """Sequences that begin, or come back, in this step."""
    ready: tuple[GenerationSequence, ...]
    """Of those, the ones whose prompt ends at a node: they draw from the node's logits, without a forward."""
    scored: tuple[GenerationSequence, ...]
    """Texts whose last token was scored at a node: they are finished without a forward."""

    @property
    def num_tokens(self) -> int:
        return sum(w.stop - w.start for w in self.works)


class Budget:
    """What a step may still take. The first work always fits, or nothing would ever run."""

    def __init__(self, limits: Limits) -> None:
        self.tokens = limits.max_batch_tokens
        """Left for anything."""
        self._prefill = limits.max_prefill_tokens
        self._scored = limits.max_scored_tokens
        self._kv = limits.max_kv_read
        self._read: set[Branch] = set()
        self.full = False
        """Whether the KV budget has turned something away."""
        self.works: list[Work] = []

    @property
    def prefill(self) -> int:
        """Tokens left for prompts."""
        return 0 if self.full else min(self.tokens, self._prefill)

    def decode(self, seq: GenerationSequence) -> bool:
        """Takes the sequence's next token into the step; False when the budget is spent."""
        if self.tokens < 1 or not self._reads(seq, seq.end):
            return False
        self.tokens -= 1
        self.works.append(Work(seq, seq.computed, seq.end, seq.computed))
        return True

    def slice(self, span: Span) -> None:
        """Takes as much of the span's prompt into the step as the budget allows, maybe nothing."""
        start, wanted = span.computed, span.logits_from
        stop = min(span.end, start + self.prefill)
        if span.scoring:
            stop = min(stop, max(start, wanted) + self._scored)
        if stop <= start or not self._reads(span, stop):
            return
        logits = min(max(wanted, start), stop)
        self.tokens -= stop - start
        self._prefill -= stop - start
        self._scored -= stop - logits
        self.works.append(Work(span, start, stop, logits))

    def _reads(self, span: Span, stop: int) -> bool:
        """Whether the KV that the span reads fits too; it is taken then."""
        if self._kv is None:
            return True
        path = [branch for branch in span.path if branch not in self._read]
        tokens = stop - span.start + sum(branch.end - branch.start for branch in path)
        if tokens > self._kv and self.works:
            self.full = True
            return False
        self._kv -= tokens
        self._read.update(path)
        return True


def size_of(works: Sequence[Work]) -> int:
    """Tokens of the works."""
    return sum(work.stop - work.start for work in works)


def tokens_of(works: Sequence[Work]) -> NDArray[np.int64]:
    """[T] the packed batch; 0 where only the device knows the token (`drawn_of`)."""
    tokens = np.zeros(size_of(works), dtype=np.int64)
    at = 0
    for work in works:
        size = work.stop - work.start
        if size > 1 or not _is_unseen(work):
            tokens[at : at + size] = work.span.tokens(work.start, work.stop)
        at += size
    return tokens


def drawn_of(works: Sequence[Work]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[M] places in the packed batch whose token was drawn in the step before and is not on the host yet, and [M] their sequences' slots."""
    places: list[int] = []
    slots: list[int] = []
    end = 0
    for work in works:
        end += work.stop - work.start
        if _is_unseen(work):
            assert isinstance(work.span, GenerationSequence)
            places.append(end - 1)
            slots.append(work.span.slot)
    return np.asarray(places, dtype=np.int64), np.asarray(slots, dtype=np.int64)


def _is_unseen(work: Work) -> bool:
    """Whether the host has not seen the work's last token. It is the only one then: a sequence that comes back is known whole."""
    span = work.span
    return isinstance(span, GenerationSequence) and span.unseen > 0 and work.stop == span.end


def wanted_of(works: Sequence[Work]) -> NDArray[np.int64]:
    """[N] places in the packed batch whose logits are wanted."""
    places: list[int] = []
    end = 0
    for work in works:
        end += work.stop - work.start
        places += range(end - (work.stop - work.logits), end)
    return np.asarray(places, dtype=np.int64)


def halves(works: Sequence[Work]) -> tuple[list[Work], list[Work]]:
    """Works of two or more tokens as two sets of about as many, in their order; one of them may be cut in two."""
    room = size_of(works) // 2
    first: list[Work] = []
    second: list[Work] = []
    for work in works:
        cut = min(work.stop, work.start + room)
        room -= cut - work.start
        if cut > work.start:
            first.append(Work(work.span, work.start, cut, min(work.logits, cut)))
        if cut < work.stop:
            second.append(Work(work.span, cut, work.stop, max(work.logits, cut)))
    return first, second


def count_step(stats: EngineStats, step: Step) -> None:
    """Counts a step that is launched and has not yet changed its spans; what it draws is counted when it is known."""
    stats.steps += 1
    for work in step.works:
        span = work.span
        if isinstance(span, GenerationSequence) and span.state is State.DECODING:
            continue
        prompt = min(work.stop, span.prompt_end)
        stats.prefill_tokens += max(0, prompt - work.start)
        behind = max(work.start, prompt)
        if isinstance(span, GenerationSequence) and not span.scoring:
            # The last token that it had drawn is run for the first time, as in any decode step.
            stats.recomputed_tokens += max(0, min(work.stop, span.end - 1) - behind)
        else:
            stats.scored_tokens += work.stop - behind
