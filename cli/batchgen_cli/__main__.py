"""The start of the process `batchgen` (or `python -m batchgen_cli`). From here on, Ctrl-C and other signals give one line, also while modules are imported."""

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import NoReturn

_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_INTERRUPTED = {128 + signum for signum in _SIGNALS}
_EXIT_SECONDS = 2.0


def main() -> None:
    """Runs the command line of this process and exits."""
    fill_closed_streams()
    for signum in _SIGNALS:
        if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(signum, _end)  # a job's own handler takes its place as long as there is something to keep
    from batchgen.process.collector import few_collections

    with few_collections():
        from batchgen_cli.app import run_command

        try:
            run_command()
        except SystemExit as e:
            _leave(e.code if isinstance(e.code, int) else 1)


def fill_closed_streams() -> None:
    """Opens /dev/null for each standard stream that is closed. Otherwise the next file or socket takes its number, and what libraries and child processes print."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number


def _leave(code: int) -> NoReturn:
    """Ends the process as the interpreter does, up to the point where it would free every object, which takes a sixth of a second.

    Threads are waited for and exit handlers run, as in the child processes of multiprocessing; after a signal only for a short time.
    """
    if code in _INTERRUPTED:
        last = threading.Timer(_EXIT_SECONDS, os._exit, (code,))
        last.daemon = True
        last.start()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # full, closed, None: the command has said so
            stream.flush()
    os._exit(code)


def _end(signum: int, frame: FrameType | None) -> None:
    """Ends the process at once. An exception could end in the middle of an import, in a library that passes over it."""
    said_code = getattr(sys.modules.get("batchgen_cli.stderr"), "said_code", None)
    if said_code is not None:  # the line of an earlier signal, or of another failure, is enough
        os._exit(said_code)
    if "json" in sys.argv or "--log-format=json" in sys.argv:
        raise KeyboardInterrupt(signal.Signals(signum))  # told as an event
    try:
        os.write(2, f"batchgen: error: interrupted by {signal.Signals(signum).name}\n".encode())
    finally:
        os._exit(128 + signum)


if __name__ == "__main__":
    main()
