"""Runs the scheduler outside an engine. Integers only.

`batchgen plan` runs a job's steps without a model, to find how many state slots and how much time they take. Checks run the steps of a few prompts, with given
tokens, to compare ways of computing them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from batchgen.prefix import PrefixPlan, plan_prefixes
from batchgen.request import Leaf, Request, TokenArray, leaves_of
from batchgen.sampling_params import SamplingParams
from batchgen.scheduling.batch import Limits, ScheduledBatch, StepOutput, StepSize
from batchgen.scheduling.block_manager import BlockManager
from batchgen.scheduling.block_pool import BlockPool
from batchgen.scheduling.scheduler import Scheduler, StepLoop
from batchgen.scheduling.sequence import AFTER_NODES, GenerationSequence, PrefixNodeSpan, Span, Stops
from batchgen.scheduling.waiting import Policy

MAX_STEPS = 20_000
"""Largest number of steps, of all windows together. A peak that comes later is not seen."""
Launch = Callable[[ScheduledBatch], Callable[[], Sequence[int]]]
"""Launches a batch. Returns a function that waits for the tokens of its samples."""


class Rehearsal:
    """A job's scheduler with the sizes that its engine will have, and without a model."""

    def __init__(
        self,
        limits: Limits,
        block_size: int,
        num_blocks: int,
        num_state_slots: int,
        policy: Policy,
    ) -> None:
        """`num_state_slots` is 0 for a model without states, else at least two."""
        self._state_slots = BlockPool(num_state_slots) if num_state_slots else None
        self._blocks = BlockManager(BlockPool(num_blocks), block_size, state_slots=self._state_slots)
        self.stops: Callable[[Request], Stops] = FixedLength
        """Makes what ends a completion. By default each is as long as it may be."""
        self.scheduler = Scheduler(self._blocks, limits, lambda request: self.stops(request), policy)
        self._loop = StepLoop(self.scheduler, _Launcher(_no_model), ahead=0)
        self._spans = 0
        """Nodes of all windows so far."""
        self._steps = 0

    @property
    def peak_state_slots(self) -> int:
        """The most state slots in use at once so far, those of nodes that are kept for later windows included."""
        return self._state_slots.peak_used if self._state_slots else 0

    def find_peak(self, leaves: Sequence[Leaf], plan: PrefixPlan) -> None:
        """Runs a window until the peak of state slots cannot rise any more. `leaves` and `plan`: see `Engine.add`."""
        assert self._state_slots is not None
        self._spans += len(plan.nodes)
        possible = min(self._state_slots.num_blocks, min(self.scheduler.limits.batch_size, len(leaves)) + self._spans)
        steps = self.run(leaves, plan, MAX_STEPS - self._steps if self.peak_state_slots < possible else 0)
        for _ in steps:
            self._steps += 1
            if self.peak_state_slots >= possible:
                steps.close()

    def run(self, leaves: Sequence[Leaf], plan: PrefixPlan, max_steps: int) -> Generator[StepSize, None, None]:
        """Runs a window and yields the size of each step, of `max_steps` at most. Rows that do not fit the memory are left out."""
        ordered = [leaves[i] for i in plan.order]
        room = self._blocks.pool.num_blocks
        ended = [
            i for i, leaf in enumerate(ordered) if leaf.ended or self._blocks.blocks_for(leaf.max_kv_tokens) > room
        ]
        if max_steps <= 0:
            return
        self.scheduler.load(ordered, plan, ended)
        try:
            while self.scheduler.unfinished and max_steps > 0:
                for _ in self._loop.step():
                    pass
                max_steps -= 1
                yield from self._loop.landed
        finally:
            self.scheduler.abandon()
            self.scheduler.take_freed()


