"""From rows to drafts of requests: which column is the prompt, its text, its tokens, whether it fits. The one place that knows the whole way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchgen.config import PromptConfig
from batchgen.errors import RowError
from batchgen.prompts.columns import Columns, Source, quoted
from batchgen.prompts.encoding import Encoder
from batchgen.prompts.messages import Message, chosen_template, conversation, kind, with_prefix, with_system
from batchgen.prompts.openai import Body, read_body
from batchgen.prompts.params import RowParams
from batchgen.prompts.template import RowTemplate
from batchgen.prompts.tokenizer import LoadedTokenizer
from batchgen.records.row import Row
from batchgen.request import TokenArray, row_digest
from batchgen.result import Result
from batchgen.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft:
    """A row rendered and tokenized: a request but for its key, which needs to know how often it occurred before."""

    row: int
    """The row's number in the input, from 0."""
    tokens: TokenArray
    """int32 [prompt length], at least one, and fewer than the context."""
    params: SamplingParams
    """The command's parameters with the row's own on top."""
    max_tokens: int
    """`params.max_tokens`, or less where the context leaves less room; at least 1."""
    truncated: bool
    """Whether the prompt was cut to fit."""
    digest: bytes
    """`row_digest` of tokens and parameters."""
    texts: tuple[TokenArray, ...] = ()
    """Texts to score after the prompt (`Request.texts`)."""
    priority: float = 0.0
    """Lower ones are started first."""


@dataclass(frozen=True, slots=True)
class _Text:
    """A prompt's text, still to be tokenized."""

    text: str
    raw: bool
    """The tokenizer puts its special tokens around it; a chat template has written them out already."""


@dataclass(frozen=True, slots=True)
class _Rendered:
    prompt: _Text | TokenArray
    params: SamplingParams


