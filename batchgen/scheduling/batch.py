"""One step as the scheduler decides it: which spans run, with which tokens, and who wants which rows of logits.

A `ScheduledBatch` is made once and read by everyone: the runner takes its tokens, the sampler its rows, the scheduler what
they mean for the sequences. Integers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchgen.errors import RowError
from batchgen.scheduling.sequence import GenerationSequence, PrefixNodeSpan, Span, State, SwappedBlocks, TokenScore


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


@dataclass(frozen=True, slots=True, eq=False)
class PackedSpans:
    """Spans of one forward, packed as [1, T] in depth-first order. `pack` makes it."""

    spans: tuple[ScheduledSpan, ...]
    tokens: NDArray[np.int64]
    """[T] token ids; 0 where only the device knows the token yet."""
    pending_places: NDArray[np.int64]
    """[M] places in `tokens` of those that only the device knows: sampled in the step before."""
    pending_slots: NDArray[np.int64]
    """[M] sampler slots that hold these tokens."""
    logits_places: NDArray[np.int64]
    """[N] places whose logits are wanted: the rows of logits, in order."""

    def halves(self) -> tuple[PackedSpans, PackedSpans]:
        """Two or more tokens as two batches of about as many, in their order; one span may be cut in two."""
        room = len(self.tokens) // 2
        first: list[ScheduledSpan] = []
        second: list[ScheduledSpan] = []
        for scheduled in self.spans:
            cut = min(scheduled.stop, scheduled.start + room)
            room -= cut - scheduled.start
            if cut > scheduled.start:
                first.append(replace(scheduled, stop=cut, logits=min(scheduled.logits, cut)))
            if cut < scheduled.stop:
                second.append(replace(scheduled, start=cut, logits=max(scheduled.logits, cut)))
        return pack(first), pack(second)


def pack(spans: Sequence[ScheduledSpan]) -> PackedSpans:
    """Packs spans, given in depth-first order."""
    tokens = np.zeros(sum(scheduled.stop - scheduled.start for scheduled in spans), dtype=np.int64)
    pending: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    end = 0
    for scheduled in spans:
        start, end = end, end + scheduled.stop - scheduled.start
        span = scheduled.span
        if isinstance(span, GenerationSequence) and span.num_pending_tokens > 0 and scheduled.stop == span.end:
            assert end - start == 1, "a sequence that comes back has no pending tokens"
            pending.append(start)
            slots.append(span.slot)
        else:
            tokens[start:end] = span.tokens(scheduled.start, scheduled.stop)
        wanted += range(end - (scheduled.stop - scheduled.logits), end)
    places = (np.asarray(numbers, dtype=np.int64) for numbers in (pending, slots, wanted))
    return PackedSpans(tuple(spans), tokens, *places)


class Sample(NamedTuple):
    """A token to be sampled."""

    sequence: GenerationSequence
    slot: int
    """The sequence's slot in the sampler."""
    position: int
    """Number of tokens that the sequence has sampled before."""


class KeptRow(NamedTuple):
    """Logits that a node keeps for the prompts that end there."""

    node_span: PrefixNodeSpan
    row: int


@dataclass(frozen=True, slots=True, eq=False)
class ScoreTargets:
    """Tokens of given texts whose log-probabilities a step computes, in any order."""

    rows: list[int]
    """Row of the logits."""
    tokens: list[int]
    entries: list[TokenScore]
    """Where each log-probability is stored once it is known."""


