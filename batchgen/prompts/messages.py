"""Conversations: what a row gives as messages, checked and made plain; and the model's chat template over them. No tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from batchgen.config import PromptConfig
from batchgen.errors import BatchgenError, RowError, UsageError
from batchgen.parsers.thinking import thinking_off

Message = dict[str, Any]
_MARK = "batchgen-trial"

# Set by us, or not the template's to see: apply_chat_template takes them for arguments of its own.
_RESERVED = frozenset({
    "self", "conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
})  # fmt: skip


def kind(value: Any) -> str:
    """What a value is, in the words of a data file."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, list | tuple) else f"a {type(value).__name__}"


def first_line(error: BaseException) -> str:
    """An error's words for a row's message: one line of sane length that can be written as UTF-8."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300].encode("utf-8", "backslashreplace").decode()


def conversation(value: Any, where: str, name: str) -> list[Message]:
    """The messages of a row, every content as one text; what is said calls the whole `where` and a message `name[0]`.

    A list of messages, or its JSON as text (in a CSV file). Keys that are null are left out, as Parquet fills them in.
    Raises `RowError("invalid_row")`.
    """
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = None
        value = parsed if isinstance(parsed, list) else value
    if not isinstance(value, list | tuple):
        raise RowError("invalid_row", f"{where} must be a list of messages, not {kind(value)}")
    if not value:
        raise RowError("invalid_row", f"{where} is an empty list")
    return [_message(message, f"{name}[{i}]") for i, message in enumerate(value)]


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise RowError("invalid_row", f"{where} must be an object with role and content, not {kind(value)}")
    role = value.get("role")
    if not isinstance(role, str) or not role:
        raise RowError("invalid_row", f"{where}.role must be text, not {'empty' if role == '' else kind(role)}")
    content = value.get("content")
    message: Message = {name: item for name, item in value.items() if item is not None}
    if message.get("tool_calls"):
        message["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
    if content is None and role == "assistant" and (message.get("tool_calls") or message.get("reasoning_content")):
        content = ""  # as OpenAI writes a turn that only calls tools
    message["content"] = content if isinstance(content, str) else _joined(content, f"{where}.content")
    return message


def _calls(calls: Any, where: str) -> list[Any]:
    """A turn's calls of tools, their arguments as objects, which is what templates write out; OpenAI has them as JSON text."""
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise RowError("invalid_row", f"{where} must be a list of objects")
    found = []
    for call in calls:
        call = without_nulls(call)
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except ValueError:
                arguments = None
            if isinstance(arguments, Mapping):
                call = {**call, "function": {**function, "arguments": arguments}}
        found.append(call)
    return found


def without_nulls(value: Any) -> Any:
    """The value without its fields that are null, however deep: a Parquet file fills them in where objects differ."""
    if isinstance(value, Mapping):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def objects(value: Any) -> list[Any] | None:
    """A list of objects, or its JSON as text, as the chat template gets `tools` and `documents`; None for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if not isinstance(value, list | tuple) or not all(isinstance(item, Mapping) for item in value):
        return None
    return [without_nulls(item) for item in value]


def _joined(parts: Any, where: str) -> str:
    """The texts of a content's parts, one after the other, nothing put between."""
    if not isinstance(parts, list | tuple):
        raise RowError("invalid_row", f"{where} must be text or a list of text parts, not {kind(parts)}")
    texts = []
    for i, part in enumerate(parts):
        if not isinstance(part, Mapping):
            raise RowError("invalid_row", f"{where}[{i}] must be an object with type and text, not {kind(part)}")
        if part.get("type") != "text":
            asked = f"{where}[{i}] has type {part.get('type')!r}; only text can be sent"
            raise RowError("unsupported_content" if isinstance(part.get("type"), str) else "invalid_row", asked)
        if not isinstance(part.get("text"), str):
            raise RowError("invalid_row", f"{where}[{i}].text must be text, not {kind(part.get('text'))}")
        texts.append(part["text"])
    return "".join(texts)


def with_prefix(messages: Sequence[Message], prefix: str, where: str) -> list[Message]:
    """The conversation with `prefix` at the start of its first user message."""
    for i, message in enumerate(messages):
        if message["role"] == "user":
            return [*messages[:i], {**message, "content": prefix + message["content"]}, *messages[i + 1 :]]
    raise RowError("invalid_row", f"{where} has no user message for --prefix to stand in")


def with_system(messages: Sequence[Message], system: str) -> list[Message]:
    """The conversation with a system message first, unless it begins with one of its own."""
    own = messages[0]["role"] in ("system", "developer")
    return [*messages] if own else [{"role": "system", "content": system}, *messages]


def _parts(text: str) -> list[dict[str, str]]:
    """A content of one part."""
    return [{"type": "text", "text": text}]


