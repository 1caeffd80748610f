"""A model in a Python program: prompts in, results out, nothing on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchgen.config import EngineConfig, ModelConfig, PromptConfig
from batchgen.job import request_of
from batchgen.prefix import plan_prefixes
from batchgen.prompts import Draft, LoadedTokenizer, PromptBuilder, load_tokenizer
from batchgen.records import Row
from batchgen.request import Request, Result, SamplingParams, row_key

Message = Mapping[str, Any]


class LLM:
    """A loaded model. Prefixes that a call shares with the one before are not run again.

    `model` is a folder or a hub name; `dtype`, `device`, `revision` and `trust_remote_code` are those of `ModelConfig`; `engine` says how
    the work is batched. Raises `BatchgenError`.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
        engine: EngineConfig | None = None,
    ) -> None:
        from batchgen.engine.engine import Engine  # imports torch
        from batchgen.engine.loading import load_model

        config = ModelConfig(
            model=str(model), revision=revision, dtype=dtype, device=device, trust_remote_code=trust_remote_code
        )
        self.config = engine or EngineConfig()
        self.text: LoadedTokenizer = load_tokenizer(config)
        self.engine = Engine(load_model(config, self.text), self.text, self.config)

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
        builder = PromptBuilder(self.text, prompt_options or PromptConfig(), params or SamplingParams())
        rows = [_row(number, prompt, builder) for number, prompt in enumerate(prompts)]
        results: dict[int, Result] = {}
        requests: list[Request] = []
        seen: dict[bytes, int] = {}
        for built in builder.build(rows):
            if isinstance(built, Draft):
                occurrence = seen.get(built.digest, 0)
                seen[built.digest] = occurrence + 1
                requests.append(request_of(built, row_key(built.digest, occurrence)))
            else:
                results[built.row] = built

        def keep(result: Result) -> None:
            results[result.row] = result

        if requests:
            plan = plan_prefixes(
                [request.tokens for request in requests], self.config.chunk_size, share=self.config.share
            )
            self.engine.generate(requests, plan, on_result=keep, stop=None)
        return [results[row.number] for row in rows]


def _row(number: int, prompt: str | Sequence[Message], builder: PromptBuilder) -> Row:
    name = "prompt" if isinstance(prompt, str) else "messages"
    return Row(number=number, columns={name: prompt}, error=None, source=f"prompt {number}")
