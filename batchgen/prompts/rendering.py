"""Turns rows into texts: chooses the prompt's column, the template and the parameters. Knows nothing of lengths."""

from __future__ import annotations

import json
import math
import re
import urllib.parse
from collections.abc import Generator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, NamedTuple, TypeVar

import numpy as np

from batchgen.config import PromptConfig
from batchgen.errors import RowError, UsageError
from batchgen.json_values import kind, plain
from batchgen.parsers.heads import OutputHead
from batchgen.parsers.thinking import SWITCHES
from batchgen.process.templates import TemplateCall, template_process
from batchgen.prompts.chat_template import chosen_template
from batchgen.prompts.columns import (
    Columns,
    Source,
    not_for_scores,
    quoted,
    task_option,
)
from batchgen.prompts.images import PromptImages
from batchgen.prompts.messages import (
    Message,
    conversation,
    image_part,
    images_of,
    objects,
    text_part,
    with_images,
    with_start,
    with_system,
    without_nulls,
)
from batchgen.prompts.openai import Body, read_body
from batchgen.prompts.params import OBJECT_COLUMN, RowParams
from batchgen.prompts.template import RowTemplate
from batchgen.prompts.tokenizer import LoadedTokenizer
from batchgen.records.images import ImageSource, images_of_cell, reference
from batchgen.records.openai_batch import EMBEDDINGS, RESPONSES
from batchgen.records.rows import Row
from batchgen.request import TokenArray
from batchgen.sampling_params import SamplingParams

_FIRST_MARK, _LAST_MARK = 0x100000, 0x10FFFD
"""In the columns that a template is given, images are characters between these, for private use. Nothing takes a character apart."""


def _marks(count: int, texts: Mapping[str, Any], source: str) -> list[str]:
    """Returns the first characters in a row for so many images that neither the other columns nor the template's source has. Raises `RowError` if there are none."""
    taken = source + json.dumps(plain(texts), ensure_ascii=False).replace(r"\\", "\\")
    for first in range(_FIRST_MARK, _LAST_MARK - count + 2, count):
        marks = [chr(first + i) for i in range(count)]
        if not any(form in taken for mark in marks for form in (mark, *_written_as_data(mark))):
            return marks
    raise RowError("template_error", "the row has no room for marks of its images")


def _written_as_data(mark: str) -> tuple[str, ...]:
    """Returns what Python, JSON and URLs write for a character."""
    return repr(mark)[1:-1], json.dumps(mark)[1:-1], urllib.parse.quote(mark)


class Text(NamedTuple):
    """A prompt's text, still to be tokenized."""

    text: str
    raw: bool
    """Whether the tokenizer puts its special tokens around the text. A chat template has already written them."""
    images: tuple[ImageSource, ...] = ()
    """The images of the text's placeholders, in order."""


class Rendered(NamedTuple):
    """A row's prompt with its parameters."""

    prompt: Text | TokenArray
    params: SamplingParams
    completion: str | TokenArray | None
    """The text to score, or its token ids; None if the row is generated or labelled."""
    priority: float
    tools: str = ""
    """The row's tools as JSON if calls of them are looked for in the answer; else empty."""


class _How(NamedTuple):
    """How a row is rendered."""

    limit: int | None
    """Number of characters of a text, or of token ids, to keep; None for all."""
    left: bool
    """Whether to keep the last ones rather than the first."""
    file: str
    """The row's file."""
    variables: Mapping[str, Any]
    """Variables of the chat template; those of the command and the row override them."""
    typed: bool = False
    """Whether the row is one of a table with types (`Row.typed`)."""

    def given(self, value: Any) -> Any:
        """Returns a value of the row without the nulls that a table with types adds, and with its maps as objects."""
        return without_nulls(value) if self.typed else value

    def cut(self, value: Any) -> Any:
        if self.limit is None or len(value) <= self.limit:
            return value
        return value[-self.limit :] if self.left else value[: self.limit]


def _with_texts_cut(value: Any, how: _How) -> Any:
    """Returns a row's columns with every text in them cut, at any depth."""
    if how.limit is None:
        return value
    if isinstance(value, str):
        return how.cut(value)
    if isinstance(value, Mapping):
        return {name: _with_texts_cut(item, how) for name, item in value.items()}
    return [_with_texts_cut(item, how) for item in value] if isinstance(value, list) else value


