"""How a row in the OpenAI Batch form (`custom_id`, `method`, `url`, `body`) is told, and which endpoint it is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHAT = "/v1/chat/completions"
RAW = "/v1/completions"


def is_batch_row(columns: Mapping[str, Any]) -> bool:
    """Whether a row is in the Batch form. A mere column called `body` (of an e-mail, say) is not enough."""
    body = columns.get("body")
    if body is None:
        return False
    if isinstance(body, Mapping):
        return "url" in columns or "custom_id" in columns or "method" in columns
    url = columns.get("url")
    return isinstance(body, str) and isinstance(url, str) and _served(url) is not None


def endpoint(columns: Mapping[str, Any]) -> str | None:
    """`CHAT` or `RAW`: by the url of a row in the Batch form, without one by what its body has; None for what is not served here."""
    url = columns.get("url")
    if url is not None:
        return _served(url) if isinstance(url, str) else None
    body = columns["body"]
    return CHAT if isinstance(body, Mapping) and body.get("messages") is not None else RAW


def _served(url: str) -> str | None:
    return next((known for known in (CHAT, RAW) if url.rstrip("/").endswith(known)), None)
