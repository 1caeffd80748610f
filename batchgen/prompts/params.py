"""A row's own sampling parameters, from the object column `sampling_params`, the columns of `--row-params` or the body of an OpenAI request.

They may have batchgen's names or those of the OpenAI API and of vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from batchgen.errors import RowError, UsageError
from batchgen.json_values import kind
from batchgen.sampling_params import AUTO_MAX_TOKENS, SamplingParams, choices_of

OBJECT_COLUMN = "sampling_params"
NAMES = {f.name for f in fields(SamplingParams) if f.compare} | {"stop_token_id"}
_ALIASES = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choices",
}
"""Other names of parameters. If a row has both names, the value under the other name wins: it is the newer or more exact one."""
ALL_NAMES = NAMES | _ALIASES.keys()
_SHOWN = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_tokens", "max_repeats", "reasoning_budget", "seed",
)  # fmt: skip
"""The parameters whose values the figures name."""
CHOICES_NAMES = ("choices", "guided_choice", "structured_outputs", "guided_decoding")
SCHEMA_NAMES = ("json_schema", "guided_json", "response_format", "structured_outputs", "guided_decoding")
_TRANSLATED = frozenset({"logprobs", "top_logprobs", "response_format", "structured_outputs", "guided_decoding"})
_STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choices"}  # of vLLM's structured_outputs

# Parameters that batchgen does not support, and the values that have no effect. Any other value fails the row.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "echo": (False,), "stream": (False,), "suffix": ("",), "top_logprobs": (0,), "logit_bias": ({},),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False), "modalities": (["text"],), "stream_options": ({},),
    "min_tokens": (0,), "length_penalty": (1, 1.0), "use_beam_search": (False,), "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "add_generation_prompt": (True,),
    "continue_final_message": (False,), "return_tokens_as_token_ids": (False,), "return_token_ids": (False,),
}  # fmt: skip
_ITSELF = ("regex", "json_schema", "guided_regex", "guided_json")  # texts that are not read as JSON


def translated(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters under batchgen's names, without those that are null or have no effect (`stream: false`).

    Raises `RowError("unsupported_parameter")` for an unsupported one. Unknown names are left to `SamplingParams.merged`.
    """
    ours: dict[str, Any] = {}
    for name, value in params.items():
        if value is None or name in _TRANSLATED or name in _ALIASES:
            continue
        if name not in _NEUTRAL:
            ours[name] = value
        elif not any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL[name]):
            raise RowError("unsupported_parameter", f"{name} is not supported: {_short(value)}")
    ours |= _logprobs_param(params) | _response_format(params.get("response_format"))
    ours |= {_ALIASES[name]: value for name, value in params.items() if name in _ALIASES and value is not None}
    for name in ("guided_decoding", "structured_outputs"):
        ours |= _structured(name, params.get(name))
    return ours


def _logprobs_param(params: Mapping[str, Any]) -> dict[str, Any]:
    """Reads `logprobs`: a number or, as in OpenAI's chat completions, true with the number in `top_logprobs`."""
    wanted, top = params.get("logprobs"), params.get("top_logprobs")
    if isinstance(wanted, bool) or wanted is None:
        if top and not wanted:
            raise RowError("unsupported_parameter", "top_logprobs needs logprobs: true")
        return {"logprobs": top or 0} if wanted else {}
    return {"logprobs": wanted}


def _response_format(wanted: Any) -> dict[str, Any]:
    if wanted is None:
        return {}
    kind_of = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind_of == "text":
        return {}
    if kind_of == "json_object":
        return {"json_schema": {"type": "object"}}
    given = wanted.get("json_schema") if kind_of == "json_schema" else None
    schema = given.get("schema") if isinstance(given, Mapping) else None
    if isinstance(schema, Mapping):
        return {"json_schema": schema}
    raise RowError("unsupported_parameter", "response_format must be text, json_object, or json_schema with its schema")


def _structured(name: str, wanted: Any) -> dict[str, Any]:
    """Reads vLLM's object of constraints. Raises `RowError` for constraints that batchgen does not have."""
    if wanted is None:
        return {}
    if not isinstance(wanted, Mapping):
        raise RowError("unsupported_parameter", f"{name} must be an object, not {kind(wanted)}")
    asked = {key: value for key, value in wanted.items() if value is not None and value is not False}
    if asked.pop("json_object", None):
        asked.setdefault("json", {"type": "object"})
    compact = wanted.get("disable_any_whitespace")
    asked.pop("disable_any_whitespace", None)
    other = next((key for key in asked if key not in _STRUCTURED), None)
    if other is not None:
        raise RowError("unsupported_parameter", f"{name}.{other} is not supported")
    ours = {_STRUCTURED[key]: value for key, value in asked.items()}
    return ours if compact is None else ours | {"json_whitespace": not compact}


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 80 else f"{text[:80]}…"


