"""Packs a step into tensors and runs the transformers model on it. In a step, only this module and the sampler use the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from batchgen.attention.cpu_backend import PackedAttention
from batchgen.attention.kv_cache import KVCache
from batchgen.attention.plan import plan_attention
from batchgen.attention.torch_backend import StepAttention
from batchgen.errors import ModelError, OutOfMemory, is_out_of_memory
from batchgen.kernels.transfer import put
from batchgen.model.cuda_runner import device_step
from batchgen.model.loaded_model import LoadedModel, logits_at
from batchgen.model.wanted_logits import Wanted, only_wanted
from batchgen.scheduling.batch import (
    Limits,
    PackedSpans,
    ScheduledBatch,
    ScheduledSpan,
)
from batchgen.scheduling.sequence import GenerationSequence
from batchgen.state.cache import StateCache
from batchgen.state.step import StateSpan, StateStep
from batchgen.stats import counted


class StatesLost(MemoryError):
    """The device ran out of memory in a step of a model with recurrent layers, which may have changed the states of the step's sequences."""


class Runner:
    """Runs the model on the spans of a step."""

    def __init__(
        self, model: LoadedModel, cache: KVCache, limits: Limits, notes: list[str], states: StateCache | None = None
    ) -> None:
        """Steps are within `limits`. Adds messages for the user to `notes`. `states` are those of a model with recurrent layers."""
        self.model = model  # `with_blocks`
        self.cache = cache
        self.states = states
        self._device_step = device_step(model, cache, limits, notes)
        if self._device_step is None and model.attention == "triton":
            raise ModelError("--attention triton: " + (notes[-1] if notes else "not for this model"), "leave it out")
        self.attention_parts = 0  # summed over steps
        self.max_forward_tokens: int | None = None
        """After out-of-memory: the largest forward that is tried."""

    @property
    def attention(self) -> str:
        """The name of the attention backend, as the figures of a run have it."""
        return "triton" if self._device_step else "cascade" if self.model.kernels is None else "packed"

    def drop_kernels(self) -> None:
        """Makes steps run in plain torch. Raises `RuntimeError` if the device is lost: after some errors, CUDA does nothing more in the process."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        self._device_step = None

    @torch.inference_mode()
    def run(
        self,
        batch: ScheduledBatch,
        last: torch.Tensor | None = None,
        wanted: Callable[[], Wanted | None] | None = None,
    ) -> torch.Tensor | None:
        """Returns the batch's rows of logits [N, vocabulary], valid until the next run; None if none are wanted.

        `last` int64, on the device, holds the newest token by sampler index, for sequences whose pending tokens the host does not know.
        `wanted` says which logits are wanted, of all rows (None: all of them), and is called as late as possible. The others mean nothing.
        If the device runs out of memory, the batch runs in halves: its spans do not depend on one another, and what the failed forward
        has written is written again. Raises `OutOfMemory` if not even one token goes through. With recurrent layers it raises
        `StatesLost` instead of running halves; from then on steps must not be larger than `max_forward_tokens`.
        """
        with torch.cuda.device(self.model.device) if self.model.device.type == "cuda" else nullcontext():
            if batch.copies:
                self.cache.copy(batch.copies)
            logits = self._run(batch.packed, last, wanted) if batch.spans else []
            if not logits:
                return None
            return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _run(
        self, packed: PackedSpans, last: torch.Tensor | None, wanted: Callable[[], Wanted | None] | None
    ) -> list[torch.Tensor]:
        size = len(packed.tokens)
        halves = () if self.max_forward_tokens is None or size <= self.max_forward_tokens else _halves(packed)
        if not halves:
            try:
                return self._forward(packed, last, wanted)
            except (MemoryError, RuntimeError) as e:
                if not is_out_of_memory(e):
                    raise
            # Out of the handler, so that the failed forward's tensors are free.
            halves = _halves(packed)
            if not halves:
                raise OutOfMemory(
                    f"{self.model.device} does not have enough memory for a forward of {'one token' if size == 1 else counted(size, 'token')}",
                    "lower --kv-memory or --batch-size",
                )
            self.max_forward_tokens = -(-size // 2)
            if self.model.device.type == "cuda":
                torch.cuda.empty_cache()
            if self.states is not None:
                raise StatesLost
        # The next half may put its logits where these are.
        return [logits.clone() for half in halves for logits in self._run(half, last, None)]

    def _forward(
        self, packed: PackedSpans, last: torch.Tensor | None, wanted: Callable[[], Wanted | None] | None
    ) -> list[torch.Tensor]:
        vision = self.model.vision
        shows = vision is not None and vision.concerns(packed)
        if self._device_step is not None and not shows:
            logits = self._device_step(packed, last)
            self.attention_parts += self._device_step.attention.num_parts
            return logits
        device = self.model.device
        attention = self._attention(packed)
        self.attention_parts += attention.num_parts
        positions = vision.positions(packed.spans, attention.positions) if vision and shows else attention.positions
        tokens = put(vision.without_images(packed.tokens) if vision and shows else packed.tokens, device)
        if last is not None and len(packed.pending_places):
            pending = last.index_select(0, put(packed.pending_sampler_indices, device))
            tokens.index_copy_(0, put(packed.pending_places, device), pending)
        with (
            self._recurrent(packed.spans),
            vision.showing(packed) if vision and shows else nullcontext(),
            only_wanted(self.model.module.get_output_embeddings(), wanted) if wanted else nullcontext(),
        ):
            output = self.model.module(
                input_ids=tokens.unsqueeze(0),
                position_ids=put(positions, device).unsqueeze(-2),
                use_cache=False,
                step_attention=attention,
                logits_to_keep=self._wanted(packed),
                **(vision.arguments(packed) if vision and shows else {}),
            )
        return [output.logits[0].to(device)] if len(packed.logits_places) else []

    def _wanted(self, packed: PackedSpans) -> torch.Tensor | list[int] | slice:
        """The argument `logits_to_keep`: in a step of nothing but decoding sequences all tokens, which need not be copied."""
        if _all_wanted(packed):
            return slice(None)
        return logits_at(packed.logits_places, self.model.device, self.model.spread)

    def _recurrent(self, spans: Sequence[ScheduledSpan]) -> AbstractContextManager[None]:
        """Returns the context in which the model's recurrent layers use the states of these spans."""
        if self.model.recurrent is None or self.states is None:
            return nullcontext()
        return self.model.recurrent.running(
            StateStep([_state_span(scheduled) for scheduled in spans], self.states, self.model.kernels is not None)
        )

    def _attention(self, packed: PackedSpans) -> PackedAttention | StepAttention:
        if self.model.kernels is not None:
            first = self.model.narrowed_from
            narrowed = None if first is None or _all_wanted(packed) else (first, packed.logits_places)
            return PackedAttention(packed.spans, self.cache, narrowed)
        plan = plan_attention(packed.spans, self.cache.block_size)
        return StepAttention(plan, self.cache)


def _halves(packed: PackedSpans) -> tuple[PackedSpans, ...]:
    """Returns the halves of a batch; none of a single token, and of the tokens of an image or a prompt that run together."""
    halves = packed.halves() if len(packed.tokens) > 1 else ()
    return halves if all(len(half.tokens) for half in halves) else ()


def _all_wanted(packed: PackedSpans) -> bool:
    """Whether the logits of all tokens are wanted."""
    return len(packed.logits_places) == len(packed.tokens)  # no place is wanted twice


def _state_span(scheduled: ScheduledSpan) -> StateSpan:
    span = scheduled.span
    generated = (
        max(0, scheduled.stop - max(scheduled.start, span.start_tokens)) if isinstance(span, GenerationSequence) else 0
    )
    write = span.state_slot if span.draft_state_slot < 0 else span.draft_state_slot
    return StateSpan(scheduled.stop - scheduled.start, scheduled.read, write, generated)
