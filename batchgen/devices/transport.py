"""How the job's process and those of its devices talk: messages, the channel they go through, and the processes themselves."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import IO, Any, Protocol

from batchgen.config import EngineConfig, ModelConfig
from batchgen.errors import BatchgenError
from batchgen.request import Request, TokenArray
from batchgen.result import Completion, Result
from batchgen.stats import EngineStats


class Channel:
    """`on_message` is called with each message and `on_end` once, when the other process has gone; both in a thread of the channel's own.

    Two threads that nobody interrupts, so that a signal's exception, which may come anywhere, leaves no message half sent or half read.
    """

    def __init__(
        self, connection: Connection[Any, Any], on_message: Callable[[Any], None], on_end: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._on_message, self._on_end = on_message, on_end
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="batchgen-sending", daemon=True)
        self._reader = threading.Thread(target=self._read, name="batchgen-receiving", daemon=True)
        self._writer.start()
        self._reader.start()

    def send(self, message: Any) -> None:
        """As it is now; changes made to it later are not seen. Where the other process has gone nothing happens."""
        self._outgoing.put(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def flush(self, seconds: float) -> None:
        """No more will be sent: waits, but not for longer, until what was sent is on its way."""
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
            self._on_end()
        finally:
            self._outgoing.put(None)
            self._writer.join()  # its number must not become another file's while something is written to it
            self._connection.close()


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The first thing a device's process hears: what it is to be."""

    model: ModelConfig
    """Its `device` is the process's own."""
    engine: EngineConfig
    place: int
    """Its number among the processes."""
    processes: int
    texts: tuple[TokenArray, ...] = ()
    """Prompts on which `--quantize` is measured."""


@dataclass(frozen=True, slots=True)
class Work:
    """Requests to be done, beside those that are not done yet."""

    requests: tuple[Request, ...]
    watched: bool
    """Whether each of their tokens is to be told."""


@dataclass(frozen=True, slots=True)
class Stop:
    """What is not done is dropped: after the rows that run are done ("drain"), or after this step ("now")."""

    wish: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """A row is to end where it stands."""

    row: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded."""

    dtype: str
    attention: str
    batch_size: int
    """Most sequences that decode at once."""


@dataclass(frozen=True, slots=True)
class Report:
    """What has happened since the last one."""

    heard: int
    """How many messages were taken in so far, after the first."""
    idle: bool
    """Whether there is nothing left to do."""
    results: tuple[Result, ...]
    tokens: tuple[tuple[int, int, int], ...]
    """Row, number of the completion, token: of rows that are watched, as they were drawn."""
    notes: tuple[str, ...]
    stats: EngineStats
    """Since the beginning."""
    under_way: dict[int, dict[int, Completion]] | None = None
    """`Engine.under_way`, now and then."""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The process ends because of an error."""

    error: BatchgenError


END_SECONDS = 10.0
"""For a process to be gone once it is killed, or has closed its end."""


class Process(Protocol):
    """A process that was started."""

    pid: int

    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


def start_process(connection: Connection[Any, Any], said: IO[bytes]) -> Process:
    """A new interpreter that runs `worker.main` with this end of a connection; what it prints goes to the file `said`.

    Not multiprocessing's: that would run the main module of a user's program again.
    """
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)  # noqa: PTH100 - "" is the present folder
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "batchgen.devices.worker", str(connection.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=said,
        pass_fds=(connection.fileno(),),
        env=os.environ | {"PYTHONPATH": path},
    )


def how_it_ended(process: Process, said: IO[bytes]) -> str:
    """The signal or exit code of a process that has closed its connection without a word, and the last line that it printed."""
    try:
        code = process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        return "it hangs"
    how = f"exit code {code}"
    if code < 0:
        try:
            how = signal.Signals(-code).name
        except ValueError:
            how = f"signal {-code}"
    said.seek(max(0, said.seek(0, os.SEEK_END) - 10_000))
    lines = said.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{how}: {last[:300]}" if last else how


def kill(processes: list[tuple[Process, IO[bytes]]]) -> None:
    """Ends processes, and closes what they printed to."""
    for process, _ in processes:
        process.kill()
    for process, said in processes:
        with suppress(subprocess.TimeoutExpired):  # a device's driver may hold it back, and nothing more can be done
            process.wait(END_SECONDS)
        said.close()
