"""What a row has beside its prompt: the completion to score, and its priority."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from batchgen.config import PromptConfig
from batchgen.errors import RowError
from batchgen.prompts.messages import kind
from batchgen.sampling_params import SamplingParams


def not_for_scores(params: SamplingParams) -> str | None:
    """The name of a parameter that asks for something else than a score."""
    if params.n > 1:
        return "n"
    if params.logprobs is not None:
        return "logprobs"
    return next((name for name in ("choices", "regex", "json_schema") if getattr(params, name)), None)


def completion_of(columns: Mapping[str, Any], prompts: PromptConfig, params: SamplingParams) -> str:
    """The text to score, maybe empty. Raises `RowError` for a row that has none, or asks for something else."""
    other = not_for_scores(params)
    if other is not None:
        raise RowError("unsupported_parameter", f"{other} cannot be combined with --score")
    name = prompts.completion_column
    if name not in columns:
        raise RowError("invalid_row", f"column {name!r} is missing")
    value = columns[name]
    if not isinstance(value, str):
        raise RowError("invalid_row", f"column {name!r} must be text, not {kind(value)}")
    return value


def priority_of(columns: Mapping[str, Any], name: str | None) -> float:
    """The row's priority; 0 where it has none. Text, as of a CSV file, may stand for a number. Raises `RowError`."""
    value = None if name is None else columns.get(name)
    if value is None or value == "":
        return 0.0
    if isinstance(value, int | float | Decimal | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise RowError("invalid_row", f"column {name!r} must be a number")
