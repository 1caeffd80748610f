"""A process that has imported everything and forks a child for each run of the command, so that a run starts in a fraction of a second.

It reads orders from standard input, one JSON object per line, and answers each with one line:
`{"start": {...}}` with the child's process id, `{"wait": pid, "block": …}` with its wait status (null while it runs). It ends at the end
of its input. It has one thread, because a fork copies only the calling thread.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from support.faults import Plan, Watch


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


def main() -> None:
    _import_everything()
    gc.freeze()  # what is imported stays, in every child
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _answer(answers, threads)
    while line := orders.readline():
        order = json.loads(line)
        if "wait" in order:
            pid, status = os.waitpid(order["wait"], 0 if order["block"] else os.WNOHANG)
            _answer(answers, status if pid else None)
            continue
        pid = os.fork()
        if pid == 0:
            orders.close()
            answers.close()
            _child(order["start"])
        _answer(answers, pid)


def _import_everything() -> None:
    """Imports what the command imports."""
    import pyarrow.parquet
    import transformers
    import transformers.models.llama.modeling_llama
    import transformers.processing_utils

    import batchgen.devices.opening
    import batchgen.devices.worker
    import batchgen.engine.engine
    import batchgen.job
    import batchgen.model.loader
    import batchgen.stats
    import batchgen_cli.app
    import batchgen_cli.summary

    batchgen.devices.opening.start_process = start_forked
    batchgen.stats.versions()
    # numpy imports it at the first median. A process that is forked meanwhile would wait for the end of that import for ever.
    importlib.import_module("numpy.ma")
    pyarrow.array([0])  # imports pandas, if it is installed
    _ = (batchgen, batchgen_cli, transformers.AutoModelForCausalLM, transformers.AutoTokenizer)


def _answer(answers: Any, value: Any) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def _child(order: dict[str, Any]) -> None:
    """Runs the command. Does not return."""
    code = 70
    try:
        os.chdir(order["folder"])
        for fd, name in ((1, order["stdout"]), (2, order["stderr"])):
            there = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(there, fd)
            os.close(there)
        for place, value in order["set"].items():
            module, name = place.split(":")
            target = importlib.import_module(module)
            if isinstance(value, dict):  # some fields of a dataclass
                value = dataclasses.replace(getattr(target, name), **value)
            elif isinstance(value, str):
                value = _named(value)
            assert hasattr(target, name), place
            setattr(target, name, value)
        if order["file_size"] is not None:  # Python ignores SIGXFSZ, so a write that passes it fails with EFBIG
            resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_size"], resource.RLIM_INFINITY))
        from batchgen_cli.app import run_command as batchgen

        Watch(Path(order["folder"]), Plan(**order["plan"]), Path(order["log"])).install()
        try:
            batchgen(order["arguments"])
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


def _named(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


if __name__ == "__main__":
    main()
