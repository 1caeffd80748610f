"""Rows under way: the leaves of each request, gathered until its result is whole. Knows tokens and numbers, not the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from batchgen.engine.randoms import uniforms
from batchgen.engine.window import Window
from batchgen.errors import RowError
from batchgen.request import Request
from batchgen.result import Completion, Result, Score, TokenLogprob


@dataclass(slots=True, eq=False)
class Row:
    """A request whose leaves are being generated or scored."""

    request: Request
    on_result: Callable[[Result], None]
    on_token: Callable[[int, int, int], None] | None
    """Called with row, number of the completion and token, for each token as it is drawn."""
    window: Window
    places: dict[int, int] = field(default_factory=dict)
    """By number of a leaf: its depth-first place in the window."""
    completions: dict[int, Completion] = field(default_factory=dict)
    """By number: those that have ended."""
    scores: dict[int, list[tuple[float, bool]]] = field(default_factory=dict)
    """By number: `Sequence.text_scores` of the texts that have been scored."""
    began: bool = False

    @property
    def whole(self) -> bool:
        """Whether all of its leaves have ended."""
        return len(self.completions) + len(self.scores) == self.request.leaves

    def result(self) -> Result:
        """Of a whole row."""
        return self._scored() if self.request.texts else self._generated()

    def failed(self, error: RowError) -> Result:
        return Result.failed(self.request.row, error, len(self.request.tokens))

    def _generated(self) -> Result:
        completions = tuple(self.completions[i] for i in range(self.request.leaves))
        first = completions[0]
        params = self.request.params
        return Result(
            row=self.request.row,
            text=first.text,
            finish_reason=first.finish_reason,
            prompt_tokens=len(self.request.tokens),
            completion_tokens=sum(len(c.token_ids) for c in completions),
            token_ids=first.token_ids,
            truncated=self.request.truncated,
            completions=completions if params.n > 1 or params.logprobs is not None else (),
        )

    def _scored(self) -> Result:
        scores = [self.scores[i] for i in range(self.request.leaves)]
        sums = [math.fsum(logprob for logprob, _ in tokens) for tokens in scores]
        if any(math.isnan(total) for total in sums):
            return self.failed(RowError("numerical_error", "the model's logits for the text are not numbers"))
        result = partial(
            Result, row=self.request.row, prompt_tokens=len(self.request.tokens), truncated=self.request.truncated
        )
        choices = self.request.params.choices
        if choices:
            probs = _normalised(sums)
            text = choices[_chosen(sums, probs, self.request)]
            return result(text=text, finish_reason="stop", choice_probs=dict(zip(choices, probs, strict=True)))
        greedy = all(likeliest for _, likeliest in scores[0])
        return result(text=None, finish_reason=None, score=Score(sums[0], len(scores[0]), greedy))


def _normalised(logprobs: list[float], temperature: float = 1.0) -> list[float]:
    """Probabilities that add up to 1; equal ones where every choice is impossible."""
    top = max(logprobs)
    if top == -math.inf:
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp((logprob - top) / temperature) for logprob in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _chosen(logprobs: list[float], probs: list[float], request: Request) -> int:
    """The likeliest choice, the first among equals; above temperature 0 a draw by the inverse of the cumulative distribution."""
    params = request.params
    if params.greedy:
        return probs.index(max(probs))
    weights = np.cumsum(_normalised(logprobs, params.temperature))
    key = np.frombuffer(request.key, dtype="<u8").reshape(1, 2)
    zero = np.zeros(1, dtype=np.int64)
    u = uniforms(key, np.array([params.seed], dtype=np.int64), zero, zero)[0]
    return min(int(np.searchsorted(weights, u * weights[-1], side="right")), len(logprobs) - 1)


def token_logprobs(piece: Callable[[int], str], drawn: list[Any], tokens: list[int]) -> tuple[TokenLogprob, ...]:
    """The tokens with their texts, by `piece`; `drawn` holds the numbers of each (`logprobs.TokenLogprobs`)."""
    return tuple(
        TokenLogprob(
            piece(token),
            token,
            numbers.logprob,
            tuple(TokenLogprob(piece(t), t, p) for t, p in zip(numbers.top_ids, numbers.top_logprobs, strict=True)),
        )
        for token, numbers in zip(tokens, drawn, strict=True)
    )
