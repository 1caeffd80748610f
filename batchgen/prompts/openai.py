"""A row in the OpenAI Batch form (`custom_id`, `method`, `url`, `body`): what it asks for. Renders nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.errors import RowError
from batchgen.prompts.messages import kind
from batchgen.prompts.params import supported
from batchgen.records.openai_batch import CHAT, RAW, endpoint

# Of a body, and neither a prompt nor a parameter that changes its completion.
_IGNORED = frozenset({
    "model", "messages", "prompt", "chat_template_kwargs",
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "priority", "request_id", "cache_salt",
})  # fmt: skip


_TRANSLATED = frozenset({"logprobs", "top_logprobs", "response_format", "structured_outputs"})
_GUIDED = {"json": "json_schema", "regex": "regex", "choice": "choices"}
"""vLLM's names for constraints, in `structured_outputs`; alone they are `guided_json` and so on."""


@dataclass(frozen=True, slots=True)
class Body:
    """One request of the OpenAI API."""

    chat: bool
    """/v1/chat/completions; otherwise /v1/completions, whose prompt is raw."""
    prompt: Any
    """Its `messages` or `prompt`, not yet checked."""
    model: str | None
    variables: Any
    """Its `chat_template_kwargs`, not yet checked."""
    params: Mapping[str, Any]
    """Its sampling parameters, under our names."""


def is_chat(columns: Mapping[str, Any]) -> bool:
    """Whether a row in the Batch form has messages. Raises `RowError` for an endpoint that is not served here."""
    known = endpoint(columns)
    if known is None:
        url = columns["url"]
        shown = repr(url) if isinstance(url, str) else kind(url)
        raise RowError("invalid_row", f"url is {shown}; {RAW} and {CHAT} can be served")
    return known == CHAT


def read_body(columns: Mapping[str, Any]) -> Body:
    """What a row in the Batch form asks for. Raises `RowError`."""
    method = columns.get("method")
    if method is not None and (not isinstance(method, str) or method.upper() != "POST"):
        raise RowError("invalid_row", f"method is {method!r}; only POST makes a completion")
    chat = is_chat(columns)
    body = _object(columns["body"])
    column, other = ("messages", "prompt") if chat else ("prompt", "messages")
    if body.get(column) is None:
        hint = f"; it has {other}, which {RAW if chat else CHAT} takes" if body.get(other) is not None else ""
        raise RowError("invalid_row", f"body has no {column}{hint}")
    model = body.get("model")
    return Body(
        chat=chat,
        prompt=body[column],
        model=model if isinstance(model, str) else None,
        variables=body.get("chat_template_kwargs"),
        params=_params(body),
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


def _params(body: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in body.items() if name not in _IGNORED and name not in _TRANSLATED}
    params = supported(own)
    most = params.pop("max_completion_tokens", None)  # the newer name for max_tokens, which it replaces
    if most is not None:
        params["max_tokens"] = most
    if params.get("top_k") == -1:  # vLLM's word for off
        params["top_k"] = 0
    params |= _logprobs(body) | _response_format(body.get("response_format"))
    outputs = _structured_outputs(body.get("structured_outputs"))
    for theirs, ours in _GUIDED.items():
        value = params.pop(f"guided_{theirs}", None)
        value = outputs.get(theirs, value)
        if value is not None:
            params[ours] = value
    return params


def _structured_outputs(wanted: Any) -> Mapping[str, Any]:
    """What is asked for, under their names: others than ours are refused, for without them the text would not be what was meant."""
    if wanted is None:
        return {}
    if not isinstance(wanted, Mapping):
        raise RowError("unsupported_parameter", f"structured_outputs must be an object, not {kind(wanted)}")
    asked = {name: value for name, value in wanted.items() if value is not None}
    other = next((name for name, value in asked.items() if name not in _GUIDED and value is not False), None)
    if other is not None:
        raise RowError("unsupported_parameter", f"structured_outputs.{other} is not supported")
    return asked


def _logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    """A number in completions; in chat completions a switch, and the number beside it."""
    wanted, top = body.get("logprobs"), body.get("top_logprobs")
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
