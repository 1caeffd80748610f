"""A result, and its nested parts (completions, log-probabilities, a score), as plain values, and back. The database of results holds whole results,
and output rows hold the parts.

The functions that convert back raise `ValueError`, `TypeError` or `KeyError` for incomplete values, such as JSON's null for an infinity.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen.result import Completion, Result, Score, TokenLogprob, ToolCall

_FIELDS = {f.name: f.default for f in fields(Result) if f.name not in ("row", "embedding")}
_values_of = attrgetter(*_FIELDS)


def result_values(result: Result) -> dict[str, Any]:
    """Returns a result without its row number and without fields that have their defaults. Only its probabilities may be infinite or NaN."""
    found = zip(_FIELDS.items(), _values_of(result), strict=True)
    values = {name: value for (name, default), value in found if value is not default and value != default}
    if result.completions:
        values["completions"] = completion_values(result.completions, token_ids=True, known=ids_known(result))
    if result.tool_calls:
        values["tool_calls"] = plain_calls(result.tool_calls)
    return values | plain_parts(result, CODED_PARTS)


def result_of_values(values: dict[str, Any]) -> Result:
    """Returns the result that `result_values` was given, with row -1. Changes `values`."""
    if "token_ids" in values:
        values["token_ids"] = tuple(values["token_ids"])
    if "completions" in values:
        values["completions"] = completions_of(values["completions"])
    if "tool_calls" in values:
        values["tool_calls"] = calls_of(values["tool_calls"])
    values |= parts_of(values, CODED_PARTS)
    return Result(row=-1, **values)


def completion_values(
    completions: Iterable[Completion], *, token_ids: bool, known: bool = True
) -> list[dict[str, Any]]:
    """Returns completions in their order; with `token_ids`, which are null unless they are `known` (`ids_known`)."""
    choices = []
    for index, c in enumerate(completions):
        choice: dict[str, Any] = {"index": index, "text": c.text, "finish_reason": c.finish_reason}
        if c.reasoning is not None:
            choice["reasoning"] = c.reasoning
        if c.tool_calls:
            choice["tool_calls"] = plain_calls(c.tool_calls)
        if c.valid is not None:
            choice["valid"] = c.valid
        choice["logprobs"] = (
            None if c.logprobs is None else [_token_entry(t) | {"top": [*map(_token_entry, t.top)]} for t in c.logprobs]
        )
        if token_ids:
            choice["token_ids"] = list(c.token_ids) if known else None
        choices.append(choice)
    return choices


def completions_of(choices: Iterable[Mapping[str, Any]]) -> tuple[Completion, ...]:
    """Returns the completions that `completion_values` was given. Token ids come from `token_ids` or from the log-probabilities, if there are any."""
    completions = []
    for choice in choices:
        entries, ids = choice["logprobs"], choice.get("token_ids")
        logprobs = None if entries is None else tuple(_token(e, tuple(map(_token, e["top"]))) for e in entries)
        if ids is None:
            ids = [t.token_id for t in logprobs or ()]
        text, reasoning = choice["text"], choice.get("reasoning")
        completions.append(
            Completion(
                text=None if text is None and reasoning is not None else _as_text(text),
                finish_reason=_as_text(choice["finish_reason"]),
                reasoning=None if reasoning is None else _as_text(reasoning),
                tool_calls=calls_of(choice.get("tool_calls")),
                token_ids=tuple(ids),
                logprobs=logprobs,
                valid=choice.get("valid"),
            )
        )
    return tuple(completions)


def ids_known(result: Result) -> bool:
    """Whether a result has its token ids. One that comes from a finished output may have none."""
    sampled = result.token_ids or any(c.token_ids for c in result.completions)
    generated = not result.failed and result.score is None and result.embedding is None and result.reward is None
    return generated and (bool(sampled) or not result.completion_tokens)


def plain_calls(calls: Iterable[ToolCall]) -> list[dict[str, Any]]:
    """Returns calls of tools in OpenAI's form."""
    return [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls]


def calls_of(values: Iterable[Mapping[str, Any]] | None) -> tuple[ToolCall, ...]:
    """Returns the calls that `plain_calls` was given; none for None."""
    if not values:
        return ()
    calls = [(value["id"], value["function"]) for value in values]
    return tuple(ToolCall(_as_text(name), _as_text(f["name"]), _as_text(f["arguments"])) for name, f in calls)


