"""The trials of `device_check.py`, in a process that can be killed. Each part of batchgen that runs on an accelerator is compared with its plain form:

- attention: the kernels with plain torch in float32, on steps of small random trees, with the shapes and options of the model's own layers.
  Every element of the output and of the KV is compared.
- sampling: on the device and on the CPU, from the same logits and random numbers.
- the model: with plain torch, on some steps of the loaded model with given tokens: with the kernels, as CUDA graphs, and a step ahead.

Tests run all of this on the CPU too.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from batchgen.attention.kv_cache import KVCache, LayerShape
from batchgen.attention.plan import plan_attention
from batchgen.attention.torch_backend import StepAttention
from batchgen.attention.triton_backend import DeviceAttention
from batchgen.errors import in_one_line, is_out_of_memory
from batchgen.kernels.transfer import Readback, put
from batchgen.model.checks.device_check import Part, TrialReport, TrialSetup
from batchgen.model.loaded_model import AttentionKind, LoadedModel
from batchgen.model.loader import load_model
from batchgen.model.runner import Runner
from batchgen.process.signals import ignore_stop_signals
from batchgen.prompts import load_tokenizer
from batchgen.request import TokenArray
from batchgen.sampling.logprobs import score_targets
from batchgen.sampling.sampler import Sampler
from batchgen.sampling_params import SamplingParams
from batchgen.scheduling.batch import Limits, ScheduledBatch
from batchgen.scheduling.rehearsal import run_steps, scheduler_of
from batchgen.scheduling.scheduler import Scheduler
from batchgen.state.cache import StateCache

ROUNDING = {torch.float32: 1e-4, torch.float16: 2 * 2**-10, torch.bfloat16: 2 * 2**-7}
"""Largest allowed difference of attention outputs, relative to the same attention over the values' magnitudes. Weights and outputs are
rounded to the type, and the rounding of large float32 scores reaches the weights."""
SAMPLED_ROWS = 48
MOVED = 2
"""Number of sampled tokens that may differ: a random number can lie so close to the border of two tokens that the last bit decides."""
NOISE = 6.0
"""Largest allowed difference of logits, in multiples of the difference between two orders of plain torch's own sums."""
ULPS = 4.0
"""Or in units in the last place of the largest logit, if that is more."""
ROUTED = 0.1
"""Share of tokens whose logits may differ by more in a model with experts: rounding sends some tokens to other experts."""
TREES = (  # tokens in a step; tokens of the common beginning, of a group, at most of a row alone; rows; completion tokens
    (1024, (0, 21, 70), 70, 3),
    (160, (200, 60, 70), 9, 3),
    (512, (1100, 100, 40), 12, 2),
)
"""Random trees. In the first, rows have every length modulo the keys that a kernel reads at a time; in the second, tiles of queries lie in
the middle of a prompt; in the third, keys are split over programs and merged."""
MODEL_TREE = (48, (67, 20, 24), 8, 14)


class Differs(Exception):
    """The numbers of a part differ from those of its plain form; the message says which and by how much."""


def main() -> None:
    """Runs the trials. The argument is the number of an open socket (`device_check.start_trials`)."""
    ignore_stop_signals()
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    setup = connection.recv()
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    try:
        model = load_model(setup.model, load_tokenizer(setup.model))
    except Exception as e:  # noqa: BLE001 - the job's own load reports it
        connection.send(TrialReport(setup.parts[0], _error_text(e), unknown=True))
        os._exit(1)
    if model.device.type == "cuda":
        torch.cuda.set_device(model.device)  # Triton launches its kernels on the current one
    run_trials(setup, model, connection.send)
    os._exit(0)  # without waiting for the threads of libraries


def _end_with(connection: Connection[Any, Any]) -> None:
    """Ends this process when the one that started it ends: that one sends nothing more, so `poll` returns at the end of the connection."""
    connection.poll(None)
    os._exit(1)


def run_trials(setup: TrialSetup, model: LoadedModel, tell: Callable[[TrialReport], None]) -> None:
    """Tries the parts of `setup` in their order, up to the first that fails."""
    trials = Trials(model, setup.block_size)
    for part in setup.parts:
        tell(TrialReport(part))
        try:
            with torch.inference_mode():
                trials.make(part)
                if model.device.type == "cuda":
                    torch.cuda.synchronize(model.device)
        except Exception as e:  # noqa: BLE001 - whatever a compiler, a driver or a library may raise
            tell(TrialReport(part, _error_text(e), unknown=is_out_of_memory(e)))
            return
    tell(TrialReport(None))


