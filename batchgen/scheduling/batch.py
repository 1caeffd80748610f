"""What one step runs: the scheduled spans, their tokens, and which sequence or text wants which row of logits. Integers only.

A `ScheduledBatch` is made once. The runner reads its tokens, the executor and the sampler its rows of logits, and the scheduler the
effect of its output on the sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchgen.errors import RowError
from batchgen.request import IMAGE_IDS
from batchgen.scheduling.sequence import (
    GenerationSequence,
    PrefixNodeSpan,
    Span,
    State,
    TokenScore,
    uncut,
)
from batchgen.stats import SchedulerCounts


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of a step."""

    batch_size: int
    """Maximum number of running sequences."""
    max_batch_tokens: int
    """Maximum number of tokens in one forward."""
    max_prefill_tokens: int
    """Maximum number of tokens among them that are not the next token of a decoding sequence."""
    max_scored_tokens: int = 4096
    """Maximum number of tokens of texts that are scored in one forward; each needs the logits of the whole vocabulary."""
    every_output: bool = False
    """Whether the model's output after every token is wanted, which pooling by the mean needs."""


class ScheduledSpan(NamedTuple):
    """The part of a span that a step runs: its tokens at positions [start, stop)."""

    span: Span
    start: int
    stop: int
    logits: int
    """First position after which the logits are wanted; `stop` for none."""
    read: int = -1
    """The span's `read_state_slot` when it was scheduled."""
    drafts: tuple[int, ...] = ()
    """Draft tokens of a decoding sequence: guesses of what follows its newest token. They are the span's last tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedSpans:
    """The spans of one forward, packed as [1, T] in depth-first order. `pack` makes it."""

    spans: tuple[ScheduledSpan, ...]
    tokens: NDArray[np.int64]
    """[T] token ids; 0 for tokens that only the device knows yet."""
    pending_places: NDArray[np.int64]
    """[M] places in `tokens` of the tokens that only the device knows, because they were sampled in the step before."""
    pending_sampler_indices: NDArray[np.int64]
    """[M] the sampler indices of their sequences, under which the device holds these tokens."""
    logits_places: NDArray[np.int64]
    """[N] places whose logits are wanted, in the order of the rows of logits."""

    def halves(self) -> tuple[PackedSpans, PackedSpans]:
        """Splits two or more tokens into two batches of about the same size. A span may be cut in two where `uncut` says: one batch may be empty."""
        room = len(self.tokens) // 2
        first: list[ScheduledSpan] = []
        second: list[ScheduledSpan] = []
        for scheduled in self.spans:
            cut = uncut(scheduled.span, scheduled.start, min(scheduled.stop, scheduled.start + room))
            room -= cut - scheduled.start
            if cut > scheduled.start:
                first.append(scheduled._replace(stop=cut, logits=min(scheduled.logits, cut)))
            if cut < scheduled.stop:
                second.append(scheduled._replace(start=cut, logits=max(scheduled.logits, cut)))
        return pack(first), pack(second)


def pack(spans: Sequence[ScheduledSpan]) -> PackedSpans:
    """Packs spans, given in depth-first order."""
    tokens = np.zeros(sum(scheduled.stop - scheduled.start for scheduled in spans), dtype=np.int64)
    pending: list[int] = []
    indices: list[int] = []
    wanted: list[int] = []
    end = 0
    for scheduled in spans:
        start, end = end, end + scheduled.stop - scheduled.start
        span = scheduled.span
        if isinstance(span, GenerationSequence) and span.num_pending_tokens > 0 and scheduled.stop == span.end:
            assert end - start == 1, "a preempted sequence has no pending tokens"
            pending.append(start)
            indices.append(span.sampler_index)
        elif isinstance(span, GenerationSequence) and scheduled.start >= span.start_tokens:
            first = scheduled.start - span.start_tokens
            known = [*span.generated, *scheduled.drafts] if scheduled.drafts else span.generated
            tokens[start:end] = known[first : first + end - start]
        else:
            tokens[start:end] = span.tokens(scheduled.start, scheduled.stop)
        wanted += range(end - (scheduled.stop - scheduled.logits), end)
    places = (np.asarray(numbers, dtype=np.int64) for numbers in (pending, indices, wanted))
    return PackedSpans(tuple(spans), tokens, *places)


class StepSize(NamedTuple):
    """What the seconds of a step depend on (`step_costs`)."""

    tokens: int
    """Tokens of the forward."""
    logit_rows: int
    """Tokens whose logits are computed."""
    keys: int
    """Keys that are read, each once: those of a prefix count once for all sequences below it."""
    pairs: int
    """Pairs of a query and a key that it sees."""
    image_tokens: int = 0
    """Tokens of images, which an encoder makes first, beside the model's own work for them."""


