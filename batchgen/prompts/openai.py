"""Reads a row in the OpenAI Batch form (`custom_id`, `method`, `url`, `body`). Renders nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchgen.errors import RowError
from batchgen.json_values import kind
from batchgen.prompts.params import translated
from batchgen.records.openai_batch import CHAT, EMBEDDINGS, ENDPOINTS, RAW, RESPONSES, endpoint

# Fields of a body that are not parameters of the completion.
_IGNORED = frozenset({
    "model", "messages", "prompt", "chat_template_kwargs",
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "priority", "request_id", "cache_salt",
})  # fmt: skip
_VARIABLES = frozenset({"reasoning_effort"})
"""Parameters of a chat that only its template can follow."""
_CHAT_ONLY = _VARIABLES | {"tools"}
_CHATS = (CHAT, RESPONSES)


@dataclass(frozen=True, slots=True)
class Body:
    """One request of the OpenAI API."""

    url: str
    """One of `ENDPOINTS`."""
    prompt: Any
    """Its `messages`, `prompt` or `input`, not yet checked."""
    where: str
    """The name of that field, such as `body.messages`."""
    model: str | None
    params: Mapping[str, Any]
    """Its sampling parameters, under batchgen's names."""
    variables: Any = None
    """Variables for the chat template, not yet checked: `chat_template_kwargs`, and fields that only a template can use."""
    tools: Any = None
    """The tools of a chat, not yet checked."""
    calls: bool = False
    """Whether the answer may call them (`tool_choice` is not `none`)."""

    @property
    def chat(self) -> bool:
        """Whether it is for /v1/chat/completions or /v1/responses; the prompts of /v1/completions and /v1/embeddings are raw."""
        return self.url in _CHATS


def is_chat(columns: Mapping[str, Any]) -> bool:
    """Whether a row in the Batch form has messages. Raises `RowError` for an unknown endpoint."""
    return _endpoint(columns) in _CHATS


def _endpoint(columns: Mapping[str, Any]) -> str:
    known = endpoint(columns)
    if known is None:
        url = columns["url"]
        shown = repr(url) if isinstance(url, str) else kind(url)
        raise RowError("invalid_row", f"url is {shown}; use {', '.join(ENDPOINTS[:-1])} or {ENDPOINTS[-1]}")
    return known


def read_body(columns: Mapping[str, Any]) -> Body:
    """Reads the request of a row in the Batch form. Raises `RowError`."""
    method = columns.get("method")
    if method is not None and (not isinstance(method, str) or method.upper() != "POST"):
        raise RowError("invalid_row", f"method is {method!r}; it must be POST")
    url = _endpoint(columns)
    body = _object(columns["body"])
    if url == EMBEDDINGS:
        return _embeddings_request(body)
    if url == RESPONSES:
        return _responses_request(body)
    chat = url == CHAT
    column, other = ("messages", "prompt") if chat else ("prompt", "messages")
    if body.get(column) is None:
        hint = f"; it has {other}, which belongs to {RAW if chat else CHAT}" if body.get(other) is not None else ""
        raise RowError("invalid_row", f"body has no {column}{hint}")
    ignored = _IGNORED | _CHAT_ONLY if chat else _IGNORED
    return Body(
        url=url,
        prompt=body[column],
        where=f"body.{column}",
        model=_model(body),
        variables=_variables(body),
        tools=body.get("tools") if chat else None,
        calls=body.get("tool_choice") != "none",
        params=translated({name: value for name, value in body.items() if name not in ignored}),
    )


def _embeddings_request(body: Mapping[str, Any]) -> Body:
    """Reads a request of /v1/embeddings."""
    if body.get("input") is None:
        raise RowError("invalid_row", "body has no input")
    if body.get("encoding_format") not in (None, "float", "base64"):
        raise RowError(
            "unsupported_parameter", f"encoding_format must be float or base64, not {body['encoding_format']!r}"
        )
    if body.get("dimensions") is not None:
        raise RowError("unsupported_parameter", f"dimensions is not supported: {body['dimensions']}")
    return Body(
        url=EMBEDDINGS,
        prompt=body["input"],
        where="body.input",
        model=_model(body),
        params=translated(
            {n: v for n, v in body.items() if n not in _IGNORED | {"input", "encoding_format", "dimensions"}}
        ),
    )


