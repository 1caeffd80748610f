"""Device processes that are forked instead of started, so that they have torch already. For runs that `zygote.py` starts."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import IO, Any


class Forked:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (timeout or 0)
        while self._code is None:
            pid, status = os.waitpid(self.pid, 0 if timeout is None else os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            else:
                assert time.monotonic() < until
                time.sleep(0.001)
        return self._code


def start_forked(connection: Connection[Any, Any], said: IO[bytes]) -> Forked:
    pid = os.fork()
    if pid:
        return Forked(pid)
    from batchgen.devices import worker

    code = 70
    try:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # like a new program
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, signal.SIG_DFL)
        os.dup2(connection.fileno(), 3)
        for fd in (1, 2):
            os.dup2(said.fileno(), fd)
        os.closerange(4, 4096)  # the lock of the job's folder, and the connections of other processes
        sys.argv = ["worker", "3"]
        worker.main()
        code = 0
    finally:
        os._exit(code)