class RowParams:
    """Reads the sampling parameters of rows."""

    def __init__(
        self,
        named: Sequence[str],
        default: SamplingParams,
        model: Mapping[str, Any] | None = None,
        max_tokens: int = AUTO_MAX_TOKENS,
        choices_column: str | None = None,
    ) -> None:
        """`named` are the columns of `--row-params`, `model` the model's own sampling parameters, `max_tokens` the value of `--max-tokens auto`.

        Raises `UsageError` if a column of `--row-params` does not have the name of a parameter.
        """
        for name in named:
            if name not in ALL_NAMES:
                raise UsageError(
                    f"--row-params {name!r} is not a sampling parameter", f"use {', '.join(sorted(NAMES))}"
                )
        self._named = tuple(named)
        self._choices_column = choices_column
        self._auto = {"max_tokens": max_tokens}
        self._model = {**(model or {}), **self._auto}
        self._given = default
        self.default = self._completed(default)
        """The command's parameters, with the model's for those that were not given."""
        self.labels = bool(default.choices) or choices_column is not None
        """Whether the command asks for labels."""

    def of(
        self,
        columns: Mapping[str, Any],
        body: Mapping[str, Any] | None = None,
        default: SamplingParams | None = None,
    ) -> SamplingParams:
        """Returns the row's effective parameters: `default` (else the command's), overridden by the labels in their column, the named columns,
        `sampling_params` and `body`.

        `body` has batchgen's names. Raises `RowError`.
        """
        own = self._own_choices(columns)
        for name in self._named:
            value = columns.get(name)
            if value is not None:
                own |= translated({name: _from_text(name, value) if isinstance(value, str) else value})
        whole = columns.get(OBJECT_COLUMN)
        if whole is not None:
            own |= translated(_params_object(whole))
        if body:
            own |= body
        if not own:
            return self.default if default is None else self._completed(default)
        try:
            return self._completed((default or self._given).merged(own))
        except OverflowError:  # whole numbers of JSON can have any size
            raise RowError("unsupported_parameter", f"a number is too large: {_short(own)}") from None

    def _own_choices(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the labels in the column of `--choices-column`, as a parameter. Raises `RowError` if there are none, for the row or the command."""
        if self._choices_column is None:
            return {}
        value = columns.get(self._choices_column)
        if value is None or (isinstance(value, str | list | tuple) and not value):
            if self._given.choices:
                return {}
            raise RowError("invalid_row", f"column {self._choices_column!r} has no labels")
        return {"choices": _choices(value) if isinstance(value, str) else value}

    def sources(self) -> dict[str, dict[str, Any]]:
        """Returns for each sampling parameter the value that rows without their own use, and its origin: `option`, `model`, `auto` or `default`.

        But for the temperature, those at their defaults are left out. Empty where labels are scored.
        """
        found: dict[str, dict[str, Any]] = {}
        for name in () if self.labels else _SHOWN:
            value, given = getattr(self.default, name), name in self._given.given
            source = "option" if given else "model" if name in self._model else "default"
            source = "auto" if source == "model" and name in self._auto else source
            if source != "default" or name == "temperature":
                found[name] = {"value": value, "from": source}
        return found

    def _completed(self, params: SamplingParams) -> SamplingParams:
        """Returns the parameters with the model's for those that were not given. Labels do not use the model's."""
        return params.completed(self._auto if params.choices else self._model)

    def may_have(self, names: Collection[str], types: Mapping[str, Any]) -> bool:
        """Whether rows of a table may have one of these parameters, judged by the Arrow types of its columns."""
        if not set(names).isdisjoint(self._named):
            return True
        return any(_may_hold(types[column], names) for column in (OBJECT_COLUMN, "body") if column in types)


def _may_hold(type: Any, names: Collection[str]) -> bool:
    """Whether a value of an Arrow type may be an object with one of these fields."""
    fields = getattr(type, "fields", None)
    return fields is None or any(field.name in names for field in fields)


def _params_object(value: Any) -> Mapping[str, Any]:
    """Returns `sampling_params` as an object. In a CSV file it is JSON, or empty."""
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
    """Returns the value of a CSV field, None if it is empty. Regular expressions and schemas are taken as they are, and so is a stop string that is
    no JSON list of texts.
    """
    if not text:
        return None
    if name in _ITSELF:
        return text
    if name in ("choices", "guided_choice"):
        return _choices(text)
    try:
        value = json.loads(text.strip().lower() if name in ("ignore_eos", "json_whitespace") else text)
    except ValueError:
        return text
    several = isinstance(value, list) and value and all(isinstance(one, str) for one in value)
    return text if name == "stop" and not several else value


def _choices(text: str) -> tuple[str, ...]:
    try:
        return choices_of(text)
    except ValueError as e:
        raise RowError("unsupported_parameter", str(e)) from None