def scheduler_of(
    prompts: Sequence[TokenArray],
    max_tokens: int,
    block_size: int,
    prefill_tokens: int,
    *,
    share: bool = True,
    sliding_window: int | None = None,
    num_state_slots: int = 0,
) -> Scheduler:
    """Returns a scheduler that has these prompts as rows 0, 1, …, and twice as many blocks as they need.

    Each completion has `max_tokens` tokens. A step has at most `prefill_tokens` tokens of prompts.
    """
    leaves = _leaves(prompts, max_tokens)
    blocks = 2 * sum(-(-(len(tokens) + max_tokens) // block_size) for tokens in prompts)
    state_slots = BlockPool(num_state_slots) if num_state_slots else None
    manager = BlockManager(BlockPool(blocks), block_size, sliding_window, state_slots)
    limits = Limits(len(prompts), max(prefill_tokens, len(prompts)), prefill_tokens)
    scheduler = Scheduler(manager, limits, FixedLength)
    plan = plan_prefixes(prompts, block_size, share=share)
    scheduler.load([leaves[i] for i in plan.order], plan)
    return scheduler


def sequences_of(texts: Sequence[TokenArray], sizes: Sequence[int], block_size: int) -> list[GenerationSequence]:
    """Returns a sequence for each text, with its own blocks for `sizes` tokens. Blocks are numbered from 0."""
    sequences: list[GenerationSequence] = []
    block = 0
    for i, (leaf, size) in enumerate(zip(_leaves(texts, 1), sizes, strict=True)):
        table = list(range(block, block - (-size // block_size)))
        block += len(table)
        sequence = GenerationSequence(
            window=0, place=(i, AFTER_NODES), parent=None, start=0, table=table, computed=0, leaf=leaf, index=i, stops=None,
            sampler_index=i, state_slot=i,
        )  # fmt: skip
        sequences.append(sequence)
    return sequences


def _leaves(prompts: Sequence[TokenArray], max_tokens: int) -> list[Leaf]:
    """Returns the leaves of rows 0, 1, … with these prompts."""
    params = SamplingParams(max_tokens=max_tokens)
    return leaves_of(
        Request(row=row, tokens=tokens, params=params, max_tokens=max_tokens, key=row.to_bytes(16, "little"))
        for row, tokens in enumerate(prompts)
    )


def row_of(scheduler: Scheduler, span: Span) -> int:
    """Returns the row of a sequence, or a row below a node."""
    if isinstance(span, GenerationSequence):
        return span.request.row
    assert isinstance(span, PrefixNodeSpan)
    return scheduler.window_of(span).leaves[span.node.first].request.row


def run_steps(scheduler: Scheduler, launch: Launch, ahead: int = 0) -> None:
    """Runs all steps. `ahead`: see `StepLoop`."""
    loop = StepLoop(scheduler, _Launcher(launch), ahead)
    while scheduler.unfinished:
        for _ in loop.step():
            pass
    for _ in loop.settle():
        pass


class FixedLength:
    """Ends a completion at its length (`sequence.Stops`)."""

    text = reasoning = None
    reasoning_tokens = 0

    def __init__(self, request: Request, length: int | None = None) -> None:
        """The length is `request.max_tokens` if none is given."""
        self._left = length or request.max_tokens

    def append(self, token: int) -> str | None:
        self._left -= 1
        return None if self._left else "length"

    def tool_calls(self, id_start: str) -> tuple[()]:
        return ()


def _no_model(batch: ScheduledBatch) -> Callable[[], Sequence[int]]:
    return lambda: [0] * len(batch.samples)


class _Launcher:
    """Runs batches (`scheduler.Executor`) with a function. Every score is 0."""

    needs_tokens = False

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def launch(self, batch: ScheduledBatch) -> tuple[ScheduledBatch, Callable[[], Sequence[int]]]:
        return batch, self._launch(batch)

    def sample(self, step: object) -> None:
        pass

    def wait(self, step: tuple[ScheduledBatch, Callable[[], Sequence[int]]]) -> StepOutput:
        batch, tokens = step
        count, scores = len(batch.samples), [0.0] * len(batch.score_targets.entries)
        sequences = [sample.sequence for sample in batch.samples]
        return StepOutput(batch, sequences, tokens(), [True] * count, [None] * count, scores, scores)