T = TypeVar("T")
Steps = Generator[TemplateCall, Any, T]
"""What renders a row: yields each render of a template that it needs, and is sent the answer. So the templates of many rows are rendered together."""


class _Chat(NamedTuple):
    """A prompt that the chat template is still to write."""

    messages: Sequence[Message]
    variables: Mapping[str, Any]
    """The row's own variables of the template."""


_Found = _Chat | Text | TokenArray


def _content_cut(content: Any, how: _How) -> Any:
    """Returns a message's content with its texts cut."""
    if isinstance(content, str):
        return how.cut(content)
    return [{**part, "text": how.cut(part["text"])} if "text" in part else part for part in content]


def _all_of(images: Mapping[str, list[Message | None]]) -> list[Message]:
    return [part for parts in images.values() for part in parts if part is not None]


class Renderer:
    """Renders rows and collects notes for the user."""

    def __init__(
        self,
        tokenizer: LoadedTokenizer,
        prompts: PromptConfig,
        params: RowParams,
        images: PromptImages,
        now: datetime | None,
    ) -> None:
        """`now`: see `ChatTemplate`. Raises `UsageError` for options that cannot be satisfied: a system message without a chat template, invalid Jinja."""
        self.notes: list[str] = []
        """Each only once. Grows while rows are rendered."""
        self.stopped = False
        """Set by another thread that does not need the rest of the rows."""
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._params = params
        self._images = images
        self._head = tokenizer.head
        self._task = task_option(prompts, self._head)
        self._chat = chosen_template(tokenizer.hf_tokenizer, prompts, whole=self._head is not None, now=now)
        self.writes_date = self._chat is not None and self._chat.writes_date
        asked = prompts.chat or prompts.system is not None or prompts.chat_template is not None
        # Other embedding models and classifiers take a text as it is. If they have a chat template, it is for conversations.
        self.chat = self._chat is not None and (self._head is None or self._head.chat or bool(asked))
        own = _prompt_of(self._head, prompts.prompt_name) if prompts.prefix is None else ""
        as_system = self.chat and self._head is not None and self._head.chat
        self.prefix = prompts.prefix or ("" if as_system else own)
        """The text before every prompt: the user's, or the model's own."""
        self._own_system = as_system and bool(own) and prompts.system is None
        self._system = own if self._own_system else prompts.system
        off = self._chat.thinking_off() if self._chat is not None else {}
        self._thinking_off = {n: v for n, v in off.items() if n not in prompts.chat_template_kwargs}
        """Variables of the chat template for labels and texts to score: no thoughts come before them."""
        self._template = None if prompts.template is None else RowTemplate(prompts.template)
        self.columns = Columns(prompts, self._template, chat=self._chat is not None)
        self._said: set[str] = set()
        limited = tokenizer.source is not None and tokenizer.source.image_max_pixels is not None
        option = "--image-column" if prompts.image_column else "--image-max-pixels" if limited else ""
        if option and images.refusal is not None:
            raise UsageError(f"{option}: {images.refusal}", "leave it out, or use a model that sees")
        if self._chat is not None and prompts.system is not None and not self._chat.takes_system():
            self.note("--system has no effect: the chat template does not write system messages")
        for name in prompts.chat_template_kwargs:
            self._note_unused_variable(name, "--chat-template-kwargs sets")

    def render(
        self, rows: Sequence[Row], limit: int | None = None, params: Sequence[SamplingParams | None] | None = None
    ) -> list[Rendered | RowError]:
        """Returns the rendered rows, or the reason why one cannot be rendered. Raises `RenderingStopped` after `stopped` was set.

        `limit`: number of characters (or token ids) that the prompt's text and each message keep; `--on-long-prompt` says at which end.
        The text around them stays whole: the chat template's own text, `--system`, `--prefix`, the text of `--template`.
        `params`: the default parameters of each row; None for the command's.
        """
        running = {i: self._render(row, limit, params[i] if params else None) for i, row in enumerate(rows)}
        found: dict[int, Rendered | RowError] = {}
        answers: dict[int, Any] = dict.fromkeys(running)
        while running:
            calls: dict[int, TemplateCall] = {}
            for i, answer in answers.items():
                try:
                    calls[i] = running[i].send(answer)
                except StopIteration as e:
                    found[i] = e.value
                    del running[i]
            answers = template_process().answers(calls, lambda: self.stopped)
        return [found[i] for i in range(len(rows))]

    def _render(self, row: Row, limit: int | None, params: SamplingParams | None) -> Steps[Rendered | RowError]:
        if row.error is not None:
            return row.error
        try:
            source = self.columns.source(row.columns)
            given = self._without_added_nulls(row)
            body = read_body(given) if source == "body" else None
            own = self._params.of(given, body.params if body else None, params)
            if body is not None and body.url == RESPONSES and (own.n > 1 or own.logprobs is not None):
                raise RowError("unsupported_parameter", f"n and logprobs cannot be combined with {RESPONSES}")
            other = not_for_scores(own) if self._task else None
            if other is not None:
                raise RowError("unsupported_parameter", f"{other} cannot be combined with {self._task}")
            labelled = bool(self._task or own.choices)
            variables = self._thinking_off if labelled and self._head is None else {}
            how = _How(limit, self._prompts.on_long_prompt == "truncate-left", row.file, variables, row.typed)
            if body or source == "prompt":
                self._check_no_image(row.columns, body)
            found = self._from_body(body, how) if body else (yield from self._from_columns(row.columns, source, how))
            prompt = (yield from self._chat_text(found, how)) if isinstance(found, _Chat) else found
            if (own.choices or self._prompts.score) and isinstance(prompt, Text) and not prompt.raw:
                prompt = self._at_the_answer(prompt, own)
            completion = self._completion(row.columns) if self._prompts.score else None
            priority = _priority(row.columns, self._prompts.priority_column)
            may_call = not labelled and not own.constrained and isinstance(prompt, Text)
            tools = self._tools(row.columns, body, how) if may_call else ""
            return Rendered(prompt, own, completion, priority, tools)
        except RowError as e:
            return e
        except RecursionError:  # JSON in a text field, whose depth no reader has checked
            return RowError("invalid_row", "the row has a value that is nested too deeply")

    def _without_added_nulls(self, row: Row) -> Mapping[str, Any]:
        """Returns a row's columns, its request and parameters without the nulls that a table with types adds: in a schema, a null would be invalid."""
        if not row.typed:
            return row.columns
        names = row.columns.keys() & {"body", OBJECT_COLUMN, *self._prompts.row_params}
        return row.columns | {name: without_nulls(row.columns[name]) for name in names}

    def _at_the_answer(self, prompt: Text, params: SamplingParams) -> Text:
        """Returns the prompt of labels and texts to score, after which the answer begins: thoughts that its template has opened are closed."""
        thinking = self._tokenizer.thinking
        asked = any(self._prompts.chat_template_kwargs.get(name) for name in SWITCHES)
        if thinking is None or asked or params.reasoning != "auto" or not thinking.opened(prompt.text):
            return prompt
        return prompt._replace(text=prompt.text + thinking.no_thoughts)

    def _from_columns(self, columns: Mapping[str, Any], source: Source, how: _How) -> Steps[_Found]:
        both = self.columns.both_note(columns)
        if both is not None:
            self.note(both)
        if source == "template":
            return (yield from self._from_template(columns, how))
        return self._from_messages(columns, how) if source == "messages" else self._from_prompt(columns, how)

    def _from_template(self, columns: Mapping[str, Any], how: _How) -> Steps[_Chat | Text]:
        assert self._template is not None
        images = self._column_images(columns)
        every = _all_of(images)
        given = self._template.input(_with_texts_cut(columns, how))
        texts = {name: value for name, value in given.items() if name not in images}
        marks = _marks(len(every), texts, self._template.source) if every else []
        left = iter(marks)
        for name, parts in images.items():
            own = ["" if part is None else next(left) for part in parts]
            if name in given:  # a list in a CSV file is text, and so are its images, unless one of them is missing
                given[name] = own if isinstance(columns[name], list | tuple) or "" in own else "".join(own)
        text = self._template.text(columns, (yield TemplateCall("row", self._template.source, given)))
        variables = self._for_chat(columns, how)
        if any(form in text for mark in marks for form in _written_as_data(mark)):
            why = "an image of --image-column is written as data: write a list image by image, and none by tojson"
            raise RowError("template_error", why)
        pieces = re.split(f"([{marks[0]}-{marks[-1]}])", text) if marks else [text]
        if len(pieces) == 1:
            return self._one_message(self.prefix + text, variables, how, every)
        named = images.keys() if self._template.whole else self._template.columns
        written = _all_of({name: parts for name, parts in images.items() if name not in named})
        for i, piece in enumerate([self.prefix + pieces[0], *pieces[1:]]):
            written.append(every[marks.index(piece)] if i % 2 else text_part(piece))
        content = [part for part in written if part.get("text", "x")]
        return self._of_content(content, variables, how)

    def _check_no_image(self, columns: Mapping[str, Any], body: Body | None) -> None:
        """Raises `RowError` if the row has images in columns and a prompt that cannot have them."""
        prompt = columns.get(self._prompts.prompt_column)
        ids = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
        if (body is not None or ids) and _all_of(self._column_images(columns)):
            what = "a request of OpenAI's Batch form" if body is not None else "a list of token ids"
            raise RowError("invalid_row", f"the images of --image-column cannot be added to {what}")

    def _from_prompt(self, columns: Mapping[str, Any], how: _How) -> _Found:
        name = self._prompts.prompt_column
        value = columns.get(name, "")  # images may be the whole prompt
        if isinstance(value, str):
            images = _all_of(self._column_images(columns))
            return self._one_message(self.prefix + how.cut(value), self._for_chat(columns, how), how, images)
        where = f"column {name!r}"
        if isinstance(value, list) and value and isinstance(value[0], int):
            if self._chat is not None:
                self.note("prompts that are token ids do not go through the chat template")
            if self._prompts.system is not None:
                raise RowError("invalid_row", f"{where} is a list of token ids, which cannot be combined with --system")
            return self._token_ids(how.cut(value), where)
        hint = ""
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            hint = f" (--messages-column {name} takes a list of messages)"
        raise RowError("invalid_row", f"{where} must be text, not {kind(value)}{hint}")

    def _from_messages(self, columns: Mapping[str, Any], how: _How) -> _Chat:
        name = self._prompts.messages_column
        where = f"column {name!r}"
        if self._chat is None:
            raise RowError("invalid_row", f"{where} needs a chat template: {self.columns.why_raw}")
        messages = conversation(how.given(columns[name]), where, name, self._images.refusal)
        images = _all_of(self._column_images(columns))
        return self._conversation(messages, where, self._for_chat(columns, how), how, images)

    def _from_body(self, body: Body, how: _How) -> _Found:
        loaded = str(self._tokenizer.hf_tokenizer.name_or_path)
        if body.model not in (None, loaded, loaded.rstrip("/").rsplit("/", 1)[-1]):
            self.note(f"rows ask for model {body.model!r}; all rows are run on {loaded!r}", "model")
        embeds = self._head is not None and self._head.task == "embed"
        if (body.url == EMBEDDINGS) != embeds:
            how_to = f"with --embed it must be {EMBEDDINGS}" if embeds else "add --embed for it"
            raise RowError("invalid_row", f"url is {body.url}; {how_to}")
        if body.chat:
            if self._chat is None:
                raise RowError("invalid_row", f"{body.url} needs a chat template: {self.columns.why_raw}")
            given = self._chat.check_variables(body.variables)
            for name in given:
                self._note_unused_variable(name, "rows set")
            variables = dict(given)
            if body.tools:
                tools = objects(body.tools)
                if tools is None:
                    raise RowError("invalid_row", f"body.tools must be a list of objects, not {kind(body.tools)}")
                variables["tools"] = tools
                self._note_unused("tools")
            messages = conversation(body.prompt, body.where, body.where, self._images.refusal)
            return self._conversation(messages, body.where, variables, how)
        if self._prompts.system is not None and body.url != EMBEDDINGS:
            self.note("--system is not used for rows of /v1/completions, whose prompts are raw")
        prompt = body.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]  # a list that holds one prompt
        if isinstance(prompt, str) and body.url == EMBEDDINGS:
            return self._one_message(self.prefix + how.cut(prompt), {}, how)
        if isinstance(prompt, str):
            return Text(self.prefix + how.cut(prompt), raw=True)
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            raise RowError(
                "unsupported_parameter", f"{body.where} holds {len(prompt)} prompts; a row can have only one"
            )
        if isinstance(prompt, list):
            return self._token_ids(how.cut(prompt), body.where)
        raise RowError("invalid_row", f"{body.where} must be text or token ids, not {kind(prompt)}")

    def _for_chat(self, columns: Mapping[str, Any], how: _How) -> dict[str, Any]:
        """Returns the row's tools and documents as variables of the chat template."""
        found: dict[str, Any] = {}
        for name in self.columns.for_chat(columns):
            value = None if self._chat is None else objects(how.given(columns[name]))
            if value is not None:
                found[name] = _with_texts_cut(without_nulls(value), how) if name == "documents" else value
                self._note_unused(name)
            else:
                why = "prompts are raw" if self._chat is None else "it is not a list of objects"
                self.note(f"column {name!r} is only copied to the output, not sent to the model: {why}", name)
        return found

    def _tools(self, columns: Mapping[str, Any], body: Body | None, how: _How) -> str:
        """Returns the JSON of the tools that the row's prompt shows; empty if there are none, or if batchgen does not look for calls."""
        if self._chat is None or not self._chat.uses("tools"):
            return ""
        if body is not None:
            if not (body.chat and body.calls):
                return ""
            tools = objects(body.tools) if body.tools else None
        else:
            tools = objects(how.given(columns["tools"])) if "tools" in self.columns.for_chat(columns) else None
        tools = tools or objects(self._prompts.chat_template_kwargs.get("tools"))
        if not tools:
            return ""
        if self._tokenizer.tool_format is None:
            self.note("rows have tools, but batchgen does not know how this model writes calls: they stay in the text")
            return ""
        # In ASCII, because text may hold lone surrogates; a table may hold what JSON has no form for.
        return json.dumps(tools, default=str)

    def _note_unused(self, name: str) -> None:
        assert self._chat is not None
        if not self._chat.uses(name):
            self.note(f"rows have {name}, which the chat template does not use: the model does not see them", name)

    def _note_unused_variable(self, name: str, who: str) -> None:
        if self._chat is not None and not self._chat.uses(name):
            self.note(f"{who} {name!r}, which the chat template does not use: it has no effect", name)

    def _column_images(self, columns: Mapping[str, Any]) -> dict[str, list[Message | None]]:
        """Returns the images of `--image-column` as parts of a message, by column; None for a null in a list."""
        found = {}
        for name in self._prompts.image_column:
            value = images_of_cell(columns.get(name))
            several = isinstance(value, list)
            values: Sequence[Any] = value if several else () if value is None else (value,)
            where = [f"column {name!r}" + (f"[{i}]" if several else "") for i in range(len(values))]
            shown = zip(values, where, strict=True)
            found[name] = [None if v is None else image_part(reference(v, at), at) for v, at in shown]
        return found

    def _one_message(
        self, text: str, variables: Mapping[str, Any], how: _How, parts: Sequence[Message] = ()
    ) -> _Chat | Text:
        """Returns the prompt of a text after the other `parts`: a single user message, or raw."""
        content = [*parts, *([text_part(text)] if text else [])] if parts else text
        return self._of_content(content, variables, how)

    def _of_content(self, content: str | list[Message], variables: Mapping[str, Any], how: _How) -> _Chat | Text:
        messages: list[Message] = [{"role": "user", "content": content}]
        if self.chat:
            system = [] if self._system is None else [{"role": "system", "content": self._system}]
            return _Chat([*system, *messages], variables)
        if isinstance(content, str):
            return Text(content, raw=True)
        mark = self._images.processor.placeholder
        return Text("".join(part.get("text", mark) for part in content), raw=True, images=images_of(messages, how.file))

    def _conversation(
        self, messages: list[Message], where: str, variables: Mapping[str, Any], how: _How, images: Sequence[Message] = ()
    ) -> _Chat:  # fmt: skip
        messages = [{**message, "content": _content_cut(message["content"], how)} for message in messages]
        if self._prompts.prefix:
            messages = with_start(messages, self._prompts.prefix, where, "--prefix")
        messages = with_images(messages, images, where)
        return _Chat(messages if self._system is None else with_system(messages, self._system), variables)

    def _chat_text(self, chat: _Chat, how: _How) -> Steps[Text]:
        """Returns the text that the chat template writes."""
        assert self._chat is not None
        messages, variables = self._chat.with_texts(chat.messages), {**how.variables, **chat.variables}
        if (filled := self._chat.filled(messages, variables)) is not None:
            return Text(filled, raw=False)
        text = self._chat.text(messages, (yield self._chat.call(messages, variables)))
        return Text(text, raw=False, images=images_of(messages, how.file))

    def _completion(self, columns: Mapping[str, Any]) -> str | TokenArray:
        """Returns the text to score, possibly empty, or its token ids. Raises `RowError` if the row has none."""
        name = self._prompts.completion_column
        where = f"column {name!r}"
        if name not in columns:
            raise RowError("invalid_row", f"{where} is missing")
        value = columns[name]
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value and isinstance(value[0], int):
            return self._known(value, where)
        raise RowError("invalid_row", f"{where} must be text, not {kind(value)}")

    def _token_ids(self, ids: list[Any], where: str) -> TokenArray:
        """Checks a prompt of token ids, which is sent without special tokens."""
        for option, given in (("--prefix", self._prompts.prefix), ("--prompt-name", self._prompts.prompt_name)):
            if given:
                raise RowError("invalid_row", f"{where} is a list of token ids, which cannot be combined with {option}")
        if self.prefix or self._own_system:
            self.note(
                "prompts that are token ids are sent without the text that the model's files put before every prompt"
            )
        return self._known(ids, where)

    def _known(self, ids: list[Any], where: str) -> TokenArray:
        """Returns the token ids as int32. Raises `RowError` for one that the model does not know."""
        for i in ids:
            if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < self._tokenizer.vocab_size:
                shown = i if isinstance(i, int) and not isinstance(i, bool) else kind(i)
                size = self._tokenizer.vocab_size
                raise RowError("invalid_row", f"{where} must be token ids from 0 to {size - 1}; one is {shown}")
        return np.array(ids, dtype=np.int32)

    # Notes for the user.

    def note(self, text: str, about: str | None = None) -> None:
        """Adds a note unless there is one `about` the same thing."""
        about = about or text
        if about not in self._said:
            self._said.add(about)
            self.notes.append(text)

    def note_columns(self, rows: Sequence[Row]) -> None:
        """Adds notes about columns that are not used but look as if they should be: media, and names of sampling parameters."""
        if "media" not in self._said and (media := self.columns.media(rows)):
            sees = self._images.refusal is None
            why = "name images in --image-column" if sees else "the model sees text alone, no images, sound or video"
            self.note(f"{_columns_are(media)} only copied to the output: {why}", "media")
        if "columns" in self._said:
            return
        found = sorted({name for row in rows for name in self.columns.only_carried(row.columns)})
        if found:
            parameters, them = ("parameter", "it") if len(found) == 1 else ("parameters", "them")
            self.note(
                f"{_columns_are(found)} not used as sampling {parameters}; name {them} in --row-params to use {them}",
                "columns",
            )


def _columns_are(names: Sequence[str]) -> str:
    return f"column {quoted(names)} is" if len(names) == 1 else f"columns {quoted(names)} are"


def _prompt_of(head: OutputHead | None, name: str | None) -> str:
    """Returns the text that the model has before every raw prompt, under this name or its default. Raises `UsageError` for an unknown name."""
    prompts = {} if head is None else head.prompts
    if name is None:
        name = None if head is None else head.prompt_name
    elif name not in prompts:
        known = ", ".join(sorted(prompts)) or "none"
        raise UsageError(f"--prompt-name {name!r}: the model has no prompt of this name", f"it has {known}")
    return "" if name is None else prompts[name]


def _priority(columns: Mapping[str, Any], name: str | None) -> float:
    """Returns the row's priority, 0 if it has none. Text (from a CSV file) may hold a number. Raises `RowError`."""
    value = None if name is None else columns.get(name)
    if value is None or value == "":
        return 0.0
    if isinstance(value, int | float | Decimal | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise RowError("invalid_row", f"column {name!r} must be a number")
