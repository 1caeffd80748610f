"""A job on a Ray cluster of two nodes on this machine: any actor, node or driver may be lost, and the output is that of one process."""

import base64
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from batchgen import EngineConfig, JobConfig, JobReport, ModelConfig, SamplingParams, job_status, run_job
from batchgen.devices.transport import Gone, Ready, WorkerReport
from batchgen.errors import DevicesLost, Interrupted, UsageError
from batchgen.process.signals import Signals
from batchgen.progress import Silent, Snapshot
from support.progress import Recorder, logged
from support.vision import make, picture

ray = pytest.importorskip("ray")
from batchgen.devices import ray_cluster  # noqa: E402
from batchgen.devices.ray_cluster import RayCluster, _path_on_workers  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's own, of its processes and sockets
]
SAMPLING = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9, seed=3)
NESTED = ("A report of the northern region. ", "Its first part is about ships. ", "Its second part is about trains. ")
ROWS = 300


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "RAY_worker_niceness", "0"
        )  # with a lower priority than other tests, actors would take minutes to start
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


@pytest.fixture(scope="module")
def one_process(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the input, groups inside of groups, and `one.jsonl`: what one process writes."""
    folder = tmp_path_factory.mktemp("one")
    rows = [{"prompt": NESTED[0] + NESTED[1 + i % 2] + f"{i % 7} of {i}", "n": i} for i in range(ROWS)]
    rows[9]["prompt"] = 7
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_job(config_of(tiny_model_dir, None, inputs=folder / "in.jsonl", output=folder / "one.jsonl"))
    return folder


@pytest.fixture
def expected(one_process: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Returns the output of one process. The input is in the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(one_process / "in.jsonl", "in.jsonl")
    return (one_process / "one.jsonl").read_bytes()


def config_of(folder: Path, address: str | None, **options: Any) -> JobConfig:
    engine = EngineConfig(batch_size=4, threads=1)
    ours = ModelConfig(model=str(folder), device="cpu", ray=address)
    return JobConfig(
        **{"inputs": "in.jsonl", "output": "o.jsonl", "model": ours, "engine": engine, "sampling": SAMPLING} | options
    )


@dataclass(eq=False)
class Actor:
    """An actor of the job, as its driver knows it."""

    link: Any = None
    ready: bool = False
    rows: int = 0
    ended: bool = False

    def hear(self, message: Any) -> None:
        self.ready |= isinstance(message, Ready)
        self.rows += len(message.results) if isinstance(message, WorkerReport) else 0
        self.ended |= isinstance(message, Gone)


class Actors:
    """All actors that the jobs of a test start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[Actor] = []
        start = RayCluster.start

        def started(cluster: Any, setup: Any, on_message: Callable[[Any], None]) -> Any:
            actor = Actor()
            self.started.append(actor)

            def hear(message: Any) -> None:
                actor.hear(message)
                on_message(message)

            actor.link = start(cluster, setup, hear)
            return actor.link

        monkeypatch.setattr(RayCluster, "start", started)

    @property
    def alive(self) -> list[Actor]:
        return [actor for actor in self.started if not actor.ended]

    def wait(self, done: Callable[[], bool]) -> None:
        """Waits up to two minutes. The driver waits too if this is called by its progress."""
        until = time.monotonic() + 120
        while not done() and time.monotonic() < until:
            time.sleep(0.02)


class Losing(Recorder):
    """Kills something at random moments, each time when two actors have finished rows, `kills` times in all."""

    def __init__(self, actors: Actors, seed: int, kills: int, lose: Callable[[random.Random], None]) -> None:
        super().__init__()
        self._actors, self._lose, self._rng = actors, lose, random.Random(seed)
        self.kills, self.lost = kills, 0
        self._next = 0

    def update(self, now: Snapshot) -> None:
        """Holds the driver until it knows of the loss, and then until the successor is ready, so that the job does not end earlier."""
        actors = self._actors
        if self.lost == self.kills or now.phase != "generating":
            return
        actors.wait(lambda: len(actors.started) - len(actors.alive) >= self.lost)
        if len(actors.alive) < 2:
            return  # the driver must learn of the loss
        actors.wait(lambda: all(actor.ready or actor.ended for actor in actors.started))
        if now.rows_done >= self._next and all(actor.rows for actor in actors.alive):
            self._next = now.rows_done + self._rng.randrange(1, ROWS // (4 * self.kills))
            self.lost += 1
            self._lose(self._rng)


def check(report: JobReport, expected: bytes) -> None:
    assert Path("o.jsonl").read_bytes() == expected
    assert (report.exit_code, report.stats["rows"], report.stats["rows_failed"]) == (3, ROWS, 1)
    assert sum(worker["rows"] for worker in report.stats["workers"]) == ROWS - 1


def test_two_nodes_write_what_one_process_writes(connected, tiny_model_dir, expected):
    seen: list[list[str]] = []

    class Looking(Silent):
        def update(self, now: Snapshot) -> None:
            if now.phase == "generating" and (workers := job_status("o.jsonl")["workers"]) is not None:
                seen.append([worker["state"] for worker in workers])

    report = run_job(config_of(tiny_model_dir, connected.address), Looking())
    check(report, expected)
    assert report.stats["device"] == "ray: 2 × cpu"
    assert len(report.stats["workers"]) == 2
    assert not any(worker["lost"] for worker in report.stats["workers"])
    assert any(state == "running" for states in seen for state in states)


def test_rows_with_images_are_written_as_one_process_writes_them(connected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make("llava", tmp_path / "sees")
    rows = []
    for i in range(16):
        picture(i % 4).save(f"{i % 4}.png")
        url = "data:image/png;base64," + base64.b64encode(Path(f"{i % 4}.png").read_bytes()).decode()
        shown = {"type": "image", "path": f"{i % 4}.png"} if i % 3 else {"type": "image", "url": url}
        rows.append({"messages": [{"role": "user", "content": [shown, {"type": "text", "text": f"What is {i}?"}]}]})
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_job(config_of(tmp_path / "sees", None, output="one.jsonl"))
    stats = run_job(config_of(tmp_path / "sees", connected.address)).stats
    assert Path("o.jsonl").read_bytes() == Path("one.jsonl").read_bytes()
    assert (stats["rows_ok"], stats["images"]) == (16, 16)
    assert 4 <= stats["images_encoded"] <= 8


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("what", ["actor", "node"])
def test_what_is_lost_is_replaced_and_its_rows_are_done_by_others(
    connected, tiny_model_dir, expected, monkeypatch, what, kills
):
    actors = Actors(monkeypatch)

    def lose(rng: random.Random) -> None:
        if what == "actor":
            ray.kill(rng.choice(actors.alive).link._actor, no_restart=True)
        else:
            connected.remove_node(next(iter(connected.worker_nodes)), allow_graceful=False)
            connected.add_node(num_cpus=1, object_store_memory=80 << 20)

    losing = Losing(actors, 7 if what == "actor" else 3, kills, lose)
    report = run_job(config_of(tiny_model_dir, connected.address), losing)
    check(report, expected)
    assert losing.lost == kills
    assert sum(worker["lost"] for worker in report.stats["workers"]) == kills
    if what == "actor":
        assert any("it is started again, and its" in note for note in losing.notes)
        assert len(report.stats["workers"]) == 2 + kills


def command(model: Path, address: str) -> list[str]:
    options = "--max-tokens 40 --ignore-eos --temperature 0.9 --seed 3 --batch-size 4 --threads 1 --device cpu -q"
    return [
        sys.executable, "-m", "batchgen_cli", "run", "in.jsonl", "-m", str(model), "-o", "o.jsonl", *options.split(),
        "--flush-every", "0", "--ray", address,
    ]  # fmt: skip


def results(folder: Path) -> int:
    from batchgen.jobs.files.results import read_facts

    return read_facts(folder, ())[1] or 0


@pytest.mark.parametrize(
    ("signum", "kills"),
    [
        (signal.SIGKILL, 2),
        pytest.param(signal.SIGKILL, 10, marks=pytest.mark.nightly),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.nightly),
    ],
)
def test_a_driver_that_is_killed_goes_on_where_it_was(
    cluster, tiny_model_dir, expected, signum, kills, command_environment
):
    rng = random.Random(signum)
    before = killed = 0
    for _ in range(kills):
        until = before + rng.randrange(1, 200 // kills)
        with subprocess.Popen(
            command(tiny_model_dir, cluster.address), env=command_environment, stderr=subprocess.PIPE
        ) as driver:
            while results(Path("o.jsonl.job")) < until and driver.poll() is None:
                time.sleep(0.005)
            driver.send_signal(signum)
            code = driver.wait(60)
        assert code in (-signum, 128 + signum, 3)
        killed += code != 3
        now = results(Path("o.jsonl.job"))
        assert before <= now <= ROWS - 1 or code == 3
        before = now
    assert killed >= kills // 2
    done = subprocess.run(command(tiny_model_dir, cluster.address), env=command_environment, capture_output=True)
    assert done.returncode == 3, done.stderr
    assert Path("o.jsonl").read_bytes() == expected


def test_a_model_in_the_working_directory_is_copied_to_the_machines(
    cluster, tiny_model_dir, expected, tmp_path, monkeypatch
):
    shutil.copytree(tiny_model_dir, tmp_path / "work" / "model")
    model = ModelConfig(
        model=tmp_path / "work" / "model", device="cpu", ray=cluster.address, ray_working_dir=tmp_path / "work"
    )
    start = RayCluster.start

    def away(*given: Any) -> Any:
        shutil.rmtree(tmp_path / "work", ignore_errors=True)  # the driver's folder, which other machines do not see
        return start(*given)

    monkeypatch.setattr(RayCluster, "start", away)
    check(run_job(config_of(tiny_model_dir, None, model=model)), expected)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("model", "working_dir", "found"),
    [
        ("org/name", None, "org/name"),
        ("org/name", "work", "org/name"),
        ("work/model", None, "{here}/work/model"),
        ("work/model", "elsewhere", "{here}/work/model"),
        ("work/model", "work", "./model"),
        ("{here}/work/model", "work", "./model"),
        ("work/model", "{here}/work/model", "./."),
    ],
)
def test_where_the_machines_look_for_a_model(tmp_path, monkeypatch, model, working_dir, found):
    monkeypatch.chdir(tmp_path)
    Path("work/model").mkdir(parents=True)
    working_dir = None if working_dir is None else working_dir.format(here=tmp_path)
    assert _path_on_workers(model.format(here=tmp_path), working_dir) == found.format(here=tmp_path)


def test_a_working_directory_that_cannot_be_used_is_told(connected, tiny_model_dir, tmp_path):
    model = ModelConfig(model=tiny_model_dir, ray=connected.address, ray_working_dir=tmp_path)
    with pytest.raises(UsageError, match="--ray-working-dir comes too late: this program is connected to Ray already"):
        RayCluster(model)


def test_a_working_directory_that_is_not_there_is_told(cluster, tiny_model_dir):
    model = ModelConfig(model=tiny_model_dir, ray=cluster.address, ray_working_dir="nowhere")
    with pytest.raises(UsageError, match="--ray-working-dir nowhere is not a folder; name one that holds the model"):
        RayCluster(model)


@pytest.mark.parametrize(("address", "variable"), [("127.0.0.1:1", ""), ("auto", "127.0.0.1:1")])
def test_a_cluster_that_is_not_there_is_told_at_once(address, variable, tiny_model_dir, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", variable)
    monkeypatch.setattr("ray.init", None)  # it would try for minutes
    with pytest.raises(UsageError, match=r"there is no Ray cluster at 127\.0\.0\.1:1: Connection refused; start one"):
        RayCluster(ModelConfig(model=tiny_model_dir, ray=address))


def test_more_cpus_than_any_machine_has_are_refused(connected, tiny_model_dir, expected):
    model = ModelConfig(model=str(tiny_model_dir), device="cpu", ray=connected.address, cpus_per_worker=64)
    with pytest.raises(UsageError, match="the Ray cluster has no machine with 64 free CPUs"):
        run_job(config_of(tiny_model_dir, None, model=model))


def test_a_job_says_that_it_waits_for_other_work_on_the_cluster(connected, tiny_model_dir):
    model = ModelConfig(model=tiny_model_dir, device="cpu", ray=connected.address)
    waits = ["other work holds the CPUs of the Ray cluster: the job waits for it to end"]

    @ray.remote(num_cpus=1)
    class Other:
        def runs(self) -> bool:
            return True

    with logged("batchgen", "INFO") as said:
        RayCluster(model).close()
        assert said == []
        others = [Other.remote() for _ in range(2)]
        ray.get([other.runs.remote() for other in others])
        RayCluster(model).close()
        assert said == waits
    for other in others:
        ray.kill(other)


def test_a_signal_while_ray_connects_interrupts_the_job(cluster, tiny_model_dir, monkeypatch):
    def init(**options: Any) -> None:  # Ray's own handler ends the program
        signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(signum))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("ray.init", init)
    model = ModelConfig(model=tiny_model_dir, device="cpu", ray=cluster.address)
    before = signal.getsignal(signal.SIGTERM)
    with Signals(5.0) as signals, pytest.raises(Interrupted) as interrupted, signals.interruptible():
        RayCluster(model)
    assert interrupted.value.signum == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_why_an_actor_has_died_is_told(connected):
    class Running:
        def runs(self) -> bool:
            return True

    actor = ray.remote(Running).options(num_cpus=0).remote()
    assert ray.get(actor.runs.remote())
    ray.kill(actor)
    with pytest.raises(ray.exceptions.ActorDiedError) as died:
        ray.get(actor.runs.remote())
    assert ray_cluster._first_line(died.value) == "The actor is dead because it was killed by `ray.kill`."


def test_why_an_actor_cannot_start_is_told(connected, tiny_model_dir, expected, monkeypatch):
    class WithoutBatchgen:
        def __init__(self, setup: bytes) -> None:
            raise ModuleNotFoundError("No module named 'batchgen'")

        def deliver(self, number: int, data: bytes) -> None: ...

        def listen(self, seconds: float) -> None: ...

    monkeypatch.setattr(ray_cluster, "EngineActor", WithoutBatchgen)
    with pytest.raises(
        DevicesLost, match=r"^the process of cpu ended \(ModuleNotFoundError: No module named 'batchgen'\)"
    ):
        run_job(config_of(tiny_model_dir, connected.address))
