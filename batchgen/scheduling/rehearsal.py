"""Runs the scheduler without a model, to find how many state slots a job will take. For `batchgen plan`. Integers only."""

from __future__ import annotations

from collections.abc import Sequence

from batchgen.prefix import PrefixPlan
from batchgen.request import Leaf, Request
from batchgen.scheduling.batch import Limits, ScheduledBatch, StepOutput
from batchgen.scheduling.block_manager import BlockManager
from batchgen.scheduling.block_pool import BlockPool
from batchgen.scheduling.scheduler import Scheduler, StepLoop
from batchgen.scheduling.waiting import Policy

MAX_STEPS = 20_000
"""Largest number of steps, of all windows together. A peak that comes later is not seen."""


class Rehearsal:
    """A job's scheduler with the sizes that its engine will have. Every completion is as long as it may be."""

    def __init__(self, limits: Limits, block_size: int, num_blocks: int, num_state_slots: int, policy: Policy) -> None:
        """`num_state_slots` is at least two."""
        self._state_slots = BlockPool(num_state_slots)
        self._blocks = BlockManager(BlockPool(num_blocks), block_size, state_slots=self._state_slots)
        self._scheduler = Scheduler(self._blocks, limits, FixedLength, policy)
        self._loop = StepLoop(self._scheduler, NoModel(), ahead=0)
        self._spans = 0
        """Nodes of all windows so far."""
        self._steps = 0

    @property
    def peak_state_slots(self) -> int:
        """The most state slots in use at once so far, those of nodes that are kept for later windows included."""
        return self._state_slots.peak_used

    def run(self, leaves: Sequence[Leaf], plan: PrefixPlan) -> None:
        """Runs a window until the peak cannot rise any more. `leaves` and `plan`: see `Engine.add`."""
        scheduler = self._scheduler
        ordered = [leaves[i] for i in plan.order]
        room = self._blocks.pool.num_blocks
        unfit = [i for i, leaf in enumerate(ordered) if self._blocks.blocks_for(leaf.max_kv_tokens) > room]
        self._spans += len(plan.nodes)
        possible = min(self._state_slots.num_blocks, min(scheduler.limits.batch_size, len(ordered)) + self._spans)
        if self.peak_state_slots >= possible or self._steps >= MAX_STEPS:
            return
        scheduler.load(ordered, plan, unfit)
        while scheduler.unfinished and self.peak_state_slots < possible and self._steps < MAX_STEPS:
            for _ in self._loop.step():
                pass
            self._steps += 1
        scheduler.abandon()
        scheduler.take_freed()


class FixedLength:
    """Ends a completion at its length (`sequence.Stops`)."""

    text = reasoning = None
    reasoning_tokens = 0

    def __init__(self, request: Request) -> None:
        self._left = request.max_tokens

    def append(self, token: int) -> str | None:
        self._left -= 1
        return None if self._left else "length"

    def tool_calls(self, id_start: str) -> tuple[()]:
        return ()


class NoModel:
    """Runs batches without a model (`scheduler.Executor`): every token and every score is 0."""

    needs_tokens = False

    def launch(self, batch: ScheduledBatch) -> ScheduledBatch:
        return batch

    def sample(self, step: ScheduledBatch) -> None:
        pass

    def wait(self, step: ScheduledBatch) -> StepOutput:
        count, scored = len(step.samples), len(step.score_targets.entries)
        sequences = [sample.sequence for sample in step.samples]
        return StepOutput(step, sequences, [0] * count, [True] * count, [None] * count, [0.0] * scored, [0.0] * scored)
