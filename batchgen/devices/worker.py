"""The process of one of several devices: loads the model there and runs the requests that it gets. It ends when the job's process ends, in
whatever way."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from batchgen.devices.opening import engine_here, use_threads
from batchgen.devices.transport import Cancel, Channel, Gone, Ready, Stop, Work, WorkerFailed, WorkerReport, WorkerSetup
from batchgen.errors import BatchgenError, DevicesLost, memory_errors
from batchgen.prefix import PrefixPlan, plan_requests
from batchgen.process.collector import few_collections
from batchgen.process.machine import memory_bytes_peak
from batchgen.process.signals import ignore_stop_signals
from batchgen.prompts import load_tokenizer
from batchgen.prompts.tokenizer import quiet
from batchgen.request import Leaf, Request
from batchgen.result import Result

if TYPE_CHECKING:
    from batchgen.engine.engine import Engine


def take_device(device: str) -> None:
    """Makes this GPU the process's current one, so that it has no context on another. Raises `ModelError` if the machine has no such device."""
    with quiet():  # torchao writes warnings when it is imported
        import torch

        from batchgen.model.loader import pick_device

    own = pick_device(device)
    if own.type == "cuda":
        torch.cuda.set_device(own)


PARENT_SECONDS = 5.0
"""Time between two looks whether the parent still exists."""
FLUSH_SECONDS = 5.0
"""Longest time for sending the error that ends this process."""


def main() -> None:
    """Runs a worker. The arguments are the number of an open socket and the parent's process id (`transport.start_process`)."""
    ignore_stop_signals()
    threading.Thread(target=_end_with_parent, args=(int(sys.argv[2]),), daemon=True).start()
    with few_collections():
        serve(partial(Channel, Connection(int(sys.argv[1]))), load, gone=lambda: os._exit(0))
    os._exit(0)  # without waiting for the threads of libraries


def _end_with_parent(parent: int) -> None:
    """Ends this process when its parent has ended. The connection alone does not show that: another child of the job may hold a copy of its end."""
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os._exit(0)


def load(setup: WorkerSetup) -> Engine:
    """Returns the engine of this process. Raises `BatchgenError`."""
    tokenizer = load_tokenizer(setup.model)
    use_threads(setup.engine, setup.place, setup.processes)
    take_device(setup.model.device)
    return engine_here(setup.model, tokenizer, setup.engine, setup.texts)


class Sender(Protocol):
    """Where a worker's messages go (`Channel`)."""

    def send(self, message: Any) -> None: ...
    def flush(self, seconds: float) -> None: ...


Connect = Callable[[Callable[[Any], None]], Sender]
"""Connects a worker. Takes a function to call with each message, and with `Gone` when the other end has gone."""


def serve(connect: Connect, load: Callable[[WorkerSetup], Engine], gone: Callable[[], None]) -> None:
    """Runs until an error, which it sends, or until the other end has gone; then `gone` is called, in another thread."""
    worker = _Worker(connect, gone)
    try:
        with memory_errors():
            worker.run(load)
    except Gone:
        pass  # there is nobody to send anything to
    except Exception as e:  # noqa: BLE001 - the job's process must know of any error
        worker.fail(e)


@dataclass(frozen=True, slots=True)
class _PlannedWork:
    """Work with its plan, which the receiving thread makes while the engine runs."""

    work: Work
    leaves: list[Leaf]
    plan: PrefixPlan


class _Worker:
    def __init__(self, connect: Connect, gone: Callable[[], None]) -> None:
        self._gone = gone
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._heard = 0
        self._wish: str | None = None
        self._reported = self._next_under_way = 0.0
        self._requests: dict[int, Request] = {}
        """By row."""
        self._results: list[Result] = []
        self._tokens: list[tuple[int, int, int]] = []
        self._channel = connect(self._receive)

    # -- in the thread that receives

    def _receive(self, message: Any) -> None:
        if isinstance(message, WorkerSetup):
            self._setup = message
        elif isinstance(message, Work):
            try:
                config = self._setup.engine
                planned = plan_requests(message.requests, config.chunk_size, share=config.share)
                message = _PlannedWork(message, *planned)
            except Exception as e:  # noqa: BLE001 - raised by `_next` in the main thread
                message = e
        elif isinstance(message, Gone):
            self._gone()
        self._inbox.put(message)

    # -- in the main thread

    def run(self, load: Callable[[WorkerSetup], Engine]) -> None:
        self._engine = engine = load(self._next())
        self._channel.send(Ready(engine.dtype, engine.attention, engine.sizes.limits.batch_size, socket.gethostname()))
        self._report(idle=True)
        while True:
            self._hear(self._next())
            engine.run(self._between)
            self._wish = None
            self._requests.clear()
            self._report(idle=True)

    def fail(self, error: Exception) -> None:
        if not isinstance(error, BatchgenError):
            first = next(iter(str(error).splitlines()), "")
            trace = "".join(traceback.format_exception(error))
            error = DevicesLost(f"{self._setup.model.device}: {type(error).__name__}: {first}")
            error.add_note(trace)
        self._channel.send(WorkerFailed(error))
        self._channel.flush(FLUSH_SECONDS)

    def _between(self) -> str | None:
        """Handles the messages that have arrived, and sends a report if one is due. Called between two steps. Returns how to stop, if at all."""
        while self._wish != "now":
            try:
                message = self._next(wait=False)
            except Empty:
                break
            self._hear(message)
        if time.monotonic() - self._reported >= self._setup.report_seconds:
            self._report(idle=False)
        return self._wish

    def _next(self, *, wait: bool = True) -> Any:
        message = self._inbox.get(wait)
        if isinstance(message, Exception):
            raise message
        return message

    def _hear(self, message: Any) -> None:
        self._heard += 1
        if isinstance(message, _PlannedWork):
            self._requests.update((request.row, request) for request in message.work.requests)
            on_token = self._on_token if message.work.watched else None
            self._engine.add(message.leaves, message.plan, self._on_result, on_token)
        elif isinstance(message, Stop):
            self._wish = message.wish
        elif isinstance(message, Cancel) and message.row in self._requests:
            self._engine.cancel(self._requests[message.row])

    def _on_result(self, result: Result) -> None:
        self._requests.pop(result.row, None)
        self._results.append(result)

    def _on_token(self, row: int, completion: int, token: int) -> None:
        self._tokens.append((row, completion, token))

    def _report(self, *, idle: bool) -> None:
        engine = self._engine
        stats = replace(engine.stats, process_bytes_peak=memory_bytes_peak())
        began = time.monotonic()
        under_way = engine.under_way() if idle or began >= self._next_under_way else None
        self._channel.send(
            WorkerReport(
                self._heard, idle, tuple(self._results), tuple(self._tokens), tuple(engine.notes), stats, under_way
            )
        )
        self._results.clear()
        self._tokens.clear()
        engine.notes.clear()
        self._reported = time.monotonic()
        if under_way is not None:
            wait = (self._reported - began) / self._setup.under_way_share
            shortest, longest = self._setup.under_way_seconds
            self._next_under_way = began + min(longest, max(shortest, wait))


if __name__ == "__main__":
    main()
