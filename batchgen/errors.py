"""The tree of errors. Each says what happened, where, and how to fix it; the command turns it into one line and an exit code.

BatchgenError            exit 1: the job failed; what was finished is kept
├── UsageError           exit 2: the command cannot run as it was given; nothing was touched
├── InputCorrupt         exit 1: an input file breaks off or cannot be decoded
├── ModelError           exit 1: the model or its tokenizer cannot be loaded, or is not supported
├── OutputError          exit 1: the output or its job folder cannot be written (disk full, read-only)
├── TooManyErrors        exit 1: more rows failed than --max-errors allows
├── OutOfMemory          exit 1: there is not enough memory for a single row
├── DevicesLost          exit 1: the process of the last device has ended
├── OutputLocked         exit 75: another run holds this output
├── Interrupted          exit 128 + signal: stopped by a signal; the same command continues
└── ClosedPipe           exit 141: standard output was closed by its reader

RowError                 ends no job: one row fails, the others continue
"""

from __future__ import annotations

import signal as _signal
from collections.abc import Iterator
from contextlib import contextmanager


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


class UsageError(BatchgenError):
    """An option, file, column or output that the command cannot run with. Nothing was touched."""

    exit_code = 2


class InputCorrupt(BatchgenError):
    """An input file is cut or cannot be decoded from some point on."""


class ModelError(BatchgenError):
    """The model or its tokenizer cannot be loaded, or its architecture is not supported."""


class OutputError(BatchgenError):
    """The output or its job folder cannot be written."""


class TooManyErrors(BatchgenError):
    """More rows failed than `--max-errors` allows."""


class OutOfMemory(BatchgenError):
    """There is not enough memory for a single row."""


class DevicesLost(BatchgenError):
    """The process of the last device has ended unexpectedly."""

    def __init__(self, message: str, hint: str = "run the same command again to go on") -> None:
        super().__init__(message, hint)


class OutputLocked(BatchgenError):
    """Another run holds this output."""

    exit_code = 75


class Interrupted(BatchgenError):
    """Stopped by a signal; what was finished is kept, and the same command continues from there."""

    def __init__(self, signum: int, message: str = "", hint: str = "") -> None:
        name = _signal.Signals(signum).name
        super().__init__(message or f"interrupted by {name}", hint or "run the same command again to go on")
        self.signum = signum
        self.exit_code = 128 + signum


class ClosedPipe(BatchgenError):
    """Standard output was closed by its reader (`| head`, say)."""

    exit_code = 141

    def __init__(self) -> None:
        super().__init__("standard output was closed")


# The types that `error.type` of an output row can have (README, "Errors of a row").
ROW_ERROR_TYPES = (
    "invalid_row",  # not JSON, not an object, a column missing or of the wrong type
    "unsupported_content",  # a message holds an image or sound; only text can be sent
    "template_error",  # the template or chat template failed on this row
    "prompt_too_long",  # the prompt leaves no room in the model's context
    "empty_prompt",  # the prompt has no tokens
    "unsupported_parameter",  # a parameter of the row is unknown or out of range
    "does_not_fit",  # prompt and completion need more KV memory than there is
    "numerical_error",  # the model's logits are not numbers
    "constraint_error",  # the row's grammar is not valid, or went wrong
    "timeout",  # a text was not scored within --row-timeout
    "cancelled",  # a text was not scored before the program cancelled it (Python API)
)


class RowError(Exception):
    """One row fails: `type` is one of `ROW_ERROR_TYPES`, `message` is for the user."""

    def __init__(self, type: str, message: str) -> None:
        super().__init__(message)
        if type not in ROW_ERROR_TYPES:
            raise ValueError(f"unknown row error type {type!r}")
        self.type = type
        self.message = message


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, whoever noticed it: Python, or torch on the CPU or a device."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or any(said in str(error) for said in ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED"))
    )


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raises `OutOfMemory` in place of what Python, or torch on the CPU or a device, raises when memory runs out."""
    try:
        yield
    except BatchgenError:
        raise
    except (MemoryError, RuntimeError) as e:
        if not is_out_of_memory(e):
            raise
        said = str(e)
        first = said.splitlines()[0] if said else "no more memory"
        raise OutOfMemory(f"out of memory: {first}", "lower --kv-memory, --batch-size or --window") from e
