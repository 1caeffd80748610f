"""Runs scheduled batches on the device: the forward, the scores, the sampled tokens, and one copy of the numbers to the host.

When a batch is launched, the scheduler gives the blocks, state slots and sampler indices of ended sequences to later batches. The device works in the order of
the launches, so a step that is still in flight reads and writes them before the later batches do.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from batchgen.errors import BatchgenError, in_one_line, is_out_of_memory
from batchgen.kernels.transfer import Readback, put
from batchgen.model.runner import Runner
from batchgen.model.wanted_logits import Wanted
from batchgen.parsers.heads import OutputHead
from batchgen.sampling.constraints import Constraints
from batchgen.sampling.logprobs import score_targets
from batchgen.sampling.pooling import last_outputs, mean_outputs
from batchgen.sampling.sampler import Sampler, SamplerOutput
from batchgen.sampling.stopping import Stopper
from batchgen.scheduling.batch import Freed, Sample, ScheduledBatch, StepOutput
from batchgen.scheduling.sequence import GenerationSequence, PrefixNodeSpan


class KernelsFailed(Exception):
    """A step failed while batchgen's kernels for a GPU were in use. The message says how."""


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A batch that was launched and whose numbers are not on the host yet."""

    batch: ScheduledBatch
    logits: torch.Tensor | None
    """[N, vocabulary]; None once its tokens are sampled."""
    scores: tuple[torch.Tensor, ...] = ()
    """Log-probability of each score target, and whether no token is likelier. With a head: the output of each [targets, width]."""
    samples: Sequence[Sample] = ()
    sampled: SamplerOutput | None = None
    """In the order of `samples`."""
    readback: Readback | None = None


class GrammarStopper(Stopper):
    """Ends a completion under a grammar: where `Stopper` does, and where its text is complete and nothing may follow."""

    def __init__(self, constraints: Constraints, *arguments: Any) -> None:
        """`arguments` are those of `Stopper`."""
        super().__init__(*arguments)
        self._constraints = constraints

    def append(self, token: int, whole: bool = False) -> str | None:
        """Does what `Stopper.append` does. Raises `RowError` if the grammar cannot be used or does not allow the token."""
        return super().append(token, whole or self._constraints.accept(self, token))


class StepExecutor:
    """Launches batches and returns what they have computed. Only `wait` waits for the device."""

    def __init__(
        self, runner: Runner, sampler: Sampler, constraints: Constraints, head: OutputHead | None = None
    ) -> None:
        """`head`: requests are embedded or classified; None for a model that writes text."""
        self._runner = runner
        self._head = head
        self._sampler = sampler
        self._constraints = constraints
        self._guided: set[Hashable] = set()
        """Names of the sequences that have a grammar."""
        self._node_logits: dict[PrefixNodeSpan, torch.Tensor] = {}
        """The logits [vocabulary] after the last token of nodes at which prompts end, while one of them has not sampled yet."""
        self.seconds = 0.0
        """Time spent in `launch`, `sample` and `wait`."""

    @property
    def needs_tokens(self) -> bool:
        """Whether `sample` needs the tokens of the steps before on the host. Grammars do: what they allow depends on the tokens so far."""
        return bool(self._guided)

    def launch(self, batch: ScheduledBatch) -> InFlightStep:
        """Launches the forward and the scoring of its texts. Call `sample` before the next launch."""
        self.free(batch.freed)
        for seq in batch.started:
            if not seq.scoring:
                params = seq.request.params
                self._sampler.add(
                    seq.sampler_index, params, seq.request.key, seq.request.text_tokens, seq.generated, seq.leaf.choice
                )
                if params.guided:
                    self._guided.add(_name(seq))
                    self._constraints.add(_name(seq), params, seq.generated, seq.request.text_tokens)
        with self._on_device():
            wanted = None
            if self._guided and not len(batch.packed.pending_places):
                self._constraints.start(*_places(batch.samples))  # computed in another thread while the model runs
                wanted = partial(self._wanted, batch)
            logits = self._runner.run(batch, self._sampler.last, wanted)
            if logits is not None:
                logits = logits.to(self._sampler.device)
            step = InFlightStep(batch, logits)
            if logits is not None:
                for node_span, row in batch.kept_rows:
                    self._node_logits[node_span] = logits[row].clone()
                if self._head is not None:
                    step.scores = ((mean_outputs if self._head.pooling == "mean" else last_outputs)(logits, batch),)
                elif batch.score_targets.rows:
                    step.scores = score_targets(
                        logits,
                        batch.score_targets.rows,
                        batch.score_targets.tokens,
                        own_kernels=self._sampler.own_kernels,
                    )
            return step

    def sample(self, step: InFlightStep) -> None:
        """Samples the tokens of a launched step, except of sequences that have ended since, and starts the copy to the host."""
        with self._on_device():
            step.samples = [sample for sample in step.batch.samples if sample.sequence.running]
            if step.samples:
                drafts = [sample.drafts for sample in step.samples]
                step.sampled = self._sampler.sample(
                    self._logits(step),
                    [sample.sampler_index for sample in step.samples],
                    [sample.position for sample in step.samples],
                    self._constraints.mask(*_places(step.samples)) if self._guided else None,
                    drafts if any(drafts) else None,
                )
                if step.sampled.kept is not None:
                    step.samples = [step.samples[row] for row in step.sampled.kept]
            step.logits = None
            parts = [*step.scores, *(step.sampled.tensors if step.sampled else ())]
            step.readback = Readback(parts, self._sampler.device)

    def wait(self, step: InFlightStep) -> StepOutput:
        """Waits for a step and returns what it has computed."""
        assert step.readback is not None, "its tokens have not been sampled"
        if self._head is not None:
            with self._on_device():
                outputs = step.readback.array()
            vectors = [] if outputs is None else [row.copy() for row in outputs.reshape(step.scores[0].shape)]
            return StepOutput(step.batch, (), (), (), (), (), (), vectors)
        with self._on_device():
            numbers = step.readback.lists()
        logprobs, likeliest = numbers[:2] if step.scores else ([], [])
        tokens, valid, sampled_logprobs = (
            step.sampled.read(numbers[len(step.scores) :]) if step.sampled else ([], [], [])
        )
        sequences = [sample.sequence for sample in step.samples]
        return StepOutput(step.batch, sequences, tokens, valid, sampled_logprobs, logprobs, likeliest)

    def free(self, freed: Freed) -> None:
        """Forgets the parameters of sampler indices, the grammars and node logits that are not needed any more."""
        if freed.sampler_indices:
            self._sampler.remove(freed.sampler_indices)
        for seq in freed.sequences:
            if _name(seq) in self._guided:
                self._guided.discard(_name(seq))
                self._constraints.remove(_name(seq))
        for node_span in freed.nodes:
            self._node_logits.pop(node_span, None)

    def clear(self) -> None:
        """Forgets all sequences."""
        self._sampler.clear()
        self._constraints.clear()
        self._guided.clear()
        self._node_logits.clear()

    def _wanted(self, batch: ScheduledBatch) -> Wanted | None:
        """Returns which of the batch's logits are wanted; None for all: grammars leave a row some tokens, and log-probabilities need every logit."""
        mask = self._constraints.mask(*_places(batch.samples))
        if mask is None:
            return None
        words = mask.shape[1]
        wanted = np.full((batch.size.logit_rows, words + words % 2), -1, dtype=np.int32)
        limited = [s.sequence.request.params.logprobs is None for s in batch.samples[: len(batch.sample_rows)]]
        wanted[batch.sample_rows[limited], :words] = mask.numpy()[: len(limited)][limited]
        return wanted.view(np.uint64)

    def _logits(self, step: InFlightStep) -> torch.Tensor:
        """Returns the logits [samples, vocabulary] to sample from: rows of the step's logits, then the logits that nodes keep."""
        rows = step.batch.sample_rows
        if len(step.samples) < len(step.batch.samples):  # some have ended since
            rows = rows[[s.sequence.running for s in step.batch.samples[: len(rows)]]]
        parts: list[torch.Tensor] = []
        if step.logits is not None and len(rows):
            logits = step.logits
            parts.append(logits if len(rows) == len(logits) else logits[put(rows, logits.device)])
        if len(rows) < len(step.samples):
            nodes = [sample.sequence.path[-1] for sample in step.samples[len(rows) :]]
            parts.append(torch.stack([self._node_logits[node] for node in nodes]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Counts the time inside. While our kernels run on a GPU, raises `KernelsFailed` instead of the device's error, unless memory has run out."""
        began = time.perf_counter()
        try:
            yield
        except Exception as e:
            if self._runner.attention != "triton" or isinstance(e, BatchgenError) or is_out_of_memory(e):
                raise
            raise KernelsFailed(f"a step ended with {type(e).__name__}: {in_one_line(e, 300)}") from e
        self.seconds += time.perf_counter() - began


def _name(seq: GenerationSequence) -> Hashable:
    """Returns the sequence's name in `Constraints`: the object that ends its completion, which asks `Constraints` about each token."""
    return cast(Hashable, seq.stops)


def _places(samples: Sequence[Sample]) -> tuple[list[Hashable], list[tuple[int, ...]]]:
    """Returns where the samples stand, as `Constraints` knows it: the names of their sequences, and the drafts before them."""
    return [_name(sample.sequence) for sample in samples], [sample.drafts for sample in samples]
