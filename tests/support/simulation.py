"""The engine without a model: runs the scheduler's steps on a pool that records the tokens behind each place of the KV cache."""

import random
from collections.abc import Callable, Container, Iterable
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

from batchgen.attention.plan import AttentionPlan, plan_attention
from batchgen.prefix import PrefixPlan, plan_prefixes
from batchgen.request import Leaf, leaves_of
from batchgen.sampling_params import SamplingParams
from batchgen.scheduling.batch import (
    Freed,
    Limits,
    Sample,
    ScheduledBatch,
    ScheduledSpan,
    SequenceUpdate,
    StepOutput,
)
from batchgen.scheduling.block_manager import BlockManager
from batchgen.scheduling.block_pool import BlockPool
from batchgen.scheduling.scheduler import Scheduler, StepLoop
from batchgen.scheduling.sequence import GenerationSequence, PrefixNodeSpan, Span, State, TokenScore
from batchgen.scheduling.waiting import POLICIES
from support.drafters import ForcedDrafter
from support.requests import request


class Length:
    """Ends a completion at its length or with one of the tokens `ends`; its text is empty."""

    text = ""
    reasoning = None
    reasoning_tokens = 0

    def __init__(self, count: int, ends: Container[int] = ()) -> None:
        self.left = count
        self.ends = ends

    def append(self, token: int) -> str | None:
        self.left -= 1
        return "stop" if token in self.ends else None if self.left else "length"


def make_leaves(
    prompts: Iterable[Iterable[int]],
    lengths: Iterable[int],
    n: Iterable[int] = (),
    texts: Iterable[Iterable[Iterable[int]]] = (),
    priorities: Iterable[float] = (),
    first: int = 0,
) -> list[Leaf]:
    """Leaves of requests that sample exactly `lengths` tokens, `n` times each. Requests with texts score them instead.

    Rows are numbered from `first`.
    """
    rows = zip_longest(prompts, lengths, n, texts, priorities)
    return leaves_of(
        request(
            row, prompt, length, params=SamplingParams(max_tokens=length, n=count or 1), texts=scored or (), priority=priority or 0.0
        )
        for row, (prompt, length, count, scored, priority) in enumerate(rows, first)
    )  # fmt: skip


def node(start: int, end: int) -> Any:
    """A prefix node, as far as plans of attention look at it."""
    return SimpleNamespace(start=start, end=end)


def scheduled(table: list[int], start: int, stop: int, *path: Any) -> ScheduledSpan:
    """A span of a step with this block table, below these nodes, as far as plans of attention look at it."""
    span: Any = SimpleNamespace(table=table, path=path, start=path[-1].end if path else 0, dropped=0, images=())
    return ScheduledSpan(span, start, stop, stop)