_OF_RESPONSES = frozenset({"input", "instructions", "max_output_tokens", "text", "reasoning"})
_NOTHING_ASKED: Mapping[str, tuple[Any, ...]] = {
    "background": (False,), "conversation": (), "include": ([],), "max_tool_calls": (), "previous_response_id": (),
    "prompt": (), "truncation": ("disabled",), "stream_options": ({},),
}  # fmt: skip
"""Fields of /v1/responses that batchgen does not support, and the values (beside null) that ask for nothing."""
_TEXT_PARTS = ("input_text", "output_text")


def _responses_request(body: Mapping[str, Any]) -> Body:
    """Reads a request of /v1/responses with text: the same as one of /v1/chat/completions under other names."""
    if body.get("input") is None:
        raise RowError("invalid_row", "body has no input")
    for name, neutral in _NOTHING_ASKED.items():
        if body.get(name) is not None and body[name] not in neutral:
            raise RowError("unsupported_parameter", f"{name} is not supported in {RESPONSES}")
    given = {n: v for n, v in body.items() if n not in _IGNORED | _OF_RESPONSES | _NOTHING_ASKED.keys()}
    text = _part_of(body, "text", ("format", "verbosity"))
    wanted = text.get("format")
    if isinstance(wanted, Mapping) and wanted.get("type") == "json_schema":
        wanted = {"type": "json_schema", "json_schema": wanted}  # as in a chat
    effort = _part_of(body, "reasoning", ("effort", "summary", "generate_summary")).get("effort")
    variables = {"chat_template_kwargs": body.get("chat_template_kwargs"), "reasoning_effort": effort}
    named = {"max_tokens": body.get("max_output_tokens"), "response_format": wanted}
    return Body(
        url=RESPONSES,
        prompt=_conversation(body),
        where="body.input",
        model=_model(body),
        variables=_variables(variables),
        params=translated(given | {name: value for name, value in named.items() if value is not None}),
    )


def _part_of(body: Mapping[str, Any], name: str, known: Sequence[str]) -> Mapping[str, Any]:
    """Returns the object in a field of a body; {} for null. Raises `RowError` if it is no object or has fields that are not known."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RowError("invalid_row", f"body.{name} must be an object, not {kind(value)}")
    other = next((field for field in value if field not in known and value[field] is not None), None)
    if other is not None:
        raise RowError("unsupported_parameter", f"{name}.{other} is not supported")
    return value


def _conversation(body: Mapping[str, Any]) -> Any:
    """Returns the `input` of a response as messages of a chat, after the `instructions`. An input that is not a list of messages is returned as it is."""
    given, instructions = body["input"], body.get("instructions")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(messages, list) or not all(isinstance(item, Mapping) for item in messages):
        return given
    messages = [_message_of_item(item, place) for place, item in enumerate(messages)]
    if instructions is None:
        return messages
    if not isinstance(instructions, str):
        raise RowError("invalid_row", f"body.instructions must be text, not {kind(instructions)}")
    return [{"role": "system", "content": instructions}, *messages]


def _message_of_item(item: Mapping[str, Any], place: int) -> dict[str, Any]:
    if item.get("type") not in (None, "message"):
        raise RowError(
            "unsupported_content", f"body.input[{place}] has type {item['type']!r}; only messages can be sent"
        )
    message = {name: item[name] for name in ("role", "content") if name in item}
    parts = message.get("content")
    if isinstance(parts, list):
        message["content"] = [
            {**part, "type": "text"} if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS else part
            for part in parts
        ]
    return message


def _object(body: Any) -> Mapping[str, Any]:
    if isinstance(body, str):
        try:
            body = json.loads(body)
        except ValueError:
            raise RowError("invalid_row", "body is text that is not JSON") from None
    if not isinstance(body, Mapping):
        raise RowError("invalid_row", f"body must be an object, not {kind(body)}")
    return body


def _model(body: Mapping[str, Any]) -> str | None:
    model = body.get("model")
    return model if isinstance(model, str) else None


def _variables(body: Mapping[str, Any]) -> Any:
    given = body.get("chat_template_kwargs")
    more = {name: body[name] for name in _VARIABLES if body.get(name) is not None}
    if given is None:
        return more or None
    return {**more, **given} if isinstance(given, Mapping) else given
