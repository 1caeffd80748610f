"""What a failure looks like: one line on standard error and an exit code; with -v the traceback before it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from batchgen.errors import BatchgenError, ClosedPipe


def printable(text: str) -> str:
    """The text on one line, control characters escaped: what a file or a model holds must not steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)


def say(message: str) -> None:
    """The one line of a failure."""
    sys.stderr.write(f"batchgen: error: {printable(message)}\n")
    sys.stderr.flush()


@contextmanager
def reported(*, verbose: bool) -> Iterator[None]:
    """Turns whatever is raised inside into its line and its exit code (`typer.Exit`)."""
    try:
        yield
    except typer.Exit:
        raise
    except (ClosedPipe, BrokenPipeError):  # no other pipe is written to but standard output
        _detach_stdout()
        raise typer.Exit(ClosedPipe.exit_code) from None
    except BatchgenError as e:
        if verbose:
            traceback.print_exc()
        say(str(e))
        raise typer.Exit(e.exit_code) from None
    except MemoryError as e:
        if verbose:
            traceback.print_exc()
        say(f"out of memory{': ' if str(e) else ''}{e}; lower --window or --kv-memory")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        say("interrupted by SIGINT")
        raise typer.Exit(130) from None
    except Exception as e:  # noqa: BLE001 - the last line of defence: a line and an exit code for whatever it was
        if verbose:
            traceback.print_exc()
        first = next(iter(str(e).splitlines()), "")
        say(f"{type(e).__name__}: {first}{'' if verbose else '; run it again with -v to see where'}")
        raise typer.Exit(1) from None


def _detach_stdout() -> None:
    """Keeps the interpreter from complaining, when it exits, about what it cannot flush to a closed pipe."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        pass  # not a real file (a test's), or closed already: nothing will be flushed
