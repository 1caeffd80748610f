"""A job on a Ray cluster of two nodes on this machine: any actor, node or driver may be lost, and the output is that of one process."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchgen import EngineConfig, JobConfig, JobReport, ModelConfig, SamplingParams, run_job
from batchgen.errors import ModelError, UsageError
from batchgen.progress import Silent, Snapshot

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's own, of its processes and sockets
]
SAMPLING = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9, seed=3)
NESTED = ("A report of the northern region. ", "Its first part is about ships. ", "Its second part is about trains. ")
KILLS = 10


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20})
    cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def connected(cluster: Any) -> Iterator[Any]:
    """The cluster, with this process as its driver: connecting takes longer than the job."""
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()


@pytest.fixture
def expected(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What one process writes, for groups inside of groups."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": NESTED[0] + NESTED[1 + i % 2] + f"{i % 7} of {i}", "n": i} for i in range(150)]
    rows[9]["prompt"] = 7
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_job(config_of(tiny_model_dir, None, output="one.jsonl"))
    return Path("one.jsonl").read_bytes()


def config_of(model: Path, address: str | None, **options: Any) -> JobConfig:
    engine = EngineConfig(batch_size=4, threads=1)
    ours = ModelConfig(model=str(model), device="cpu", ray=address)
    return JobConfig(
        **{"inputs": "in.jsonl", "output": "o.jsonl", "model": ours, "engine": engine, "sampling": SAMPLING} | options
    )


class At(Silent):
    """Does something when so many rows are done, for each of some numbers."""

    def __init__(self, moments: list[int], action: Callable[[], None]) -> None:
        self.moments, self.action = sorted(moments), action
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def update(self, now: Snapshot) -> None:
        if self.moments and now.phase == "generating" and now.rows_done >= self.moments[0]:
            self.moments.pop(0)
            self.action()


def check(report: JobReport, expected: bytes) -> None:
    assert Path("o.jsonl").read_bytes() == expected
    assert (report.exit_code, report.stats["rows"], report.stats["rows_failed"]) == (3, 150, 1)
    assert sum(worker["rows"] for worker in report.stats["workers"]) == 149


def test_two_nodes_write_what_one_process_writes(connected: Any, tiny_model_dir: Path, expected: bytes) -> None:
    report = run_job(config_of(tiny_model_dir, connected.address))
    check(report, expected)
    assert report.stats["device"] == "ray: 2 × cpu"
    assert len(report.stats["workers"]) == 2
    assert not any(worker["lost"] for worker in report.stats["workers"])


def test_actors_that_are_killed_are_replaced(
    connected: Any, tiny_model_dir: Path, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchgen.devices import ray_cluster

    links: list[Any] = []
    start = ray_cluster.RayCluster.start
    monkeypatch.setattr(ray_cluster.RayCluster, "start", lambda *a: links.append(start(*a)) or links[-1])
    rng = random.Random(7)

    def kill() -> None:
        ray.kill(rng.choice(links)._actor, no_restart=True)

    killed = At([rng.randrange(1, 149) for _ in range(KILLS)], kill)
    report = run_job(config_of(tiny_model_dir, connected.address), killed)
    check(report, expected)
    assert any("it is started again, and its" in note for note in killed.notes)
    assert sum(worker["lost"] for worker in report.stats["workers"]) >= 2
    assert len(report.stats["workers"]) >= 4


def test_nodes_that_are_lost_leave_their_rows_to_others(connected: Any, tiny_model_dir: Path, expected: bytes) -> None:
    rng = random.Random(3)
    lost = []

    def lose_a_node() -> None:
        node = next(iter(connected.worker_nodes))
        connected.remove_node(node, allow_graceful=False)
        lost.append(node)
        connected.add_node(num_cpus=1, object_store_memory=80 << 20)

    report = run_job(
        config_of(tiny_model_dir, connected.address), At([rng.randrange(5, 140) for _ in range(3)], lose_a_node)
    )
    check(report, expected)
    assert len(lost) == 3


def command(model: Path, address: str) -> list[str]:
    options = "--max-tokens 40 --ignore-eos --temperature 0.9 --seed 3 --batch-size 4 --threads 1 --device cpu -q"
    return [
        sys.executable, "-m", "batchgen_cli", "run", "in.jsonl", "-m", str(model), "-o", "o.jsonl", *options.split(),
        "--flush-every", "0", "--ray", address,
    ]  # fmt: skip


def results(folder: Path) -> int:
    from batchgen.jobs.results import read_facts

    return read_facts(folder, ())[1] or 0


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_a_driver_that_is_killed_goes_on_where_it_was(
    cluster: Any, tiny_model_dir: Path, expected: bytes, signum: int, command_environment: dict[str, str]
) -> None:
    rng = random.Random(signum)
    before = 0
    for _ in range(2):
        until = before + rng.randrange(1, 40)
        with subprocess.Popen(
            command(tiny_model_dir, cluster.address), env=command_environment, stderr=subprocess.PIPE
        ) as driver:
            while results(Path("o.jsonl.job")) < until and driver.poll() is None:
                time.sleep(0.01)
            driver.send_signal(signum)
            code = driver.wait(60)
        assert code in (-signum, 128 + signum, 3)
        now = results(Path("o.jsonl.job"))
        assert now >= before or code == 3
        before = now
    done = subprocess.run(command(tiny_model_dir, cluster.address), env=command_environment, capture_output=True)
    assert done.returncode == 3, done.stderr
    assert Path("o.jsonl").read_bytes() == expected


def test_a_model_that_the_machines_do_not_have_is_told_in_one_line(
    connected: Any, tiny_model_dir: Path, expected: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.symlink(tiny_model_dir, tmp_path / "here")
    monkeypatch.setattr("batchgen.devices.ray_cluster.RayCluster.setups", moved_away)
    with pytest.raises(
        ModelError, match=r"a machine of the cluster cannot load the model: model folder .*hub or a folder"
    ):
        run_job(config_of(Path("here"), connected.address))


def moved_away(self: Any, model: ModelConfig, engine: EngineConfig) -> Any:
    """As if the driver's folder were not there on the others."""
    from batchgen.devices.transport import WorkerSetup

    return [WorkerSetup(ModelConfig(model="./nowhere", device="cpu"), engine, place, 1) for place in range(2)]


def test_a_cluster_that_is_not_there_is_told(tiny_model_dir: Path, expected: bytes) -> None:
    with pytest.raises(UsageError, match=r"there is no Ray cluster at 127\.0\.0\.1:1: "):
        run_job(config_of(tiny_model_dir, "127.0.0.1:1"))


def test_more_cpus_than_any_machine_has_are_refused(connected: Any, tiny_model_dir: Path, expected: bytes) -> None:
    model = ModelConfig(model=str(tiny_model_dir), device="cpu", ray=connected.address, cpus_per_worker=64)
    with pytest.raises(UsageError, match="the Ray cluster has no machine with 64 free CPUs"):
        run_job(config_of(tiny_model_dir, None, model=model))
