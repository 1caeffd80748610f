"""The share of the machine that each of several processes takes."""

import pytest
import torch

from batchgen.config import EngineConfig
from batchgen.devices.opening import use_threads
from batchgen.devices.worker import take_device
from batchgen.errors import ModelError


@pytest.mark.parametrize(
    ("total", "processes", "shares"), [(8, 2, [4, 4]), (7, 2, [3, 4]), (4, 3, [1, 1, 2]), (1, 4, [1, 1, 1, 1])]
)
def test_threads_are_split_evenly_and_each_has_one(monkeypatch, total, processes, shares):
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for place in range(processes):
        use_threads(EngineConfig(threads=total), place, processes)
    assert threads == shares


def test_a_device_that_is_not_there_is_told_before_anything_is_loaded():
    with pytest.raises(ModelError, match=r"^--device cuda:99: this machine has (no|\d+) CUDA devices?; use"):
        take_device("cuda:99")


@pytest.mark.gpu
def test_a_process_works_on_its_own_gpu():
    last = torch.cuda.device_count() - 1
    take_device(f"cuda:{last}")
    assert torch.cuda.current_device() == last
