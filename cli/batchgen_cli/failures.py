"""What a failure looks like: one line on standard error and an exit code; with -v the traceback before it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from batchgen.errors import BatchgenError, ClosedPipe
from batchgen_cli.stderr import event, point_nowhere, printable, put


def say(message: str, code: int, *, as_json: bool, trace: bool = False) -> None:
    """The one line of a failure, and with `trace` where it came from."""
    if as_json:
        more = {"traceback": traceback.format_exc()} if trace else {}
        put(event("error", message=message, exit_code=code, **more))
        return
    if trace:
        for line in traceback.format_exc().splitlines():
            put(printable(line))
    put(f"batchgen: error: {printable(message)}")


@contextmanager
def reported(*, verbose: bool, as_json: bool = False) -> Iterator[None]:
    """Turns whatever is raised inside into its line and its exit code (`typer.Exit`)."""
    try:
        yield
    except typer.Exit:
        raise
    except (ClosedPipe, BrokenPipeError):  # of standard output: a pipe that standard error goes to may close unseen
        point_nowhere(sys.stdout)
        raise typer.Exit(ClosedPipe.exit_code) from None
    except BatchgenError as e:
        say(str(e), e.exit_code, as_json=as_json, trace=verbose)
        raise typer.Exit(e.exit_code) from None
    except MemoryError as e:
        message = f"out of memory{': ' if str(e) else ''}{e}; lower --window or --kv-memory"
        say(message, 1, as_json=as_json, trace=verbose)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        say("interrupted by SIGINT", 130, as_json=as_json)
        raise typer.Exit(130) from None
    except Exception as e:  # noqa: BLE001 - the last line of defence: a line and an exit code for whatever it was
        first = next(iter(str(e).splitlines()), "")
        way_out = "" if verbose else "; run it again with -v to see where"
        say(f"{type(e).__name__}: {first}{way_out}", 1, as_json=as_json, trace=verbose)
        raise typer.Exit(1) from None
