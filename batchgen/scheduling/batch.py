"""One step as the scheduler decides it: which spans run, with which tokens, and which rows of logits are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchgen.scheduling.sequence import GenerationSequence, PrefixNodeSpan, Span, State, SwappedBlocks
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
class ScheduledSpan:
    """A span's share of a step: its tokens at positions [start, stop)."""

    span: Span
    start: int
    stop: int
    logits: int
    """First position after which the logits are wanted; `stop` for none."""
    read: int = -1
    """`Span.read_slot` when it was scheduled."""


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """The KV of one block into another: a node's tail into the first block of a child."""

    source: int
    to: int


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Blocks that a node gives up, to host memory."""

    blocks: tuple[int, ...]
    to: SwappedBlocks


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Of blocks that were saved those from the `first`-th on, back into these."""

    source: SwappedBlocks
    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One forward pass, packed in depth-first order, and what goes with it."""

    spans: tuple[ScheduledSpan, ...]
    moves: tuple[CopyBlock | SwapOut | SwapIn, ...]
    """Of blocks, before the forward, one after the other."""
    preempted: tuple[GenerationSequence, ...]
    started: tuple[GenerationSequence, ...]
    """Sequences that begin, or come back, in this step."""
    ready: tuple[GenerationSequence, ...]
    """Of those, the ones whose prompt ends at a node: they draw from the node's logits, without a forward."""
    scored: tuple[GenerationSequence, ...]
    """Texts whose last token was scored at a node: they are finished without a forward."""

    @property
    def num_tokens(self) -> int:
        return sum(w.stop - w.start for w in self.spans)


class Budget:
    """What a step may still take. The first work always fits, or nothing would ever run."""

    def __init__(self, limits: Limits) -> None:
        self.tokens = limits.max_batch_tokens
        """Left for anything."""
        self._prefill = limits.max_prefill_tokens
        self._scored = limits.max_scored_tokens
        self._kv = limits.max_kv_read
        self._read: set[PrefixNodeSpan] = set()
        self.full = False
        """Whether the KV budget has turned something away."""
        self.spans: list[ScheduledSpan] = []

    @property
    def prefill(self) -> int:
        """Tokens left for prompts."""
        return 0 if self.full else min(self.tokens, self._prefill)

    def decode(self, seq: GenerationSequence) -> bool:
        """Takes the sequence's next token into the step; False when the budget is spent."""
        if self.tokens < 1 or not self._reads(seq, seq.end):
            return False
        self.tokens -= 1
        self.spans.append(ScheduledSpan(seq, seq.computed, seq.end, seq.computed, seq.read_slot))
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
        self.spans.append(ScheduledSpan(span, start, stop, logits, span.read_slot))

    def _reads(self, span: Span, stop: int) -> bool:
        """Whether the KV that the span reads fits too; it is taken then."""
        if self._kv is None:
            return True
        path = [node_span for node_span in span.path if node_span not in self._read]
        tokens = stop - span.start + sum(node_span.end - node_span.start for node_span in path)
        if tokens > self._kv and self.spans:
            self.full = True
            return False
        self._kv -= tokens
        self._read.update(path)
        return True


def size_of(spans: Sequence[ScheduledSpan]) -> int:
    """Tokens of the works."""
    return sum(scheduled.stop - scheduled.start for scheduled in spans)


def tokens_of(spans: Sequence[ScheduledSpan]) -> NDArray[np.int64]:
    """[T] the packed batch; 0 where only the device knows the token (`pending_of`)."""
    tokens = np.zeros(size_of(spans), dtype=np.int64)
    at = 0
    for scheduled in spans:
        size = scheduled.stop - scheduled.start
        if size > 1 or not _is_pending(scheduled):
            tokens[at : at + size] = scheduled.span.tokens(scheduled.start, scheduled.stop)
        at += size
    return tokens


def pending_of(spans: Sequence[ScheduledSpan]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[M] places in the packed batch whose token was drawn in the step before and is not on the host yet, and [M] their sequences' slots."""
    places: list[int] = []
    slots: list[int] = []
    end = 0
    for scheduled in spans:
        end += scheduled.stop - scheduled.start
        if _is_pending(scheduled):
            assert isinstance(scheduled.span, GenerationSequence)
            places.append(end - 1)
            slots.append(scheduled.span.slot)
    return np.asarray(places, dtype=np.int64), np.asarray(slots, dtype=np.int64)


def _is_pending(scheduled: ScheduledSpan) -> bool:
    """Whether the host has not seen the work's last token. It is the only one then: a sequence that comes back is known whole."""
    span = scheduled.span
    return isinstance(span, GenerationSequence) and span.num_pending_tokens > 0 and scheduled.stop == span.end


def wanted_of(spans: Sequence[ScheduledSpan]) -> NDArray[np.int64]:
    """[N] places in the packed batch whose logits are wanted."""
    places: list[int] = []
    end = 0
    for scheduled in spans:
        end += scheduled.stop - scheduled.start
        places += range(end - (scheduled.stop - scheduled.logits), end)
    return np.asarray(places, dtype=np.int64)


def halves(spans: Sequence[ScheduledSpan]) -> tuple[list[ScheduledSpan], list[ScheduledSpan]]:
    """Works of two or more tokens as two sets of about as many, in their order; one of them may be cut in two."""
    room = size_of(spans) // 2
    first: list[ScheduledSpan] = []
    second: list[ScheduledSpan] = []
    for scheduled in spans:
        cut = min(scheduled.stop, scheduled.start + room)
        room -= cut - scheduled.start
        if cut > scheduled.start:
            first.append(ScheduledSpan(scheduled.span, scheduled.start, cut, min(scheduled.logits, cut)))
        if cut < scheduled.stop:
            second.append(ScheduledSpan(scheduled.span, cut, scheduled.stop, max(scheduled.logits, cut)))
    return first, second


def count_step(stats: EngineStats, step: ScheduledBatch) -> None:
    """Counts a step that is launched and has not yet changed its spans; what it draws is counted when it is known."""
    stats.steps += 1
    for scheduled in step.spans:
        span = scheduled.span
        if isinstance(span, GenerationSequence) and span.state is State.DECODING:
            continue
        prompt = min(scheduled.stop, span.prompt_end)
        stats.prefill_tokens += max(0, prompt - scheduled.start)
        behind = max(scheduled.start, prompt)
        if isinstance(span, GenerationSequence) and not span.scoring:
            # The last token that it had drawn is run for the first time, as in any decode step.
            stats.recomputed_tokens += max(0, min(scheduled.stop, span.end - 1) - behind)
        else:
            stats.scored_tokens += scheduled.stop - behind
