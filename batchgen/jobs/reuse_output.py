"""Reads results back from a finished output, so that a job whose input has changed generates only new rows."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from batchgen.records.files import DELIMITERS, InputFile
from batchgen.records.inputs import Input
from batchgen.records.output import TASK_NAMES, RowForm, output_format
from batchgen.records.result_values import PARTS, calls_of, completions_of, parts_of
from batchgen.result import Result

KEY_BYTES = 16
_READ_KEYS = 4096
_SHORT_LINE = 1024
"""Bytes of a line that is taken as it is. Of a longer one most is the row's own columns, which a database of results need not hold."""
NO_KEY = bytes(KEY_BYTES)
"""The key of a row that never became a request."""
_PARTS_WITH_TEXT = PARTS.keys() - TASK_NAMES
"""The parts that a result with a text or an error may have."""


def read_keys(path: Path) -> Iterator[bytes]:
    """Yields the keys of the rows of an output, in its order; `NO_KEY` for a row that never became a request."""
    with path.open("rb") as file:
        while keys := file.read(_READ_KEYS * KEY_BYTES):
            for start in range(0, len(keys) // KEY_BYTES * KEY_BYTES, KEY_BYTES):
                yield keys[start : start + KEY_BYTES]


def results_of_output(output: str, keys: Path, asked: Collection[str]) -> Iterator[tuple[bytes, Result | bytes]]:
    """Yields the keys of the rows of `output`, and their results, or their lines if these are JSON and short; row i has the i-th key of `keys`.

    Failed rows keep their errors. Results have token ids if the output has them, in a column or in log-probabilities. Results that the output
    does not hold whole (`is_held_whole`) are left out, and so are all rows of CSV. `asked` is `RowForm.asked` of the output.
    """
    kind, compression = output_format(output)
    if kind in DELIMITERS:
        return
    file = InputFile(output, kind, compression)
    if kind == "jsonl":
        of_input = [
            f'"{name}"'.encode() for name in TASK_NAMES.difference(asked)
        ]  # would be taken for parts of a result
        with file.open() as lines:
            for key, line in zip(read_keys(keys), lines, strict=False):
                as_it_is = len(line) <= _SHORT_LINE and not any(name in line for name in of_input)
                found = line if as_it_is else _result_of_line(line, asked)
                if key != NO_KEY and found is not None:
                    yield key, found
        return
    for key, row in zip(read_keys(keys), Input((file,), []).rows(), strict=False):
        result = None if key == NO_KEY or row.error is not None else result_of_row(row.columns, asked)
        if result is not None:
            yield key, result


def _result_of_line(line: bytes, asked: Collection[str]) -> Result | None:
    """Does what `result_of_row` does, for a line of JSON."""
    try:
        return result_of_row(json.loads(line), asked)
    except ValueError:
        return None


def is_held_whole(result: Result, form: RowForm, format: str) -> bool:
    """Whether `results_of_output` can read a result back from an output of this form and format.

    JSON cannot hold an infinity, OpenAI's form lacks parts of a result, and the values of CSV have no types. `valid` of a row with a schema of
    its own looks like a column of the input.
    """
    if format in DELIMITERS or form.openai is not None:
        return False
    if result.failed:
        return True
    if result.valid is not None and "valid" not in form.asked:
        return False
    if result.embedding is not None or result.reward is not None:
        return True
    if result.text is None and result.score is None:
        return False
    if format == "parquet":
        return True
    numbers = [] if result.score is None else [result.score.logprob]
    numbers += [token.logprob for token in (result.prompt_logprobs or ()) if not math.isnan(token.logprob)]
    for completion in result.completions:
        for token in completion.logprobs or ():
            numbers += [token.logprob, *(top.logprob for top in token.top)]
    return all(map(math.isfinite, numbers))


def result_of_row(columns: dict[str, Any], asked: Collection[str] = TASK_NAMES) -> Result | None:
    """Returns the result of an output row; None if it is not whole, or if batchgen did not write the row. `asked` is `RowForm.asked` of the output."""
    try:
        return _of_row(columns, asked)
    except (ValueError, TypeError, KeyError):
        return None


def _of_row(columns: dict[str, Any], asked: Collection[str]) -> Result | None:
    usage, error, token_ids = columns["usage"], columns["error"], columns.get("token_ids")
    thought = usage.get("reasoning_tokens")  # otherwise a column `reasoning` is the input's
    wordless = columns["text"] is None and not error
    # The others are columns of the input.
    names = PARTS.keys() - TASK_NAMES.difference(asked) if wordless else _PARTS_WITH_TEXT
    parts = parts_of({name: columns[name] for name in names if name in columns})
    if wordless and not (thought or parts.keys() & {"score", "embedding", "reward"}):
        return None
    choices = columns.get("choices")
    completions = completions_of(choices) if choices else ()
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
        tool_calls=calls_of(columns.get("tool_calls")),
        token_ids=tuple(token_ids),
        truncated=bool(columns.get("truncated")),
        valid=columns.get("valid") if "valid" in asked else None,
        completions=completions,
        error_type=error["type"] if error else None,
        error_message=error["message"] if error else None,
        **parts,
    )
