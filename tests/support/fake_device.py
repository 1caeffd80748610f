"""A fake CUDA device on the CPU: attention behind one operator, and graphs that replay operators on the tensors they were captured with."""

import os
from itertools import count
from multiprocessing.connection import Connection
from threading import Thread

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from batchgen.attention.base import LayerOptions
from batchgen.attention.plan import plan_attention
from batchgen.attention.torch_backend import Cascade
from batchgen.model.checks.device_check import PARTS
from batchgen.model.checks.device_trials import run_trials
from batchgen.model.cuda_runner import DeviceStep

_numbers = count()
_attentions = {}


class FakeAttention:
    """Replaces `DeviceAttention` by the plain cascade. The operator looks up the plan when it runs, as a device reads a static buffer."""

    def __init__(self, cache, max_tokens):
        self.cache = cache
        self.generation = 0
        self.positions = torch.zeros(max_tokens, dtype=torch.int64)
        self.sizes = []
        self._number = next(_numbers)
        _attentions[self._number] = self

    def plan(self, works, tokens=None):
        plan = plan_attention(works, self.cache.block_size)
        self.num_parts = len(plan.shared) + len(plan.causal)
        self.cascade, self.kv_indices = Cascade(plan, torch.device("cpu")), torch.from_numpy(plan.kv_indices)
        self.positions.zero_()
        self.positions[: plan.num_tokens] = torch.from_numpy(plan.positions)
        self.sizes.append(plan.num_tokens if tokens is None else tokens)
        assert plan.num_tokens <= self.sizes[-1] <= len(self.positions)

    def __call__(self, layer, q_HTD, k_KTD, v_KTV, options):
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        return torch.ops.batchgen_tests.attend(
            q_HTD, k_KTD, v_KTV, keys, values, options.scale, options.sliding_window, options.softcap, options.sinks,
            self._number,
        )  # fmt: skip


@torch.library.custom_op("batchgen_tests::attend", mutates_args=("keys", "values"))
def attend(
    q_HTD: torch.Tensor, k_KTD: torch.Tensor, v_KTV: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    scale: float, sliding_window: int | None, softcap: float | None, sinks: torch.Tensor | None, number: int,
) -> torch.Tensor:  # fmt: skip
    self = _attentions[number]
    H, padded, D = q_HTD.shape
    K, T = len(k_KTD), len(self.kv_indices)
    assert padded == self.sizes[-1], "the batch and its plan are padded differently"
    keys.index_copy_(1, self.kv_indices, k_KTD[:, :T])
    values.index_copy_(1, self.kv_indices, v_KTV[:, :T])
    q_KTGD = q_HTD[:, :T].reshape(K, H // K, T, D).transpose(1, 2)
    out = self.cascade.attend(q_KTGD, keys, values, LayerOptions(scale, sliding_window, softcap, sinks))
    return torch.cat([out.reshape(T, H, -1), out.new_zeros(padded - T, H, values.shape[-1])])


@attend.register_fake
def _(q_HTD, k_KTD, v_KTV, keys, values, scale, sliding_window, softcap, sinks, number):
    return q_HTD.new_empty(q_HTD.shape[1], q_HTD.shape[0], values.shape[-1])


class Capture:
    """Replays by running the forward again, on the same tensors."""

    def __init__(self):
        self.replays = 0

    def __call__(self, forward):
        forward()
        replay = self.recorded(forward)

        def counted():
            self.replays += 1
            replay()

        return counted

    def recorded(self, forward):
        return forward


class Recording(Capture):
    """Replays only the operators that the forward ran, on the same tensors. A capture takes a second."""

    def recorded(self, forward):
        return make_fx(forward)()


def use_fake_device(monkeypatch, capture=Capture, attention=FakeAttention):
    """Makes new engines run their steps as on a CUDA device. Returns the list of their `DeviceStep`s."""
    steps = []

    def device_step(model, cache, limits, notes):
        if model.attention == "torch" or not model.verdict.uses("triton"):
            return None
        steps.append(DeviceStep(model, attention(cache, limits.max_batch_tokens), limits, notes, capture))
        return steps[-1]

    monkeypatch.setattr("batchgen.model.runner.device_step", device_step)
    monkeypatch.setattr(
        "batchgen.model.checks.device_trials.DeviceAttention",
        lambda cache, max_tokens, device, group: attention(cache, max_tokens),
    )
    return steps


def faulty(fault):
    """A `FakeAttention` whose output goes through `fault`."""

    class Faulty(FakeAttention):
        def __call__(self, *arguments):
            return fault(super().__call__(*arguments))

    return Faulty


class ThreadOfTrials:
    """Replaces the process of trials (`device_check.start_trials`) by a thread that tries `model`."""

    def __init__(self, model):
        self.model = model
        self.started = []
        """For each process, the parts that it was asked to try."""

    def __call__(self, connection, said):
        end = Connection(os.dup(connection.fileno()))
        self.thread = Thread(target=self._run, args=(end,), daemon=True)
        self.thread.start()
        return self

    def _run(self, end):
        with end:
            setup = end.recv()
            self.started.append(setup.parts)
            run_trials(setup, self.model, end.send)

    def wait(self, timeout=None):
        return 1

    def kill(self):
        pass


def check_as_on_a_gpu(monkeypatch, start, name="Fake GPU"):
    """Makes `check_device` treat the CPU as a GPU of this name and start its trials with `start`."""
    monkeypatch.setattr("batchgen.model.checks.device_check.parts_on", lambda device: tuple(PARTS))
    monkeypatch.setattr("batchgen.model.checks.device_check.device_identity", lambda device: (name, "driver 1"))
    monkeypatch.setattr("batchgen.model.checks.device_check.start_trials", start)