class Sample(NamedTuple):
    """A token to be sampled."""

    sequence: GenerationSequence
    sampler_index: int
    position: int
    """Number of tokens that the sequence has sampled before."""
    drafts: tuple[int, ...] = ()
    """The last of these tokens, if they are drafts: the sample counts only if the sequence samples them in the same step."""


class KeptRow(NamedTuple):
    """A row of logits that a node keeps for the prompts that end there."""

    node_span: PrefixNodeSpan
    row: int


@dataclass(frozen=True, slots=True, eq=False)
class ScoreTargets:
    """The tokens of given texts whose log-probabilities a step computes, in any order."""

    rows: list[int]
    """By token: its row of the logits."""
    tokens: list[int]
    entries: list[TokenScore]
    """By token: where its log-probability is stored once it is known."""


class Freed(NamedTuple):
    """Sequences and nodes that the executor may forget."""

    sequences: tuple[GenerationSequence, ...] = ()
    """Sequences that ended or were preempted."""
    sampler_indices: tuple[int, ...] = ()
    nodes: tuple[PrefixNodeSpan, ...] = ()
    """Nodes that no prompt samples from any more."""


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledBatch:
    """What one step runs and which of its numbers are wanted. `of` makes it; everything about the step is read from here."""

    packed: PackedSpans
    size: StepSize
    copies: tuple[tuple[int, int], ...]
    """Copies of blocks (from, to) to make before the forward, in this order."""
    samples: tuple[Sample, ...]
    """The tokens to sample: first those from rows of this step's logits, then those of sequences whose prompt ends at a node, which sample from the
    node's logits without a forward. Those of one sequence follow one another."""
    sample_rows: NDArray[np.int64]
    """[S] rows of the logits for the first S samples."""
    kept_rows: tuple[KeptRow, ...]
    score_targets: ScoreTargets
    started: tuple[GenerationSequence, ...]
    """Sequences that begin in this step, or continue after a preemption."""
    scored: tuple[GenerationSequence, ...]
    """Texts whose last token is scored in this step's forward, or was scored at a node before it."""
    freed: Freed
    """What was freed since the batch before."""

    @classmethod
    def of(
        cls,
        spans: Sequence[ScheduledSpan],
        copies: tuple[tuple[int, int], ...] = (),
        started: tuple[GenerationSequence, ...] = (),
        scored: tuple[GenerationSequence, ...] = (),
        freed: Freed = Freed(),  # noqa: B008 - immutable
    ) -> ScheduledBatch:
        """Makes the batch of `spans`, given in depth-first order. `scored` are texts whose tokens the nodes above them have all scored."""
        samples: list[Sample] = []
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
            elif isinstance(span, GenerationSequence):
                for number in range(stop - scheduled.logits):
                    drafts = scheduled.drafts[:number]
                    samples.append(Sample(span, span.sampler_index, span.num_sampled + number, drafts))
                    rows.append(first + number)
        samples += [Sample(seq, seq.sampler_index, seq.num_sampled) for seq in started if seq.state is State.DECODING]
        packed = pack(spans)
        keys, pairs = keys_and_pairs((s.span, s.start, s.stop) for s in spans)
        images = int(np.count_nonzero(packed.tokens >= IMAGE_IDS))
        return cls(
            packed=packed,
            size=StepSize(len(packed.tokens), len(packed.logits_places), keys, pairs, images),
            copies=copies,
            samples=tuple(samples),
            sample_rows=np.asarray(rows, dtype=np.int64),
            kept_rows=tuple(kept),
            score_targets=targets,
            started=started,
            scored=(*scored, *finished),
            freed=freed,
        )

    @property
    def spans(self) -> tuple[ScheduledSpan, ...]:
        return self.packed.spans

    @property
    def num_tokens(self) -> int:
        return len(self.packed.tokens)


def keys_and_pairs(spans: Iterable[tuple[Span, int, int]]) -> tuple[int, int]:
    """Returns `StepSize.keys` and `StepSize.pairs` of a step that runs positions [start, stop) of each span."""
    keys = pairs = 0
    above: PrefixNodeSpan | None = None
    read: set[PrefixNodeSpan] = set()
    for span, start, stop in spans:
        count = stop - start
        keys += stop - span.start
        pairs += stop if count == 1 else count * (start + stop + 1) // 2
        if span.parent is not above:
            above = span.parent
            for node_span in reversed(span.path):
                if node_span in read:
                    break
                read.add(node_span)
                keys += node_span.end - node_span.start
    return keys, pairs


