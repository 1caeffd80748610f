"""Checks a row's messages and puts others, texts and images into them. Knows nothing of the chat template and of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from batchgen.errors import RowError
from batchgen.json_values import kind, plain
from batchgen.records.images import IMAGE_PARTS, NO_IMAGE, ImageSource, image_of_part
from batchgen.records.jsonl import PYTHON_HINT
from batchgen.stats import counted

Message = dict[str, Any]
_TEXT_ALONE = "only text can be sent"


def conversation(value: Any, where: str, name: str, no_images: str | None) -> list[Message]:
    """Returns the messages of a row, each content as one text, or as a list of several parts or images; the `source` of an image's part is its
    `ImageSource`, or None if it names no image (`with_images`).

    `value` is a list of messages, or its JSON as text (in a CSV file). Null keys of a message and of a call are dropped: OpenAI's own answers have
    them. `no_images`: why the model is not shown images; None if it is. Raises `RowError("invalid_row")`; its message calls the list `where` and a message `name[0]`.
    """
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = None
        value = parsed if isinstance(parsed, list) else value
    if not isinstance(value, list | tuple):
        hint = PYTHON_HINT if isinstance(value, str) and value.startswith("[{'") else ""  # pandas writes lists so
        raise RowError("invalid_row", f"{where} must be a list of messages, not {kind(value)}{hint}")
    if not value:
        raise RowError("invalid_row", f"{where} is an empty list")
    return [_message(message, f"{name}[{i}]", no_images) for i, message in enumerate(value)]


def _message(value: Any, where: str, no_images: str | None) -> Message:
    if not isinstance(value, Mapping):
        raise RowError("invalid_row", f"{where} must be an object with role and content, not {kind(value)}")
    if "role" not in value:
        there = ", ".join(repr(name) for name in value) or "no fields"
        raise RowError("invalid_row", f"{where} has no role: a message has role and content, and this one {there}")
    role = value["role"]
    if not isinstance(role, str) or not role:
        raise RowError("invalid_row", f"{where}.role must be text, not {'empty' if role == '' else kind(role)}")
    content = value.get("content")
    message = _with_values(value)
    if message.get("tool_calls"):
        message["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
    if content is None and role == "assistant" and (message.get("tool_calls") or message.get("reasoning_content")):
        content = ""  # OpenAI writes null in a turn that only calls tools
    message["content"] = content if isinstance(content, str) else _content(content, f"{where}.content", no_images)
    return message


def _calls(calls: Any, where: str) -> list[Any]:
    """Returns a turn's tool calls with their arguments as objects, which templates expect. OpenAI has the arguments as JSON text."""
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise RowError("invalid_row", f"{where} must be a list of objects")
    found = []
    for call in calls:
        call = _with_values(call)
        function = call.get("function")
        if isinstance(function, Mapping):
            call["function"] = function = _with_values(function)
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except ValueError:
                arguments = None
            if isinstance(arguments, Mapping):
                call = {**call, "function": {**function, "arguments": arguments}}
        found.append(call)
    return found


def _with_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an object without its null fields; those of its values stay."""
    return {name: item for name, item in given.items() if item is not None}


def without_nulls(value: Any) -> Any:
    """Returns the value without null fields, at any depth. A map of Arrow, which is a list of pairs, becomes an object."""
    if isinstance(value, list) and value and all(isinstance(pair, tuple) for pair in value):
        with suppress(TypeError):  # a key that is an object or a list
            value = dict(value)
    if isinstance(value, Mapping):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def objects(value: Any) -> list[Any] | None:
    """Returns a list of objects (`tools` or `documents`) for the chat template, given as a list or as JSON text; None for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if not isinstance(value, list | tuple) or not all(isinstance(item, Mapping) for item in value):
        return None
    return [plain(item) for item in value]


def _content(parts: Any, where: str, no_images: str | None) -> str | list[Message]:
    """Returns a content's parts; a text if there is only one part, a text."""
    if not isinstance(parts, list | tuple):
        raise RowError("invalid_row", f"{where} must be text or a list of text parts, not {kind(parts)}")
    found = [_part(part, f"{where}[{i}]", no_images) for i, part in enumerate(parts)]
    return found if len(found) > 1 or any("source" in part for part in found) else "".join(p["text"] for p in found)


