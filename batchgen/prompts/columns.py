"""Finds the column of a row that holds its prompt, and checks the columns that options name. Renders nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn

from batchgen.config import PromptConfig
from batchgen.errors import RowError, UsageError
from batchgen.json_values import kind
from batchgen.parsers.heads import OutputHead
from batchgen.process.templates import template_process
from batchgen.prompts.openai import is_chat
from batchgen.prompts.params import ALL_NAMES
from batchgen.prompts.template import RowTemplate
from batchgen.records.images import images_of_cell
from batchgen.records.inputs import CHECKED_ROWS
from batchgen.records.openai_batch import is_batch_row, lacks_body
from batchgen.records.rows import Row
from batchgen.records.tables import header_hint
from batchgen.sampling_params import SamplingParams

_DEFAULT = PromptConfig()
_MEDIA = frozenset(("image", "images", "audio", "audios", "video", "videos", "multi_modal_data"))
"""Names of columns in data sets of prompts with pictures, sound or video; the last is that of prompts for vLLM."""
_MAX_NAMES = 20


Source = Literal["template", "body", "messages", "prompt"]
"""Where a row's prompt comes from."""


def quoted(names: Sequence[str]) -> str:
    """Returns the names as one text for a message: the first 20 and the number of the others."""
    shown = ", ".join(repr(name) for name in names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES} more"


class Columns:
    """The columns that make prompts, by the user's options."""

    def __init__(self, prompts: PromptConfig, template: RowTemplate | None, *, chat: bool) -> None:
        self._prompt, self._messages = prompts.prompt_column, prompts.messages_column
        self._template = template
        self._chat = chat
        self._named = [("--prompt-column", self._prompt)] if self._prompt != _DEFAULT.prompt_column else []
        if self._messages != _DEFAULT.messages_column:
            self._named.append(("--messages-column", self._messages))
        self._images = prompts.image_column
        self._needed = [*self._named, *(("--image-column", name) for name in self._images)]
        if prompts.score:
            usual = prompts.completion_column == _DEFAULT.completion_column
            self._needed.append(("--score" if usual else "--completion-column", prompts.completion_column))
        if prompts.choices_column is not None:
            self._needed.append(("--choices-column", prompts.choices_column))
        if prompts.priority_column is not None:
            self._needed.append(("--priority-column", prompts.priority_column))
        self._needed += [("--row-params", name) for name in prompts.row_params]
        self._read = {self._prompt, self._messages, *(name for _, name in self._needed)}
        self._used = self._read if template is None else self._read | template.columns
        # A column that the user has named wins over one with the usual name. Otherwise messages win.
        self._prompt_first = not chat or [option for option, _ in self._named] == ["--prompt-column"]
        self.why_raw = "--no-chat turns it off" if prompts.chat is False else "the model has none"

    def source(self, columns: Mapping[str, Any]) -> Source:
        """Returns where this row's prompt comes from. Raises `RowError("invalid_row")` if it has none."""
        if self._template is not None:
            return "template"
        if is_batch_row(columns):
            return "body"
        prompt, messages = self._has_prompt(columns), self._has_messages(columns)
        if prompt and (self._prompt_first or not messages):
            return "prompt"
        if messages:
            return "messages"
        names = [name for name in dict.fromkeys((self._prompt, self._messages)) if name in columns]
        if not names and "url" in columns and "body" in columns:
            raise RowError("invalid_row", f"body must be an object, not {kind(columns['body'])}")
        if not names and lacks_body(columns):
            raise RowError("invalid_row", "the request has no body")
        if not names:
            raise RowError("invalid_row", f"the row has no column {self._prompt!r}{self._or_messages()}")
        empty = (f"column {name!r} is {'null' if columns[name] is None else 'empty'}" for name in names)
        raise RowError("invalid_row", " and ".join(empty))

    def for_chat(self, columns: Mapping[str, Any]) -> list[str]:
        """Returns the columns `tools` and `documents` if the row has them and they are used for nothing else: the chat template takes them."""
        return [
            name for name in ("tools", "documents") if columns.get(name) not in (None, "") and name not in self._used
        ]

    def both_note(self, columns: Mapping[str, Any]) -> str | None:
        """Returns a note for a row that has both a prompt and messages if the user has named neither column, else None."""
        if self._template is not None or self._named:
            return None
        if not (self._has_messages(columns) and self._has_prompt(columns)) or is_batch_row(columns):
            return None
        sent, carried = (self._prompt, self._messages) if self._prompt_first else (self._messages, self._prompt)
        return (
            f"rows have both {sent!r} and {carried!r}: {sent!r} is the prompt, {carried!r} is only copied to the output"
        )

    def media(self, rows: Sequence[Row]) -> list[str]:
        """Returns columns that look like images, sound or video of the prompt in some row and are used for nothing."""
        found = {name for row in rows for name in _MEDIA & row.columns.keys() if not _is_empty(row.columns[name])}
        return sorted(found - self._used)

    def only_carried(self, columns: Mapping[str, Any]) -> set[str]:
        """Returns columns that have the name of a sampling parameter but are not used as one."""
        return (ALL_NAMES & columns.keys()) - self._read

    def check(self, first: Sequence[Row], more: Sequence[tuple[str, str]] = ()) -> None:
        """Raises `UsageError` if none of these rows has a prompt, or a column that the user has named.

        `more`: further options and the columns that they name.
        """
        rows = [row.columns for row in first if row.error is None]
        if not rows:
            return
        there = list(dict.fromkeys(name for columns in rows for name in columns))
        no_row = f"none of the first {len(first)} rows has" if len(first) >= CHECKED_ROWS else "no row has"
        hint = f"the input has {quoted(there)}" if there else "the input has no columns at all"
        if suspicion := header_hint(there):
            hint = f"{hint}; {suspicion}"
        for option, name in (*self._needed, *more):
            if name not in there:
                raise UsageError(f"{no_row} the column {name!r} of {option}", hint)
        if self._template is not None:
            missing = sorted(self._template.columns - set(there))
            # A template may use a column only under a condition, or have a default for it. So the rows are tried.
            given = map(self._template.input, rows) if missing else ()
            answers = template_process().render("row", self._template.source, given)
            undefined = {None if isinstance(answer, str) else answer.message for answer in answers}
            name = next((name for name in missing if f"{name!r} is undefined" in undefined), None)
            if name is not None and None not in undefined:
                raise UsageError(f"{no_row} the column {name!r} of --template", hint)
        elif not any(self._usable(columns) for columns in rows):
            self._refuse(rows, there, no_row, hint)

    def _refuse(self, rows: Sequence[Mapping[str, Any]], there: Sequence[str], no_row: str, hint: str) -> NoReturn:
        requests = any(is_batch_row(columns) for columns in rows)
        if requests or self._messages in there:
            what = "/v1/chat/completions" if requests else f"column {self._messages!r}"
            way = (
                "leave --no-chat out" if self.why_raw.startswith("--no-chat") else "give one with --chat-template FILE"
            )
            raise UsageError(f"{what} needs a chat template: {self.why_raw}", f"{way}, or name a --prompt-column")
        if any(lacks_body(columns) for columns in rows):
            raise UsageError(
                f"{no_row} a body that is an object, as requests of the OpenAI Batch form have",
                f'{hint}; a body is, for example, {{"messages": […]}}',
            )
        raise UsageError(
            f"{no_row} a column {self._prompt!r}{self._or_messages()}",
            f"{hint}; name one with --prompt-column or --messages-column, or make the prompt with --template",
        )

    def _usable(self, columns: Mapping[str, Any]) -> bool:
        """Whether this row has a prompt, even an invalid one. A null counts, because the column exists."""
        if is_batch_row(columns):
            try:
                return self._chat or not is_chat(columns)
            except RowError:
                return True
        return self._prompt in columns or (self._chat and self._messages in columns) or self._has_images_alone(columns)

    def _or_messages(self) -> str:
        return f" or {self._messages!r}" if self._chat else ""

    def _has_prompt(self, columns: Mapping[str, Any]) -> bool:
        return columns.get(self._prompt) is not None or self._has_images_alone(columns)

    def _has_images_alone(self, columns: Mapping[str, Any]) -> bool:
        """Whether the row's images are its prompt, with `--prefix` and `--system` at most."""
        written = self._named or self._prompt in columns or self._messages in columns
        cells = [images_of_cell(columns.get(name)) for name in self._images]
        images = [one for cell in cells for one in (cell if isinstance(cell, list) else [cell])]
        return not written and not all(map(_is_empty, images))

    def _has_messages(self, columns: Mapping[str, Any]) -> bool:
        value = columns.get(self._messages)
        return value is not None and value != ""  # as an empty field of a CSV file


