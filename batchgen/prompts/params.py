"""A row's own sampling parameters: the object column `sampling_params`, the columns of `--row-params`, the names of the OpenAI API."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from batchgen.errors import RowError, UsageError
from batchgen.prompts.messages import kind
from batchgen.sampling_params import SamplingParams, choices_of

OBJECT_COLUMN = "sampling_params"
NAMES = {f.name for f in fields(SamplingParams)} | {"stop_token_id"}

# Known elsewhere and not built here: the values that ask for nothing, which are let pass. Any other value fails the row.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "echo": (False,), "stream": (False,), "suffix": ("",), "top_logprobs": (0,), "logit_bias": ({},),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False), "modalities": (["text"],), "stream_options": ({},),
    "min_tokens": (0,), "length_penalty": (1, 1.0), "use_beam_search": (False,), "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "add_generation_prompt": (True,),
    "continue_final_message": (False,), "return_tokens_as_token_ids": (False,), "return_token_ids": (False,),
}  # fmt: skip
_ITSELF = ("stop", "regex", "json_schema")  # texts that are not to be read as JSON


def supported(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters without those that are null or ask for nothing (`stream: false`).

    Raises `RowError("unsupported_parameter")` for one that asks for what is not built; unknown names are left to `SamplingParams.merged`.
    """
    kept = {}
    for name, value in params.items():
        if value is None or (name == "logprobs" and value is False):
            continue
        if name not in _NEUTRAL:
            kept[name] = value
        elif not any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL[name]):
            raise RowError("unsupported_parameter", f"{name} is not supported: {_short(value)}")
    return kept


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 80 else f"{text[:80]}…"


class RowParams:
    """Which columns of a row are its parameters."""

    def __init__(self, named: Sequence[str], default: SamplingParams) -> None:
        """Raises `UsageError` where a column of `--row-params` has not the name of a parameter."""
        for name in named:
            if name not in NAMES:
                raise UsageError(
                    f"--row-params {name!r} is not a sampling parameter", f"use {', '.join(sorted(NAMES))}"
                )
        self._named = tuple(named)
        self.default = default
        self._others = NAMES - set(named)

    def of(self, columns: Mapping[str, Any], body: Mapping[str, Any] | None = None) -> SamplingParams:
        """The row's effective parameters: the command's, under the named columns', `sampling_params`' and the body's.

        Raises `RowError`.
        """
        own: dict[str, Any] = {}
        for name in self._named:
            value = columns.get(name)
            if value is not None:
                own |= supported({name: _from_text(name, value) if isinstance(value, str) else value})
        whole = columns.get(OBJECT_COLUMN)
        if whole is not None:
            own |= supported(_object(whole))
        if body:
            own |= body
        if not own:
            return self.default
        if isinstance(own.get("json_schema"), Mapping):
            own["json_schema"] = _schema(own["json_schema"])
        try:
            return self.default.merged(own)
        except OverflowError:  # JSON's whole numbers have no end
            raise RowError("unsupported_parameter", f"a number is too large: {_short(own)}") from None

    def unnamed(self, columns: Iterable[str]) -> set[str]:
        """Columns that have the name of a parameter and were not named: they are only carried."""
        return self._others.intersection(columns)

    def may_have(self, names: Collection[str], types: Mapping[str, Any]) -> bool:
        """Whether a row of a table, by the Arrow types of its columns, may have one of these parameters of its own."""
        if not set(names).isdisjoint(self._named):
            return True
        return any(_may_hold(types[column], names) for column in (OBJECT_COLUMN, "body") if column in types)

    def missing(self, columns: Iterable[str]) -> list[str]:
        """Columns that were named and are not there."""
        there = set(columns)
        return [name for name in self._named if name not in there]


def _may_hold(type: Any, names: Collection[str]) -> bool:
    """Whether a value of an Arrow type may be an object with one of these fields: a struct without them cannot."""
    fields = getattr(type, "fields", None)
    return fields is None or any(field.name in names for field in fields)


def _object(value: Any) -> Mapping[str, Any]:
    """`sampling_params` as an object; in a CSV file its JSON, or nothing at all."""
    if isinstance(value, str):
        if not value.strip():
            return {}
        try:
            parsed = json.loads(value)
        except ValueError:
            raise RowError("invalid_row", f"column {OBJECT_COLUMN!r} is text that is not JSON") from None
        value = {} if parsed is None else parsed
    if not isinstance(value, Mapping):
        raise RowError("invalid_row", f"column {OBJECT_COLUMN!r} must be an object, not {kind(value)}")
    return value


def _from_text(name: str, text: str) -> Any:
    """The value that a CSV field stands for; None for an empty one. A stop string, a regex, a schema is itself."""
    if not text:
        return None
    if name in _ITSELF:
        return text
    if name == "choices":
        return _choices(text)
    try:
        return json.loads(text.strip().lower() if name == "ignore_eos" else text)
    except ValueError:
        return text


def _schema(schema: Mapping[str, Any]) -> str:
    """As JSON, in its own order: that of the properties is the order they are written in."""
    try:
        return json.dumps(schema)
    except TypeError as e:  # a table's dates and bytes
        raise RowError("unsupported_parameter", f"json_schema is not JSON: {e}") from None


def _choices(text: str) -> tuple[str, ...]:
    try:
        return choices_of(text)
    except ValueError as e:
        raise RowError("unsupported_parameter", str(e)) from None
