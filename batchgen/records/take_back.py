"""The results of a finished output, taken back into a journal, so that a job whose input has changed generates only what is new."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from batchgen.records.disk import sync_folder
from batchgen.records.files import InputFile
from batchgen.records.inputs import Input
from batchgen.records.journal import encode
from batchgen.records.output import output_format
from batchgen.result import Result

KEY_BYTES = 16
NO_KEY = bytes(KEY_BYTES)
"""Stands in the keys of an output for a row that never became a request."""


def take_back(output: str, keys: Path, journal: Path) -> int:
    """Write the journal that `output` came from, as far as the output tells; row i has the i-th key of `keys`. Returns the number of results.

    Rows that failed keep their errors; token ids are there where the output has them.
    """
    rows = Input((InputFile(output, *output_format(output)),), []).rows()
    new = journal.with_name(journal.name + ".new")
    taken = 0
    with keys.open("rb") as key_file, new.open("wb") as file:
        for row in rows:
            key = key_file.read(KEY_BYTES)
            if len(key) == KEY_BYTES and key != NO_KEY and row.error is None:
                file.write(encode(key, _result(row.columns)))
                taken += 1
        file.flush()
        os.fsync(file.fileno())
    new.replace(journal)
    sync_folder(journal.parent)
    return taken


def _result(columns: dict[str, Any]) -> Result:
    usage, error = columns["usage"], columns["error"]
    return Result(
        row=-1,
        text=columns["text"],
        finish_reason=columns["finish_reason"],
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        token_ids=tuple(columns.get("token_ids") or ()),
        truncated=bool(columns.get("truncated")),
        error_type=error["type"] if error else None,
        error_message=error["message"] if error else None,
    )