def _score_of(value: Mapping[str, Any]) -> Score:
    return Score(_as_number(value["logprob"]), int(value["tokens"]), bool(value["greedy"]))


def _plain_logprobs(logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Returns the log-probabilities of a text's tokens. The first token of a prompt has null."""
    return [_token_entry(t) | ({"logprob": None} if math.isnan(t.logprob) else {}) for t in logprobs]


def _logprobs_of(values: Iterable[Mapping[str, Any]]) -> tuple[TokenLogprob, ...]:
    """Returns the log-probabilities that `_plain_logprobs` was given. Raises `ValueError` where JSON has null for an infinity."""
    found = []
    for place, value in enumerate(values):
        if value["logprob"] is None and place:
            raise ValueError("no log-probability")
        logprob = math.nan if value["logprob"] is None else _as_number(value["logprob"])
        found.append(TokenLogprob(_as_text(value["token"]), int(value["token_id"]), logprob))
    return tuple(found)


def plain_embedding(embedding: NDArray[np.float32]) -> list[float]:
    """Returns the numbers of an embedding, rounded to nine significant digits, which tell all float32 numbers apart."""
    exact = embedding.astype(np.float64)
    digits = 8 - np.floor(np.log10(np.abs(exact), where=exact != 0, out=np.zeros_like(exact)))
    up = 10.0 ** np.clip(digits, 0, 300)
    down = 10.0 ** np.clip(-digits, 0, 300)  # a power below 1 would not be exact
    rounded: list[float] = (np.round(exact * up / down) * down / up).tolist()
    return rounded


def embedding_of(values: Any) -> NDArray[np.float32]:
    """Returns the embedding of a list of numbers. Raises `TypeError` if it has anything else."""
    if not {*map(type, values)} <= {float, int, bool}:
        raise TypeError("not a list of numbers")
    return np.array(values, dtype=np.float32)


def probs_of(value: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict[str, float]:
    """Returns the probabilities of choices. A map of Parquet comes as pairs."""
    return {_as_text(choice): _as_number(p) for choice, p in dict(value).items()}


def coded_embedding(embedding: NDArray[np.float32]) -> str:
    """Returns an embedding as little-endian float32 in base64."""
    return base64.b64encode(embedding.astype("<f4").tobytes()).decode()


def decoded_embedding(text: str) -> NDArray[np.float32]:
    """Returns the embedding that `coded_embedding` was given."""
    return np.frombuffer(base64.b64decode(text), dtype="<f4").astype(np.float32)


def _token_entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "token_id": token.token_id, "logprob": token.logprob}


def _token(entry: Mapping[str, Any], top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    return TokenLogprob(_as_text(entry["token"]), int(entry["token_id"]), _as_number(entry["logprob"]), top)


def _as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"not text: {value!r}")
    return value


def _as_number(value: Any) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"not a number: {value!r}")
    return float(value)


Part = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""The functions that make a plain value of a part, and the part of that value."""
PARTS: dict[str, Part] = {
    "choice_probs": (dict, probs_of),
    "score": (asdict, _score_of),
    "prompt_logprobs": (_plain_logprobs, _logprobs_of),
    "embedding": (plain_embedding, embedding_of),
    "reward": (float, float),
}
"""The fields of a result that only some results have (None otherwise), as output rows hold them."""
_parts = attrgetter(*PARTS)
CODED_PARTS = PARTS | {"embedding": (coded_embedding, decoded_embedding)}
"""The same where nobody reads them: an embedding as base64 is shorter than its numbers, and made and read in less time."""


def plain_parts(result: Result, parts: Mapping[str, Part] = PARTS) -> dict[str, Any]:
    """Returns the parts that a result has as plain values."""
    values = {}
    for name, part in zip(parts, _parts(result), strict=True):
        if part is not None:
            values[name] = parts[name][0](part)
    return values


def parts_of(values: Mapping[str, Any], parts: Mapping[str, Part] = PARTS) -> dict[str, Any]:
    """Returns the parts that `plain_parts` made `values` of. A missing or null one is left out."""
    there = [name for name in parts if name in values]  # most results have none
    return {name: parts[name][1](values[name]) for name in there if values[name] is not None}
