"""Starts the process of a device, and tells how it ended. Knows nothing of what it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import IO, Any, Protocol

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
