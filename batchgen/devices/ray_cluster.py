"""A Ray cluster as the transport of `Workers`: every worker is an actor, placed and moved by Ray. Needs the extra `ray`.

An actor loads the model by itself and runs the same loop as the process of a device (`worker.serve`) in a thread. Messages go to it by
`deliver`, in their order; it is asked for its own by `listen`, which waits for the first one. One thread here listens to all actors.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import ray

from batchgen.config import EngineConfig, ModelConfig
from batchgen.devices.transport import UNDER_WAY_SHARE, Gone, Link, WorkerFailed, WorkerSetup
from batchgen.errors import ModelError, UsageError, in_one_line
from batchgen.process.signals import STOP_SIGNALS

LISTEN_SECONDS = 10.0
"""Longest time that an actor waits for a message of its own before it answers that there is none."""
REPORT_SECONDS = 0.25
"""Time between two reports of an actor. At this interval, a thousand actors send four thousand messages a second."""
_CONNECT_SECONDS = 10.0
"""Longest wait for an answer of a cluster's head. Ray itself tries for minutes."""
_END_SECONDS = 5.0
_LONGEST = 300


class RayCluster:
    """The transport to the actors of one job. They end with it, and with the process that made it, in whatever way that ends."""

    replaces = True

    def __init__(self, model: ModelConfig) -> None:
        """Connects to the cluster. Raises `UsageError` if there is none, or it has no room for an engine."""
        self._ours = not ray.is_initialized()
        if self._ours:
            _connect(model)
        elif model.ray_working_dir is not None:
            raise UsageError(
                "--ray-working-dir comes too late: this program is connected to Ray already",
                "give ray.init the folder, as working_dir in its runtime_env",
            )
        try:
            self._plan(model)
        except BaseException:
            self.close()
            raise
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="batchgen-ray", daemon=True)
        self._thread.start()

    def _plan(self, model: ModelConfig) -> None:
        """Decides how many actors there are, and how many CPUs and GPUs each has."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = sum(int(node.get("GPU", 0)) for node in nodes)
        self._gpu = model.device == "cuda" or (model.device == "auto" and gpus > 0)
        self._kind = "cuda" if self._gpu else "cpu"
        cores = [int(node.get("CPU", 0)) for node in nodes if node.get("CPU", 0) >= 1]
        self._cpus = model.cpus_per_worker or (1 if self._gpu else min(cores, default=1))
        room = gpus if self._gpu else sum(count // self._cpus for count in cores)
        if not room:
            what = "GPU" if self._gpu else f"machine with {self._cpus} free CPUs"
            raise UsageError(f"the Ray cluster has no {what}", "lower --cpus-per-worker, or use --device cpu")
        kind, needed = ("GPU", 1) if self._gpu else ("CPU", self._cpus)
        if ray.available_resources().get(kind, 0) < needed:
            logging.getLogger("batchgen").info(
                f"other work holds the {kind}s of the Ray cluster: the job waits for it to end"
            )
        self.count = model.workers or room
        self._on_a_node = max(1, max((c // self._cpus for c in cores), default=1)) if not self._gpu else 1
        self.name = f"ray: {self.count} × {self._kind}"

    def setups(self, model: ModelConfig, engine: EngineConfig) -> list[WorkerSetup]:
        threads = engine.threads or (None if self._gpu else self._cpus)
        engine = replace(engine, processes=min(self._on_a_node, self.count), threads=threads)
        own = replace(
            model,
            model=_path_on_workers(model.model, model.ray_working_dir),
            lora=None if model.lora is None else _path_on_workers(model.lora, model.ray_working_dir),
            device=self._kind,
            ray=None,
            workers=None,
            cpus_per_worker=None,
            ray_working_dir=None,
        )
        share = UNDER_WAY_SHARE / self.count
        return [
            WorkerSetup(own, engine, place, 1, report_seconds=REPORT_SECONDS, under_way_share=share)
            for place in range(self.count)
        ]

    def start(self, setup: WorkerSetup, on_message: Callable[[Any], None]) -> Link:
        actor = (
            ray.remote(EngineActor)
            .options(
                num_cpus=self._cpus,
                num_gpus=1 if self._gpu else 0,
                max_restarts=0,  # `Workers` replaces a lost actor by one with another number
                max_concurrency=4,
                scheduling_strategy="SPREAD",
            )
            .remote(pickle.dumps(setup))
        )
        link = _ActorLink(actor, on_message)
        asyncio.run_coroutine_threadsafe(link.listen(), self._loop)
        return link

    def close(self) -> None:
        """Ends the connection, if it was made here. Does nothing the second time."""
        loop = getattr(self, "_loop", None)
        if loop is not None and loop.is_running():
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result(_END_SECONDS)
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(_END_SECONDS)
            if not loop.is_running():
                loop.close()
        if self._ours and ray.is_initialized():
            ray.shutdown()


async def _cancel_others() -> None:
    """Ends all other tasks of this loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _path_on_workers(path: str, working_dir: str | None) -> str:
    """Returns where the workers find a folder or file of this machine: in the copy of the working directory, which is their current folder, or else
    at the same absolute path. A name on the hub stays as it is."""
    if not os.path.exists(path):  # noqa: PTH110
        return path
    here = os.path.abspath(path)  # noqa: PTH100 - links are followed on the worker's machine
    if working_dir is not None and Path(here).is_relative_to(root := os.path.abspath(working_dir)):  # noqa: PTH100
        return os.path.join(".", os.path.relpath(here, root))  # noqa: PTH118 - the dot keeps it from being a name on the hub
    return here


