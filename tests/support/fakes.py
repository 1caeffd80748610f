"""Device processes replaced by threads, with fake engines that sample one token per row and step and need no model."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import IO, Any

import pytest

from batchgen.config import EngineConfig, ModelConfig
from batchgen.devices import opening, worker
from batchgen.devices.transport import Channel, Processes, WorkerSetup
from batchgen.devices.worker import serve
from batchgen.devices.workers import SILENT_SECONDS, Workers
from batchgen.request import Request
from batchgen.result import Completion, Result
from batchgen.stats import EngineStats
from support.requests import request


class FakeEngine:
    """Runs rows in the order of arrival, `batch_size` at a time. A row's tokens are its number, and its text is the engine's name."""

    dtype = "float32"
    attention = "fake"

    def __init__(self, name: str, batch_size: int = 2, step_seconds: float = 0.001) -> None:
        self.name, self.step_seconds = name, step_seconds
        self.sizes = SimpleNamespace(limits=SimpleNamespace(batch_size=batch_size))
        self.notes = ["all say this", f"{name} says this"]
        self.stats = EngineStats()
        self.waiting: list[tuple[Request, Any, Any]] = []
        self.running: dict[Request, list[Any]] = {}
        self.cancelled: set[Request] = set()
        self.max_unfinished = 0
        self.watched = False
        """Whether it was ever asked for tokens."""
        self.failing: Exception | None = None

    def add(self, leaves: Any, plan: Any, on_result: Any, on_token: Any = None) -> None:
        assert sorted(plan.order.tolist()) == list(range(len(leaves)))
        self.watched |= on_token is not None
        self.waiting += [(r, on_result, on_token) for r in dict.fromkeys(leaf.request for leaf in leaves)]
        self.max_unfinished = max(self.max_unfinished, len(self.waiting) + len(self.running))

    def run(self, stop: Callable[[], str | None]) -> None:
        while self.waiting or self.running:
            wish = stop()
            if wish == "now" or (wish == "drain" and not self.running):
                break
            self.step(admit=wish is None)
        self.waiting.clear()
        self.running.clear()

    def step(self, admit: bool) -> None:
        time.sleep(self.step_seconds)
        if self.failing is not None:
            raise self.failing
        while admit and self.waiting and len(self.running) < self.sizes.limits.batch_size:
            request, on_result, on_token = self.waiting.pop(0)
            begun = request.begun.get(0)
            self.running[request] = [on_result, on_token, len(begun.token_ids) if begun else 0]
        self.stats.steps += 1
        for request, state in list(self.running.items()):
            if request in self.cancelled:
                self.end(request, "cancelled")
                continue
            state[2] += 1
            self.stats.completion_tokens += 1
            if state[1] is not None:
                state[1](request.row, 0, request.row)
            if state[2] == request.max_tokens:
                self.end(request, "length")

    def end(self, request: Request, reason: str) -> None:
        on_result, _, count = self.running.pop(request)
        on_result(Result(row=request.row, text=self.name, finish_reason=reason, completion_tokens=count))

    def under_way(self) -> dict[int, dict[int, Completion]]:
        return {
            request.row: {0: Completion(text="", finish_reason="", token_ids=(request.row,) * count)}
            for request, (_, _, count) in self.running.items()
        }

    def cancel(self, request: Request) -> None:
        self.cancelled.add(request)


class ThreadProcess:
    """A thread with the methods of a process. `kill` closes its connection, so that it ends before its next step."""

    def __init__(self, connection: Connection[Any, Any], said: IO[bytes], load: Callable[[WorkerSetup], Any]) -> None:
        self.pid = 0
        self.said = said
        self._code = 0
        ours = os.dup(connection.fileno())
        self._socket = socket.socket(fileno=os.dup(ours))
        self._thread = threading.Thread(
            target=serve, args=(partial(Channel, Connection(ours)), load), kwargs={"gone": lambda: None}, daemon=True
        )
        self._thread.start()

    def kill(self) -> None:
        """Does nothing after `wait`."""
        self._code = self._code if self._socket.fileno() < 0 else -9
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        assert not self._thread.is_alive()
        self._socket.close()
        return self._code


_loading = threading.Lock()


def _load_in_turn(setup: WorkerSetup) -> Any:
    """Loads one model at a time: transformers patches its classes during a load, and two threads would undo each other's patches."""
    with _loading:
        return worker.load(setup)


@contextmanager
def threads_as_processes() -> Iterator[list[ThreadProcess]]:
    """Runs device processes as threads with their own engines and models. Yields the list of those that were started."""
    started: list[ThreadProcess] = []

    def start(connection: Connection[Any, Any], said: IO[bytes]) -> ThreadProcess:
        started.append(ThreadProcess(connection, said, _load_in_turn))
        return started[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "start_process", start)
        yield started
    for process in started:
        process.kill()
        process.wait(60)


class PacedProcesses(Processes):
    """Processes that report unfinished completions at the interval that a test sets."""

    under_way_seconds: tuple[float, float] | None = None

    def setups(self, model: ModelConfig, engine: EngineConfig) -> list[WorkerSetup]:
        setups = super().setups(model, engine)
        pace = self.under_way_seconds
        return setups if pace is None else [replace(setup, under_way_seconds=pace) for setup in setups]


@dataclass
class Fleet:
    """Starts workers with fake engines, which tests find by device."""

    make: Callable[[str], Any] = FakeEngine
    engines: dict[str, Any] = field(default_factory=dict)
    processes: list[ThreadProcess] = field(default_factory=list)

    def load(self, setup: WorkerSetup) -> Any:
        engine = self.make(setup.model.device)
        self.engines[setup.model.device] = engine
        return engine

    def start(self, connection: Connection[Any, Any], said: IO[bytes]) -> ThreadProcess:
        self.processes.append(ThreadProcess(connection, said, self.load))
        return self.processes[-1]

    def workers(
        self,
        device: str = "cpu:0,1",
        *,
        under_way_seconds: tuple[float, float] | None = None,
        silent_after: float = SILENT_SECONDS,
        **engine: Any,
    ) -> Workers:
        model = ModelConfig(model="m", device=device)
        processes = PacedProcesses(model.devices, device, self.start)
        processes.under_way_seconds = under_way_seconds
        return Workers(model, EngineConfig(**engine), processes, silent_after=silent_after)


def grouped(groups: int, rows: int, prefix: int = 50, **options: Any) -> list[Request]:
    """Rows of several groups, each with its own prefix, in alternating order."""
    return [request(row, [row % groups] * prefix + [1000 + row], **options) for row in range(groups * rows)]
