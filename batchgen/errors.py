"""The tree of errors. Each says what happened, where, and how to fix it. The command turns it into one line and an exit code.

BatchgenError            exit 1: the job failed; finished rows are kept
├── UsageError           exit 2: the command cannot run as given; nothing was changed
├── InputCorrupt         exit 1: an input file breaks off or cannot be decoded
├── ModelError           exit 1: the model or its tokenizer cannot be loaded, or is not supported
├── OutputError          exit 1: the output or its job folder cannot be written (disk full, read-only)
├── TooManyErrors        exit 1: more rows failed than --max-errors allows
├── OutOfMemory          exit 1: the memory is too small
├── DevicesLost          exit 1: the processes of all devices have ended
├── OutputLocked         exit 75: another run holds this output
└── ClosedPipe           exit 141: standard output was closed by its reader

Interrupted              exit 128 + signal: stopped by a signal (a `KeyboardInterrupt`); the same command continues a job
RowError                 ends no job: one row fails, the others continue
"""

from __future__ import annotations

import signal as _signal
from collections.abc import Iterator
from contextlib import contextmanager

CONTINUES = "run the same command again to continue"


class BatchgenError(Exception):
    """A failure of the whole job.

    `message` says what is wrong and where; `hint` says what to do about it (may be empty).
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message

    def _render_traceback_(self) -> list[str]:
        """Returns what a notebook shows in place of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class UsageError(BatchgenError):
    """The command cannot run with an option, file, column or output as given. Nothing was changed."""

    exit_code = 2


class InputCorrupt(BatchgenError):
    """An input file breaks off or cannot be decoded from some point on."""


class ModelError(BatchgenError):
    """The model or its tokenizer cannot be loaded, or its architecture is not supported."""


class OutputError(BatchgenError):
    """The output or its job folder cannot be written."""


class TooManyErrors(BatchgenError):
    """More rows failed than `--max-errors` allows."""


class OutOfMemory(BatchgenError):
    """The memory is too small for the model, or for its smallest step."""


class DevicesLost(BatchgenError):
    """The processes of all devices have ended unexpectedly."""

    def __init__(self, message: str, hint: str = CONTINUES) -> None:
        super().__init__(message, hint)


class OutputLocked(BatchgenError):
    """Another run holds this output."""

    exit_code = 75


class ClosedPipe(BatchgenError):
    """The reader of standard output has closed it, for example `| head`."""

    exit_code = 141

    def __init__(self) -> None:
        super().__init__("standard output was closed")


class Interrupted(KeyboardInterrupt):
    """A signal has stopped a command. `after` says what the same command does then: that of a job continues, unless rows went to standard output.

    It is a `KeyboardInterrupt`, not an `Exception`, so that a signal also ends a program that catches the errors of each of its jobs.
    """

    def __init__(self, signum: int, after: str = CONTINUES) -> None:
        super().__init__(f"interrupted by {_signal.Signals(signum).name}; {after}")
        self.signum, self.exit_code = signum, 128 + signum

    def _render_traceback_(self) -> list[str]:
        """Returns what a notebook shows in place of a traceback."""
        return [f"{type(self).__name__}: {self}"]


# The types that `error.type` of an output row can have (docs/reference/results.md).
ROW_ERROR_TYPES = (
    "invalid_row",  # not JSON, not an object, or a column is missing or has the wrong type
    "unsupported_content",  # a message holds video, sound, or an image that the model cannot be shown
    "invalid_image",  # an image is missing, damaged, or refused by the model's processor
    "template_error",  # the template or chat template failed on this row
    "prompt_too_long",  # the prompt leaves no room in the model's context
    "empty_prompt",  # the prompt has no tokens
    "unsupported_parameter",  # a parameter of the row is unknown or out of range
    "does_not_fit",  # prompt and completion need more KV memory than there is in total
    "numerical_error",  # the model's logits are not numbers
    "constraint_error",  # the row's regular expression or JSON schema is invalid, or failed
    "timeout",  # a text was not scored within --row-timeout
    "cancelled",  # a text was not scored before the program cancelled it (Python API)
)


class RowError(Exception):
    """One row fails. `type` is one of `ROW_ERROR_TYPES`; `message` is for the user."""

    def __init__(self, type: str, message: str) -> None:
        super().__init__(message)
        if type not in ROW_ERROR_TYPES:
            raise ValueError(f"unknown row error type {type!r}")
        self.type = type
        self.message = message


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, or of torch on the CPU or a device, means that memory ran out."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or any(said in str(error) for said in ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED"))
    )


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yields the error, the one that led to it, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def caused_by(error: BaseException, *types: type[BaseException]) -> bool:
    """Whether the error, or one that led to it, is of one of these types."""
    return any(isinstance(cause, types) for cause in causes_of(error))


def in_one_line(error: BaseException, characters: int = 200) -> str:
    """Returns an error's message on one line, cut to so many characters."""
    return " ".join(str(error).split())[:characters]


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, of the system's errors without their numbers: at most 300 characters, valid UTF-8."""
    said = (error.strerror if isinstance(error, OSError) else None) or str(error)
    lines = said.strip().splitlines() or [type(error).__name__]
    return lines[0][:300].encode("utf-8", "backslashreplace").decode()


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turns the errors that Python and torch raise when memory runs out into `OutOfMemory`."""
    try:
        yield
    except (MemoryError, RuntimeError) as e:
        if not is_out_of_memory(e):
            raise
        raise OutOfMemory(
            f"out of memory: {first_line(e) if str(e) else 'no memory left'}",
            "lower --kv-memory, --batch-size or --window",
        ) from e
