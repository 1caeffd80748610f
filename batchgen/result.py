"""The result of a row: its completions, its label, its score, or the reason why it failed. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from batchgen.errors import RowError

__all__ = ["Completion", "OnResult", "OnToken", "Result", "Score", "TokenLogprob", "ToolCall", "row_dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass as row_dataclass

    import numpy as np
    from numpy.typing import NDArray
else:

    def row_dataclass(*, frozen: bool, eq: bool = True, **options: Any) -> Callable[[type], type]:
        """Makes a dataclass of which each row needs some objects: it is frozen for the type checker only. Python sets each field of one that is
        frozen with a call, so that an object of 21 fields takes five times as long to make. Hashes are those of a frozen one."""
        return dataclass(eq=eq, unsafe_hash=frozen and eq, **options)


OnResult = Callable[["Result"], None]
"""A function that is called with each result."""
OnToken = Callable[[int, int, int], None]
"""A function that is called with each token that reaches the host: the row, the number of the completion, the token."""


@row_dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability as the model gives it, before penalties, temperature and filters."""

    token: str
    """Its text, with U+FFFD for an incomplete character."""
    token_id: int
    logprob: float
    """Natural logarithm."""
    top: tuple[TokenLogprob, ...] = ()
    """The most likely tokens at this position, the most likely first. Their own `top` is empty."""


_SHOWN_TEXT = 80
_SHOWN_LABELS = 5


def _short_repr(result: Any) -> str:
    """Returns the fields that have another value than their default, in one line: long texts cut, lists by their lengths."""
    values = [(f.name, f.default, getattr(result, f.name)) for f in fields(result)]
    shown = [
        f"{name}={_short_value(value)}"
        for name, default, value in values
        if value is not default and (hasattr(value, "shape") or value != default)
    ]
    return f"{type(result).__name__}({', '.join(shown)})"


def _short_value(value: Any) -> str:
    if isinstance(value, str) and len(value) > _SHOWN_TEXT:
        return f"{value[:_SHOWN_TEXT]!r}… ({len(value):,} characters)"
    if isinstance(value, tuple) or hasattr(value, "shape"):  # an embedding is an array
        return f"<{len(value):,}>"
    if isinstance(value, dict):
        labels = [f"{name!r}: {probability:.3f}" for name, probability in list(value.items())[:_SHOWN_LABELS]]
        return "{" + ", ".join([*labels, *(["…"] if len(value) > _SHOWN_LABELS else [])]) + "}"
    return repr(value)


_REASONS = ("timeout", "cancelled", "length", "repetition", "stop")


@row_dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of one of the row's tools."""

    id: str
    name: str
    arguments: str
    """An object as JSON text."""


@row_dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Completion:
    """One of the completions of a prompt."""

    text: str | None
    """The answer, without the thoughts of a model that marks them; None if the completion was cut inside its thoughts."""
    finish_reason: str
    """stop, length, repetition, timeout or cancelled; empty for a completion that is under way"""
    reasoning: str | None = None
    """The thoughts before the answer; None if there are none."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tool calls in the answer. If there are any, `text` is the rest of the answer."""
    token_ids: tuple[int, ...] = ()
    """The tokens as sampled, including an end token."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One per token id; None if they were not asked for."""
    valid: bool | None = None
    """Whether `text` is JSON that its schema allows; None without a schema."""

    def __repr__(self) -> str:
        return _short_repr(self)


@row_dataclass(frozen=True, slots=True)
class Score:
    """How likely the model finds a given text after its prompt."""

    logprob: float
    """Sum over the text's tokens, natural logarithm."""
    tokens: int
    greedy: bool
    """Whether greedy decoding would have written just that."""


@row_dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Result:
    """The result of one row."""

    row: int
    text: str | None
    """The (first) completion, or the chosen label; None for a row that failed, was only scored or embedded, or was cut inside of its thoughts."""
    finish_reason: str | None
    """stop, length, repetition, timeout, cancelled or error; None for a row that was only scored or embedded"""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Number of tokens of all its completions."""
    reasoning: str | None = None
    """The thoughts before the (first) answer; None if there are none."""
    reasoning_tokens: int = 0
    """Number of completion tokens that belong to thoughts and their marks."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tool calls in the (first) answer. If there are any, `text` is the rest of it."""
    token_ids: tuple[int, ...] = ()
    """The (first) completion's tokens as sampled, an end token included."""
    truncated: bool = False
    valid: bool | None = None
    """That of the (first) completion."""
    completions: tuple[Completion, ...] = ()
    """All completions, if there are several or log-probabilities were asked for; else empty."""
    choice_probs: dict[str, float] | None = None
    """The probability of each label, in the order they were given; with `top_choices`, of the likeliest ones, the likeliest first. All add up to 1, except for a classification head whose labels do not
    exclude each other."""
    score: Score | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each scored token, if they were asked for: of the completion, or of the prompt, whose first token has NaN because nothing
    comes before it."""
    embedding: NDArray[np.float32] | None = field(default=None, compare=False)
    """[size], float32"""
    reward: float | None = None
    """The only logit of a classification head"""
    error_type: str | None = None
    error_message: str | None = None

    def __repr__(self) -> str:
        return _short_repr(self)

    @property
    def unanswered(self) -> bool:
        """Whether the (first) completion ended inside its thoughts."""
        return self.text is None and self.reasoning is not None and not self.tool_calls

    @property
    def reason(self) -> str:
        """Why the row ended: `error`, `timeout`, `cancelled`, `length`, `repetition` or `stop` (the first of these if completions differ), `embedded`, or `scored`."""
        if self.failed:
            return "error"
        if self.finish_reason is not None and not self.completions:
            return self.finish_reason
        reasons = {self.finish_reason, *(c.finish_reason for c in self.completions)}
        otherwise = "scored" if self.embedding is None else "embedded"
        return next((reason for reason in _REASONS if reason in reasons), otherwise)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Numbers of tokens of its completions; empty for a row that failed or generated nothing (labels, scores, embeddings)."""
        if self.completions:
            return tuple(len(completion.token_ids) for completion in self.completions)
        generated = self.finish_reason not in (None, "error") and self.choice_probs is None and self.reward is None
        return (self.completion_tokens,) if generated else ()

    @property
    def failed(self) -> bool:
        """Whether the row has an error instead of a result."""
        return self.error_type is not None

    @classmethod
    def from_error(cls, row: int, error: RowError, prompt_tokens: int = 0) -> Result:
        return cls(
            row=row,
            text=None,
            finish_reason="error",
            prompt_tokens=prompt_tokens,
            error_type=error.type,
            error_message=error.message,
        )
