from types import SimpleNamespace

import numpy as np
import torch

from batchgen.kernels.transfer import Readback
from batchgen.scheduling.batch import pending_of, tokens_of
from support import simulation as sim

CPU = torch.device("cpu")


def test_tokens_that_only_the_device_knows_are_zero_and_named_by_place_and_slot():
    s = sim.Simulation(ahead=True)
    s.load([[5, 6], [7, 8], [9]], [3, 1, 3])
    first = s.step()
    assert tokens_of(first.spans).tolist() == [5, 6, 7, 8, 9]
    assert [places.tolist() for places in pending_of(first.spans)] == [[], []]
    second = s.scheduler.schedule()
    assert tokens_of(second.spans).tolist() == [0, 0]  # the second prompt has its one token
    places, slots = pending_of(second.spans)
    assert (places.tolist(), places.dtype, slots.dtype) == ([0, 1], np.int64, np.int64)
    assert slots.tolist() == [w.span.slot for w in second.spans]


def test_tokens_that_the_host_has_seen_are_there():
    s = sim.Simulation()
    s.load([[5, 6], [7, 8, 9]], [3, 3])
    s.step()
    step = s.scheduler.schedule()
    assert tokens_of(step.spans).tolist() == [1000, 1007]
    assert [places.tolist() for places in pending_of(step.spans)] == [[], []]


def test_a_readback_gives_each_tensor_its_own_numbers():
    tokens, valid = torch.tensor([3, 2**40 + 1]), torch.tensor([True, False])
    assert Readback([tokens, valid], CPU).lists() == [[3, 2**40 + 1], [1, 0]]
    measured = torch.tensor([[0.5, 7.0], [1.5, 8.0]], dtype=torch.float64)
    assert Readback([tokens, valid, measured], CPU).lists() == [[3, 2**40 + 1], [1, 0], [0.5, 7.0, 1.5, 8.0]]
    assert Readback([], CPU).lists() == []


def test_a_readback_is_what_the_tensors_were_when_it_was_made():
    numbers = torch.tensor([1, 2])
    back = Readback([numbers], CPU)
    numbers.zero_()
    assert back.lists() == [[1, 2]]


def test_a_readback_waits_when_it_is_asked_and_for_its_own_event(monkeypatch):
    """By a device in name only."""
    did = []
    event = SimpleNamespace(synchronize=lambda: did.append("waited"))
    stream = SimpleNamespace(record_event=lambda: (did.append("recorded"), event)[1])
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(
        torch, "empty", lambda *a, pin_memory, **k: (did.append(f"pinned {pin_memory}"), empty(*a, **k))[1]
    )
    back = Readback([torch.tensor([4])], torch.device("cuda"))
    assert did == ["pinned True", "recorded"]
    assert back.lists() == [[4]]
    assert did == ["pinned True", "recorded", "waited"]
