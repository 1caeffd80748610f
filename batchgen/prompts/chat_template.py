"""Gives conversations to the model's chat template, or to the user's in its place. Knows nothing of tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from string import ascii_letters
from typing import Any

from batchgen.config import PromptConfig
from batchgen.errors import RowError, UsageError, first_line
from batchgen.json_values import kind, plain
from batchgen.parsers.thinking import thinking_off
from batchgen.process.templates import TemplateCall, TemplateFailure, TemplateShape, template_process
from batchgen.prompts.messages import Message, text_part

_MARK, _SECOND_MARK = "batchgen-trial", "batchgen-second"
_ROLE_AND_CONTENT = ("role", "content")
_SHAPE_MESSAGES, _MAX_SHAPES = 2, 64  # longer conversations have too many shapes
_CALL_FORMS = ((False, False), (True, False), (False, True), (True, True))
"""The forms of turns that only call tools: whether arguments are JSON text, and whether the content is null. The usual one first."""
_OF_TRANSFORMERS = "transformers.tokenization_utils_base"

_TOOLS_HINT = """use one such as {"tools": [{"type": "function", "function": {…}}]}"""

# Names that `apply_chat_template` takes as its own arguments, so a row or command cannot set them as variables.
_RESERVED = frozenset({
    "self", "conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
})  # fmt: skip


def _clock(now: datetime) -> str:
    """Returns a Jinja macro `strftime_now` that hides transformers' function of this name and always formats this time.

    transformers passes plain data alone to a template, no function. The line end after the macro is not part of the output.
    """
    values = {mark + d: now.strftime(f"%{mark}{d}") for d in ascii_letters for mark in ("", "-")}
    return (
        "{% macro strftime_now(format) %}{% set values = " + repr(values) + " %}{% set at = namespace(text=true) %}"
        "{% for part in format.split('%') %}"
        "{% if at.text %}{{ part }}{% set at.text = false %}"
        "{% elif not part %}%{% set at.text = true %}"  # of two percent signs, which begin no directive
        "{% else %}{% set end = 2 if part[0] == '-' else 1 %}"
        "{{ values.get(part[:end], '%' ~ part[:end]) }}{{ part[end:] }}{% endif %}"
        "{% endfor %}{% endmacro %}\n"
    )


class ChatTemplate:
    """The chat template: the model's, or the user's in its place."""

    def __init__(
        self,
        tokenizer: Any,
        source: str | None,
        variables: Mapping[str, Any],
        *,
        whole: bool = False,
        now: datetime | None,
    ) -> None:
        """`whole`: conversations are rendered as they are, with nothing to be answered or continued. `now`: the time that a template writes; None
        for the time of each render. Raises `UsageError` if the template is not valid Jinja, or if `variables` has a reserved name.
        """
        self._whole = whole
        reserved = sorted(_RESERVED & variables.keys())
        if reserved:
            raise UsageError(f"--chat-template-kwargs cannot set {reserved[0]!r}", "leave it out")
        tools = variables.get("tools") or []
        if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
            raise UsageError(f"--chat-template-kwargs: tools must be a list of objects, not {kind(tools)}", _TOOLS_HINT)
        self._tokenizer = tokenizer
        self._source = source
        self._variables = variables
        self._roles_in_parts: frozenset[str] = frozenset()
        """The roles whose texts appear only as parts."""
        self._roles_of_parts: frozenset[str] = frozenset()
        """The roles of which every part appears, as the template writes parts."""
        self._clock = ""
        self._special_tokens = dict(tokenizer.special_tokens_map)
        self._used: dict[str, bool] = {}
        self._call_forms: dict[bool, tuple[bool, bool]] = {}
        """The forms of `_CALL_FORMS` that the template takes, for conversations with tools and for those without."""
        self._shapes: dict[tuple[str, ...], TemplateShape | None] = {}
        """The shapes of conversations, by their roles and variables."""
        made_by = getattr(type(tokenizer), "apply_chat_template", None)
        if source is None and getattr(made_by, "__module__", _OF_TRANSFORMERS) != _OF_TRANSFORMERS:
            raise UsageError(
                f"the tokenizer of this model ({type(tokenizer).__name__}) makes chats with code of its own",
                "give a template with --chat-template FILE, or use --no-chat for raw prompts",
            )
        self._check()
        if now is not None and self.writes_date:
            self._clock = _clock(now)
        self._find_roles()

    def with_texts(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages with the texts of a content's parts joined without separators where the template does not write the parts itself."""
        return [
            m if self._takes(m) else {**m, "content": "".join(part["text"] for part in m["content"])} for m in messages
        ]

    def _takes(self, message: Message) -> bool:
        content = message["content"]
        return (
            isinstance(content, str)
            or message["role"] in self._roles_of_parts
            or any("source" in part for part in content)
        )

    def call(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> TemplateCall:
        """Returns the call that makes the prompt's text with special tokens (`text`). A last message of the assistant is left open, so that the
        model continues it, unless conversations are `whole`. Raises `RowError("template_error")` if there is no template for them.
        """
        if not self.uses("developer"):  # OpenAI's newer name for the role `system`
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        variables = {**self._variables, **(variables or {})}
        given = [self._as_given(m, variables.get("tools") is not None) for m in messages]
        continued = self._continues(messages)
        arguments = {
            **self._special_tokens,
            **variables,
            "conversations": [given],
            "continue_final_message": continued,
            "add_generation_prompt": not (continued or self._whole),
        }
        return TemplateCall("chat", self._clock + self._text_for(variables.get("tools")), arguments)

    def filled(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str | None:
        """Returns the text of a conversation without a render, if the template only copies contents of such conversations; None if it must be
        called. `variables` are as in `call`."""
        if len(messages) > _SHAPE_MESSAGES or "tools" in variables or "documents" in variables:
            return None
        texts = [message["content"] for message in messages if len(message) == len(_ROLE_AND_CONTENT)]
        if len(texts) < len(messages) or not all(isinstance(text, str) for text in texts):
            return None
        kind = (*(message["role"] for message in messages), repr(variables))
        if kind not in self._shapes and len(self._shapes) < _MAX_SHAPES:
            self._shapes[kind] = self._shape(messages, variables)
        shape = self._shapes.get(kind)
        return None if shape is None else shape.filled(texts)

    def _shape(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> TemplateShape | None:
        if self._continues(messages) or (self.writes_date and not self._clock):
            return None
        call = self.call(messages, variables)
        if not all(isinstance(message["content"], str) for message in call.given["conversations"][0]):
            return None
        shape = template_process().render("shape", call.source, [call.given])[0]
        return shape if isinstance(shape, TemplateShape) else None

    def _text_for(self, tools: Any) -> str:
        try:
            return str(self._tokenizer.get_chat_template(self._source, tools))
        except ValueError as e:  # it has several, and none for this conversation
            raise RowError("template_error", f"chat template: {first_line(e)}") from None

    def text(self, messages: Sequence[Message], answer: str | TemplateFailure) -> str:
        """Returns the answer to a call, the text. Raises `RowError("template_error")` with the template's own message if there is none."""
        if isinstance(answer, str):
            return answer
        reason = f"chat template: {answer.message}"
        if self._continues(messages) and "continue_final_message" in reason:
            reason = "chat template: it changes the last assistant message, so that message cannot be continued"
        raise RowError("template_error", reason)

    def _continues(self, messages: Sequence[Message]) -> bool:
        return messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls") and not self._whole

    def thinking_off(self) -> dict[str, bool]:
        """Returns the variables that switch thinking off; none if the template has no switch."""
        return thinking_off(str(self._tokenizer.get_chat_template(self._source)))

    def uses(self, name: str) -> bool:
        """Whether the template contains a name."""
        if name not in self._used:
            own = self._tokenizer.chat_template if self._source is None else self._source
            self._used[name] = any(name in text for text in (own.values() if isinstance(own, dict) else (own,)))
        return self._used[name]

    @property
    def writes_date(self) -> bool:
        """Whether the template may write the date or time of its rendering, as those of Llama 3.1 and gpt-oss do."""
        return self.uses("strftime_now")

    def check_variables(self, variables: Any) -> Mapping[str, Any]:
        """Checks a row's template variables (`chat_template_kwargs` of a body) and returns them, {} for null. Raises `RowError`."""
        if variables is None:
            return {}
        if not isinstance(variables, Mapping):
            raise RowError("invalid_row", f"body.chat_template_kwargs must be an object, not {kind(variables)}")
        reserved = sorted(_RESERVED & variables.keys())
        if reserved:
            raise RowError("unsupported_parameter", f"body.chat_template_kwargs cannot set {reserved[0]}")
        return variables

    def _find_roles(self) -> None:
        """Finds the roles whose messages appear in the prompt only as a list of parts (some templates of multimodal models expect such lists and
        silently skip plain text), and those of which the template writes every part, in its own way.
        """
        user: Message = {"role": "user", "content": "x"}
        shown: dict[str, list[str]] = {}
        for content in (_MARK, [text_part(_MARK), text_part(_SECOND_MARK)]):
            for role in ("user", "system", "assistant"):
                message: Message = {"role": role, "content": content}
                turns = {"user": [message], "system": [message, user], "assistant": [user, message, user]}
                answer = self._tried(turns[role])
                shown.setdefault(role, []).append(answer if isinstance(answer, str) else "")
        self._roles_in_parts = frozenset(
            r for r, (text, parts) in shown.items() if _MARK in parts and _MARK not in text
        )
        as_data = (repr(_MARK), json.dumps(_MARK))
        self._roles_of_parts = frozenset(
            role
            for role, (_, parts) in shown.items()
            if _MARK in parts and _SECOND_MARK in parts and not any(form in parts for form in as_data)
        )

    def takes_system(self) -> bool:
        """Returns whether the template writes system messages. Raises `UsageError` if it refuses them."""
        user: Message = {"role": "user", "content": "x"}
        answer = self._tried([{"role": "system", "content": _MARK}, user])
        if isinstance(answer, TemplateFailure) and isinstance(self._tried([user]), str):
            raise UsageError(
                f"--system: the chat template refuses system messages ({answer.message})",
                "put the text before every prompt with --prefix, or give another template with --chat-template FILE",
            )
        return not isinstance(answer, str) or _MARK in answer

    def _tried(self, messages: list[Message], variables: Mapping[str, Any] | None = None) -> Any:
        try:
            call = self.call(messages, variables)
        except RowError as e:
            return TemplateFailure("error", e.message)
        return template_process().render(call.form, call.source, [call.given])[0]

    def _call_form(self, tools: bool) -> tuple[bool, bool]:
        """Returns the form in which the template writes calls of earlier turns. Those of DeepSeek take arguments as text, some only beside a null content."""
        if tools not in self._call_forms:
            call = {"id": "trial0001", "type": "function", "function": {"name": "trial", "arguments": {_MARK: 1}}}
            asks, calls = {"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}
            tool = {"type": "function", "function": {"name": "trial", "description": "", "parameters": {}}}
            for form in _CALL_FORMS if self.uses("tool_calls") else ():
                self._call_forms[tools] = form
                answer = self._tried([asks, calls], {"tools": [tool]} if tools else None)
                if isinstance(answer, str) and _MARK in answer and repr({_MARK: 1}) not in answer:
                    return form
            self._call_forms[tools] = _CALL_FORMS[0]
        return self._call_forms[tools]

    def _as_given(self, message: Message, tools: bool) -> Message:
        """Returns a message in the form that the template takes, images without their sources. `tools`: whether the conversation has tools."""
        content, calls = message["content"], message.get("tool_calls")
        if not isinstance(content, str):
            content = [{"type": "image"} if "source" in part else part for part in content]
        elif message["role"] in self._roles_in_parts:
            content = [text_part(content)]
        if not calls:
            return {**message, "content": content}
        as_text, null = self._call_form(tools)
        return {
            **message,
            "content": None if null and not content else content,
            "tool_calls": [_with_text_arguments(call) for call in calls] if as_text else calls,
        }

    def _check(self) -> None:
        """Renders a short message. Raises `UsageError` if the template is not valid, or does not end."""
        which = "the model's chat template" if self._source is None else "--chat-template"
        failure = self._tried([{"role": "user", "content": "x"}])
        if isinstance(failure, str):
            return
        if failure.kind == "syntax":
            wrong = f"{which} is not valid Jinja (line {failure.line}): {failure.message}"
            raise UsageError(wrong, "correct it, or give another")
        if failure.kind == "limit":
            wrong = f"{which} does not work for a short message: {failure.message}"
            raise UsageError(wrong, "correct it, or give another")
        # The template may refuse this conversation; each row gets its own error.


def chosen_template(
    tokenizer: Any, prompts: PromptConfig, *, whole: bool = False, now: datetime | None = None
) -> ChatTemplate | None:
    """Returns the chat template for prompts, which renders conversations `whole` or to be answered; None if prompts are sent raw. `now`: see `ChatTemplate`.

    Raises `UsageError` for options that contradict each other, or need a template if there is none.
    """
    options = {
        "--system": prompts.system is not None,
        "--chat-template": prompts.chat_template is not None,
        "--chat-template-kwargs": bool(prompts.chat_template_kwargs),
    }
    given = [option for option, there in options.items() if there]
    if prompts.chat is False:
        if given:
            raise UsageError(f"{given[0]} cannot be combined with --no-chat", "leave one of them out")
        return None
    own = tokenizer.chat_template  # one, or several by name
    has_default = "default" in own if isinstance(own, dict) else own is not None
    if prompts.chat_template is not None or has_default:
        return ChatTemplate(tokenizer, prompts.chat_template, prompts.chat_template_kwargs, whole=whole, now=now)
    missing = f"no default among its chat templates ({', '.join(sorted(own))})" if own else "no chat template"
    if own or prompts.chat or given:
        option = "--chat" if prompts.chat else given[0] if given else ""
        needs = f"{option} needs a chat template, and " if option else ""
        has = missing if own or not option else "none"
        raise UsageError(f"{needs}the model has {has}", "use --chat-template FILE, or --no-chat for raw prompts")
    return None


def _with_text_arguments(call: Any) -> Any:
    """Returns a call with its arguments as JSON text."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return call
    text = json.dumps(plain(function["arguments"]), ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