def _error_text(error: BaseException) -> str:
    """An error in a few words."""
    text = in_one_line(error, 300)
    return text if isinstance(error, Differs) else f"{type(error).__name__}: {text}"


@dataclass(slots=True)
class Trials:
    """The trials of one model."""

    model: LoadedModel
    block_size: int
    kernels: bool = False
    """Whether the model runs with the attention kernels, which have passed."""
    plain: dict[tuple[int, int], torch.Tensor] | None = None
    limit: float = 0.0

    def make(self, part: Part) -> None:
        """Makes the trial of one part, after those before it. Raises `Differs`, or whatever the part raises."""
        if part == "sampler":
            sampler_trial(self.model.vocab_size, self.model.device)
        elif part == "triton" and self._has_kernels():
            for kind in self.model.kinds:
                attention_trial(kind, self.model, self.block_size)
            self._compare("with the attention kernels", self._variant(kernels=True))
            self.kernels = True
        elif part == "graphs" and self.kernels and self.model.compile != "off":
            self._compare("as CUDA graphs", self._variant(kernels=True, graphs=True))
        elif part == "step-ahead":
            self._compare("a step ahead", self._variant(kernels=self.kernels, graphs=self.kernels), ahead=1)

    def _has_kernels(self) -> bool:
        model = self.model
        cache = KVCache(model.layers, 1, self.block_size, model.dtype)
        return Runner(replace(model, compile="off"), cache, Limits(1, 1, 1), []).attention == "triton"

    def _variant(self, *, kernels: bool = False, graphs: bool = False) -> LoadedModel:
        return replace(
            self.model,
            attention=self.model.attention if kernels else "torch",
            compile=self.model.compile if graphs else "off",
        )

    def _compare(self, what: str, model: LoadedModel, ahead: int = 0) -> None:
        """Raises `Differs` if the model's logits differ from plain torch's by more than rounding."""
        if self.plain is None:
            plain = self._variant()
            self.plain = model_steps(plain, self.block_size)
            other = _stacked(model_steps(plain, self.block_size, share=False), self.plain)
            want = _stacked(self.plain, self.plain)
            noise = float((other - want).nan_to_num(0, 0, 0).abs().max())
            largest = float(want.nan_to_num(0, 0, 0).abs().max())
            self.limit = max(NOISE * noise, ULPS * torch.finfo(self.model.dtype).eps * largest)
        got = model_steps(model, self.block_size, ahead)
        if got.keys() != self.plain.keys():
            raise Differs(f"{what} {len(got)} tokens were run, not {len(self.plain)}")
        compare_logits(what, _stacked(got, self.plain), _stacked(self.plain, self.plain), self.limit, self._routed)

    @property
    def _routed(self) -> bool:
        """Whether the model has experts."""
        return any("expert" in name for name, _ in self.model.module.named_modules())


def compare_logits(what: str, got: torch.Tensor, want: torch.Tensor, limit: float, routed: bool) -> None:
    """Raises `Differs` if logits [N, V] differ by more than `limit`: for any token, or, if `routed` (a model with experts), for too many."""
    infinite = ~want.isfinite()
    if bool((~got.isfinite() & ~infinite).any()):
        raise Differs(f"{what} the model gives logits that are not numbers, and plain torch gives numbers")
    apart = (got - want).masked_fill(infinite, 0).abs().amax(1)
    wrong = int((apart > limit).sum())
    if wrong > (ROUTED * len(want) if routed else 0):
        raise Differs(
            f"{what} the model's logits of {wrong} of {len(want)} tokens differ from plain torch's, by up to {float(apart.max()):.3g} "
            f"(rounding: {limit:.3g})"
        )


def _stacked(logits: dict[tuple[int, int], torch.Tensor], places: Iterable[tuple[int, int]]) -> torch.Tensor:
    return torch.stack([logits[place] for place in places])


# -- steps of a small tree


