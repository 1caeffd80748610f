"""The OpenAI Batch form: how its input rows are recognised, and results as records of its output (docs/openai-batch.md).

Equal results give equal bytes: records contain no times and no random ids.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchgen.records.result_values import coded_embedding, ids_known, plain_calls, plain_embedding
from batchgen.records.rows import Row
from batchgen.result import Completion, Result, TokenLogprob

CHAT = "/v1/chat/completions"
RAW = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
ENDPOINTS = (CHAT, RAW, EMBEDDINGS, RESPONSES)
CREATED = 0
"""The time that the form asks for. It is always 0, so that the same rows give the same bytes."""
_REASONS = ("stop", "length")
_CALLS_REASON = "tool_calls"
"""The finish reason, in this form, of a completion that calls tools."""
_UNLIKELIEST = -9999.0
"""The form's value for minus infinity, which JSON cannot write."""


def is_batch_row(columns: Mapping[str, Any]) -> bool:
    """Whether a row is in the Batch form. A column called `body` (for example of an e-mail) is not enough."""
    body = columns.get("body")
    if body is None:
        return False
    if isinstance(body, Mapping):
        return "url" in columns or "custom_id" in columns or "method" in columns
    url = columns.get("url")
    return isinstance(body, str) and isinstance(url, str) and _served(url) is not None


def lacks_body(columns: Mapping[str, Any]) -> bool:
    """Whether a row is in the Batch form but for its body, which is missing or no object."""
    url = columns.get("url")
    return not is_batch_row(columns) and (
        {"custom_id", "method"} <= columns.keys() or (isinstance(url, str) and _served(url) is not None)
    )


def endpoint(columns: Mapping[str, Any]) -> str | None:
    """One of `ENDPOINTS`: by the row's url or, without one, by what its body has (`CHAT` or `RAW`). None if the url is of another endpoint."""
    url = columns.get("url")
    if url is not None:
        return _served(url) if isinstance(url, str) else None
    body = columns["body"]
    return CHAT if isinstance(body, Mapping) and body.get("messages") is not None else RAW


def _served(url: str) -> str | None:
    return next((known for known in ENDPOINTS if url.rstrip("/").endswith(known)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIForm:
    """The properties that all records of a job share."""

    model: str
    """The model of the job, as the user named it."""
    chat: bool
    """Whether a row that is not in the Batch form is answered with a chat completion."""
    embed: bool = False
    """Whether rows are answered with embeddings."""


def batch_record(row: Row, result: Result, form: OpenAIForm, *, custom_id: str, token_ids: bool) -> dict[str, Any]:
    """Returns the record of one row: a response with status 200, or a null response and an error.

    A completion with calls of tools has them in its message, and ends with `tool_calls` instead of `stop`.
    The record has more than the form only if the result does: `reasoning_content` in the message, `truncated` and `choice_probs` in the body, `stop_reason` and (with
    `token_ids`) `token_ids` in the choices.
    """
    record: dict[str, Any] = {"id": f"batch_req_{row.number}", "custom_id": custom_id, "response": None, "error": None}
    if result.failed:
        record["error"] = {"code": result.error_type, "message": result.error_message}
    else:
        body = _body(row, result, form, token_ids=token_ids)
        if result.truncated:
            body["truncated"] = True
        if result.choice_probs is not None:
            body["choice_probs"] = dict(result.choice_probs)
        record["response"] = {"status_code": 200, "request_id": f"req_{row.number}", "body": body}
    return record


def _body(row: Row, result: Result, form: OpenAIForm, *, token_ids: bool) -> dict[str, Any]:
    if form.embed:
        return _embeddings_answer(row, result, form)
    if is_batch_row(row.columns) and endpoint(row.columns) == RESPONSES:
        return _responses_answer(row, result, form, token_ids=token_ids)
    chat = endpoint(row.columns) == CHAT if is_batch_row(row.columns) else form.chat
    choices = []
    for index, completion in enumerate(_completions(result)):
        choice = _choice(index, completion, chat=chat)
        if token_ids:
            choice["token_ids"] = list(completion.token_ids) if ids_known(result) else None
        choices.append(choice)
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{row.number}",
        "object": "chat.completion" if chat else "text_completion",
        "created": CREATED,
        "model": form.model,
        "choices": choices,
        "usage": {
            "prompt_tokens": result.prompt_tokens,
            "completion_tokens": result.completion_tokens,
            "total_tokens": result.prompt_tokens + result.completion_tokens,
        },
    }
    if result.reasoning_tokens:
        body["usage"]["completion_tokens_details"] = {"reasoning_tokens": result.reasoning_tokens}
    return body


def _embeddings_answer(row: Row, result: Result, form: OpenAIForm) -> dict[str, Any]:
    """The body of an answer of /v1/embeddings. A request may ask for base64: little-endian float32."""
    assert result.embedding is not None
    body = row.columns["body"] if is_batch_row(row.columns) else {}
    asked = (json.loads(body) if isinstance(body, str) else body).get("encoding_format")
    numbers = coded_embedding(result.embedding) if asked == "base64" else plain_embedding(result.embedding)
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": numbers}],
        "model": form.model,
        "usage": {"prompt_tokens": result.prompt_tokens, "total_tokens": result.prompt_tokens},
    }


