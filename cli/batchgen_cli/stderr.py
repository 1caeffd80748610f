"""Standard error, which gets everything except rows: as lines of text or JSON (`--log-format`), without control characters.

A line that cannot be written (disk full, reader gone) is lost. This does not end the job.
"""

from __future__ import annotations

import datetime as dt
import errno
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TextIO

from batchgen.errors import BatchgenError, ClosedPipe, Interrupted, first_line
from batchgen.process.stdout import discard, write_stdout

_CHECK = "; check its permissions"
_MORE_FILES = "raise the limit of open files (ulimit -n)"
_FILE_HINTS = {
    errno.EACCES: _CHECK,
    errno.EPERM: _CHECK,
    errno.ENAMETOOLONG: "; choose a shorter name",
    errno.EMFILE: f"; {_MORE_FILES}",
}
"""By error number: what to do about a file that cannot be used."""
_WAYS_OUT = {
    "No usable temporary directory": "set TMPDIR to a folder that has room and can be written to",
    "Too many open files": _MORE_FILES,
    "can't start new thread": "raise the limit of processes (ulimit -u, or --pids-limit of a container)",
}
"""By words of Python: what to do."""


def printable(text: str) -> str:
    """Returns the text on one line with control characters escaped, so that text from a file or a model cannot control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)


def event(kind: str, **fields: Any) -> str:
    """Returns an event as a line of JSON, in ASCII (docs/status.md)."""
    time = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": time, "event": kind, **fields}).replace("\x7f", "\\u007f")


def write_line(line: str, stream: Stream | None = None) -> None:
    """Writes one line."""
    stream = stream or Stderr()
    stream.write(line + "\n")
    stream.flush()


def write_answer(text: str) -> None:
    """Writes what a command answers to standard output. Raises as `write_stdout` does."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    data = f"{for_encoding(text, encoding)}\n".encode(encoding, "backslashreplace")
    write_stdout(sys.stdout, data, "write it to another place")


def for_encoding(text: str, encoding: str) -> str:
    """Returns the text with dots in the place of an ellipsis that the encoding lacks."""
    try:
        "…".encode(encoding)
    except UnicodeEncodeError:
        return text.replace("…", "...")
    return text


class Stream(Protocol):
    def write(self, text: str, /) -> Any: ...
    def flush(self) -> Any: ...


class Stderr:
    """The process's current standard error. If it is closed, full or broken, text is discarded."""

    def __init__(self) -> None:
        self._stream: TextIO | None = sys.stderr

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "ascii"

    def write(self, text: str, /) -> int:
        try:
            return self._stream.write(for_encoding(text, self.encoding)) if self._stream is not None else len(text)
        except (OSError, ValueError):  # ValueError: it is closed
            return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            if self._stream is not None:
                self._stream.flush()

    def isatty(self) -> bool:
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:
            return False

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("standard error is closed")
        return self._stream.fileno()

    def width(self) -> int:
        """Returns the columns of the terminal, 80 if it does not tell them."""
        try:
            return os.get_terminal_size(self.fileno()).columns or 80
        except (OSError, ValueError):
            return 80


def drop_unwritten() -> None:
    """Discards text that a stream could not write. Otherwise Python tries again at exit and exits with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            discard(stream)


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether the command line asks for JSON. Needed before it is parsed, because its own errors are events too."""
    wanted = ""
    for before, argument in zip(("", *arguments), arguments, strict=False):
        if before == "--log-format":
            wanted = argument
        elif argument.startswith("--log-format="):
            wanted = argument.partition("=")[2]
    return wanted == "json"


said_code: int | None = None
"""The exit code of the failure that was written; None as long as none was."""


def say(message: str, code: int, *, as_json: bool, trace: bool = False) -> None:
    """Writes the line of a failure, and with `trace` the traceback."""
    global said_code
    if as_json:
        more = {"traceback": traceback.format_exc()} if trace else {}
        write_line(event("error", message=message, exit_code=code, **more))
    else:
        if trace:
            for line in traceback.format_exc().splitlines():
                write_line(printable(line))
        write_line(f"batchgen: error: {printable(message)}")
    said_code = code


def exit_code_of(command: Callable[[], int], *, verbose: bool = False, as_json: bool = False) -> int:
    """Runs a command and returns its exit code. Whatever it raises becomes one line on standard error and that error's code."""
    try:
        return command()
    except (ClosedPipe, BrokenPipeError):  # of standard output; errors of standard error are ignored
        discard(sys.stdout)
        return ClosedPipe.exit_code
    except (BatchgenError, Interrupted) as e:
        message, code = str(e), e.exit_code
        say(message, code, as_json=as_json, trace=verbose)
    except MemoryError as e:
        message, code = f"out of memory{': ' if str(e) else ''}{e}; lower --window or --kv-memory", 1
        say(message, code, as_json=as_json, trace=verbose)
    except KeyboardInterrupt as e:
        signum = next((arg for arg in e.args if isinstance(arg, signal.Signals)), signal.SIGINT)
        code = 128 + signum
        say(f"interrupted by {signum.name}", code, as_json=as_json)
    except Exception as e:  # noqa: BLE001 - the last resort: one line and an exit code for any error
        message, code = _unexpected(e, "" if verbose else "; run the command again with -v to see where"), 1
        say(message, code, as_json=as_json, trace=verbose)
    return code


def _unexpected(error: Exception, where: str) -> str:
    """Returns the message of an error that nothing else has turned into one. `where` says how to find its place in the code."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename} cannot be used: {error.strerror}{_FILE_HINTS.get(error.errno or 0, where)}"
    for words, way_out in _WAYS_OUT.items():
        if words in str(error):
            return f"{first_line(error)}; {way_out}"
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}{where}"