def _part(part: Any, where: str, no_images: str | None) -> Message:
    if not isinstance(part, Mapping):
        raise RowError("invalid_row", f"{where} must be an object with type and text, not {kind(part)}")
    shape = part.get("type")
    if shape in IMAGE_PARTS and no_images is None:
        value = image_of_part(part, where)
        return image_part(value, where) if value is not None else {"type": "image", "source": None, "where": where}
    if shape != "text":
        why = "only text and images can be sent"
        if no_images is not None:
            why = no_images if shape in IMAGE_PARTS else _TEXT_ALONE
        raise RowError(
            "unsupported_content" if isinstance(shape, str) else "invalid_row", f"{where} has type {shape!r}; {why}"
        )
    if not isinstance(part.get("text"), str):
        raise RowError("invalid_row", f"{where}.text must be text, not {kind(part.get('text'))}")
    return text_part(part["text"])


def image_part(value: str | bytes, where: str) -> Message:
    """Returns the part of a message for an image."""
    return {"type": "image", "source": ImageSource(value, where)}


def with_images(messages: list[Message], images: Sequence[Message], where: str) -> list[Message]:
    """Returns the conversation with images of `--image-column`: in the parts of images that name none, in order; without such parts, at the start of
    the first user message. Raises `RowError` if there are more or fewer such parts than images.
    """
    places = [part for part in _parts_of(messages) if _lacks_image(part)]
    if len(places) > len(images):
        raise RowError(
            "invalid_image", f"{places[len(images)]['where']} {NO_IMAGE}, unless --image-column names one for it"
        )
    if places and len(images) > len(places):
        raise RowError(
            "invalid_row",
            f"{where} has {counted(len(places), 'part')} for images of --image-column, and the row {len(images)} images",
        )
    if not places:
        return with_start(messages, [*images], where, "--image-column") if images else messages
    left = iter(images)
    return [
        message if isinstance(message["content"], str)
        else {**message, "content": [next(left) if _lacks_image(part) else part for part in message["content"]]}
        for message in messages
    ]  # fmt: skip


def _lacks_image(part: Message) -> bool:
    return part.get("source", "") is None


def images_of(messages: Sequence[Message], file: str) -> tuple[ImageSource, ...]:
    """Returns the images of a conversation, in order. `file` is the row's."""
    return tuple(replace(part["source"], file=file) for part in _parts_of(messages) if "source" in part)


def _parts_of(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields the parts of all contents that are not one text."""
    for message in messages:
        if not isinstance(message["content"], str):
            yield from message["content"]


def with_start(messages: Sequence[Message], start: str | list[Message], where: str, option: str) -> list[Message]:
    """Returns the conversation with what an option gives at the start of its first user message: a text, or parts. Raises `RowError` without one."""
    for i, message in enumerate(messages):
        if message["role"] == "user":
            content = message["content"]
            if isinstance(start, str) and isinstance(content, str):
                changed: str | list[Message] = start + content
            elif isinstance(start, str) and "text" in content[0]:
                changed = [text_part(start + content[0]["text"]), *content[1:]]
            else:
                changed = [*_parts(start), *_parts(content)]
            return [*messages[:i], {**message, "content": changed}, *messages[i + 1 :]]
    raise RowError("invalid_row", f"{where} has no user message, which {option} needs")


def with_system(messages: Sequence[Message], system: str) -> list[Message]:
    """Returns the conversation with a system message first, unless it already begins with one."""
    own = messages[0]["role"] in ("system", "developer")
    return [*messages] if own else [{"role": "system", "content": system}, *messages]


def _parts(content: str | list[Message]) -> list[Message]:
    return [text_part(content)] if isinstance(content, str) else content


def text_part(text: str) -> Message:
    """Returns the part of a message for a text."""
    return {"type": "text", "text": text}