class Freed(NamedTuple):
    """What the sampler, the grammars and the node logits need not keep any longer."""

    sequences: tuple[GenerationSequence, ...] = ()
    """Sequences that ended or were preempted."""
    slots: tuple[int, ...] = ()
    """Sampler slots."""
    nodes: tuple[PrefixNodeSpan, ...] = ()
    """Nodes that no prompt samples from any more."""


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledBatch:
    """What one step runs and what is wanted of it. Made once by `of`; everything about the step is read from here."""

    packed: PackedSpans
    moves: tuple[CopyBlock | SwapOut | SwapIn, ...]
    """What to do to blocks before the forward, in this order."""
    samples: tuple[Sample, ...]
    """The tokens to sample: first those that sample from a row of this step's logits, then those of `ready`."""
    sample_rows: NDArray[np.int64]
    """[S] rows of the logits that the first S samples use."""
    kept_rows: tuple[KeptRow, ...]
    score_targets: ScoreTargets
    preempted: tuple[GenerationSequence, ...]
    started: tuple[GenerationSequence, ...]
    """Sequences that begin, or come back, in this step."""
    ready: tuple[GenerationSequence, ...]
    """Of those, the ones whose prompt ends at a node: they sample from the node's logits, without a forward."""
    scored: tuple[GenerationSequence, ...]
    """Texts whose last token is scored with this step, in its forward or at a node before it."""
    freed: Freed
    """What was freed since the batch before."""

    @classmethod
    def of(
        cls,
        spans: Sequence[ScheduledSpan],
        moves: tuple[CopyBlock | SwapOut | SwapIn, ...] = (),
        preempted: tuple[GenerationSequence, ...] = (),
        started: tuple[GenerationSequence, ...] = (),
        scored: tuple[GenerationSequence, ...] = (),
        freed: Freed = Freed(),  # noqa: B008 - immutable
    ) -> ScheduledBatch:
        """A batch of `spans`, given in depth-first order. `scored` are texts that nodes have scored to their end before it."""
        sampling: list[GenerationSequence] = []
        rows: list[int] = []
        kept: list[KeptRow] = []
        finished: list[GenerationSequence] = []
        targets = ScoreTargets([], [], [])
        row = 0
        for scheduled in spans:
            span, stop = scheduled.span, scheduled.stop
            first, row = row, row + stop - scheduled.logits
            if span.scoring:
                _score(scheduled, first, targets)
            if isinstance(span, PrefixNodeSpan):
                if stop == span.end and span.wanted.sampled:
                    kept.append(KeptRow(span, row - 1))
            elif isinstance(span, GenerationSequence) and span.scoring:
                if stop == span.end:
                    finished.append(span)
            elif isinstance(span, GenerationSequence) and scheduled.logits < stop:
                sampling.append(span)
                rows.append(row - 1)
        ready = tuple(seq for seq in started if seq.state is State.DECODING)
        return cls(
            packed=pack(spans),
            moves=moves,
            samples=tuple(Sample(seq, seq.slot, seq.num_sampled) for seq in (*sampling, *ready)),
            sample_rows=np.asarray(rows, dtype=np.int64),
            kept_rows=tuple(kept),
            score_targets=targets,
            preempted=preempted,
            started=started,
            ready=ready,
            scored=(*scored, *finished),
            freed=freed,
        )

    @property
    def spans(self) -> tuple[ScheduledSpan, ...]:
        return self.packed.spans

    @property
    def num_tokens(self) -> int:
        return len(self.packed.tokens)


def _score(scheduled: ScheduledSpan, row: int, targets: ScoreTargets) -> None:
    """Adds what is scored in a span whose first row of logits is `row`."""
    span = scheduled.span
    for position in range(scheduled.logits, scheduled.stop):
        for token in span.next_tokens(position):
            entry = span.scores[position, token] = TokenScore()
            targets.rows.append(row + position - scheduled.logits)
            targets.tokens.append(token)
            targets.entries.append(entry)


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What a step has computed, on the host."""

    batch: ScheduledBatch
    sequences: Sequence[GenerationSequence]
    """The sequences that a token was sampled for."""
    tokens: Sequence[int]
    valid: Sequence[bool]
    """By sequence: False where its logits are not numbers (a NaN, +inf, or nothing but -inf). The token means nothing then."""
    logprobs: Sequence[Any]
    """By sequence: `sampling.logprobs.TokenLogprobs`, or None where none are wanted."""
    score_logprobs: Sequence[float]
    """By entry of the batch's `score_targets`."""
    score_likeliest: Sequence[float]
    """By entry: 1 where the token is the likeliest in its place, else 0."""


class SequenceUpdate(NamedTuple):
    """What a step means for one sequence. With nothing but the sequence: it starts or comes back."""

    sequence: GenerationSequence
    token: int | None = None
    reason: str | None = None
    """Why the completion has ended with this token, if it has; "scored" for a text that is scored to its end."""
    error: RowError | None = None
    """Why the sequence has failed."""


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


@dataclass(slots=True)
class TokenCounts:
    """Tokens that went through the scheduler, summed over steps."""

    steps: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    scored_tokens: int = 0
    decode_sequences: int = 0
    """Tokens that were sampled for sequences that had not ended."""
    completion_tokens: int = 0
    """Of those, the ones that became part of a completion."""

    def count(self, batch: ScheduledBatch) -> None:
        """Counts a batch that has just been scheduled; what it samples is counted when it is known."""
        self.steps += 1
        for scheduled in batch.spans:
            span = scheduled.span
            if isinstance(span, GenerationSequence) and span.state is State.DECODING:
                continue
            prompt = min(scheduled.stop, span.prompt_end)
            self.prefill_tokens += max(0, prompt - scheduled.start)
            behind = max(scheduled.start, prompt)
            if isinstance(span, GenerationSequence) and not span.scoring:
                # The last token that it had sampled is run for the first time, as in any decode step.
                self.recomputed_tokens += max(0, min(scheduled.stop, span.end - 1) - behind)
            else:
                self.scored_tokens += scheduled.stop - behind