def _tree_prompts(tree: tuple[int, tuple[int, int, int], int, int], vocabulary: int, seed: int) -> list[TokenArray]:
    """Returns prompts in two groups with one common beginning, and one that shares nothing; none is the beginning of another."""
    _, (common, group, own), rows, _ = tree
    rng = np.random.default_rng(seed)

    def text(size: int) -> TokenArray:
        return rng.integers(0, vocabulary, size, dtype=np.int32)

    beginning, groups = text(common), (text(group), text(group // 2))
    prompts = []
    for row in range(rows):
        parts = (beginning, groups[row % 2]) if row < rows - 1 else ()
        number = np.array([row % vocabulary], dtype=np.int32)
        prompts.append(np.concatenate([*parts, number, text(row * own // rows)]))
    return prompts


def model_steps(
    model: LoadedModel, block_size: int, ahead: int = 0, *, share: bool = True
) -> dict[tuple[int, int], torch.Tensor]:
    """Returns the model's logits [V], float32, by row and number of the token, for completions whose tokens are given."""
    tokens, _, rows, length = MODEL_TREE
    prompts = _tree_prompts(MODEL_TREE, model.vocab_size, seed=7)
    given = np.random.default_rng(8).integers(0, model.vocab_size, (rows, length))
    num_state_slots = 4 * rows if model.states else 0
    scheduler = scheduler_of(
        prompts, length, block_size, tokens,
        share=share, sliding_window=model.sliding_window, num_state_slots=num_state_slots,
    )  # fmt: skip
    blocks = scheduler.block_manager.pool.num_blocks
    states = StateCache(model.states, num_state_slots, model.dtype) if model.states else None
    notes: list[str] = []
    runner = Runner(model, KVCache(model.layers, blocks, block_size, model.dtype), scheduler.limits, notes, states)
    last = torch.zeros(rows, dtype=torch.int64, device=model.device)
    found: dict[tuple[int, int], torch.Tensor] = {}

    def launch(batch: ScheduledBatch) -> Callable[[], Sequence[int]]:
        logits = runner.run(batch, last)
        tokens = [int(given[s.sequence.request.row, s.position]) for s in batch.samples]
        if logits is not None and batch.samples:
            picked = logits[put(batch.sample_rows, model.device)].float()
            for sample, row in zip(batch.samples, picked, strict=True):
                found[sample.sequence.request.row, sample.position] = row
            indices = np.array([sample.sampler_index for sample in batch.samples], dtype=np.int64)
            last.index_copy_(0, put(indices, model.device), put(np.array(tokens, dtype=np.int64), model.device))
        readback = Readback([last.clone()], model.device)

        def wait() -> Sequence[int]:
            (heard,) = readback.lists()
            if tokens != [heard[sample.sampler_index] for sample in batch.samples]:
                raise Differs("the device returns other tokens than it has sampled")
            return tokens

        return wait

    run_steps(scheduler, launch, ahead)
    if notes:
        raise Differs(notes[0])
    return found


# -- attention


def attention_trial(kind: AttentionKind, model: LoadedModel, block_size: int) -> None:
    """Raises `Differs` if the kernels' attention, or the KV that they write, differs from plain torch's on steps of the random trees."""
    for seed, tree in enumerate(TREES):
        tokens, _, _, length = tree
        scheduler = scheduler_of(_tree_prompts(tree, 1 << 20, seed), length, block_size, tokens)
        run_steps(scheduler, _AttentionSteps(kind, model, scheduler, seed).launch)


class _AttentionSteps:
    """The attention of one layer over the steps of a tree, computed by the kernels and by plain torch in float32."""

    def __init__(self, kind: AttentionKind, model: LoadedModel, scheduler: Scheduler, seed: int) -> None:
        self._kind, self._dtype, self._device = kind, model.dtype, model.device
        self._max_tokens = scheduler.limits.max_batch_tokens + 9
        blocks, block_size = scheduler.block_manager.pool.num_blocks, scheduler.block_manager.block_size
        shape = {0: LayerShape(kind.heads, kind.k_size, kind.v_size, model.device)}
        self._cache = KVCache(shape, blocks, block_size, model.dtype)
        self._plain = KVCache(shape, blocks, block_size, torch.float32)
        self._magnitudes = KVCache(shape, blocks, block_size, torch.float32)
        """Like `_plain`, with the magnitudes of the values."""
        self._kernels = DeviceAttention(self._cache, self._max_tokens, model.device, kind.group)
        self._random = torch.Generator(model.device).manual_seed(seed)
        sinks = None if kind.sinks is None else self._normal(kind.heads * kind.group, dtype=kind.sinks)
        self._options = kind.options(sinks)
        self._steps = 0

    def _normal(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=self._random, device=self._device).to(dtype)

    def launch(self, batch: ScheduledBatch) -> Callable[[], Sequence[int]]:
        """Computes one step both ways. Returns the tokens that a batch is given. Raises `Differs`."""
        kind, count = self._kind, batch.num_tokens
        for cache in (self._cache, self._plain, self._magnitudes):
            cache.copy(batch.copies)
        self._steps += 1
        padded = min(self._max_tokens, count + (0, 1, 9)[self._steps % 3])
        # In the layout of a model. In every other step, scores are four times as large, so that a query's weight lies on few keys.
        sharp = 4.0 if self._steps % 2 else 1.0
        q = self._normal(padded, kind.heads * kind.group, kind.k_size, dtype=kind.dtype).mul_(sharp).transpose(0, 1)
        k = self._normal(padded, kind.heads, kind.k_size, dtype=self._dtype).transpose(0, 1)
        v = self._normal(padded, kind.heads, kind.v_size, dtype=self._dtype).transpose(0, 1)
        self._kernels.plan(batch.spans, padded)
        got = self._kernels(0, q, k, v, self._options)
        plan = plan_attention(batch.spans, self._cache.block_size)
        exact, of_k, of_v = (x[:, :count].to(self._dtype).float() for x in (q, k, v))
        want, scale = (
            StepAttention(plan, cache)(0, exact, of_k, values, self._options)
            for cache, values in ((self._plain, of_v), (self._magnitudes, of_v.abs()))
        )
        self._compare(got[:count].float(), want, scale)
        if bool(got[count:].any()):
            raise Differs("the attention kernels give padded tokens an output")
        tokens = [sample.position for sample in batch.samples]
        return lambda: tokens

    def _compare(self, got: torch.Tensor, want: torch.Tensor, scale: torch.Tensor) -> None:
        numbers = torch.finfo(self._dtype)
        limit = ROUNDING[self._dtype] * scale + numbers.tiny * numbers.eps
        wrong = ~((got - want).abs() <= limit)  # a NaN is wrong too
        count = int(wrong.sum())
        if count:
            raise Differs(
                f"the attention kernels give other numbers than plain torch ({self._kind}): {count} of {wrong.numel()} differ, by up to "
                f"{float((got - want).abs().nan_to_num(float('inf')).max()):.3g}"
            )
        for ours, plain in ((self._cache.keys, self._plain.keys), (self._cache.values, self._plain.values)):
            count = int((ours[0].float() != plain[0]).sum())
            if count:
                raise Differs(
                    f"the attention kernels write other KV than plain torch ({self._kind}): {count} numbers differ"
                )


# -- sampling

_PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"temperature": 0.9, "min_p": 0.05, "logprobs": 5},
    {"temperature": 0.0, "logprobs": 0},
)


def sampler_trial(vocabulary: int, device: torch.device) -> None:
    """Raises `Differs` if tokens, their log-probabilities, or the scores of given tokens differ from the CPU's."""
    generator = torch.Generator().manual_seed(0)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, vocabulary, 50, dtype=np.int32)
    here, there = Sampler(vocabulary, torch.device("cpu"), SAMPLED_ROWS), Sampler(vocabulary, device, SAMPLED_ROWS)
    rows = list(range(SAMPLED_ROWS))
    for sampler in (here, there):
        for row in rows:
            params = SamplingParams(seed=row, max_tokens=9, **_PARAMS[row % len(_PARAMS)])
            sampler.add(row, params, row.to_bytes(16, "little"), prompt)
    mask = torch.full((SAMPLED_ROWS, -(-vocabulary // 32)), -1, dtype=torch.int32)
    mask[::5, ::2] = 0x5A5A5A5A
    differing = 0
    for position in range(3):
        # Float32, so that no two logits are equal: of equal ones, any could win.
        logits = torch.randn(SAMPLED_ROWS, vocabulary, generator=generator) * 3
        want = here.sample(logits, rows, [position] * len(rows), mask if position == 1 else None)
        got = there.sample(logits.to(device), rows, [position] * len(rows), mask if position == 1 else None)
        other = got.tokens.cpu() != want.tokens
        differing += int(other.sum())
        greedy = [row for row in rows if not _PARAMS[row % len(_PARAMS)]["temperature"]]
        if differing > MOVED or bool(other[greedy].any()) or not torch.equal(got.valid.cpu(), want.valid):
            raise Differs(f"{differing} of {len(rows) * (position + 1)} sampled tokens differ from those on the CPU")
        assert got.measured is not None and want.measured is not None
        same = ~other[list(want.wanted)]
        _compare_numbers("the log-probabilities of sampled tokens", got.measured.cpu()[same], want.measured[same])
        targets = rng.integers(0, vocabulary, SAMPLED_ROWS).tolist()
        for scored, wanted in zip(
            score_targets(logits.to(device), rows, targets), score_targets(logits, rows, targets), strict=True
        ):
            _compare_numbers("the scores of given tokens", scored.cpu(), wanted)


def _compare_numbers(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Raises `Differs` if numbers differ by more than the rounding of float32 log-probabilities; token ids must be equal."""
    apart = (got.double() - want.double()).abs()
    if not bool((apart < 1e-3).all()):
        raise Differs(f"{what} differ from those on the CPU by up to {float(apart.max()):.3g}")


if __name__ == "__main__":
    main()
