"""Answers the requests of lm-evaluation-harness with an `LLM`.

Prompts are tokenized, split and shortened exactly as by the harness's model `hf`, so that results can be compared. All requests of a call run
in one plan: a few-shot prefix runs once for all documents and answers that have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from inspect import signature
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from batchgen.config import EngineConfig, PromptConfig
from batchgen.errors import BatchgenError, RowError, UsageError, in_one_line
from batchgen.llm import LLM, one_params
from batchgen.model.loader import pick_device
from batchgen.prompts.encoding import Encoder
from batchgen.result import Result
from batchgen.sampling_params import SamplingParams

_RAW = PromptConfig(chat=False)
_SCORED = PromptConfig(chat=False, score=True)
_HARNESS_DEVICE = "cuda:0"
"""The device that the harness names if the user names none. On a machine without it, any other device is meant, as for the model `hf`."""
_ENGINE = frozenset(field.name for field in fields(EngineConfig))


@register_model("batchgen")
class BatchgenLM(TemplateLM):  # type: ignore[misc]  # the harness is untyped
    """Answers the harness's requests with an `LLM`."""

    def __init__(
        self,
        pretrained: str,
        *,
        device: str = "auto",
        max_length: object = None,
        max_gen_toks: int = 256,
        prefix_token_id: int | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        batch_size: object = None,
        max_batch_size: object = None,
        **options: Any,
    ) -> None:
        """Loads the model. Raises `BatchgenError`, also for an unknown option and for a `max_length` beyond the context.

        The named arguments are those of the harness's model `hf`; `batch_size` and `max_batch_size` are not needed. `options` are those of `LLM`
        (`dtype`, `quantize`, …) and of `EngineConfig` (`kv_memory`, …).
        """
        super().__init__()
        engine = {name: options.pop(name) for name in _ENGINE & options.keys()}
        if device == _HARNESS_DEVICE and pick_device("auto").type != "cuda":
            device = "auto"
        unknown = options.keys() - (signature(LLM).parameters.keys() - {"model", "device", "engine", "task"})
        if unknown:
            raise UsageError(
                f"--model_args has the unknown option {min(unknown)!r}", "its options are those of LLM and EngineConfig"
            )
        try:
            self.llm = LLM(pretrained, device=device, engine=EngineConfig(**engine), **options)
        except (TypeError, ValueError) as e:
            raise UsageError(f"--model_args: {in_one_line(e)}") from e
        self.tokenizer = self.llm.tokenizer.hf_tokenizer
        context = self.llm.tokenizer.context_length
        if max_length is None:
            max_length = context
        if not isinstance(max_length, int) or not 1 <= max_length <= context:
            raise UsageError(f"max_length must be from 1 to the model's context of {context} tokens, not {max_length}")
        self.max_length: int = max_length
        self.max_gen_toks = max_gen_toks
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._template_args = {**(chat_template_args or {}), **thinking}
        digits = isinstance(think_end_token, str) and think_end_token.isdigit()
        self._think_end = int(think_end_token) if digits and think_end_token else think_end_token
        self._prefix_token_id = prefix_token_id
        self._encoder = Encoder(self.tokenizer)
        self._added: Mapping[str, int] = self.tokenizer.get_added_vocab()

    @property
    def eot_token_id(self) -> int | None:
        """The tokenizer's end token."""
        token: int | None = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without context: the given one, the beginning-of-text token, or the end token."""
        for token in (self._prefix_token_id, self.tokenizer.bos_token_id, self.eot_token_id):
            if token is not None:
                return int(token)
        raise UsageError("the tokenizer has no token that begins or ends a text", "add prefix_token_id to --model_args")

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's caches of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns the text of a conversation. A template that knows no system message gets the conversation without it."""
        from jinja2 import TemplateError

        def rendered(messages: list[dict[str, str]]) -> str:
            text: str = self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **self._template_args,
            )
            return text

        try:
            return rendered(chat_history)
        except TemplateError:
            return rendered([message for message in chat_history if message["role"] != "system"])

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Returns the token ids of a text. Special tokens are put around the text unless it begins with the prefix token, or as the flag says."""
        return self._encoded([string], self._prefix(), add_special_tokens)[0]

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Returns the log-probability of each continuation after its context, and whether greedy decoding would write it."""
        pairs = [_with_blanks_moved(*request.args) for request in requests]
        empty = [request.args[0] == "" for request in requests]
        texts = [context + continuation for context, continuation in pairs]
        contexts = list(dict.fromkeys(context for context, _ in pairs))
        prefix, first = [self.prefix_token_id], self._prefix()
        tokens_of = dict(zip(contexts, self._encoded(contexts, first), strict=True))
        wholes = iter(self._encoded([t for t, bare in zip(texts, empty, strict=True) if not bare], first))
        alone = iter(self._encoded([t for t, bare in zip(texts, empty, strict=True) if bare], first, False))
        encoded = []
        for request, (context, _), bare in zip(requests, pairs, empty, strict=True):
            if bare:
                tokens = next(alone)
                before, after = prefix, tokens[1:] if tokens[:1] == prefix else tokens
            else:
                tokens, before = next(wholes), tokens_of[context]
                before, after = before or prefix, tokens[len(before) :]
            encoded.append((request.args, before, after))
        return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each whole text. A text longer than the context is scored in pieces, each token once."""
        texts = [request.args[0] for request in requests]
        pieces: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for tokens in self._encoded(texts, self._prefix()):
            overlapping = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            own = [(None, *make_disjoint_window(piece)) for piece in overlapping]
            pieces += own
            counts.append(len(own))
        scores = iter(self._loglikelihood_tokens(pieces, disable_tqdm=disable_tqdm))
        sums = [float(sum(next(scores)[0] for _ in range(count))) for count in counts]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns the text generated after each context, up to the first of its stop texts.

        Raises `UsageError` for a generation parameter that batchgen does not have, or for `max_gen_toks` that leave no room for a context.
        """
        bos = self.tokenizer.bos_token
        tokens = self._encoded([request.args[0] for request in requests], bos)
        stops, prompts, params = [], [], []
        for request, context in zip(requests, tokens, strict=True):
            until, own = self._sampling(request.args[1])
            room = self.max_length - own["max_tokens"]
            if room < 1:
                raise UsageError(
                    f"max_gen_toks must be below max_length, which is {self.max_length}, not {own['max_tokens']}"
                )
            stops.append(until)
            prompts.append(context[-room:])
            try:
                params.append(one_params(own))
            except (TypeError, ValueError) as e:
                raise UsageError(f"--gen_kwargs: {e}") from None
        texts = [""] * len(requests)

        def finish(place: int, result: Result) -> None:
            texts[place] = self._answer(list(result.token_ids), stops[place])
            self.cache_hook.add_partial("generate_until", requests[place].args, texts[place])

        self._run(prompts, params, _RAW, finish, "Running generate_until requests", disable_tqdm)
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Scores token ids after token ids. Contexts that are too long lose their beginning; the last token is never run."""
        rows = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise UsageError(
                    f"a continuation has {len(continuation)} tokens, more than max_length, which is {self.max_length}"
                )
            tokens = (context + continuation)[-(self.max_length + 1) :]
            start = len(tokens) - len(continuation)
            rows.append({"prompt": tokens[:start], "completion": tokens[start:] or ""})
        answers = [(0.0, True)] * len(rows)

        def finish(place: int, result: Result) -> None:
            assert result.score is not None
            answers[place] = (result.score.logprob, result.score.greedy)
            if requests[place][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[place][0], answers[place])

        self._run(rows, None, _SCORED, finish, "Running loglikelihood requests", disable_tqdm)
        return answers

    def _run(
        self,
        prompts: Sequence[Any],
        params: list[SamplingParams] | None,
        options: PromptConfig,
        finish: Callable[[int, Result], None],
        title: str,
        quiet: bool,
    ) -> None:
        """Runs all prompts in one plan and calls `finish` with the place and result of each. Raises `BatchgenError` if one fails."""
        if not prompts:
            return
        places: dict[int, int] = {}
        with tqdm(total=len(prompts), desc=title, disable=quiet) as bar:

            def done(result: Result) -> None:
                if result.failed:
                    raise BatchgenError(f"request {places[result.row]} of this call failed: {result.error_message}")
                finish(places[result.row], result)
                bar.update()

            numbers = self.llm.add(prompts, params, prompt_options=options, on_result=done)
            places.update((number, place) for place, number in enumerate(numbers))
            self.llm.run()

    def _sampling(self, given: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
        """Returns the stop texts of a request, and its parameters for `LLM`."""
        own = dict(normalize_gen_kwargs(dict(given), self.max_gen_toks))
        end = None if self.eot_token_id is None else self.tokenizer.decode(self.eot_token_id)
        until = [text for text in handle_stop_sequences(own.pop("until"), eos=end) if text]
        own.setdefault("temperature", 0.0)
        del own["do_sample"]
        if own.get("num_beams") == 1:
            del own["num_beams"]
        return until, {
            "max_tokens": own.pop("max_gen_toks"),
            **own,
            "stop": until,
            # The text of a special token never appears in a completion.
            "stop_token_ids": [self._added[text] for text in until if text in self._added],
            "reasoning": "off",
        }

    def _answer(self, tokens: list[int], until: list[str]) -> str:
        """Returns the text of a completion without its thoughts, up to the first stop text."""
        end = self._think_end
        if isinstance(end, int) and end in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(end) :]
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        if isinstance(end, int):
            text = text.lstrip()
        answer: str = postprocess_generated_text(
            generation=text, stop=until, think_end_token=end if isinstance(end, str) else None
        )
        return answer

    def _prefix(self) -> str:
        """Returns the text of the prefix token."""
        text: str = self.tokenizer.decode(self.prefix_token_id)
        return text

    def _encoded(self, texts: Sequence[str], first: str | None, special: bool | None = None) -> list[list[int]]:
        """Returns the token ids of each text: with special tokens as `special` says; if it is None, unless the text begins with `first`."""
        found: dict[int, list[int]] = {}
        for wanted in (True, False):
            own = [i for i, text in enumerate(texts) if _needs(text, first, special) is wanted]
            for i, tokens in zip(own, self._encoder.encode([texts[i] for i in own], special=wanted), strict=True):
                if isinstance(tokens, RowError):
                    raise BatchgenError(f"request {i} of this call failed: {tokens.message}")
                found[i] = tokens.tolist()
        return [found[i] for i in range(len(texts))]


def _needs(text: str, first: str | None, special: bool | None) -> bool:
    """Whether special tokens are to be put around a text."""
    return not (first is not None and text.startswith(first)) if special is None else special


def _with_blanks_moved(context: str, continuation: str) -> tuple[str, str]:
    """Returns the pair with the blanks at the end of the context put before the continuation."""
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation
