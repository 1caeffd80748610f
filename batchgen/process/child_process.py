"""Processes that run a module of batchgen at the other end of a connection: how they start, and how they ended, in words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import IO, Any

END_SECONDS = 10.0
"""Longest wait for the end of a process that was killed, or that has closed its connection."""


Process = subprocess.Popen[bytes]


def start_module(
    module: str, connection: Connection[Any, Any], said: IO[bytes], *files: IO[bytes], arguments: Sequence[str] = ()
) -> Process:
    """Starts a new interpreter that runs `module`; what it prints goes to the file `said`.

    Its arguments are the numbers of the connection's file and of the other `files`, and then `arguments`.

    multiprocessing is not used because it would run the main module of a user's program again.
    """
    numbers = [connection.fileno(), *(file.fileno() for file in files)]
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)  # noqa: PTH100 - "" is the present folder
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, numbers), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=said,
        pass_fds=numbers,
        env=os.environ | {"PYTHONPATH": path},
    )


def exit_code(process: Process, seconds: float = END_SECONDS) -> int | None:
    """Returns the exit code of a process, -N if signal N ended it. Waits up to `seconds`; None if it runs on."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def how_it_ended(code: int | None, said: IO[bytes]) -> str:
    """Returns how a process ended that has closed its connection: its signal or exit code, and the last line that it printed."""
    if code is None:
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
