"""Writes to standard output, and turns what can go wrong there into errors of batchgen."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TextIO

from batchgen.errors import ClosedPipe, OutputError


def write_stdout(stream: TextIO | None, data: bytes, hint: str, *, flush: bool = True) -> None:
    """Writes to `stream`, which is standard output.

    Raises `ClosedPipe` if its reader has closed it, and `OutputError` with `hint` if it is closed or cannot be written.
    """
    if stream is None:
        raise OutputError("standard output is closed", hint)
    try:
        stream.buffer.write(data)
        if flush:
            stream.buffer.flush()
    except BrokenPipeError:
        discard(stream)
        raise ClosedPipe from None
    except OSError as e:
        discard(stream)
        raise OutputError(f"standard output cannot be written: {e.strerror or e}", hint) from e


def discard(stream: TextIO | None) -> None:
    """Points a stream to /dev/null. Otherwise Python flushes it at exit and complains (see "Note on SIGPIPE" in its documentation)."""
    if stream is None:
        return
    with suppress(OSError, ValueError):  # not a real file (in a test), or already closed: nothing will be flushed
        fd = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, fd)
        os.close(nowhere)