def _score(scheduled: ScheduledSpan, row: int, targets: ScoreTargets) -> None:
    """Adds to `targets` the tokens that are scored in a span. `row` is the span's first row of logits."""
    span = scheduled.span
    for position in range(max(scheduled.logits, span.logits_from), scheduled.stop):
        for token in span.next_tokens(position):
            entry = span.scores[position, token] = TokenScore()
            targets.rows.append(row + position - scheduled.logits)
            targets.tokens.append(token)
            targets.entries.append(entry)


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """The numbers that a step has computed, on the host."""

    batch: ScheduledBatch
    sequences: Sequence[GenerationSequence]
    """The sequence that each token was sampled for. A sequence whose drafts were right has several."""
    tokens: Sequence[int]
    valid: Sequence[bool]
    """By sequence: False if its logits are not numbers (a NaN, +inf, or nothing but -inf). The token is meaningless then."""
    logprobs: Sequence[Any]
    """By sequence: `sampling.logprobs.TokenLogprobs`, or None if they are not wanted."""
    score_logprobs: Sequence[float]
    """By entry of the batch's `score_targets`."""
    score_likeliest: Sequence[float]
    """By entry: 1 if no token is likelier in its place, else 0."""
    outputs: Sequence[NDArray[np.float32]] = ()
    """By entry, instead of its score: the model's output there [width], where requests are embedded or classified."""


class SequenceUpdate(NamedTuple):
    """The effect of a step on one sequence. Without token, reason and error: the sequence has started or continues after a preemption."""

    sequence: GenerationSequence
    token: int | None = None
    reason: str | None = None
    """Why the completion has ended with this token: its finish reason. "scored" for a text whose tokens are all scored. None if it goes on."""
    error: RowError | None = None
    """Why the sequence has failed."""


class Budget:
    """What a step may still take."""

    def __init__(self, limits: Limits) -> None:
        self.tokens = limits.max_batch_tokens
        """Tokens left."""
        self._prefill = limits.max_prefill_tokens
        self._scored = limits.max_scored_tokens
        self._every_output = limits.every_output
        self.spans: list[ScheduledSpan] = []

    @property
    def prefill(self) -> int:
        """Tokens left for prompts."""
        return min(self.tokens, self._prefill)

    def decode(self, seq: GenerationSequence) -> bool:
        """Adds the sequence's next token to the step, behind those that run again after a wrong draft. Returns False if the budget is used up."""
        stop = min(seq.end, seq.computed + self.tokens)
        if stop <= seq.computed:
            return False
        self.tokens -= stop - seq.computed
        self.spans.append(ScheduledSpan(seq, seq.computed, stop, min(stop, seq.end - 1), seq.read_state_slot))
        return True

    def draft(self, number: int, tokens: Sequence[int]) -> None:
        """Adds draft tokens to span `number` of the step, a decoding sequence's."""
        scheduled = self.spans[number]
        self.tokens -= len(tokens)
        self.spans[number] = scheduled._replace(stop=scheduled.stop + len(tokens), drafts=tuple(tokens))

    def slice(self, span: Span) -> None:
        """Adds as much of the span's prompt to the step as the budget allows, possibly nothing."""
        start, wanted = span.computed, span.computed if self._every_output else span.logits_from
        stop = min(span.end, start + self.prefill)
        if span.scoring:
            stop = min(stop, max(start, wanted) + self._scored)
        stop = self._uncut(span, start, stop)
        if stop <= start:
            return
        logits = min(max(wanted, start), stop)
        self.tokens -= stop - start
        self._prefill -= stop - start
        self._scored -= stop - logits
        self.spans.append(ScheduledSpan(span, start, stop, logits, span.read_state_slot))

    def _uncut(self, span: Span, start: int, stop: int) -> int:
        """Returns where to end so that no image or prompt is cut whose tokens see one another. One that is too large for a step has a step of its own."""
        end = uncut(span, start, stop)
        if end > start or stop <= start or self.spans:
            return end
        if span.images[0].prompt:
            return span.prompt_end
        image = span.tokens(start, span.end)
        others = np.flatnonzero(image != image[0])
        return start + int(others[0]) if len(others) else span.end


def count_batch(counts: SchedulerCounts, batch: ScheduledBatch) -> None:
    """Counts a batch that has just been scheduled. Its sampled tokens are counted when they reach the host."""
    counts.steps += 1
    for scheduled in batch.spans:
        span = scheduled.span
        if isinstance(span, GenerationSequence) and span.state is State.DECODING:
            counts.recomputed_tokens += scheduled.logits - scheduled.start  # after a wrong draft
            continue
        prompt = min(scheduled.stop, span.prompt_end)
        counts.prefill_tokens += max(0, prompt - scheduled.start)
        behind = max(scheduled.start, prompt)
        if isinstance(span, GenerationSequence) and not span.scoring:
            # The last token that it sampled runs for the first time, as in any decode step.
            counts.recomputed_tokens += max(0, min(scheduled.stop, span.end - 1) - behind)
        else:
            counts.scored_tokens += scheduled.stop - behind
