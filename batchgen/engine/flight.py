"""A step's way over the device: launched whole, without waiting for anything on it, and landed when its numbers are on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from batchgen.engine.constraints import Constraints
from batchgen.engine.drawn import Drawn, Sampled
from batchgen.engine.figures import count_step
from batchgen.engine.readback import Readback
from batchgen.engine.runner import Runner
from batchgen.engine.sampler import Sampler
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.scoring import StepScores, score_step
from batchgen.engine.spans import Branch
from batchgen.engine.spans import Sequence as Running
from batchgen.engine.staging import put
from batchgen.engine.steps import Step
from batchgen.stats import EngineStats


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A step that is launched. What it says of sequences that have ended meanwhile counts for nothing."""

    drawing: list[Running]
    """The sequences that a token is drawn for, in the order of `drawn`."""
    drawn: Drawn | None
    scored: list[Running]
    """The texts that it scores to their end."""
    scores: StepScores | None
    readback: Readback

    def land(self) -> Sampled:
        """Waits for the step: its scores are filled in, what it has drawn is returned."""
        numbers = self.readback.lists()
        if self.scores is not None:
            self.scores.fill(numbers[0], numbers[1])
            del numbers[:2]
        return Sampled([], []) if self.drawn is None else self.drawn.read(numbers)


class Launcher:
    """Launches steps: the forward, what is scored in it, the draw, and the copy of their numbers to the host.

    What the scheduler gives away at a launch, pages and slots of sequences that have ended or are leaving, goes to later steps. The device does
    its work in the order of the launches, so whatever a step still in flight reads or writes there, it does before them.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, sampler: Sampler, constraints: Constraints, stats: EngineStats
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._constraints = constraints
        self._stats = stats

    def launch(self, step: Step, catch_up: Callable[[], None] | None) -> Flight:
        """Launches a step whose sequences are seated.

        `catch_up` lands the step before, where that is still in flight. It is called between forward and draw where a row under a grammar
        runs: which token may follow depends on the one before.
        """
        with self._timed():
            drawing = _drawing(step)
            if catch_up is None:
                self._constraints.start(drawing)  # while the model runs
            logits = self._runner.run(step, self._sampler.last)
            scores = None
            if logits is not None:
                scores = score_step(step.works, logits)
                _keep_logits(step, logits)
        count_step(self._stats, step)
        scored = [*step.scored, *self._scheduler.ran(step)]
        if catch_up is not None and self._constraints.used:
            catch_up()
        with self._timed():
            drawing, drawn = self._draw(step, logits, drawing)
            parts = [*(scores.tensors if scores else ()), *(drawn.tensors if drawn else ())]
            readback = Readback(parts, self._runner.model.device)
        for seq in self._scheduler.draws(drawing):
            self._sampler.remove(seq.slot)
            seq.slot = -1
        return Flight(drawing, drawn, scored, scores, readback)

    def land(self, flight: Flight) -> Sampled:
        """Waits for a step."""
        with self._timed():
            return flight.land()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._stats.forward_seconds += time.perf_counter() - began

    def _draw(
        self, step: Step, logits: torch.Tensor | None, drawing: list[Running]
    ) -> tuple[list[Running], Drawn | None]:
        """Draws for those of `drawing` that have not ended since the step was scheduled, and returns who they are."""
        rows: list[int] = []
        at = 0
        for work in step.works:
            at += work.stop - work.logits
            if work.logits < work.stop and isinstance(work.span, Running) and not work.span.scoring:
                rows.append(at - 1)
        if not all(seq.running for seq in drawing):
            rows = [row for row, seq in zip(rows, drawing, strict=False) if seq.running]
            drawing = [seq for seq in drawing if seq.running]
        if not drawing:
            return [], None
        parts: list[torch.Tensor] = []
        if logits is not None and rows:
            places = np.array(rows, dtype=np.int64)
            parts.append(logits if len(rows) == len(logits) else logits[put(places, logits.device)])
        if len(drawing) > len(rows):
            parts.append(torch.stack([seq.path[-1].logits for seq in drawing[len(rows) :]]))
        drawn = self._sampler.sample(
            parts[0] if len(parts) == 1 else torch.cat(parts),
            [seq.slot for seq in drawing],
            [seq.drawn for seq in drawing],
            self._constraints.mask(drawing),
        )
        return drawing, drawn


def _drawing(step: Step) -> list[Running]:
    """The sequences that draw a token in this step: in the order of the works, then those that draw at a node."""
    works = (w.span for w in step.works if w.logits < w.stop)
    return [*(s for s in works if isinstance(s, Running) and not s.scoring), *step.ready]


def _keep_logits(step: Step, logits: torch.Tensor) -> None:
    """A node's last logits stay for the prompts that end there."""
    at = 0
    for work in step.works:
        at += work.stop - work.logits
        span = work.span
        if isinstance(span, Branch) and work.stop == span.end and span.window.draws_at[span.node.index]:
            span.logits = logits[at - 1].clone()
