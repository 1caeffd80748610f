"""The part of the machine that a process of several takes."""

import pytest
import torch

from batchgen.devices.worker import take_share
from batchgen.errors import ModelError


@pytest.mark.parametrize(
    ("total", "processes", "shares"), [(8, 2, [4, 4]), (7, 2, [3, 4]), (4, 3, [1, 1, 2]), (1, 4, [1, 1, 1, 1])]
)
def test_threads_are_split_evenly_and_each_has_one(monkeypatch, total, processes, shares):
    threads = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: total)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for place in range(processes):
        take_share(f"cpu:{place}", place, processes)
    assert threads == shares


def test_a_device_that_is_not_there_is_told_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    with pytest.raises(ModelError, match=r"^--device cuda:99: this machine has \d+ CUDA device\(s\); use"):
        take_share("cuda:99", 0, 2)


@pytest.mark.gpu
def test_a_process_works_on_its_own_gpu(monkeypatch):
    last = torch.cuda.device_count() - 1
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    take_share(f"cuda:{last}", 0, 1)
    assert torch.cuda.current_device() == last
