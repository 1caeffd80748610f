"""The user's cache folder: what batchgen keeps between runs, such as compiled kernels and the findings of the check of a device.

What is kept there can be made again, so it is not synced to the disk: a file that a power cut has damaged must be recognised by its reader.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """Returns `$XDG_CACHE_HOME/batchgen`, by default `~/.cache/batchgen`. Raises `OSError` if there is no home."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (base if base.is_absolute() else Path.home() / ".cache") / "batchgen"
    except RuntimeError as e:  # a user that the system does not know, as in some containers
        raise OSError(str(e)) from e


@contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """Yields the path of a new file, in a folder of its own, that takes the place of `file` when the block ends without an error.

    Another process sees the old file or the whole new one. Raises `OSError` if the folder of `file`, which must exist, cannot be written to.
    """
    with tempfile.TemporaryDirectory(dir=file.parent, prefix="unfinished-") as folder:
        made = Path(folder) / file.name
        yield made
        made.replace(file)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Holds the lock of this file, which is made with its folder if it is missing, and waits for it. A process that ends releases its locks.

    Raises `OSError` if the file cannot be made or locked.
    """
    import fcntl  # missing on Windows

    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
