"""What goes through the engine: sampling parameters, requests, results. Token ids only; knows nothing of files or text templates."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen.errors import RowError

TokenArray = NDArray[np.int32]


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

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, what: str) -> None:
            if not ok:
                raise ValueError(f"{name} must be {what}, not {getattr(self, name)!r}")

        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("max_tokens", "top_k", "seed"):
                check(f.name, isinstance(value, int) and not isinstance(value, bool), "a whole number")
            elif f.name == "ignore_eos":
                check(f.name, isinstance(value, bool), "true or false")
            elif f.name == "stop":
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

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

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
            if name in ("stop", "stop_token_ids"):
                value = tuple(value) if isinstance(value, list | tuple) else (value,)
            elif name in ("max_tokens", "top_k", "seed") and isinstance(value, float) and value.is_integer():
                value = int(value)  # a table's integer column that has nulls arrives as floats
            elif name not in ("max_tokens", "top_k", "seed", "ignore_eos") and isinstance(value, int):
                value = value if isinstance(value, bool) else float(value)
            changes[name] = value
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A row rendered and tokenized, with the parameters of its completion."""

    row: int
    """The row's number in the input, from 0."""
    tokens: TokenArray
    """The prompt, int32 [prompt length], at least one token."""
    params: SamplingParams
    max_tokens: int
    """`params.max_tokens`, or less where the model's context leaves less room."""
    key: bytes
    """The row key (16 bytes): `row_key` of tokens, parameters and occurrence. Seeds the row's random numbers."""
    truncated: bool = False
    """Whether the prompt was cut to fit the context."""

    @property
    def most_tokens(self) -> int:
        """Most positions that need KV: the last token of a completion is never run."""
        return len(self.tokens) + self.max_tokens - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one row."""

    row: int
    text: str | None
    finish_reason: str
    """stop, length or error"""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    """The completion's tokens as drawn, an end token included."""
    truncated: bool = False
    error_type: str | None = None
    error_message: str | None = None

    @classmethod
    def failed(cls, row: int, error: RowError, prompt_tokens: int = 0) -> Result:
        return cls(
            row=row,
            text=None,
            finish_reason="error",
            prompt_tokens=prompt_tokens,
            error_type=error.type,
            error_message=error.message,
        )


def row_digest(tokens: TokenArray, params: SamplingParams) -> bytes:
    """Digest (16 bytes) of a request's final tokens and effective parameters; equal requests have equal digests."""
    h = hashlib.blake2b(params.digest(), digest_size=16)
    h.update(np.ascontiguousarray(tokens, dtype="<i4").tobytes())
    return h.digest()


def row_key(digest: bytes, occurrence: int) -> bytes:
    """A row's key (16 bytes): its digest and the number (from 0) of its occurrence among equals."""
    if occurrence == 0:
        return digest
    return hashlib.blake2b(digest + occurrence.to_bytes(8, "little"), digest_size=16).digest()
