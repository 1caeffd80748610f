"""The decode loop asks the device for nothing but what `Readback` brings, one step late.

The tests use a device without values (`meta`), so code that asks it for a number raises, in the same branches as on CUDA. Copies from the
host must go through `staging`, which pins memory, because other copies wait for the device.
"""

import random
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakTensorKeyDictionary

from batchgen.engine import executor as executor_module
from batchgen.engine.executor import StepExecutor
from batchgen.kernels import transfer
from batchgen.model.adapter import prepare
from batchgen.model.runner import Runner
from batchgen.sampling.sampler import Sampler
from batchgen.scheduling.scheduler import StepLoop
from support.models import engine_for, mixed_requests, plain_llama, run, token_ids
from support.params import slow_but
from support.shapes import VOCAB

NOWHERE = torch.device("meta")
EOS = 90


COPIES = (torch.ops.aten._to_copy, torch.ops.aten.to, torch.ops.aten.copy_)


class Waits(AssertionError):
    pass


class Copies(TorchDispatchMode):
    """Raises if the device gets data from the host in any other way than by an asynchronous copy from pinned memory."""

    def __init__(self, there):
        """`there` are the tensors that the device has."""
        super().__init__()
        self.pinned = set()
        self.count = 0
        self.there = WeakTensorKeyDictionary(dict.fromkeys(there))

    def pin(self, tensor):
        self.pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        ours, theirs = [], []
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                (theirs if tensor.device == NOWHERE else ours).append(tensor)
        if not all(tensor in self.there for tensor in theirs):
            raise Waits(f"{func} takes a tensor that was made of a list")
        out = func(*args, **kwargs)
        made = [t for t in tree_iter(out) if isinstance(t, torch.Tensor) and t.device == NOWHERE]
        self.there.update(dict.fromkeys(made))
        if (theirs or made) and any(tensor.dim() for tensor in ours):
            if func.overloadpacket not in COPIES or not all(
                t.untyped_storage().data_ptr() in self.pinned for t in ours
            ):
                raise Waits(f"{func} meets memory of the host that is not pinned")
            if not (kwargs.get("non_blocking") or any(arg is True for arg in args)):
                raise Waits(f"{func} waits for its copy")
            self.count += 1
        return out


class Numbers(TorchFunctionMode):
    """Raises where a number of Python's is put into places that a tensor names: on CUDA torch makes a tensor of it on the host, and waits
    for its copy.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__setitem__ and args[0].device == NOWHERE and not isinstance(args[2], torch.Tensor):
            where = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(at, torch.Tensor) for at in where):
                raise Waits("a number is put into places that a tensor names")
        return func(*args, **(kwargs or {}))


class Attention:
    """Replaces attention, which has its own tests."""

    num_parts = 0

    def __init__(self, packed):
        self.positions = np.concatenate([np.arange(w.start, w.stop) for w in packed.spans])

    def __call__(self, layer, q_HTD, k_KTD, v_KTV, options):
        return q_HTD.new_empty((q_HTD.shape[1], q_HTD.shape[0], v_KTV.shape[2]))


class Told:
    """The answers of a device: random tokens, all of them valid."""

    rng = random.Random(0)

    def __init__(self, parts, device):
        assert device == NOWHERE
        assert all(part.device == NOWHERE for part in parts)
        self.parts = parts

    def lists(self):
        return [
            [Told.rng.randrange(VOCAB) if part.dtype == torch.int64 else 1 for _ in range(part.numel())]
            for part in self.parts
        ]


@contextmanager
def guarded(monkeypatch, engine):
    """Makes this engine run its steps on a device without values."""
    module, params, penalties = engine.runner.model.module, engine.sampler._batch_params, engine.sampler._penalties
    tensors = [params.last, params._table, *(marks.rows for marks in penalties._marks.values())]
    copies = Copies([*module.parameters(), *module.buffers(), *tensors])
    staged = transfer.staged
    monkeypatch.setattr(transfer, "staged", lambda values, device: copies.pin(staged(values, device)))
    step = engine.step

    def watched(admit=True):
        with Numbers(), copies:
            step(admit)

    monkeypatch.setattr(engine, "step", watched)
    yield copies


@cache
def models():
    model = plain_llama(num_hidden_layers=1)
    return model, replace(model, module=deepcopy(model.module).to(NOWHERE), device=NOWHERE)


def engine_without_values(monkeypatch, **options):
    here, model = models()
    engine = engine_for(here, eos=(EOS,), **options)
    monkeypatch.setattr(executor_module, "Readback", Told)
    monkeypatch.setattr(Told, "rng", random.Random(0))  # the same tokens, whichever tests ran before
    runner = Runner(model, engine.runner.cache, engine.sizes.limits, engine.notes)
    runner._attention = Attention
    runner.cache.copy = lambda copies: None
    engine.runner, engine.sampler = runner, Sampler(model.vocab_size, NOWHERE)
    engine.executor = StepExecutor(runner, engine.sampler, engine.constraints)
    engine.loop = StepLoop(engine.scheduler, engine.executor, ahead=1)
    return engine


@pytest.mark.parametrize("options", slow_but([{}], [{}, {"blocks": 3}, {"batch_size": 5, "max_batch_tokens": 16}]))
def test_a_launch_asks_the_device_for_nothing(monkeypatch, options):
    engine = engine_without_values(monkeypatch, **options)
    with guarded(monkeypatch, engine) as copies:
        results = run(engine, mixed_requests(random.Random(3), 21))
    assert [r.row for r in results] == list(range(21))
    assert {r.error_type for r in results} == {None}
    assert {r.finish_reason for r in results} == {"stop", "length", None}
    assert copies.count > engine.stats.steps
    assert (engine.stats.preemptions > 0) == (options == {"blocks": 3})


@pytest.mark.gpu
def test_the_loop_on_a_gpu_waits_for_nothing_but_the_step_before(monkeypatch):
    """torch raises if a launch waits. A first run has compiled everything."""
    here, _ = models()
    requests = mixed_requests(random.Random(3), 21)
    want = run(engine_for(here, eos=(EOS,)), requests)
    engine = engine_for(prepare(deepcopy(here.module).to("cuda"), compile="off"), eos=(EOS,))
    assert engine.loop.ahead
    first = run(engine, requests)
    assert token_ids(first) == token_ids(want)
    step, wait = engine.step, engine.executor.wait
    modes = []

    def watched(admit=True):
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(admit)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def waited(started):
        modes.append(torch.cuda.get_sync_debug_mode())
        return wait(started)

    monkeypatch.setattr(engine, "step", watched)
    monkeypatch.setattr(engine.executor, "wait", waited)
    again = run(engine, requests)
    assert token_ids(again) == token_ids(want)
    assert 2 in modes  # the wait is for an event, which is not forbidden
