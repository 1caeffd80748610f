"""The results of a finished output, taken back into a journal, so that a job whose input has changed generates only what is new."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from batchgen.records.disk import sync_folder
from batchgen.records.files import InputFile
from batchgen.records.inputs import Input
from batchgen.records.journal import encode
from batchgen.records.openai_batch import result_of
from batchgen.records.output import output_format
from batchgen.records.result_values import completions_of, probs_of, score_of
from batchgen.result import Result

KEY_BYTES = 16
NO_KEY = bytes(KEY_BYTES)
"""Stands in the keys of an output for a row that never became a request."""


def take_back(output: str, keys: Path, journal: Path) -> int:
    """Write the journal that `output` came from, as far as the output tells; row i has the i-th key of `keys`. Returns the number of results.

    Rows that failed keep their errors; token ids are there where the output has them, alone or in log-probabilities. A row that the output
    does not hold whole (an infinity that JSON has no word for, in a log-probability or score; in a record of OpenAI's form any
    log-probability) is left out: it is generated again.
    """
    rows = Input((InputFile(output, *output_format(output)),), []).rows()
    new = journal.with_name(journal.name + ".new")
    taken = 0
    with keys.open("rb") as key_file, new.open("wb") as file:
        for row in rows:
            key = key_file.read(KEY_BYTES)
            if len(key) == KEY_BYTES and key != NO_KEY and row.error is None:
                result = _result(row.columns)
                if result is not None:
                    file.write(encode(key, result))
                    taken += 1
        file.flush()
        os.fsync(file.fileno())
    new.replace(journal)
    sync_folder(journal.parent)
    return taken


def _result(columns: dict[str, Any]) -> Result | None:
    """The result of an output row; None where it is not whole."""
    try:
        return _of_row(columns) if "usage" in columns else result_of(columns)
    except (ValueError, TypeError, KeyError):
        return None


def _of_row(columns: dict[str, Any]) -> Result | None:
    usage, error = columns["usage"], columns["error"]
    probs, score, token_ids = columns.get("choice_probs"), columns.get("score"), columns.get("token_ids")
    thought = usage.get("reasoning_tokens")  # else a column called reasoning is the input's
    if columns["text"] is None and not error and not score and not thought:
        return None
    completions = completions_of(columns.get("choices") or ())
    if token_ids is None:
        token_ids = completions[0].token_ids if completions else ()
    return Result(
        row=-1,
        text=columns["text"],
        finish_reason=columns["finish_reason"],
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        reasoning=columns.get("reasoning") if thought else None,
        reasoning_tokens=thought or 0,
        token_ids=tuple(token_ids),
        truncated=bool(columns.get("truncated")),
        completions=completions,
        choice_probs=None if probs is None else probs_of(probs),
        score=None if score is None else score_of(score),
        error_type=error["type"] if error else None,
        error_message=error["message"] if error else None,
    )