class ChatTemplate:
    """The model's chat template, or the user's in its place."""

    def __init__(self, tokenizer: Any, source: str | None, variables: Mapping[str, Any]) -> None:
        """Raises `UsageError` where the template is no Jinja, or `variables` holds a name that is not a template's."""
        reserved = sorted(_RESERVED & variables.keys())
        if reserved:
            raise UsageError(f"--chat-template-kwargs {reserved[0]!r} is not the template's to set", "leave it out")
        self._tokenizer = tokenizer
        self._source = source
        self._variables = variables
        self._roles_in_parts: frozenset[str] = frozenset()
        self._check_syntax()
        for role in ("user", "system", "assistant"):
            if not self._shows(role, _MARK) and self._shows(role, _parts(_MARK)):
                self._roles_in_parts |= {role}

    @staticmethod
    def exists(tokenizer: Any) -> bool:
        """Whether the model has a template: one, or several with a default."""
        template = tokenizer.chat_template
        return "default" in template if isinstance(template, dict) else template is not None

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        """The prompt's text, special tokens written out; a last message of the assistant is left open, to be continued.

        Raises `RowError("template_error")` with the template's own words.
        """
        continued = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        if not self.uses("developer"):  # OpenAI's newer name of the system's role
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        try:
            return self._apply(messages, continued, {**self._variables, **variables} if variables else self._variables)
        except BatchgenError:  # a signal's, or of all rows
            raise
        except Exception as e:  # noqa: BLE001 - a template is a program of its own and raises what it likes
            reason = f"chat template: {first_line(e)}"
            if continued and isinstance(e, ValueError) and "continue_final_message" in reason:
                reason = "chat template: it changes the last assistant message, which so cannot be continued"
            raise RowError("template_error", reason) from None

    def thinking_off(self) -> dict[str, bool]:
        """The variables that switch thinking off; none where the template has no switch."""
        return thinking_off(str(self._tokenizer.get_chat_template(self._source)))

    def uses(self, name: str) -> bool:
        """Whether the template mentions a name at all."""
        own = self._tokenizer.chat_template if self._source is None else self._source
        return any(name in text for text in (own.values() if isinstance(own, dict) else (own,)))

    def check_variables(self, variables: Any, where: str) -> Mapping[str, Any]:
        """A row's own template variables (`chat_template_kwargs` of a body), {} for null. Raises `RowError`."""
        if variables is None:
            return {}
        if not isinstance(variables, Mapping):
            raise RowError("invalid_row", f"{where} must be an object, not {kind(variables)}")
        reserved = sorted(_RESERVED & variables.keys())
        if reserved:
            raise RowError("unsupported_parameter", f"{where}.{reserved[0]} is not the template's to set")
        return variables

    def _shows(self, role: str, content: Any) -> bool:
        """Whether a message's text is in the prompt when its content is given like this. Templates of multimodal models may
        look for a list of parts, and leave out what is plain text without a word.
        """
        user = {"role": "user", "content": "x"}
        message = {"role": role, "content": content}
        turns = {"user": [message], "system": [message, user], "assistant": [user, message, user]}
        try:
            return _MARK in self._apply(turns[role], False, self._variables)
        except BatchgenError:
            raise
        except Exception:  # noqa: BLE001 - the template refuses this conversation
            return False

    def _apply(self, messages: Sequence[Message], continued: bool, variables: Mapping[str, Any]) -> str:
        given = [
            {**m, "content": _parts(m["content"])}
            if m["role"] in self._roles_in_parts and isinstance(m["content"], str)
            else m
            for m in messages
        ]
        return str(
            self._tokenizer.apply_chat_template(
                given,
                chat_template=self._source,
                tokenize=False,
                add_generation_prompt=not continued,
                continue_final_message=continued,
                **variables,
            )
        )

    def _check_syntax(self) -> None:
        """By a trial, because transformers' dialect has statements that plain Jinja does not know."""
        from jinja2 import TemplateSyntaxError

        which = "the model's chat template" if self._source is None else "--chat-template"
        try:
            self._apply([{"role": "user", "content": "x"}], False, self._variables)
        except TemplateSyntaxError as e:
            raise UsageError(
                f"{which} is not valid Jinja (line {e.lineno}): {e.message}", "correct it, or give another"
            ) from None
        except RecursionError as e:
            raise UsageError(f"{which} does not work for a short message: {e}", "correct it, or give another") from None
        except BatchgenError:
            raise
        except Exception:  # noqa: BLE001 - a template may well refuse this conversation; rows are told one by one
            pass


def chosen_template(tokenizer: Any, prompts: PromptConfig) -> ChatTemplate | None:
    """The chat template that prompts go through; None sends them raw.

    Raises `UsageError` for options that contradict each other or need a template where there is none.
    """
    given = [
        option
        for option, there in (
            ("--system", prompts.system is not None),
            ("--chat-template", prompts.chat_template is not None),
            ("--chat-template-kwargs", bool(prompts.chat_template_kwargs)),
        )
        if there
    ]
    if prompts.chat is False:
        if given:
            raise UsageError(
                f"{given[0]} has no place in a raw prompt, which --no-chat asks for", "leave one of them out"
            )
        return None
    if prompts.chat_template is not None or ChatTemplate.exists(tokenizer):
        return ChatTemplate(tokenizer, prompts.chat_template, prompts.chat_template_kwargs)
    several = tokenizer.chat_template
    missing = f"no default among its chat templates ({', '.join(sorted(several))})" if several else "no chat template"
    if several or prompts.chat or given:
        option = "" if not (prompts.chat or given) else f"{'--chat' if prompts.chat else given[0]} needs one: "
        raise UsageError(
            f"{option}the model has {missing}", "give one with --chat-template FILE, or send prompts raw with --no-chat"
        )
    return None