def _check_answers(address: str) -> None:
    """Raises `UsageError` if nothing answers at the address of a cluster."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # not the address of a machine
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as e:
        raise UsageError(
            f"there is no Ray cluster at {address}: {getattr(e, 'strerror', None) or e}",
            "start one with ray start --head, name its address, or use --ray local",
        ) from e


def _connect(model: ModelConfig) -> None:
    assert model.ray is not None
    _check_answers(model.ray)
    if model.ray_working_dir is not None and not Path(model.ray_working_dir).is_dir():
        raise UsageError(f"--ray-working-dir {model.ray_working_dir} is not a folder", "name one that holds the model")
    environment = {} if model.ray_working_dir is None else {"working_dir": str(Path(model.ray_working_dir).resolve())}
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "runtime_env": environment or None}
    try:
        with _own_handlers():
            if model.ray == "local":
                ray.init(address="local", include_dashboard=False, **options)
            else:
                ray.init(address=model.ray, **options)
    except ConnectionError as e:
        raise UsageError(
            f"Ray does not connect to a cluster at {model.ray}: {_first_line(e)}",
            "start one with ray start --head, name its address, or use --ray local; for one that asks for a token, set RAY_AUTH_MODE=token",
        ) from e
    except (RuntimeError, ValueError, OSError) as e:
        raise UsageError(
            f"Ray cannot be used ({model.ray}): {in_one_line(e, _LONGEST)}", "see whether ray status works there"
        ) from e


@contextmanager
def _own_handlers() -> Iterator[None]:
    """A context after which signals go to the handlers that they had before. Ray's handler of SIGTERM ends the program with an exit code of its own;
    that signal goes to the job's handler, too."""
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    ended = False
    try:
        yield
    except SystemExit:
        ended = True
        raise
    finally:
        if threading.current_thread() is threading.main_thread():
            for signum, handler in before.items():
                if handler is not None:
                    signal.signal(signum, handler)
        if ended:
            signal.raise_signal(signal.SIGTERM)


class _ActorLink:
    """The connection to one actor (`transport.Link`)."""

    def __init__(self, actor: Any, on_message: Callable[[Any], None]) -> None:
        self._actor, self._on_message = actor, on_message
        self._sent = 0
        self._why = "it was killed"

    def send(self, message: Any) -> None:
        with suppress(ray.exceptions.RayError):  # `listen` notices that it is gone
            self._actor.deliver.remote(self._sent, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        self._sent += 1

    async def listen(self) -> None:
        """Passes the actor's messages on, until it is gone."""
        try:
            while True:
                for data in await self._actor.listen.remote(LISTEN_SECONDS):
                    message = pickle.loads(data)
                    self._on_message(_for_cluster(message) if isinstance(message, WorkerFailed) else message)
        except Exception as e:  # noqa: BLE001 - whatever it is, there will be no more messages
            self._why = _first_line(e)
        self._on_message(Gone())

    def kill(self) -> None:
        with suppress(Exception):
            ray.kill(self._actor, no_restart=True)

    def end(self) -> str:
        return self._why


class EngineActor:
    """The actor that runs on the cluster, with its own engine, which it loads when it is made."""

    def __init__(self, setup: bytes) -> None:
        self._outgoing: SimpleQueue[bytes] = SimpleQueue()
        self._early: list[tuple[int, bytes]] = []
        self._next = 0
        self._delivering = threading.Lock()
        self._on_message: Callable[[Any], None] | None = None
        self._setup: WorkerSetup = pickle.loads(setup)
        threading.Thread(target=self._run, name="batchgen-engine", daemon=True).start()

    def deliver(self, number: int, data: bytes) -> None:
        """Handles message `number` after all messages before it, which Ray may deliver later."""
        with self._delivering:
            heapq.heappush(self._early, (number, data))
            while self._early and self._early[0][0] == self._next and self._on_message is not None:
                self._on_message(pickle.loads(heapq.heappop(self._early)[1]))
                self._next += 1

    def listen(self, seconds: float) -> list[bytes]:
        """Returns the worker's messages since the last call. Waits up to `seconds` for the first one."""
        messages: list[bytes] = []
        with suppress(Empty):
            messages.append(self._outgoing.get(timeout=seconds))
            while True:
                messages.append(self._outgoing.get_nowait())
        return messages

    def send(self, message: Any) -> None:
        """Keeps a message of the worker until it is asked for (`worker.Sender`)."""
        self._outgoing.put(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def flush(self, seconds: float) -> None: ...

    def _run(self) -> None:
        from batchgen.devices.worker import load, serve
        from batchgen.process.collector import few_collections

        def connect(on_message: Callable[[Any], None]) -> EngineActor:
            with self._delivering:
                on_message(self._setup)  # before all other messages
                self._on_message = on_message
            return self

        with few_collections():
            serve(connect, load, gone=lambda: None)


def _for_cluster(failed: WorkerFailed) -> WorkerFailed:
    """Returns the message with an error about the model that says what the machines of a cluster need. Other errors stay as they are."""
    error = failed.error
    if isinstance(error, ModelError | UsageError):
        hint = "name a model of the hub or a folder that every machine of the cluster sees, or use --ray-working-dir"
        return WorkerFailed(ModelError(f"a machine of the cluster cannot load the model: {error.message}", hint))
    return failed


def _first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or, of one that an actor has raised or died of, the last one, which says what it was."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    last = "ray::" in lines[0] or (isinstance(error, ray.exceptions.ActorDiedError) and len(lines) > 1)
    return (lines[-1] if last else f"{type(error).__name__}: {lines[0]}")[:_LONGEST]
