"""How a completion is drawn, or which texts are scored: the parameters of a row, checked, merged and digested. No torch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

from batchgen.errors import RowError

_WHOLE = ("max_tokens", "top_k", "seed", "n", "logprobs")
_CONSTRAINTS = ("choices", "regex", "json_schema")
_LISTS = ("stop", "stop_token_ids", "choices")
MOST_LOGPROBS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a completion is drawn. Raises `ValueError` naming the parameter when a value is out of range."""

    max_tokens: int = 256
    """Most tokens of a completion, at least 1."""
    temperature: float = 0.0
    """0 is greedy; above, logits are divided by it."""
    top_p: float = 1.0
    """Smallest set of tokens whose probability reaches this, in (0, 1]; 1 is off."""
    top_k: int = 0
    """Most tokens to choose from; 0 is off."""
    min_p: float = 0.0
    """Least probability relative to the likeliest token, in [0, 1]; 0 is off."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of the prompt and the completion become less likely (CTRL, arXiv:1909.05858); 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token that the completion has, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time the completion has it, in [-2, 2]."""
    stop: tuple[str, ...] = ()
    """Strings that end the completion; they are not part of its text."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the completion, besides the model's own."""
    ignore_eos: bool = False
    """Go on at the model's end tokens, up to `max_tokens`."""
    seed: int = 0
    """Seed of the row's random numbers."""
    n: int = 1
    """Completions of the prompt, each with random numbers of its own."""
    logprobs: int | None = None
    """Log-probabilities of each token drawn and of so many likeliest ones (0: the token's alone), as the model gives them, before
    penalties and temperature; None: none."""
    choices: tuple[str, ...] = ()
    """Labels: nothing is generated, each is scored as what follows the prompt; the text is the likeliest (temperature 0) or a draw."""
    regex: str | None = None
    """The completion matches this regular expression as a whole."""
    json_schema: str | None = None
    """The completion is JSON that is valid under this schema, given as JSON text."""

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, what: str) -> None:
            if not ok:
                raise ValueError(f"{name} must be {what}, not {getattr(self, name)!r}")

        for f in fields(self):
            value = getattr(self, f.name)
            if value is None and f.default is None:
                continue
            if f.name in _WHOLE:
                check(f.name, isinstance(value, int) and not isinstance(value, bool), "a whole number")
            elif f.name in ("regex", "json_schema"):
                check(f.name, isinstance(value, str) and value != "", "text that is not empty")
            elif f.name == "ignore_eos":
                check(f.name, isinstance(value, bool), "true or false")
            elif f.name in ("stop", "choices"):
                check(f.name, all(isinstance(s, str) and s for s in value), "non-empty strings")
            elif f.name == "stop_token_ids":
                check(
                    f.name, all(isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in value), "token ids"
                )
            else:
                number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
                check(f.name, number, "a number")
        check("max_tokens", self.max_tokens >= 1, "at least 1")
        check("temperature", self.temperature >= 0, "at least 0")
        check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        check("top_k", self.top_k >= 0, "at least 0")
        check("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        check("repetition_penalty", self.repetition_penalty > 0, "above 0")
        check("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2")
        check("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2")
        check("seed", -(2**63) <= self.seed < 2**63, "a 64-bit number")
        check("n", 1 <= self.n <= 1024, "between 1 and 1024")
        check(
            "logprobs", self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS, f"between 0 and {MOST_LOGPROBS}"
        )
        check("choices", len(set(self.choices)) == len(self.choices) != 1, "two or more different texts")
        self._check_together()

    def _check_together(self) -> None:
        constraints = [name for name in _CONSTRAINTS if getattr(self, name)]
        if len(constraints) > 1:
            raise ValueError(f"{constraints[0]} cannot be combined with {constraints[1]}")
        if self.choices and (self.n > 1 or self.logprobs is not None):
            raise ValueError(f"choices cannot be combined with {'n' if self.n > 1 else 'logprobs'}")
        if self.constrained and (self.stop or self.ignore_eos):
            # A text cut at a stop string, or one that cannot end, would not be what was asked for.
            raise ValueError(f"{constraints[0]} cannot be combined with {'stop' if self.stop else 'ignore_eos'}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def constrained(self) -> bool:
        """Whether a grammar says which tokens may follow."""
        return self.regex is not None or self.json_schema is not None

    def merged(self, row: Mapping[str, Any]) -> SamplingParams:
        """These parameters with a row's own on top; a null keeps the default.

        Raises `RowError("unsupported_parameter")` for an unknown name or a value out of range.
        """
        known = {f.name for f in fields(self)}
        changes: dict[str, Any] = {}
        for name, value in row.items():
            if value is None:
                continue
            name = "stop_token_ids" if name == "stop_token_id" else name
            if name not in known:
                raise RowError("unsupported_parameter", f"unknown parameter {name!r}")
            if name in _LISTS:
                value = tuple(value) if isinstance(value, list | tuple) else (value,)
            elif name == "json_schema" and isinstance(value, Mapping):
                value = json.dumps(value)  # in its own order: that of the properties is the order they are written in
            elif name in _WHOLE and isinstance(value, float) and value.is_integer():
                value = int(value)  # a table's integer column that has nulls arrives as floats
            elif name not in (*_WHOLE, "ignore_eos") and isinstance(value, int):
                value = value if isinstance(value, bool) else float(value)
            changes[name] = value
        if not changes.keys().isdisjoint(_CONSTRAINTS):  # a row's own constraint takes the place of the command's
            changes = {name: None if name != "choices" else () for name in _CONSTRAINTS} | changes
        try:
            return replace(self, **changes)
        except ValueError as e:
            raise RowError("unsupported_parameter", str(e)) from None

    def digest(self) -> bytes:
        """The same for equal parameters, whatever the machine: what goes into a row's key."""
        return _params_digest(self)


@lru_cache(maxsize=1024)  # most rows of a job have the same parameters
def _params_digest(params: SamplingParams) -> bytes:
    return hashlib.blake2b(json.dumps(asdict(params), sort_keys=True).encode(), digest_size=16).digest()


def choices_of(text: str) -> tuple[str, ...]:
    """The choices of a text: separated by commas, blanks around them left out; or a JSON list, taken to the letter.

    Raises `ValueError` for a list that is not JSON.
    """
    if not text.lstrip().startswith("["):
        return tuple(choice.strip() for choice in text.split(","))
    try:
        return tuple(json.loads(text))
    except ValueError as e:
        raise ValueError(f"choices must be separated by commas, or a JSON list: {e}") from None