def _responses_answer(row: Row, result: Result, form: OpenAIForm, *, token_ids: bool) -> dict[str, Any]:
    """The body of an answer of /v1/responses: an item with the thoughts, if there are any, and one with the message, if the answer began."""
    (completion,) = _completions(result)
    whole = completion.finish_reason == "stop"
    output: list[dict[str, Any]] = []
    if completion.reasoning is not None:
        thoughts = [{"type": "reasoning_text", "text": completion.reasoning}]
        output.append({"id": f"rs_{row.number}", "type": "reasoning", "summary": [], "content": thoughts})
    if completion.text is not None:
        message: dict[str, Any] = {
            "id": f"msg_{row.number}",
            "type": "message",
            "status": "completed" if whole else "incomplete",
            "role": "assistant",
            "content": [{"type": "output_text", "text": completion.text, "annotations": []}],
        }
        if token_ids:
            message["token_ids"] = list(completion.token_ids) if ids_known(result) else None
        output.append(message)
    body: dict[str, Any] = {
        "id": f"resp_{row.number}",
        "object": "response",
        "created_at": CREATED,
        "status": "completed" if whole else "incomplete",
        "error": None,
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "model": form.model,
        "output": output,
        "parallel_tool_calls": False,
        "tool_choice": "none",
        "tools": [],
        "usage": {
            "input_tokens": result.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": result.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": result.reasoning_tokens},
            "total_tokens": result.prompt_tokens + result.completion_tokens,
        },
    }
    if completion.finish_reason not in _REASONS:
        body["stop_reason"] = completion.finish_reason
    return body


def _completions(result: Result) -> Sequence[Completion]:
    if result.completions:
        return result.completions
    assert result.finish_reason is not None  # rows that are only scored do not fit this form: `--score` is refused
    return (
        Completion(
            text=result.text,
            finish_reason=result.finish_reason,
            reasoning=result.reasoning,
            tool_calls=result.tool_calls,
            token_ids=result.token_ids,
        ),
    )


def _choice(index: int, completion: Completion, *, chat: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index}
    if chat:
        choice["message"] = {"role": "assistant", "content": completion.text, "refusal": None}
        if completion.reasoning is not None:
            choice["message"]["reasoning_content"] = completion.reasoning
        if completion.tool_calls:
            choice["message"]["content"] = completion.text or None
            choice["message"]["tool_calls"] = plain_calls(completion.tool_calls)
    else:
        choice["text"] = completion.text or ""
    tokens = completion.logprobs
    if tokens is None:
        choice["logprobs"] = None
    else:
        choice["logprobs"] = _chat_logprobs(tokens) if chat else _raw_logprobs(tokens, completion.text or "")
    known = completion.finish_reason in _REASONS
    choice["finish_reason"] = completion.finish_reason if known else "length"  # a time limit is also a limit
    if chat and completion.tool_calls and completion.finish_reason == "stop":
        choice["finish_reason"] = _CALLS_REASON
    if not known:
        choice["stop_reason"] = completion.finish_reason
    return choice


def _chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "content": [_logprob_entry(t) | {"top_logprobs": [_logprob_entry(top) for top in t.top]} for t in tokens],
        "refusal": None,
    }


def _logprob_entry(token: TokenLogprob) -> dict[str, Any]:
    whole = "\ufffd" not in token.token  # otherwise it is part of a character, and its bytes are not known
    return {
        "token": token.token,
        "logprob": _finite(token.logprob),
        "bytes": list(token.token.encode("utf-8", "backslashreplace")) if whole else None,
    }


def _raw_logprobs(tokens: Sequence[TokenLogprob], text: str) -> dict[str, Any]:
    """Returns the log-probabilities in the form of /v1/completions. An offset is the number of characters before a token, at most the length of the text: end tokens and stop strings come after it."""
    offsets, place = [], 0
    for token in tokens:
        offsets.append(min(place, len(text)))
        place += len(token.token)
    return {
        "text_offset": offsets,
        "token_logprobs": [_finite(t.logprob) for t in tokens],
        "tokens": [t.token for t in tokens],
        "top_logprobs": [_tops(t) for t in tokens] if any(t.top for t in tokens) else None,
    }


def _tops(token: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens, and the sampled one if it is not among them. Of tokens with the same text, the likeliest."""
    tops: dict[str, float] = {}
    for t in (*token.top, token):
        tops.setdefault(t.token, _finite(t.logprob))
    return tops


def _finite(logprob: float) -> float:
    return _UNLIKELIEST if logprob == -math.inf else logprob
