"""The engine without a model: the scheduler's steps carried out on a pool that remembers what each slot holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from batchgen.engine.attention.plan import AttentionPlan, plan_attention
from batchgen.engine.memory import Memory
from batchgen.engine.pages import PagePool
from batchgen.engine.scheduler import Limits, Scheduler, Step
from batchgen.engine.spans import Branch, Sequence, Span, State
from batchgen.prefix import PrefixPlan, plan_prefixes
from batchgen.request import Request, SamplingParams


class Length:
    """Ends a completion at its length; its text is empty."""

    text = ""

    def __init__(self, count: int) -> None:
        self.left = count

    def append(self, token: int) -> str | None:
        self.left -= 1
        return None if self.left else "length"


def make_requests(prompts: Iterable[Iterable[int]], lengths: Iterable[int]) -> list[Request]:
    """Requests that draw exactly so many tokens."""
    return [
        Request(
            row=row,
            tokens=np.array(list(prompt), dtype=np.int32),
            params=SamplingParams(max_tokens=length),
            max_tokens=length,
            key=row.to_bytes(16, "little"),
        )
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


def prefix(span: Span, count: int) -> tuple[int, ...]:
    """The first `count` tokens of the span's path: what the KV of the last of them depends on."""
    return tuple(span.tokens(0, count).tolist())


