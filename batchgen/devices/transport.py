"""How the job's process talks to its workers: the messages, the protocol of a transport, and the transport to processes on this machine.

The other transport is `ray_cluster.RayCluster`.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import IO, Any, Protocol

from batchgen.config import EngineConfig, ModelConfig
from batchgen.errors import BatchgenError
from batchgen.process.child_process import Process, exit_code, how_it_ended, start_module
from batchgen.request import Request, TokenArray
from batchgen.result import Completion, Result
from batchgen.stats import EngineStats


class Channel:
    """Sends and receives messages in two threads of its own. Signals do not interrupt these, so no message stays half sent or half read.

    `on_message` is called in the receiving thread with each message, and with `Gone` when the other process has gone.
    """

    def __init__(self, connection: Connection[Any, Any], on_message: Callable[[Any], None]) -> None:
        self._connection, self._on_message = connection, on_message
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="batchgen-sending", daemon=True)
        self._reader = threading.Thread(target=self._read, name="batchgen-receiving", daemon=True)
        self._writer.start()
        self._reader.start()

    def send(self, message: Any) -> None:
        """Sends a message as it is now; later changes to it are not seen. Does nothing if the other process is gone."""
        self._outgoing.put(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def flush(self, seconds: float) -> None:
        """Waits, for a limited time, until all messages are on their way. Nothing may be sent afterwards."""
        self._outgoing.put(None)
        self._writer.join(seconds)

    def _write(self) -> None:
        try:
            while (message := self._outgoing.get()) is not None:
                self._connection.send_bytes(message)
        except OSError:
            pass  # the other process has gone, which the reader notices

    def _read(self) -> None:
        try:
            while True:
                self._on_message(pickle.loads(self._connection.recv_bytes()))
        except (EOFError, OSError):
            self._on_message(Gone())
        finally:
            self._outgoing.put(None)
            self._writer.join()  # else the socket's number could become another file's while something is written
            self._connection.close()


UNDER_WAY_SHARE = 0.02
"""Largest share of the driver's time for receiving the unfinished completions of all workers."""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The first message to a worker: what to load, and how often to report."""

    model: ModelConfig
    """With the worker's own `device`."""
    engine: EngineConfig
    place: int
    """The worker's number."""
    processes: int
    texts: tuple[TokenArray, ...] = ()
    """Prompts on which `--quantize` is measured."""
    report_seconds: float = 0.02
    """Time between two reports while it runs."""
    under_way_share: float = UNDER_WAY_SHARE
    """Largest share of its time for reporting unfinished completions."""
    under_way_seconds: tuple[float, float] = (0.25, 1.0)
    """Shortest and longest time between two reports with the unfinished completions. The longest holds whatever they cost."""


@dataclass(frozen=True, slots=True)
class Work:
    """Message: more requests to run."""

    requests: tuple[Request, ...]
    watched: bool
    """Whether each of their tokens is reported."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Message: stop when the running rows are done ("drain"), or after this step ("now"), and drop what is not done."""

    wish: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Message: end a row with the tokens that it has."""

    row: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Message: the model is loaded."""

    dtype: str
    attention: str
    batch_size: int
    """The largest number of sequences that decode at once."""
    host: str = ""
    """The machine of the worker, if that may be another one."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Message: what has happened since the last report."""

    heard: int
    """How many messages the worker has handled so far, after the first."""
    idle: bool
    """Whether there is nothing left to do."""
    results: tuple[Result, ...]
    tokens: tuple[tuple[int, int, int], ...]
    """(row, number of the completion, token) of the watched rows, in the order of sampling."""
    notes: tuple[str, ...]
    stats: EngineStats
    """Since the worker started."""
    under_way: dict[int, dict[int, Completion]] | None = None
    """`Engine.under_way`; None in most reports."""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """Message: the process ends because of an error."""

    error: BatchgenError


class Gone(Exception):
    """Stands after the last message of the other end, which has gone. A worker raises it, because it has nothing more to do."""


Start = Callable[["Connection[Any, Any]", IO[bytes]], Process]
"""Starts a process that serves one end of a connection, and prints to a file."""


def start_process(connection: Connection[Any, Any], said: IO[bytes]) -> Process:
    """Starts the process of a worker (`worker.main`); what it prints goes to the file `said`."""
    return start_module("batchgen.devices.worker", connection, said, arguments=[str(os.getpid())])


class Link(Protocol):
    """The connection to one worker."""

    def send(self, message: Any) -> None:
        """Sends a message as it is now. Does nothing if the worker is gone."""

    def kill(self) -> None:
        """Ends the worker, without waiting for its end."""

    def end(self) -> str:
        """Waits a while for the end of a worker that was killed or is lost, and frees what is left of it. Returns how it ended, in words."""
        ...


class Transport(Protocol):
    """Starts workers, each with an engine of its own."""

    name: str
    """The devices, as the figures of a run name them."""
    replaces: bool
    """Whether a worker that is lost can be started again, and work can begin before all are ready."""

    def setups(self, model: ModelConfig, engine: EngineConfig) -> list[WorkerSetup]:
        """Returns the setup of each worker to start."""
        ...

    def start(self, setup: WorkerSetup, on_message: Callable[[Any], None]) -> Link:
        """Starts a worker. `on_message` is called with each of its messages, and with `Gone` when it is gone, in another thread."""
        ...

    def close(self) -> None:
        """Releases what starting workers needs. No worker may be started afterwards."""


class Processes:
    """The transport of one machine: a process for each device."""

    replaces = False

    def __init__(self, devices: Sequence[str], name: str, start: Start) -> None:
        self._devices, self.name, self._start = devices, name, start

    def setups(self, model: ModelConfig, engine: EngineConfig) -> list[WorkerSetup]:
        count = len(self._devices)
        engine = replace(engine, processes=count)
        share = UNDER_WAY_SHARE / count
        return [
            WorkerSetup(replace(model, device=device), engine, place, count, under_way_share=share)
            for place, device in enumerate(self._devices)
        ]

    def start(self, setup: WorkerSetup, on_message: Callable[[Any], None]) -> Link:
        ours, theirs = Pipe()
        said = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process has ended
        try:
            process = self._start(theirs, said)
        except BaseException:
            ours.close()
            said.close()
            raise
        finally:
            theirs.close()
        link = _ProcessLink(process, Channel(ours, on_message), said)
        link.send(setup)
        return link

    def close(self) -> None: ...


class _ProcessLink:
    def __init__(self, process: Process, channel: Channel, said: IO[bytes]) -> None:
        self._process, self._channel, self._said = process, channel, said
        self._how = ""

    def send(self, message: Any) -> None:
        self._channel.send(message)

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> str:
        code = exit_code(self._process)  # waits only so long: a process inside a driver may outlive its kill
        if not self._said.closed:
            self._how = how_it_ended(code, self._said)
            self._said.close()
        return self._how
