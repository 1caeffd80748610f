"""A model in a Python program: prompts in, results out, nothing on disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from batchgen.config import EngineConfig, ModelConfig, PromptConfig
from batchgen.devices import AnyEngine, open_engine
from batchgen.generation import request_of
from batchgen.grammar_check import GrammarCheck
from batchgen.prefix import plan_prefixes
from batchgen.prompts import Draft, LoadedTokenizer, PromptBuilder, load_tokenizer
from batchgen.records import Row
from batchgen.request import Request, leaves_of, row_key
from batchgen.result import Result
from batchgen.sampling_params import SamplingParams
from batchgen.stats import EngineStats

Message = Mapping[str, Any]
OnResult = Callable[[Result], None]
OnToken = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class _Arrival:
    requests: list[Request]
    failed: list[Result]
    on_result: OnResult
    on_token: OnToken | None


class LLM:
    """A loaded model. Prefixes that calls share are not run again, while memory lasts.

    `model` is a folder or a hub name; `dtype`, `device`, `device_map`, `revision`, `trust_remote_code` and `compile` are those of
    `ModelConfig`; `engine` says how the work is batched. Raises `BatchgenError`.

    `generate` and `score` do a list of prompts and return. `add` gives prompts to a running loop, `run` is the loop: callbacks
    of either may add and cancel, and so may other threads; everything else is for one thread.

    With several devices (`device="cuda:0,1"`) each has the model in a process of its own: `on_token` is then told of tokens some hundredths of a
    second after they were drawn.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        device_map: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        compile: str = "auto",
        engine: EngineConfig | None = None,
    ) -> None:
        config = ModelConfig(
            model=str(model),
            revision=revision,
            dtype=dtype,
            device=device,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            compile=compile,
        )
        self.config = engine or EngineConfig()
        self.text: LoadedTokenizer = load_tokenizer(config)
        self.engine: AnyEngine = open_engine(config, self.text, self.config)
        self._grammars = GrammarCheck(self.text)
        self._numbers = count()
        self._arriving: deque[_Arrival] = deque()
        self._requests: dict[int, Request] = {}
        self._running = False

    @property
    def stats(self) -> EngineStats:
        """Figures of all calls so far; also while `run` runs."""
        return self.engine.stats

    @property
    def unfinished(self) -> int:
        """Prompts that were added and are not done."""
        return len(self._requests)

    def generate(
        self,
        prompts: Sequence[str | Sequence[Message]],
        params: SamplingParams | None = None,
        *,
        prompt_options: PromptConfig | None = None,
    ) -> list[Result]:
        """One result per prompt, in order. A prompt is a text, or the messages of a conversation (`role`, `content`).

        A text goes through the model's chat template, where it has one, as one message of the user, unless `prompt_options`
        say otherwise. A prompt that cannot be run has `finish_reason` "error", and the others go on.
        """
        return self._do([_columns(prompt) for prompt in prompts], params, prompt_options)

    def score(
        self,
        prompts: Sequence[str | Sequence[Message]],
        completions: Sequence[str],
        *,
        prompt_options: PromptConfig | None = None,
    ) -> list[Result]:
        """How likely each completion is after its prompt: one result per pair, in order, with its `score`."""
        options = replace(prompt_options or PromptConfig(), score=True)
        pairs = zip(prompts, completions, strict=True)
        return self._do([_columns(prompt) | {options.completion_column: text} for prompt, text in pairs], None, options)

    def add(
        self,
        prompts: Sequence[str | Sequence[Message]],
        params: SamplingParams | None = None,
        *,
        prompt_options: PromptConfig | None = None,
        on_result: OnResult,
        on_token: OnToken | None = None,
    ) -> list[int]:
        """Adds prompts, to be done by `run`; returns their numbers, which no other prompt has.

        `on_result(result)` is called for each, `result.row` its number; `on_token(number, completion, token)` for every token
        as it is drawn, `completion` counting those of the prompt.
        """
        return self._add([_columns(prompt) for prompt in prompts], params, prompt_options, on_result, on_token)

    def cancel(self, number: int) -> None:
        """Ends a prompt where it stands: its result has `finish_reason` "cancelled" and what was generated. Nothing if it is done."""
        request = self._requests.get(number)
        if request is not None:
            self.engine.cancel(request)

    def run(self) -> None:
        """Runs until all that was added is done, what is added meanwhile too. An error of a callback ends it and drops the rest."""
        if self._running:
            raise RuntimeError("this model is running: add prompts to it with add()")
        self._running = True
        try:
            self._take()
            while self.engine.unfinished:
                self.engine.run(stop=self._take)
                self._take()
        except BaseException:
            self._arriving.clear()
            self._requests.clear()
            raise
        finally:
            self._running = False

    def close(self) -> None:
        """Ends the processes of several devices, which the program's end does too. The model cannot be used any more."""
        self.engine.close()

    def _do(
        self, rows: list[dict[str, Any]], params: SamplingParams | None, options: PromptConfig | None
    ) -> list[Result]:
        results: dict[int, Result] = {}
        numbers = self._add(rows, params, options, lambda result: results.__setitem__(result.row, result), None)
        self.run()
        return [replace(results[number], row=place) for place, number in enumerate(numbers)]

    def _add(
        self,
        columns: list[dict[str, Any]],
        params: SamplingParams | None,
        options: PromptConfig | None,
        on_result: OnResult,
        on_token: OnToken | None,
    ) -> list[int]:
        builder = PromptBuilder(self.text, options or PromptConfig(), params or SamplingParams())
        numbers = [next(self._numbers) for _ in columns]
        rows = [
            Row(number=number, columns=of, error=None, source=f"prompt {place}")
            for place, (number, of) in enumerate(zip(numbers, columns, strict=True))
        ]
        requests: list[Request] = []
        failed: list[Result] = []
        seen: dict[bytes, int] = {}
        for built in builder.build(rows):
            draft = self._grammars.of_row(built) if isinstance(built, Draft) else built
            if isinstance(draft, Draft):
                occurrence = seen.get(draft.digest, 0)
                seen[draft.digest] = occurrence + 1
                requests.append(request_of(draft, row_key(draft.digest, occurrence)))
            else:
                failed.append(draft)
        self._requests.update((request.row, request) for request in requests)
        self._arriving.append(_Arrival(requests, failed, on_result, on_token))
        return numbers

    def _take(self) -> None:
        """Hands to the engine what has been added."""
        while self._arriving:
            arrival = self._arriving.popleft()

            def done(result: Result, on_result: OnResult = arrival.on_result) -> None:
                self._requests.pop(result.row, None)
                on_result(result)

            for result in arrival.failed:
                done(result)
            if arrival.requests:
                leaves = leaves_of(arrival.requests)
                plan = plan_prefixes([leaf.tokens for leaf in leaves], self.config.chunk_size, share=self.config.share)
                self.engine.add(leaves, plan, done, arrival.on_token)


def _columns(prompt: str | Sequence[Message]) -> dict[str, Any]:
    return {"prompt" if isinstance(prompt, str) else "messages": prompt}