def slot(span: Span, position: int, page_size: int) -> int:
    return span.table[position // page_size] * page_size + position % page_size


class Simulation:
    """A scheduler whose steps are carried out on paper, every step checked.

    A slot holds the tokens from the start of its path to its own: the KV is right if and only if they are.
    """

    def __init__(
        self, pages: int = 1000, page_size: int = 2, batch_size: int = 100, tokens: int = 1000, prefill: int = 1000,
        shared_reads: int = 4, every_step: Callable[[Step, AttentionPlan | None], None] | None = None,
    ) -> None:  # fmt: skip
        self.memory = Memory(PagePool(pages), page_size)
        self.limits = Limits(batch_size, tokens, prefill)
        self.scheduler = Scheduler(self.memory, self.limits, lambda r: Length(r.max_tokens))
        self.page_size = page_size
        self.shared_reads = shared_reads
        self.every_step = every_step
        self.held: dict[int, tuple[int, ...]] = {}
        self.done: dict[int, list[int]] = {}
        self.prefilled = self.recomputed = self.steps = 0

    def load(self, prompts: Iterable[Iterable[int]], lengths: Iterable[int], share: bool = True) -> PrefixPlan:
        requests = make_requests(prompts, lengths)
        plan = plan_prefixes([r.tokens for r in requests], 16, share=share)
        self.scheduler.load([requests[i] for i in plan.order], plan)
        self.done = {}
        return plan

    def finish(self, most_steps: int = 10_000) -> None:
        """Steps until every request is done."""
        before = self.steps
        while self.scheduler.unfinished:
            self.step()
            assert self.steps - before < most_steps, "no end in sight"
        assert not self.scheduler.running
        assert not self.scheduler.prefilling
        assert self.scheduler.resident() == []

    def step(self, admit: bool = True) -> Step:
        step = self.scheduler.schedule(admit)
        self.steps += 1
        self._check_budgets(step)
        for source, to in step.copies:
            for offset in range(self.page_size):
                self.held[to * self.page_size + offset] = self.held.get(source * self.page_size + offset, ())
        plan = plan_attention(step.works, self.page_size, self.shared_reads) if step.works else None
        if plan is not None:
            self._write(step, plan)
            self._check_reads(step, plan)
        if self.every_step is not None:
            self.every_step(step, plan)
        drawing = list(step.ready)
        for seq in step.ready:
            assert seq.path[-1].logits == tuple(seq.request.tokens.tolist()), "logits of another prompt"
        for work in step.works:
            self._count(work.span, work.start, work.stop)
            if work.sample and isinstance(work.span, Branch):
                work.span.logits = prefix(work.span, work.stop)
            elif work.sample and isinstance(work.span, Sequence):
                drawing.append(work.span)
        self.scheduler.ran(step)
        for seq in drawing:
            if self.scheduler.drew(seq, 1000 + (7 * seq.request.row + len(seq.generated)) % 11):
                assert seq.request.row not in self.done
                self.done[seq.request.row] = seq.generated
        self.check()
        return step

    def check(self) -> None:
        spans = [*self.scheduler.running, *self.scheduler.resident(), *self.memory.idle]
        self.memory.pool.check(span.table for span in spans)
        for span in spans:
            for position in range(span.computed):
                assert self.held[slot(span, position, self.page_size)] == prefix(span, position + 1)

    def _check_budgets(self, step: Step) -> None:
        assert len(self.scheduler.running) <= self.limits.batch_size
        assert step.num_tokens <= self.limits.max_batch_tokens
        decoding = [w for w in step.works if isinstance(w.span, Sequence) and w.span.state is State.DECODING]
        assert all(w.stop - w.start == 1 for w in decoding)
        assert step.num_tokens - len(decoding) <= self.limits.max_prefill_tokens
        places = [w.span.place for w in step.works]
        assert places == sorted(places)
        slots = [s.slot for s in self.scheduler.running]
        assert len(set(slots)) == len(slots)
        assert all(0 <= s < self.limits.batch_size for s in slots)

    def _write(self, step: Step, plan: AttentionPlan) -> None:
        at = 0
        assert len(set(plan.slots.tolist())) == plan.num_tokens == step.num_tokens, "two tokens written to one slot"
        for work in step.works:
            for position in range(work.start, work.stop):
                assert plan.positions[at] == position
                self.held[int(plan.slots[at])] = prefix(work.span, position + 1)
                at += 1

    def _check_reads(self, step: Step, plan: AttentionPlan) -> None:
        reads = reads_of(plan)
        at = 0
        for work in step.works:
            for position in range(work.stop):
                assert self.held[slot(work.span, position, self.page_size)] == prefix(work.span, position + 1)
            for position in range(work.start, work.stop):
                want = [(p, slot(work.span, p, self.page_size)) for p in range(position + 1)]
                assert sorted(reads[at]) == want, "a query does not read each of its keys once"
                at += 1

    def _count(self, span: Span, start: int, stop: int) -> None:
        if isinstance(span, Branch):
            self.prefilled += stop - start
        elif isinstance(span, Sequence) and span.state is State.PREFILLING:
            prompt = len(span.request.tokens)
            self.prefilled += max(0, min(stop, prompt) - start)
            self.recomputed += max(0, min(stop, span.end - 1) - max(start, prompt))


def reads_of(plan: AttentionPlan) -> list[list[tuple[int, int]]]:
    """By query: the (position, slot) of each key that it attends to, in all parts."""
    size = plan.page_size
    reads: list[list[tuple[int, int]]] = [[] for _ in range(plan.num_tokens)]
    for part in plan.shared:
        keys = [(part.position + k, part.page * size + k) for k in range(part.num_pages * size)]
        for q in range(part.q_start, part.q_end):
            reads[q] += keys
    if plan.paged is not None:
        p = plan.paged
        for page, owner, length, position in zip(p.pages, p.owners, p.lengths, p.positions, strict=True):
            reads[int(p.queries[owner])] += [(int(position) + k, int(page) * size + k) for k in range(length)]
    for causal in plan.causal:
        for b, row in enumerate(causal.queries.tolist()):
            keys = list(zip(causal.k_positions[b].tolist(), causal.keys[b].tolist(), strict=True))
            for q, position in zip(row, causal.q_positions[b].tolist(), strict=True):
                if q < plan.num_tokens:
                    reads[q] += [key for key in keys if key[0] <= position]
    return reads


@pytest.fixture(scope="session")
def sim() -> Any:
    """`Simulation`, `make_requests`, `reads_of`, `Length`."""
    return SimpleNamespace(Simulation=Simulation, make_requests=make_requests, reads_of=reads_of, Length=Length)
