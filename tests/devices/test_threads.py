"""How many threads an engine has: the number asked for, or the cores that the process may use."""

import os

import pytest
import torch

from batchgen.config import EngineConfig, ModelConfig
from batchgen.devices import opening as devices
from batchgen.errors import UsageError
from batchgen.process.machine import cpu_quota
from batchgen.prompts import load_tokenizer
from support.progress import logged


def v1(quota):
    return {"cpu/cpu.cfs_quota_us": quota, "cpu/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        (None, {}, None),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/a.slice/b.scope", {"a.slice/b.scope/cpu.max": "800000 100000", "a.slice/cpu.max": "300000 100000"}, 3),
        ("3:cpu,cpuacct:/docker/1\n0::/", v1("-1"), None),
        ("3:cpu,cpuacct:/docker/1\n0::/", v1("400000"), 4),
    ],
)
def test_the_quota_is_the_smallest_of_the_groups_that_the_process_is_in(tmp_path, groups, files, quota):
    texts = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in (texts | ({"proc/self/cgroup": groups} if groups else {})).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(
    ("total", "processes", "shares"),
    [(8, 2, [4, 4]), (7, 2, [3, 4]), (7, 3, [2, 2, 3]), (4, 3, [1, 1, 2]), (1, 4, [1, 1, 1, 1])],
)
def test_threads_are_split_evenly_and_each_process_has_one(monkeypatch, total, processes, shares):
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for place in range(processes):
        devices.use_threads(EngineConfig(threads=total), place, processes)
    assert threads == shares


def test_an_actor_of_a_cluster_has_its_own_threads_whatever_its_number():
    assert [devices.num_threads(EngineConfig(threads=2), place, processes=1) for place in (0, 1, 7)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("asked", "quota", "threads"), [(None, None, 5), (None, 3, 3), (None, 9, 5), (4, 3, 4), (8, None, 8)]
)
def test_the_option_decides_and_else_what_torch_would_take_within_the_quota(monkeypatch, asked, quota, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    monkeypatch.setattr(devices, "cpu_quota", lambda: quota)
    try:
        devices.use_threads(EngineConfig(threads=asked))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("asked", "noted"), [(None, False), (3, False), (1000, True)])
def test_more_threads_than_cores_are_noted(tiny_model_dir, monkeypatch, asked, noted):
    monkeypatch.setattr(devices, "usable_cores", lambda: 3)
    monkeypatch.setattr(devices, "use_threads", lambda config: None)
    monkeypatch.setattr(devices, "engine_here", lambda *given: None)
    model = ModelConfig(model=str(tiny_model_dir))
    with logged("batchgen", "INFO") as said:
        devices.open_engine(model, load_tokenizer(model), EngineConfig(threads=asked))
    told = ["--threads 1000 is more than the cores that this process may use (3), which makes the job slower"]
    assert said == (told if noted else [])


def test_a_forked_process_loads_no_model_with_threads(tiny_model_dir, monkeypatch):
    monkeypatch.setattr(devices, "_THREADED", [])
    monkeypatch.setattr(devices, "engine_here", lambda *given: "an engine")
    monkeypatch.setattr(devices.sys, "platform", "linux")
    model = ModelConfig(model=str(tiny_model_dir))
    tokenizer, before = load_tokenizer(model), torch.get_num_threads()
    open_with = lambda threads: devices.open_engine(model, tokenizer, EngineConfig(threads=threads))  # noqa: E731
    try:
        assert open_with(1) == "an engine"
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: 7)
            assert open_with(1) == open_with(2) == "an engine"  # no thread was there before
        with pytest.raises(UsageError, match=r"^this process was forked from process 7, which has loaded a model, "):
            open_with(2)
        assert open_with(1) == "an engine"
    finally:
        torch.set_num_threads(before)
