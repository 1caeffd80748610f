"""Reads a row in the OpenAI Batch form (`custom_id`, `method`, `url`, `body`). Renders nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.errors import RowError
from batchgen.prompts.messages import kind
from batchgen.prompts.params import translated
from batchgen.records.openai_batch import CHAT, RAW, endpoint

# Fields of a body that are not parameters of the completion.
_IGNORED = frozenset({
    "model", "messages", "prompt", "chat_template_kwargs",
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "priority", "request_id", "cache_salt",
})  # fmt: skip
_VARIABLES = frozenset({"reasoning_effort"})
"""Parameters of a chat that only its template can follow."""
_CHAT_ONLY = _VARIABLES | {"tools"}


@dataclass(frozen=True, slots=True)
class Body:
    """One request of the OpenAI API."""

    chat: bool
    """/v1/chat/completions; otherwise /v1/completions, whose prompt is raw."""
    prompt: Any
    """Its `messages` or `prompt`, not yet checked."""
    model: str | None
    variables: Any
    """Variables for the chat template, not yet checked: `chat_template_kwargs`, and fields that only a template can use."""
    tools: Any
    """The tools of a chat, not yet checked."""
    calls: bool
    """Whether the answer may call them (`tool_choice` is not `none`)."""
    params: Mapping[str, Any]
    """Its sampling parameters, under batchgen's names."""


def is_chat(columns: Mapping[str, Any]) -> bool:
    """Whether a row in the Batch form has messages. Raises `RowError` for an unknown endpoint."""
    known = endpoint(columns)
    if known is None:
        url = columns["url"]
        shown = repr(url) if isinstance(url, str) else kind(url)
        raise RowError("invalid_row", f"url is {shown}; use {RAW} or {CHAT}")
    return known == CHAT


def read_body(columns: Mapping[str, Any]) -> Body:
    """Reads the request of a row in the Batch form. Raises `RowError`."""
    method = columns.get("method")
    if method is not None and (not isinstance(method, str) or method.upper() != "POST"):
        raise RowError("invalid_row", f"method is {method!r}; it must be POST")
    chat = is_chat(columns)
    body = _object(columns["body"])
    column, other = ("messages", "prompt") if chat else ("prompt", "messages")
    if body.get(column) is None:
        hint = f"; it has {other}, which belongs to {RAW if chat else CHAT}" if body.get(other) is not None else ""
        raise RowError("invalid_row", f"body has no {column}{hint}")
    model = body.get("model")
    ignored = _IGNORED | _CHAT_ONLY if chat else _IGNORED
    return Body(
        chat=chat,
        prompt=body[column],
        model=model if isinstance(model, str) else None,
        variables=_variables(body),
        tools=body.get("tools") if chat else None,
        calls=body.get("tool_choice") != "none",
        params=translated({name: value for name, value in body.items() if name not in ignored}),
    )


def _object(body: Any) -> Mapping[str, Any]:
    if isinstance(body, str):
        try:
            body = json.loads(body)
        except ValueError:
            raise RowError("invalid_row", "body is text that is not JSON") from None
    if not isinstance(body, Mapping):
        raise RowError("invalid_row", f"body must be an object, not {kind(body)}")
    return body


def _variables(body: Mapping[str, Any]) -> Any:
    given = body.get("chat_template_kwargs")
    more = {name: body[name] for name in _VARIABLES if body.get(name) is not None}
    if given is None:
        return more or None
    return {**more, **given} if isinstance(given, Mapping) else given
