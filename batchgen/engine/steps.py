"""What a step is, and the budgets it keeps. Integers only."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.engine.spans import Branch, Saved, Sequence, Span


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
    read: int = -1
    """`Span.read_slot` when it was scheduled."""


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
    preempted: tuple[Sequence, ...]
    started: tuple[Sequence, ...]
    """Sequences that begin, or come back, in this step."""
    ready: tuple[Sequence, ...]
    """Of those, the ones whose prompt ends at a node: they draw from the node's logits, without a forward."""
    scored: tuple[Sequence, ...]
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

    def decode(self, seq: Sequence) -> bool:
        """Takes the sequence's next token into the step; False when the budget is spent."""
        if self.tokens < 1 or not self._reads(seq, seq.end):
            return False
        self.tokens -= 1
        self.works.append(Work(seq, seq.computed, seq.end, seq.computed, seq.read_slot))
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
        self.works.append(Work(span, start, stop, logits, span.read_slot))

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
