"""What the first of two readings of an input found: the key of every row, in input order, and the results of rows that failed there.

The second reading (to write the output) finds each row's result by it. Files `keys` and `failed` of a folder; of constant memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from batchgen.errors import OutputError
from batchgen.records.disk import writing
from batchgen.records.journal import decode, encode
from batchgen.records.take_back import KEY_BYTES, NO_KEY
from batchgen.records.writers import DigestFile
from batchgen.result import Result


class Listing:
    """Written once from start to end, then read. `folder` is there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files = (folder / "keys", folder / "failed")
        self._keys = DigestFile(self.files[0])
        self._failed = DigestFile(self.files[1])

    def add(self, rows: Sequence[int], keys: Mapping[int, bytes], results: Mapping[int, Result]) -> None:
        """The next rows, by their numbers: each has a key, or else a result."""
        with writing(self._folder):
            self._keys.write(b"".join(keys.get(row, NO_KEY) for row in rows))
            for row in rows:
                if row not in keys:
                    self._failed.write(encode(row.to_bytes(KEY_BYTES, "big"), results[row]))

    def close(self) -> dict[str, str]:
        """On disk. Returns the digests of the files, by name."""
        with writing(self._folder):
            for file in (self._keys, self._failed):
                file.sync()
                file.close()
        return {path.name: f.hexdigest() for path, f in zip(self.files, (self._keys, self._failed), strict=True)}

    def abandon(self) -> None:
        self._keys.abandon()
        self._failed.abandon()


def read_keys(path: Path) -> Iterator[bytes]:
    """The keys of all rows; `NO_KEY` for a row that never became a request."""
    with path.open("rb") as file:
        while key := file.read(KEY_BYTES):
            yield key


def read_failed(path: Path) -> Iterator[Result]:
    """The results of the rows that never became requests, in input order. Raises `OutputError` where the file is damaged."""
    with path.open("rb") as file:
        for line in file:
            record = decode(line)
            if record is None:
                raise OutputError(f"{path} is damaged", "run the same command again: the input is read anew")
            yield replace(record[1], row=int.from_bytes(record[0], "big"))