def kv_index(span: Span, position: int, block_size: int) -> int:
    return span.table[position // block_size] * block_size + position % block_size


def score(path: tuple[int, ...], token: int) -> TokenScore:
    """A fake score of `token` after `path`."""
    return TokenScore(-float(hash((path, token)) % 1000), hash((path, token)) % 3 == 0)


class Simulation:
    """A scheduler whose steps are simulated and checked.

    Each place in the KV cache records the tokens from the start of its path to its own. The cache is right if and only if these are.
    With `ahead`, the tokens and scores of a step arrive after the next step has been launched, as on a device. Tokens in `ends` end a completion.
    With `drafts`, every step verifies drafts of which about this share is right.
    """

    def __init__(
        self, blocks: int = 1000, block_size: int = 2, batch_size: int = 100, tokens: int = 1000, prefill: int = 1000,
        scored: int = 1000, sliding_window: int | None = None, policy: str = "prefix",
        state_slots: int | None = None,
        shared_reads: int = 4, every_step: Callable[[ScheduledBatch, AttentionPlan | None], None] | None = None,
        ahead: bool = False, ends: Container[int] = (), drafts: float | None = None,
    ) -> None:  # fmt: skip
        self.block_manager = BlockManager(
            BlockPool(blocks), block_size, sliding_window, BlockPool(state_slots) if state_slots else None
        )
        self.states: dict[int, tuple[int, ...]] = {}
        """By state slot, the tokens whose state it contains."""
        self.limits = Limits(batch_size, tokens, prefill, scored)
        self.scheduler = Scheduler(
            self.block_manager, self.limits, lambda r: Length(r.max_tokens, ends), POLICIES[policy]
        )
        if drafts is not None:
            self.scheduler.drafter = ForcedDrafter(self._expected, range(1000, 1011), drafts, longest=5)
        self.block_size = block_size
        self.attention = {"shared_reads": shared_reads}
        """Options of `plan_attention`."""
        self.sliding_window = sliding_window
        self.every_step = every_step
        self.held: dict[int, tuple[int, ...]] = {}
        self.done: dict[tuple[int, int], list[Any]] = {}
        """By row and choice: the sampled tokens, or the scores of the text."""
        self.loaded = 0
        self.steps = 0
        self.loop = StepLoop(self.scheduler, self, int(ahead))
        self.batch: ScheduledBatch | None = None
        """The last batch that was launched."""
        self.sampled: dict[GenerationSequence, list[int]] = {}
        """The tokens sampled for each sequence, on the host or not."""
        self.kept: list[Sample] = []
        """The samples of the last step that count."""
        self.last: dict[int, int] = {}
        """By sampler index, the token sampled last."""
        self.node_logits: dict[PrefixNodeSpan, tuple[int, ...]] = {}
        self.late = 0
        """The number of tokens sampled for sequences that had already ended."""

    @property
    def prefilled(self) -> int:
        return self.scheduler.counts.prefill_tokens

    @property
    def recomputed(self) -> int:
        return self.scheduler.counts.recomputed_tokens

    @property
    def rows(self) -> list[int]:
        """The rows that are done."""
        return sorted({row for row, _ in self.done})

    @property
    def busy(self) -> bool:
        """Whether any leaf is unfinished or any step is in flight."""
        return bool(self.scheduler.unfinished or self.loop.in_flight)

    def load(
        self, prompts: Iterable[Iterable[int]], lengths: Iterable[int], share: bool = True, **rows: Any
    ) -> PrefixPlan:
        """Adds a window; see `make_leaves`. The window is `self.window`."""
        if not self.busy:
            self.done, self.loaded = {}, 0
        leaves = make_leaves(prompts, lengths, **rows, first=self.loaded)
        self.loaded += len({leaf.request.row for leaf in leaves})
        plan = plan_prefixes([leaf.tokens for leaf in leaves], 16, share=share)
        self.window = self.scheduler.load([leaves[i] for i in plan.order], plan)
        return plan

    def finish(self, max_steps: int = 10_000) -> None:
        """Steps until every leaf is done."""
        before = self.steps
        while self.scheduler.unfinished:
            self.step()
            assert self.steps - before < max_steps, "the job does not end"
        self.settle()
        assert not self.scheduler.running
        assert not self.scheduler.prefilling
        assert not self.block_manager.live
        assert self.block_manager._reserved_blocks == 0

    def step(self, admit: bool = True) -> ScheduledBatch:
        """Runs the engine's loop until a batch is launched."""
        self.batch = None
        while self.batch is None:
            updates = list(self.loop.step(admit))
            assert self.batch is not None or self.loop.ahead, "no step can be made although all tokens are known"
            self._update(updates)
            self.check()
        return self.batch

    def settle(self) -> None:
        """Waits for all steps in flight."""
        self._update(list(self.loop.settle()))

    def _update(self, updates: list[SequenceUpdate]) -> None:
        for seq, _, reason, error in updates:
            assert error is None
            if reason == "scored":
                path, prompt = tuple(seq.leaf.tokens.tolist()), len(seq.request.tokens)
                want = [score(path[: prompt + k], t) for k, t in enumerate(seq.leaf.scored.tolist())]
                assert seq.text_scores == want, "scores of another text"
                self._end(seq, seq.text_scores)
            elif reason is not None:
                self._end(seq, seq.generated)

    # -- the executor of the engine's loop

    needs_tokens = False

    def launch(self, batch: ScheduledBatch) -> ScheduledBatch:
        self.batch = batch
        self.steps += 1
        self._check_budgets(batch)
        self._copy(batch)
        plan = plan_attention(batch.spans, self.block_size, **self.attention) if batch.spans else None
        if plan is not None:
            self._check_tokens(batch)
            self._write(batch, plan)
            if self.block_manager.state_slots is not None:
                self._write_states(batch)
            self._check_reads(batch, plan)
        if self.every_step is not None:
            self.every_step(batch, plan)
        self.free(batch.freed)
        for node_span, _ in batch.kept_rows:
            self.node_logits[node_span] = self._prefix(node_span, node_span.end)
        for seq, *_ in batch.samples[len(batch.sample_rows) :]:
            assert self.node_logits[seq.path[-1]] == tuple(seq.request.tokens.tolist()), "logits of another prompt"
        return batch

    def free(self, freed: Freed) -> None:
        for node_span in freed.nodes:
            self.node_logits.pop(node_span, None)

    def sample(self, batch: ScheduledBatch) -> None:
        """Samples a token that depends on the row, the choice and the position. Samples whose drafts are not right do not count."""
        self.check()
        self.kept = []
        for sample in batch.samples:
            seq, sampler_index, position, drafts = sample
            sampled = self.sampled.setdefault(seq, [])
            if list(drafts) == sampled[position - len(drafts) :]:
                sampled.append(self._token(seq, position))
                assert len(sampled) == position + 1
                self.last[sampler_index] = sampled[-1]
                self.kept.append(sample)

    def _token(self, seq: GenerationSequence, position: int) -> int:
        return 1000 + (7 * seq.request.row + position + 3 * seq.leaf.choice) % 11

    def _expected(self, seq: GenerationSequence) -> list[int]:
        return [self._token(seq, position) for position in range(seq.num_sampled, seq.request.max_tokens)]

    def wait(self, batch: ScheduledBatch) -> StepOutput:
        rows = self._rows(batch)
        targets = batch.score_targets
        scores = [score(rows[row], token) for row, token in zip(targets.rows, targets.tokens, strict=True)]
        for sample, row in zip(batch.samples, batch.sample_rows.tolist(), strict=False):
            before = len(sample.sequence.leaf.tokens) + sample.position - len(sample.drafts)
            assert rows[row] == (*self._prefix(sample.sequence, before), *sample.drafts), (
                "the logits of another sequence"
            )
        kept, self.kept = self.kept, []
        sampled = batch.samples if self.scheduler.drafter is None else kept
        sequences = [sample.sequence for sample in sampled]
        self.late += sum(not seq.running for seq in sequences)
        return StepOutput(
            batch, sequences, [self.sampled[s.sequence][s.position] for s in sampled], [True] * len(sequences),
            [None] * len(sequences), [s.logprob for s in scores], [s.likeliest for s in scores],
        )  # fmt: skip

    def _rows(self, batch: ScheduledBatch) -> list[tuple[int, ...]]:
        """The tokens before each row of the logits."""
        ends = [self._before(w, position + 1) for w in batch.spans for position in range(w.start, w.stop)]
        return [ends[place] for place in batch.packed.logits_places.tolist()]

    def cancel(self, index: int) -> None:
        """Cancels the leaf with this depth-first index in the last window."""
        self.scheduler.cancel(self.window, index)
        self.check()

    def check(self) -> None:
        """Raises `AssertionError` unless the scheduler's counts add up and blocks and state slots contain the right tokens."""
        self.scheduler.check()
        for span in [*self.scheduler.running, *self.block_manager.live, *self.block_manager.cached]:
            path = self._prefix(span, span.computed)
            if span.read_state_slot >= 0:
                assert self.states[span.read_state_slot] == path, "the state of other tokens"
            for position in range(span.dropped * self.block_size, span.computed):
                assert self.held[kv_index(span, position, self.block_size)] == path[: position + 1]

    def _prefix(self, span: Span, count: int) -> tuple[int, ...]:
        """The first `count` tokens of the span's path, on which the KV of the last of them depends."""
        if isinstance(span, GenerationSequence):
            return (*span.leaf.tokens.tolist(), *self.sampled.get(span, ()))[:count]
        return tuple(span.tokens(0, count).tolist())

    def _before(self, scheduled: ScheduledSpan, count: int) -> tuple[int, ...]:
        """The first `count` tokens of a scheduled span's path, its drafts included."""
        known = scheduled.stop - len(scheduled.drafts)
        return (*self._prefix(scheduled.span, min(count, known)), *scheduled.drafts[: max(0, count - known)])

    def _copy(self, step: ScheduledBatch) -> None:
        for source, to in step.copies:
            self._fill(to, self._block(source))

    def _check_tokens(self, step: ScheduledBatch) -> None:
        packed = step.packed
        tokens = packed.tokens.copy()
        assert not len(packed.pending_places) or self.loop.ahead
        tokens[packed.pending_places] = [self.last[index] for index in packed.pending_sampler_indices.tolist()]
        want = [self._before(w, w.stop)[w.start :] for w in step.spans]
        assert tokens.tolist() == [token for some in want for token in some], (
            "the tokens of the batch differ from those that were sampled"
        )

    def _block(self, block: int) -> list[tuple[int, ...]]:
        return [self.held.get(block * self.block_size + offset, ()) for offset in range(self.block_size)]

    def _fill(self, block: int, held: list[tuple[int, ...]]) -> None:
        for offset, what in enumerate(held):
            self.held[block * self.block_size + offset] = what

    def _end(self, seq: GenerationSequence, what: list[Any]) -> None:
        at = (seq.request.row, seq.leaf.choice)
        assert at not in self.done
        self.done[at] = what

    def _check_budgets(self, step: ScheduledBatch) -> None:
        limits = self.scheduler.limits
        assert len(self.scheduler.running) <= limits.batch_size
        assert step.num_tokens <= limits.max_batch_tokens
        decoding = [w for w in step.spans if isinstance(w.span, GenerationSequence) and w.span.state is State.DECODING]
        again = [w.stop - w.start - len(w.drafts) - 1 for w in decoding]
        assert all(count >= 0 if self.states else count == 0 for count in again)
        assert step.num_tokens - sum(w.stop - w.start for w in decoding) <= limits.max_prefill_tokens
        scoring = [w for w in step.spans if w.span.scoring]
        assert sum(w.stop - w.logits for w in scoring) <= limits.max_scored_tokens
        places = [w.span.place for w in step.spans]
        assert places == sorted(places)
        indices = [s.sampler_index for s in self.scheduler.running]
        assert len(set(indices)) == len(indices)
        assert all(0 <= s < limits.batch_size for s in indices)

    def _write_states(self, step: ScheduledBatch) -> None:
        written = [span.state_slot if span.draft_state_slot < 0 else span.draft_state_slot for span, *_ in step.spans]
        assert len(set(written)) == len(written), "two states written to one state slot"
        for scheduled in step.spans:
            before = self.states[scheduled.read] if scheduled.read >= 0 else ()
            assert before == self._prefix(scheduled.span, scheduled.start), "a state of other tokens is read"
            own = scheduled.read == scheduled.span.state_slot and not scheduled.drafts
            assert own or scheduled.read not in written, "a state is read and written"
        for slot, scheduled in zip(written, step.spans, strict=True):
            self.states[slot] = self._before(scheduled, scheduled.stop)

    def _write(self, step: ScheduledBatch, plan: AttentionPlan) -> None:
        at = 0
        assert len(set(plan.kv_indices.tolist())) == plan.num_tokens == step.num_tokens, (
            "two tokens written to one place"
        )
        for scheduled in step.spans:
            for position in range(scheduled.start, scheduled.stop):
                assert plan.positions[at] == position
                self.held[int(plan.kv_indices[at])] = self._before(scheduled, position + 1)
                at += 1

    def _check_reads(self, step: ScheduledBatch, plan: AttentionPlan) -> None:
        reads = reads_of(plan)
        at = 0
        for scheduled in step.spans:
            for position in range(scheduled.span.dropped * self.block_size, scheduled.stop):
                assert self.held[kv_index(scheduled.span, position, self.block_size)] == self._before(
                    scheduled, position + 1
                )
            for position in range(scheduled.start, scheduled.stop):
                first = 0 if self.sliding_window is None else max(0, position + 1 - self.sliding_window)
                want = [(p, kv_index(scheduled.span, p, self.block_size)) for p in range(first, position + 1)]
                seen = sorted(read for read in reads[at] if read[0] >= first)  # the others are masked
                assert seen == want, "a query does not read each of its keys once"
                at += 1


def reads_of(plan: AttentionPlan) -> list[list[tuple[int, int]]]:
    """For each query, the (position, KV index) of the keys that it attends to, in all parts."""
    size = plan.block_size
    reads: list[list[tuple[int, int]]] = [[] for _ in range(plan.num_tokens)]
    for part in plan.shared:
        keys = [(part.position + k, part.block * size + k) for k in range(part.num_blocks * size)]
        for q in range(part.q_start, part.q_end):
            reads[q] += keys
    for causal in plan.causal:
        for b, row in enumerate(causal.queries.tolist()):
            keys = list(zip(causal.k_positions[b].tolist(), causal.kv_indices[b].tolist(), strict=True))
            for q, position in zip(row, causal.q_positions[b].tolist(), strict=True):
                if q < plan.num_tokens:
                    reads[q] += [key for key in keys if key[0] <= position]
    return reads


def random_steps(
    seed: int, check: Callable[[ScheduledBatch, AttentionPlan], None], *, longest: int, steps: int, tokens: int,
    attention: dict[str, int] | None = None, **options: Any,
) -> None:  # fmt: skip
    """Checks some steps of a random tree of prompts, with slices of prefill and decode mixed.

    `attention` are options of `plan_attention`, `options` those of `Simulation`.
    """
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(10):
        begin = rng.choice(prompts)[: rng.randint(0, 2 * longest)] if prompts and rng.random() < 0.8 else []
        prompts.append(begin + [rng.randrange(3) for _ in range(rng.randint(1, longest))])

    def every_step(batch: ScheduledBatch, plan: AttentionPlan | None) -> None:
        if plan is not None:
            check(batch, plan)

    s = Simulation(tokens=tokens, prefill=tokens, every_step=every_step, **options)
    s.attention |= attention or {}
    s.load(prompts, [rng.randint(1, 8) for _ in prompts])
    for _ in range(steps):
        if s.scheduler.unfinished:
            s.step()