class PromptBuilder:
    """Makes the requests of a job's rows, a window at a time."""

    chat: bool
    """Whether prompts go through a chat template; otherwise they are sent raw."""
    notes: list[str]
    """What the user should hear, each said once; grows while windows are built."""

    def __init__(self, text: LoadedTokenizer, prompts: PromptConfig, sampling: SamplingParams) -> None:
        """Raises `UsageError` for options that cannot be met: a system message without a chat template, invalid Jinja."""
        self.notes = []
        self._text = text
        self._prompts = prompts
        self._chat = chosen_template(text.tokenizer, prompts)
        self.chat = self._chat is not None
        self._template = None if prompts.template is None else RowTemplate(prompts.template)
        self._params = RowParams(prompts.row_params, sampling)
        self._columns = Columns(prompts, self._template, self._params, chat=self.chat)
        self._encoder = Encoder(text.tokenizer)
        self._said: set[str] = set()
        if (
            getattr(text.tokenizer, "fix_mistral_regex", None) is False
        ):  # transformers' mark, and its advice is not shown
            self._note(
                f"the tokenizer of {text.tokenizer.name_or_path!r} splits text by a pattern known to be wrong; "
                'put "fix_mistral_regex": true into its tokenizer_config.json to mend it'
            )
        # Only a tokenizer that knows more tokens than the model can make one that the model has not.
        self._check_ids = len(text.tokenizer) > text.vocab_size
        self._render_from: Mapping[Source, Callable[[Mapping[str, Any]], _Text | TokenArray]] = {
            Source.TEMPLATE: self._from_template,
            Source.MESSAGES: self._from_messages,
            Source.PROMPT: self._from_prompt,
        }

    def check_columns(self, first: Sequence[Row]) -> None:
        """Raises `UsageError`, naming the columns that there are, when none of these rows has a prompt."""
        self._columns.check(first)

    def build(self, rows: Sequence[Row]) -> list[Draft | Result]:
        """One per row, in order: a draft, or the result of a row that failed."""
        rendered = [self._render(row) for row in rows]
        self._note_columns(rows)
        tokens = self._tokenize(rendered)
        return [self._draft(row, r, t) for row, r, t in zip(rows, rendered, tokens, strict=True)]

    # Rendering: from columns to a text and parameters.

    def _render(self, row: Row) -> _Rendered | RowError:
        if row.error is not None:
            return row.error
        try:
            source = self._columns.source(row.columns)
            if source is Source.BODY:
                body = read_body(row.columns)
                return _Rendered(self._from_body(body), self._params.of(row.columns, body.params))
            both = self._columns.both_note(row.columns)
            if both is not None:
                self._note(both)
            return _Rendered(self._render_from[source](row.columns), self._params.of(row.columns))
        except RowError as e:
            return e

    def _from_template(self, columns: Mapping[str, Any]) -> _Text:
        assert self._template is not None
        return self._prompt_text(self._template.render(columns))

    def _from_prompt(self, columns: Mapping[str, Any]) -> _Text | TokenArray:
        name = self._prompts.prompt_column
        value = columns[name]
        if isinstance(value, str):
            return self._prompt_text(value)
        where = f"column {name!r}"
        if isinstance(value, list) and value and isinstance(value[0], int):
            if self._chat is not None:
                raise RowError("invalid_row", f"{where} is a list of token ids, which only --no-chat sends as they are")
            return self._token_ids(value, where)
        hint = ""
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            hint = f" (--messages-column {name} takes a list of messages)"
        raise RowError("invalid_row", f"{where} must be text, not {kind(value)}{hint}")

    def _from_messages(self, columns: Mapping[str, Any]) -> _Text:
        name = self._prompts.messages_column
        where = f"column {name!r}"
        if self._chat is None:
            raise RowError("invalid_row", f"{where} needs a chat template: {self._columns.why_raw}")
        return self._chat_text(conversation(columns[name], where, name), where, {})

    def _from_body(self, body: Body) -> _Text | TokenArray:
        if body.model is not None and not _same_model(body.model, str(self._text.tokenizer.name_or_path)):
            self._note(
                f"rows ask for model {body.model!r}; all rows are run on {self._text.tokenizer.name_or_path!r}", "model"
            )
        if body.chat:
            if self._chat is None:
                raise RowError("invalid_row", f"/v1/chat/completions needs a chat template: {self._columns.why_raw}")
            variables = self._chat.check_variables(body.variables, "body.chat_template_kwargs")
            return self._chat_text(
                conversation(body.prompt, "body.messages", "body.messages"), "body.messages", variables
            )
        if self._prompts.system is not None:
            self._note("the prompts of /v1/completions are raw: --system is not put before them")
        prompt = body.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]  # a list of prompts, which are one here
        if isinstance(prompt, str):
            return _Text((self._prompts.prefix or "") + prompt, raw=True)
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            raise RowError("unsupported_parameter", f"body.prompt holds {len(prompt)} prompts; a row can have one")
        if isinstance(prompt, list):
            return self._token_ids(prompt, "body.prompt")
        raise RowError("invalid_row", f"body.prompt must be text or token ids, not {kind(prompt)}")

    def _prompt_text(self, prompt: str) -> _Text:
        """A prompt as it is sent: as the one message of the user, or raw."""
        prompt = (self._prompts.prefix or "") + prompt
        if self._chat is None:
            return _Text(prompt, raw=True)
        messages: list[Message] = [{"role": "user", "content": prompt}]
        if self._prompts.system is not None:
            messages.insert(0, {"role": "system", "content": self._prompts.system})
        return _Text(self._chat.render(messages), raw=False)

    def _chat_text(self, messages: list[Message], where: str, variables: Mapping[str, Any]) -> _Text:
        assert self._chat is not None
        if self._prompts.prefix:
            messages = with_prefix(messages, self._prompts.prefix, where)
        if self._prompts.system is not None:
            messages = with_system(messages, self._prompts.system)
        return _Text(self._chat.render(messages, variables), raw=False)

    def _token_ids(self, ids: list[Any], where: str) -> TokenArray:
        """A prompt of token ids, sent as it is: no special tokens are added."""
        if self._prompts.prefix:
            raise RowError("invalid_row", f"{where} is a list of token ids, which --prefix cannot be put before")
        for i in ids:
            if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < self._text.vocab_size:
                shown = i if isinstance(i, int) and not isinstance(i, bool) else kind(i)
                size = self._text.vocab_size
                raise RowError("invalid_row", f"{where} must be token ids from 0 to {size - 1}; one is {shown}")
        return np.array(ids, dtype=np.int32)

    # Tokenizing, and whether it fits.

    def _tokenize(self, rendered: Sequence[_Rendered | RowError]) -> list[TokenArray | RowError]:
        tokens: dict[int, TokenArray | RowError] = {}
        texts: dict[bool, dict[int, str]] = {True: {}, False: {}}
        for i, r in enumerate(rendered):
            if isinstance(r, RowError):
                tokens[i] = r
            elif isinstance(r.prompt, _Text):
                texts[r.prompt.raw][i] = r.prompt.text
            else:
                tokens[i] = r.prompt
        for raw, of in texts.items():
            tokens.update(zip(of, self._encoder.encode(list(of.values()), special=raw), strict=True))
        return [tokens[i] for i in range(len(rendered))]

    def _draft(self, row: Row, rendered: _Rendered | RowError, tokens: TokenArray | RowError) -> Draft | Result:
        if isinstance(rendered, RowError):
            return Result.failed(row.number, rendered)
        if isinstance(tokens, RowError):
            return Result.failed(row.number, tokens)
        length, context = len(tokens), self._text.context_length
        if length == 0:
            return Result.failed(row.number, RowError("empty_prompt", "the prompt has no tokens"))
        if self._check_ids and int(tokens.max()) >= self._text.vocab_size:
            error = f"the prompt has token {int(tokens.max())}, and the model knows {self._text.vocab_size} tokens"
            return Result.failed(row.number, RowError("invalid_row", error))
        truncated = length >= context
        if truncated:
            if self._prompts.on_long_prompt == "error" or context < 2:
                error = f"the prompt has {length} tokens, and the model's context of {context} tokens must hold it and a completion"
                return Result.failed(row.number, RowError("prompt_too_long", error), length)
            tokens = self._cut(tokens, rendered.params.max_tokens)
        return Draft(
            row=row.number,
            tokens=tokens,
            params=rendered.params,
            max_tokens=min(rendered.params.max_tokens, context - len(tokens)),
            truncated=truncated,
            digest=row_digest(tokens, rendered.params),
        )

    def _cut(self, tokens: TokenArray, max_tokens: int) -> TokenArray:
        """The prompt cut to leave room for `max_tokens`, though never to less than half of the context.

        Room for one token would fit too, and would give completions of one token. A leading beginning-of-text token stays.
        """
        context = self._text.context_length
        keep = max(context - max_tokens, context // 2)
        if self._prompts.on_long_prompt == "truncate-right":
            return tokens[:keep].copy()
        if keep > 1 and tokens[0] == self._text.tokenizer.bos_token_id:
            return np.concatenate((tokens[:1], tokens[len(tokens) - keep + 1 :]))
        return tokens[len(tokens) - keep :].copy()

    # What the user hears once.

    def _note(self, text: str, about: str | None = None) -> None:
        about = about or text
        if about not in self._said:
            self._said.add(about)
            self.notes.append(text)

    def _note_columns(self, rows: Sequence[Row]) -> None:
        if "columns" in self._said:
            return
        found = sorted({name for row in rows for name in self._columns.only_carried(row.columns)})
        if found:
            one = len(found) == 1
            self._note(
                f"column{'' if one else 's'} {quoted(found)} {'is' if one else 'are'} carried to the output and not used as "
                f"sampling parameter{'' if one else 's'}; name {'it' if one else 'them'} in --row-params to use {'it' if one else 'them'}",
                "columns",
            )


def _same_model(asked: str, loaded: str) -> bool:
    return asked == loaded or asked == loaded.rstrip("/").rsplit("/", 1)[-1]