def task_option(prompts: PromptConfig, head: OutputHead | None) -> str:
    """Returns the option that replaces generating text: `--score`, `--prompt-logprobs`, `--embed` or `--classify`; else empty."""
    if head is not None:
        return f"--{head.task}"
    return "--score" if prompts.score else "--prompt-logprobs" if prompts.prompt_logprobs else ""


def not_for_scores(params: SamplingParams) -> str | None:
    """Returns the name of a parameter that cannot be combined with an option of `task_option`; None if there is none."""
    if params.n > 1:
        return "n"
    if params.logprobs is not None:
        return "logprobs"
    return next((name for name in ("choices", "regex", "json_schema") if getattr(params, name)), None)


def check_task(prompts: PromptConfig, sampling: SamplingParams, task: str) -> None:
    """Raises `UsageError` for an option that cannot be combined with `task`: `generate`, `embed` or `classify`."""
    option = f"--{task}" if task != "generate" else task_option(prompts, None)
    others = {"score": prompts.score, "prompt-logprobs": prompts.prompt_logprobs} if task != "generate" else {}
    other = next((name for name, given in others.items() if given), None) or (
        not_for_scores(sampling) if option else None
    )
    if prompts.choices_column is not None:
        other = other or option.removeprefix("--") or not_for_scores(replace(sampling, choices=()))
        option = "--choices-column"
    if other is not None:
        raise UsageError(f"{option} cannot be combined with --{other.replace('_', '-')}", "leave one of them out")
    labels = sampling.choices or prompts.choices_column is not None or task == "classify"
    if sampling.top_choices is not None and not labels and "choices" not in prompts.row_params:
        raise UsageError("--top-choices is for labels", "add --choices or --choices-column, or leave it out")
    if prompts.prompt_name is not None and task != "embed":
        raise UsageError("--prompt-name is for --embed", "add --embed, or use --prefix")
    if prompts.prompt_name is not None and prompts.prefix is not None:
        raise UsageError("--prompt-name cannot be combined with --prefix", "leave one of them out")


def _is_empty(value: Any) -> bool:
    """Whether a value is empty. An array is not compared, and counts as not empty."""
    return value is None or (isinstance(value, str | bytes | list | Mapping) and not value)
