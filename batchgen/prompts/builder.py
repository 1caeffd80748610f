"""Turns rows into requests: renders them, tokenizes them and checks their length."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np

from batchgen.config import PromptConfig
from batchgen.errors import RowError, UsageError
from batchgen.options import flag_of
from batchgen.prompts.columns import check_task, task_option
from batchgen.prompts.encoding import Encoder, TextEncoder, Texts
from batchgen.prompts.images import PromptImages, ShownPrompt
from batchgen.prompts.params import CHOICES_NAMES, SCHEMA_NAMES, RowParams
from batchgen.prompts.rendering import Rendered, Renderer, Text
from batchgen.prompts.tokenizer import LoadedTokenizer
from batchgen.records.rows import Row
from batchgen.request import NO_TEXT, Image, Request, TokenArray, row_digest
from batchgen.result import Result, Score
from batchgen.sampling_params import AUTO_MAX_TOKENS, AUTO_MAX_TOKENS_THINKING, SamplingParams


class Prompt(NamedTuple):
    """A prompt's tokens, and the images among them."""

    tokens: TokenArray
    images: tuple[Image, ...] = ()


_ANSWER_SHARE = 4  # a shortened prompt leaves at most a quarter of the context for its completion


class PromptBuilder:
    """Makes the requests of a job's rows, a window at a time."""

    chat: bool
    """Whether prompts go through a chat template; otherwise they are sent raw."""
    notes: list[str]
    """Notes for the user, each only once. Grows while windows are built; `Tracker.show_notes` takes out what it shows."""

    def __init__(
        self,
        tokenizer: LoadedTokenizer,
        prompts: PromptConfig,
        sampling: SamplingParams,
        *,
        now: datetime | None = None,
        images: PromptImages | None = None,
    ) -> None:
        """`now`: the time that a chat template writes; None for the time of each render. `images`: those of a builder before this one. Raises `UsageError` for options that cannot be satisfied: a system message without a chat template, invalid Jinja."""
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._head = tokenizer.head
        generates = not task_option(prompts, self._head)
        thinks = tokenizer.thinking is not None
        model = tokenizer.sampling if prompts.sampling_defaults == "model" and generates else {}
        most = AUTO_MAX_TOKENS_THINKING if thinks else AUTO_MAX_TOKENS
        self._params = RowParams(prompts.row_params, sampling, model, most, prompts.choices_column)
        self.sampling = self._params.default
        """The command's parameters, with the model's own for those that were not given."""
        self.first_max_tokens: int | None = None
        """The command's `max_tokens` before a later run raised it: rows get the keys that they had then. None: it was not raised."""
        self.images = PromptImages(tokenizer) if images is None else images
        self._renderer = Renderer(tokenizer, prompts, self._params, self.images, now)
        self.date = now if self._renderer.writes_date else None
        """The time that the chat template writes into prompts; None if it writes none, or that of each render."""
        self.chat, self.notes, self.columns = self._renderer.chat, self._renderer.notes, self._renderer.columns
        self._encoder = Encoder(tokenizer.hf_tokenizer, self._renderer.note)
        self._texts = TextEncoder(tokenizer, self._encoder)
        self.reasoning = (
            tokenizer.thinking is not None and sampling.reasoning == "auto" and generates and not self._params.labels
        )
        """Whether thoughts are separated from the text of completions."""
        self.tool_calls = self.chat and tokenizer.tool_format is not None and generates and not self._params.labels
        """Whether answers may have calls of tools, if rows have tools."""
        used = {} if self._params.labels else {n: v for n, v in model.items() if n not in sampling.given}
        if used:
            shown = ", ".join(f"{name} {value:g}" for name, value in used.items())
            self._renderer.note(
                f"sampling uses the model's {tokenizer.generation_file}: {shown} (--sampling-defaults greedy ignores it)"
            )
        if tokenizer.unused and generates:
            self._renderer.note(f"not used of the model's {tokenizer.generation_file}: {', '.join(tokenizer.unused)}")
        self.sampling_from = self._params.sources() if generates else {}
        """The values that rows without parameters of their own are sampled with, and where each is from: see `RowParams.sources`."""
        self._check_sampling(sampling)
        self._note_unused(sampling)
        # Set by transformers, whose own advice is not shown.
        if getattr(tokenizer.hf_tokenizer, "fix_mistral_regex", None) is False:
            self._renderer.note(
                f"the tokenizer of {tokenizer.hf_tokenizer.name_or_path!r} splits text by a pattern known to be wrong; "
                'to fix it, put "fix_mistral_regex": true into its tokenizer_config.json'
            )
        self._short_context = tokenizer.short_context
        # Only a tokenizer with a larger vocabulary than the model can produce a token that the model does not know.
        self._check_ids = len(tokenizer.hf_tokenizer) > tokenizer.vocab_size

    def _check_sampling(self, sampling: SamplingParams) -> None:
        check_task(self._prompts, sampling, self._head.task if self._head is not None else "generate")
        texts = self._texts.choices(sampling.choices) if sampling.choices else ()
        if isinstance(texts, RowError):
            raise UsageError(f"--choices: {texts.message}")
        unknown = self._unknown_stop_token(sampling)
        if unknown is not None:
            raise UsageError(f"--stop-token-id {unknown}", "give ids of the model's vocabulary")

    def _note_unused(self, sampling: SamplingParams) -> None:
        """Notes sampling options that have no effect, or another one than they seem to have."""
        labels = "--choices" if sampling.choices else "--choices-column"
        task = task_option(self._prompts, self._head) or (labels if self._params.labels else "")
        if not task:
            if sampling.reasoning_budget is not None and self._tokenizer.thinking is None:
                self._renderer.note(
                    "--reasoning-budget has no effect: batchgen does not know how this model marks thoughts"
                )
            if any(re.search(r"\\[nrt]", text) for text in sampling.stop):
                self._renderer.note(
                    r"--stop has a backslash and a letter, as in \n, which is no line break; $'\n' is one in a shell"
                )
            return
        used = {"seed", "reasoning"}
        used |= {"choices", "temperature", "top_choices"} if task == labels else set()
        used |= {"top_choices"} if task == "--classify" else set()
        unused = [flag_of(SamplingParams, f.name) for f in fields(sampling) if f.name in {*sampling.given} - used]
        if unused:
            names = " and ".join(filter(None, (", ".join(unused[:-1]), unused[-1])))
            verb = "has" if len(unused) == 1 else "have"
            self._renderer.note(f"{names} {verb} no effect with {task}, which generates nothing")

    def _unknown_stop_token(self, params: SamplingParams) -> str | None:
        last, size = max(params.stop_token_ids, default=0), self._tokenizer.vocab_size
        return f"{last} is beyond the model's {size} tokens" if last >= size else None

    def optional_results(self, types: Mapping[str, Any]) -> frozenset[str]:
        """Returns the optional parts of a result that rows may have beside those that the command asks for (`parts_asked`), by its options and the
        types of a table's columns."""
        if task_option(self._prompts, self._head):
            return frozenset()
        found, may_have = set[str](), self._params.may_have
        if self.reasoning:
            found.add("reasoning")
        if self.tool_calls and (
            not types.keys().isdisjoint(("tools", "body")) or self._prompts.chat_template_kwargs.get("tools")
        ):
            found.add("tool_calls")
        if may_have(("n", "logprobs"), types):
            found.add("choices")
        if may_have(CHOICES_NAMES, types):
            found.add("choice_probs")
        if types and "valid" not in types and may_have(SCHEMA_NAMES, types):
            found.add("valid")
        return frozenset(found)

    def stop(self) -> None:
        """Ends `build` in another thread soon, by an exception."""
        self._renderer.stopped = True

    def build(self, rows: Sequence[Row], params: Sequence[SamplingParams] | None = None) -> list[Request | Result]:
        """Returns one item per row, in order: a request, or the result of a row that failed or has nothing to score.

        `params`: the default parameters of each row; None for the command's.
        """
        rendered = self._renderer.render(rows, params=params)
        self._renderer.note_columns(rows)
        tokens, texts = self._tokenize(rendered), self._tokenize_texts(rendered)
        return [self._built(*parts) for parts in zip(rows, rendered, tokens, texts, strict=True)]

    def _tokenize(self, rendered: Sequence[Rendered | RowError]) -> list[Prompt | RowError]:
        found: dict[int, Prompt | RowError] = {}
        texts: dict[bool, dict[int, str]] = {True: {}, False: {}}
        shown = self._show_images(rendered)
        for i, r in enumerate(rendered):
            if isinstance(r, RowError):
                found[i] = r
            elif isinstance(r.prompt, Text):
                prompt = shown.get(i)
                if isinstance(prompt, RowError):
                    found[i] = prompt
                else:
                    texts[self._adds_special_tokens(r.prompt.raw, prompt)][i] = (
                        r.prompt.text if prompt is None else prompt.text
                    )
            else:
                found[i] = Prompt(r.prompt)
        for raw, of in texts.items():
            for i, tokens in zip(of, self._encoder.encode(list(of.values()), special=raw), strict=True):
                found[i] = tokens if isinstance(tokens, RowError) else self._with_images(tokens, shown.get(i))
        return [found[i] for i in range(len(rendered))]

    def _show_images(self, rendered: Sequence[Rendered | RowError]) -> dict[int, ShownPrompt | RowError]:
        """Returns the prompts with images, by their places in `rendered`."""
        prompts = {
            i: r.prompt
            for i, r in enumerate(rendered)
            if isinstance(r, Rendered) and isinstance(r.prompt, Text) and r.prompt.images
        }
        files = iter(self.images.store.locate([source for prompt in prompts.values() for source in prompt.images]))
        found: dict[int, ShownPrompt | RowError] = {}
        for i, prompt in prompts.items():
            own = list(islice(files, len(prompt.images)))
            try:
                found[i] = self.images.shown(prompt.text, own)
            except RowError as e:
                found[i] = e
        return found

    def _adds_special_tokens(self, raw: bool, prompt: ShownPrompt | None) -> bool:
        """Whether special tokens are added to a text, and to a chat with images, as most processors of transformers do if the chat template has written none."""
        if prompt is None:
            return raw
        bos, processor = self._tokenizer.hf_tokenizer.bos_token, self.images.processor
        begun = bool(bos) and prompt.text.startswith(bos)
        return not processor.writes_bos and (raw or (processor.adds_special_tokens and not begun))

    def _with_images(self, tokens: TokenArray, shown: ShownPrompt | RowError | None) -> Prompt | RowError:
        error = shown if isinstance(shown, RowError) else self._unknown_token(tokens)
        if error is not None:
            return error
        if not isinstance(shown, ShownPrompt):
            return Prompt(tokens)
        try:
            return Prompt(shown.tokens(tokens), shown.images)
        except RowError as e:
            return e

    def _tokenize_texts(self, rendered: Sequence[Rendered | RowError]) -> list[Texts | RowError]:
        """Returns the texts to score of each row: its choices or its completion; none if the row is generated."""
        completions = [r.completion for r in rendered if isinstance(r, Rendered) and isinstance(r.completion, str)]
        encoded = iter(self._texts.texts(completions))
        found: list[Texts | RowError] = []
        for r in rendered:
            if isinstance(r, RowError):
                found.append(r)
            elif self._head is not None or (self._prompts.prompt_logprobs and not self._prompts.score):
                found.append(NO_TEXT)
            elif r.completion is None:
                found.append(self._texts.choices(r.params.choices) if r.params.choices else ())
            elif not isinstance(r.completion, str):
                found.append((r.completion,))
            else:
                tokens = next(encoded)
                found.append(self._not_scored(tokens) if isinstance(tokens, RowError) else (tokens,))
        return found

    def _not_scored(self, error: RowError) -> RowError:
        return RowError(error.type, f"column {self._prompts.completion_column!r}: {error.message}")

    def _built(
        self, row: Row, rendered: Rendered | RowError, prompt: Prompt | RowError, texts: Texts | RowError
    ) -> Request | Result:
        if isinstance(rendered, RowError):
            return Result.from_error(row.number, rendered)
        if isinstance(prompt, RowError):
            return Result.from_error(row.number, prompt)
        if isinstance(texts, RowError):
            return Result.from_error(row.number, texts, len(prompt.tokens))
        if len(prompt.tokens) == 0:
            return Result.from_error(row.number, RowError("empty_prompt", "the prompt has no tokens"))
        if prompt.images and self._prompts.prompt_logprobs and not self._prompts.score:
            error = RowError("unsupported_content", "--prompt-logprobs cannot score a prompt with images; --score can")
            return Result.from_error(row.number, error, len(prompt.tokens))
        return self._request(row, rendered, prompt, texts)

    def _unknown_token(self, tokens: TokenArray) -> RowError | None:
        if not self._check_ids or len(tokens) == 0 or int(tokens.max()) < self._tokenizer.vocab_size:
            return None
        known = f"the model knows {self._tokenizer.vocab_size} tokens"
        return RowError("invalid_row", f"the prompt has token {int(tokens.max())}, and {known}")

    def _request(self, row: Row, rendered: Rendered, prompt: Prompt, texts: Texts) -> Request | Result:
        tokens = prompt.tokens
        params, scored = rendered.params, rendered.completion is not None
        unknown = self._unknown_stop_token(params)
        if unknown is not None:
            error = RowError("unsupported_parameter", f"stop_token_ids: {unknown}")
            return Result.from_error(row.number, error, len(tokens))
        if params.n > 1 and params.greedy:
            self._renderer.note(
                f"the {params.n} completions of a prompt are identical at temperature 0; use --temperature above 0",
                "greedy",
            )
        try:
            fitted = self._fitted(row, rendered, prompt, texts)
        except RowError as e:
            return Result.from_error(row.number, e, len(tokens))
        truncated = fitted is not prompt
        tokens = fitted.tokens
        logprobs = "" if not self._prompts.prompt_logprobs else "completion" if scored else "prompt"
        if scored and len(texts[0]) == 0:  # nothing to run: the empty text has probability 1
            return Result(
                row=row.number,
                text=None,
                finish_reason=None,
                prompt_tokens=len(tokens),
                truncated=truncated,
                score=Score(0.0, 0, greedy=True),
                prompt_logprobs=() if logprobs else None,
            )
        if self._head is not None and self._head.pad_token_id is not None:
            tokens = _without_padding(tokens, self._head.pad_token_id)
        return Request(
            row=row.number,
            tokens=tokens,
            params=params,
            max_tokens=0 if texts else min(params.max_tokens, self._tokenizer.context_length - len(tokens)),
            truncated=truncated,
            key=row_digest(
                tokens, params, texts if scored else (), rendered.tools, self._max_tokens_in_key(params.max_tokens)
            ),
            texts=texts,
            prompt_logprobs=logprobs,
            priority=rendered.priority,
            tools=rendered.tools,
            source=row.source,
            images=fitted.images,
            long=0 < self._short_context < len(tokens) + max(map(len, texts), default=1) - 1,
        )

    def _max_tokens_in_key(self, max_tokens: int) -> int:
        """Returns the number that a row's key has for its effective `max_tokens`. Different values of `max_tokens` give different numbers."""
        first = self.first_max_tokens
        if first is None:
            return max_tokens
        if max_tokens == self.sampling.max_tokens:
            return first
        return 0 if max_tokens == first else max_tokens  # a row's own limit, which is never 0

    def _fitted(self, row: Row, rendered: Rendered, prompt: Prompt, texts: Texts) -> Prompt:
        """Returns the prompt if the context can hold them and what follows, else a shortened one if the user allows it.

        The prompt is followed by the longest of `texts`, or by a completion. A shortened prompt leaves room for `max_tokens`, but for at most
        a quarter of the context. A completion that is scored has one token more than the context has room for, because its last token is never
        run. Raises `RowError("prompt_too_long")`.
        """
        context, truncate = self._tokenizer.context_length, self._prompts.on_long_prompt != "error"
        length = len(prompt.tokens)
        if rendered.completion is not None:
            room = max(0, len(texts[0]) - 1)
            after = f"the text to score, of {len(texts[0])} tokens, without its last one"
        elif self._head is not None or self._prompts.prompt_logprobs:
            room = 0
            after = "nothing else"
        elif texts:
            room = max(map(len, texts))
            after = f"the longest choice, of {room} tokens"
        else:
            room = min(rendered.params.max_tokens, max(1, context // _ANSWER_SHARE)) if truncate else 1
            after = "a completion"
        keep = context - room
        if length <= keep:
            return prompt
        fitted = self._first_tokens(rendered, prompt.tokens, keep) if self._head is not None else None
        if fitted is None and truncate:
            fitted = self._shortened(row, rendered, length, keep)
        if fitted is None:
            error = (
                f"the prompt has {length} tokens, and the model's context of {context} tokens must hold it and {after}"
            )
            if truncate:
                error += "; the text around it (template, system message, prefix) alone leaves too little room"
            raise RowError("prompt_too_long", error)
        return fitted

    def _first_tokens(self, rendered: Rendered, tokens: TokenArray, keep: int) -> Prompt | None:
        """Returns a raw text cut to `keep` tokens as sentence-transformers and transformers cut it: after a token, with the special tokens that follow it.

        Returns None where more than the end of the tokens would go: with `truncate-left`, a chat template, `--template` or images.
        """
        text, prompts, after = rendered.prompt, self._prompts, self._encoder.tokens_after
        if not isinstance(text, Text) or not text.raw or text.images or after is None:
            return None
        if prompts.on_long_prompt != "truncate-right" or prompts.template is not None:
            return None
        (prefix,) = self._encoder.encode([self._renderer.prefix], special=True)
        if isinstance(prefix, RowError) or len(prefix) >= keep:
            return None
        return Prompt(np.concatenate((tokens[: keep - after], tokens[len(tokens) - after :])))

    def _shortened(self, row: Row, rendered: Rendered, length: int, keep: int) -> Prompt | None:
        """Returns the prompt with its longest texts shortened to at most `keep` tokens, and not many fewer; None if no text is long enough.

        Searches for the number of characters that each text may keep, by interpolation and every fourth time by halving.
        """
        prompt = rendered.prompt
        fits, fits_tokens, best = 0, 0, None
        fails, fails_tokens = len(prompt.text if isinstance(prompt, Text) else prompt), length
        for step in count(1):
            if fails - fits <= 1 or (best is not None and keep - fits_tokens <= keep >> 8):
                break
            guess = fits + (fails - fits) * (keep - fits_tokens) // (fails_tokens - fits_tokens)
            limit = (fits + fails) // 2 if step % 4 == 0 else min(max(guess, fits + 1), fails - 1)
            found = self._shorter(row, limit)
            tokens = len(found.tokens)
            if tokens <= keep:
                fits, fits_tokens, best = limit, tokens, found
            else:
                fails, fails_tokens = limit, tokens
        return best

    def _shorter(self, row: Row, limit: int) -> Prompt:
        """Returns the prompt if every text keeps at most `limit` characters. Raises `RowError`."""
        (rendered,) = self._renderer.render([row], limit)
        prompt = rendered if isinstance(rendered, RowError) else self._tokenize([rendered])[0]
        if isinstance(prompt, RowError):
            raise prompt
        return prompt


def _without_padding(tokens: TokenArray, pad: int) -> TokenArray:
    """Returns the tokens up to the last one that is not padding, or the first token alone. What comes after it changes nothing before it."""
    kept = np.flatnonzero(tokens != pad)
    return tokens[: kept[-1] + 1 if len(kept) else 1]
