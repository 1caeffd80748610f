"""The first of the two readings of an input, as the job's folder keeps it: a later run of the same job over the same input need not repeat it.

passes/keys       the key of every row, in input order
passes/failed     the results of the rows that failed there
passes/run-00000  the requests, sorted (written by others)
passes/done.json  what was read, and the digests of the files: written last, once all of it is on disk
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchgen.records.disk import json_digest, reading, sync_folder, write_json, writing
from batchgen.records.journal import Journal
from batchgen.records.listing import Listing, read_failed, read_keys
from batchgen.records.manifest import file_digest


@dataclass(frozen=True, slots=True)
class Pass:
    """A first reading that came to its end."""

    asked: dict[str, Any]
    """What was read, with which settings: good for a run that asks for the same."""
    rows: int
    resumed: dict[str, int]
    """Counts of the rows that had a result then, and so are not among the requests."""
    digests: dict[str, str]
    """Of the files, by name."""
    runs: list[str]
    """Those of the files that hold requests."""
    journal_bytes: int = 0
    """The journal that has those results was as long as this."""


class Passes:
    """Keeps one first reading. `settings` are the job's; `trusted`: whether an earlier reading may be used at all."""

    def __init__(self, folder: Path, journal: Journal, settings: dict[str, Any], *, trusted: bool) -> None:
        self.folder = folder
        self._settings = settings
        self._journal = journal
        self._trusted = trusted
        self._done = folder / "done.json"

    def earlier(self, asked: dict[str, Any]) -> Pass | None:
        """The reading of an earlier run, whole and of the same things; None where there is none."""
        with writing(self.folder):
            there = self._read()
            if there is None or not self._trusted or there.asked != self._asked(asked):
                return None
            if self._journal.damaged or self._journal.size < there.journal_bytes:
                return None
            whole = all(
                (self.folder / name).exists() and file_digest(self.folder / name) == digest
                for name, digest in there.digests.items()
            )
            return there if whole else None

    def begin(self) -> Listing:
        """Nothing of an earlier reading is left."""
        with writing(self.folder):
            self.forget()
            self.folder.mkdir()
            sync_folder(self.folder.parent)
            return Listing(self.folder)

    def end(self, done: Pass) -> None:
        """All files are on disk: a later run may use them."""
        with writing(self.folder):
            sync_folder(self.folder)
            value = asdict(done) | {"asked": self._asked(done.asked), "journal_bytes": self._journal.size}
            write_json(self._done, {"digest": json_digest(value), "pass": value})

    def keys(self) -> Iterator[bytes]:
        """The key of every row, in input order; `NO_KEY` for one that failed."""
        with reading(self.folder):
            yield from read_keys(self.folder / "keys")

    def failed(self) -> Iterator[Any]:
        """The results of the rows that failed, in input order."""
        with reading(self.folder):
            yield from read_failed(self.folder / "failed")

    def forget(self) -> None:
        """No later run is to use it."""
        if self.folder.exists():
            self._done.unlink(missing_ok=True)  # first, so that what is left is never taken for whole
            shutil.rmtree(self.folder)

    def close(self) -> None:
        """What is not whole is of no use to anybody."""
        if not self._done.exists():
            self.forget()

    def _asked(self, asked: dict[str, Any]) -> dict[str, Any]:
        """As it comes back from a file."""
        stored: dict[str, Any] = json.loads(json.dumps(asked | {"settings": self._settings}))
        return stored

    def _read(self) -> Pass | None:
        try:
            value = json.loads(self._done.read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        if (
            not isinstance(value, dict)
            or value.keys() != {"digest", "pass"}
            or value["digest"] != json_digest(value["pass"])
        ):
            return None
        return Pass(**value["pass"])
