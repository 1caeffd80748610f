"""A run of the command in a process that was forked for it. Its device processes are forked, too."""

import dataclasses
import importlib
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from support.faults import Plan, Watch


class Forked:
    """A device process, with the methods of `subprocess.Popen` that the job uses."""

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


def start_forked(connection: Any, said: Any) -> Forked:
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
        sys.argv = ["worker", "3", str(os.getppid())]
        worker.main()
        code = 0
    finally:
        os._exit(code)


def run_command(
    folder: str, arguments: list[str], settings: dict[str, Any], files: list[str], file_size: int | None, plan: dict[str, Any]
) -> None:  # fmt: skip
    """Runs the command in a folder. Does not return. `files`: those of standard output and error, and of the log of calls."""
    code = 70
    try:
        os.chdir(folder)
        for fd, name in zip((1, 2), files, strict=False):
            there = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(there, fd)
            os.close(there)
        for place, value in (
            {"batchgen.devices.opening:start_process": "support.child:start_forked"} | settings
        ).items():
            module, _, name = place.partition(":")
            target = importlib.import_module(module)
            if isinstance(value, dict):  # some fields of a dataclass
                value = dataclasses.replace(getattr(target, name), **value)
            elif isinstance(value, str):
                own, _, named = value.partition(":")
                value = getattr(importlib.import_module(own), named)
            assert hasattr(target, name), place
            setattr(target, name, value)
        if file_size is not None:  # Python ignores SIGXFSZ, so a write that passes it fails with EFBIG
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, resource.RLIM_INFINITY))
        from batchgen_cli import app

        Watch(Path(folder), Plan(**plan), Path(files[2])).install()
        try:
            app.run_command(arguments)
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else 71
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
